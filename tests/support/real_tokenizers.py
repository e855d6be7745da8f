"""Mistral's own tokenizers, from the package `mistral-common`: SentencePiece and tiktoken vocabularies."""

import base64
import itertools
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jpaged.tokenizer import backend, load_tokenizer
from tests.support.tokenizer_kinds import LLAMA_SPLIT

FILES = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3", "tekken_240911.json")


def download(folder: Path) -> Path:
    """Return the folder of the package's data."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), "mistral-common"]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "mistral_common" / "data"


def sentencepiece(file: Path, folder: Path) -> tuple[Tokenizer, int]:
    """A tokenizer of a `tokenizer.model`, as Mistral v1 and Llama 2 have it, and its end-of-sequence token."""
    folder.mkdir()
    shutil.copy(file, folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return backend(load_tokenizer(folder)), 2


def tekken(file: Path, *, nfc: bool) -> tuple[Tokenizer, int]:
    """A tokenizer of ranks of bytes, as Mistral Nemo, Llama 3 and, with NFC, Qwen have it, and its end of sequence."""
    content = json.loads(file.read_text())
    size = content["config"]["default_vocab_size"] - content["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in content["vocab"][:size]}
    letters = bytes_to_unicode()
    written = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    pairs = [(written[left], written[right]) for left, right in merges]
    tokenizer = Tokenizer(models.BPE({written[t]: rank for t, rank in ranks.items()}, pairs, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    eos = tokenizer.token_to_id("</s>")
    assert eos is not None
    return tokenizer, eos


def all_of(folder: Path) -> dict[str, tuple[Tokenizer, int]]:
    data, numbers = download(folder), itertools.count()
    old, new, ranks = (data / name for name in FILES)
    return {
        "Mistral v1": sentencepiece(old, folder / str(next(numbers))),
        "Mistral v3": sentencepiece(new, folder / str(next(numbers))),
        "Tekken": tekken(ranks, nfc=False),
        "Tekken with NFC": tekken(ranks, nfc=True),
    }

"""Tokenizers in the forms of the families of models, trained on a page of text."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 900
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def corpus() -> tuple[str, ...]:
    text = (ROOT / "docs" / "server.md").read_text()
    return (*text.splitlines(), '{"name": "Zürich", "größe": [1, 2.5, null, true]} positive negative yes no')


def sentencepiece(
    *, prepend: bool = True, metaspace: bool = False, special: tuple[str, ...] = ("<unk>", "<s>", "</s>"),
    rstrip: bool = False,
) -> Tokenizer:  # fmt: skip
    """BPE with byte fallback. A normalizer (Llama 2), Metaspace (Mistral) or nothing (Gemma) puts a space in front."""
    spaces = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepend else spaces
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+"), "isolated")  # merges stay inside words
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    fields = json.loads(tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps(fields | {"added_tokens": []}))
    tokenizer.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if prepend or metaspace else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    if metaspace:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if rstrip:
        tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[1]} $A", special_tokens=[(special[1], tokenizer.token_to_id(special[1]))]
    )
    return tokenizer


def byte_level(
    *, split: str | None = None, nfc: bool = False, prefix_space: bool = False,
    special: tuple[str, ...] = ("<|begin|>", "<|end|>"), added: tuple[str, ...] = ("<tool_call>", "</tool_call>"),
) -> Tokenizer:  # fmt: skip
    """BPE of bytes, as in GPT-2 (no split), OPT (prefix space), Llama 3 and Qwen (split, NFC)."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None)
    splits = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "jpaged" / "demo" / "model" / "tokenizer.json"))


# By family, each with the text of its end-of-sequence token.
KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "llama2": (sentencepiece, "</s>"),
    "mistral": (functools.partial(sentencepiece, prepend=False, metaspace=True), "</s>"),
    "phi3": (functools.partial(sentencepiece, rstrip=True), "<|end|>"),
    "gemma": (
        functools.partial(sentencepiece, prepend=False, special=("<unk>", "<bos>", "<eos>", "<start_of_turn>")),
        "<eos>",
    ),
    "llama3": (functools.partial(byte_level, split=LLAMA_SPLIT), "<|end|>"),
    "qwen": (
        functools.partial(byte_level, split=LLAMA_SPLIT, nfc=True, special=("<|im_start|>", "<|im_end|>")),
        "<|im_end|>",
    ),
    "gpt2": (byte_level, "<|end|>"),
    "opt": (functools.partial(byte_level, prefix_space=True, special=("<s>", "</s>")), "</s>"),
    "demo": (demo, "<|end|>"),
}  # fmt: skip


@functools.cache
def made(kind: str) -> tuple[Tokenizer, int]:
    """A tokenizer, and the id of its end-of-sequence token."""
    make, eos = KINDS[kind]
    tokenizer = make()
    token = tokenizer.token_to_id(eos)
    assert token is not None
    return tokenizer, token

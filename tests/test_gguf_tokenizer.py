"""Tokenizers from the metadata of files in GGUF."""

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from jpaged.chat import prompt_of
from jpaged.demo import DIRECTORY
from jpaged.gguf_file import open_gguf
from jpaged.gguf_tokenizer import WORDS, load_gguf_tokenizer
from jpaged.models.gguf_config import end_tokens
from jpaged.start.setup import find_tokenizer
from jpaged.tokenizer import encode, load_tokenizer
from tests.support import gguf_models, tokenizer_kinds

TEXTS = (
    *tokenizer_kinds.corpus()[:60],
    "", " ", "  two  spaces", "\n\n\t x\n", "it's 12345 o'clock, isn't it?", "Zürich, 東京 und 🚀👩‍👩‍👧", "a\u0301",
    "<|end|> is text", "\x00", "x" * 300,
)  # fmt: skip


def write(path: Path, *args, **fields):
    """A file with a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    gguf_models.add_tokenizer(writer, *args, **fields)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    return save(writer)


def save(writer: gguf.GGUFWriter):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path):
    return load_gguf_tokenizer(open_gguf(path))


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory):
    return gguf_models.write_demo(tmp_path_factory.mktemp("demo") / "demo.gguf")


def test_byte_level_tokens_are_those_of_the_tokenizer_that_was_written(demo_file):
    expected, tokenizer = load_tokenizer(DIRECTORY), find_tokenizer(str(demo_file))
    for text in TEXTS:
        ids = encode(tokenizer, text, add_special_tokens=False)
        assert ids == encode(expected, text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    for name in ("bos_token", "eos_token", "pad_token", "chat_template"):
        assert getattr(tokenizer, name) == getattr(expected, name)
    assert encode(tokenizer, "Hi") == [tokenizer.bos_token_id, *encode(tokenizer, "Hi", add_special_tokens=False)]
    added, original = (each.backend_tokenizer.get_added_tokens_decoder() for each in (tokenizer, expected))
    assert {i: (a.content, a.special) for i, a in added.items()} == {
        i: (a.content, a.special) for i, a in original.items()
    }


def test_conversations_are_encoded_alike(demo_file):
    talk = [{"role": "user", "content": "What is <|end|>?"}, {"role": "assistant", "content": "A token."}]
    expected, tokenizer = load_tokenizer(DIRECTORY), load(demo_file)
    assert prompt_of(tokenizer, talk) == prompt_of(expected, talk)


def test_ends_of_answers_are_found(demo_file, tmp_path):
    """Most files name only one end token; others have a type and a known text."""
    tokens = ["<s>", "</s>", "<end_of_turn>", "<|eot_id|>", "<|im_end|>", "a", "<EOT>"]
    kinds = [3, 3, 3, 3, 1, 1, 3]
    write(tmp_path / "a.gguf", "llama", tokens, kinds, eos_token_id=1, eot_token_id=6)
    assert end_tokens(open_gguf(tmp_path / "a.gguf")) == [1, 6, 3, 2]  # a normal token may be text
    assert end_tokens(open_gguf(demo_file)) == [1]


CUTS = {
    "smollm": ("it's 12 x", ["it", "'s", " ", "1", "2", " x"]),
    "gpt-2": ("it's 12 x", ["it", "'s", " 12", " x"]),
    "llama-bpe": ("IT'S 12345 x!\n\n y", ["IT", "'S", " ", "123", "45", " x", "!\n\n", " y"]),
    "qwen2": ("IT'S 12 x!\n\n y", ["IT", "'S", " ", "1", "2", " x", "!\n\n", " y"]),
    "gpt-4o": ("HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
    "tekken": ("HelloWorld's 12/\n", ["Hello", "World", "'s", " ", "1", "2", "/\n"]),
    "glm4": ("It's 12345\n", ["It", "'s", " ", "123", "45", "\n"]),
    "qwen35": ("IT'S 12 e\u0301!\n", ["IT", "'S", " ", "1", "2", " e\u0301", "!\n"]),
    "seed-coder": ("It's 12 x!\n", ["It", "'s", " ", "1", "2", " x", "!", "\n"]),
    "deepseek-llm": ("It's 123 天x!\n", ["It", "'", "s", " ", "123", " ", "天", "x", "!", "\n"]),
    "deepseek-coder": ("It's 123 天x!\n", ["It", "'", "s", " ", "1", "2", "3", " ", "天", "x", "!", "\n"]),
    "deepseek-v3": ("It's 12345 天x!\n", ["It", "'s", " ", "123", "45", " ", "天", "x", "!\n"]),
    "default": ("it's $12345", ["it", "'", "s", " ", "$", "123", "45"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_texts_are_cut_into_words(name, demo_file, tmp_path):
    text, expected = CUTS[name]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    gguf_models.add_byte_level(writer, DIRECTORY, name)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    save(writer)
    cut = load(tmp_path / "model.gguf").backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == expected
    assert WORDS[name].adds_bos == (name in ("llama-bpe", "tekken"))


def test_decomposed_letters_are_composed_for_qwen(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    gguf_models.add_byte_level(writer, DIRECTORY, "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    save(writer)
    tokenizer = load(tmp_path / "model.gguf")
    assert encode(tokenizer, "a\u0301") == encode(tokenizer, "\u00e1")


def merged(text: str, scores: dict[str, float], byte_tokens: dict[int, int], ids: dict[str, int]) -> list[int]:
    """SentencePiece's BPE, one merge after the other: the first neighbours with the highest score together."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [byte_tokens[byte] for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_scores(prefix, tmp_path):
    trained: Tokenizer = tokenizer_kinds.sentencepiece(prepend=prefix)
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if i < 3 else 6 if token.startswith("<0x") else 1 for i, token in enumerate(tokens)]
    kinds[0], scores = 2, [-float(i) for i in range(len(tokens))]
    tokens[-1], kinds[-1] = "\n\n", 4  # a token of users, which is found in the text before all merges
    write(
        tmp_path / "model.gguf", "llama", tokens, kinds, scores=scores, unknown_token_id=0, bos_token_id=1,
        eos_token_id=2, add_space_prefix=prefix,
    )  # fmt: skip
    tokenizer = load(tmp_path / "model.gguf")
    ids = {token: i for i, token in enumerate(tokens)}
    bytes_of = {int(token[3:5], 16): i for token, i in ids.items() if token.startswith("<0x")}
    ordinary = {token: scores[i] for token, i in ids.items() if kinds[i] == 1}
    normal = {token: i for token, i in ids.items() if kinds[i] == 1}
    for text in TEXTS:
        expected = []
        for number, piece in enumerate(text.split("\n\n")):
            expected += [ids["\n\n"]] * (number > 0)
            piece = ("▁" if prefix and piece else "") + piece.replace(" ", "▁")
            expected += merged(piece, ordinary, bytes_of, normal)
        assert encode(tokenizer, text, add_special_tokens=False) == expected, text
        if "\x00" not in text:
            assert tokenizer.decode(expected, skip_special_tokens=False) == text or "\n\n" in text
    assert encode(tokenizer, "Hi")[0] == 1 and tokenizer.eos_token == "</s>"


def test_control_tokens_are_not_merged_from_text(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "/", "▁"]
    write(
        tmp_path / "model.gguf", "llama", tokens, [2, 3, 3, 1, 1, 1, 1, 1, 1], scores=[0.0] * 9, add_space_prefix=False
    )
    tokenizer = load(tmp_path / "model.gguf").backend_tokenizer
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>", add_special_tokens=False).tokens == ["<s", ">"]


def test_phi3_strips_spaces_behind_its_special_tokens(tmp_path):
    tokens, kinds = ["<unk>", "<s>", "</s>", "<|user|>", "▁", "a"], [2, 3, 3, 3, 1, 1]
    for architecture, expected in (("phi3", [3, 5]), ("llama", [3, 4, 5])):
        path = tmp_path / f"{architecture}.gguf"
        write(path, "llama", tokens, kinds, architecture=architecture, scores=[0.0] * 6, add_space_prefix=False)
        assert encode(load(path), "<|user|> a", add_special_tokens=False) == expected


def test_templates_have_names(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    gguf_models.add_tokenizer(writer, "llama", ["<unk>", "<s>", "</s>"], [2, 3, 3])
    writer.add_chat_template([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    save(writer)
    assert load(tmp_path / "model.gguf").chat_template == {"default": "A", "tool_use": "B"}


def test_a_file_may_have_no_tokenizer(tmp_path):
    write(tmp_path / "none.gguf", "no_vocab", ["a"], [1])
    assert load(tmp_path / "none.gguf") is None


FAULTS = {
    "model": (("bert", ["a"], [1]), {}, "tokenizer.ggml.model: 'bert' is not supported; supported: gpt2, llama"),
    "pre": (("gpt2", ["a"], [1]), {"pre": "x", "merges": ["a a"]}, "tokenizer.ggml.pre: 'x' is not supported; support"),
    "merges": (("gpt2", ["a"], [1]), {"pre": "gpt-2"}, "tokenizer.ggml.merges: is missing or empty"),
    "merge": (("gpt2", ["a"], [1]), {"merges": ["a b"]}, "tokenizer.ggml.merges: 'a b' must be two tokens"),
    "merge without a space": (("gpt2", ["a"], [1]), {"merges": ["a"]}, "tokenizer.ggml.merges: 'a' must be two"),
    "types": (("llama", ["a", "b"], [1]), {}, "tokenizer.ggml.token_type: must have one item for each of 2 tokens"),
    "scores": (("llama", ["a"], [1]), {"scores": [1.0, 2.0]}, "tokenizer.ggml.scores: must have one item for"),
    "same tokens": (("llama", ["a", "a"], [1, 1]), {}, "tokenizer.ggml.tokens: must be different texts"),
    "special": (("llama", ["a"], [1]), {"bos_token_id": 7}, "tokenizer.ggml.bos_token_id: must be a token, from 0"),
    "flag": (("llama", ["a"], [1]), {"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: must be true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_with_the_file_and_the_field(name, tmp_path):
    args, fields, message = FAULTS[name]
    write(tmp_path / "model.gguf", *args, **fields)
    with pytest.raises(ValueError, match=f"^model: {tmp_path}/model.gguf: {message}"):
        load(tmp_path / "model.gguf")

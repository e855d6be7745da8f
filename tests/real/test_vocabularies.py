"""Real vocabularies in GGUF: texts have the ids that llama.cpp states beside them, and come back from these."""

import unicodedata

import pytest

from jpaged.gguf_file import open_gguf
from jpaged.gguf_tokenizer import load_gguf_tokenizer
from jpaged.tokenizer import backend
from tests.real.sources import LLAMA_CPP

pytestmark = [pytest.mark.real]

NAMES = (
    "command-r", "deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35",
    "refact", "starcoder",
)  # fmt: skip
COMPOSED = ("qwen2", "qwen35")  # as by the models' own tokenizers, and not by llama.cpp
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_ids_of_llama_cpp(name):
    file = LLAMA_CPP.folder("vocabularies") / f"{name}.gguf"
    tokenizer = backend(load_gguf_tokenizer(open_gguf(file)))
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = file.with_suffix(".gguf.out").read_text().split("\n")
    wanted = [[int(token) for token in line.split()] for line in lines]
    assert len(texts) == len(wanted) > 40
    for text, ids in zip(texts, wanted, strict=True):
        composed = unicodedata.normalize("NFC", text)
        if name not in COMPOSED or composed == text:
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        assert decoded == (composed if name in COMPOSED else text)

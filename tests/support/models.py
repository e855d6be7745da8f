"""A byte tokenizer and a tiny model for it."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.checkpoints import BASE

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
EOS = 256
VOCAB = 256 + len(SPECIAL)
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
TINY = BASE | {"vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 512}


def byte_tokenizer() -> Tokenizer:
    """One token per byte, ids 0..255 in byte order as far as the byte-level alphabet goes, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))

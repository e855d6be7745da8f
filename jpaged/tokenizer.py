"""Tokenizer: loading, and decoding token by token."""

import codecs
import copy
import importlib.metadata
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from jpaged.checkpoint_files import check_folder, check_tree

CALL_TAGS = ("<tool_call>", "</tool_call>")  # around tool calls, which some tokenizers have as special tokens
REPLACEMENT = "\ufffd"
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte in tokenizers with byte fallback
# Bytes as characters in byte-level tokenizers: the printable ones of Latin-1 as themselves, then the others in order.
_ALPHABET = sorted(ByteLevel.alphabet())
BYTE_LEVEL = dict(zip(_ALPHABET, sorted(range(256), key=lambda byte: (chr(byte) not in _ALPHABET, byte))))
SENTENCEPIECE = "tokenizer.model"  # in SentencePiece's form, or, more rarely, in tiktoken's
TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = ("tokenizer.json", SENTENCEPIECE, "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")
OTHER_FILES = (
    "config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model's directory has any file of a tokenizer."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(directory: Path) -> Any:
    """Return the Hugging Face tokenizer of a model's directory.

    Code in the directory is not run, whatever its files ask for.

    Raises:
        ValueError: there is no tokenizer, it has no implementation in Rust, it needs code of the checkpoint, or a file
            may not be opened.
    """
    check_folder(directory, (*TOKENIZER_FILES, *OTHER_FILES), field="tokenizer")
    if (directory / TEMPLATES).is_dir():
        check_tree(directory / TEMPLATES, field="tokenizer")
    # transformers would warn that torch is missing; jpaged does not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if missing := _missing_packages(directory):
        file = directory / SENTENCEPIECE
        raise ValueError(f"tokenizer: {file} needs packages that are not installed: pip install {' '.join(missing)}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        inner = backend(tokenizer)
        # tokenizer.json may ask for truncation and padding; prompts are never truncated or padded.
        inner.no_truncation()
        inner.no_padding()
        inner.decode(inner.encode("Once upon a time").ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a broken tokenizer raises anything, also a panic in Rust
        reason = str(error)[:1000]
        if "trust_remote_code" in reason:
            reason = "it needs code of the checkpoint (auto_map in tokenizer_config.json), which is not run"
        raise ValueError(f"tokenizer: the tokenizer of {directory} can't be loaded: {reason}") from error
    return tokenizer


def _missing_packages(directory: Path) -> list[str]:
    """Return the missing packages that a tokenizer.model needs: the error of transformers always names tiktoken."""
    file = directory / SENTENCEPIECE
    if (directory / "tokenizer.json").is_file() or not file.is_file():
        return []
    # SentencePiece's is a protocol buffer whose first field is a message (tag 0x0A); tiktoken's is lines of base64.
    with file.open("rb") as content:
        is_protobuf = content.read(1) == b"\n"
    packages = ("sentencepiece", "protobuf") if is_protobuf else ("tiktoken",)
    return [name for name in packages if not list(importlib.metadata.distributions(name=name))]


def backend(tokenizer: Any) -> Tokenizer:
    """Return the `tokenizers.Tokenizer` inside a Hugging Face tokenizer, or the tokenizer itself if it is one."""
    inner = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(inner, Tokenizer):
        raise ValueError(f"tokenizer: {type(tokenizer).__name__} has no tokenizers.Tokenizer inside")
    return inner


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a prompt, by default with the special tokens that the tokenizer adds."""
    return encode_all(tokenizer, [text], add_special_tokens=add_special_tokens)[0]


def encode_all(tokenizer: Any, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Return the token ids of each text, as `encode` does."""
    # Unlike encode(), this lets other threads run meanwhile, and computes no offsets.
    encodings = backend(tokenizer).encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


def tokenize_bad_words(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the start of a text and inside one."""
    forms = dict.fromkeys(form for word in words for form in (word.lstrip(), " " + word.lstrip(), word))
    ids = encode_all(tokenizer, list(forms), add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(word) for word in ids if word))


class _Each[Value](dict[int, Value]):
    """Values of tokens, each computed once: lists of logprobs ask for the same ones again and again."""

    def __init__(self, compute: Callable[[int], Value]):
        self._compute = compute

    def __missing__(self, token: int) -> Value:
        value = self[token] = self._compute(token)
        return value


class Vocabulary:
    """Single tokens, as text and as bytes. Without a tokenizer their text is `token_id:ID`, as in vLLM.

    Both are what a token adds after other text: the bytes of a sequence's tokens, joined, are its text. Only at the
    start of a text may the tokenizer leave out the first token's space.

    Attributes:
        texts: the text of each token, with U+FFFD for a part of a character, decoded when it is first read.
        special: ids of the special tokens, without the tags of tool calls, which are text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.texts = _Each(lambda t: self.bytes(t).decode(errors="replace") if tokenizer else f"token_id:{t}")
        bytes_of = lambda t: _exact(tokenizer, t, _decode(tokenizer, t), _decode(tokenizer, t, t)) if tokenizer else b""
        self._bytes = _Each(bytes_of)
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special = frozenset(t for t, text in added.items() if text.special and text.content not in CALL_TAGS)

    def text(self, token: int) -> str:
        """Return a token's text, with U+FFFD for a part of a character."""
        return self.texts[token]

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        text = _decode(self.tokenizer, token) if self.tokenizer else ""
        return self.bytes(token) if REPLACEMENT in text else text.encode()

    def bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be a part of a character; no bytes without a tokenizer."""
        return self._bytes[token]

    @cached_property
    def longest(self) -> int:
        """Upper bound of the characters of a token."""
        assert self.tokenizer is not None, "there are texts only with a tokenizer"
        return max(map(len, self.tokenizer.get_vocab()))


def all_bytes(tokenizer: Tokenizer, num_tokens: int) -> list[bytes]:
    """Return the bytes of the first tokens, as `Vocabulary.bytes` does, in a fraction of the time."""
    once = tokenizer.decode_batch([[token] for token in range(num_tokens)], skip_special_tokens=False)
    twice = tokenizer.decode_batch([[token, token] for token in range(num_tokens)], skip_special_tokens=False)
    return [_exact(tokenizer, token, *texts) for token, texts in enumerate(zip(once, twice))]


def _exact(tokenizer: Tokenizer, token: int, first: str, both: str) -> bytes:
    """Return the bytes of a token that follows others.

    Args:
        first: text of the token at the start of a text.
        both: text of the token twice, at the start of a text.
    """
    if REPLACEMENT in both:
        piece = tokenizer.id_to_token(token) or ""
        if byte := BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if BYTE_LEVEL.keys() >= set(piece):
            return bytes(BYTE_LEVEL[character] for character in piece)
    return (both[len(first) :] if both.startswith(first) else first).encode()


def _decode(tokenizer: Tokenizer, *tokens: int) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


class TokenDecoder:
    """Incremental decoder of one sequence's tokens. Bytes of an incomplete character wait until it is complete.

    Bytes that can't be text become U+FFFD, as by `bytes.decode(errors="replace")`.

    Args:
        prompt_token_ids: the tokens before the decoded ones.
        shown: special tokens that are text nevertheless.
        keeps_first_space: keep a space that the tokenizer would leave out at the start of a text.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(), keeps_first_space: bool = False,
    ):  # fmt: skip
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special - shown if skip_special_tokens else frozenset()
        self._is_first = not keeps_first_space and all(map(self._is_empty, prompt_token_ids))
        self._waiting = b""

    def step(self, token: int) -> str:
        """Add one token and return the text that it completes."""
        if token in self._skipped:
            return ""
        data = self._vocabulary.bytes(token)
        if self._is_first and data:
            data, self._is_first = self._vocabulary.first_bytes(token), False
        text, used = codecs.utf_8_decode(self._waiting + data, "replace")
        self._waiting = (self._waiting + data)[used:]
        return text

    def _is_empty(self, token: int) -> bool:
        return token in self._skipped or not self._vocabulary.bytes(token)


class Decoded(NamedTuple):
    """Text that no later token changes, and the stop string that ended it, if there is one."""

    text: str
    stop: str | None = None


class StopStrings:
    """Stop strings of one request."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=1) - 1
        # By the last character. Most tokens contain none of them, and are then compared with no string.
        self._ending_in = {last: tuple(s for s in strings if s[-1] == last) for last in {s[-1] for s in strings}}

    def find(self, text: str, known: int = 0) -> tuple[int, str] | None:
        """Return the first stop string in a text and its place, or None.

        No stop string ends in the first `known` characters.
        """
        ending_in = self._ending_in
        if not any(
            last in ending_in and text.endswith(ending_in[last], 0, end)
            for end, last in enumerate(text[known:], known + 1)
        ):
            return None
        return min(((at, stop) for stop in self._strings if (at := text.find(stop)) >= 0), default=None)

    def begun(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(stop[:length] for stop in self._strings for length in range(1, len(stop)))


class Detokenizer:
    """Incremental decoder of one sequence's tokens up to a stop string.

    Text that may still become a stop string is held back, and a part of one is never returned.
    """

    def __init__(self, decoder: TokenDecoder, *, stop: Sequence[str] = (), include_stop: bool = False):
        self._decoder = decoder
        self._stop = StopStrings(stop)  # shared by copies
        self._include_stop = include_stop
        self._held = ""

    def __copy__(self) -> "Detokenizer":
        """Return a copy for a branch that continues from here."""
        other = object.__new__(Detokenizer)
        other.__dict__.update(self.__dict__, _decoder=copy.copy(self._decoder))
        return other

    def step(self, token: int, *, may_stop: bool = True) -> Decoded:
        """Add one token and return the text that no later token changes."""
        known = len(self._held)
        self._held += self._decoder.step(token)
        if not may_stop:
            return Decoded(self.flush())
        if hit := self._stop.find(self._held, known):
            at, stop = hit
            text = self._held[: at + len(stop) if self._include_stop else at]
            self._held = ""
            return Decoded(text, stop)
        certain = len(self._held) - self._stop.begun(self._held)
        text, self._held = self._held[:certain], self._held[certain:]
        return Decoded(text)

    def flush(self) -> str:
        """Return the text that was held back for a stop string. Bytes of an unfinished character are not text."""
        text, self._held = self._held, ""
        return text

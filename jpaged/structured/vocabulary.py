"""Tokens of a model as llguidance needs them: their bytes, and the tokens of any bytes."""

from collections.abc import Iterator

from llguidance import LLTokenizer
from tokenizers import Tokenizer

# A character that stands in front of a text while it is encoded. What a tokenizer puts before a text, or strips from
# its beginning, then concerns this character only. No tokenizer merges it with others.
BEFORE = "\x02"


class ExactVocabulary:
    """Tokenizer in the form of llguidance's `TokenizerWrapper`.

    The tokens of a text have exactly the text's bytes, whatever the tokenizer's normalizer does. They are those of the
    tokenizer wherever these have the bytes. By itself, llguidance would treat every added token like <this> as a
    special one, and never allow it in a text, not even the tags around a tool call.

    Args:
        vocab_size: size of the model's vocabulary. Tokens of the tokenizer beyond it are left out.
        eos_token_ids: tokens that end a complete text.

    Raises:
        ValueError: llguidance does not understand the tokenizer, or some byte has no token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        num_tokens = max(vocab_size, tokenizer.get_vocab_size())
        source = LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = [source.decode_bytes([token]) for token in range(vocab_size)]
        self.special_token_ids = [token for token, text in added.items() if text.special and token < vocab_size]
        self.bos_token_id, self.eos_token_id = None, eos_token_ids[0]
        special = frozenset(self.special_token_ids)
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(self.tokens):
            if text and token not in special:
                self._ids.setdefault(text, token)
        self._longest = max(map(len, self._ids))
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # as plain text
        self._before = self._encode(BEFORE)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        wanted = text.encode()
        if self._are(tokens := self._encode(text), wanted) or self._are(tokens := self._behind(text), wanted):
            return tokens
        return list(self._greedy(wanted))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _behind(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one."""
        tokens, length = self._encode(BEFORE + text), len(self._before)
        return tokens[length:] if tokens[:length] == self._before else []

    def _are(self, tokens: list[int], text: bytes) -> bool:
        ids, size = self._ids, len(self.tokens)
        return all(token < size and self.tokens[token] in ids for token in tokens) and text == b"".join(
            self.tokens[token] for token in tokens
        )

    def _greedy(self, text: bytes) -> Iterator[int]:
        """Yield the longest token at each place."""
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next(end for end in ends if text[at:end] in self._ids)
            yield self._ids[text[at:end]]
            at = end

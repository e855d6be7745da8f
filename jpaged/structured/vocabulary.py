"""Tokens of a model in the form that llguidance needs."""

from collections.abc import Iterator

from tokenizers import Tokenizer

from jpaged.tokenizer import Vocabulary, all_bytes

# A character in front of a text while it is encoded. A space that a tokenizer adds to the beginning of a text, or
# strips from it, then concerns this character only. No tokenizer merges it with others.
BEFORE = "\x02"


class GrammarVocabulary:
    """Tokenizer in the form of llguidance's `TokenizerWrapper`.

    The tokens of a text have exactly the text's bytes, even if the tokenizer's normalizer would change the text: they
    are the tokenizer's tokens if these have the bytes. llguidance's own wrapper would treat every added token like
    <this> as a special one, and never allow it in a text, not even the tags around a tool call.

    Args:
        vocab_size: size of the model's vocabulary. Tokens of the tokenizer beyond it are left out.
        eos_token_ids: tokens that end a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        vocabulary = Vocabulary(tokenizer)
        self.tokens = all_bytes(tokenizer, vocab_size)
        self.special_token_ids = [token for token in sorted(vocabulary.special) if token < vocab_size]
        self.bos_token_id, self.eos_token_id = None, eos_token_ids[0]
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in vocabulary.special}
        self._longest = max(map(len, self._ids))
        self._special = vocabulary.special
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # as plain text
        self._before = self._encode(BEFORE)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another one."""
        wanted, length = text.encode(), len(self._before)
        tokens = self._encode(BEFORE + text)
        if tokens[:length] == self._before and self._are(tokens[length:], wanted):
            return tokens[length:]
        return list(self._greedy(wanted))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _are(self, tokens: list[int], text: bytes) -> bool:
        size = len(self.tokens)
        if any(token >= size or token in self._special for token in tokens):
            return False
        return text == b"".join(map(self.tokens.__getitem__, tokens))

    def _greedy(self, text: bytes) -> Iterator[int]:
        """Yield the longest token at each place, up to a byte that no token begins with."""
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return
            yield self._ids[text[at:end]]
            at = end

"""Tokens of a model in the form that llguidance needs."""

from collections.abc import Iterator

from tokenizers import Tokenizer

from jpaged.tokenizer import Vocabulary


class GrammarVocabulary:
    """Tokenizer in the form of llguidance's `TokenizerWrapper`.

    By itself, llguidance would treat every added token like <this> as a special one, and never allow it in a text, not
    even the tags around a tool call.

    Args:
        vocab_size: size of the model's vocabulary. Tokens of the tokenizer beyond it are left out.
        eos_token_ids: tokens that end a complete text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        vocabulary = Vocabulary(tokenizer)
        self.tokens = [vocabulary.bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in sorted(vocabulary.special) if token < vocab_size]
        self.bos_token_id, self.eos_token_id = None, eos_token_ids[0]
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in vocabulary.special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return tokens with exactly the bytes of a text, whatever the tokenizer's normalizer would do."""
        return list(self._greedy(text.encode()))

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

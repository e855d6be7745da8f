"""Tokens of a model as llguidance needs them."""

from collections.abc import Iterator

from llguidance import LLTokenizer
from tokenizers import Tokenizer


class Vocabulary:
    """Tokenizer in the form of llguidance's `TokenizerWrapper`.

    By itself, llguidance would treat every added token like <this> as a special one, and never allow it in a text, not
    even the tags around a tool call.

    Args:
        vocab_size: size of the model's vocabulary. Tokens of the tokenizer beyond it are left out.
        eos_token_ids: tokens that end a complete text.

    Raises:
        ValueError: llguidance does not understand the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        num_tokens = max(vocab_size, tokenizer.get_vocab_size())
        source = LLTokenizer(tokenizer.to_str(), n_vocab=num_tokens, eos_token=eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = [source.decode_bytes([token]) for token in range(vocab_size)]
        self.special_token_ids = [token for token, text in added.items() if text.special and token < vocab_size]
        self.bos_token_id, self.eos_token_id = None, eos_token_ids[0]
        special = frozenset(self.special_token_ids)
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Return tokens with exactly the bytes of a text, whatever the tokenizer's normalizer would do."""
        return list(self._greedy(text.encode()))

    def _greedy(self, text: bytes) -> Iterator[int]:
        """Yield the longest token at each place."""
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return
            yield self._ids[text[at:end]]
            at = end

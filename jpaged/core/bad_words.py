"""Token sequences that an output may not hold, indexed so that a step need not compare them one by one."""

from collections.abc import Iterable, Sequence


class BadWords:
    """The bad words of one request.

    A word of one token is forbidden at any place, which a bias on its logit expresses. A longer word forbids its last
    token wherever the output ends with the tokens before it.

    Attributes:
        single_tokens: the words of one token.
    """

    def __init__(self, words: Iterable[tuple[int, ...]] = ()):
        words = set(words)
        self.single_tokens = sorted(word[0] for word in words if len(word) == 1)
        last_tokens: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if len(word) > 1:
                last_tokens.setdefault(word[:-1], set()).add(word[-1])
        self._last_tokens = {prefix: frozenset(tokens) for prefix, tokens in last_tokens.items()}
        self._lengths = sorted({len(prefix) for prefix in self._last_tokens})

    def __bool__(self) -> bool:
        return bool(self.single_tokens or self._last_tokens)

    def next_tokens(self, tokens: Sequence[int], num_output_tokens: int) -> frozenset[int]:
        """Return the tokens that would complete a bad word; after one prefix always the same object.

        Args:
            tokens: the sequence so far. Only its last `num_output_tokens` are searched, as in vLLM.
        """
        forbidden: frozenset[int] = frozenset()
        for length in self._lengths:
            if length > num_output_tokens:
                break
            if found := self._last_tokens.get(tuple(tokens[-length:])):
                forbidden = forbidden | found if forbidden else found
        return forbidden

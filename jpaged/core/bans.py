"""The tokens that an output may not have next: the ends of bad words, and of the text before its minimum length."""

from collections.abc import Iterable, Sequence


class Bans:
    """The banned tokens of one request. Bad words are indexed, so that a step does not compare them one by one.

    A word of one token is banned at any place, which a bias on its logit expresses. A longer word bans its last token
    wherever the output ends with the tokens before it. As in vLLM, only the output is searched.

    Args:
        words: the token sequences that the output may not hold.
        endings: tokens that end the text, banned before `min_tokens`.

    Attributes:
        single_tokens: the words of one token.
        follow_output: whether bans depend on the tokens of the output, not on its length alone.
    """

    def __init__(self, words: Iterable[tuple[int, ...]] = (), endings: Iterable[int] = (), min_tokens: int = 0):
        words = set(words)
        self.single_tokens = tuple(sorted(word[0] for word in words if len(word) == 1))
        last_tokens: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if len(word) > 1:
                last_tokens.setdefault(word[:-1], set()).add(word[-1])
        self._last_tokens = {prefix: frozenset(tokens) for prefix, tokens in last_tokens.items()}
        self._lengths = sorted({len(prefix) for prefix in self._last_tokens})
        self._endings, self._min_tokens = frozenset(endings), min_tokens
        self.follow_output = bool(last_tokens)

    def __bool__(self) -> bool:
        """Whether any token may ever be banned by a mask."""
        return self.follow_output or self._min_tokens > 0

    def next_tokens(self, tokens: Sequence[int], num_output_tokens: int) -> frozenset[int]:
        """Return the tokens that may not come next; in one situation always the same object, so that its mask is made
        once for a step.

        Args:
            tokens: the sequence so far, of which the last `num_output_tokens` are output. Tokens that are not known yet
                count as output, and may be left out where `follow_output` is False.
        """
        banned: frozenset[int] = frozenset()
        for length in self._lengths:
            if length > num_output_tokens:
                break
            if found := self._last_tokens.get(tuple(tokens[-length:])):
                banned = banned | found if banned else found
        if num_output_tokens < self._min_tokens:
            banned = banned | self._endings if banned else self._endings
        return banned

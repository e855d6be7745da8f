"""Tokens that an output must not have next: the last tokens of bad words, and end tokens before the minimum length."""

import sys
from collections.abc import Iterable, Sequence

from jpaged.core.params import InvalidParameter


class Bans:
    """Banned tokens of one request. Bad words are indexed: a step does not compare them one by one.

    A bad word of one token is banned at any place, by a bias on its logit. A longer one bans its last token wherever
    the output ends with the tokens before it. As in vLLM, only the output is searched.

    Args:
        words: the token sequences that the output must not contain.
        endings: tokens that end the text, banned before `min_tokens`.
        allowed: the only tokens that the output may have; None: all of the vocabulary.

    Attributes:
        single_tokens: the words of one token.
        follow_output: whether bans depend on the tokens of the output, and not only on its length.

    Raises:
        InvalidParameter: no token is left for the first place or, before `min_tokens`, for any.
    """

    def __init__(
        self,
        words: Iterable[tuple[int, ...]] = (),
        endings: Iterable[int] = (),
        min_tokens: int = 0,
        *,
        allowed: Iterable[int] | None = None,
        vocab_size: int = sys.maxsize,
    ):
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
        self._allowed = None if allowed is None else frozenset(allowed).difference(self.single_tokens)
        self._num_left = vocab_size - len(self.single_tokens) if self._allowed is None else len(self._allowed)
        if not self._num_left:
            raise InvalidParameter("bad_words", "ban all of the allowed tokens")
        if min_tokens and self.leave_none((), 0):
            raise InvalidParameter("min_tokens", "must be 0, because each of the allowed tokens ends the text")

    def __bool__(self) -> bool:
        """Return whether a mask may ever ban a token."""
        return self.follow_output or self._min_tokens > 0

    def leave_none(self, tokens: Sequence[int], num_output_tokens: int) -> bool:
        """Return whether no token is left that may come next, with the arguments of `next_tokens`."""
        banned = self.next_tokens(tokens, num_output_tokens)
        if len(banned) < self._num_left:
            return False
        if self._allowed is not None:
            return self._allowed <= banned
        return len(banned.difference(self.single_tokens)) >= self._num_left

    def next_tokens(self, tokens: Sequence[int], num_output_tokens: int) -> frozenset[int]:
        """Return the tokens that must not come next.

        Equal situations return the same object, so that a step creates its mask only once.

        Args:
            tokens: the sequence so far; its last `num_output_tokens` are output. Tokens that are not known yet count as
                output, and may be missing if `follow_output` is False.
        """
        banned: frozenset[int] = frozenset()
        for length in self._lengths:
            if length > num_output_tokens:
                break
            if last_tokens := self._last_tokens.get(tuple(tokens[-length:])):
                banned = banned | last_tokens if banned else last_tokens
        if num_output_tokens < self._min_tokens:
            banned = banned | self._endings if banned else self._endings
        return banned

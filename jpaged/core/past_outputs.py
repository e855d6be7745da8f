"""Past outputs of the engine, searched for the tokens that may come next in another output.

The search has the results of a suffix tree (SuffixDecoding, arXiv:2411.04975): the places after the longest match of
the last tokens, and the tokens that follow there. A tree would have a node for every token and every depth. Here, the
places after the same two tokens form a list in the order of the text before them, read backwards. The places with the
longest match are neighbours in it.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.config import Speculation
from jpaged.core.block_pool import BlockPool
from jpaged.core.drafts import NOTHING, Found
from jpaged.core.prefix_tree import common_length

MAX_TOKENS = 2**18  # of past outputs
INDEXED_AT_ONCE = 256  # tokens: the index of a long output grows in several searches
VOTERS = 8  # most places on either side of a match that are compared
END = -1  # stands after each output, and is no token

Key = tuple[str | int, ...]  # a salt, and the tokens before a place


class _Output(NamedTuple):
    """Output in the stream. `start` and `stop` are its places."""

    salt: str
    start: int
    stop: int


class PastOutputs:
    """Outputs of the present epoch of the prefix cache. The oldest are forgotten first.

    A place is the number of tokens before it in the stream of all outputs ever added.

    Args:
        pool: the pool whose epoch counts.
        max_tokens: maximum tokens of all outputs, with the ends of their prompts.
    """

    def __init__(self, settings: Speculation, pool: BlockPool, max_tokens: int = MAX_TOKENS):
        self._longest, self._shortest = settings.longest, settings.shortest
        self._max_outputs, self._max_tokens, self._least_share = settings.outputs, max_tokens, settings.least_share
        self._pool = pool
        self._forget_all()

    def _forget_all(self) -> None:
        self._epoch = self._pool.epoch
        self._base = 0  # place of the first token in the stream
        self._stream = [END] * self._longest  # the first output has tokens before it, too
        self._outputs: deque[_Output] = deque()
        self._waiting: deque[_Output] = deque()  # outputs of which tokens are not indexed
        self._indexed = 0  # no place from this one on is indexed
        self._places: dict[Key, list[int]] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept, with an end of each output."""
        return len(self._stream) - self._longest

    @property
    def epoch(self) -> int:
        """Epoch of the outputs. Those of earlier ones are forgotten here."""
        if self._epoch != self._pool.epoch:
            self._forget_all()
        return self._epoch

    def add(self, salt: str, epoch: int, tokens: Sequence[int], start: int) -> None:
        """Add the output `tokens[start:]`, unless its request came in an earlier epoch.

        A match may begin in the text before it.
        """
        if epoch != self.epoch:
            return
        before = tokens[max(0, start - self._longest) : start]
        first = self._base + len(self._stream) + len(before)
        output = _Output(salt, first, first + len(tokens) - start)
        self._stream += [*before, *tokens[start:], END]
        self._outputs.append(output)
        self._waiting.append(output)
        while self._outputs and (len(self._outputs) > self._max_outputs or self.num_tokens > self._max_tokens):
            self._forget_oldest()

    def following(self, salt: str, tokens: Sequence[int], most: int) -> Found:
        """Return the tokens that followed the longest match of the last tokens most often, at most `most`."""
        if self._epoch != self._pool.epoch:
            self._forget_all()
        self._index_more()
        places = self._places.get((salt, *tokens[-self._shortest :]))
        if not places:
            return NOTHING
        wanted = list(tokens[-self._longest :][::-1])
        at = bisect.bisect_left(places, wanted, key=self._before)
        # In this order, one of the two neighbours has the most in common with the wanted text.
        matched = max(common_length(self._before(place), wanted) for place in places[max(0, at - 1) : at + 1])
        start = wanted[:matched]
        near = places[max(0, at - VOTERS) : at + VOTERS]
        return Found(self._vote([place for place in near if self._before(place)[:matched] == start], most), matched)

    def _vote(self, places: list[int], most: int) -> list[int]:
        """Return the most frequent token after some places, then after those with this token; the latest of equals."""
        tokens: list[int] = []
        places, least = sorted(places, reverse=True), self._least_share * len(places)
        for offset in range(-self._base, most - self._base):
            following = [self._stream[place + offset] for place in places]
            token = max(dict.fromkeys(following), key=following.count)
            if token == END or following.count(token) < least:
                break
            places = [place for place, each in zip(places, following) if each == token]
            tokens.append(token)
        return tokens

    def _index_more(self) -> None:
        """Index some of the tokens that are not indexed."""
        room = INDEXED_AT_ONCE
        while self._waiting and room > 0:
            salt, start, stop = self._waiting[0]
            start = max(start, self._indexed)
            self._indexed = min(stop, start + room)
            for place in range(start, self._indexed):
                bisect.insort(self._places.setdefault(self._key(salt, place), []), place, key=self._order)
            room -= self._indexed - start
            if self._indexed == stop:
                self._waiting.popleft()

    def _forget_oldest(self) -> None:
        salt, start, stop = oldest = self._outputs.popleft()
        for place in range(start, min(stop, self._indexed)):
            places = self._places[key := self._key(salt, place)]
            del places[bisect.bisect_left(places, self._order(place), key=self._order)]
            if not places:
                del self._places[key]
        if self._waiting and self._waiting[0] is oldest:
            self._waiting.popleft()
        end = self._outputs[0].start if self._outputs else self._base + len(self._stream)
        del self._stream[: end - self._longest - self._base]
        self._base = end - self._longest

    def _key(self, salt: str, place: int) -> Key:
        at = place - self._base
        return salt, *self._stream[at - self._shortest : at]

    def _before(self, place: int) -> list[int]:
        """Return the tokens before a place, the last one first."""
        at = place - self._base
        return self._stream[at - self._longest : at][::-1]

    def _order(self, place: int) -> tuple[list[int], int]:
        return self._before(place), place


@dataclass(frozen=True)
class Past:
    """Proposer of a sequence from past outputs of the same salt.

    Args:
        epoch: epoch in which the request arrived. The output of the sequence is added in this one only.
    """

    outputs: PastOutputs
    salt: str
    epoch: int

    def following(self, tokens: Sequence[int], most: int) -> Found:
        """Return the tokens after the best match in past outputs."""
        return self.outputs.following(self.salt, tokens, most)

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Add a complete output."""
        self.outputs.add(self.salt, self.epoch, tokens, num_prompt_tokens)

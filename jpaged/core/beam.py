"""Beam search for one request as in Hugging Face's `generate(num_beams=...)`, on plain numbers."""

import heapq
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple


class Beam(NamedTuple):
    """Live beam: the sum of its logprobs, and its most likely next tokens with their logprobs, best first."""

    score: float
    tokens: Series[int]
    logprobs: Series[float]


class Candidate(NamedTuple):
    """Live beam with one more token.

    Attributes:
        score: the sum of its logprobs, including this token's.
        beam: index of the live beam.
        rank: 1 for the beam's most likely token.
    """

    score: float
    beam: int
    token: int
    logprob: float
    rank: int


@dataclass(eq=False)
class BeamSearch[T]:
    """Best `width` hypotheses so far, and whether the live beams can still improve them.

    Attributes:
        early_stopping: True ends the search with the first `width` hypotheses. False ends it once the best live beam,
            scored at its present length, can't beat the worst hypothesis. "never" scores the beam at the length that
            favours it most.
        hypotheses: finished beams, best first, each after its score: the sum of its logprobs over its length to the
            power of the length penalty.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    hypotheses: list[tuple[float, T]] = field(default_factory=list)
    done: bool = False

    def advance(self, beams: Series[Beam], length: int, end: Callable[[Candidate], T | None]) -> list[Candidate]:
        """Advance the search by one token; return at most `width` survivors, best first, none once it is `done`.

        Args:
            beams: the live beams. Each has the `width` best tokens that do not end it, or all if there are fewer, and
                every better token that ends it. A token of logprob -inf is banned: it neither continues nor ends a
                beam.
            length: output tokens of a candidate.
            end: return the hypothesis of a candidate that ends, or None if it continues.
        """
        live: list[Candidate] = []
        most = self.width if length >= self.max_tokens else None  # at full length every candidate ends
        for place, candidate in enumerate(islice(_best_first(beams), most)):
            if len(live) == self.width or candidate.score == -math.inf:
                break
            ended = end(candidate)
            if ended is None:
                live.append(candidate)
            elif place < self.width:  # a lower candidate only keeps enough beams alive
                self.hypotheses.append((candidate.score / length**self.length_penalty, ended))
        self.hypotheses = sorted(self.hypotheses, key=lambda hypothesis: -hypothesis[0])[: self.width]
        self.done = not live or (len(self.hypotheses) == self.width and not self._can_improve(live[0].score, length))
        return [] if self.done else live

    def _can_improve(self, best: float, length: int) -> bool:
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        improves: bool = best / length**self.length_penalty > self.hypotheses[-1][0]
        return improves


def _best_first(beams: Series[Beam]) -> Iterator[Candidate]:
    """Yield the candidates of all beams, best first; of equal candidates, the one of the earlier beam first.

    A search takes about W of the W^2 candidates of W beams, so a heap holds only the next one of each beam.
    """
    heap = [(-beam.score - beam.logprobs[0], index, 0) for index, beam in enumerate(beams) if beam.tokens]
    heapq.heapify(heap)
    while heap:
        cost, index, place = heap[0]
        score, tokens, logprobs = beams[index]
        yield Candidate(-cost, index, tokens[place], logprobs[place], place + 1)
        if place + 1 < len(tokens):
            heapq.heapreplace(heap, (-score - logprobs[place + 1], index, place + 1))
        else:
            heapq.heappop(heap)

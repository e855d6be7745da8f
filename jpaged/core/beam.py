"""Beam search as Hugging Face's `generate(num_beams=...)` defines it, for one request, on plain numbers."""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]


class Candidate(NamedTuple):
    """A live beam with one more token. `score` is the sum of its logprobs, this token's included."""

    beam: int
    token: int
    logprob: float
    score: float


class Hypothesis[T](NamedTuple):
    """A beam that has ended. `score` is its sum of logprobs over its length to the power of the length penalty."""

    score: float
    beam: T


@dataclass(eq=False)
class BeamSearch[T]:
    """The best `width` hypotheses so far, and whether the live beams can still better them.

    Attributes:
        early_stopping: True ends the search with the first `width` hypotheses; False once the best live beam, judged
            at its present length, can't beat the worst hypothesis; "never" judges it at the length that favours it
            most.
        hypotheses: best first.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    hypotheses: list[Hypothesis[T]] = field(default_factory=list)
    done: bool = False

    def advance(
        self, candidates: Iterable[Iterable[Candidate]], length: int, end: Callable[[Candidate], T | None]
    ) -> list[Candidate]:
        """One step: the candidates that live on, best first, at most `width`; none once the search is `done`.

        Args:
            candidates: those of each live beam, best first: at least the `width` best that go on, as far as there are
                so many, and every better one that ends. One of score -inf is banned: it neither lives on nor ends.
            length: tokens of output that a candidate has.
            end: the hypothesis that a candidate has become, or None if it goes on.
        """
        # Few of them are looked at: with W beams, about W of W^2.
        best = heapq.merge(*candidates, key=lambda c: (-c.score, c.beam, c.token))
        live: list[Candidate] = []
        for rank, candidate in enumerate(best):
            if len(live) == self.width or candidate.score == -math.inf:
                break
            ended = end(candidate)
            if ended is None:
                live.append(candidate)
            elif rank < self.width:  # what ends further down is there to keep enough others alive
                self.hypotheses.append(Hypothesis(candidate.score / length**self.length_penalty, ended))
        self.hypotheses = sorted(self.hypotheses, key=lambda h: -h.score)[: self.width]
        self.done = not live or (len(self.hypotheses) == self.width and not self._can_improve(live[0].score, length))
        return [] if self.done else live

    def _can_improve(self, best: float, length: int) -> bool:
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        return best / length**self.length_penalty > self.hypotheses[-1].score

"""Drafts: tokens that are likely to come next. A step computes them together with the token before them.

The step draws a token after each draft as if the draft were part of the output. A draft is kept if it is the token that
was drawn in its place (greedy verification of the sequence's own keyed sampler, not rejection sampling as in arXiv
2211.17192). The output is therefore that of a sequence without drafts, token by token.
"""

import copy
import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from jpaged.config import Speculation

START_RATE, MEMORY = 0.9, 0.2  # share of kept drafts at first, and weight of the newest one
PRIOR, MAX_TRIED = 2, 64  # drafts that the share at first counts as in `Odds`, and most that count at once
PASSED_OVER = 64  # times that drafts did not pay, after which they are tried again
CERTAIN = -1  # stands for the equal tokens before drafts that a grammar forces
ASLEEP = sys.maxsize  # position up to which a sequence rests whose tokens are searched as they come
MAX_REST = 16  # tokens without a search for drafts, because some did not pay
FIRST_REST_OF_MODEL, MAX_REST_OF_MODEL = 3, 127  # tokens without a round of the draft model, which is no cheap search
USUAL_RATE_OF_MODEL = 0.7  # share of its drafts that are kept, above which rests are short
INDEXED_AT_ONCE = 4096  # tokens: the index of a long prompt grows in several steps
PLACES = 16  # that are kept of equal tokens: the names of records recur in each of them


class Found(NamedTuple):
    """Tokens that may come next, and the number of last tokens that stand before them in another place."""

    tokens: list[int]
    matched: int


NOTHING = Found([], 0)


class Proposer(Protocol):
    """Source of drafts of one sequence. Copies (`copy.copy`) continue independently."""

    def following(self, tokens: Sequence[int], most: int) -> Found:
        """Return the tokens that may follow those of the sequence, at most `most`; `NOTHING` without a match."""

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Take note of the complete output."""


class Lookup:
    """Index of the tokens of one sequence, which only grows: a proposer from its own text."""

    def __init__(self, longest: int, shortest: int):
        self._longest, self._shortest = longest, shortest
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}  # of the tokens after equal ones, the latest last
        self._known = shortest

    def __copy__(self) -> "Lookup":
        other = Lookup(self._longest, self._shortest)
        other._places, other._known = dict(self._places), self._known
        return other

    def following(self, tokens: Sequence[int], most: int) -> Found:
        """Return the tokens that followed the longest match of the last tokens, the latest of equal ones.

        A continuation that reaches the end of the sequence repeats itself.
        """
        stop = min(len(tokens), self._known + INDEXED_AT_ONCE)
        for place in range(self._known, stop):
            key = tuple(tokens[place - self._shortest : place])
            self._places[key] = (*self._places.get(key, ())[1 - PLACES :], place)
        self._known = max(self._known, stop)
        places = self._places.get(tuple(tokens[-self._shortest :]), ()) if stop == len(tokens) else ()
        matched, start = 0, 0
        for place in reversed(places):
            if (equal := self._equal(tokens, place)) > matched:
                matched, start = equal, place
            if matched == self._longest:
                break
        if not matched:
            return NOTHING
        period = len(tokens) - start
        return Found([tokens[start + i % period] for i in range(most)], matched)

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Do nothing: no other sequence reads the text."""

    def _equal(self, tokens: Sequence[int], place: int) -> int:
        """Return the number of equal tokens before a place and at the end, at most `longest`."""
        most = min(self._longest, place)
        return next((n for n in range(most) if tokens[place - 1 - n] != tokens[-1 - n]), most)


class Odds:
    """Shares of drafts that were kept after a number of equal tokens, in all sequences of an engine.

    A share is high at first, so that drafts are tried.
    """

    def __init__(self, longest: int):
        self._longest = longest
        self._kept, self._tried = [PRIOR * START_RATE] * (longest + 1), [float(PRIOR)] * (longest + 1)
        self._passed_over = [0] * (longest + 1)

    def after(self, matched: int) -> float:
        """Return the share after some equal tokens."""
        place = min(matched, self._longest)
        return self._kept[place] / self._tried[place]

    def learn(self, matched: int, is_kept: bool) -> None:
        """Take note of one draft."""
        place = min(matched, self._longest)
        if self._tried[place] >= MAX_TRIED:
            self._kept[place] /= 2
            self._tried[place] /= 2
        self._kept[place] += is_kept
        self._tried[place] += 1

    def pass_over(self, matched: int) -> None:
        """Take note of drafts that did not pay. After some time all is forgotten, and they are tried again."""
        place = min(matched, self._longest)
        self._passed_over[place] += 1
        if self._passed_over[place] == PASSED_OVER:
            self._passed_over[place], self._kept[place], self._tried[place] = 0, PRIOR * START_RATE, PRIOR


class Offer(NamedTuple):
    """Drafts of a sequence, and for each one the chance that it and all before it are kept."""

    tokens: list[int]
    chances: list[float]


class Drafter:
    """Source of the drafts of one sequence, which learns how many are kept. Copies continue independently.

    Args:
        proposers: the sources of drafts. The one with the longest match is taken, the first of equal ones.
        most: maximum drafts in a step, if it is below that of the settings.
        odds: shares that all sequences have learned; None: this one learns alone.

    Attributes:
        most: maximum drafts in a step.
        rests_until: position before which the sequence has no drafts, so that its steps overlap with others. It wakes
            up for an offer that pays.
    """

    def __init__(
        self, settings: Speculation, proposers: Sequence[Proposer], most: int | None = None, odds: Odds | None = None
    ):
        self._settings, self._proposers = settings, proposers
        self.most = settings.num_tokens if most is None else min(most, settings.num_tokens)
        self._odds, self._rate = odds or Odds(settings.longest), START_RATE
        self._rest, self._searches_from, self._matched = 1, 0, 0
        self.rests_until = ASLEEP if proposers else 0

    def __copy__(self) -> "Drafter":
        other = Drafter(self._settings, [copy.copy(each) for each in self._proposers], self.most, self._odds)
        other._rate, other._rest, other._searches_from = self._rate, self._rest, self._searches_from
        other.rests_until = self.rests_until
        return other

    def offer(self, tokens: Sequence[int], forced: Sequence[int], most: int) -> Offer | None:
        """Return drafts that may follow some tokens. Without any the sequence sleeps.

        Args:
            forced: the next tokens as far as a grammar allows no others. They are certain.
            most: maximum number of drafts.
        """
        most = min(most, self.most)
        if forced and most > 0:
            self._matched = CERTAIN
            return Offer([*forced[:most]], [1.0] * min(most, len(forced)))
        found = self._found(tokens, most) if most > 0 else []
        if not found:
            self.sleep()
            return None
        return Offer(found, list(accumulate(map(self._chance, range(len(found))), mul)))

    def _found(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the tokens after the longest match, at most `most`."""
        if len(tokens) <= self._searches_from:
            return []
        best = NOTHING
        for each in self._proposers:
            found = each.following(tokens, most)
            if found.matched > best.matched:
                best = found
        self._matched = best.matched
        return best.tokens[: int(min(most, self._settings.factor * best.matched))]

    def _chance(self, place: int) -> float:
        """Return the chance that a draft is kept if all before it are. These are equal tokens, too."""
        return min(self._rate, self._odds.after(self._matched + place))

    def sleep(self) -> None:
        """Let the next steps of the sequence overlap with others."""
        self.rests_until = ASLEEP

    def wake_up(self) -> None:
        """Have drafts in the next step."""
        self.rests_until = self._rest = 0

    def rest(self, num_tokens: int) -> None:
        """Sleep because the offer after some tokens does not pay. The next ones are not searched, more each time."""
        self.sleep()
        if self._matched == CERTAIN:
            return
        self._rest = min(MAX_REST, 2 * self._rest + 1)
        self._searches_from = num_tokens + self._rest - 1
        self._rate += MEMORY * (START_RATE - self._rate)  # after the rest the text may be another one
        self._odds.pass_over(self._matched)

    def learn(self, drafts: int, kept: int) -> None:
        """Take note of the drafts of a step that were kept. Certain ones tell nothing about others."""
        if self._matched != CERTAIN:
            self._learn(drafts, kept)

    def _learn(self, drafts: int, kept: int) -> None:
        for place, is_kept in enumerate([True] * kept + [False] * (kept < drafts)):
            self._rate += MEMORY * (is_kept - self._rate)
            self._odds.learn(self._matched + place, is_kept)

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Let the proposers take note of the complete output."""
        for each in self._proposers:
            each.end(tokens, num_prompt_tokens)


class ModelDrafter(Drafter):
    """Drafter of a sequence whose drafts a draft model computes before the step.

    At first and after each rest one round is a trial. Its result alone decides whether another one follows.

    Args:
        max_model_len: maximum tokens of a sequence of the draft model.
    """

    def __init__(self, settings: Speculation, max_model_len: int, most: int | None = None):
        super().__init__(settings, (), most)
        self._max_model_len, self._rest, self._is_trial = max_model_len, FIRST_REST_OF_MODEL, True
        self._taken: tuple[int, Sequence[int]] = 0, ()  # the number of tokens before the drafts, and the drafts

    def __copy__(self) -> "ModelDrafter":
        other = ModelDrafter(self._settings, self._max_model_len, self.most)
        other._rate, other._rest, other.rests_until = self._rate, self._rest, self.rests_until
        other._is_trial = self._is_trial
        return other

    def chances(self, num_tokens: int, most: int) -> list[float]:
        """Return the chances of the drafts that the model can compute after some tokens; none while it rests."""
        if num_tokens <= self.rests_until:
            return []
        self._matched = 0
        most = max(0, min(most, self.most, self._max_model_len - num_tokens))
        return [self._rate ** (place + 1) for place in range(most)]

    def take(self, num_tokens: int, drafts: Sequence[int]) -> None:
        """Take the model's drafts after the first tokens of the sequence."""
        self._taken = num_tokens, drafts

    def _found(self, tokens: Sequence[int], most: int) -> list[int]:
        self._matched, (num_tokens, drafts) = 0, self._taken
        return list(drafts[:most]) if num_tokens == len(tokens) else []

    def _chance(self, place: int) -> float:
        return self._rate

    def sleep(self) -> None:
        """Do nothing: the sequence waits for the model's drafts unless it rests."""

    def wake_up(self) -> None:
        """Do nothing, as in `sleep`."""

    def rest(self, num_tokens: int) -> None:
        """Have no round of the model for some tokens, more each time. The next round is a trial."""
        if self._matched == CERTAIN:
            return
        self._rest = min(MAX_REST_OF_MODEL, 2 * self._rest + 1)
        self.rests_until = num_tokens + self._rest - 1
        self._rate, self._is_trial = START_RATE, True

    def _learn(self, drafts: int, kept: int) -> None:
        """Take note of the model's drafts that were kept. Rests are short again once more than usual were."""
        if self._is_trial and kept < drafts:
            self._rate = kept / (kept + 1)
        else:
            super()._learn(drafts, kept)
        self._is_trial = False
        if self._rate > USUAL_RATE_OF_MODEL:
            self._rest = FIRST_REST_OF_MODEL

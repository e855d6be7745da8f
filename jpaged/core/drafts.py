"""Drafts: tokens that are likely to come next. A step computes them together with the token before them.

The step draws a token after each draft as if the draft were part of the output. A draft is kept if it is the token that
was drawn in its place (greedy verification of the sequence's own keyed sampler, not rejection sampling as in arXiv
2211.17192). The output is therefore that of a sequence without drafts, token by token.
"""

import copy
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jpaged.config import Speculation

START_RATE, MEMORY = 0.7, 0.2  # share of kept drafts at first, and weight of the newest one
LONG_MEMORY, FORGETTING = 0.05, 0.005  # weights in `Odds` of the newest draft, and of drafts that did not pay
OVERLAP = 1 / 16  # share of a step's time that is saved where no sequence waits for its sample
CERTAIN = -1  # stands for the equal tokens before drafts that a grammar forces
ASLEEP = sys.maxsize  # position up to which a sequence rests whose tokens are searched as they come
MAX_REST = 16  # tokens without a search for drafts, because some did not pay
FIRST_REST_OF_MODEL, MAX_REST_OF_MODEL = 3, 127  # tokens without a round of the draft model, which is no cheap search
LONG_ROUND = 4  # times its expected cost, beyond which the time of a round is not believed
RATE_OF_MODEL = 0.9  # share of its drafts that are expected to be kept in a trial
INDEXED_AT_ONCE = 4096  # tokens: the index of a long prompt grows in several steps
PLACES = 16  # that are kept of equal tokens: the names of records recur in each of them


class DecodeCosts(NamedTuple):
    """Measured seconds of a step with decode tokens only.

    Attributes:
        seconds: by the number of tokens, on empty contexts; empty: unknown.
        context: seconds for each token and each token of its context.
    """

    seconds: Sequence[float] = ()
    context: float = 0.0

    def of(self, tokens: int, context: int) -> float:
        """Return the cost of a step with some tokens; the same for any number if it is unknown."""
        if not self.seconds:
            return 1.0
        return self.seconds[min(tokens, len(self.seconds) - 1)] + tokens * context * self.context


UNKNOWN = DecodeCosts()


class DraftModelLimits(NamedTuple):
    """Maximum tokens of a sequence of a draft model, and the costs of its decode steps; unknown: not considered."""

    max_model_len: int
    costs: DecodeCosts


class Rounds:
    """Costs of the rounds of a draft model: its measured steps, and the rest of a round as past rounds tell it."""

    def __init__(self, costs: DecodeCosts):
        self._costs, self._rest = costs, 0.0

    def cost(self, drafts: int, each: int, context: int) -> float:
        """Return the seconds of a round of some drafts for each of some sequences; 0 if they are unknown."""
        return drafts * self._costs.of(each, context) + self._rest if self._costs.seconds and drafts else 0.0

    def learn(self, drafts: int, each: int, context: int, seconds: float) -> None:
        """Take note of a past round. One that took far longer, as while a shape is compiled, counts as a long one."""
        if self._costs.seconds:
            steps = drafts * self._costs.of(each, context)
            self._rest += MEMORY * (min(seconds, LONG_ROUND * (steps + self._rest)) - steps - self._rest)

    def forget(self) -> None:
        """Believe the past rounds less, so that a round is tried again at some time."""
        self._rest *= 1 - MEMORY


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
        if not places:
            return NOTHING
        matched, place = max((self._equal(tokens, place), place) for place in places)
        period = len(tokens) - place
        return Found([tokens[place + i % period] for i in range(most)], matched)

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Do nothing: no other sequence reads the text."""

    def _equal(self, tokens: Sequence[int], place: int) -> int:
        """Return the number of equal tokens before a place and at the end, at most `longest`."""
        most = min(self._longest, place)
        return next((n for n in range(most) if tokens[place - 1 - n] != tokens[-1 - n]), most)


class Odds:
    """Shares of drafts that were kept after a number of equal tokens, in all sequences of an engine."""

    def __init__(self, longest: int):
        self._rates = [START_RATE] * (longest + 1)

    def after(self, matched: int) -> float:
        """Return the share after some equal tokens."""
        return self._rates[min(matched, len(self._rates) - 1)]

    def learn(self, matched: int, is_kept: bool) -> None:
        """Take note of one draft."""
        self._move(matched, float(is_kept), LONG_MEMORY)

    def forget(self, matched: int) -> None:
        """Believe the past drafts less, so that drafts are tried again at some time."""
        self._move(matched, START_RATE, FORGETTING)

    def _move(self, matched: int, towards: float, weight: float) -> None:
        place = min(matched, len(self._rates) - 1)
        self._rates[place] += weight * (towards - self._rates[place])


class Drafter:
    """Source of the drafts of one sequence, which learns how many pay. Copies continue independently.

    Args:
        proposers: the sources of drafts. The one with the longest match is taken, the first of equal ones.
        most: maximum drafts in a step, if it is below that of the settings.
        odds: what all sequences have learned; None: this one learns alone.

    Steps of a sequence that rests overlap with others. It wakes up for drafts that are expected to pay (`see`).

    Attributes:
        rests_until: position before which the sequence has no drafts.
    """

    def __init__(
        self, settings: Speculation, costs: DecodeCosts, proposers: Sequence[Proposer], most: int | None = None,
        odds: Odds | None = None,
    ):  # fmt: skip
        self._settings, self._costs, self._proposers = settings, costs, proposers
        self._most = settings.num_tokens if most is None else min(most, settings.num_tokens)
        self._odds, self._rate = odds or Odds(settings.longest), START_RATE
        self._rest, self._searches_from, self._matched = 1, 0, 0
        self.rests_until = ASLEEP if proposers else 0

    def __copy__(self) -> "Drafter":
        proposers = [copy.copy(each) for each in self._proposers]
        other = Drafter(self._settings, self._costs, proposers, self._most, self._odds)
        other._rate, other._rest, other.rests_until = self._rate, self._rest, self.rests_until
        other._searches_from = self._searches_from
        return other

    def see(self, tokens: Sequence[int], others: int) -> bool:
        """Wake up if the drafts after some tokens are expected to pay; return whether that is so."""
        if self.rests_until < ASLEEP or len(tokens) <= self._searches_from:
            return False
        return bool(self._find(tokens, self._most, others, waits=False))

    def propose(
        self, tokens: Sequence[int], forced: Sequence[int], most: int, others: int, *, waits: bool = False
    ) -> list[int]:
        """Return the drafts after some tokens that are expected to pay; without any, the sequence rests.

        Args:
            forced: the next tokens as far as a grammar allows no others. They are certain.
            most: maximum number of drafts; 0: the step has no room.
            others: number of other sequences that run.
            waits: whether the sequence waits for each of its tokens, drafts or not.
        """
        most = max(0, min(most, self._most))
        if forced:
            self._matched = CERTAIN
            most = min(most, len(forced))
            return list(forced[: self._best(most, others, len(tokens), rate=1.0, waits=waits)])
        if len(tokens) <= self._searches_from:
            return []
        return self._find(tokens, most, others, waits)

    def _find(self, tokens: Sequence[int], most: int, others: int, waits: bool) -> list[int]:
        """Return the drafts that are expected to pay; without any, the sequence sleeps.

        If there were some that do not pay, the next tokens are not searched, more of them each time.
        """
        found, matched = self._search(tokens, most) if most else NOTHING
        rate = min(self._rate, self._odds.after(matched))
        drafts = found[: self._best(len(found), others, len(tokens), rate, waits)] if found else []
        self.rests_until = 0 if drafts else ASLEEP
        if drafts:
            self._rest, self._matched = 0, matched
        elif found:
            self._rest = min(MAX_REST, 2 * self._rest + 1)
            self._searches_from = len(tokens) + self._rest - 1
            # After the rest the text may be another one.
            self._rate += MEMORY * (START_RATE - self._rate)
            self._odds.forget(matched)
        return drafts

    def _search(self, tokens: Sequence[int], most: int) -> Found:
        """Return the tokens after the longest match, at most `most`, and its length."""
        best = NOTHING
        for each in self._proposers:
            found = each.following(tokens, most)
            if found.matched > best.matched:
                best = found
        return Found(best.tokens[: int(min(most, self._settings.factor * best.matched))], best.matched)

    def _best(self, most: int, others: int, context: int, rate: float, waits: bool = False) -> int:
        """Return the number of drafts with which the step is expected to give the most tokens for its cost.

        Args:
            rate: share of drafts that are kept.
            waits: as in `propose`.
        """
        expected, power, best, count = others + 1.0, float(self._drafting(others)), 0.0, 0
        # All sequences wait for the drafts of few, and a sequence beside many misses a step.
        lost = 0.0 if waits else min(1.0, OVERLAP * (others + 1))
        for drafts in range(most + 1):
            rate_of_step = (expected - lost * (drafts > 0)) / self._cost(drafts, others, context)
            if rate_of_step > best:
                best, count = rate_of_step, drafts
            power *= rate
            expected += power
        return count

    def _drafting(self, others: int) -> int:
        """Return the number of sequences that are expected to have as many drafts in the step."""
        return 1

    def _cost(self, drafts: int, others: int, context: int) -> float:
        """Return the cost of a step in which the sequence has some drafts."""
        return self._costs.of(others + 1 + drafts, context)

    def learn(self, drafts: int, kept: int) -> None:
        """Take note of the drafts of a step that were kept. Certain ones tell nothing about others."""
        if self._matched != CERTAIN:
            self._learn(drafts, kept)

    def _learn(self, drafts: int, kept: int) -> None:
        for is_kept in [True] * kept + [False] * (kept < drafts):
            self._rate += MEMORY * (is_kept - self._rate)
            self._odds.learn(self._matched, is_kept)

    def end(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Let the proposers take note of the complete output."""
        for each in self._proposers:
            each.end(tokens, num_prompt_tokens)


class ModelDrafter(Drafter):
    """Drafter of a sequence whose drafts a draft model computes before the step.

    At first and after each rest one round is a trial. Its result alone decides whether another one follows.

    Args:
        max_model_len: maximum tokens of a sequence of the draft model.
        rounds: costs of the draft model.
    """

    def __init__(
        self, settings: Speculation, costs: DecodeCosts, max_model_len: int, rounds: Rounds, most: int | None = None
    ):
        super().__init__(settings, costs, (), most)
        self._max_model_len, self._rounds = max_model_len, rounds
        self._rest, self._rate, self._is_trial = FIRST_REST_OF_MODEL, RATE_OF_MODEL, True
        self._taken: tuple[int, Sequence[int]] = 0, ()  # the number of tokens before the drafts, and the drafts

    def __copy__(self) -> "ModelDrafter":
        other = ModelDrafter(self._settings, self._costs, self._max_model_len, self._rounds, self._most)
        other._rate, other._rest, other.rests_until = self._rate, self._rest, self.rests_until
        other._is_trial = self._is_trial
        return other

    def wanted(self, num_tokens: int, most: int, others: int) -> int:
        """Return the number of drafts that the model should compute after some tokens; with 0 the sequence rests.

        Args:
            most: maximum number of drafts.
            others: number of other sequences that run, which are expected to want as many.
        """
        if num_tokens <= self.rests_until:
            return 0
        most = max(0, min(most, self._most, self._max_model_len - num_tokens))
        count = self._best(most, others, num_tokens, self._rate)
        if not count:
            self._rest = min(MAX_REST_OF_MODEL, 2 * self._rest + 1)
            self.rests_until = num_tokens + self._rest - 1
            self._rounds.forget()
            self._rate, self._is_trial = RATE_OF_MODEL, True
        return count

    def _learn(self, drafts: int, kept: int) -> None:
        """Take note of the model's drafts that were kept. Rests are short again once more than usual were."""
        if self._is_trial and kept < drafts:
            self._rate = kept / (kept + 1)
        else:
            super()._learn(drafts, kept)
        self._is_trial = False
        if self._rate > START_RATE:
            self._rest = FIRST_REST_OF_MODEL

    def take(self, num_tokens: int, drafts: Sequence[int]) -> None:
        """Take the model's drafts after the first tokens of the sequence."""
        self._taken = num_tokens, drafts

    def propose(
        self, tokens: Sequence[int], forced: Sequence[int], most: int, others: int, *, waits: bool = False
    ) -> list[int]:
        """Return the forced tokens, or without any the drafts of the model after the present tokens."""
        if forced:
            return super().propose(tokens, forced, most, others, waits=waits)
        self._matched = 0
        num_tokens, drafts = self._taken
        return list(drafts[: max(0, most)]) if num_tokens == len(tokens) else []

    def _drafting(self, others: int) -> int:
        return others + 1

    def _cost(self, drafts: int, others: int, context: int) -> float:
        each = others + 1
        return self._costs.of(each * (1 + drafts), context) + self._rounds.cost(drafts, each, context)

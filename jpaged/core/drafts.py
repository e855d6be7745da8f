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
LONG_MEMORY, LEAST_RATE = 0.1, 0.6  # weight of the newest draft in the usual share, and the least one beside others
LEAST_MATCH = 5  # equal tokens before drafts of a sequence that others run beside
ASLEEP = sys.maxsize  # position up to which a sequence rests whose tokens are searched as they come
MAX_REST = 16  # tokens without a search for drafts, because some did not pay
FIRST_REST_OF_MODEL, MAX_REST_OF_MODEL = 3, 127  # tokens without a round of the draft model, which is no cheap search
LONG_ROUND = 4  # times its expected cost, beyond which the time of a round is not believed
RATE_OF_MODEL = 0.9  # share of its drafts that are expected to be kept in a trial
INDEXED_AT_ONCE = 4096  # tokens: the index of a long prompt grows in several steps
PLACES = 4  # that are kept of equal tokens


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


class Drafter:
    """Source of the drafts of one sequence, which learns how many pay. Copies continue independently.

    Args:
        proposers: the sources of drafts. The one with the longest match is taken, the first of equal ones.
        most: maximum drafts in a step, if it is below that of the settings.

    Steps of a sequence that rests overlap with others. It wakes up for drafts that are expected to pay (`see`).

    Attributes:
        rests_until: position before which the sequence has no drafts.
    """

    def __init__(
        self, settings: Speculation, costs: DecodeCosts, proposers: Sequence[Proposer], most: int | None = None
    ):
        self._settings, self._costs, self._proposers = settings, costs, proposers
        self._most = settings.num_tokens if most is None else min(most, settings.num_tokens)
        self._rate = self._usual_rate = START_RATE
        self._rest, self._searches_from = 1, 0
        self.rests_until = ASLEEP if proposers else 0

    def __copy__(self) -> "Drafter":
        other = Drafter(self._settings, self._costs, [copy.copy(each) for each in self._proposers], self._most)
        other._rate, other._rest, other.rests_until = self._rate, self._rest, self.rests_until
        other._usual_rate, other._searches_from = self._usual_rate, self._searches_from
        return other

    def see(self, tokens: Sequence[int], others: int) -> bool:
        """Wake up if the drafts after some tokens are expected to pay; return whether that is so."""
        if self.rests_until < ASLEEP or len(tokens) <= self._searches_from:
            return False
        return bool(self._find(tokens, self._most, others))

    def propose(self, tokens: Sequence[int], forced: Sequence[int], most: int, others: int) -> list[int]:
        """Return the drafts after some tokens that are expected to pay; without any, the sequence rests.

        Args:
            forced: the next tokens as far as a grammar allows no others. They are certain.
            most: maximum number of drafts; 0: the step has no room.
            others: number of other sequences that run.
        """
        most = max(0, min(most, self._most))
        if forced:
            return list(forced[: self._best(min(most, len(forced)), others, len(tokens), rate=1.0)])
        if len(tokens) <= self._searches_from:
            return []
        return self._find(tokens, most, others)

    def _find(self, tokens: Sequence[int], most: int, others: int) -> list[int]:
        """Return the drafts that are expected to pay; without any, the sequence sleeps.

        If there were some that do not pay, the next tokens are not searched, more of them each time. Beside others,
        which go on meanwhile, the sequence misses a step before it has drafts: most of them must usually be kept.
        """
        found = self._search(tokens, most, LEAST_MATCH if others else 0) if most else []
        drafts = []
        if found and not (others and self._usual_rate < LEAST_RATE):
            drafts = found[: self._best(len(found), others, len(tokens), self._rate)]
        self.rests_until = 0 if drafts else ASLEEP
        if drafts:
            self._rest = 0
        elif found:
            self._rest = min(MAX_REST, 2 * self._rest + 1)
            self._searches_from = len(tokens) + self._rest - 1
            # After the rest the odds are taken to be the usual ones, and these for a while to be those of a new text.
            self._usual_rate += LONG_MEMORY * (START_RATE - self._usual_rate)
            self._rate = self._usual_rate
        return drafts

    def _search(self, tokens: Sequence[int], most: int, least: int) -> list[int]:
        """Return the tokens after the longest match, of at least some equal tokens as far as the settings allow."""
        best = NOTHING
        for each in self._proposers:
            found = each.following(tokens, most)
            if found.matched > best.matched:
                best = found
        if best.matched < min(least, self._settings.longest):
            return []
        return best.tokens[: int(min(most, self._settings.factor * best.matched))] if best.tokens else best.tokens

    def _best(self, most: int, others: int, context: int, rate: float) -> int:
        """Return the number of drafts with which the step is expected to give the most tokens for its cost.

        Args:
            rate: share of drafts that are kept.
        """
        expected, power, best, count = others + 1.0, float(self._drafting(others)), 0.0, 0
        for drafts in range(most + 1):
            cost = self._cost(drafts, others, context)
            if expected / cost > best:
                best, count = expected / cost, drafts
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
        """Take note of the drafts of a step that were kept."""
        for is_kept in [True] * kept + [False] * (kept < drafts):
            self._rate += MEMORY * (is_kept - self._rate)
            self._usual_rate += LONG_MEMORY * (is_kept - self._usual_rate)

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

    def learn(self, drafts: int, kept: int) -> None:
        """Take note of the drafts of a step that were kept. Rests are short again once more than usual were."""
        if self._is_trial and kept < drafts:
            self._rate = kept / (kept + 1)
        else:
            super().learn(drafts, kept)
        self._is_trial = False
        if self._rate > START_RATE:
            self._rest = FIRST_REST_OF_MODEL

    def take(self, num_tokens: int, drafts: Sequence[int]) -> None:
        """Take the model's drafts after the first tokens of the sequence."""
        self._taken = num_tokens, drafts

    def propose(self, tokens: Sequence[int], forced: Sequence[int], most: int, others: int) -> list[int]:
        """Return the forced tokens, or without any the drafts of the model after the present tokens."""
        if forced:
            return super().propose(tokens, forced, most, others)
        num_tokens, drafts = self._taken
        return list(drafts[: max(0, most)]) if num_tokens == len(tokens) else []

    def _drafting(self, others: int) -> int:
        return others + 1

    def _cost(self, drafts: int, others: int, context: int) -> float:
        each = others + 1
        return self._costs.of(each * (1 + drafts), context) + self._rounds.cost(drafts, each, context)

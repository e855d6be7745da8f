"""Drafts of an engine: the drafter of each request, and the choice of the drafts of a step."""

from collections.abc import Mapping
from collections.abc import Sequence as Series

from jpaged.config import DRAFTING_SEQS, Limits, Speculation
from jpaged.core.block_pool import BlockPool
from jpaged.core.draft_costs import (
    ALONE_MEMORY,
    ROUND_FORGETTING,
    ROUND_MEMORY,
    STEP_FORGETTING,
    STEP_MEMORY,
    UNKNOWN,
    DecodeCosts,
    DraftModelLimits,
    Overhead,
)
from jpaged.core.drafts import Drafter, Lookup, ModelDrafter, Odds, Offer, Proposer
from jpaged.core.past_outputs import Past, PastOutputs
from jpaged.core.plan import StepPlan
from jpaged.core.request import Request, Sequence

LEAST_GAIN = 1.05  # in tokens for a step's time that is expected of drafts; the estimates are not more precise
MOST_BESIDE = 8  # sequences for each one that waits for its sample, up to which all others wait with it

Wanted = tuple[Sequence, int]  # and the number of its drafts
Chances = Mapping[Sequence, Series[float]]  # of each draft and all before it


class Drafting:
    """Drafts as `limits.speculative_config` sets them; without it there are none.

    Args:
        pool: the pool with whose prefix cache past outputs are forgotten.
        costs: costs of steps. Those of steps that overlap with the host's work, and of steps that do not, are learned.
        model: limits of the draft model; None: those of the engine, and its costs are not considered.

    Attributes:
        max_drafts: maximum drafts of a step.
        past_outputs: past outputs of the engine, None if they give no drafts.
    """

    def __init__(
        self, limits: Limits, pool: BlockPool, costs: DecodeCosts = UNKNOWN, model: DraftModelLimits | None = None
    ):
        self.settings, self.max_drafts = Speculation.of(limits.speculative_config), limits.max_num_drafts
        self.past_outputs: PastOutputs | None = None
        if self.settings is not None and self.settings.outputs:
            self.past_outputs = PastOutputs(self.settings, pool)
        self._odds = Odds(self.settings.longest) if self.settings else None
        self._costs, self._model = costs, model or DraftModelLimits(limits.max_model_len, UNKNOWN)
        self._overlapped, self._alone, self._rounds = (
            Overhead(each) for each in (STEP_MEMORY, ALONE_MEMORY, ROUND_MEMORY)
        )
        self._debt = 0.0  # seconds that steps without drafts took longer because they did not overlap

    def stop(self) -> None:
        """Let no step have drafts from now on."""
        self.max_drafts = 0

    def drafter_of(self, request: Request) -> Drafter | None:
        """Return the drafter of a new request, None if it has no drafts."""
        settings = self.settings
        if settings is None or not request.may_have_drafts:
            return None
        most = getattr(request.params, "num_speculative_tokens", None)
        if settings.model is not None:
            return ModelDrafter(settings, self._model.max_model_len, most)
        proposers: list[Proposer] = [Lookup(settings.longest, settings.shortest)]
        if self.past_outputs is not None:
            proposers.append(Past(self.past_outputs, request.cache_salt, self.past_outputs.epoch))
        return Drafter(settings, proposers, most, self._odds)

    def wanted(self, running: Series[Sequence]) -> list[Wanted]:
        """Return the running sequences that want drafts of the draft model in the next step; the others rest.

        A sequence has drafts only after a token of its output.
        """
        chances: dict[Sequence, list[float]] = {}
        for sequence in running:
            drafter, constraint, computed = sequence.drafter, sequence.constraint, sequence.num_computed_tokens
            if not isinstance(drafter, ModelDrafter) or sequence.pending or computed < sequence.num_prompt_tokens:
                continue
            if computed + 1 < sequence.num_tokens or (
                constraint is not None and (len(running) > DRAFTING_SEQS or constraint.forced())
            ):
                continue
            if found := drafter.chances(sequence.num_tokens, sequence.most_drafts):
                chances[sequence] = found
        counts = self._counts(chances, len(running), self.max_drafts, with_rounds=True)
        for sequence in chances:
            if sequence not in counts:
                assert sequence.drafter is not None, "it has offered drafts"
                sequence.drafter.rest(sequence.num_tokens)
                self._rounds.approach(0.0, ROUND_FORGETTING)
        return list(counts.items())

    def choose(
        self, offers: Mapping[Sequence, Offer], num_seqs: int, room: int, num_waiting: int = 0
    ) -> dict[Sequence, list[int]]:
        """Return the drafts that are expected to pay in a step.

        The sequences without any rest, or sleep if the step has no room for more.

        Args:
            num_seqs: number of all sequences of the step.
            room: maximum number of drafts.
            num_waiting: number of the sequences that wait for each sample, drafts or not.
        """
        chances = {sequence: offer.chances for sequence, offer in offers.items()}
        counts = self._counts(chances, num_seqs, room, num_waiting)
        is_full = sum(counts.values()) >= min(room, self.max_drafts)
        for sequence in offers:
            drafter = sequence.drafter
            assert drafter is not None, "it has offered drafts"
            if sequence in counts:
                drafter.wake_up()
            elif is_full:
                drafter.sleep()
            else:
                drafter.rest(sequence.num_tokens)
        return {sequence: offers[sequence].tokens[:count] for sequence, count in counts.items()}

    def _counts(
        self, chances: Chances, num_seqs: int, room: int, num_waiting: int = 0, *, with_rounds: bool = False
    ) -> dict[Sequence, int]:
        """Return the numbers of drafts with which a step is expected to give the most tokens for its time.

        Args:
            chances: of the sequences that offer drafts.
            num_seqs, room, num_waiting: as in `choose`.
            with_rounds: whether the draft model must compute the drafts.
        """
        if not chances:
            return {}
        best_first = sorted(
            ((-chance, place, sequence) for sequence, each in chances.items() for place, chance in enumerate(each)),
            key=lambda draft: draft[:2],
        )
        context = sum(sequence.num_tokens for sequence in chances) // len(chances)
        best = LEAST_GAIN * num_seqs / (self._costs.of(num_seqs, context) + self._overhead(num_waiting, num_seqs))
        expected, num_drafting, depth, chosen = float(num_seqs), 0, 0, 0
        for number, (chance, place, _) in enumerate(best_first[: max(0, min(room, self.max_drafts))], 1):
            expected -= chance
            num_drafting += place == 0
            depth = max(depth, place + 1)
            # Few sequences with drafts beside many others miss every other step, in which the others go on.
            lost = num_drafting if MOST_BESIDE * (num_waiting + num_drafting) < num_seqs else 0
            seconds = self._costs.of(num_seqs + number, context)
            seconds += self._overhead(num_waiting + num_drafting, num_seqs)
            if with_rounds:
                seconds += self._round_cost(depth, num_drafting, context)
            if (expected - lost) / seconds > best:
                best, chosen = (expected - lost) / seconds, number
        counts: dict[Sequence, int] = {}
        for _, place, sequence in best_first[:chosen]:
            counts[sequence] = place + 1
        return counts

    def _overhead(self, num_waiting: int, num_seqs: int) -> float:
        """Return the overhead of a step of some sequences, of which some wait for their samples."""
        overlaps = MOST_BESIDE * num_waiting < num_seqs and self._overlapped.num_steps > 0
        return self._overlapped.seconds if overlaps else self._alone.seconds

    def _round_cost(self, drafts: int, num_seqs: int, context: int) -> float:
        """Return the seconds of a round of the draft model; 0 if they are unknown."""
        costs = self._model.costs
        return drafts * costs.of(num_seqs, context) + self._rounds.seconds if costs.seconds else 0.0

    def learn_round(self, wanted: Series[Wanted], seconds: float) -> None:
        """Take note of the time that the draft model took for some sequences."""
        drafts, costs = max(count for _, count in wanted), self._model.costs
        context = sum(sequence.num_tokens for sequence, _ in wanted) // len(wanted)
        if costs.seconds:
            self._rounds.learn(seconds, drafts * costs.of(len(wanted), context))

    def learn_step(self, plan: StepPlan, seconds: float, *, overlaps: bool) -> None:
        """Take note of the time from the result before a step to its own. Only decode steps tell anything.

        Args:
            overlaps: whether the step was dispatched before the other result.
        """
        rows = plan.rows
        if not (self.max_drafts and self._costs.seconds and rows and all(row.num_tokens == 1 for row in rows)):
            return
        cost = self._costs.of(len(rows), sum(row.start for row in rows) // len(rows))
        if overlaps:
            self._overlapped.learn(seconds, cost)
            self._alone.approach(self._overlapped.seconds, STEP_FORGETTING)
        elif plan.drafts:
            self._alone.learn(seconds + self._debt, cost)
            self._debt = 0.0
        elif self._overlapped.num_steps and not plan.masked:
            self._debt += max(0.0, seconds - cost - self._overlapped.seconds)

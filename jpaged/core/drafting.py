"""Drafts of an engine: the drafter of each request, and the drafts that a draft model should compute."""

from collections.abc import Sequence as Series

from jpaged.config import DRAFTING_SEQS, Limits, Speculation
from jpaged.core.block_pool import BlockPool
from jpaged.core.drafts import (
    UNKNOWN,
    DecodeCosts,
    Drafter,
    DraftModelLimits,
    Lookup,
    ModelDrafter,
    Odds,
    Proposer,
    Rounds,
)
from jpaged.core.past_outputs import Past, PastOutputs
from jpaged.core.request import Request, Sequence

Wanted = tuple[Sequence, int]  # and the number of its drafts


class Drafting:
    """Drafts as `limits.speculative_config` sets them; without it there are none.

    Args:
        pool: the pool with whose prefix cache past outputs are forgotten.
        costs: costs of steps.
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
        self._costs, model = costs, model or DraftModelLimits(limits.max_model_len, UNKNOWN)
        self._max_model_len, self._rounds = model.max_model_len, Rounds(model.costs)

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
            return ModelDrafter(settings, self._costs, self._max_model_len, self._rounds, most)
        proposers: list[Proposer] = [Lookup(settings.longest, settings.shortest)]
        if self.past_outputs is not None:
            proposers.append(Past(self.past_outputs, request.cache_salt, self.past_outputs.epoch))
        return Drafter(settings, self._costs, proposers, most, self._odds)

    def wanted(self, running: Series[Sequence]) -> list[Wanted]:
        """Return the running sequences that want drafts of the draft model in the next step; the others rest.

        The room of the step is divided equally. A sequence has drafts only after a token of its output.
        """
        wanted, most, others = [], self.max_drafts // max(1, len(running)), len(running) - 1
        for sequence in running:
            drafter, constraint, computed = sequence.drafter, sequence.constraint, sequence.num_computed_tokens
            if not isinstance(drafter, ModelDrafter) or sequence.pending or computed < sequence.num_prompt_tokens:
                continue
            if computed + 1 < sequence.num_tokens or (
                constraint is not None and (others >= DRAFTING_SEQS or constraint.forced())
            ):
                continue
            left = sequence.request.max_length - sequence.num_tokens - 1
            if count := drafter.wanted(sequence.num_tokens, min(most, left), others):
                wanted.append((sequence, count))
        return wanted

    def learn(self, wanted: Series[Wanted], seconds: float) -> None:
        """Take note of the time that the draft model took for some sequences."""
        drafts = max(count for _, count in wanted)
        context = sum(sequence.num_tokens for sequence, _ in wanted) // len(wanted)
        self._rounds.learn(drafts, len(wanted), context, seconds)

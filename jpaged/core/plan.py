"""One step as a value: the work that the scheduler orders, and the result that the runner returns.

Both consist of numbers and tuples alone. They can be compared, recorded, and sent to another process, where the same
plans drive another runner to the same tokens. A running sequence is a row: plans carry each row's state once, when the
sequence is admitted, and only differences after that.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.core.params import BeamSearchParams, SamplingParams

Pairs = tuple[tuple[int, int], ...]  # (source, destination)


class Scheduled(NamedTuple):
    """The tokens [start, start + num_tokens) of a row's sequence.

    Attributes:
        num_samples: how many tokens are drawn after the last one: 0 inside a prompt, 1 for most rows, and one for each
            branch where a request forks.
    """

    row: int
    start: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that starts in a row, or returns to one after a preemption.

    Attributes:
        token_ids: prompt and output.
        seed: of its samples; sample i of a row that forks takes `seed + i`.
        block_ids: of its block table.
        num_top: how many of the most likely tokens to list with each sample; None for neither list nor rank.
        num_scored: how many tokens after the prompt's first have a logprob already; None if none is wanted.
        banned: tokens that no sample may be.
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams | BeamSearchParams
    seed: int
    block_ids: tuple[int, ...]
    num_top: int | None = None
    num_scored: int | None = None
    banned: tuple[int, ...] = ()


class Chosen(NamedTuple):
    """The last token of a row, which the host has chosen among candidates, and the seed of its further samples."""

    row: int
    token: int
    seed: int


class Entry(NamedTuple):
    """One entry of a row's block table."""

    row: int
    column: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work, in this order: blocks to the host, block copies, blocks from the host, the rows that are copied,
    admitted and changed, then the tokens.

    A scheduled row that ends in neither `admitted` nor `chosen` tokens continues after its last sample, which stays on
    the device.

    Attributes:
        swap_out: of each request that goes to the host, its blocks and their places there.
        row_copies: a sequence forks into another row; all are read before any is written.
        released_rows: rows that are free before this step, unless it copies or admits into them.
        entries: block-table entries that have changed, where the row was not admitted by this plan with them.
        masked: rows whose samples the host restricts by a mask, each with the tokens that it bans beside those that the
            sequence's grammar forbids.
    """

    rows: tuple[Scheduled, ...] = ()
    swap_out: tuple[Pairs, ...] = ()
    block_copies: Pairs = ()
    swap_in: Pairs = ()
    released_rows: tuple[int, ...] = ()
    row_copies: Pairs = ()
    admitted: tuple[Admitted, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    entries: tuple[Entry, ...] = ()
    masked: tuple[tuple[int, frozenset[int]], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.rows)


class Sample(NamedTuple):
    """One token as the device chose it, or as the prompt has it.

    Attributes:
        logprob: natural log of its probability under the model itself, before temperature and the rest; NaN if the
            model's logits are not finite.
        rank: 1 for the model's most likely token; 0 if no logprobs were asked for.
        top_tokens: the most likely tokens, best first; of a beam, those that the search compares.
        top_logprobs: their logprobs.
    """

    token: int
    logprob: float
    rank: int = 0
    top_tokens: Series[int] = ()
    top_logprobs: Series[float] = ()


class StepResult(NamedTuple):
    """The result of a plan.

    Attributes:
        samples: those of the plan's first row, then those of the second, and so on.
        prompt: {index in `plan.rows`: the prompt's own tokens whose logprobs this step computed}.
    """

    samples: Series[Sample]
    prompt: Mapping[int, Series[Sample]] = {}


class Done(NamedTuple):
    """A step whose result is known already."""

    known: StepResult

    def result(self) -> StepResult:
        """Return the result."""
        return self.known

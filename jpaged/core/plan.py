"""One step as a value: the plan of the scheduler, and the result of the runner.

Both consist only of numbers and tuples. They can be compared, recorded, and sent to another process, where the same
plans drive another runner to the same tokens. A running sequence is a row. Plans carry the state of a row once, when
the sequence is admitted, and only differences after that.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.core.params import Params

Pairs = tuple[tuple[int, int], ...]  # (source, destination)

# Pages that an entry of a plan reads: of no state, before a first token; the one of the entry before it, in the same
# row. A page that it writes: none.
NO_STATE, CONTINUES, NOWHERE = -1, -2, -1
NO_SLOT = -1  # of a sequence without an adapter


class ParamsDeleted(RuntimeError):
    """A step failed because another owner of the parameters' memory has deleted them."""


class Scheduled(NamedTuple):
    """Tokens [start, start + num_tokens) of a row's sequence.

    Attributes:
        num_samples: number of tokens drawn after the last one: 0 inside a prompt, 1 for most rows, and one for each
            branch where a request forks.

    A row with drafts has an entry for its last token and for each draft: all are decode tokens, with a sample each.
    """

    row: int
    start: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """Sequence that starts in a row, or returns to one after a preemption.

    Attributes:
        token_ids: prompt and output.
        seed: seed of its samples; sample i of a row that forks takes `seed + i`.
        block_ids: its block table, for each group of layers; `GONE` for blocks that no later token sees.
        num_top: number of most likely tokens to list with each sample; None: neither list nor rank.
        num_scored: number of prompt tokens, without the first, that already have a logprob; None: no logprobs of the
            prompt are wanted.
        banned: tokens that no sample may be.
        adapter_slot: the slot of its adapter, or `NO_SLOT`.
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: Params
    seed: int
    block_ids: tuple[tuple[int, ...], ...]
    num_top: int | None = None
    num_scored: int | None = None
    banned: tuple[int, ...] = ()
    adapter_slot: int = NO_SLOT


class Chosen(NamedTuple):
    """Last token of a row, chosen by the host among candidates, and the seed of its further samples."""

    row: int
    token: int
    seed: int


class Entry(NamedTuple):
    """Entry of a row's block table for a group of layers."""

    row: int
    group: int
    column: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step.

    The order is: blocks to the host, block copies, blocks from the host and from files, the rows that are copied,
    admitted and changed, the adapters, then the tokens. A scheduled row without `admitted` or `chosen` tokens continues
    after its last sample, which stays on the device.

    Attributes:
        swap_out: blocks of preempted requests, and evicted ones of the prefix cache, with their places on the host;
            -1 - p stands for page p.
        swap_in: likewise, places on the host with the blocks to which they are copied.
        from_files: blocks whose content the runner has read from files; -1 - p stands for page p.
        row_copies: forks of a sequence into another row; all are read before any is written.
        released_rows: rows that are free before this step, unless it copies or admits into them.
        entries: changed block-table entries of rows that this plan does not admit.
        masked: rows whose samples the host restricts by a mask, each with the banned tokens. The sequence's grammar may
            forbid further tokens. A row with drafts has one for each of its entries, in their order.
        drafts: (index in `rows`, token) of the entries whose token is a draft.
        pages: for models with recurrent layers, the pages that each of `rows` reads its state from and writes it to,
            counted from 0, or `NO_STATE`, `CONTINUES` and `NOWHERE`.
        adapters: (adapter, slot) of the adapters that are loaded into slots before the step.
    """

    rows: tuple[Scheduled, ...] = ()
    swap_out: Pairs = ()
    block_copies: Pairs = ()
    swap_in: Pairs = ()
    from_files: tuple[int, ...] = ()
    released_rows: tuple[int, ...] = ()
    row_copies: Pairs = ()
    admitted: tuple[Admitted, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    entries: tuple[Entry, ...] = ()
    masked: tuple[tuple[int, frozenset[int]], ...] = ()
    drafts: Pairs = ()
    pages: Pairs = ()
    adapters: Pairs = ()

    @property
    def num_tokens(self) -> int:
        """Number of scheduled tokens."""
        return sum(scheduled.num_tokens for scheduled in self.rows)


class Sample(NamedTuple):
    """Token that the device chose, or token of the prompt.

    Attributes:
        logprob: natural log of the token's probability under the model, before temperature and the other sampling
            parameters. With the engine's `logprobs_mode` "processed_logprobs", it is the probability after them, except
            for tokens of the prompt. NaN if the model's logits are not finite.
        rank: 1 for the model's most likely token; 0 if no logprobs were requested.
        top_tokens: the most likely tokens, best first; for a beam, those that the search compares.
        version: number of parameter updates before the step that drew it.
        kept: bit t % 8 of byte t // 8 is 1 if token t could be drawn; empty if that was not requested.
        hidden: hidden state that it was drawn from, [D] float32; empty if that was not requested.
    """

    token: int
    logprob: float
    rank: int = 0
    top_tokens: Series[int] = ()
    top_logprobs: Series[float] = ()
    version: int = 0
    kept: bytes = b""
    hidden: bytes = b""


class StepResult(NamedTuple):
    """Result of a plan.

    Attributes:
        samples: samples of each of the plan's rows, in their order.
        prompt: {index in `plan.rows`: the prompt's own tokens whose logprobs this step computed}.
        sums: {index in `plan.rows`: the sum of the hidden states before these tokens}, if requested, as `pooled` takes
            it.
    """

    samples: Series[Sample]
    prompt: Mapping[int, Series[Sample]] = {}
    sums: Mapping[int, bytes] = {}


class Done(NamedTuple):
    """Step with a known result."""

    known: StepResult

    def wait(self) -> None:
        """Do nothing."""

    def result(self) -> StepResult:
        """Return the result."""
        return self.known

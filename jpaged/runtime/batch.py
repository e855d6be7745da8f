"""Arrays of one step: a plan in one buffer, padded to one of a few fixed shapes."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import Limits
from jpaged.core.groups import Windows, held_windows, most_held
from jpaged.core.plan import StepPlan
from jpaged.runtime.placement import Placement
from jpaged.runtime.row_table import RowTable, branch_seeds
from jpaged.runtime.sampling_row import NEUTRAL, ROW, ROW_WORDS
from jpaged.runtime.sampling_settings import Settings

Array = Any  # numpy where it is made, traced jax arrays inside the step
ALIGNMENT = 64  # int32 numbers: 256 bytes
NO_ROW = np.iinfo(np.int32).max  # of samples that are computed, and written nowhere


class Batch(NamedTuple):
    """Arrays of a step.

    Padding has tokens 0 at position 0 in slot -1, sequences without query and context, and greedy samples of token 0. A
    token below 0 is the last sample of row `-1 - token`, which only the device knows.
    """

    num_tokens: Array  # [] int32, tokens before the padding; T in a batch of padding only, which costs as a full one
    tokens: Array  # [T] int32
    positions: Array  # [T] int32
    slot_mapping: tuple[Array, ...]  # for each group of layers: [T] int32, flat slots to write, -1 = none
    targets: Array  # [T] int32, the following token where its logprob is wanted, else -1
    context_lens: Array  # [S] int32, this step's tokens included
    cu_q_lens: Array  # [S + 1] int32, first token of each sequence
    decodes: Array  # [S] int32, whether the sequence has one token, which follows a sampled one, as in a decode step
    sampled_from: Array  # [S] int32, the token before sample s; samples are in the order of the sequences
    samples: Array  # [S, F] int32, the words of sampling rows (`ROW`)
    # For each group of layers: [S, W] int32, undefined past a sequence's blocks and before its first query's window.
    # The buffer has the columns that the queries may see, from the block in `first_blocks` on. None: it has all.
    block_tables: tuple[Array, ...]
    first_blocks: tuple[Array | None, ...] = ()  # for each group of layers: [S] int32
    reads: Array | None = None  # [S] int32, the pages of states that sequences continue from, as in plans
    writes: Array | None = None  # [S] int32, the pages for their states after this step; None: no recurrent layers
    adapters: Array | None = None  # [T] int32, the slots of the tokens' adapters, -1 = none; None: no slots
    work: tuple[Any, ...] = ()  # lists of work of the attention kernels, for each window of the model


class Bucket(NamedTuple):
    """Shape of a step. `decode`: one token per sequence, which follows a sampled one; token s is sequence s."""

    num_tokens: int
    num_seqs: int
    decode: bool


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """Return `high`, `high / factor`, ... down to `low` or just above it, in ascending order."""
    rungs = [high]
    while rungs[0] > 1 and (below := -(-rungs[0] // factor)) >= low:
        rungs.insert(0, below)
    return tuple(rungs)


# Factor of the ladder of decode steps, and least tokens of other steps, by whether padding costs as much as tokens.
LADDERS = {True: (2, 32), False: (4, 64)}


class Buckets:
    """All shapes of steps, known before the first step runs.

    Both ladders double, and have further shapes if their costs justify them (`measure`). Where padding costs little,
    decode steps have a ladder that quadruples, and the other one begins higher. A step with a prompt pays for
    `num_seqs` only in logits. Decode steps with drafts have a ladder of their own, which doubles, from twice
    `max_num_seqs` on. `benchmarks/engine/padding.py` counts the padding.

    Args:
        padded: whether a step costs as much as its whole shape.
        least: number of sequences up to which a decode step costs as much as that of one.
    """

    def __init__(self, limits: Limits, *, padded: bool = True, least: int = 1):
        max_seqs, (factor, least_tokens) = limits.max_num_seqs, LADDERS[padded]
        drafting = ladder(2 * max_seqs, limits.max_num_decodes, 2) if limits.max_num_drafts else ()
        sizes = dict.fromkeys((*ladder(min(least, max_seqs), max_seqs, factor), *drafting))
        self.decode = tuple(Bucket(size, size, True) for size in sizes)
        seqs = dict.fromkeys((min(16, max_seqs), max_seqs, *drafting[-1:]))
        self.mixed = tuple(
            Bucket(t, s, False) for t in ladder(least_tokens, max(16, limits.max_num_batched_tokens), 2) for s in seqs
        )
        self.all = self.decode + self.mixed

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Add shapes between the shapes of the ladders."""
        self.keep({*self.all, *buckets})

    def keep(self, buckets: Iterable[Bucket]) -> None:
        """Have these shapes only. The largest one with prompts must be among them: it serves any step."""
        self.all = tuple(sorted(buckets))
        self.decode = tuple(bucket for bucket in self.all if bucket.decode)
        self.mixed = tuple(bucket for bucket in self.all if not bucket.decode)

    def fit(self, num_tokens: int, num_seqs: int, decode: bool) -> Bucket:
        """Return the smallest shape for a step with this many tokens, and this many sequences and samples.

        Decode steps run in a shape for prompts where no shape of their own is large enough.
        """
        rungs = self.decode + self.mixed if decode else self.mixed
        return next(b for b in rungs if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs)


# (batch with lengths, whether it is a decode step, W) -> `Batch.work` in numpy: arrays in tuples, whose form depends on
# the bucket only.
MakeWork = Callable[[Batch, bool, int], tuple[Any, ...]]


class Layout:
    """Places of a batch's arrays in one buffer, [`size`] int32, for steps of one shape.

    Each array starts at a multiple of 256 bytes: XLA may hand a kernel a pointer into the buffer instead of a copy of
    an array, and Mosaic's runtime takes no other pointers.

    Args:
        table_width: W, the maximum blocks of a sequence.
        windows: the window of each group of layers.
        has_states: whether the model has recurrent layers.
        has_adapters: whether there are slots of adapters.
    """

    def __init__(
        self, bucket: Bucket, table_width: int, make_work: MakeWork = lambda *_: (), *,
        windows: Windows = (None,), block_size: int = 1, has_states: bool = False, has_adapters: bool = False,
    ):  # fmt: skip
        t, s = bucket.num_tokens, bucket.num_seqs
        self._decode, self._make_work, self._width = bucket.decode, make_work, table_width
        self._windows, self._block_size = held_windows(windows, block_size), block_size
        most = most_held(windows, block_size, 1 if bucket.decode else t)
        widths = [min(table_width, each or table_width) for each in most]
        shapes = Batch(
            (), (t,), (t,), ((t,),) * len(windows), (t,), (s,), (s + 1,), (s,), (s,), (s, ROW_WORDS),
            tuple((s, width) for width in widths), tuple((s,) if width < table_width else None for width in widths),
        )._replace(
            reads=(s,) if has_states else None, writes=(s,) if has_states else None,
            adapters=(t,) if has_adapters else None,
        )  # fmt: skip
        zeros: Batch = jax.tree.map(partial(np.zeros, dtype=np.int32), shapes, is_leaf=_is_shape)
        arrays, self._tree = jax.tree.flatten(zeros._replace(work=make_work(zeros, bucket.decode, table_width)))
        starts = list(itertools.accumulate((-(-x.size // ALIGNMENT) * ALIGNMENT for x in arrays), initial=0))
        self._places = [(slice(start, start + x.size), x.shape) for start, x in zip(starts, arrays)]
        self.size = starts[-1]
        self._padding = np.zeros(self.size, np.int32)
        batch = self.unpack(self._padding)
        for array in (*batch.slot_mapping, batch.targets, batch.reads, batch.writes, batch.adapters):
            if array is not None:
                array[:] = -1
        batch.samples.view(ROW)[:] = NEUTRAL
        batch.num_tokens[...] = t
        self.fill_work(batch)

    def unpack(self, buffer: Array) -> Batch:
        """Return the arrays in a buffer: views of a NumPy array, slices of a traced one."""
        arrays = [buffer[place].reshape(shape) for place, shape in self._places]
        return cast(Batch, jax.tree.unflatten(self._tree, arrays))

    def fill_work(self, batch: Batch) -> None:
        """Make the lists of work of a batch whose lengths are in place."""
        work = self._make_work(batch, self._decode, self._width)
        for place, array in zip(jax.tree.leaves(batch.work), jax.tree.leaves(work), strict=True):
            place[...] = array

    def fill_tables(self, batch: Batch, rows: RowTable, row_n: np.ndarray, start_n: np.ndarray) -> None:
        """Write the block tables of a batch, whose sequences are some rows with queries from some positions on."""
        n, groups = len(row_n), zip(batch.block_tables, batch.first_blocks, self._windows, rows.block_tables)
        for block_tables, first_blocks, window, of_rows in groups:
            if first_blocks is None or window is None:
                block_tables[:n] = of_rows[row_n]
                continue
            first_blocks[:n] = _first_blocks(start_n, window, self._block_size)
            columns = first_blocks[:n, None] + np.arange(block_tables.shape[1])
            block_tables[:n] = of_rows[row_n[:, None], np.minimum(columns, self._width - 1)]

    def attend(self, batch: Batch, num_tokens: int, context: int) -> None:
        """Let the first tokens of a batch of padding be decode tokens of one sequence, whose blocks are all block 0."""
        batch.decodes[:num_tokens] = True
        batch.cu_q_lens[:] = np.minimum(np.arange(len(batch.cu_q_lens)), num_tokens)
        batch.positions[:num_tokens] = context + np.arange(num_tokens)
        batch.context_lens[:num_tokens] = batch.positions[:num_tokens] + 1
        for first_blocks, window in zip(batch.first_blocks, self._windows):
            if first_blocks is not None and window is not None:
                first_blocks[:num_tokens] = _first_blocks(batch.positions[:num_tokens], window, self._block_size)
        self.fill_work(batch)

    def whole_tables(self, batch: Batch) -> Batch:
        """Return a batch whose block tables have all columns."""

        def whole(block_tables: jax.Array, first_blocks: jax.Array | None) -> jax.Array:
            if first_blocks is None:
                return block_tables
            columns = jnp.arange(self._width, dtype=jnp.int32) - first_blocks[:, None]
            is_sent = (columns >= 0) & (columns < block_tables.shape[1])
            sent = jnp.take_along_axis(block_tables, jnp.where(is_sent, columns, 0), axis=1)
            return jnp.where(is_sent, sent, 0)

        tables = tuple(whole(*each) for each in zip(batch.block_tables, batch.first_blocks))
        return batch._replace(block_tables=tables, first_blocks=(None,) * len(tables))

    def empty(self) -> tuple[np.ndarray, Batch]:
        """Return a new buffer and its arrays, with padding only: it computes nothing and writes nothing."""
        buffer = self._padding.copy()
        return buffer, self.unpack(buffer)


def _first_blocks(start_n: np.ndarray, window: int, block_size: int) -> np.ndarray:
    """Return the index of the first block that queries from some positions on see through a window."""
    first_n: np.ndarray = np.maximum(start_n - window + 1, 0) // block_size
    return first_n


def _is_shape(each: Any) -> bool:
    return type(each) is tuple and all(isinstance(size, int) for size in each)


class Shapes:
    """Shapes of all steps.

    Args:
        table_width: W, the maximum blocks of a sequence.
        make_work: makes the lists of work of the attention kernels.
        windows, has_states, has_adapters: as in `Layout`.

    Attributes:
        layouts: layouts of the batches of each bucket.
        no_bits: by the number of samples, masks that no sample uses. They stay on the device: they are large, and most
            steps have no others.
    """

    def __init__(
        self, buckets: Buckets, table_width: int, vocab_size: int, placement: Placement,
        make_work: MakeWork = lambda *_: (), *, windows: Windows = (None,), block_size: int = 1,
        has_states: bool = False, has_adapters: bool = False,
    ):  # fmt: skip
        self.buckets, self._placement, self._num_words = buckets, placement, -(-vocab_size // 32)
        self._table_width, self._make_work = table_width, make_work
        self._layout = partial(
            Layout, windows=windows, block_size=block_size, has_states=has_states, has_adapters=has_adapters
        )
        self.layouts: dict[Bucket, Layout] = {}
        self.no_bits: dict[int, jax.Array] = {}
        self.add(buckets.all)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Add shapes of steps, which may run as soon as their arrays exist: another thread may be making batches."""
        for bucket in buckets:
            if bucket not in self.layouts:
                self.layouts[bucket] = self._layout(bucket, self._table_width, self._make_work)
            if bucket.num_seqs not in self.no_bits:
                bits = np.zeros((bucket.num_seqs, self._num_words), np.uint32)
                self.no_bits[bucket.num_seqs] = self._placement.put(bits)
        self.buckets.add(buckets)

    def padding(self, bucket: Bucket, num_tokens: int | None = None, *, context: int = 0) -> jax.Array:
        """Return the buffer of a batch of padding only.

        Args:
            num_tokens: number of tokens that the step computes nevertheless where products skip padding. It draws
                samples after as many of them as it has room for, and these belong to no row. None: all tokens, without
                samples.
            context: tokens before these, which are then decode tokens of one sequence; 0: they attend to nothing.
        """
        layout = self.layouts[bucket]
        buffer, batch = layout.empty()
        if num_tokens is not None:
            num_samples = min(num_tokens, bucket.num_seqs)
            batch.num_tokens[...] = num_tokens
            batch.sampled_from[:num_samples] = np.arange(num_samples)
            samples = batch.samples.view(ROW)[:num_samples]
            samples["rows"], samples["temperature"] = NO_ROW, 1
            if context:
                layout.attend(batch, num_tokens, context)
        return cast(jax.Array, self._placement.put(buffer))


def make_batch(plan: StepPlan, rows: RowTable, buckets: Buckets, layouts: dict[Bucket, Layout]) -> "Made":
    """Lay out a plan's tokens; sequence i of the batch is the plan's i-th entry: a row, or one draft of it.

    Args:
        rows: table with the plan's differences applied; this call consumes the tokens of the plan.
    """
    n = len(plan.rows)
    table = np.fromiter(itertools.chain.from_iterable(plan.rows), np.int32, 4 * n).reshape(n, 4)
    row_n, start_n, count_n, samples_n = table.T
    # A prompt's token never takes the decode path, not even if its chunk has one token: the size of a chunk depends on
    # the other requests, and the bits must not.
    decodes_n = (count_n == 1) & (start_n >= rows.num_prompt_tokens[row_n])
    num_tokens, num_samples = int(count_n.sum()), int(samples_n.sum())
    bucket = buckets.fit(num_tokens, max(n, num_samples), bool(decodes_n.all()))
    buffer, batch = layouts[bucket].empty()
    batch.num_tokens[...] = num_tokens
    batch.context_lens[:n] = start_n + count_n
    batch.decodes[:n] = decodes_n
    layouts[bucket].fill_tables(batch, rows, row_n, start_n)
    decoded_n, drafts_n = rows.tokens_at(row_n, start_n), np.zeros(n, np.int32)
    for entry, token in plan.drafts:
        decoded_n[entry], drafts_n[entry] = token, drafts_n[entry - 1] + 1
    if bucket.decode:
        row_t, position_t = row_n, start_n
        batch.tokens[:num_tokens] = decoded_n
        batch.cu_q_lens[: n + 1] = np.arange(n + 1)
    else:
        row_t = np.repeat(row_n, count_n)
        batch.cu_q_lens[1 : n + 1] = np.cumsum(count_n)
        position_t = np.arange(num_tokens) + np.repeat(start_n - batch.cu_q_lens[:n], count_n)
        batch.tokens[batch.cu_q_lens[:n][decodes_n]] = decoded_n[decodes_n]
        for i in np.flatnonzero(~decodes_n):
            row, start, count, _ = plan.rows[i]
            at = slice(batch.cu_q_lens[i], batch.cu_q_lens[i + 1])
            batch.tokens[at] = rows.tokens[row][start : start + count]
            batch.targets[at] = rows.targets(row, start, start + count)
    batch.cu_q_lens[n + 1 :] = num_tokens
    batch.positions[:num_tokens] = position_t
    for slot_mapping, slots_t in zip(batch.slot_mapping, rows.slots(row_t, position_t)):
        slot_mapping[:num_tokens] = slots_t
    if batch.reads is not None and batch.writes is not None:
        batch.reads[:n], batch.writes[:n] = np.array(plan.pages, np.int32).T
    if batch.adapters is not None:
        batch.adapters[:num_tokens] = rows.adapters[row_t]
    layouts[bucket].fill_work(batch)
    return Made(bucket, buffer, batch, *_fill_samples(batch, plan, rows, row_n, samples_n, drafts_n))


def has_adapters(batch: Batch) -> bool:
    """Return whether a token of a batch in NumPy has an adapter."""
    return batch.adapters is not None and bool((batch.adapters >= 0).any())


def _fill_samples(
    batch: Batch, plan: StepPlan, rows: RowTable, row_n: np.ndarray, samples_n: np.ndarray, drafts_n: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Settings, np.ndarray, np.ndarray]:
    """Write the samples of a batch whose lengths are in place, and return the last five values of `Made`.

    `row_n` and `samples_n` are the row and the number of samples of each sequence, `drafts_n` the number of its drafts
    up to this one.
    """
    sequence_s = np.repeat(np.arange(len(row_n)), samples_n)
    row_s, num_samples = row_n[sequence_s], len(sequence_s)
    batch.sampled_from[:num_samples] = batch.cu_q_lens[1:][sequence_s] - 1
    batch.samples[:num_samples] = rows.sampling_words[row_s]
    samples = batch.samples.view(ROW)[:num_samples, 0]
    samples["positions"] = batch.context_lens[sequence_s]
    samples["last_tokens"] = batch.tokens[batch.sampled_from[:num_samples]]
    samples["num_drafts"] = drafts_n[sequence_s]
    if num_samples > np.count_nonzero(samples_n):  # branches of one row
        branch_seeds(samples, np.arange(num_samples) - np.searchsorted(sequence_s, sequence_s))
    rows.consume(row_s)
    mask_of = np.full(num_samples, -1)
    if plan.masked:
        mask_of[:] = np.array(_masks_of(plan))[sequence_s]
        samples["masked"] = mask_of >= 0
    settings = Settings.ANY if (mask_of >= 0).any() else Settings(rows.settings[row_s].max(initial=0))
    return mask_of, rows.num_top[row_s], settings, rows.keeps[row_s], rows.pools[row_s]


def _masks_of(plan: StepPlan) -> list[int]:
    """Return the index of each entry's mask, -1 for none; the masks of a row are in the order of its entries."""
    masks: dict[int, list[int]] = {}
    for index, (row, _) in reversed([*enumerate(plan.masked)]):
        masks.setdefault(row, []).append(index)
    return [masks[each.row].pop() if each.num_samples and masks.get(each.row) else -1 for each in plan.rows]


class Made(NamedTuple):
    """Batch of a plan, and the data for reading its result.

    Attributes:
        buffer: holds `batch`.
        mask_of: [num_samples], index of the sample's mask in the plan; -1 for none.
        num_top: [num_samples], as `Admitted.num_top`, -1 for None.
        settings: sampling settings that the samples use.
        keeps: [num_samples], whether to return the tokens that each sample is drawn from.
        pools: [num_samples], whether to return the hidden state that each sample is drawn from.
    """

    bucket: Bucket
    buffer: np.ndarray
    batch: Batch
    mask_of: np.ndarray
    num_top: np.ndarray
    settings: Settings
    keeps: np.ndarray
    pools: np.ndarray

"""Host's copy of each row of the device, updated by the differences in plans. Imports only numpy."""

import numpy as np

from jpaged.core.params import SamplingParams
from jpaged.core.plan import NO_SLOT, Admitted, StepPlan
from jpaged.core.pooling import MEAN
from jpaged.runtime.sampling_row import NEUTRAL, ROW_WORDS, Value, pack


class RowTable:
    """Tokens, block table and sampling parameters of R rows.

    Attributes:
        tokens: for each row, its tokens at admission.
        block_tables: for each group of layers: [R, W] int32.
        sampling: [R] of `ROW`, the sampling row of the next sample; `sampling_words` is the same memory, [R, F] int32.
        settings: [R] int32, the `Settings` of each row without a mask.
        num_top: [R], number of the most likely tokens to return with each sample; -1 for neither list nor rank.
        prompt_top: the same with each token of the prompt.
        adapters: [R] int32, the slot of each row's adapter, or `NO_SLOT`.
        keeps: [R] bool, whether to return the tokens that each sample is drawn from.
        pools: [R] bool, whether to return the hidden state that each sample is drawn from.
        sums: [R] bool, whether to return the sums of the hidden states before the tokens of a prompt.
    """

    def __init__(self, num_rows: int, table_width: int, block_size: int, num_groups: int = 1):
        self._block_size = block_size
        self.tokens: list[np.ndarray] = [np.empty(0, np.int32)] * num_rows
        self.block_tables = np.zeros((num_groups, num_rows, table_width), np.int32)
        self.sampling = np.full(num_rows, NEUTRAL)
        self.sampling_words = self.sampling.view(np.int32).reshape(num_rows, ROW_WORDS)
        self.settings = np.zeros(num_rows, np.int32)
        self.num_top = np.full(num_rows, -1, np.int32)
        self.prompt_top = [-1] * num_rows
        self.keeps, self.pools, self.sums = (np.zeros(num_rows, bool) for _ in range(3))
        self.adapters = np.full(num_rows, NO_SLOT, np.int32)
        self._num_known = np.zeros(num_rows, np.int32)  # the lengths of `tokens`
        self._next = -1 - np.arange(num_rows, dtype=np.int32)  # the token after `tokens`, or -1 - row if it is a sample
        self._num_scored = np.zeros(num_rows, np.int32)  # targets that have a logprob already

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        """Number of prompt tokens of each row, [R] int32."""
        return self.sampling["num_prompt_tokens"]

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's differences."""
        if plan.row_copies:
            sources, destinations = map(list, zip(*plan.row_copies))
            of_rows = self.sampling, self.settings, self.num_top, self.keeps, self.pools, self.adapters
            for array in (*self.block_tables, *of_rows, self._num_known, self._num_scored):
                array[destinations] = array[sources]
            self.sampling["rows"][destinations] = destinations
            for destination, tokens in zip(destinations, [self.tokens[source] for source in sources]):
                self.tokens[destination] = tokens
        for admitted in plan.admitted:
            self._admit(admitted)
        for row, token, seed in plan.chosen:
            self._next[row] = token
            self.sampling["seeds"][row] = _halves(seed)
        if plan.entries:
            rows, groups, columns, block_ids = np.array(plan.entries, np.int32).T
            self.block_tables[groups, rows, columns] = block_ids

    def tokens_at(self, rows_n: np.ndarray, positions_n: np.ndarray) -> np.ndarray:
        """Return one token of each of some rows, [n] int32; `-1 - row` if it is the row's last sample."""
        tokens_n: np.ndarray = self._next[rows_n]
        for i in np.flatnonzero(positions_n < self._num_known[rows_n]):
            tokens_n[i] = self.tokens[rows_n[i]][positions_n[i]]
        return tokens_n

    def consume(self, rows_n: np.ndarray) -> None:
        """Record that some rows have sampled: their next tokens are their samples."""
        self._next[rows_n] = -1 - rows_n

    def slots(self, rows_t: np.ndarray, positions_t: np.ndarray) -> list[np.ndarray]:
        """Return the flat slots of tokens, for each group of layers: [T] int32."""
        columns_t, offsets_t = np.divmod(positions_t, self._block_size)
        return [table[rows_t, columns_t] * self._block_size + offsets_t for table in self.block_tables]

    def targets(self, row: int, start: int, end: int) -> np.ndarray:
        """Return the prompt's token after each of the positions [start, end) if its logprob is wanted, else -1."""
        tokens, last = self.tokens[row], int(self.num_prompt_tokens[row]) - 1
        targets = np.full(end - start, -1, np.int32)
        first, stop = max(start, int(self._num_scored[row])), min(end, last)
        if first < stop:
            targets[first - start : stop - start] = tokens[first + 1 : stop + 1]
        return targets

    def _admit(self, admitted: Admitted) -> None:
        row, params = admitted.row, admitted.params
        self.tokens[row] = np.array(admitted.token_ids, np.int32)
        self.adapters[row] = admitted.adapter_slot
        for block_tables, block_ids in zip(self.block_tables, admitted.block_ids, strict=True):
            block_tables[row, : len(block_ids)] = np.maximum(block_ids, 0)  # `GONE` blocks are not read
        self._num_known[row], self._next[row] = len(admitted.token_ids), -1 - row
        self._num_scored[row] = len(admitted.token_ids) if admitted.num_scored is None else admitted.num_scored
        self.prompt_top[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        pooling = params.pooling if isinstance(params, SamplingParams) else None
        self.keeps[row] = isinstance(params, SamplingParams) and params.kept_tokens
        self.pools[row], self.sums[row] = pooling is not None, pooling == MEAN
        self.num_top[row] = -1 if admitted.num_top is None else admitted.num_top
        computed: dict[str, Value] = {
            "rows": row,
            "seeds": _halves(admitted.seed),
            "num_prompt_tokens": admitted.num_prompt_tokens,
            "num_top": 0 if admitted.num_top is None else max(admitted.num_top, 1),  # a rank comes with a list
        }
        self.sampling[row], self.settings[row] = pack(params, computed)


def branch_seeds(samples: np.ndarray, branch_s: np.ndarray) -> None:
    """Add each sample's branch to its seed, in place, in samples [S] of `ROW`."""
    high_s, low_s = samples["seeds"].astype(np.uint64).T
    seed_s = (high_s << 32) + low_s + branch_s.astype(np.uint64)
    samples["seeds"] = np.stack(_halves(seed_s), axis=1)


def _halves[T: (int, np.ndarray)](seed: T) -> tuple[T, T]:
    """Return the high and the low 32 bits of seeds."""
    return seed >> 32, seed & 0xFFFFFFFF

"""Host's copy of each row of the device, updated by the differences in plans. Imports only numpy."""

import numpy as np

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, StepPlan

# Below this, dividing by the temperature would overflow; it is greedy to any reader.
MIN_TEMPERATURE = 1e-5

# The sampling scalars of a row, in words of 32 bits.
SCALARS = np.dtype(
    [
        ("temperature", np.float32),  # 0 = greedy
        ("top_k", np.int32),  # 0 = all
        ("top_p", np.float32),  # 1 = all
        ("min_p", np.float32),  # 0 = all
        ("seed_high", np.uint32),
        ("seed_low", np.uint32),
        ("presence", np.float32),  # 0 = none
        ("frequency", np.float32),  # 0 = none
        ("repetition", np.float32),  # 1 = none
        ("stateful", np.int32),  # whether bias and penalties apply
        ("beam", np.int32),  # process log-probabilities, as beam search does, and list the processed ones
        ("num_top", np.int32),  # how many of the best tokens to list; 0 = none, and no rank either
        ("num_prompt_tokens", np.int32),
    ]
)
NUM_SCALARS = SCALARS.itemsize // 4


class RowTable:
    """Tokens, block table and sampling parameters of R rows.

    Attributes:
        tokens: for each row, its tokens at admission.
        block_tables: [R, W] int32.
        scalars: [R] of `SCALARS`; `scalar_bits` is the same memory as [R, F] int32.
        num_top: [R], number of the most likely tokens to return with each sample; -1 for neither list nor rank.
        prompt_top: the same with each token of the prompt.
    """

    def __init__(self, num_rows: int, table_width: int, block_size: int):
        self._block_size = block_size
        self.tokens: list[np.ndarray] = [np.empty(0, np.int32)] * num_rows
        self.block_tables = np.zeros((num_rows, table_width), np.int32)
        self.scalars = np.zeros(num_rows, SCALARS)
        self.scalar_bits = self.scalars.view(np.int32).reshape(num_rows, -1)
        self.num_top = np.full(num_rows, -1, np.int32)
        self.prompt_top = [-1] * num_rows
        self._num_known = np.zeros(num_rows, np.int32)  # the lengths of `tokens`
        self._next = -1 - np.arange(num_rows, dtype=np.int32)  # a row's token after them, or where it is
        self._num_scored = np.zeros(num_rows, np.int32)  # targets that have a logprob already

    @staticmethod
    def empty_scalars() -> np.ndarray:
        """Return the scalars of padding, [F] int32: greedy, no filters, no state."""
        nothing = np.zeros(1, SCALARS)
        nothing["top_p"] = nothing["repetition"] = 1
        return nothing.view(np.int32)

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        """Number of prompt tokens of each row, [R] int32."""
        return self.scalars["num_prompt_tokens"]

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's differences."""
        if plan.row_copies:
            sources, destinations = map(list, zip(*plan.row_copies))
            for array in (self.block_tables, self.scalars, self.num_top, self._num_known, self._num_scored):
                array[destinations] = array[sources]
            for destination, tokens in zip(destinations, [self.tokens[source] for source in sources]):
                self.tokens[destination] = tokens
        for admitted in plan.admitted:
            self._admit(admitted)
        for row, token, seed in plan.chosen:
            self._next[row] = token
            self._set_seed(row, seed)
        if plan.entries:
            rows, indexes, block_ids = np.array(plan.entries, np.int32).T
            self.block_tables[rows, indexes] = block_ids

    def tokens_at(self, rows_n: np.ndarray, positions_n: np.ndarray) -> np.ndarray:
        """Return one token of each of some rows, [n] int32; `-1 - row` if it is the row's last sample."""
        tokens_n: np.ndarray = self._next[rows_n]
        for i in np.flatnonzero(positions_n < self._num_known[rows_n]):
            tokens_n[i] = self.tokens[rows_n[i]][positions_n[i]]
        return tokens_n

    def consume(self, rows_n: np.ndarray) -> None:
        """Record that some rows have sampled: their next tokens are their samples."""
        self._next[rows_n] = -1 - rows_n

    def slots(self, rows_t: np.ndarray, positions_t: np.ndarray) -> np.ndarray:
        """Return the flat slots, [T] int32, of tokens."""
        size = self._block_size
        slots_t: np.ndarray = self.block_tables[rows_t, positions_t // size] * size + positions_t % size
        return slots_t

    def targets(self, row: int, start: int, end: int) -> np.ndarray:
        """Return the prompt's token after each of the positions [start, end) if its logprob is wanted, else -1."""
        tokens, last = self.tokens[row], int(self.num_prompt_tokens[row]) - 1
        targets = np.full(end - start, -1, np.int32)
        first, stop = max(start, int(self._num_scored[row])), min(end, last)
        if first < stop:
            targets[first - start : stop - start] = tokens[first + 1 : stop + 1]
        return targets

    def branch_seeds(self, bits_sf: np.ndarray, branch_s: np.ndarray) -> None:
        """Add each sample's branch to the seed of its row, in place, in [S, F] bits of scalars."""
        scalars = bits_sf.view(SCALARS)[:, 0]
        seed = (scalars["seed_high"].astype(np.uint64) << np.uint64(32)) + scalars["seed_low"]
        seed += branch_s.astype(np.uint64)
        drawn = scalars["temperature"] > 0
        scalars["seed_high"] = np.where(drawn, seed >> np.uint64(32), 0)
        scalars["seed_low"] = np.where(drawn, seed & np.uint64(0xFFFFFFFF), 0)

    def _admit(self, admitted: Admitted) -> None:
        row, params = admitted.row, admitted.params
        self.tokens[row] = np.array(admitted.token_ids, np.int32)
        self.block_tables[row, : len(admitted.block_ids)] = admitted.block_ids
        self._num_known[row], self._next[row] = len(admitted.token_ids), -1 - row
        self._num_scored[row] = len(admitted.token_ids) if admitted.num_scored is None else admitted.num_scored
        prompt_top = params.prompt_logprobs
        self.prompt_top[row] = -1 if prompt_top is None else prompt_top
        self.num_top[row] = -1 if admitted.num_top is None else admitted.num_top
        self.scalar_bits[row] = self.empty_scalars()
        scalars = self.scalars[row]
        scalars["num_prompt_tokens"] = admitted.num_prompt_tokens
        scalars["num_top"] = 0 if admitted.num_top is None else max(admitted.num_top, 1)  # a rank comes with a list
        if not isinstance(params, SamplingParams):
            scalars["beam"] = True
        elif params.temperature >= MIN_TEMPERATURE:
            scalars["temperature"], scalars["top_p"], scalars["min_p"] = params.temperature, params.top_p, params.min_p
            scalars["top_k"] = max(params.top_k, 0) if params.top_k < 2**31 else 0
            self._set_seed(row, admitted.seed)
        if params.has_state:
            scalars["stateful"] = True
            scalars["presence"], scalars["frequency"] = params.presence_penalty, params.frequency_penalty
            scalars["repetition"] = params.repetition_penalty

    def _set_seed(self, row: int, seed: int) -> None:
        if self.scalars["temperature"][row] > 0:
            self.scalars["seed_high"][row], self.scalars["seed_low"][row] = seed >> 32, seed & 0xFFFFFFFF

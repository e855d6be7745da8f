"""Sums of products of a few rows, for which weights are read from memory once, in one stream or in several."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.code import F32, I8, I32, I64, Machine, Value, Variable
from pallas_kernels.cpu.matrix import CACHE_LINE, MOST_GROUPS, Matrix

OUTPUTS = 4  # that are computed together
UNROLLED, MOST_UNROLLED = 4, 8  # loads of a turn of the loop without groups; most loads of a group without a loop
AHEAD, EACH_AHEAD = 2048, 1024  # prefetch distances in bytes: of a single stream, and of each of several


class Block(NamedTuple):
    """Outputs of a matrix, and the rows for which they are computed.

    Attributes:
        rows, num_rows: the numbers of the rows, and how many they are.
        sums_to: memory for the sums [num_rows, width], and for one more row if the number is odd.
        first_o: the matrix's row of the first output.
        stop_o: the row after the last one that the unit of the block reads.
    """

    matrix: Matrix
    rows: Value
    num_rows: Value
    sums_to: Value
    width: Value
    first_o: Value
    stop_o: Value


def has_streams(matrix: Matrix, num_t: int) -> bool:
    """Return whether outputs that are computed together lie far apart, so that each has its own stream of weights.

    With AVX-512, an Emerald Rapids multiplies weights of all kinds in four streams at twice the rate of one, and at up
    to 1.2 times this rate with requests. A Zen 5 reads fastest in one stream, with requests.

    A core of a Zen 3 reads four streams at 1.3 times the rate of one. It reads twelve at a lower rate: those of the
    factors of groups would be further ones. Requests of the code make it slower, unless multiplications take longer.
    """
    machine = Machine.host()
    if machine.lanes == 16:
        return not machine.cpu.startswith("znver")
    return not matrix.form.group and (num_t <= 2 or not matrix.is_narrow)


def outputs_together(matrix: Matrix, num_o: Value, num_t: int) -> Iterator[list[Value]]:
    """Write loops over `num_o` outputs, and yield the numbers of the outputs of each turn, for `num_t` rows."""
    code, whole = matrix.code, num_o - num_o % OUTPUTS
    distance, stop, step = num_o * 0 + 1, whole, OUTPUTS
    if has_streams(matrix, num_t):
        distance, stop, step = num_o // OUTPUTS, num_o // OUTPUTS, 1
    with code.loop(0, stop, step) as o:
        yield [o + distance * i for i in range(OUTPUTS)]
    with code.loop(whole, num_o) as o:
        yield [o]


def write_sums(block: Block, x: Value, num_o: Value, most_t: int) -> None:
    """Write the sums of a block of `num_o` outputs for 1 to `most_t` rows of x."""
    code = block.matrix.code
    # Of more than four rows, code for even numbers: the last row stands twice for odd ones.
    sizes = [num_t for num_t in range(1, most_t + 1) if num_t <= 4 or num_t % 2 == 0]
    for below, num_t in itertools.pairwise([0, *sizes]):
        is_size = code.both(block.num_rows.compare(">", below), block.num_rows.compare("<=", num_t))
        with code.when(is_size):
            for outputs in outputs_together(block.matrix, num_o, num_t):
                _Stream(block, x, outputs, num_t).write()


class _Stream:
    """Writer of the sums of some outputs for some rows."""

    def __init__(self, block: Block, x: Value, outputs: list[Value], num_t: int):
        self.block, self.matrix, self.outputs, self.num_t = block, block.matrix, outputs, num_t
        self.has_streams = has_streams(block.matrix, num_t)
        matrix, self.code = self.matrix, self.matrix.code
        row_bytes = matrix.inputs * (2 if matrix.dots else 4)
        last = block.num_rows - 1
        numbers = [self.code.load(block.rows, self.code.minimum(last * 0 + t, last), I64) for t in range(num_t)]
        self.x = [self.code.at(x, number * row_bytes, I8) for number in numbers]
        self.rows = [block.first_o + o for o in outputs]
        self.weights = [matrix.address(row) for row in self.rows]
        zero = self.code.value(0.0, ir.VectorType(F32, matrix.lanes))
        self.sums = {(t, i): Variable(zero) for t in range(num_t) for i in range(len(outputs))}

    def write(self) -> None:
        """Write the sums and their store."""
        code, matrix, num_o = self.code, self.matrix, len(self.outputs)
        self.factors = matrix.factors(self.rows)
        # Narrow weights take more instructions for each byte, which those of several outputs overlap.
        together = num_o if matrix.is_narrow or self.has_streams else 1
        while together > 1 and together * self.num_t > Machine.host().registers // 2:
            together //= 2
        for first in range(0, num_o, together):
            self._add_all(range(first, first + together))
        pairs, lanes = list(self.sums), matrix.lanes
        for n in range(0, len(pairs), lanes):
            several = pairs[n : n + lanes]
            totals = code.sums([self.sums[pair].get() for pair in several])
            for lane, (t, i) in enumerate(several):
                code.store(code.element(totals, lane), self.block.sums_to, self.block.width * t + self.outputs[i])

    def _add_all(self, outputs: range) -> None:
        """Add the products of all inputs to the sums of some outputs."""
        code, matrix, lanes = self.code, self.matrix, self.matrix.lanes
        step, depth = matrix.step, matrix.inputs
        turn = matrix.form.group or UNROLLED * step
        turns = depth // turn
        with code.loop(0, turns) as n:
            if not self.has_streams:
                self._prefetch(outputs, n, turn)
            elif lanes == 16:
                self._prefetch_each(outputs, n, turn)
            if turn <= MOST_UNROLLED * step:
                for part in range(0, turn, step):
                    self._add(outputs, n * turn + part, n)
            else:
                with code.loop(n * turn, (n + 1) * turn, step) as k:
                    self._add(outputs, k, n)
        if matrix.form.group:
            return
        whole = depth - depth % step
        with code.loop(turns * turn, whole, step) as k:
            self._add(outputs, k, k)
        if not matrix.dots:
            with code.when(whole.compare("<", depth)):
                self._add(outputs, whole, whole, depth - whole)

    def _prefetch(self, outputs: range, n: Value, turn: int) -> None:
        """Request as many bytes of the single stream as a turn of the loop multiplies."""
        matrix, size = self.matrix, self.matrix.num_bytes(turn) * len(outputs)
        # Outputs that are multiplied together are read side by side: the requests are for the next ones.
        ahead = len(outputs) if len(outputs) > 1 else 0
        first = (self.rows[0] + (outputs[0] + ahead)) * matrix.row_bytes + AHEAD
        last = self.block.stop_o * matrix.row_bytes - CACHE_LINE
        for line in range(0, size, CACHE_LINE):
            matrix.prefetch_once(self.code.minimum(first + (n * size + line), last))

    def _prefetch_each(self, outputs: range, n: Value, turn: int) -> None:
        """Request as many bytes of each stream as a turn of the loop multiplies; the next row is behind the last byte.

        Requests behind the end of the matrix do nothing.
        """
        size = self.matrix.num_bytes(turn)
        for i in outputs:
            for line in range(0, size, CACHE_LINE):
                self.matrix.prefetch_soon(self.rows[i] * self.matrix.row_bytes + (n * size + (line + EACH_AHEAD)))

    def _add(self, outputs: range, k: Value, group: Value, left: Value | None = None) -> None:
        """Add the products of `step` inputs from k on, or of the `left` last ones."""
        code, matrix, lanes = self.code, self.matrix, self.matrix.lanes
        multiply = code.dot_bf16 if matrix.dots else code.fma
        places = {i: group + MOST_GROUPS * i for i in outputs}
        weights = [matrix.weights(self.weights[i], k, left, self.factors, places[i]) for i in outputs]
        for n in range(len(weights[0])):
            at = k + n * lanes
            for t, x in enumerate(self.x):
                if matrix.dots:
                    numbers = code.load_vector(x, at >> 1, I32, lanes)
                elif left is None:
                    numbers = code.load_vector(x, at, F32, lanes)
                else:
                    numbers = code.load_part(x, at, F32, lanes, left)
                for weight, i in zip(weights, outputs):
                    total = self.sums[t, i]
                    total.set(multiply(weight[n], numbers, total.get()))

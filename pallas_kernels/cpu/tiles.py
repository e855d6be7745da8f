"""Sums of products of many rows, whose weights become float32 in the first cache once for all of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.code import F32, I32, I64, Value, Variable
from pallas_kernels.cpu.matrix import Load
from pallas_kernels.cpu.stream import Block

BLOCK = 64  # rows of x that stay in the second cache together with their sums
PREFETCHED = 1  # cache lines of later weights that a tile of many requests in each turn of the loop
WHOLE, SEGMENT = 1024, 512  # a sum of more numbers than WHOLE runs in segments, whose weights stay in the first cache


class Part(NamedTuple):
    """Rows and inputs of a block that are multiplied together.

    Attributes:
        so_far: memory for sums up to a segment.
        converted: memory for float32 weights of a strip; None: weights are multiplied as they are.
        first, stop: places of the rows among those of the block.
        begin, end: inputs.
    """

    so_far: Value
    converted: Value | None
    first: Value
    stop: Value
    begin: Value
    end: Value


class Tiles:
    """Writer of the sums of a block, in tiles of some outputs and some rows whose sums are in registers.

    Args:
        x: address of all rows.
        tile_o, tile_t: the outputs and the rows of a tile.
        width: most outputs of the block.
    """

    def __init__(self, block: Block, x: Value, tile_o: int, tile_t: int, width: int):
        self.block, self.matrix, self.x, self.code = block, block.matrix, x, block.matrix.code
        self.lanes, self.tile_o, self.tile_t, self.width = block.matrix.lanes, tile_o, tile_t, width

    def write(self, num_o: Value) -> None:
        """Write the sums of a block of `num_o` outputs."""
        code, block, matrix, tile_o = self.code, self.block, self.matrix, self.tile_o
        so_far = code.scratch(BLOCK * self.width * self.lanes, F32)
        converted = None if matrix.is_direct else code.scratch(tile_o * (WHOLE + matrix.step), F32)
        depth, last_o = matrix.inputs, num_o - num_o % tile_o
        segment = code.select(depth.compare("<=", WHOLE), depth, code.value(SEGMENT, I64))

        def part(first: Value, begin: Value) -> Part:
            stop, end = code.minimum(first + BLOCK, block.num_rows), code.minimum(begin + segment, depth)
            return Part(so_far, converted, first, stop, begin, end)

        def strips() -> Iterator[tuple[Value, int]]:
            with code.loop(0, last_o, tile_o) as o:
                yield o, tile_o
            with code.loop(last_o, num_o) as o:
                yield o, 1

        with code.loop(0, block.num_rows, BLOCK) as first, code.loop(0, depth, segment) as begin:
            for o, several in strips():
                self._strip(part(first, begin), o, several)

    def _strip(self, part: Part, o: Value, num_o: int) -> None:
        """Write the sums of some outputs for many rows, with weights that are converted once."""
        code, tile_t, matrix, converted = self.code, self.tile_t, self.matrix, part.converted
        load, step = matrix.loads(self.block.first_o + o, num_o, part.begin, part.end), matrix.step
        if converted is not None:
            load, step = self._convert(part, load, num_o, converted), self.lanes
        left = (part.stop - part.first) % tile_t
        with code.loop(part.first, part.stop - left, tile_t) as r:
            self._tile(part, o, num_o, r, tile_t, load, step)
        for num_t in range(1, tile_t):
            with code.when(left.compare("==", num_t)):
                self._tile(part, o, num_o, part.stop - left, num_t, load, step)

    def _convert(self, part: Part, load: Load, num_o: int, converted: Value) -> Load:
        """Write the weights of a strip as float32, and return their load."""
        code, step, matrix = self.code, self.matrix.step, self.matrix
        width, whole = WHOLE + step, part.end - part.end % step

        def convert(i: Value, k: Value, left: Value | None = None) -> None:
            for n, vector in enumerate(load(i, k, left)):
                code.store_vector(vector, converted, i * width + (k - part.begin) + n * self.lanes)

        with code.loop(0, num_o) as i:
            with code.loop(part.begin, whole, step) as k:
                convert(i, k)
            if not matrix.form.group:  # groups end with steps
                with code.when(whole.compare("<", part.end)):
                    convert(i, whole, part.end - whole)
        return lambda i, k, left=None: [code.load_vector(converted, i * width + (k - part.begin), F32, self.lanes)]

    def _tile(self, part: Part, o: Value, num_o: int, r: Value, num_t: int, load: Load, step: int) -> None:
        """Write the sums of a tile over the inputs of a part; `load` gives the weights of `step` inputs."""
        code, lanes, x, block = self.code, self.lanes, self.x, self.block
        matrix, depth = self.matrix, self.matrix.inputs
        at_t = [code.load(block.rows, r + j, I64) for j in range(num_t)]
        pairs = [(j, i) for j in range(num_t) for i in range(num_o)]
        place = (o * BLOCK + (r - part.first) * num_o) * lanes  # of the sums up to the segment
        sums = {pair: Variable(code.value(0.0, ir.VectorType(F32, lanes))) for pair in pairs}
        with code.when(part.begin.compare(">", 0)):
            for n, pair in enumerate(pairs):
                sums[pair].set(code.load_vector(part.so_far, place + n * lanes, F32, lanes))

        def add(k: Value, load_x: Callable[[Value], Value], left: Value | None = None) -> None:
            w = [load(i, k, left) for i in range(num_o)]
            multiply = code.dot_bf16 if matrix.dots else code.fma
            for n in range(len(w[0])):
                for j in range(num_t):
                    x_j = load_x(at_t[j] * depth + k + n * lanes)
                    for i in range(num_o):
                        sums[j, i].set(multiply(w[i][n], x_j, sums[j, i].get()))

        whole, line = part.end - part.end % step, max(step, matrix.inputs_of_line)
        # Each tile of many requests other cache lines of the weights of later outputs.
        prefetched = num_o if num_t < self.tile_t else PREFETCHED
        ahead = block.first_o + o + matrix.rows_ahead(num_o) + (r - part.first) // num_t * prefetched % num_o
        with code.loop(part.begin, whole, line) as first_k:
            for n in range(prefetched):
                matrix.prefetch(ahead + n, first_k)
            with code.loop(first_k, code.minimum(first_k + line, whole), step) as k:
                if matrix.dots:
                    add(k, lambda at: code.load_vector(x, at // 2, I32, lanes))
                else:
                    add(k, lambda at: code.load_vector(x, at, F32, lanes))
        if not (matrix.form.group or matrix.dots):  # these end with steps
            with code.when(whole.compare("<", part.end)):
                left = part.end - whole
                add(whole, lambda at: code.load_part(x, at, F32, lanes, left), left)
        with code.when(part.end.compare("<", depth)):
            for n, pair in enumerate(pairs):
                code.store_vector(sums[pair].get(), part.so_far, place + n * lanes)
        with code.when(part.end.compare(">=", depth)):
            for n in range(0, len(pairs), lanes):
                several = pairs[n : n + lanes]
                totals = code.sums([sums[pair].get() for pair in several])
                for lane, (j, i) in enumerate(several):
                    code.store(code.element(totals, lane), block.sums_to, block.width * (r + j) + (o + i))

"""Sums of products of rows of bytes with weights of 8 and 4 bits in groups, by dot instructions (AVX-512 or AVX VNNI).

Such an instruction adds four products of unsigned and signed bytes to each lane of a vector. The unsigned ones are
weights plus an offset. What the offset adds is known from x alone, and the sums of a chunk begin with its opposite.
They become float32, are scaled, and are added to those of the chunks before.
"""

from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu import stream
from pallas_kernels.cpu.code import F32, I8, I32, I64, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.matrix import MOST_GROUPS, Factors, Matrix
from pallas_kernels.cpu.numbers import loader
from pallas_kernels.cpu.packed import HEAD_BYTES, Packed
from pallas_kernels.cpu.stream import EACH_AHEAD
from pallas_kernels.weights import E2M1, LARGEST, MIDDLE, PACKED, ROW_GROUP, SMALLEST, Format

HALF = PACKED // 2  # inputs of a group in the low or the high halves of its bytes


class Layout(NamedTuple):
    """Layout of a chunk of inputs: as many as fill a vector with bytes of weights.

    A packed chunk of x has the bytes that belong to the low halves of weights and those of the high halves, or all of
    them, and three vectors with a number for each lane: scales, int32 sums times the offset, and scaled sums.

    Attributes:
        lanes: float32 numbers of a vector.
        halves: vectors of bytes of x.
        offset: what is added to weights so that they are not negative.
        factor: of the scales of x; numbers of MXFP4 are multiplied by 2.
    """

    lanes: int
    halves: int
    offset: int
    factor: float

    @classmethod
    def of(cls, form: Format) -> "Layout":
        """Return the layout for the weights of a form."""
        lanes = Machine.host().lanes
        if form.is_mxfp4:
            return cls(lanes, 2, int(2 * max(E2M1)), 0.5)
        if form.is_packed:
            return cls(lanes, 2, 0 if form.minima else MIDDLE, 1.0)
        return cls(lanes, 1, 128, 1.0)

    @property
    def inputs(self) -> int:
        """Number of inputs of a chunk."""
        return 4 * self.lanes * self.halves

    @property
    def vectors(self) -> int:
        """Number of vectors of a packed chunk."""
        return self.halves + 3

    def row_bytes[N: (Value, int)](self, inputs: N) -> N:
        """Return the bytes of a packed row, with its state."""
        return (inputs + (self.inputs - 1)) // self.inputs * (self.vectors * 4 * self.lanes) + HEAD_BYTES


def has_code(form: Format, inputs: int) -> bool:
    """Return whether there is code for weights of a form."""
    if form.group is None or not (form.takes_int8_rows and Machine.host().has_byte_dot):
        return False
    chunk = Layout.of(form).inputs
    is_whole = chunk % form.group == 0 or form.group % chunk == 0  # chunks have whole groups, or groups whole chunks
    return is_whole and inputs // form.group <= MOST_GROUPS


def packed_shape(form: Format, rows: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the int32 array for packed rows of x."""
    return rows, Layout.of(form).row_bytes(inputs) // 4


class ByteRows(Packed):
    """Rows of x as bytes, with a scale for each `ROW_GROUP` inputs (`weights.rounded_rows`).

    Args:
        dtype: that of x.
    """

    def __init__(self, call: CallFrame, x: int, packed: int, dtype: str, form: Format):
        super().__init__(call, x, packed, 1)
        self.layout, self._dtype = Layout.of(form), dtype
        self._tile_bytes = self.layout.row_bytes(self.inputs)

    def chunk(self, row: Value, number: Value) -> list[Value]:
        """Return the addresses of the vectors of a chunk."""
        size = 4 * self.layout.lanes
        at = number * (self.layout.vectors * size)
        return [self.code.at(self._packed_at(row), at + n * size, I8) for n in range(self.layout.vectors)]

    def _pack(self, tile: Value) -> None:
        code, layout = self.code, self.layout
        groups = layout.inputs // ROW_GROUP
        with code.loop(0, (self.inputs + (layout.inputs - 1)) // layout.inputs) as number:
            vectors, first = self.chunk(tile, number), number * layout.inputs
            count = code.minimum((self.inputs - first) // ROW_GROUP, first * 0 + groups)
            with code.loop(0, count) as group:
                self._pack_group(tile * self.inputs + first + group * ROW_GROUP, group, vectors)
            with code.loop(count, groups) as group:
                zero = code.value(0.0, ir.VectorType(F32, HALF))
                self._store_group([zero, zero], code.value(0.0, F32), group, vectors)
            self._write_sums(vectors)

    def _pack_group(self, at: Value, group: Value, vectors: list[Value]) -> None:
        """Write the bytes and the scale of a group."""
        code, layout = self.code, self.layout
        _, load = loader(self._dtype, HALF)
        halves = [load(code, self._x, at), load(code, self._x, at + HALF)]
        sizes = [code.cast("bitcast", half, I32) & 0x7FFFFFFF for half in halves]  # whole numbers: NaN is the largest
        largest = code.cast("bitcast", code.highest(code.maximum(*sizes)), F32)
        scale = largest * (1 / LARGEST["int8"])
        inverse = code.select(largest.compare(">", SMALLEST), 1.0 / scale, code.value(0.0, F32))
        whole = [code.intrinsic(f"llvm.rint.v{HALF}f32", half * code.splat(inverse, HALF)) for half in halves]
        scale = scale * layout.factor + (largest - largest)  # NaN if a number is infinite
        self._store_group(whole, scale, group, vectors)

    def _store_group(self, halves: list[Value], scale: Value, group: Value, vectors: list[Value]) -> None:
        """Write the store of a group. No byte has another value before: another thread may read it already."""
        code, layout = self.code, self.layout
        for n, half in enumerate(halves):
            numbers = code.cast("trunc", code.cast("fptosi", half, I32), I8)
            if layout.halves == 2:
                code.store_vector(numbers, vectors[n], group * HALF)
            else:
                code.store_vector(numbers, vectors[0], group * ROW_GROUP + n * HALF)
        lanes = layout.lanes * ROW_GROUP // layout.inputs
        code.store_vector(code.splat(scale, lanes), vectors[layout.halves], group * lanes)

    def _write_sums(self, vectors: list[Value]) -> None:
        """Write the sums of the bytes of each lane."""
        code, (lanes, halves, offset, _) = self.code, self.layout
        ones = code.value(0x01010101, ir.VectorType(I32, lanes))
        sums = code.value(0, ir.VectorType(I32, lanes))
        for vector in vectors[:halves]:
            sums = code.dot_bytes(ones, code.load_vector(vector, 0, I32, lanes), sums)
        code.store_vector(sums * -offset, vectors[halves + 1], 0)
        scaled = code.cast("sitofp", sums, F32) * code.load_vector(vectors[halves], 0, F32, lanes)
        code.store_vector(scaled, vectors[halves + 2], 0)


class ByteDots:
    """Writer of the sums of a block.

    Args:
        rows: the numbers of the rows of the block.
        tile_t: rows that are computed together.
        width: most outputs that are computed at once.
        first: number of the row with which the packing begins.
    """

    def __init__(self, x: ByteRows, rows: Value, count: Value, tile_t: int, width: Value, first: Value):
        self.code, self.width, self._x, self._rows, self._count, self._tile_t = x.code, width, x, rows, count, tile_t
        x.pack(x.code.load(rows, 0, I64), x.code.load(rows, count - 1, I64) + 1, first)

    def place(self, r: Value, t: Value) -> Value:
        """Return the place of the sums of row t, the r-th one of the block."""
        return r

    def write(self, matrix: Matrix, outputs: tuple[Value, Value, Value], sums_to: Value) -> None:
        """Write sums [rows, width] of some outputs: the first one, the one after the last, and the end of the unit."""
        code, tile_t, (start, stop, end) = self.code, self._tile_t, outputs
        left = self._count % tile_t
        for places in stream.outputs_together(matrix, stop - start, 1):
            numbers = [start + place for place in places]
            together = _Outputs(
                matrix, numbers, [matrix.address(each) for each in numbers], matrix.factors(numbers), end
            )

            def tile(r: Value, num_t: int, together: _Outputs = together, places: list[Value] = places) -> None:
                rows = [code.load(self._rows, r + j, I64) for j in range(num_t)]
                to = code.at(sums_to, r * self.width, F32)
                _Tile(self._x, together, rows).write(to, self.width, places)

            with code.loop(0, self._count - left, tile_t) as r:
                tile(r, tile_t)
            for num_t in range(1, tile_t):
                with code.when(left.compare("==", num_t)):
                    tile(self._count - left, num_t)


class _Outputs(NamedTuple):
    """Outputs of a matrix that are computed together.

    Attributes:
        weights: addresses of their weights.
        end: the output after the last one of the unit.
    """

    matrix: Matrix
    numbers: list[Value]
    weights: list[Value]
    factors: Factors
    end: Value


class _Tile:
    """Writer of the sums of some outputs for some rows."""

    def __init__(self, x: ByteRows, outputs: _Outputs, rows: list[Value]):
        self.code, self._x, self._outputs, self._rows, self._layout = x.code, x, outputs, rows, x.layout
        zero = self.code.value(0.0, ir.VectorType(F32, x.layout.lanes))
        self._sums = {(j, i): Variable(zero) for j in range(len(rows)) for i in range(len(outputs.numbers))}

    def write(self, sums_to: Value, width: Value, places: list[Value]) -> None:
        """Write the sums, and their store at some places."""
        code, inputs, lanes = self.code, self._layout.inputs, self._layout.lanes
        depth = self._outputs.matrix.inputs
        whole = depth // inputs
        with code.loop(0, whole) as number:
            self._request(number)
            self._add(number, None)
        with code.when((whole * inputs).compare("<", depth)):
            self._add(whole, depth - whole * inputs)
        pairs = list(self._sums)
        for n in range(0, len(pairs), lanes):
            several = pairs[n : n + lanes]
            totals = code.sums([self._sums[pair].get() for pair in several])
            for lane, (j, i) in enumerate(several):
                code.store(code.element(totals, lane), sums_to, width * j + places[i])

    def _request(self, number: Value) -> None:
        """Request weights of each output that are multiplied later."""
        (matrix, outputs, *_, end), size = self._outputs, 4 * self._layout.lanes
        for output in outputs:
            if stream.has_streams(matrix, len(self._rows)):
                matrix.prefetch_soon(output * matrix.row_bytes + (number * size + EACH_AHEAD))
            else:
                ahead = (output + len(outputs)) * matrix.row_bytes + number * size
                matrix.prefetch_once(self.code.minimum(ahead, end * matrix.row_bytes - size))

    def _add(self, number: Value, left: Value | None) -> None:
        """Add the products of a chunk, which is a part with `left` inputs or whole."""
        code, (lanes, halves, *_) = self.code, self._layout
        weights = [self._numbers(address, number, left) for address in self._outputs.weights]
        scales, minima = (
            [self._of_groups(factors, number, i) for i in range(len(weights))] for factors in self._outputs.factors
        )
        for j, row in enumerate(self._rows):
            vectors = self._x.chunk(row, number)
            x = [code.load_vector(vector, 0, I32, lanes) for vector in vectors[:halves]]
            x_scales, offset = (
                code.load_vector(vector, 0, kind, lanes) for vector, kind in zip(vectors[halves:], (F32, I32))
            )
            for i, numbers in enumerate(weights):
                products = offset
                for part, x_part in zip(numbers, x):
                    products = code.dot_bytes(part, x_part, products)
                scale, total = scales[i] * x_scales, self._sums[j, i]
                sums = code.fma(code.cast("sitofp", products, F32), scale, total.get())
                if self._outputs.factors.minima is not None:
                    sums = code.fma(code.load_vector(vectors[-1], 0, F32, lanes), minima[i], sums)
                total.set(sums)

    def _numbers(self, address: Value, number: Value, left: Value | None) -> list[Value]:
        """Return the weights of a chunk plus the offset: bytes, four in each int32."""
        code, (lanes, halves, offset, _), form = self.code, self._layout, self._outputs.matrix.form
        if left is None:
            loaded = code.load_vector(address, number * lanes, I32, lanes)
        else:
            loaded = code.load_first(address, number * lanes, I32, lanes, left // (4 * halves))
        numbers = code.as_vector(loaded, I8, 4 * lanes)
        parts = [numbers + offset] if halves == 1 else [numbers & 15, numbers >> 4]
        if form.is_mxfp4:
            table = [int(2 * each) + offset for each in E2M1]
            parts = [code.look_up_bytes(table, part) for part in parts]
        return [code.as_vector(part, I32, lanes) for part in parts]

    def _of_groups(self, factors: Value | None, number: Value, i: int) -> Value:
        """Return the factors of the groups of a chunk, of an output, for each lane."""
        code, (lanes, *_), inputs = self.code, self._layout, self._layout.inputs
        group = self._outputs.matrix.form.group
        assert group is not None, "there are groups"
        if factors is None:
            return code.value(0.0, ir.VectorType(F32, lanes))
        if group >= inputs:
            at = number // (group // inputs) + MOST_GROUPS * i
            return code.splat(code.load(factors, at, F32), lanes)
        count = inputs // group
        several = code.load_vector(factors, number * count + MOST_GROUPS * i, F32, count)
        return code.shuffle(several, several, [lane * count // lanes for lane in range(lanes)])

"""Products of the rows of a step with weights, which are read from memory once and in order.

The numbers of a row lie in the lanes of vectors, along which the sums run. The order of a sum depends on its length
only, so that a row has the same result next to any other rows. Weights become float32 in registers for a few rows, and
in the first cache for many.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import reference
from pallas_kernels.cpu import amx, byte_rows, digits, stream, strips
from pallas_kernels.cpu.code import F32, I32, I64, Machine, Value, Variable
from pallas_kernels.cpu.epilogue import ACTIVATIONS, gated
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.matrix import MOST_GROUPS, Matrix, has_code, num_arrays
from pallas_kernels.cpu.numbers import LOADED, loader, rounded, store_part, storer
from pallas_kernels.cpu.packed import Packed
from pallas_kernels.cpu.stream import Block
from pallas_kernels.cpu.team import num_threads
from pallas_kernels.cpu.tiles import Tiles
from pallas_kernels.options import ProductOptions
from pallas_kernels.transforms import with_derivatives
from pallas_kernels.weights import Format, Weight, rounded_rows

UNIT_O, UNIT_T = 48, 128  # outputs and rows of a unit of work
FEW_O = 768  # outputs whose sums for a few rows take the same memory
SMALL_T = 16  # rows of a small call
STEP_O = 12  # outputs of its blocks are multiples of this number
SMALL_BLOCKS = 16  # its small blocks have the outputs of a thread divided by this
VERSION = 19  # part of the targets' names: executables on disk must not call a function of other arguments
RESULTS = LOADED[:3]  # dtypes of results
X, WANTED, STARTS = range(3)  # arguments of a call, before the arrays of its weights


class Spec(NamedTuple):
    """The constants of a compiled function.

    Attributes:
        form: that of all weights.
        bias: dtype of their biases; None: they have none.
        num_weights: number of weights, each with a result, unless they are gated.
        has_experts: whether rows are sorted by expert.
        dots: whether x and weights are bfloat16, and multiplied so.
        tiles: whether this is in tile registers, with a further result for packed rows of x, which is bfloat16; without
            `dots`, weights are int8. Neither of both: x is float32.
        adds: whether arrays are added to the sums; they follow those of the weights.
        dtype: that of the results, one of `RESULTS`.
        residual: whether the result is added to an array, the last argument.
        rounds: dtype of x, if it is rounded to int8 (`byte_rows`), with a further result for the packed rows; None: it
            is not.
    """

    form: Format
    bias: str | None
    num_weights: int
    activation: str | None
    gated: bool
    has_experts: bool
    dots: bool = False
    tiles: bool = False
    adds: bool = False
    dtype: str = "float32"
    residual: bool = False
    rounds: str | None = None


def product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Implement `Ops.product` and `Ops.products`. Derivatives are those of the reference."""
    empty = 0 in (*x_ti.shape, *(weight.shape[0] for weight in weights))
    dtype = jnp.dtype(options.dtype or x_ti.dtype)
    unknown = jnp.float64 in (x_ti.dtype, dtype) or not all(map(has_code, weights))
    if unknown or empty:
        return reference.product(x_ti, weights, options)
    if len({(weight.format, _bias_dtype(weight)) for weight in weights}) == 1 and options.activation in ACTIVATIONS:
        stored = replace(options, dtype=dtype if dtype.name in RESULTS else jnp.float32)
        return tuple(y_to.astype(dtype) for y_to in _call(x_ti, weights, stored))
    plain = ProductOptions(dtype=jnp.float32, int8_rows=options.int8_rows, **_rows_of(options))
    sums = [_call(x_ti, (weight._replace(bias=None),), plain)[0] for weight in weights]
    return reference.finished(sums, weights, options, x_ti.dtype)


def _bias_dtype(weight: Weight) -> str | None:
    return None if weight.bias is None else str(weight.bias.dtype)


def _rows_of(options: ProductOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("wanted_t", "sizes_e", "tokens_m")}


def _define(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    return reference.product(x_ti, weights, replace(options, int8_rows=False))


@with_derivatives(_define)
def _call(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Return the results [T, O] of weights of one form, in one of the dtypes of `RESULTS`."""
    form, bias, has_experts = weights[0].format, _bias_dtype(weights[0]), options.sizes_e is not None
    machine = Machine.host()
    dots = machine.has_bf16_dot and x_ti.dtype == form.dtype == "bfloat16" and x_ti.shape[1] % (2 * machine.lanes) == 0
    adds = options.added is not None
    rounds = None
    if options.int8_rows and form.takes_int8_rows:
        if byte_rows.has_code(form, x_ti.shape[1]) and x_ti.dtype.name in RESULTS:
            rounds = x_ti.dtype.name
        else:
            x_ti = rounded_rows(x_ti)
    has_digits = machine.has_int8_tiles and x_ti.dtype == "bfloat16" and digits.has_code(form, x_ti.shape[1])
    tiles, dtype = has_digits or (dots and machine.has_bf16_tiles), jnp.dtype(options.dtype)
    spec = Spec(
        form, bias, len(weights), options.activation, options.gated, has_experts, dots, tiles, adds, dtype.name,
        options.residual_to is not None, rounds,
    )  # fmt: skip
    shapes = [(len(x_ti), weight.shape[0]) for weight in weights[: 1 if options.gated else None]]
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    if rounds:
        results.append(jax.ShapeDtypeStruct(byte_rows.packed_shape(form, *x_ti.shape), jnp.int32))
    elif tiles:
        packed_shape = digits.packed_shape if has_digits else amx.packed_shape
        results.append(jax.ShapeDtypeStruct(packed_shape(*x_ti.shape), jnp.int32))
    multiply = jax.ffi.ffi_call(target(spec), results, vmap_method="sequential")
    arrays = [array for weight in weights for array in weight if array is not None]
    x_ti = x_ti if dots or tiles or rounds else x_ti.astype(jnp.float32)
    more = (*(options.added or ()), *([] if options.residual_to is None else [options.residual_to]))
    done = multiply(x_ti, _wanted(len(x_ti), options), *_starts(options), *arrays, *more)
    return tuple(done[: len(shapes)])


def _wanted(rows: int, options: ProductOptions) -> jax.Array:
    """Return whether each row is computed, [T] int32."""
    wanted_t = options.wanted_t
    if wanted_t is None:
        return jnp.ones(rows, jnp.int32)
    return (wanted_t if options.tokens_m is None else wanted_t[options.tokens_m]).astype(jnp.int32)


def _starts(options: ProductOptions) -> list[jax.Array]:
    """Return the first row of each expert and the number of all rows, [E + 1] int32, in a list, or none."""
    return [] if options.sizes_e is None else [jnp.pad(jnp.cumsum(options.sizes_e, dtype=jnp.int32), (1, 0))]


def target(spec: Spec) -> str:
    """Make the target of a function, and return its name.

    Its arguments are x [T, I] float32 or bfloat16, whether each row is computed, [T] int32, with experts their first
    rows [E + 1] int32, the arrays of each weight, those that are added to the sums [T, O] float32, and the array that
    the result is added to, [T, O] in its dtype.
    """
    name = f"jpaged_product_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}"
    return register(name, lambda call: _Writer(spec, call).units(), lambda call, unit: _Writer(spec, call).work(unit))


def usual_target(dtype: str) -> str:
    """Make the target for one weight of a dtype, and return its name."""
    return target(Spec(Format(dtype), None, 1, None, gated=False, has_experts=False))


class _Writer:
    """Writer of the code of a call."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        machine = Machine.host()
        self.lanes = machine.lanes
        # The outputs and the rows of x that are computed at once: one sum in each of most registers.
        self.tile_o, self.tile_t = (6, 4) if machine.registers == 32 else (4, 2)
        self.most_t = 2 * self.tile_t  # rows of a stream
        self.first = STARTS + spec.has_experts  # argument of the first weight
        self._sums_size = amx.SIZE * strips.WIDTH if spec.tiles else UNIT_T * UNIT_O
        self._is_small = self._num_wanted().compare("<=", strips.SMALL_T if spec.tiles else SMALL_T)

    # The outputs of a call are divided into blocks of UNIT_O, and its rows into blocks of UNIT_T of one expert. In a
    # call of a few rows each thread first has a large block of outputs, because weights are read fastest where they lie
    # in a row. The rest of the outputs are small blocks, so that all threads end at about the same time.

    def _num_wanted(self) -> Value:
        """Return the number of rows that are computed in a call."""
        count = Variable(self.code.value(0, I64))
        with self.code.loop(0, self.call.size(X, 0)) as t:
            count.set(count.get() + self.code.cast("zext", self._int(WANTED, t).compare("!=", 0), I64))
        return count.get()

    def _sizes(self, outputs: Value) -> tuple[Value, Value, Value]:
        """Return the number of large blocks, and the sizes of large and of small blocks."""
        code, threads = self.code, num_threads()
        step, unit = (amx.SIZE, strips.UNIT_O) if self.spec.tiles else (STEP_O, UNIT_O)
        small = code.maximum(outputs // (SMALL_BLOCKS * threads * step) * step, outputs * 0 + unit // 2)
        large = outputs * 3 // (4 * threads * step) * step  # three quarters of all outputs
        of_few, of_many = (outputs * 0 + threads, large, small), (outputs * 0, outputs * 0, outputs * 0 + unit)
        count, large, small = (code.select(self._is_small, a, b) for a, b in zip(of_few, of_many))
        return count, large, small

    def _blocks(self, weight: int) -> Value:
        """Return the number of blocks of a weight."""
        outputs = self._outputs(weight)
        count, large, small = self._sizes(outputs)
        return count + (outputs - count * large + (small - 1)) // small

    def _bounds(self, block: Value, outputs: Value) -> tuple[Value, Value]:
        """Return the first output of a block, and the output after its last one."""
        code = self.code
        count, large, small = self._sizes(outputs)
        is_large = block.compare("<", count)
        first = code.select(is_large, block * large, count * large + (block - count) * small)
        return first, code.minimum(first + code.select(is_large, large, small), outputs)

    def _outputs(self, weight: int) -> Value:
        argument = self.first + weight * num_arrays(self.spec.form, self.spec.bias)
        return self.call.size(argument, int(self.spec.has_experts))

    def _weights(self) -> range:
        """Return the numbers of the weights that units are divided among."""
        return range(1 if self.spec.gated else self.spec.num_weights)

    def units(self) -> Value:
        """Write the code that counts the units; with experts, the last one is of the rows that belong to none."""
        code = self.code
        if self.spec.tiles or self.spec.rounds:
            self._input().clear()
        blocks = Variable(code.value(0, I64))
        for weight in self._weights():
            blocks.set(blocks.get() + self._blocks(weight))
        if not self.spec.has_experts:
            return blocks.get() * ((self.call.size(X, 0) + (UNIT_T - 1)) // UNIT_T)
        total = Variable(code.value(0, I64))
        with code.loop(0, self.call.size(STARTS, 0) - 1) as expert:
            first, stop = self._rows_of(expert)
            total.set(total.get() + (stop - first + (UNIT_T - 1)) // UNIT_T)
        return total.get() * blocks.get() + 1

    def _rows_of(self, expert: Value) -> tuple[Value, Value]:
        """Return the first row of an expert and the row after its last one, within the array."""
        code, rows = self.code, self.call.size(X, 0)
        first, stop = (
            code.minimum(code.maximum(self._int(STARTS, index), rows * 0), rows) for index in (expert, expert + 1)
        )
        return first, code.maximum(first, stop)

    def _int(self, argument: int, index: Value) -> Value:
        code = self.code
        return code.cast("sext", code.load(self.call.argument(argument), index, I32), I64)

    def work(self, unit: Value) -> None:
        """Write the code of a unit."""
        code = self.code
        if not self.spec.has_experts:
            row_units = (self.call.size(X, 0) + (UNIT_T - 1)) // UNIT_T
            first = unit % row_units * UNIT_T
            self._block(unit // row_units, unit * 0, first, code.minimum(first + UNIT_T, self.call.size(X, 0)))
            return
        blocks = Variable(code.value(0, I64))
        for weight in self._weights():
            blocks.set(blocks.get() + self._blocks(weight))
        left, chosen = Variable(unit // blocks.get()), Variable(code.value(-1, I64))
        start, end = Variable(code.value(0, I64)), Variable(code.value(0, I64))
        experts = self.call.size(STARTS, 0) - 1
        with code.loop(0, experts) as expert:
            first, stop = self._rows_of(expert)
            count, at = (stop - first + (UNIT_T - 1)) // UNIT_T, left.get()
            with code.when(at.compare(">=", 0)), code.when(at.compare("<", count)):
                chosen.set(expert)
                start.set(first + at * UNIT_T)
                end.set(code.minimum(first + (at + 1) * UNIT_T, stop))
            left.set(at - count)
        with code.when(chosen.get().compare(">=", 0)):
            self._block(unit % blocks.get(), chosen.get(), start.get(), end.get())
        with code.when(chosen.get().compare("<", 0)):
            rows = self.call.size(X, 0)
            for weight in self._weights():
                width = self._outputs(weight)
                with code.loop(self._rows_of(experts - 1)[1] * width, rows * width) as i:
                    self._clear(self.call.result(weight), i)

    def _block(self, block: Value, expert: Value, start_t: Value, stop_t: Value) -> None:
        """Write a block of outputs for the rows from `start_t` to below `stop_t`."""
        code = self.code
        number, left = Variable(block * 0), Variable(block)
        for weight in self._weights()[:-1]:
            blocks = self._blocks(weight)
            with code.when(number.get().compare("==", weight)), code.when(left.get().compare(">=", blocks)):
                left.set(left.get() - blocks)
                number.set(number.get() + 1)
        rows = code.scratch(UNIT_T, I64)  # the rows that are computed
        count = self._choose_rows(rows, start_t, stop_t)
        matrices = [self._matrix(number.get() + i) for i in range(1 + self.spec.gated)]
        y, sums = self.call.result(number.get()), [code.scratch(self._sums_size, F32) for _ in matrices]
        start_o, stop_o = self._bounds(left.get(), matrices[0].outputs)
        with code.when(count.compare(">", 0)):
            writer: Sums
            if self.spec.rounds:
                writer = self._bytes(rows, count, left.get())
            elif self.spec.tiles:
                writer = self._strips(code.load(rows, 0, I64), code.load(rows, count - 1, I64) + 1, left.get())
            else:
                writer = _Vectors(self, matrices[0], rows, count)
            with code.loop(start_o, stop_o, writer.width) as o:
                end_o = code.minimum(o + writer.width, stop_o)
                for matrix, sums_to in zip(matrices, sums):
                    first_o = expert * matrix.outputs
                    writer.write(matrix, (first_o + o, first_o + end_o, first_o + stop_o), sums_to)
                added = self._added(number.get(), len(matrices))
                self._finish(matrices, sums, added, expert, (o, end_o), writer, y, rows, count)
        with code.loop(start_t, stop_t) as t:
            first = t * matrices[0].outputs
            with (
                code.when(self._int(WANTED, t).compare("==", 0)),
                code.loop(first + start_o, first + stop_o) as at,
            ):
                self._clear(y, at)

    def _clear(self, y: Value, at: Value) -> None:
        kind, _ = loader(self.spec.dtype, 1)
        self.code.store(self.code.value(0, kind), y, at)

    def _input(self) -> Packed:
        if self.spec.rounds:
            return byte_rows.ByteRows(self.call, X, len(self._weights()), self.spec.rounds, self.spec.form)
        return (amx.Input if self.spec.dots else digits.Digits)(self.call, X, len(self._weights()))

    def _strips(self, start_t: Value, stop_t: Value, block: Value) -> strips.TileStrips:
        """Return the writer for tiles; the threads begin the packing of x with different ones."""
        x = self._input()
        first = block * UNIT_T // (x.rows_of_tile * num_threads())
        if isinstance(x, amx.Input):
            return strips.Strips(x, start_t, stop_t, first)
        assert isinstance(x, digits.Digits)
        return digits.DigitStrips(x, start_t, stop_t, first)

    def _bytes(self, rows: Value, count: Value, block: Value) -> byte_rows.ByteDots:
        """Return the writer for rows of bytes; the threads begin the packing of x with different ones."""
        x, code = self._input(), self.code
        assert isinstance(x, byte_rows.ByteRows)
        is_few = count.compare("<=", self.most_t)
        width = code.select(is_few, code.value(FEW_O, I64), code.value(UNIT_O, I64))
        return byte_rows.ByteDots(x, rows, count, self.tile_t, width, block * UNIT_T // num_threads())

    def _matrix(self, number: Value) -> Matrix:
        form, bias = self.spec.form, self.spec.bias
        argument = self.first + number * num_arrays(form, bias)
        return Matrix(form, bias, self.call, argument, self.spec.has_experts, self.spec.dots)

    def _added(self, number: Value, count: int) -> list[Value]:
        """Return the arrays that are added to the sums of some weights, in a list, or none."""
        if not self.spec.adds:
            return []
        return [self.call.argument(number + (self._more + i)) for i in range(count)]

    @property
    def _more(self) -> int:
        """The argument after those of the weights."""
        return self.first + self.spec.num_weights * num_arrays(self.spec.form, self.spec.bias)

    def _residual(self) -> Value | None:
        """Return the array that the result is added to."""
        last = self._more + self.spec.num_weights * self.spec.adds
        return self.call.argument(last) if self.spec.residual else None

    def _choose_rows(self, rows: Value, start_t: Value, stop_t: Value) -> Value:
        """Write the numbers of the rows that are computed, and return their number."""
        code, count = self.code, Variable(self.code.value(0, I64))
        with code.loop(start_t, stop_t) as t, code.when(self._int(WANTED, t).compare("!=", 0)):
            code.store(t, rows, count.get())
            count.set(count.get() + 1)
        return count.get()

    def _finish(
        self, matrices: list[Matrix], sums: list[Value], added: list[Value], expert: Value,
        bounds: tuple[Value, Value], writer: "Sums", y: Value, rows: Value, count: Value,
    ) -> None:  # fmt: skip
        """Write the results of a block: sums with scales of rows, bias, further numbers, activation and gate."""
        code, lanes, (start, stop), residual = self.code, self.lanes, bounds, self._residual()
        width, store = matrices[0].outputs, storer(self.spec.dtype, lanes)
        last = stop - (stop - start) % lanes

        def result(of_row: Value, at: Value, o: Value, load: Callable[..., Value]) -> Value:
            values = []
            for i, (matrix, sums_to) in enumerate(zip(matrices, sums)):
                value = code.load_vector(sums_to, of_row + (o - start), F32, lanes)
                more = load(added[i], at + o, F32, lanes) if added else None
                values.append(matrix.finish(value, expert * matrix.outputs + o, load, more))
            if self.spec.gated:
                value = gated(code, self.spec.activation, *values)
            else:
                value = ACTIVATIONS[self.spec.activation](code, values[0])
            if residual is None:
                return value
            _, load_residual = loader(self.spec.dtype, lanes, load)
            return load_residual(code, residual, at + o) + rounded(code, self.spec.dtype, value)

        with code.loop(0, count) as r:
            t = code.load(rows, r, I64)
            at, of_row = t * width, writer.place(r, t) * writer.width
            with code.loop(start, last, lanes) as o:
                store(code, result(of_row, at, o, code.load_vector), y, at + o)
            with code.when(last.compare("<", stop)):
                left = stop - last
                vector = result(of_row, at, last, partial(code.load_part, count=left))
                store_part(code, self.spec.dtype, vector, y, at + last, left)


type Sums = _Vectors | strips.TileStrips | byte_rows.ByteDots  # writers of the sums of a block


class _Vectors:
    """Writer of the sums of a block in vectors, for a few rows or for many.

    Attributes:
        width: most outputs that are computed at once.
    """

    def __init__(self, writer: _Writer, matrix: Matrix, rows: Value, count: Value):
        self.code, self._writer, self._rows, self._count = writer.code, writer, rows, count
        self._is_few = self.code.both(count.compare("<=", writer.most_t), matrix.num_groups.compare("<=", MOST_GROUPS))
        self.width = self.code.select(self._is_few, self.code.value(FEW_O, I64), self.code.value(UNIT_O, I64))

    def place(self, r: Value, t: Value) -> Value:
        """Return the place of the sums of row t, the r-th one of the block."""
        return r

    def write(self, matrix: Matrix, outputs: tuple[Value, Value, Value], sums_to: Value) -> None:
        """Write sums [rows, width] of some outputs.

        Args:
            outputs: the first one, the one after the last, and the one after the last of the unit.
        """
        code, writer, (start, stop, end) = self.code, self._writer, outputs
        x, block = writer.call.argument(X), Block(matrix, self._rows, self._count, sums_to, self.width, start, end)
        with code.when(self._is_few):
            stream.write_sums(block, x, stop - start, writer.most_t)
        with code.when(code.invert(self._is_few)):
            Tiles(block, x, writer.tile_o, writer.tile_t, UNIT_O).write(stop - start)

"""Root-mean-square norms of rows. A row is read twice, the second time from the first cache."""

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
from llvmlite import ir

from pallas_kernels import norm
from pallas_kernels.cpu.code import F32, I64, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import loader, store_part, storer
from pallas_kernels.transforms import with_derivatives

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
UNIT = 8192  # numbers of a unit, about
COLUMNS = 64  # sums of a row, by the place in it: their order is the same with vectors of any width
PER_NS = 8  # numbers that one thread norms in a nanosecond, about
X, SCALE = range(2)  # arguments: x [T, D] and the scale [D]. The result is [T, D] in x's dtype.


class Spec(NamedTuple):
    """The constants of a compiled function."""

    dtype: str
    scale_dtype: str
    epsilon: float
    offset: float


class _Writer:
    """Writer of the code of a call."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code, self.lanes = spec, call, call.code, Machine.host().lanes
        self.num_rows, self.width = call.size(X, 0), call.size(X, 1)
        self.unit_t = self.code.maximum(self.code.value(UNIT, I64) // self.width, self.width * 0 + 1)

    def num_units(self) -> Value:
        """Return the number of units, which are blocks of rows."""
        return (self.num_rows + self.unit_t - 1) // self.unit_t

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        return self.num_rows * self.width // PER_NS

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, first = self.code, unit * self.unit_t
        with code.loop(first, code.minimum(first + self.unit_t, self.num_rows)) as row:
            start = row * self.width
            mean = self._sum_of_squares(start) / code.cast("sitofp", self.width, F32)
            self._scale(start, 1.0 / code.intrinsic("llvm.sqrt.f32", mean + self.spec.epsilon))

    def _sum_of_squares(self, start: Value) -> Value:
        code, lanes = self.code, self.lanes
        zero = code.value(0.0, ir.VectorType(F32, lanes))
        sums = [Variable(zero) for _ in range(COLUMNS // lanes)]

        def add(at: Value, vector: int, left: Value | None = None) -> None:
            _, load = loader(self.spec.dtype, lanes, None if left is None else partial(code.load_part, count=left))
            x = load(code, self.call.argument(X), start + at)
            sums[vector].set(code.fma(x, x, sums[vector].get()))

        whole = self.width - self.width % COLUMNS
        with code.loop(0, whole, COLUMNS) as at:
            for vector in range(len(sums)):
                add(at + vector * lanes, vector)
        for vector in range(len(sums)):
            left = code.minimum(self.width - (whole + vector * lanes), self.width * 0 + lanes)
            with code.when(left.compare(">", 0)):
                add(whole + vector * lanes, vector, left)
        columns = [each.get() for each in sums]
        while len(columns) > 1:
            half = len(columns) // 2
            columns = [a + b for a, b in zip(columns[:half], columns[half:])]
        (column,) = columns
        while lanes > 1:
            lanes //= 2
            low, high = (code.shuffle(column, column, range(at, at + lanes)) for at in (0, lanes))
            column = low + high
        return code.element(column, 0)

    def _scale(self, start: Value, factor: Value) -> None:
        """Write the row that begins at `start`, times a factor and the scale."""
        code, lanes, spec = self.code, self.lanes, self.spec
        for at, left in self._vectors():
            part = None if left is None else partial(code.load_part, count=left)
            (_, load_x), (_, load_scale) = (loader(dtype, lanes, part) for dtype in (spec.dtype, spec.scale_dtype))
            scale = load_scale(code, self.call.argument(SCALE), at)
            scale = scale + spec.offset if spec.offset else scale
            y = load_x(code, self.call.argument(X), start + at) * (code.splat(factor, lanes) * scale)
            if left is None:
                storer(spec.dtype, lanes)(code, y, self.call.result(0), start + at)
            else:
                store_part(code, spec.dtype, y, self.call.result(0), start + at, left)

    def _vectors(self) -> Iterator[tuple[Value, Value | None]]:
        """Write code for the vectors of a row: yield the first number, and of the last vector how many there are."""
        whole = self.width - self.width % self.lanes
        with self.code.loop(0, whole, self.lanes) as at:
            yield at, None
        with self.code.when(whole.compare("<", self.width)):
            yield whole, self.width - whole


def rms_norm(x_td: jax.Array, scale_d: jax.Array, epsilon: float, offset: float) -> jax.Array:
    """Implement `Ops.rms_norm`. Derivatives are those of the definition."""
    spec = Spec(str(x_td.dtype), str(scale_d.dtype), float(epsilon), float(offset))
    target = register(
        f"jpaged_rms_norm_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}",
        lambda call: _Writer(spec, call).num_units(),
        lambda call, unit: _Writer(spec, call).write(unit),
        nanoseconds=lambda call: _Writer(spec, call).nanoseconds(),
    )
    run = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x_td.shape, x_td.dtype), vmap_method="sequential")

    @with_derivatives(lambda x_td, scale_d: norm.rms_norm(x_td, scale_d, epsilon, offset))
    def compute(x_td: jax.Array, scale_d: jax.Array) -> jax.Array:
        y_td: jax.Array = run(x_td, scale_d)
        return y_td

    return compute(x_td, scale_d)

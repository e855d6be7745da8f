"""A weight inside a compiled product, and loads of its numbers as float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.cpu.code import F32, I8, I32, I64, VOID, Code, Machine, Number, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import LOADED, float_of_e2m1, loader
from pallas_kernels.weights import E2M1, MIDDLE, PACKED, Format, Weight

CACHE_LINE = 64
AHEAD = 4096  # prefetch distance of products with many rows, in bytes
TABLE = 16  # numbers that 4 bits can be, and float32 numbers of a vector of AVX-512
ROWS_AHEAD = 4  # prefetch distance of factors in rows
MAX_GROUPS = 80  # groups of the inputs that are multiplied together, and one vector more
MOST_GROUPS = 512  # groups of an output whose sums for a few rows have code

# (row, input, left) -> the weights of `step` inputs from this one on. Of a row that ends before, `left` is the number
# of its inputs, and the other weights are 0.
Load = Callable[..., list[Value]]


class Factors(NamedTuple):
    """Addresses of the scales and minima of groups as float32. None: there are none."""

    scales: Value | None = None
    minima: Value | None = None


def has_code(weight: Weight) -> bool:
    """Return whether there is code for a weight's form."""
    form, bias = weight.format, weight.bias
    step = PACKED if form.is_packed else Machine.host().lanes
    loads = (form.is_packed or form.dtype in LOADED) and (bias is None or str(bias.dtype) in LOADED[:3])
    return loads and (form.group or step) % step == 0 and (form.group or 16) >= 16


def num_arrays(form: Format, bias: str | None) -> int:
    """Return the number of arrays of a weight."""
    return 1 + sum(each is not None for each in (form.scales, form.minima, bias))


class Matrix:
    """A weight of a call.

    Args:
        bias: dtype of its bias; None: it has none.
        argument: number of its first array among the arguments.
        dots: whether its numbers are bfloat16, and loaded as int32 pairs of them.

    Attributes:
        step: number of inputs of a load.
        outputs, inputs, num_groups: their numbers; of groups 0 if each output has one scale or none.
        row_bytes: of the weights of an output.
        is_narrow: whether weights have 8 or 4 bits.
        is_direct: whether many rows are multiplied by its numbers as they are, too.
    """

    def __init__(self, form: Format, bias: str | None, call: CallFrame, argument: Value, has_experts: bool, dots: bool):
        self.form, self.bias, self.lanes, self.code = form, bias, Machine.host().lanes, call.code
        dtypes = {"scales": form.scales, "minima": form.minima, "bias": bias}
        self._dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
        self._values = call.argument(argument)
        self._arrays = {name: call.argument(argument + 1 + i) for i, name in enumerate(self._dtypes)}
        self.outputs = call.size(argument, int(has_experts))
        self._all_rows = self.outputs * call.size(argument, 0) if has_experts else self.outputs
        self._itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}.get(form.dtype, 1)
        stored = call.size(argument, 1 + has_experts)
        self.inputs, self.row_bytes = stored * (1 + form.is_packed), stored * self._itemsize
        self.num_groups = self.inputs // form.group if form.group else stored * 0
        self.is_narrow = self._itemsize == 1
        whole_steps = form.is_packed or (form.group and form.group % PACKED == 0)
        self.step = 2 * self.lanes if dots else PACKED if whole_steps else self.lanes
        self.dots = dots
        self.is_direct = dots or (form.dtype == "float32" and form.group is None)

    def loads(self, row: Value, num_rows: int, begin: Value, end: Value) -> Load:
        """Prepare the loads of some rows from input `begin` to below `end`, and return them.

        Weights are without the scale of a whole row. The scales and minima of groups are converted once.
        """
        factors, group = Factors(), self.form.group
        if group:
            first, stop = begin // group, (end + (group - 1)) // group
            starts = [((row + i) * self.num_groups + first, i * MAX_GROUPS) for i in range(num_rows)]
            factors = self._converted(starts, stop - first, num_rows * MAX_GROUPS)

        def load(i: Number, k: Value, left: Value | None = None) -> list[Value]:
            at = i * MAX_GROUPS + (k // group - begin // group) if group else k
            return self.weights(self.address(row + i), k, left, factors, at)

        return load

    def address(self, row: Value) -> Value:
        """Return the address of the weights of a row."""
        return self.code.at(self._values, row * self.row_bytes, I8)

    def num_bytes(self, inputs: int) -> int:
        """Return the bytes of the weights of some inputs."""
        return inputs * self._itemsize // (1 + self.form.is_packed)

    def factors(self, rows: Sequence[Value]) -> Factors:
        """Write the scales and minima of all groups of some rows as float32 [rows, MOST_GROUPS]."""
        if not self.form.group:
            return Factors()
        starts = [(row * self.num_groups, i * MOST_GROUPS) for i, row in enumerate(rows)]
        return self._converted(starts, self.num_groups, len(rows) * MOST_GROUPS)

    def _converted(self, starts: Sequence[tuple[Value, int]], count: Value, size: int) -> Factors:
        """Write `count` scales and minima from each of some indices on into memory of `size` float32 numbers.

        `starts` has these indices, and their places in the memory.
        """
        code, addresses = self.code, {}
        for name in ("scales", "minima"):
            if name not in self._dtypes:
                continue
            array, (element, load) = self._arrays[name], self._loader(name)
            addresses[name] = place = code.scratch(size + self.lanes, F32)
            whole = self._all_rows * self.num_groups - self.lanes  # from here on a vector would pass the array's end
            for first, to in starts:
                with code.loop(0, count, self.lanes) as g:
                    self._prefetch(code.at(array, first + g + self.num_groups * ROWS_AHEAD, element), locality=3)
                    with code.when((first + g).compare("<=", whole)):
                        code.store_vector(load(code, array, first + g), place, g + to)
                    with code.when((first + g).compare(">", whole)):
                        part = functools.partial(code.load_part, count=count - g)
                        _, load_part = self._loader(name, part)
                        code.store_vector(load_part(code, array, first + g), place, g + to)
        return Factors(**addresses)

    def _loader(self, name: str, load_vector: Callable[..., Value] | None = None) -> Any:
        """Return the writer of a load of scales or minima as `loader` does; exponents become powers of two."""
        if self._dtypes[name] != "uint8":
            return loader(self._dtypes[name], self.lanes, load_vector)

        def load(code: Code, array: Value, index: Value) -> Value:
            x = (load_vector or code.load_vector)(array, index, I8, self.lanes)
            return code.cast("bitcast", code.cast("zext", x, I32) << 23, F32)

        return I8, load

    def weights(self, address: Value, k: Value, left: Value | None, factors: Factors, at: Value) -> list[Value]:
        """Return the weights of `step` inputs from k on of the row at an address, whose factors lie at `at`."""
        code = self.code
        if factors.scales is None:
            return self._numbers(address, k, left)
        scale = code.splat(code.load(factors.scales, at, F32), self.lanes)
        if self.form.is_mxfp4:
            return self._of_e2m1(address, k, scale)
        if factors.minima is not None:
            return self._scaled(address, k, scale, code.splat(code.load(factors.minima, at, F32), self.lanes))
        return self._scaled(address, k, scale, scale * -float(MIDDLE) if self.form.is_packed else None)

    def _scaled(self, address: Value, k: Value, scale: Value, minimum: Value | None) -> list[Value]:
        """Return the weights of `step` inputs of one group."""
        code = self.code
        if not self.form.is_packed:
            numbers = self._numbers(address, k)
            return [number * scale if minimum is None else code.fma(number, scale, minimum) for number in numbers]
        assert minimum is not None, "numbers of 4 bits are from 0 to 15"
        pairs = self._pairs(address, k)
        if self.lanes == TABLE:  # the 16 weights that a group can have are computed once
            table = code.fma(code.vector(range(TABLE)), scale, minimum)
            return [code.look_up(table, each) for each in (*pairs, *(pair >> 4 for pair in pairs))]
        numbers = [code.cast("sitofp", each, F32) for each in (*(p & 15 for p in pairs), *(p >> 4 for p in pairs))]
        return [code.fma(number, scale, minimum) for number in numbers]

    def _of_e2m1(self, address: Value, k: Value, scale: Value) -> list[Value]:
        """Return the weights of `step` inputs of one group in MXFP4."""
        code, pairs = self.code, self._pairs(address, k)
        halves = [*pairs, *(pair >> 4 for pair in pairs)]
        if self.lanes == TABLE:
            table = code.vector(E2M1) * scale
            return [code.look_up(table, each) for each in halves]
        return [float_of_e2m1(code, each) * scale for each in halves]

    def _numbers(self, address: Value, k: Value, left: Value | None = None) -> list[Value]:
        code = self.code
        if self.dots:
            return [code.load_vector(address, k >> 1, I32, self.lanes)]
        load_part = None if left is None else functools.partial(code.load_part, count=left)
        _, load = loader(self.form.dtype, self.lanes, load_part)
        return [load(code, address, k + n) for n in range(0, self.step, self.lanes)]

    def _pairs(self, address: Value, k: Value) -> list[Value]:
        """Return pairs of packed numbers as int32."""
        code = self.code
        starts = range(0, PACKED // 2, self.lanes)
        return [code.cast("zext", code.load_vector(address, (k >> 1) + n, I8, self.lanes), I32) for n in starts]

    def finish(self, sums: Value, row: Value, load_vector: Callable[..., Value], added: Value | None = None) -> Value:
        """Return the sums of several outputs, from `row` on among those of all experts, scaled and with their bias.

        `added` is added to them.

        Both in one operation: LLVM may round once or twice otherwise, which differs between parts of the code.
        """
        scales = bias = None
        if self.form.scales is not None and self.form.group is None:
            scales = self._vector("scales", row, load_vector)
        if self.bias is not None:
            bias = self._vector("bias", row, load_vector)
        for more in (bias, added):
            if more is not None:
                sums, scales = sums + more if scales is None else self.code.fma(sums, scales, more), None
        return sums if scales is None else sums * scales

    def _vector(self, name: str, at: Value, load_vector: Callable[..., Value]) -> Value:
        _, load = loader(self._dtypes[name], self.lanes, load_vector)
        return load(self.code, self._arrays[name], at)

    @property
    def inputs_of_line(self) -> int:
        """The number of inputs whose weights fill a cache line."""
        return CACHE_LINE // self._itemsize * (1 + self.form.is_packed)

    def rows_ahead(self, num_rows: int) -> Value:
        """Return the distance in rows at which weights are requested: AHEAD bytes or more, a multiple of `num_rows`."""
        return (self.code.value(AHEAD, I64) // (self.row_bytes * num_rows + 1) + 1) * num_rows

    def prefetch(self, row: Value, k: Value) -> None:
        """Request the weights of a row from k on into the second cache: into the first one, loads would wait."""
        self._request(row * self.row_bytes + k // self.inputs_of_line * CACHE_LINE, locality=2)

    def prefetch_once(self, at: Value) -> None:
        """Request the weights at a byte, which are used once: they do not replace others in the second cache."""
        self._request(at, locality=0)

    def prefetch_soon(self, at: Value) -> None:
        """Request the weights at a byte, which are used next, into the first cache."""
        self._request(at, locality=3)

    def _request(self, at: Value, locality: int) -> None:
        self._prefetch(self.code.at(self._values, at, I8), locality)

    def _prefetch(self, address: Value, locality: int) -> None:
        options = [self.code.value(number, I32) for number in (0, locality, 1)]
        self.code.intrinsic("llvm.prefetch.p0", address, *options, result=VOID)

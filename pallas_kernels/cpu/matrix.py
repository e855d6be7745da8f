"""A weight inside a compiled product, and loads of its numbers as float32."""

import functools
from collections.abc import Callable

from pallas_kernels.cpu.code import F32, I8, I32, I64, VOID, Machine, Number, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import LOADED, loader
from pallas_kernels.weights import MIDDLE, PACKED, Format, Weight

CACHE_LINE = 64
AHEAD, MOST_AHEAD = 4096, 16384  # bytes
TABLE = 16  # numbers that 4 bits can be, and float32 numbers of a vector of AVX-512
MAX_GROUPS = 80  # groups of the inputs that are multiplied together, and one vector more

# (row, input, left) -> the weights of `step` inputs from this one on. Of a row that ends before, `left` is the number
# of its inputs, and the other weights are 0.
Load = Callable[..., list[Value]]


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
        outputs, inputs: their numbers.
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
        self._stored_inputs = call.size(argument, 1 + has_experts)
        self.inputs = self._stored_inputs * (1 + form.is_packed)
        whole_steps = form.is_packed or (form.group and form.group % PACKED == 0)
        self.step = 2 * self.lanes if dots else PACKED if whole_steps else self.lanes
        self._dots = dots
        self.is_direct = dots or (form.dtype == "float32" and form.group is None)

    def loads(self, row: Value, num_rows: int, begin: Value, end: Value) -> Load:
        """Prepare the loads of some rows from input `begin` to below `end`, and return them.

        Weights are without the scale of a whole row. The scales and minima of groups are converted once.
        """
        scales, minima = self._of_groups("scales", row, num_rows, begin, end), None
        if self.form.minima is not None:
            minima = self._of_groups("minima", row, num_rows, begin, end)

        def load(i: Number, k: Value, left: Value | None = None) -> list[Value]:
            if scales is None or self.form.group is None:
                return self._numbers(row + i, k, left)
            at = i * MAX_GROUPS + (k // self.form.group - begin // self.form.group)
            scale = self.code.splat(self.code.load(scales, at, F32), self.lanes)
            if minima is not None:
                minimum = self.code.splat(self.code.load(minima, at, F32), self.lanes)
                return self._scaled(row + i, k, scale, minimum)
            return self._scaled(row + i, k, scale, scale * -float(MIDDLE) if self.form.is_packed else None)

        return load

    def _of_groups(self, name: str, row: Value, num_rows: int, begin: Value, end: Value) -> Value | None:
        """Write the scales or minima of some rows as float32 [num_rows, MAX_GROUPS], and return their address."""
        if self.form.group is None:
            return None
        code, array, groups = self.code, self._arrays[name], self.inputs // self.form.group
        _, load = loader(self._dtypes[name], self.lanes)
        place = code.scratch(num_rows * MAX_GROUPS + self.lanes, F32)
        first, stop = begin // self.form.group, (end + (self.form.group - 1)) // self.form.group
        whole = self._all_rows * groups - self.lanes  # from here on a vector would pass the end of the array
        for i in range(num_rows):
            with code.loop(first, stop, self.lanes) as g:
                at, to = (row + i) * groups + g, i * MAX_GROUPS + (g - first)
                with code.when(at.compare("<=", whole)):
                    code.store_vector(load(code, array, at), place, to)
                with code.when(at.compare(">", whole)):
                    part = functools.partial(code.load_part, count=stop - g)
                    _, load_part = loader(self._dtypes[name], self.lanes, part)
                    code.store_vector(load_part(code, array, at), place, to)
        return place

    def _scaled(self, row: Value, k: Value, scale: Value, minimum: Value | None) -> list[Value]:
        """Return the weights of `step` inputs of one group."""
        code = self.code
        if not self.form.is_packed:
            numbers = self._numbers(row, k)
            return [number * scale if minimum is None else code.fma(number, scale, minimum) for number in numbers]
        assert minimum is not None, "numbers of 4 bits are from 0 to 15"
        pairs = self._pairs(row, k)
        if self.lanes == TABLE:  # the 16 weights that a group can have are computed once
            table = code.fma(code.vector(range(TABLE)), scale, minimum)
            return [code.look_up(table, each) for each in (*pairs, *(pair >> 4 for pair in pairs))]
        numbers = [code.cast("sitofp", each, F32) for each in (*(p & 15 for p in pairs), *(p >> 4 for p in pairs))]
        return [code.fma(number, scale, minimum) for number in numbers]

    def _numbers(self, row: Value, k: Value, left: Value | None = None) -> list[Value]:
        code = self.code
        if self._dots:
            return [code.load_vector(self._values, (row * self.inputs + k) // 2, I32, self.lanes)]
        load_part = None if left is None else functools.partial(code.load_part, count=left)
        _, load = loader(self.form.dtype, self.lanes, load_part)
        at = row * self.inputs + k
        return [load(code, self._values, at + n) for n in range(0, self.step, self.lanes)]

    def _pairs(self, row: Value, k: Value) -> list[Value]:
        """Return pairs of packed numbers as int32."""
        code, at = self.code, row * self._stored_inputs + k // 2
        starts = range(0, PACKED // 2, self.lanes)
        return [code.cast("zext", code.load_vector(self._values, at + n, I8, self.lanes), I32) for n in starts]

    def finish(self, sums: Value, row: Value, output: Value, load_vector: Callable[..., Value]) -> Value:
        """Return the sums of several outputs, scaled and with their bias."""
        if self.form.scales is not None and self.form.group is None:
            sums = sums * self._vector("scales", row, load_vector)
        if self.bias is not None:
            sums = sums + self._vector("bias", output, load_vector)
        return sums

    def _vector(self, name: str, at: Value, load_vector: Callable[..., Value]) -> Value:
        _, load = loader(self._dtypes[name], self.lanes, load_vector)
        return load(self.code, self._arrays[name], at)

    @property
    def inputs_of_line(self) -> int:
        """The number of inputs whose weights fill a cache line."""
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        return CACHE_LINE * 2 if self.form.is_packed else CACHE_LINE // sizes.get(self.form.dtype, 1)

    def rows_ahead(self, num_rows: int) -> Value:
        """Return the distance in rows at which weights are requested: AHEAD bytes or more, a multiple of `num_rows`."""
        of_rows = (self.inputs * num_rows) // self.inputs_of_line * CACHE_LINE
        return (self.code.value(AHEAD, I64) // (of_rows + 1) + 1) * num_rows

    def prefetch(self, row: Value, k: Value) -> None:
        """Request the weights of a row from k on."""
        self._request(self._values, (row * self.inputs + k) // self.inputs_of_line * CACHE_LINE)

    def prefetch_block(self, row: Value, num_rows: int, strip: int) -> None:
        """Request the first weights of some rows, which `rows_ahead` leaves out, and all of their scales and minima."""
        code = self.code
        first = row * self.inputs // self.inputs_of_line * CACHE_LINE
        size = self.rows_ahead(strip) * self.inputs // self.inputs_of_line * CACHE_LINE
        with code.loop(first, first + code.minimum(size, code.value(MOST_AHEAD, I64)), CACHE_LINE) as at:
            self._request(self._values, at)
        if self.form.group is None:
            return
        groups = self.inputs // self.form.group
        for name in ("scales", "minima"):
            if name in self._arrays:
                width = groups * (2 if self._dtypes[name] == "float16" else 4)
                with code.loop(row * width, (row + num_rows) * width, CACHE_LINE) as at:
                    self._request(self._arrays[name], at)

    def _request(self, array: Value, at: Value) -> None:
        """Request a cache line into the second cache: requests into the first would delay loads."""
        options = [self.code.value(number, I32) for number in (0, 2, 1)]
        self.code.intrinsic("llvm.prefetch.p0", self.code.at(array, at, I8), *options, result=VOID)

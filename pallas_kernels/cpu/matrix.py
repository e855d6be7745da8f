"""A weight inside a compiled product, and loads of its numbers as float32."""

from collections.abc import Callable

from pallas_kernels.cpu.code import F32, I8, I32, VOID, Machine, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import LOADED, loader
from pallas_kernels.weights import MIDDLE, PACKED, Format, Weight


def has_code(weight: Weight) -> bool:
    """Return whether there is code for a weight's form."""
    form, bias = weight.format, weight.bias
    step = PACKED if form.is_packed else Machine.host().lanes
    loads = (form.is_packed or form.dtype in LOADED) and (bias is None or str(bias.dtype) in LOADED[:3])
    return loads and (form.group or step) % step == 0


def num_arrays(form: Format, bias: str | None) -> int:
    """Return the number of arrays of a weight."""
    return 1 + sum(each is not None for each in (form.scales, form.minima, bias))


class Matrix:
    """A weight of a call.

    Args:
        bias: dtype of its bias; None: it has none.
        argument: number of its first array among the arguments.

    Attributes:
        step: number of inputs that `load` returns.
        outputs, inputs: their numbers.
    """

    def __init__(self, form: Format, bias: str | None, call: CallFrame, argument: Value, has_experts: bool):
        self.form, self.bias, self.lanes, self.code = form, bias, Machine.host().lanes, call.code
        dtypes = {"scales": form.scales, "minima": form.minima, "bias": bias}
        self._dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
        self._values = call.argument(argument)
        self._arrays = {name: call.argument(argument + 1 + i) for i, name in enumerate(self._dtypes)}
        self.outputs = call.size(argument, int(has_experts))
        self._stored_inputs = call.size(argument, 1 + has_experts)
        self.inputs = self._stored_inputs * (1 + form.is_packed)
        whole_steps = form.is_packed or (form.group and form.group % PACKED == 0)
        self.step = PACKED if whole_steps else self.lanes
        self.is_float32 = form.dtype == "float32" and form.group is None

    def load(self, row: Value, k: Value) -> list[Value]:
        """Return the weights of `step` inputs from k on, without the scale of a whole row."""
        numbers = self._packed(row, k) if self.form.is_packed else self._numbers(row, k)
        if self.form.group is None:
            return numbers
        at = row * (self.inputs // self.form.group) + k // self.form.group
        scale = self._splat("scales", at)
        if self.form.minima is not None:
            minimum = self._splat("minima", at)
        elif self.form.is_packed:
            minimum = scale * -float(MIDDLE)
        else:
            return [number * scale for number in numbers]
        return [self.code.fma(number, scale, minimum) for number in numbers]

    def _numbers(self, row: Value, k: Value) -> list[Value]:
        code, (_, load) = self.code, loader(self.form.dtype, self.lanes)
        at = row * self.inputs + k
        return [load(code, self._values, at + n) for n in range(0, self.step, self.lanes)]

    def _packed(self, row: Value, k: Value) -> list[Value]:
        code, half = self.code, PACKED // 2
        at = row * self._stored_inputs + k // 2
        pairs = [
            code.cast("zext", code.load_vector(self._values, at + n, I8, self.lanes), I32)
            for n in range(0, half, self.lanes)
        ]
        return [code.cast("sitofp", number, F32) for number in ([p & 15 for p in pairs] + [p >> 4 for p in pairs])]

    def _splat(self, name: str, at: Value) -> Value:
        element, _ = loader(self._dtypes[name], self.lanes)
        if element == F32:
            return self.code.splat(self.code.load(self._arrays[name], at, F32), self.lanes)
        one = self.code.splat(self.code.load(self._arrays[name], at, element), self.lanes)
        return self.code.cast("fpext", one, F32)

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

    def prefetch(self, row: Value, num_rows: int, k: Value) -> None:
        """Request the weights of the next rows, into the second cache: requests into the first would delay loads."""
        code = self.code
        size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.form.dtype, 1)
        stored = k // 2 if self.form.is_packed else k
        options = [code.value(number, I32) for number in (0, 2, 1)]
        for i in range(num_rows):
            at = ((row + num_rows + i) * self._stored_inputs + stored) * size
            code.intrinsic("llvm.prefetch.p0", code.at(self._values, at, I8), *options, result=VOID)

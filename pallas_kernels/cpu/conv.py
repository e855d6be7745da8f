"""Causal convolutions of channels over the tokens of chains, whose last inputs lie in pages.

A unit is a block of the channels of a chain. The inputs that the next tokens need stay in the cache, in float32.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import recurrent
from pallas_kernels.cpu.chains import ChainsFrame
from pallas_kernels.cpu.code import F32, Machine, Value, Variable
from pallas_kernels.cpu.epilogue import ACTIVATIONS
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import loader, storer
from pallas_kernels.options import Chains

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
CHANNELS = 512  # of a unit: with four taps, the factors and the last inputs are 16 KiB
NUMBERS_PER_NS = 2  # inputs that one thread adds, about
# Arguments: x [T, C], the weight [C, W], states [P, W - 1, C], the chains, and the bias [C] if there is one. Results:
# the output [T, C] in x's dtype, and the states.
X, WEIGHT, STATES = range(3)
BIAS = 6
OUTPUT, NEW_STATES = range(2)


class Spec(NamedTuple):
    """The constants of a compiled function. `bias_dtype`: None without bias."""

    dtype: str
    weight_dtype: str
    bias_dtype: str | None
    state_dtype: str
    channels: int
    width: int
    activation: str | None


class _Writer:
    """Writer of the code of a unit."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        self.chains = ChainsFrame(call, X, STATES)
        self.blocks = -(-spec.channels // CHANNELS)

    def num_units(self) -> Value:
        """Return the number of units; the last one clears the output of tokens that no sequence owns."""
        return self.chains.num_sequences * self.blocks + 1

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        return self.chains.num_tokens * (self.spec.channels * self.spec.width) // NUMBERS_PER_NS

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, spec = self.code, self.spec
        s, first = unit // self.blocks, unit % self.blocks * CHANNELS
        with code.when(s.compare("==", self.chains.num_sequences)):
            self.chains.clear(self.call.result(OUTPUT), spec.channels * jnp.dtype(spec.dtype).itemsize)
        with code.when(s.compare("<", self.chains.num_sequences)), code.when(self.chains.is_head(s)):
            self._write_block(s, first)

    def _write_block(self, head: Value, first: Value) -> None:
        """Write the convolution of a block of channels over a chain.

        The last inputs lie in a ring of W rows: tap i of the token with number n in its chain is row (n + i) % W.
        """
        code, spec, call, width = self.code, self.spec, self.call, self.spec.width
        taps, ring = code.scratch(width * CHANNELS, F32), code.scratch(width * CHANNELS, F32)
        count = code.minimum(first + CHANNELS, first * 0 + spec.channels) - first
        number = Variable(first * 0)
        self._load_taps(taps, first, count)

        def row(tap: int) -> Value:
            return code.at(ring, (number.get() + tap) % width * CHANNELS, F32)

        def zero() -> None:
            with code.loop(0, (width - 1) * CHANNELS) as i:
                code.store(code.value(0.0, F32), ring, i)

        def read(page: Value) -> None:
            for tap in range(width - 1):
                at = (page * (width - 1) + tap) * spec.channels + first
                self._copy(spec.state_dtype, call.argument(STATES), at, "float32", row(tap), first * 0, count)

        def add(begin: Value, stop: Value) -> None:
            with code.loop(begin, stop) as t:
                at = t * spec.channels + first
                self._copy(spec.dtype, call.argument(X), at, "float32", row(width - 1), first * 0, count)
                self._add(at, taps, [row(tap) for tap in range(width)], first, count)
                number.set(number.get() + 1)

        def write(page: Value) -> None:
            for tap in range(width - 1):
                at = (page * (width - 1) + tap) * spec.channels + first
                self._copy("float32", row(tap), first * 0, spec.state_dtype, call.result(NEW_STATES), at, count)

        self.chains.read_page(head, zero, read)
        self.chains.walk(head, add, write)

    def _vectors(self, count: Value) -> Iterator[tuple[Value, int]]:
        """Write loops over the vectors of `count` channels; yield the first channel and the number of lanes."""
        lanes = Machine.host().lanes
        whole = count - count % lanes
        for begin, end, size in ((count * 0, whole, lanes), (whole, count, 1)):
            with self.code.loop(begin, end, size) as c:
                yield c, size

    def _copy(
        self, dtype: str, source: Value, at: Value, to_dtype: str, target: Value, place: Value, count: Value
    ) -> None:  # fmt: skip
        for c, lanes in self._vectors(count):
            _, load = loader(dtype, lanes)
            storer(to_dtype, lanes)(self.code, load(self.code, source, at + c), target, place + c)

    def _load_taps(self, taps: Value, first: Value, count: Value) -> None:
        """Write the factors [W, channels] of a block; those of a channel are adjacent in the weight."""
        code, width = self.code, self.spec.width
        for c, lanes in self._vectors(count):
            _, load = loader(self.spec.weight_dtype, lanes * width)
            factors = load(code, self.call.argument(WEIGHT), (first + c) * width)
            for tap in range(width):
                of_tap = code.shuffle(factors, factors, range(tap, lanes * width, width))
                code.store_vector(of_tap, taps, tap * CHANNELS + c)

    def _add(self, at: Value, taps: Value, rows: list[Value], first: Value, count: Value) -> None:
        """Write the results of a token's channels, from the rows of its inputs."""
        code, spec = self.code, self.spec
        for c, lanes in self._vectors(count):
            total = code.vector([0.0] * lanes)
            if spec.bias_dtype is not None:
                _, load = loader(spec.bias_dtype, lanes)
                total = load(code, self.call.argument(BIAS), first + c)
            for tap, row in enumerate(rows):
                factors = code.load_vector(taps, tap * CHANNELS + c, F32, lanes)
                total = code.fma(factors, code.load_vector(row, c, F32, lanes), total)
            y = ACTIVATIONS[spec.activation](code, total)
            storer(spec.dtype, lanes)(code, y, self.call.result(OUTPUT), at + c)


def causal_conv(
    x_tc: jax.Array, weight_cw: jax.Array, bias_c: jax.Array | None, states: jax.Array, chains: Chains,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Implement `Ops.causal_conv`. XLA computes activations that the CPU kernels lack, by the definition."""
    if activation not in ACTIVATIONS:
        return recurrent.causal_conv(x_tc, weight_cw, bias_c, states, chains, activation)
    bias = () if bias_c is None else (bias_c,)
    spec = Spec(
        str(x_tc.dtype), str(weight_cw.dtype), None if bias_c is None else str(bias_c.dtype), str(states.dtype),
        weight_cw.shape[0], weight_cw.shape[1], activation,
    )  # fmt: skip
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (x_tc, states)]
    target = register(
        f"jpaged_conv_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}",
        lambda call: _Writer(spec, call).num_units(),
        lambda call, unit: _Writer(spec, call).write(unit),
        nanoseconds=lambda call: _Writer(spec, call).nanoseconds(),
    )
    run = jax.ffi.ffi_call(target, results, input_output_aliases={STATES: NEW_STATES}, vmap_method="sequential")
    y_tc, states = run(x_tc, weight_cw, states, *chains, *bias)
    return y_tc, states

"""Reductions of rows of logits: the best token, the log-sum-exp, the best token with noise, and ranks.

A unit is a part of a row, whose results the calling thread combines in the order of the parts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.code import F32, I8, I32, I64, Code, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.noise import Key, fold_in
from pallas_kernels.cpu.noise import gumbel as noise_of
from pallas_kernels.cpu.numbers import exp

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
PART = 8192  # logits of a unit: 32 KiB, which stay in a core's cache between its two passes
COLUMNS = 64  # sums and maxima of a part, by the place in it: their order is that of any machine
PER_NS, DRAWN_NS = 8, 1  # logits that one thread reduces in a nanosecond, and nanoseconds of a logit with noise, about
BEST, TOKEN, TOTAL, NUM_FOUND = range(4)  # of a part: its highest number, the token, the sum of the exponentials

Numbers = Callable[[Value, int], Value]  # from a first token and a number of lanes to a vector


class _Best:
    """The highest numbers so far of each lane of some vectors, and their tokens, the first of equal ones."""

    def __init__(self, code: Code, first: Value, vectors: int, lanes: int):
        self.code, self.lanes = code, lanes
        lowest = code.vector([float("-inf")] * lanes)
        self.highest = [Variable(lowest) for _ in range(vectors)]
        self.tokens = [Variable(code.splat(_int32(first), lanes)) for _ in range(vectors)]

    def add(self, vector: int, x: Value, first: Value) -> None:
        """Compare the numbers of the tokens from `first` on."""
        code, highest, tokens = self.code, self.highest[vector], self.tokens[vector]
        higher = x.compare(">", highest.get())
        highest.set(code.select(higher, x, highest.get()))
        tokens.set(code.select(higher, code.counted(_int32(first), self.lanes), tokens.get()))

    def reduced(self) -> tuple[Variable, Variable]:
        """Return the highest number and its token."""
        code, count = self.code, len(self.highest) * self.lanes
        numbers, tokens = code.scratch(count, F32), code.scratch(count, I32)
        for vector, (number, token) in enumerate(zip(self.highest, self.tokens)):
            code.store_vector(number.get(), numbers, vector * self.lanes)
            code.store_vector(token.get(), tokens, vector * self.lanes)
        best, at = Variable(code.load(numbers, 0, F32)), Variable(code.load(tokens, 0, I32))
        with code.loop(1, count) as i:
            _take_better(code, best, at, code.load(numbers, i, F32), code.load(tokens, i, I32))
        return best, at


class _RowsWriter:
    """Writer of the code of `argmax_and_lse` and `gumbel_argmax`."""

    def __init__(self, call: CallFrame, *, draws: bool):
        self.call, self.code, self.draws = call, call.code, draws
        self.num_rows, self.vocab_size = call.size(0, 0), call.size(0, 1)
        self.parts = (self.vocab_size + (PART - 1)) // PART

    def num_units(self) -> Value:
        """Return the number of units, and allocate memory for their results."""
        units = self.num_rows * self.parts
        self.call.allocate(units * (4 * NUM_FOUND))
        return units

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        logits = self.num_rows * self.vocab_size
        return logits * DRAWN_NS if self.draws else logits // PER_NS

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        row, first = unit // self.parts, unit % self.parts * PART
        stop = self.code.minimum(first + PART, self.vocab_size)
        if self.draws:
            temperature = self._temperature(row)
            with self.code.when(temperature.compare(">", 0.0)):
                key = _row_key(self.call, row, 2)
                self._write_best(unit, partial(self._drawn, row, temperature, key), first, stop)
        else:
            best = self._write_best(unit, partial(self._logits, row), first, stop)
            self._store(self._total(partial(self._logits, row), first, stop, best), unit, TOTAL)

    def finish(self) -> None:
        """Write the code that combines the parts of each row."""
        code, call = self.code, self.call
        with code.loop(0, self.num_rows) as row:
            at = row * self.parts
            if self.draws:
                code.store(code.value(0, I32), call.result(0), row)
                with code.when(self._temperature(row).compare(">", 0.0)):
                    code.store(self._best_of(at)[1].get(), call.result(0), row)
            else:
                best, token = self._best_of(at)
                code.store(token.get(), call.result(0), row)
                code.store(best.get(), call.result(1), row)
                code.store(self._total_of(at, best.get()), call.result(2), row)

    def _best_of(self, at: Value) -> tuple[Variable, Variable]:
        best, token = Variable(self._found(at, BEST)), Variable(self._found(at, TOKEN, I32))
        with self.code.loop(at + 1, at + self.parts) as unit:
            _take_better(self.code, best, token, self._found(unit, BEST), self._found(unit, TOKEN, I32))
        return best, token

    def _total_of(self, at: Value, best: Value) -> Value:
        """Return the sum of the exponentials of a row above its base; infinity with an infinite logit."""
        code, total = self.code, Variable(self.code.value(0.0, F32))
        with code.loop(at, at + self.parts) as unit:
            above = _base(code, self._found(unit, BEST)) - _base(code, best)
            factor = code.element(exp(code, code.splat(above, 1)), 0)
            total.set(total.get() + self._found(unit, TOTAL) * factor)
        infinite = best.compare("==", float("inf"))
        return code.select(infinite, best, total.get())

    def _found(self, unit: Value, index: int, kind: ir.Type = F32) -> Value:
        return self.code.load(self.call.scratch, unit * NUM_FOUND + index, kind)

    def _store(self, value: Value, unit: Value, index: int) -> None:
        self.code.store(value, self.call.scratch, unit * NUM_FOUND + index)

    def _temperature(self, row: Value) -> Value:
        return self.code.load(self.call.argument(1), row, F32)

    def _logits(self, row: Value, at: Value, lanes: int) -> Value:
        return self.code.load_vector(self.call.argument(0), row * self.vocab_size + at, F32, lanes)

    def _drawn(self, row: Value, temperature: Value, key: Key, at: Value, lanes: int) -> Value:
        """Return logits over the temperature, with noise."""
        tokens = self.code.counted(_int32(at), lanes)
        return self._logits(row, at, lanes) / self.code.splat(temperature, lanes) + noise_of(self.code, key, tokens)

    def _write_best(self, unit: Value, numbers: Numbers, first: Value, stop: Value) -> Value:
        """Write the search for the highest number of a part; return it."""
        code, lanes = self.code, Machine.host().lanes
        vectors = 2 if self.draws else 4
        whole = stop - (stop - first) % (vectors * lanes)
        most, rest = _Best(code, first, vectors, lanes), _Best(code, first, 1, 1)
        with code.loop(first, whole, vectors * lanes) as at:
            for vector in range(vectors):
                most.add(vector, numbers(at + vector * lanes, lanes), at + vector * lanes)
        with code.loop(whole, stop) as at:
            rest.add(0, numbers(at, 1), at)
        best, token = most.reduced()
        _take_better(code, best, token, *(each.get() for each in rest.reduced()))
        self._store(best.get(), unit, BEST)
        self._store(token.get(), unit, TOKEN)
        return best.get()

    def _total(self, numbers: Numbers, first: Value, stop: Value, best: Value) -> Value:
        """Return the sum of the exponentials of a part above its base."""
        code, lanes = self.code, Machine.host().lanes
        vectors = COLUMNS // lanes
        whole = stop - (stop - first) % COLUMNS
        base = _base(code, best)
        sums = [Variable(code.vector([0.0] * lanes)) for _ in range(vectors)]
        with code.loop(first, whole, COLUMNS) as at:
            for vector, added in enumerate(sums):
                above = numbers(at + vector * lanes, lanes) - code.splat(base, lanes)
                added.set(added.get() + exp(code, above))
        columns = code.scratch(COLUMNS, F32)
        for vector, added in enumerate(sums):
            code.store_vector(added.get(), columns, vector * lanes)
        half = COLUMNS // 2
        while half:
            with code.loop(0, half) as i:
                code.store(code.load(columns, i, F32) + code.load(columns, i + half, F32), columns, i)
            half //= 2
        total = Variable(code.load(columns, 0, F32))
        with code.loop(whole, stop) as at:
            above = exp(code, numbers(at, 1) - code.splat(base, 1))
            total.set(total.get() + code.element(above, 0))
        return total.get()


def _int32(x: Value) -> Value:
    return x.code.cast("trunc", x, I32)


def _base(code: Code, best: Value) -> Value:
    """Return the number that exponentials are taken above: the highest one, or 0 if it is not finite."""
    inf = float("inf")
    finite = code.both(best.compare("<", inf), best.compare(">", -inf))
    return code.select(finite, best, code.value(0.0, F32))


def _take_better(code: Code, best: Variable, token: Variable, other: Value, other_token: Value) -> None:
    """Keep the higher of two numbers, of equal ones that of the lower token."""
    higher, equal = other.compare(">", best.get()), other.compare("==", best.get())
    earlier = code.both(equal, other_token.compare("<", token.get()))
    for is_better in (higher, earlier):
        with code.when(is_better):
            best.set(other)
            token.set(other_token)


def _row_key(call: CallFrame, row: Value, argument: int) -> Key:
    """Return the key of a row: its seed [2], folded with its position; these are two adjacent arguments."""
    code = call.code
    seed = tuple(code.load(call.argument(argument), row * 2 + i, I32) for i in range(2))
    return fold_in(code, (seed[0], seed[1]), code.load(call.argument(argument + 1), row, I32))


def _rows_target(op: str, *, draws: bool) -> str:
    return register(
        f"jpaged_{op}_{VERSION}",
        lambda call: _RowsWriter(call, draws=draws).num_units(),
        lambda call, unit: _RowsWriter(call, draws=draws).write(unit),
        nanoseconds=lambda call: _RowsWriter(call, draws=draws).nanoseconds(),
        finish=lambda call: _RowsWriter(call, draws=draws).finish(),
    )


def argmax_and_lse(logits_sv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Implement `Ops.argmax_and_lse`."""
    kinds = [jax.ShapeDtypeStruct((len(logits_sv),), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    run = jax.ffi.ffi_call(_rows_target("argmax", draws=False), kinds, vmap_method="sequential")
    tokens_s, best_s, total_s = run(logits_sv)
    return tokens_s, jnp.where(jnp.isfinite(best_s), best_s, 0) + jnp.log(total_s)


def gumbel_argmax(
    logits_sv: jax.Array, temperature_s: jax.Array, seeds_s2: jax.Array, positions_s: jax.Array
) -> jax.Array:
    """Implement `Ops.gumbel_argmax`."""
    kind = jax.ShapeDtypeStruct((len(logits_sv),), jnp.int32)
    run = jax.ffi.ffi_call(_rows_target("gumbel_argmax", draws=True), kind, vmap_method="sequential")
    tokens_s: jax.Array = run(logits_sv, temperature_s, seeds_s2, positions_s)
    return tokens_s


def gumbel(seeds_s2: jax.Array, positions_s: jax.Array, tokens_sk: jax.Array) -> jax.Array:
    """Implement `Ops.gumbel`."""

    def write(call: CallFrame, row: Value) -> None:
        code, key = call.code, _row_key(call, row, 0)
        for first, stop, lanes in _vectors(row, call.size(2, 1)):
            with code.loop(first, stop, lanes) as at:
                tokens = code.load_vector(call.argument(2), at, I32, lanes)
                code.store_vector(noise_of(code, key, tokens), call.result(0), at)

    target = register(
        f"jpaged_gumbel_{VERSION}",
        lambda call: call.size(2, 0),
        write,
        nanoseconds=lambda call: call.size(2, 0) * call.size(2, 1) * DRAWN_NS,
    )
    kind = jax.ShapeDtypeStruct(tokens_sk.shape, jnp.float32)
    noise_sk: jax.Array = jax.ffi.ffi_call(target, kind, vmap_method="sequential")(seeds_s2, positions_s, tokens_sk)
    return noise_sk


def ranks(logits_sv: jax.Array, tokens_s: jax.Array, wanted_s: jax.Array) -> jax.Array:
    """Implement `Ops.ranks`."""

    def write(call: CallFrame, row: Value) -> None:
        code, rank = call.code, Variable(call.code.value(0, I32))
        with code.when(code.load(call.argument(2), row, I8).compare("!=", 0)):
            token = code.cast("sext", code.load(call.argument(1), row, I32), I64)
            value = code.load(call.argument(0), row * call.size(0, 1) + token, F32)
            rank.set(code.value(1, I32))
            for first, stop, lanes in _vectors(row, call.size(0, 1)):
                higher = Variable(code.value(0, ir.VectorType(I32, lanes)))
                with code.loop(first, stop, lanes) as at:
                    x = code.load_vector(call.argument(0), at, F32, lanes)
                    higher.set(higher.get() + code.cast("zext", x.compare(">", code.splat(value, lanes)), I32))
                counted = code.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", higher.get(), result=I32)
                rank.set(rank.get() + counted)
        code.store(rank.get(), call.result(0), row)

    target = register(
        f"jpaged_ranks_{VERSION}",
        lambda call: call.size(0, 0),
        write,
        nanoseconds=lambda call: call.size(0, 0) * call.size(0, 1) // PER_NS,
    )
    kind = jax.ShapeDtypeStruct(tokens_s.shape, jnp.int32)
    ranks_s: jax.Array = jax.ffi.ffi_call(target, kind, vmap_method="sequential")(logits_sv, tokens_s, wanted_s)
    return ranks_s


def _vectors(row: Value, width: Value) -> list[tuple[Value, Value, int]]:
    """Return the parts of a row of an array: first and end, and the lanes of vectors that hold them."""
    first, stop, lanes = row * width, (row + 1) * width, Machine.host().lanes
    whole = stop - width % lanes
    return [(first, whole, lanes), (whole, stop, 1)]

"""Reductions of rows of logits: the best tokens, the log-sum-exp, the best token with noise, and ranks.

A unit is a row, or a part of one, whose results the calling thread combines in the order of the parts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels import sampling
from pallas_kernels.cpu.code import F32, I8, I32, I64, Code, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.noise import Key, fold_in
from pallas_kernels.cpu.noise import gumbel as noise_of
from pallas_kernels.cpu.numbers import exp
from pallas_kernels.options import Masks

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
PART = 8192  # logits of a unit: 32 KiB, which stay in a core's cache between its two passes
COLUMNS = 64  # sums of a part, by the place in it: their order is the same with vectors of any width
PER_NS, DRAWN_NS = 8, 1  # logits that one thread reduces in a nanosecond, and nanoseconds of a logit with noise, about
MOST_LISTED = 128  # tokens of a list that is kept sorted; the time of an insertion grows with them
I1 = ir.IntType(1)
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

    def __init__(self, call: CallFrame, *, draws: bool, masks: bool):
        self.call, self.code, self.draws, self.masks = call, call.code, draws, masks
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
            best = self._write_best(unit, partial(self._allowed, row), first, stop)
            self._store(self._total(partial(self._allowed, row), first, stop, best), unit, TOTAL)

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

    def _allowed(self, row: Value, at: Value, lanes: int) -> Value:
        """Return logits, -inf where the mask of the row does not allow a token."""
        code = self.code
        x = code.load_vector(self.call.argument(0), row * self.vocab_size + at, F32, lanes)
        if not self.masks:
            return x
        bits_argument = 4 if self.draws else 1
        kind = ir.IntType(lanes)
        row_bits = code.at(self.call.argument(bits_argument), row * self.call.size(bits_argument, 1), I32)
        if lanes < 8:  # some bits of a byte
            byte = code.load(row_bits, at // 8, I8)
            bits = code.cast("trunc", byte >> code.cast("trunc", at % 8, I8), kind)
        else:
            bits = Value(code, code.builder.load(code.at(row_bits, at // 8, I8).llvm, align=1, typ=kind))
        has_none = code.load(self.call.argument(bits_argument + 1), row, I8).compare("==", 0)
        allowed = code.builder.bitcast((bits | code.cast("sext", has_none, kind)).llvm, ir.VectorType(I1, lanes))
        return code.select(Value(code, allowed), x, code.vector([float("-inf")] * lanes))

    def _drawn(self, row: Value, temperature: Value, key: Key, at: Value, lanes: int) -> Value:
        """Return logits over the temperature, with noise."""
        tokens = self.code.counted(_int32(at), lanes)
        return self._allowed(row, at, lanes) / self.code.splat(temperature, lanes) + noise_of(self.code, key, tokens)

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


def _rows_target(*, draws: bool, masks: bool) -> str:
    writer = partial(_RowsWriter, draws=draws, masks=masks)
    return register(
        f"jpaged_{'gumbel_' * draws}argmax{'_masked' * masks}_{VERSION}",
        lambda call: writer(call).num_units(),
        lambda call, unit: writer(call).write(unit),
        nanoseconds=lambda call: writer(call).nanoseconds(),
        finish=lambda call: writer(call).finish(),
    )


def argmax_and_lse(logits_sv: jax.Array, masks: Masks | None = None) -> tuple[jax.Array, jax.Array]:
    """Implement `Ops.argmax_and_lse`."""
    kinds = [jax.ShapeDtypeStruct((len(logits_sv),), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    run = jax.ffi.ffi_call(_rows_target(draws=False, masks=masks is not None), kinds, vmap_method="sequential")
    tokens_s, best_s, total_s = run(logits_sv, *(masks or ()))
    return tokens_s, jnp.where(jnp.isfinite(best_s), best_s, 0) + jnp.log(total_s)


def gumbel_argmax(
    logits_sv: jax.Array, temperature_s: jax.Array, seeds_s2: jax.Array, positions_s: jax.Array,
    masks: Masks | None = None,
) -> jax.Array:  # fmt: skip
    """Implement `Ops.gumbel_argmax`."""
    kind = jax.ShapeDtypeStruct((len(logits_sv),), jnp.int32)
    run = jax.ffi.ffi_call(_rows_target(draws=True, masks=masks is not None), kind, vmap_method="sequential")
    tokens_s: jax.Array = run(logits_sv, temperature_s, seeds_s2, positions_s, *(masks or ()))
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


def top(x_sv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Implement `Ops.top`: each number above the last one of a sorted list is inserted into it."""
    if not 0 < k <= MOST_LISTED:
        return sampling.top(x_sv, k)

    def write(call: CallFrame, row: Value) -> None:
        code, lanes, size, width = call.code, Machine.host().lanes, call.size(0, 1), call.result_size(0, 1)
        x = code.at(call.argument(0), row * size, F32)
        tokens, best = (code.at(call.result(i), row * width, kind) for i, kind in ((0, I32), (1, F32)))
        last = width - 1

        def insert(token: Value, place: Value) -> None:
            """Insert a token whose number is above the one in a place, or for which the place is empty."""
            number, at = code.load(x, token, F32), Variable(place)

            def is_above() -> Value:
                before = code.maximum(at.get() - 1, place * 0)
                return code.both(at.get().compare(">", 0), number.compare(">", code.load(best, before, F32)))

            with code.as_long_as(is_above):
                code.store(code.load(best, at.get() - 1, F32), best, at.get())
                code.store(code.load(tokens, at.get() - 1, I32), tokens, at.get())
                at.set(at.get() - 1)
            code.store(number, best, at.get())
            code.store(_int32(token), tokens, at.get())

        def insert_if_above(token: Value) -> None:
            with code.when(code.load(x, token, F32).compare(">", code.load(best, last, F32))):
                insert(token, last)

        with code.loop(0, width) as token:
            insert(token, token)
        whole = size - (size - width) % lanes
        with code.loop(width, whole, lanes) as at:
            above = code.load_vector(x, at, F32, lanes).compare(">", code.splat(code.load(best, last, F32), lanes))
            bits = Value(code, code.builder.bitcast(above.llvm, ir.IntType(lanes)))
            with code.when(bits.compare("!=", 0)), code.loop(at, at + lanes) as token:
                insert_if_above(token)
        with code.loop(whole, size) as token:
            insert_if_above(token)

    target = register(
        f"jpaged_top_{VERSION}",
        lambda call: call.size(0, 0),
        write,
        nanoseconds=lambda call: call.size(0, 0) * call.size(0, 1) // PER_NS,
    )
    kinds = [jax.ShapeDtypeStruct((len(x_sv), k), dtype) for dtype in (jnp.int32, jnp.float32)]
    tokens_sk, best_sk = jax.ffi.ffi_call(target, kinds, vmap_method="sequential")(x_sv)
    return tokens_sk, best_sk


def _vectors(row: Value, width: Value) -> list[tuple[Value, Value, int]]:
    """Return the parts of a row of an array: first and end, and the lanes of vectors that hold them."""
    first, stop, lanes = row * width, (row + 1) * width, Machine.host().lanes
    whole = stop - width % lanes
    return [(first, whole, lanes), (whole, stop, 1)]

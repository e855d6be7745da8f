"""The gated delta rule over pages of states, token by token and in place.

A unit is one head of a chain. The columns of a state do not depend on each other: a tile of columns stays in the cache
while the tokens of a sequence pass over it.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from llvmlite import ir

from pallas_kernels.cpu.chains import ChainsFrame
from pallas_kernels.cpu.code import F32, I64, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import exp, loader, storer
from pallas_kernels.options import Chains

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
PARTS = 4  # partial sums over the rows of a state: more additions at a time than one sum allows
VECTORS = 2  # of a tile's row: 128 rows of 32 numbers fill half of a first cache of 32 KiB
NUMBERS_PER_NS = 4  # of states, that one thread updates, about
# Arguments: q and k [T, K, D], v [T, H, V], decays and beta [T, H] float32, states [P, H, D, V] float32, and the
# chains. Results: the output [T, H, V] in v's dtype, and the states.
Q, K, V, DECAYS, BETAS, STATES = range(6)
OUTPUT, NEW_STATES = range(2)


class Spec(NamedTuple):
    """The constants of a compiled function. `group`: heads of values for one head of queries and keys."""

    dtype: str
    v_dtype: str
    num_heads: int
    group: int
    key_dim: int
    value_dim: int


class _Tile(NamedTuple):
    """Columns of a state that are computed together.

    Attributes:
        column: the first one.
        lanes, vectors: the columns are `vectors` vectors of `lanes`.
        state: memory for the state [D, columns].
    """

    column: Value
    lanes: int
    vectors: int
    state: Value

    @property
    def width(self) -> int:
        return self.lanes * self.vectors


class _Writer:
    """Writer of the code of a unit."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        self.chains = ChainsFrame(call, Q, STATES)

    def num_units(self) -> Value:
        """Return the number of units; the last one clears the output of tokens that no sequence owns."""
        return self.chains.num_sequences * self.spec.num_heads + 1

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        spec = self.spec
        return self.chains.num_tokens * (spec.num_heads * spec.key_dim * spec.value_dim // NUMBERS_PER_NS)

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, spec = self.code, self.spec
        s, h = unit // spec.num_heads, unit % spec.num_heads
        with code.when(s.compare("==", self.chains.num_sequences)):
            itemsize = {"float32": 4}.get(spec.v_dtype, 2)
            self.chains.clear(self.call.result(OUTPUT), spec.num_heads * spec.value_dim * itemsize)
        with code.when(s.compare("<", self.chains.num_sequences)), code.when(self.chains.is_head(s)):
            q, k = code.scratch(spec.key_dim, F32), code.scratch(spec.key_dim, F32)
            state = code.scratch((spec.key_dim + 1) * spec.value_dim, F32)

            def add(begin: Value, stop: Value) -> None:
                for tile in self._tiles(state):
                    with code.loop(begin, stop) as t:
                        self._token(t, h, q, k, tile)

            self.chains.read_page(s, lambda: self._clear(state), lambda page: self._load(page, h, state))
            self.chains.walk(s, add, lambda page: self._store(page, h, state))

    def _tiles(self, state: Value) -> Iterator[_Tile]:
        """Write loops over the tiles of a state, those of whole vectors first; yield within them."""
        code, columns, lanes = self.code, self.spec.value_dim, Machine.host().lanes
        first = 0
        for size, vectors in ((lanes, VECTORS), (lanes, 1), (1, 1)):
            stop = first + (columns - first) // (size * vectors) * (size * vectors)
            if first < stop:
                with code.loop(first, stop, size * vectors) as column:
                    yield _Tile(column, size, vectors, code.at(state, column * (self.spec.key_dim + 1), F32))
            first = stop

    def _rows(self, page: Value, h: Value, state: Value) -> Iterator[tuple[int, Value, Value, Value]]:
        """Write loops over the rows of a page; yield the lanes of a vector, its tile, its place there and in pages."""
        code, spec = self.code, self.spec
        base = (page * spec.num_heads + h) * (spec.key_dim * spec.value_dim)
        with code.loop(0, spec.key_dim) as d:
            for tile in self._tiles(state):
                for n in range(0, tile.width, tile.lanes):
                    at = base + d * spec.value_dim + tile.column + n
                    yield tile.lanes, tile.state, d * tile.width + n, at

    def _clear(self, state: Value) -> None:
        with self.code.loop(0, (self.spec.key_dim + 1) * self.spec.value_dim) as i:
            self.code.store(self.code.value(0.0, F32), state, i)

    def _load(self, page: Value, h: Value, state: Value) -> None:
        for lanes, tile, place, at in self._rows(page, h, state):
            self.code.store_vector(self.code.load_vector(self.call.argument(STATES), at, F32, lanes), tile, place)

    def _store(self, page: Value, h: Value, state: Value) -> None:
        for lanes, tile, place, at in self._rows(page, h, state):
            self.code.store_vector(self.code.load_vector(tile, place, F32, lanes), self.call.result(NEW_STATES), at)

    def _token(self, t: Value, h: Value, q: Value, k: Value, tile: _Tile) -> None:
        """Write the update of a tile by a token, and the token's output."""
        code, spec, lanes = self.code, self.spec, tile.lanes
        for argument, target in ((Q, q), (K, k)):
            self._convert(argument, (t * (spec.num_heads // spec.group) + h // spec.group) * spec.key_dim, target)
        row = t * spec.num_heads + h
        decay, beta = (code.splat(code.load(self.call.argument(i), row, F32), lanes) for i in (DECAYS, BETAS))
        decay = exp(code, decay)
        columns, zero = range(tile.vectors), code.value(0.0, ir.VectorType(F32, lanes))

        def read(d: Value, sums: list[Variable]) -> None:
            k_d = code.splat(code.load(k, d, F32), lanes)
            for n, total in zip(columns, sums):
                state = code.load_vector(tile.state, d * tile.width + n * lanes, F32, lanes)
                total.set(code.fma(k_d, state, total.get()))

        def update(d: Value, sums: list[Variable]) -> None:
            k_d, q_d = (code.splat(code.load(x, d, F32), lanes) for x in (k, q))
            for n, total in zip(columns, sums):
                place = d * tile.width + n * lanes
                state = code.fma(k_d, change[n].get(), code.load_vector(tile.state, place, F32, lanes) * decay)
                code.store_vector(state, tile.state, place)
                total.set(code.fma(q_d, state, total.get()))

        values, place = self.call.argument(V), row * spec.value_dim + tile.column
        (_, load), store = loader(spec.v_dtype, lanes), storer(spec.v_dtype, lanes)
        # The product with the decayed state is that with the state before, times the decay.
        known = self._sums(read, tile.vectors, zero)
        change = [Variable((load(code, values, place + n * lanes) - known[n] * decay) * beta) for n in columns]
        for n, output in enumerate(self._sums(update, tile.vectors, zero)):
            store(code, output, self.call.result(OUTPUT), place + n * lanes)

    def _sums(self, add: Callable[[Value, list[Variable]], None], vectors: int, zero: Value) -> list[Value]:
        """Write a loop over the rows of a state, and return the sums of each vector.

        Args:
            add: writes the addition of a row to its partial sums: row d has those of number d % PARTS.
        """
        code, rows = self.code, self.spec.key_dim
        parts = [[Variable(zero) for _ in range(vectors)] for _ in range(PARTS)]
        whole = rows - rows % PARTS
        with code.loop(0, whole, PARTS) as d:
            for i, part in enumerate(parts):
                add(d + i, part)
        for i in range(rows - whole):
            add(code.value(whole + i, I64), parts[i])
        a, b, c, e = parts
        return [(a[n].get() + b[n].get()) + (c[n].get() + e[n].get()) for n in range(vectors)]

    def _convert(self, argument: int, first: Value, target: Value) -> None:
        """Write the float32 numbers of a head's query or key."""
        code, size, lanes = self.code, self.spec.key_dim, Machine.host().lanes
        whole = size - size % lanes
        for begin, stop, step in ((0, whole, lanes), (whole, size, 1)):
            _, load = loader(self.spec.dtype, step)
            with code.loop(begin, stop, step) as i:
                code.store_vector(load(code, self.call.argument(argument), first + i), target, i)


def delta_rule(
    q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array,
    states: jax.Array, chains: Chains,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Implement `Ops.delta_rule`."""
    (_, num_kv, key_dim), (_, num_heads, value_dim) = q_tkd.shape, v_thv.shape
    spec = Spec(str(q_tkd.dtype), str(v_thv.dtype), num_heads, num_heads // num_kv, key_dim, value_dim)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_thv, states)]
    target = register(
        f"jpaged_delta_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}",
        lambda call: _Writer(spec, call).num_units(),
        lambda call, unit: _Writer(spec, call).write(unit),
        nanoseconds=lambda call: _Writer(spec, call).nanoseconds(),
    )
    run = jax.ffi.ffi_call(target, results, input_output_aliases={STATES: NEW_STATES}, vmap_method="sequential")
    o_thv, states = run(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states, *chains)
    return o_thv, states

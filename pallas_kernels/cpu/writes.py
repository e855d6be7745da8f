"""Writes of keys and values into the pool, in place, and the rotation of keys and queries before them."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import FP8
from pallas_kernels.cpu.code import F32, I8, I32, I64, Machine, Value
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import LOADED, loader, storer
from pallas_kernels.options import Pools, WriteOptions, Written

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
TOKENS = 16  # of a unit
NUMBERS_PER_NS = 4  # of one thread, about
# Arguments: both pools, keys and values [T, K, H], slots [T] int32, and the optional ones of the spec. Results: both
# pools, and the rotated queries.
K_POOL, V_POOL, KEYS, VALUES, SLOTS = range(5)
ROTATED = 2

Convert = Callable[[Value], Value]  # of a vector of float32


class Spec(NamedTuple):
    """The constants of a compiled function.

    Attributes:
        num_heads: number of query heads that are rotated; 0: no queries.
        is_rotated: whether cos and sin [T, H/2] float32 are arguments. The queries follow, and scales [K] of fp8 pools.
    """

    dtype: str
    pool_dtype: str
    num_kv_heads: int
    num_heads: int
    head_dim: int
    pool_head_dim: int
    block_size: int
    is_rotated: bool


class _Writer:
    """Writer of the code of a unit, some tokens."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        names = ["cos", "sin"] * spec.is_rotated + ["q"] * bool(spec.num_heads)
        names += ["k_scales", "v_scales"] * ("float8" in spec.pool_dtype)
        self.arguments = {name: call.argument(SLOTS + 1 + i) for i, name in enumerate(names)}

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, call, spec = self.code, self.call, self.spec
        slots = call.size(K_POOL, 0) * spec.block_size
        with code.loop(unit * TOKENS, code.minimum((unit + 1) * TOKENS, call.size(KEYS, 0))) as t:
            slot = code.cast("sext", code.load(call.argument(SLOTS), t, I32), I64)
            heads = code.loop(0, spec.num_kv_heads)
            with code.when(slot.compare(">=", 0)), code.when(slot.compare("<", slots)), heads as k:
                self._write_head(t, k, slot)
            if spec.num_heads:
                store = partial(storer, spec.dtype)
                with code.loop(t * spec.num_heads, (t + 1) * spec.num_heads) as n:
                    place = n * spec.head_dim
                    self._rotate(self.arguments["q"], place, t, call.result(ROTATED), place, store, lambda x: x)

    def _write_head(self, t: Value, k: Value, slot: Value) -> None:
        code, call, spec = self.code, self.call, self.spec
        source = (t * spec.num_kv_heads + k) * spec.head_dim
        row = (slot // spec.block_size * spec.num_kv_heads + k) * spec.block_size + slot % spec.block_size
        target, store = row * spec.pool_head_dim, partial(storer, spec.pool_dtype)
        if spec.is_rotated:
            self._rotate(
                call.argument(KEYS), source, t, call.result(K_POOL), target, store, self._scaled("k_scales", k)
            )
        else:
            self._copy(call.argument(KEYS), source, call.result(K_POOL), target, self._scaled("k_scales", k))
        self._copy(call.argument(VALUES), source, call.result(V_POOL), target, self._scaled("v_scales", k))
        size = jnp.dtype(spec.pool_dtype).itemsize
        for pool in (K_POOL, V_POOL):
            with code.loop((target + spec.head_dim) * size, (target + spec.pool_head_dim) * size) as i:
                code.store(code.value(0, I8), call.result(pool), i)

    def _scaled(self, scales: str, k: Value) -> Convert:
        """Return the writer of the division by a head's scale, or of the cut at the largest number of the pool."""
        if scales not in self.arguments:
            return self._cut if self.spec.pool_dtype != self.spec.dtype else lambda x: x
        factor = 1.0 / self.code.load(self.arguments[scales], k, F32)
        return lambda x: x * factor

    def _cut(self, x: Value) -> Value:
        """Return numbers within the finite ones of the pool; NaN stays."""
        high, low = (
            self.code.value(sign * float(jnp.finfo(self.spec.pool_dtype).max), x.llvm.type) for sign in (1, -1)
        )
        return self.code.maximum(low, self.code.minimum(high, x))

    def _widths(self, size: int) -> list[tuple[int, int, int]]:
        """Return the parts of some numbers: first and end, and the lanes of vectors that hold them."""
        lanes = Machine.host().lanes
        whole = size - size % lanes
        return [(0, whole, lanes)] * (whole > 0) + [(whole, size, 1)] * (whole < size)

    def _copy(self, source: Value, at: Value, target: Value, place: Value, convert: Convert) -> None:
        code, spec = self.code, self.spec
        for first, stop, lanes in self._widths(spec.head_dim):
            (_, load), store = loader(spec.dtype, lanes), storer(spec.pool_dtype, lanes)
            with code.loop(first, stop, lanes) as i:
                store(code, convert(load(code, source, at + i)), target, place + i)

    def _rotate(
        self, source: Value, at: Value, t: Value, target: Value, place: Value,
        storer_of: Callable[[int], Callable[..., None]], convert: Convert,
    ) -> None:  # fmt: skip
        """Write the rotation of the halves of a head, rounded to its dtype, and its conversion."""
        code, spec = self.code, self.spec
        half = spec.head_dim // 2
        for first, stop, lanes in self._widths(half):
            (element, load), (_, load_angle) = loader(spec.dtype, lanes), loader("float32", lanes)
            store, round_to, rounded = storer_of(lanes), storer(spec.dtype, lanes), code.scratch(lanes, element)
            with code.loop(first, stop, lanes) as i:
                a, b = load(code, source, at + i), load(code, source, at + (i + half))
                cos, sin = (load_angle(code, self.arguments[name], t * half + i) for name in ("cos", "sin"))
                for offset, x in ((0, a * cos - b * sin), (half, b * cos + a * sin)):
                    round_to(code, x, rounded, code.value(0, I64))
                    store(code, convert(load(code, rounded, code.value(0, I64))), target, place + (i + offset))


def write_kv(
    pools: Pools, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array, options: WriteOptions
) -> Written:
    """Implement `Ops.write_kv`."""
    num_kv_heads, head_dim = k_tkh.shape[1:]
    block_size, pool_head_dim = pools[0].shape[2:]
    spec = Spec(
        str(k_tkh.dtype), str(pools[0].dtype), num_kv_heads, 0 if options.q_tnh is None else options.q_tnh.shape[1],
        head_dim, pool_head_dim, block_size, options.angles is not None,
    )  # fmt: skip
    if not {spec.dtype, spec.pool_dtype} <= set(LOADED[:4]):
        raise NotImplementedError(f"CPU kernels: {spec.dtype} into pools of {spec.pool_dtype} is not supported")
    scales = (options.k_scale_k, options.v_scale_k) if pools[0].dtype == FP8 else ()
    arguments = [*pools, k_tkh, v_tkh, slot_mapping_t, *(options.angles or ())]
    arguments += [array for array in (options.q_tnh, *scales) if array is not None]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*pools, options.q_tnh) if x is not None]
    name = f"jpaged_write_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}"
    numbers = (2 * num_kv_heads + spec.num_heads) * head_dim
    target = register(
        name,
        lambda call: (call.size(KEYS, 0) + (TOKENS - 1)) // TOKENS,
        lambda call, unit: _Writer(spec, call).write(unit),
        nanoseconds=lambda call: call.size(KEYS, 0) * numbers // NUMBERS_PER_NS,
    )
    write = jax.ffi.ffi_call(target, results, input_output_aliases={0: 0, 1: 1}, vmap_method="sequential")
    k_pool, v_pool, *rotated = write(*arguments)
    return k_pool, v_pool, rotated[0] if rotated else None

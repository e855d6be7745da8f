"""Products of the rows of a step with a weight matrix, which is read from memory once and in order.

The numbers of a row lie in the lanes of vectors, along which the sums run. The order of a sum depends on its length
only, so that a row has the same result next to any other rows.
"""

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.code import F32, I32, I64, VOID, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import LOADED, loader

UNIT_O, UNIT_T = 48, 128  # outputs and rows of a unit of work
BLOCK = 64  # rows of x that stay in the second cache together with their sums
WHOLE, SEGMENT = 1024, 512  # a sum of more numbers than WHOLE runs in segments, whose weights stay in the first cache
PREFETCHED = 3  # cache lines of the next weights that are requested in each turn of the loop


def product(x_ti: jax.Array, weight_oi: jax.Array, wanted_t: jax.Array | None = None) -> jax.Array | None:
    """Return x W^T [T, O] float32 of float32 numbers; None if only XLA can compute it.

    Args:
        weight_oi: float32, bfloat16 or float16.
        wanted_t: bool, the rows that are computed; the others are 0. None: all rows.

    Raises:
        ValueError: `wanted_t` has another length than x.
    """
    rows, depth = x_ti.shape
    if wanted_t is not None and wanted_t.shape != (rows,):
        raise ValueError(f"wanted_t: must have shape ({rows},), not {wanted_t.shape}")
    if not (rows > 0 and depth > 0 and depth % Machine.host().lanes == 0):
        return None
    if str(weight_oi.dtype) not in LOADED[:3] or x_ti.dtype == jnp.float64:
        return None
    wanted_t = jnp.ones(rows, jnp.int32) if wanted_t is None else wanted_t.astype(jnp.int32)
    shape = jax.ShapeDtypeStruct((rows, weight_oi.shape[0]), jnp.float32)
    multiply = jax.ffi.ffi_call(target(str(weight_oi.dtype)), shape, vmap_method="sequential")
    y_to: jax.Array = multiply(x_ti.astype(jnp.float32), weight_oi, wanted_t)
    return y_to


def target(dtype: str) -> str:
    """Make the target for weights of a dtype, and return its name.

    Its arguments are x [T, I] float32, W [O, I], and whether each row is computed, [T] int32.
    """
    return register(
        f"jpaged_product_3_{dtype}",
        lambda call: (call.size(1, 0) + (UNIT_O - 1)) // UNIT_O * _row_units(call),
        lambda call, unit: _write_unit(dtype, call, unit),
    )


def _row_units(call: CallFrame) -> Value:
    return (call.size(0, 0) + (UNIT_T - 1)) // UNIT_T


def _write_unit(dtype: str, call: CallFrame, unit: Value) -> None:
    code, lanes = call.code, Machine.host().lanes
    # The outputs and the rows of x that are computed at once: one sum in each of most registers.
    tile_o, tile_t = (6, 4) if Machine.host().registers == 32 else (4, 2)
    element, load = loader(dtype, lanes)
    depth, outputs = call.size(0, 1), call.size(1, 0)
    x, weight, y = call.argument(0), call.argument(1), call.result(0)
    rows = code.scratch(UNIT_T, I64)  # the unit's rows that are computed
    partial = code.scratch(BLOCK * UNIT_O * lanes, F32)  # the sums up to a segment, [tiles, tile_t * tile_o, lanes]

    def tile(o: Value, num_o: int, r: Value, num_t: int, begin: Value, end: Value, place: Value) -> None:
        """Write the sums of a tile over the inputs from `begin` to below `end`.

        Args:
            r: place of the first row in `rows`.
            place: place of the partial sums.
        """
        at_t = [code.load(rows, r + j, I64) for j in range(num_t)]
        pairs = [(j, i) for j in range(num_t) for i in range(num_o)]
        places = [(place + (j * num_o + i)) * lanes for j, i in pairs]
        sums = [Variable(code.value(0.0, ir.VectorType(F32, lanes))) for _ in pairs]
        with code.when(begin.compare(">", 0)):
            for total, at in zip(sums, places):
                total.set(code.load_vector(partial, at, F32, lanes))
        # Prefetch the weights of the next outputs. Each tile requests different cache lines, into the second cache:
        # requests into the first one would delay loads.
        ahead, options = depth * num_o, [code.value(number, I32) for number in (0, 2, 1)]
        first = o + r // num_t * PREFETCHED % num_o
        with code.loop(begin, end, lanes) as k:
            for line in range(PREFETCHED):
                line_at = code.at(weight, (first + line) * depth + (k + ahead), element)
                code.intrinsic("llvm.prefetch.p0", line_at, *options, result=VOID)
            w = [load(code, weight, (o + i) * depth + k) for i in range(num_o)]
            for j in range(num_t):
                x_j = code.load_vector(x, at_t[j] * depth + k, F32, lanes)
                for i in range(num_o):
                    total = sums[j * num_o + i]
                    total.set(code.fma(w[i], x_j, total.get()))
        with code.when(end.compare("<", depth)):
            for total, at in zip(sums, places):
                code.store_vector(total.get(), partial, at)
        with code.when(end.compare(">=", depth)):
            for n in range(0, len(pairs), lanes):
                totals = code.sums([total.get() for total in sums[n : n + lanes]])
                for lane, (j, i) in enumerate(pairs[n : n + lanes]):
                    code.store(code.element(totals, lane), y, at_t[j] * outputs + (o + i))

    def strip(o: Value, num_o: int, first: Value, stop: Value, begin: Value, end: Value, place: Value) -> None:
        """Write the sums of some outputs for the rows at the places from `first` to below `stop`."""
        left = (stop - first) % tile_t
        with code.loop(first, stop - left, tile_t) as r:
            tile(o, num_o, r, tile_t, begin, end, place + (r - first) * num_o)
        for num_t in range(1, tile_t):
            with code.when(left.compare("==", num_t)):
                tile(o, num_o, stop - left, num_t, begin, end, place + (stop - left - first) * num_o)

    row_units = _row_units(call)
    start_o, start_t = unit // row_units * UNIT_O, unit % row_units * UNIT_T
    stop_o, stop_t = code.minimum(start_o + UNIT_O, outputs), code.minimum(start_t + UNIT_T, call.size(0, 0))
    last_o, count = stop_o - (stop_o - start_o) % tile_o, Variable(code.value(0, I64))
    with code.loop(start_t, stop_t) as t:
        wanted = code.load(call.argument(2), t, I32)
        with code.when(wanted.compare("!=", 0)):
            code.store(t, rows, count.get())
            count.set(count.get() + 1)
        with code.when(wanted.compare("==", 0)), code.loop(start_o, stop_o) as o:
            code.store(code.value(0.0, F32), y, t * outputs + o)
    segment = code.select(depth.compare("<=", WHOLE), depth, code.value(SEGMENT, I64))
    with code.loop(0, count.get(), BLOCK) as first, code.loop(0, depth, segment) as begin:
        stop, end = code.minimum(first + BLOCK, count.get()), code.minimum(begin + segment, depth)
        with code.loop(start_o, last_o, tile_o) as o:
            strip(o, tile_o, first, stop, begin, end, (o - start_o) * BLOCK)
        with code.loop(last_o, stop_o) as o:
            strip(o, 1, first, stop, begin, end, (o - start_o) * BLOCK)

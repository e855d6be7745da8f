"""Products of a few rows with a weight matrix, which is read from memory once and in order.

The numbers of a row lie in the lanes of vectors, along which the sums run. The order of a sum depends on its length
only, so that a row has the same result next to any other rows.
"""

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.code import F32, Machine, Value, Variable
from pallas_kernels.cpu.ffi import Call, register
from pallas_kernels.cpu.numbers import LOADED, loader

MAX_ROWS = 128  # XLA is as fast from about here on, where the weights take less time than the sums
UNIT = 48  # outputs of a unit of work
WHOLE, SEGMENT = (
    1024,
    512,
)  # a sum of more numbers than the first is computed in segments, which stay in the first cache
PREFETCHED = 3  # cache lines of the next weights that are requested in each turn of the loop


def product(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array | None:
    """Return x W^T [T, O] float32 of float32 numbers; None if XLA computes it faster or only XLA can.

    Args:
        weight_oi: float32, bfloat16 or float16.
    """
    num_rows, depth = x_ti.shape
    if not (0 < num_rows <= MAX_ROWS and depth > 0 and depth % Machine.host().lanes == 0):
        return None
    if str(weight_oi.dtype) not in LOADED[:3] or x_ti.dtype == jnp.float64:
        return None
    shape = jax.ShapeDtypeStruct((num_rows, weight_oi.shape[0]), jnp.float32)
    y_to: jax.Array = jax.ffi.ffi_call(target(str(weight_oi.dtype)), shape)(x_ti.astype(jnp.float32), weight_oi)
    return y_to


def target(dtype: str) -> str:
    """Make the target for weights of a dtype, and return its name. It takes x [T, I] float32 and W [O, I]."""
    return register(f"jpaged_product_{dtype}", _count_units, lambda call, unit: _write_unit(dtype, call, unit))


def _tile() -> tuple[int, int]:
    """Return the outputs and the rows of x that are computed at once: one sum in each of most registers."""
    return (6, 4) if Machine.host().registers == 32 else (4, 2)


def _count_units(call: Call) -> Value:
    return (call.size(1, 0) + (UNIT - 1)) // UNIT


def _write_unit(dtype: str, call: Call, unit: Value) -> None:
    code, lanes = call.code, Machine.host().lanes
    tile_o, tile_t = _tile()
    load = loader(dtype, lanes)
    num_rows, depth, outputs = call.size(0, 0), call.size(0, 1), call.size(1, 0)
    x, weight, y = call.argument(0), call.argument(1), call.result(0)
    partial = code.scratch(MAX_ROWS * tile_o * lanes, F32)  # the sums up to a segment, [T, tile_o, lanes]

    def tile(o: Value, num_o: int, t: Value, num_t: int, begin: Value, end: Value) -> None:
        """Write the sums of a tile over the inputs from `begin` to below `end`."""
        pairs = [(j, i) for j in range(num_t) for i in range(num_o)]
        places = [((t + j) * num_o + i) * lanes for j, i in pairs]
        sums = [Variable(code.value(0.0, ir.VectorType(F32, lanes))) for _ in pairs]
        with code.when(begin.compare(">", 0)):
            for total, place in zip(sums, places):
                total.set(code.load_vector(partial, place, F32, lanes))
        # The next weights are those of the next segment or of the next outputs. Each tile requests other lines of them.
        ahead = code.select(end.compare("<", depth), end - begin, depth * num_o - begin)
        first = o + t // num_t * PREFETCHED % num_o
        with code.loop(begin, end, lanes) as k:
            for line in range(PREFETCHED):
                code.prefetch(code.at(weight, (first + line) * depth + (k + ahead), load.element))
            w = [load(code, weight, (o + i) * depth + k) for i in range(num_o)]
            for j in range(num_t):
                x_j = code.load_vector(x, (t + j) * depth + k, F32, lanes)
                for i in range(num_o):
                    total = sums[j * num_o + i]
                    total.set(code.fma(w[i], x_j, total.get()))
        with code.when(end.compare("<", depth)):
            for total, place in zip(sums, places):
                code.store_vector(total.get(), partial, place)
        with code.when(end.compare(">=", depth)):
            for n in range(0, len(pairs), lanes):
                found = code.sums([total.get() for total in sums[n : n + lanes]])
                for lane, (j, i) in enumerate(pairs[n : n + lanes]):
                    code.store(code.element(found, lane), y, (t + j) * outputs + (o + i))

    def strip(o: Value, num_o: int) -> None:
        """Write the sums of some outputs for all rows."""
        segment = code.select(depth.compare("<=", WHOLE), depth, code.value(SEGMENT, depth.llvm.type))
        left = num_rows % tile_t
        with code.loop(0, depth, segment) as begin:
            end = code.minimum(begin + segment, depth)
            with code.loop(0, num_rows - left, tile_t) as t:
                tile(o, num_o, t, tile_t, begin, end)
            for num_t in range(1, tile_t):
                with code.when(left.compare("==", num_t)):
                    tile(o, num_o, num_rows - left, num_t, begin, end)

    start = unit * UNIT
    stop = code.minimum(start + UNIT, outputs)
    last = stop - (stop - start) % tile_o
    with code.loop(start, last, tile_o) as o:
        strip(o, tile_o)
    with code.loop(last, stop) as o:
        strip(o, 1)

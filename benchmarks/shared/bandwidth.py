"""Read bandwidth of a CPU: all of its threads read an array, as the kernels read weights."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.code import I32, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register

UNIT = 2**16  # numbers that a thread reads before it takes further ones
VECTORS = 8  # read at once
STREAMS = (1, 4)  # numbers of streams of a thread: one CPU reads one fastest, another one several


def read(array_n: jax.Array, streams: int) -> jax.Array:
    """Return the sums of int32 numbers [N] in each of N / UNIT units, [N / UNIT] int32; N is a multiple of UNIT.

    Each thread reads from 1 to VECTORS parts of a unit at the same time.
    """
    name, write = f"jpaged_benchmark_read_{streams}", partial(_sum, streams=streams)
    return jax.ffi.ffi_call(
        register(name, lambda call: call.size(0, 0) // UNIT, write),
        jax.ShapeDtypeStruct((array_n.size // UNIT,), jnp.int32),
    )(array_n)


def _sum(call: CallFrame, unit: Value, streams: int) -> None:
    """Write the code of a unit."""
    code, lanes, array = call.code, Machine.host().lanes, call.argument(0)
    sums = [Variable(code.splat(code.value(0, I32), lanes)) for _ in range(VECTORS)]
    length, vectors = UNIT // streams, VECTORS // streams
    with code.loop(unit * UNIT, unit * UNIT + length, vectors * lanes) as at:
        for i, total in enumerate(sums):
            place = at + (i // vectors * length + i % vectors * lanes)
            total.set(total.get() + code.load_vector(array, place, I32, lanes))
    whole = sums[0].get()
    for total in sums[1:]:
        whole = whole + total.get()
    one = Variable(code.value(0, I32))
    for lane in range(lanes):
        one.set(one.get() + code.element(whole, lane))
    code.store(one.get(), call.result(0), unit)

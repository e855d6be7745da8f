"""The ceilings of the device: reading, copying, multiplying. Figures of kernels are given as shares of these."""

import jax
import jax.numpy as jnp

from benchmarks.kernels.bench import Bench
from benchmarks.kernels.workloads import random_array
from benchmarks.shared.timing import JaxTimed, measure

READ_SETS = 4


def ceilings(bench: Bench) -> None:
    """Measures all three and remembers them in `bench.read_gb_per_s` and `bench.matmul_tflop_per_s`."""
    read_ceiling(bench)
    copy_ceiling(bench)
    matmul_ceiling(bench)


def read_ceiling(bench: Bench) -> float:
    """GB/s of a reduction over arrays that no cache holds: the best of several that XLA makes of it."""
    size = bench.sized(2**30, 2**16)
    arrays = [random_array((size // 2 // 8192, 8192), "bfloat16", seed) for seed in range(READ_SETS)]
    bits = [jax.jit(lambda x: jax.lax.bitcast_convert_type(x.reshape(-1, 4096, 2), jnp.uint32))(x) for x in arrays]
    reductions = {
        "read: max of 32 bits, all": (bits, lambda x: x.max()),
        "read: max of 32 bits, by row": (bits, lambda x: x.max(1)),
        "read: max of 32 bits, by column": (bits, lambda x: x.max(0)),
        "read: sum of bfloat16, by row": (arrays, lambda x: x.sum(1, dtype=jnp.float32)),
    }

    def timed(sets, reduce):
        def call(carry, _, x):
            reduced = jax.lax.optimization_barrier(reduce(x))  # all of it, though one number is looked at
            return reduced.ravel()[0].astype(jnp.float32) + 0 * carry

        return JaxTimed(call, jnp.zeros(()), (), sets)

    timings = measure({name: timed(*each) for name, each in reductions.items()}, bench.effort)
    best = 0.0
    for name, timing in timings.items():
        gb_per_s = size / timing.median / 1e9
        best = max(best, gb_per_s)
        bench.report.add(experiment="ceilings", what=name, **timing.row(), gb_per_s=gb_per_s, status="ok")
    bench.read_gb_per_s = best
    return best


def copy_ceiling(bench: Bench) -> None:
    """GB/s read and written by a copy."""
    size = bench.sized(2**30, 2**16)
    x = random_array((size // 2 // 8192, 8192), "bfloat16", 9)
    # A negation can't be left out, and moves as much as a copy. Each call makes a new array, on other memory.
    timed = JaxTimed(lambda x, *_: jax.lax.optimization_barrier(-x), x, (), [()] * READ_SETS)
    timing = measure({"copy": timed}, bench.effort)["copy"]
    bench.report.add(
        experiment="ceilings", what="copy (read + write)", **timing.row(), gb_per_s=2 * size / timing.median / 1e9,
        status="ok",
    )  # fmt: skip


def matmul_ceiling(bench: Bench) -> float:
    """TFLOP/s of a large bfloat16 product of random numbers, as XLA makes it."""
    n = bench.sized(8192, 128)
    a = random_array((n, n), "bfloat16", 4)
    b = random_array((n, n), "bfloat16", 5) * jnp.bfloat16(n**-0.5)  # products of products keep their size
    timed = JaxTimed(lambda a, b, _: a @ b, a, b, [()] * 4)
    timing = measure({"matmul": timed}, bench.effort)["matmul"]
    rate = 2 * n**3 / timing.median / 1e12
    bench.report.add(
        experiment="ceilings", what=f"matmul {n} x {n} x {n} bfloat16", **timing.row(), tflop_per_s=rate, status="ok"
    )
    bench.matmul_tflop_per_s = rate
    return rate

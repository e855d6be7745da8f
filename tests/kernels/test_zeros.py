"""Zeros that take no memory before they are used."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("llvmlite")

from pallas_kernels.cpu.zeros import PAGE, zeros

MIB = 2**20


@pytest.mark.parametrize("shape", [(), (1,), (PAGE // 4 - 16,), (PAGE // 4,), (PAGE // 4 + 1,), (3, 5, 7 * PAGE)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_they_are_zero_in_memory_that_held_other_numbers(shape, dtype):
    make = jax.jit(lambda: zeros(shape, dtype))
    for _ in range(3):
        before = [jnp.full(shape, 1.5, dtype).block_until_ready() for _ in range(4)]
        del before
        array = make()
        assert (array.shape, array.dtype) == (shape, dtype) and not jnp.any(array != 0)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages")
def test_a_page_takes_memory_once_it_is_written():
    make = jax.jit(lambda: zeros((64, MIB // 4), "float32"))
    write = jax.jit(lambda array, value: array.at[:32].set(value), donate_argnums=0)
    write(make(), 1.0).block_until_ready()
    before = resident()
    array = make().block_until_ready()
    assert resident() - before < 4 * MIB
    array = write(array, 1.0).block_until_ready()
    assert 28 * MIB < resident() - before < 40 * MIB
    assert array[31].all() and not array[32:].any()

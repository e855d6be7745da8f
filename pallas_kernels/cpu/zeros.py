"""Arrays of zeros that take no memory before they are used."""

import math
import mmap
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.code import I32, I64, POINTER, Value
from pallas_kernels.cpu.ffi import CallFrame, register

PAGE = mmap.PAGESIZE


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros. On Linux a page of them takes memory once it is touched, elsewhere from the beginning."""
    pages, rest = divmod(math.prod(shape) * jnp.dtype(dtype).itemsize, PAGE)
    name = register("jpaged_zeros_1", lambda call: call.code.value(1, I64), lambda call, _: _write(call))
    make = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))
    array: jax.Array = make(jnp.array([min(pages, 2**31 - 1), rest], jnp.int32))  # more memory does not exist
    return array


def _write(call: CallFrame) -> None:
    """Write the zeros of a call, whose argument is the size of its result: [2] int32, whole pages and further bytes."""
    code = call.code
    pages, rest = (code.cast("zext", code.load(call.argument(0), i, I32), I64) for i in range(2))
    begin = Value(code, code.builder.ptrtoint(call.result(0).llvm, I64))
    stop = begin + (pages * PAGE + rest)

    def clear(first: Value, end: Value) -> None:
        code.intrinsic("memset", _pointer(first), code.value(0, I32), end - first, result=POINTER)

    if sys.platform != "linux":
        clear(begin, stop)
        return
    # Linux drops these pages, and reads them as zeros.
    low = code.minimum((begin + (PAGE - 1)) // PAGE * PAGE, stop)
    high = code.maximum(stop // PAGE * PAGE, low)
    clear(begin, low)
    clear(high, stop)
    failed = code.intrinsic("madvise", _pointer(low), high - low, code.value(mmap.MADV_DONTNEED, I32), result=I32)
    with code.when(failed.compare("!=", 0)):
        clear(low, high)


def _pointer(address: Value) -> Value:
    return Value(address.code, address.code.builder.inttoptr(address.llvm, POINTER))

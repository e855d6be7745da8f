"""Numbers of weights as wgmma's left operand, converted in registers (Mosaic GPU, Hopper).

A weight with groups is W = scale q + minimum. Its numbers of 4 bits are centred, q - 8, so that the number to add,
minimum + 8 scale, is small. Scales and these sums are rounded to the rows' dtype, and so is the weight.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.options import Ref
from pallas_kernels.weights import MIDDLE, PACKED, Format

BITS = ("float8_e4m3fn", "uint8")  # dtypes that the kernel reads as int8
PIECE = 128  # inputs of a weight with groups that are converted at once
COPY_BYTES = 16  # of the shortest row that TMA copies
WGMMA = plgpu.Layout.WGMMA
COLUMN = WGMMA.reduce(1)
# By dtype: bits of a float that is this number, plus a small integer in its last bits.
PATTERNS = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}


class Groups(NamedTuple):
    """Scales or minima of neighbouring groups of 64 outputs in shared memory, and the first group of a tile in them."""

    ref: Ref  # [64, groups]
    first: jax.Array | int


def factors_in(depth: int, group: int, itemsize: int) -> int:
    """Return the number of neighbouring factors of an output that are copied with a tile of `depth` inputs."""
    return max(depth // group, COPY_BYTES // itemsize)


def factor_bytes(depth: int, form: Format) -> int:
    """Return the bytes of the factors of an output that are copied with a tile of `depth` inputs."""
    sizes = [jnp.dtype(dtype).itemsize for dtype in (form.scales, form.minima) if form.group and dtype]
    return sum(size * factors_in(depth, form.group or depth, size) for size in sizes)


def whole_copies(factors_og: jax.Array) -> jax.Array:
    """Return factors [..., groups], with zeros after them if TMA can't copy rows of so many bytes."""
    missing = -factors_og.shape[-1] % (COPY_BYTES // factors_og.dtype.itemsize)
    return jnp.pad(factors_og, [*[(0, 0)] * (factors_og.ndim - 1), (0, missing)]) if missing else factors_og


def first_in(groups: int, start: jax.Array, depth: int, group: int) -> jax.Array | int:
    """Return the place of the group of input `start` among the `groups` that are copied with it."""
    return 0 if groups * group == depth else lax.rem(lax.div(start, group), groups)


def converted(tile: Ref, form: Format, dtype: Any, factors: Sequence[Groups]) -> Iterator[tuple[int, jax.Array]]:
    """Yield pieces [64, inputs] of a tile of a weight [64, depth] in the rows' dtype, each with its first input.

    The next piece is converted after the caller has used one: registers are few.

    Args:
        tile: its numbers [64, depth] int8, or [64, depth/2] if they are packed; those of fp8 are given by their bits.
        factors: the scales, and the minima if there are any; (): the numbers themselves are wanted.
    """
    numbers = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)  # 4 neighbours in each thread
    numbers = plgpu.layout_cast(numbers, WGMMA)
    if not factors:
        yield 0, _floats(numbers, form, dtype)
        return
    packing = 1 + form.is_packed
    depth = tile.shape[1] * packing
    group = form.group or depth
    width = PACKED if form.is_packed else min(group, PIECE, depth)
    scales_go, added_go = _factors(factors, form, dtype, max(1, depth // group))

    def scaled(at: int) -> jax.Array:
        floats = _floats(numbers[:, at // packing : (at + width) // packing], form, dtype)
        floats = floats * _columns(scales_go[at // group], floats.shape)
        return floats if added_go is None else floats + _columns(added_go[at // group], floats.shape)

    for start in range(0, depth, PIECE):
        yield start, jnp.concatenate([scaled(at) for at in range(start, min(start + PIECE, depth), width)], axis=1)


def _floats(numbers: jax.Array, form: Format, dtype: Any) -> jax.Array:
    if form.is_mxfp4:
        return _of_e2m1(numbers)
    if form.is_packed:
        return _of_packed(numbers, dtype)
    return _of_fp8(numbers) if form.dtype in BITS else numbers.astype(dtype)


def _of_fp8(numbers: jax.Array) -> jax.Array:
    # The exponent and mantissa of e4m3 are those of a bfloat16 that is smaller by the difference of the biases.
    wide = numbers.astype(jnp.int16)
    bits = ((wide << 4) & jnp.int16(0x07F0)) | (wide & jnp.int16(-0x8000))
    small: jax.Array = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return small * jnp.bfloat16(2.0**120)


def _of_e2m1(numbers: jax.Array) -> jax.Array:
    """Return the numbers of packed codes of e2m1, [64, depth] bfloat16."""
    # The exponent and mantissa of e2m1 are those of a bfloat16 that is smaller by the difference of the biases.
    pattern, _ = PATTERNS["bfloat16"]
    codes = lax.bitcast_convert_type(_unpacked(numbers, jnp.bfloat16, pattern), jnp.int16)
    bits = ((codes << 6) & jnp.int16(0x01C0)) | ((codes << 12) & jnp.int16(-0x8000))
    small: jax.Array = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return small * jnp.bfloat16(2.0**126)


def _of_packed(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Return packed numbers less 8, [64, depth]."""
    pattern, offset = PATTERNS[jnp.dtype(dtype).name]
    return _unpacked(numbers, dtype, pattern) - jnp.asarray(offset + MIDDLE, dtype)


def _unpacked(numbers: jax.Array, dtype: Any, pattern: int) -> jax.Array:
    """Return the floats whose last bits are packed numbers, [64, depth]."""
    outputs, columns = numbers.shape
    unpack = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((outputs, 2 * columns), dtype, layout=WGMMA)
    )
    floats: jax.Array = unpack(functools.partial(unpack_registers, pattern=pattern))(numbers)
    return floats


def unpack_registers(_: Any, numbers: Any, *, pattern: int) -> Any:
    """Return the floats whose last bits are the packed numbers, in the order of the inputs, as Mosaic's array.

    A thread has two neighbouring bytes in a register, and two that are 8 columns further in the next. They become one
    word, whose shifts by 0, 8, 4 and 12 bits have the numbers of neighbouring inputs in the last 4 bits of its halves.
    LLVM would shift and widen each number by itself.
    """
    i32 = ir.IntegerType.get_signless(32)
    float_type = ir.BF16Type.get() if pattern == PATTERNS["bfloat16"][0] else ir.F16Type.get()
    one_word, two_floats = ir.VectorType.get((1,), i32), ir.VectorType.get((2,), float_type)
    floats = numbers.registers.repeat(2, axis=1)  # all are replaced
    for row, pair, *rest in itertools.product(*map(range, numbers.registers[:, ::2].shape)):
        first, second = (numbers.registers[row, 2 * pair + i, *rest] for i in range(2))
        word = vector.extract(vector.bitcast(one_word, vector.shuffle(first, second, [0, 2, 1, 3])), [], [0])
        for i, shift in enumerate((0, 8, 4, 12)):
            number = arith.andi(arith.shrui(word, mgpu.c(shift, i32)), mgpu.c(0x000F000F, i32))
            bits = vector.broadcast(one_word, arith.ori(number, mgpu.c(pattern << 16 | pattern, i32)))
            floats[row, 4 * pair + i, *rest] = vector.bitcast(two_floats, bits)
    return type(numbers)(_registers=floats, _layout=numbers.layout, _is_signed=None)


def _factors(factors: Sequence[Groups], form: Format, dtype: Any, groups: int) -> tuple[jax.Array, jax.Array | None]:
    """Return the scales and the addends of a tile's groups, [groups, 64] each."""
    exact = [plgpu.load(ref.at[:, pl.ds(first, groups)].T, layout=COLUMN, optimized=False) for ref, first in factors]
    if groups == 1:  # Mosaic can take a row of several only
        exact = [jnp.concatenate([row, row]) for row in exact]
    if form.is_mxfp4:
        exact = [lax.bitcast_convert_type((each.astype(jnp.int32) & 0xFF) << 23, jnp.float32) for each in exact]
    scales, *minima = (each.astype(jnp.float32) for each in exact)
    added = [each + MIDDLE * scales if form.is_packed else each for each in minima]
    return scales.astype(dtype), added[0].astype(dtype) if added else None


def _columns(x_o: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    columns: jax.Array = plgpu.layout_cast(lax.broadcast_in_dim(x_o, shape, [0]), WGMMA)
    return columns

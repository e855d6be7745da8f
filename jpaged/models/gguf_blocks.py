"""Blocks of quantized tensors in GGUF, as numbers with scales and minima of groups: W = scale q + minimum.

All forms are those of llama.cpp (ggml-common.h, ggml-quants.c). A row of a tensor is a sequence of blocks of 32 or 256
numbers. Numbers of 4 bits stay packed; those of other widths become int8, which costs memory and loses nothing.
In the K forms, the scale of a group is the product of a block's scale (float16) and a small integer. The product is
rounded to float16 where a weight stays quantized, a relative error of at most 2^-11, and is exact otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from pallas_kernels.weights import pack

SMALLEST, LARGEST = 2.0**-14, 65504.0  # normal numbers of float16

Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]
Blocks = np.ndarray  # [N, bytes of a block] uint8


class Layout(NamedTuple):
    """Form of the blocks of a kind.

    Attributes:
        parts: return the numbers of blocks, [N, numbers] int8, or packed, [N, numbers/2] uint8, and their scales and
            minima, [N, groups] float32; of MXFP4 exponents, uint8.
        group: numbers of a group.
        is_packed: whether numbers have 4 bits.
        has_minima: whether there are minima.
        scale_at: place of a block's scale in float16; that of the minima follows it, if there are any.
        factor: greatest integer that it is multiplied by.
    """

    parts: Callable[[Blocks], Parts]
    group: int
    is_packed: bool = False
    has_minima: bool = False
    scale_at: int = 0
    factor: int = 1
    is_mxfp4: bool = False

    def fits_float16(self, blocks: Blocks) -> bool:
        """Return whether float16 can hold the scales and minima of blocks, judged by the greatest of a block."""
        if self.factor == 1:  # they are stored in float16
            return True
        for at in (self.scale_at, self.scale_at + 2)[: 1 + self.has_minima]:
            largest = float(np.abs(_halves(blocks, at)).max(initial=0)) * self.factor
            if largest > LARGEST or 0 < largest < SMALLEST:
                return False
        return True


def _halves(blocks: Blocks, at: int) -> np.ndarray:
    """Return the number in float16 at a place of each block, [N, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, size: int) -> np.ndarray:
    """Return the numbers of 4 bits in [N, bytes]: of each `size` bytes all low halves, then all high halves."""
    grouped = packed.reshape(len(packed), -1, 1, size)
    return np.concatenate([grouped & 15, grouped >> 4], axis=2).reshape(len(packed), -1)


def _bits(packed: np.ndarray, width: int, size: int) -> np.ndarray:
    """Return numbers of a few bits in [N, bytes]: of each `size` bytes all lowest bits, then the next, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    grouped = packed.reshape(len(packed), -1, 1, size)
    return ((grouped >> shifts) & ((1 << width) - 1)).reshape(len(packed), -1)


def _q8_0(blocks: Blocks) -> Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _q4_0(blocks: Blocks) -> Parts:
    return blocks[:, 2:], _halves(blocks, 0), None


def _q4_1(blocks: Blocks) -> Parts:
    return blocks[:, 4:], _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Blocks) -> Parts:
    numbers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return numbers.view(np.int8) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: Blocks) -> Parts:
    numbers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return numbers.view(np.int8), _halves(blocks, 0), _halves(blocks, 2)


def _q2_k(blocks: Blocks) -> Parts:
    scales, numbers = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    return numbers.view(np.int8), _halves(blocks, 80) * (scales & 15), -_halves(blocks, 82) * (scales >> 4)


def _q3_k(blocks: Blocks) -> Parts:
    high = _bits(blocks[:, :32], 1, 32) << np.uint8(2)
    numbers = (_bits(blocks[:, 32:96], 2, 32) | high).view(np.int8) - np.int8(4)
    scales = _nibbles(blocks[:, 96:104], 8) | _bits(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return numbers, _halves(blocks, 108) * (scales.view(np.int8) - np.int8(32)), None


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 8 scales and 8 minima of 6 bits each, from [N, 12].

    The first four of each have 6 bits of a byte. The others' low halves share bytes 8 to 11, and their highest two bits
    are those of the first eight bytes.
    """
    first, second, shared = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, shared & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, shared >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _q4_k(blocks: Blocks) -> Parts:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    packed = pack(_nibbles(blocks[:, 16:], 32), np)
    return packed, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q5_k(blocks: Blocks) -> Parts:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    numbers = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return numbers.view(np.int8), _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q6_k(blocks: Blocks) -> Parts:
    numbers = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return numbers.view(np.int8) - np.int8(32), _halves(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _mxfp4(blocks: Blocks) -> Parts:
    return blocks[:, 1:], blocks[:, :1], None


LAYOUTS = {
    Kind.Q8_0: Layout(_q8_0, 32),
    Kind.Q4_0: Layout(_q4_0, 32, is_packed=True),
    Kind.Q4_1: Layout(_q4_1, 32, is_packed=True, has_minima=True),
    Kind.Q5_0: Layout(_q5_0, 32),
    Kind.Q5_1: Layout(_q5_1, 32, has_minima=True),
    Kind.Q2_K: Layout(_q2_k, 16, has_minima=True, scale_at=80, factor=15),
    Kind.Q3_K: Layout(_q3_k, 16, scale_at=108, factor=32),
    Kind.Q4_K: Layout(_q4_k, 32, is_packed=True, has_minima=True, factor=63),
    Kind.Q5_K: Layout(_q5_k, 32, has_minima=True, factor=63),
    Kind.Q6_K: Layout(_q6_k, 16, scale_at=208, factor=128),
    Kind.MXFP4: Layout(_mxfp4, 32, is_packed=True, is_mxfp4=True),
}


def blocks_of(rows: np.ndarray, kind: Kind) -> Blocks:
    """Return the blocks of rows, [R, bytes of a row], one after another."""
    return rows.reshape(-1, GGML_QUANT_SIZES[kind][1])

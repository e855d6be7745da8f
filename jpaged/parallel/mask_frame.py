"""Masks of a plan as the payload of a frame: the numbers of rows and words, then the words."""

import struct

import numpy as np

from jpaged.parallel.frame import FrameError

_SHAPE = struct.Struct("<II")


def encode_masks(masks: np.ndarray) -> bytes:
    """Return the payload of masks, [M, ceil(V / 32)] uint32."""
    return _SHAPE.pack(*masks.shape) + masks.astype("<u4", copy=False).tobytes()


def decode_masks(payload: bytes, num_masks: int, vocab_size: int) -> np.ndarray:
    """Return the masks of a payload, [M, ceil(V / 32)] uint32.

    Raises:
        FrameError: the payload does not have `num_masks` masks over a vocabulary of `vocab_size`.
    """
    shape, size = (num_masks, -(-vocab_size // 32)), _SHAPE.size
    if len(payload) < size or (found := _SHAPE.unpack_from(payload)) != shape:
        raise FrameError(f"masks: must be {list(shape)}, not {list(found) if len(payload) >= size else 'cut off'}")
    if len(payload) - size != 4 * shape[0] * shape[1]:
        raise FrameError(f"masks: must have {4 * shape[0] * shape[1]} bytes, not {len(payload) - size}")
    return np.frombuffer(payload, "<u4", offset=size).reshape(shape)

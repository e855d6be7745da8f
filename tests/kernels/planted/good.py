"""The reference under another name."""

from pallas_kernels import reference
from pallas_kernels.recurrent import delta_rule
from pallas_kernels.reference import copy_blocks, write_kv

__all__ = ["copy_blocks", "delta_rule", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]


def unsupported(**model):
    return None


def paged_decode_attention(*args, tiles):
    return reference.paged_decode_attention(*args)


def ragged_paged_attention(*args, tiles, decode_tiles):
    return reference.ragged_paged_attention(*args)

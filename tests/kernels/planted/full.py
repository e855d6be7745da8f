"""Ops of a device whose memory is taken, and one that fails for another reason."""

from pallas_kernels import reference
from tests.kernels.planted.good import delta_rule, paged_decode_attention, ragged_paged_attention, unsupported

__all__ = ["copy_blocks", "delta_rule", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]


def write_kv(*args):
    if args[-1].angles:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.")
    return reference.write_kv(*args)


def copy_blocks(*args):
    raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144, available: 232448")

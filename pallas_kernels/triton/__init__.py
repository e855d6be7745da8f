"""Paged ops as Pallas-Triton kernels: for NVIDIA GPUs from Ampere on, and for float32.

It has the functions of `pallas_kernels.ops.Implementation`; `pallas_kernels.reference` defines their results.
"""

from pallas_kernels.triton.attention import paged_decode_attention, ragged_paged_attention
from pallas_kernels.triton.copy import copy_blocks
from pallas_kernels.triton.kv_write import write_kv
from pallas_kernels.triton.launch import unsupported

__all__ = ["copy_blocks", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]

"""Paged ops as Pallas-Triton kernels: for NVIDIA GPUs from Ampere on, and for float32.

It has the functions of `pallas_kernels.ops.Implementation`; `pallas_kernels.reference` defines their results.
"""

from pallas_kernels.triton.attention import paged_decode_attention, ragged_paged_attention
from pallas_kernels.triton.delta import delta_rule
from pallas_kernels.triton.launch import unsupported
from pallas_kernels.triton.writes import copy_blocks, write_kv

__all__ = ["copy_blocks", "delta_rule", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]

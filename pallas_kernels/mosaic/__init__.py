"""Paged ops as Mosaic GPU kernels, for Hopper (sm_90a): TMA copies, wgmma, warp specialisation.

The gated delta rule has nothing to gain from these, and is Triton's.

It has the functions of `pallas_kernels.ops.Implementation`; `pallas_kernels.reference` defines their results.
"""

from pallas_kernels.mosaic.decode import paged_decode_attention
from pallas_kernels.mosaic.product import LEAST_ROWS, product
from pallas_kernels.mosaic.ragged import ragged_paged_attention
from pallas_kernels.mosaic.support import unsupported
from pallas_kernels.mosaic.work import make_work
from pallas_kernels.mosaic.writes import copy_blocks, write_kv
from pallas_kernels.triton.delta import delta_rule

__all__ = [
    "LEAST_ROWS", "copy_blocks", "delta_rule", "make_work", "paged_decode_attention", "product",
    "ragged_paged_attention", "unsupported", "write_kv",
]  # fmt: skip

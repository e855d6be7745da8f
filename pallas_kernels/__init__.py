"""Paged attention and recurrent layers for JAX: reference definitions and kernels of the same ops. It needs only jax.

    import pallas_kernels
    kernels = pallas_kernels.select_for(jax.devices()[0], json.load(open("config.json")))
    o_snh = kernels.paged_decode_attention(q_snh, k_pool, v_pool, block_tables, context_lens, scale=scale)

The letters in names and shapes, everywhere in this project:
T tokens in the step, S sequences, N query heads, K kv heads, G = N / K, H head dim, D model dim, F mlp dim,
V vocabulary, L layers, P blocks in the pool, B tokens per block, W block table width, C block copies.

A pool holds one layer's keys or values: [P, K, B, H]. A block table maps a sequence's logical blocks to blocks of the
pool; a slot is `block_id * B + offset`.
"""

from pallas_kernels.dispatch import (
    REFERENCE,
    Kernels,
    compute_capability,
    has_products,
    select,
    select_for,
    takes_weight,
)
from pallas_kernels.ops import Ops, load
from pallas_kernels.options import CONTINUES, NO_STATE, Chains, LowRank, Masks
from pallas_kernels.reference import ROW_ORDER, merge_attention, rotate
from pallas_kernels.selftest import SelfTest
from pallas_kernels.weights import Weight

_reference = Ops(load(REFERENCE))
write_kv, copy_blocks = _reference.write_kv, _reference.copy_blocks
paged_decode_attention, ragged_paged_attention = _reference.paged_decode_attention, _reference.ragged_paged_attention
product, products, low_rank = _reference.product, _reference.products, _reference.low_rank
rms_norm = _reference.rms_norm
delta_rule, causal_conv = _reference.delta_rule, _reference.causal_conv

__all__ = [
    "CONTINUES",
    "NO_STATE",
    "ROW_ORDER",
    "Chains",
    "Kernels",
    "LowRank",
    "Masks",
    "Ops",
    "SelfTest",
    "Weight",
    "causal_conv",
    "compute_capability",
    "copy_blocks",
    "delta_rule",
    "has_products",
    "load",
    "low_rank",
    "merge_attention",
    "paged_decode_attention",
    "product",
    "products",
    "ragged_paged_attention",
    "rms_norm",
    "rotate",
    "select",
    "select_for",
    "takes_weight",
    "write_kv",
]

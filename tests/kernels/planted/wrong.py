"""A ragged attention that returns zeros, as a kernel that never ran would."""

import jax.numpy as jnp

from tests.kernels.planted.good import copy_blocks, delta_rule, paged_decode_attention, unsupported, write_kv

__all__ = ["copy_blocks", "delta_rule", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]


def ragged_paged_attention(q_tnh, *args, tiles, decode_tiles):
    return jnp.zeros_like(q_tnh), jnp.zeros(q_tnh.shape[:2])

"""Attention of whole sequences without a cache: dense and differentiable, or by the ops of an engine."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from jpaged.models.base import Attend, AttentionSpec, Model
from jpaged.rl.recurrence import dense_recurrence, engines_recurrence
from jpaged.runtime.batch import Batch
from jpaged.runtime.kv_cache import KVCache
from pallas_kernels import rotate


def dense_attention(model: Model, positions_bw: jax.Array, mask_bww: jax.Array) -> Attend:
    """Return attention with the scale, window and cap of each layer.

    Args:
        positions_bw: [B, W] int32.
        mask_bww: [B, W, W] bool, whether a query (the second axis) sees a key (the third).
    """
    batch, width = positions_bw.shape
    distance_bww = positions_bw[:, :, None] - positions_bw[:, None, :]

    def attend(
        layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, cos: jax.Array | None,
        sin: jax.Array | None, *, sinks_n: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        spec = cast(AttentionSpec, model.attention_specs[layer])
        if cos is not None and sin is not None:
            q_tnh, k_tkh = (rotate(x, cos, sin) for x in (q_tnh, k_tkh))
        q_bwkgh = q_tnh.reshape(batch, width, k_tkh.shape[1], -1, q_tnh.shape[2])
        k_bwkh, v_bwkh = (x.reshape(batch, width, *x.shape[1:]) for x in (k_tkh, v_tkh))
        scores = spec.scale * jnp.einsum("bqkgh,bskh->bkgqs", q_bwkgh, k_bwkh, preferred_element_type=jnp.float32)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        seen_bww = mask_bww if spec.window is None else mask_bww & (distance_bww < spec.window)
        # A finite value, so that a row of padding that sees nothing has finite gradients.
        scores = jnp.where(seen_bww[:, None, None], scores, -1e30)
        if sinks_n is not None:
            sinks = sinks_n.reshape(k_tkh.shape[1], -1, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :width].astype(v_bwkh.dtype)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, v_bwkh).reshape(q_tnh.shape)

    return attend


def causal_attention(model: Model, batch: int, width: int) -> Attend:
    """Return dense attention, and the definitions of recurrence, of sequences [B, W] from their beginning."""
    positions_bw = jnp.broadcast_to(jnp.arange(width), (batch, width))
    mask_bww = jnp.broadcast_to(jnp.tri(width, dtype=bool), (batch, width, width))
    return dense_recurrence(dense_attention(model, positions_bw, mask_bww), batch, width)


def paged_attention(model: Model, cache: KVCache, is_output_bw: jax.Array) -> Attend:
    """Return causal attention, and recurrence, with the bits of an engine whose pool has this layout.

    Args:
        is_output_bw: [B, W] bool, the tokens that the engine has generated. It attends them as decode tokens, and the
            others in the order of a prompt.
    """
    step = as_step(is_output_bw, cache.block_size)
    num_blocks = len(is_output_bw) * step.block_tables[0].shape[1]

    def attend(
        layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, *angles: Any,
        sinks_n: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        dtype = jnp.result_type(q_tnh, k_tkh, v_tkh)
        qkv = tuple(x.astype(cache.attention_dtype or x.dtype) for x in (q_tnh, k_tkh, v_tkh))
        pool = [jnp.zeros(cache.shape(num_blocks), cache.dtype) for _ in "kv"]
        spec = cast(AttentionSpec, model.attention_specs[layer])
        return cache.attend(pool, 0, spec, step, False, qkv, angles, sinks_n).astype(dtype)

    return engines_recurrence(attend, cache.kernels, *is_output_bw.shape)


def as_step(is_output_bw: jax.Array, block_size: int) -> Batch:
    """Return sequences as a step of an engine, without the fields of sampling.

    Each generated token is a decode token, and the tokens before, between and after them are chunks of prompts. Row b
    has the blocks from b ceil(W / block_size) on.
    """
    width, num_tokens = is_output_bw.shape[1], is_output_bw.size
    blocks = -(-width // block_size)
    row_t, position_t = jnp.divmod(jnp.arange(num_tokens, dtype=jnp.int32), width)
    is_output_t = is_output_bw.reshape(-1)
    begins_t = is_output_t | jnp.roll(is_output_t, 1) | (position_t == 0)
    # The largest possible number of sequences; unused ones begin and end after the last token.
    starts_s = jnp.nonzero(begins_t, size=num_tokens + 1, fill_value=num_tokens)[0].astype(jnp.int32)
    first_s = jnp.minimum(starts_s[:-1], num_tokens - 1)
    return Batch(
        num_tokens=None, tokens=None, positions=position_t, targets=None, sampled_from=None, samples=None,
        slot_mapping=(row_t * blocks * block_size + position_t,),
        context_lens=jnp.where(starts_s[:-1] < num_tokens, position_t[starts_s[1:] - 1] + 1, 0),
        cu_q_lens=starts_s, decodes=is_output_t[first_s],
        block_tables=(row_t[first_s, None] * blocks + jnp.arange(blocks, dtype=jnp.int32),),
    )  # fmt: skip

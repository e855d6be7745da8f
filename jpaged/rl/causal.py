"""A trainer's forward pass of a served module: whole sequences at once, without a cache, differentiable.

On a CPU, XLA adds the terms of a product one after the other, which rounds more than the engine's kernels do. Therefore
`token_logprobs` takes the kernels' products with weights, and attention scores are summed in parts.
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.base import Attend, Model
from jpaged.models.layers import set_products
from pallas_kernels import Ops, cpu, load, rotate

PARTS = 8  # of the sum of a score on a CPU


def token_logprobs(model: Model, tokens_bw: jax.Array) -> jax.Array:
    """Return the logprob of each token after those before it, [B, W] float32; 0 for the first ones.

    On a CPU, parameters that are divided among several devices are gathered on each.

    Args:
        tokens_bw: [B, W] int32, each row from its beginning. Tokens after the end of a sequence change none before.
    """
    width = tokens_bw.shape[1]
    mask_bww = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (len(tokens_bw), width, width))
    positions_bw = jnp.broadcast_to(jnp.arange(width), tokens_bw.shape)
    logits_bwv = logits(_with_kernels(model), tokens_bw, positions_bw, mask_bww)
    logprobs_bwv = jax.nn.log_softmax(logits_bwv[:, :-1], axis=-1)
    chosen_bw = jnp.take_along_axis(logprobs_bwv, tokens_bw[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(chosen_bw, ((0, 0), (1, 0)))


def logits(model: Model, tokens_bw: jax.Array, positions_bw: jax.Array, mask_bww: jax.Array) -> jax.Array:
    """Return the logits [B, W, V] float32 of sequences.

    Args:
        tokens_bw, positions_bw: [B, W] int32.
        mask_bww: [B, W, W] bool, whether a query (the second axis) sees a key (the third).
    """
    x_td = model(tokens_bw.reshape(-1), positions_bw.reshape(-1), _attend(model, positions_bw, mask_bww))
    return model.logits(x_td).reshape(*tokens_bw.shape, -1)


def _with_kernels(model: Model) -> Model:
    """Return a model with the same arrays whose products are those of the engine on a CPU."""
    if jax.default_backend() != "cpu" or cpu.unsupported(dtype="float32", pool_dtype="float32"):
        return model
    ops = Ops(load(cpu.__name__))
    copied: Any = nnx.merge(*nnx.split(cast(nnx.Module, model)))
    set_products(copied, ops.product, ops.products)
    return cast(Model, copied)


def _attend(model: Model, positions_bw: jax.Array, mask_bww: jax.Array) -> Attend:
    """Return attention with the scale, window and cap of each layer."""
    batch, width = positions_bw.shape
    distance_bww = positions_bw[:, :, None] - positions_bw[:, None, :]
    parts = PARTS if jax.default_backend() == "cpu" else 1
    dot = partial(jnp.einsum, "bqkgh,bskh->bkgqs", preferred_element_type=jnp.float32)

    def attend(
        layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, cos: jax.Array | None, sin: jax.Array | None
    ) -> jax.Array:
        spec = model.attention_specs[layer]
        if cos is not None and sin is not None:
            q_tnh, k_tkh = (rotate(x, cos, sin) for x in (q_tnh, k_tkh))
        q_bwkgh = q_tnh.reshape(batch, width, k_tkh.shape[1], -1, q_tnh.shape[2])
        k_bwkh, v_bwkh = (x.reshape(batch, width, *x.shape[1:]) for x in (k_tkh, v_tkh))
        pairs = zip(*(jnp.array_split(x, parts, axis=-1) for x in (q_bwkgh, k_bwkh)), strict=True)
        scores = spec.scale * sum((dot(q, k) for q, k in pairs), start=jnp.float32(0))
        if spec.soft_cap is not None:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        seen_bww = mask_bww if spec.window is None else mask_bww & (distance_bww < spec.window)
        # A finite value, so that a row of padding that sees nothing has finite gradients.
        weights = jax.nn.softmax(jnp.where(seen_bww[:, None, None], scores, -1e30), axis=-1).astype(v_bwkh.dtype)
        return jnp.einsum("bkgqs,bskh->bqkgh", weights, v_bwkh).reshape(q_tnh.shape)

    return attend

"""Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next and Qwen 3.5: a recurrent layer in the place of attention."""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jpaged.models.base import Attend, Recur
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Linear, axes
from jpaged.models.variation import Recurrence

LEAST_HEADS = 16  # XLA computes the exponentials of fewer numbers in a row one by one on a CPU, and rounds otherwise


class Conv(nnx.Module):
    """Weights [C, 1, W] of a causal convolution of each channel; `Recur` computes it."""

    def __init__(self, channels: int, taps: int, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        self.weight = nnx.Param(init(rngs.params(), (channels, 1, taps), dtype), **axes(None, None, None))


class GatedNorm(nnx.Module):
    """Root-mean-square norm of the last axis, multiplied by a gate's silu, in float32 inside."""

    def __init__(self, size: int, epsilon: float, *, dtype: DTypeLike):
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones(size, dtype), **axes(None))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Return the normed and gated x, of the same shape and dtype."""
        x32, gate32 = x.astype(jnp.float32), gate.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        normed = self.weight[...] * normed.astype(x.dtype)
        return (normed.astype(jnp.float32) * jax.nn.silu(gate32)).astype(x.dtype)


class GatedDeltaNet(nnx.Module):
    """Layer whose heads keep a matrix, which each token decays and changes. Attributes are named as in checkpoints."""

    def __init__(self, config: ModelConfig, recurrence: Recurrence, dtype: DTypeLike, rngs: nnx.Rngs):
        d, heads = config.hidden_size, recurrence.num_value_heads
        linear = partial(Linear, names=(None, None), bias=False, dtype=dtype, rngs=rngs)
        self.recurrence = recurrence
        self.in_proj_qkv = linear(d, recurrence.channels)
        self.in_proj_z = linear(d, heads * recurrence.value_dim)
        self.in_proj_b, self.in_proj_a = linear(d, heads), linear(d, heads)
        self.conv1d = Conv(recurrence.channels, recurrence.taps, dtype, rngs)
        self.dt_bias = nnx.Param(jnp.ones(heads, dtype), **axes(None))
        decays = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(decays).astype(dtype), **axes(None))
        self.norm = GatedNorm(recurrence.value_dim, config.rms_norm_eps, dtype=dtype)
        self.out_proj = linear(heads * recurrence.value_dim, d)

    def __call__(self, x_td: jax.Array, layer: int, attend: Attend, residual_td: jax.Array | None = None) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D], added to a residual if there is one."""
        recur, at, t = cast(Recur, attend), self.recurrence, len(x_td)
        qkv_tc, z_to, b_th, a_th = self.in_proj_qkv.together(x_td, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        qkv_tc = recur.causal_conv(layer, qkv_tc, self.conv1d.weight[...][:, 0], "silu")
        keys = at.num_key_heads * at.key_dim
        q_tkd, k_tkd = (
            _unit(x.reshape(t, at.num_key_heads, at.key_dim)) for x in (qkv_tc[:, :keys], qkv_tc[:, keys : 2 * keys])
        )
        v_thv = qkv_tc[:, 2 * keys :].reshape(t, at.num_value_heads, at.value_dim)
        log_decay_th, beta_th = self._gates(a_th, b_th)
        o_thv = recur.delta_rule(layer, q_tkd * at.key_dim**-0.5, k_tkd, v_thv, log_decay_th, beta_th)
        normed_to = self.norm(o_thv, z_to.reshape(v_thv.shape)).reshape(t, -1)
        return self.out_proj(normed_to, residual_to=residual_td)

    def _gates(self, a_th: jax.Array, b_th: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logarithms of decays, and betas, [T, H] float32."""
        heads, padding = a_th.shape[1], [(0, 0), (0, max(0, LEAST_HEADS - a_th.shape[1]))]
        a_th, b_th, dt_bias, a_log = (
            jnp.pad(x.astype(jnp.float32), padding[-x.ndim :]) for x in (a_th, b_th, self.dt_bias[...], self.A_log[...])
        )
        log_decay_th = -jnp.exp(a_log) * jax.nn.softplus(a_th + dt_bias)
        # XLA would compute only the columns that are returned.
        log_decay_th, beta_th = lax.optimization_barrier((log_decay_th, jax.nn.sigmoid(b_th)))
        return log_decay_th[:, :heads], beta_th[:, :heads]


def _unit(x_tkd: jax.Array) -> jax.Array:
    """Return heads [T, K, D] of length 1, float32."""
    x32 = x_tkd.astype(jnp.float32)
    return x32 * lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + 1e-6)

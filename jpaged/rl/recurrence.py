"""Recurrent layers of whole sequences from their beginning: differentiable, or by the ops of an engine."""

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.core.plan import NO_STATE, NOWHERE
from jpaged.models.base import Attend, LayerOps
from pallas_kernels import Chains, Kernels
from pallas_kernels.reference import ACTIVATIONS


def dense_recurrence(attend: Attend, batch: int, width: int) -> LayerOps:
    """Return attention with the definitions of recurrence for sequences [B, W]."""

    def convolve(layer: int, x_tc: jax.Array, weight_cw: jax.Array, activation: str) -> jax.Array:
        taps = weight_cw.shape[1]
        x_bwc = jnp.pad(x_tc.astype(jnp.float32).reshape(batch, width, -1), ((0, 0), (taps - 1, 0), (0, 0)))
        y_bwc = jnp.zeros((), jnp.float32)
        for tap in range(taps):
            y_bwc = y_bwc + weight_cw[:, tap].astype(jnp.float32) * x_bwc[:, tap : tap + width]
        return ACTIVATIONS[activation](y_bwc).astype(x_tc.dtype).reshape(x_tc.shape)

    def recur(
        layer: int, q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array
    ) -> jax.Array:
        heads = v_thv.shape[1]
        q_thd, k_thd = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (q_tkd, k_tkd))

        def by_token(x_t: jax.Array) -> jax.Array:
            return jnp.moveaxis(x_t.astype(jnp.float32).reshape(batch, width, *x_t.shape[1:]), 1, 0)

        def step(state_bhdv: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q_bhd, k_bhd, v_bhv, log_decay_bh, beta_bh = token
            state_bhdv = state_bhdv * jnp.exp(log_decay_bh)[..., None, None]
            u_bhv = (v_bhv - jnp.einsum("bhd,bhdv->bhv", k_bhd, state_bhdv)) * beta_bh[..., None]
            state_bhdv = state_bhdv + k_bhd[..., None] * u_bhv[..., None, :]
            return state_bhdv, jnp.einsum("bhd,bhdv->bhv", q_bhd, state_bhdv)

        start = jnp.zeros((batch, heads, q_tkd.shape[2], v_thv.shape[2]), jnp.float32)
        _, o_wbhv = lax.scan(step, start, tuple(map(by_token, (q_thd, k_thd, v_thv, log_decay_th, beta_th))))
        return jnp.moveaxis(o_wbhv, 0, 1).astype(v_thv.dtype).reshape(v_thv.shape)

    return LayerOps(attend, convolve, recur)


def engines_recurrence(attend: Attend, kernels: Kernels, batch: int, width: int) -> LayerOps:
    """Return attention with the recurrent ops of an engine's kernels for sequences [B, W]."""
    chains = Chains(
        width * jnp.arange(batch + 1, dtype=jnp.int32), jnp.full(batch, NO_STATE, jnp.int32),
        jnp.full(batch, NOWHERE, jnp.int32),
    )  # fmt: skip

    def convolve(layer: int, x_tc: jax.Array, weight_cw: jax.Array, activation: str) -> jax.Array:
        states = jnp.zeros((1, weight_cw.shape[1] - 1, x_tc.shape[1]), jnp.float32)
        y_tc, _ = kernels.causal_conv(x_tc, weight_cw, None, states, chains, activation)
        return y_tc

    def recur(
        layer: int, q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array
    ) -> jax.Array:
        states = jnp.zeros((1, v_thv.shape[1], q_tkd.shape[2], v_thv.shape[2]), jnp.float32)
        o_thv, _ = kernels.delta_rule(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states, chains)
        return o_thv

    return LayerOps(attend, convolve, recur)

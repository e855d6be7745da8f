"""Definitions of the ops of recurrent layers in jnp: the specification for kernels, and the implementation without one.

Tokens are computed one after the other, or from the same inputs in the same order. A token has the same bits for any
cut of its sequence into calls, and next to any other sequences.

Axis letters of these ops: T tokens, S sequences, P pages, K heads of queries and keys, D their size, H heads of values,
V their size, C channels, W taps of a convolution.

The functions expect arguments that `Ops` has checked. A page outside the pool is its nearest page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import CONTINUES, NO_STATE, Chains
from pallas_kernels.reference import ACTIVATIONS
from pallas_kernels.transforms import varying_like

Recurrence = tuple[jax.Array, jax.Array, jax.Array]  # outputs [T, H, V], the state [H, D, V], and the pages


def delta_rule(
    q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array,
    states: jax.Array, chains: Chains,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Define `Ops.delta_rule`."""
    if len(q_tkd) == 0:
        return v_thv, states
    cu_q_lens_s1, reads_s, writes_s = chains
    group = v_thv.shape[1] // q_tkd.shape[1]
    seq_t = _sequences(chains, len(q_tkd))
    nowhere = len(states)

    def token(t: jax.Array, carry: Recurrence) -> Recurrence:
        o_thv, state_hdv, states = carry
        s = seq_t[t]
        is_first, is_last = t == cu_q_lens_s1[s], t + 1 == cu_q_lens_s1[s + 1]
        starts = is_first & (reads_s[s] != CONTINUES)
        state_hdv = lax.cond(starts, lambda: _stored(states, reads_s[s]), lambda: state_hdv)
        q_hd, k_hd = (jnp.repeat(x_tkd[t], group, axis=0) for x_tkd in (q_tkd, k_tkd))
        state_hdv, o_hv = _updated(state_hdv, q_hd, k_hd, v_thv[t], log_decay_th[t], beta_th[t])
        page = jnp.where(is_last & (writes_s[s] >= 0), writes_s[s], nowhere)
        states = states.at[page].set(state_hdv, mode="drop")
        return o_thv.at[t].set(o_hv.astype(o_thv.dtype)), state_hdv, states

    start = jnp.zeros_like(v_thv), jnp.zeros(states.shape[1:], states.dtype), states
    start = varying_like(start, (q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states, chains))
    # XLA does not dissolve a loop whose end it does not know: a single token is computed as each of many is.
    o_thv, _, states = lax.fori_loop(0, jnp.minimum(cu_q_lens_s1[-1], len(q_tkd)), token, start)
    return o_thv, states


def _updated(
    state_hdv: jax.Array, q_hd: jax.Array, k_hd: jax.Array, v_hv: jax.Array, log_decay_h: jax.Array, beta_h: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a token, and the token's output [H, V]."""
    q_hd1, k_hd1 = (x.astype(jnp.float32)[..., None] for x in (q_hd, k_hd))
    state_hdv = state_hdv * jnp.exp(log_decay_h)[:, None, None]
    u_hv = (v_hv.astype(jnp.float32) - _sum_d(k_hd1 * state_hdv)) * beta_h[:, None]
    state_hdv = state_hdv + k_hd1 * u_hv[:, None]
    return state_hdv, _sum_d(q_hd1 * state_hdv)


def _sum_d(x_hdv: jax.Array) -> jax.Array:
    """Return the sums over axis D, of halves that are added to each other, in an order that no compiler changes."""
    while (d := x_hdv.shape[1]) > 1:
        x_hdv = jnp.pad(x_hdv, ((0, 0), (0, d % 2), (0, 0)))
        a, b = jnp.split(x_hdv, 2, axis=1)
        x_hdv = a + b
    return x_hdv[:, 0]


class _Places(NamedTuple):
    """Places of tokens in their chains.

    Attributes:
        first: the first token of the chain.
        page: the page that the chain reads, or NO_STATE.
    """

    first: jax.Array
    page: jax.Array


def causal_conv(
    x_tc: jax.Array, weight_cw: jax.Array, bias_c: jax.Array | None, states: jax.Array, chains: Chains,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Define `Ops.causal_conv`: sums over the taps, all tokens at once."""
    num_tokens, width = len(x_tc), weight_cw.shape[1]
    if num_tokens == 0:
        return x_tc, states
    at_s = _places(chains)
    seq_t, tokens_t = _sequences(chains, num_tokens), jnp.arange(num_tokens)
    at_t = jax.tree.map(lambda x: x[seq_t], at_s)
    weight_cw = weight_cw.astype(jnp.float32)
    y_tc = jnp.zeros(x_tc.shape, jnp.float32) if bias_c is None else bias_c.astype(jnp.float32)
    for tap in range(width):
        inputs_tc = _inputs(x_tc, states, at_t, tokens_t - (width - 1 - tap))
        y_tc = y_tc + weight_cw[:, tap] * inputs_tc.astype(jnp.float32)
    if activation is not None:
        y_tc = ACTIVATIONS[activation](y_tc)
    cu_q_lens_s1 = chains.cu_q_lens_s1
    y_tc = jnp.where((tokens_t < cu_q_lens_s1[-1])[:, None], y_tc, 0).astype(x_tc.dtype)
    is_written_s = (chains.writes_s >= 0) & (cu_q_lens_s1[1:] > cu_q_lens_s1[:-1]) & _is_last_write(chains)
    page_s = jnp.where(is_written_s, chains.writes_s, len(states))
    rows = [_inputs(x_tc, states, at_s, cu_q_lens_s1[1:] - lag) for lag in range(width - 1, 0, -1)]
    return y_tc, states.at[page_s].set(jnp.stack(rows, 1).astype(states.dtype), mode="drop")


def _sequences(chains: Chains, num_tokens: int) -> jax.Array:
    """Return the sequence of each token, [T]; the last one for tokens that no sequence owns."""
    seq_t = jnp.searchsorted(chains.cu_q_lens_s1[1:], jnp.arange(num_tokens), side="right", method="compare_all")
    return jnp.minimum(seq_t, len(chains.reads_s) - 1)


def _places(chains: Chains) -> _Places:
    """Return the places of sequences, [S] each."""
    sequences_s = jnp.arange(len(chains.reads_s))
    head_s = lax.cummax(jnp.where(chains.reads_s != CONTINUES, sequences_s, 0))
    return _Places(chains.cu_q_lens_s1[head_s], chains.reads_s[head_s])


def _is_last_write(chains: Chains) -> jax.Array:
    """Return whether no later sequence with tokens writes the same page, [S]: it would be of the same chain."""
    sequences_s = jnp.arange(len(chains.writes_s))
    used_s = chains.cu_q_lens_s1[1:] > chains.cu_q_lens_s1[:-1]
    later_ss = (sequences_s[:, None] < sequences_s) & used_s & (chains.writes_s[:, None] == chains.writes_s)
    return ~later_ss.any(1)


def _inputs(x_tc: jax.Array, states: jax.Array, at: _Places, tokens: jax.Array) -> jax.Array:
    """Return the inputs of some tokens, which may lie before their chains: these are in the state."""
    back = tokens - at.first  # below 0: in the state
    page = jnp.clip(at.page, 0, len(states) - 1)
    row = jnp.clip(back + states.shape[1], 0, states.shape[1] - 1)
    before = jnp.where((at.page < 0)[:, None], 0, states[page, row])
    dtype = jnp.promote_types(x_tc.dtype, states.dtype)
    within = x_tc.at[jnp.clip(tokens, 0, len(x_tc) - 1)].get(mode="clip").astype(dtype)
    return jnp.where((back >= 0)[:, None], within, before.astype(dtype))


def _stored(states: jax.Array, page: jax.Array) -> jax.Array:
    """Return a page's state, or zeros for NO_STATE."""
    stored = lax.dynamic_index_in_dim(states, jnp.maximum(page, 0), keepdims=False)
    return jnp.where(page == NO_STATE, 0, stored)

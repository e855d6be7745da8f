"""The gated delta rule over pages of states, token by token and in place (Pallas-Triton).

A program takes some columns of one head's state over all tokens of a chain. The columns do not depend on each other.
The state stays in the registers of one warp, which adds in one order. Meanwhile it loads the numbers of the next token.

Axis letters are those of `pallas_kernels.recurrent`; D and V are those of a program's tile here.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.options import CONTINUES, Chains, Ref
from pallas_kernels.triton.launch import iota, launch

MAX_KEY_DIM = 256
MOST_COLUMNS, TILE = 16, 2048  # of a tile: columns, and numbers: 64 for each thread of a warp


class _Token(NamedTuple):
    """Numbers of a token in float32."""

    q_d: jax.Array
    k_d: jax.Array
    v_v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


Carry = tuple[jax.Array, _Token]  # the state [D, V], and the next token


def _delta_kernel(
    q_tkd_ref: Ref,  # [T, K, d], d at most D
    k_tkd_ref: Ref,  # [T, K, d]
    v_thv_ref: Ref,  # [T, H, v]
    log_decay_th_ref: Ref,  # [T, H]
    beta_th_ref: Ref,  # [T, H]
    start_s1_ref: Ref,  # [S + 1]
    read_s_ref: Ref,  # [S]
    write_s_ref: Ref,  # [S]
    _states_ref: Ref,  # [P, H, d, v]
    o_thv_ref: Ref,  # [T, H, v]
    states_ref: Ref,  # [P, H, d, v], in its place
    *,
    rows: int,
    columns: int,
) -> None:
    head_seq, h = pl.program_id(0), pl.program_id(1)
    row_d, column_v = iota(rows), pl.program_id(2) * columns + iota(columns)
    num_tokens, num_heads, value_dim = v_thv_ref.shape
    num_seqs, key_dim = read_s_ref.shape[0], q_tkd_ref.shape[2]
    k_head = lax.div(h, num_heads // q_tkd_ref.shape[1])
    real_d, real_v = row_d < key_dim, column_v < value_dim
    real_dv = real_d[:, None] & real_v[None, :]

    def continues(seq: jax.Array) -> jax.Array:
        """Return whether a sequence that is not the first one continues the one before; false past the last one."""
        return plt.load(read_s_ref.at[seq], mask=seq < num_seqs, other=0) == CONTINUES

    def page_at(page: jax.Array) -> Ref:
        return states_ref.at[jnp.maximum(page, 0), h, row_d[:, None], column_v[None, :]]

    def read(t: jax.Array) -> _Token:
        """Load a token; zeros past the last one."""
        exists = t < num_tokens
        q_d, k_d = (plt.load(ref.at[t, k_head, row_d], mask=exists & real_d, other=0) for ref in (q_tkd_ref, k_tkd_ref))
        v_v = plt.load(v_thv_ref.at[t, h, column_v], mask=exists & real_v, other=0)
        log_decay, beta = (plt.load(ref.at[t, h], mask=exists, other=0) for ref in (log_decay_th_ref, beta_th_ref))
        return _Token(*(x.astype(jnp.float32) for x in (q_d, k_d, v_v, log_decay, beta)))

    def token(t: jax.Array, carry: Carry) -> Carry:
        state_dv, (q_d, k_d, v_v, log_decay, beta) = carry
        following = read(t + 1)
        state_dv = state_dv * jnp.exp(log_decay)
        change_v = (v_v - (k_d[:, None] * state_dv).sum(axis=0)) * beta
        state_dv = state_dv + k_d[:, None] * change_v[None, :]
        o_v = (q_d[:, None] * state_dv).sum(axis=0)
        plt.store(o_thv_ref.at[t, h, column_v], o_v.astype(o_thv_ref.dtype), mask=real_v)
        return state_dv, following

    def sequence(walk: tuple[jax.Array, jax.Array, Carry]) -> tuple[jax.Array, jax.Array, Carry]:
        seq, _, carry = walk
        start, stop, page = start_s1_ref[seq], start_s1_ref[seq + 1], write_s_ref[seq]
        state_dv, following = lax.fori_loop(start, stop, token, carry)
        plt.store(page_at(page), state_dv, mask=real_dv & (page >= 0) & (start < stop))
        return seq + 1, continues(seq + 1), (state_dv, following)

    @pl.when(head_seq == num_seqs)
    def clear_rest() -> None:
        def clear(t: jax.Array, _: None) -> None:
            plt.store(o_thv_ref.at[t, h, column_v], jnp.zeros((columns,), o_thv_ref.dtype), mask=real_v)

        lax.fori_loop(start_s1_ref[num_seqs], num_tokens, clear, None)

    @pl.when((head_seq < num_seqs) & ((head_seq == 0) | ~continues(head_seq)))
    def walk_chain() -> None:
        page = read_s_ref[head_seq]
        state_dv = plt.load(page_at(page), mask=real_dv & (page >= 0), other=0)
        start = head_seq, jnp.bool_(True), (state_dv, read(start_s1_ref[head_seq]))
        lax.while_loop(lambda walk: walk[1], sequence, start)


def delta_rule(
    q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array, beta_th: jax.Array,
    states: jax.Array, chains: Chains,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute `Ops.delta_rule`. Prompts are computed token by token, too: their bits do not depend on chunks."""
    _, num_heads, key_dim, value_dim = states.shape
    if key_dim > MAX_KEY_DIM:
        raise NotImplementedError(
            f"Pallas-Triton kernels: keys of {key_dim} numbers, supported are up to {MAX_KEY_DIM}"
        )
    if len(q_tkd) == 0:
        return v_thv, states
    rows = pl.next_power_of_2(key_dim)
    columns = min(MOST_COLUMNS, TILE // rows, pl.next_power_of_2(value_dim))
    o_thv, states = launch(
        "delta_rule",
        partial(_delta_kernel, rows=rows, columns=columns),
        q_tkd, k_tkd, v_thv, log_decay_th, beta_th, *chains, states,
        grid=(len(chains.reads_s) + 1, num_heads, pl.cdiv(value_dim, columns)),
        out_types=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_thv, states)],
        aliases={8: 1},
        num_warps=1,
    )  # fmt: skip
    return o_thv, states

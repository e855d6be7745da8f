"""Definitions of the ops of sampling in jnp: the specification for kernels, and the implementation without one.

Axis letters of these ops: S samples, V the vocabulary, K tokens of a list. The functions expect arguments that `Ops`
has checked.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import Masks
from pallas_kernels.reductions import row_argmax, row_logsumexp

MIN_CHUNK = 16  # tokens; with fewer, one selection among all of them is faster than two


def argmax_and_lse(logits_sv: jax.Array, masks: Masks | None = None) -> tuple[jax.Array, jax.Array]:
    """Define `Ops.argmax_and_lse`."""
    x_sv = masked(logits_sv, masks)
    return row_argmax(x_sv), row_logsumexp(x_sv)


def gumbel_argmax(
    logits_sv: jax.Array, temperature_s: jax.Array, seeds_s2: jax.Array, positions_s: jax.Array,
    masks: Masks | None = None,
) -> jax.Array:  # fmt: skip
    """Define `Ops.gumbel_argmax`."""
    ids_sv = jnp.broadcast_to(jnp.arange(logits_sv.shape[1], dtype=jnp.int32), logits_sv.shape)
    x_sv = cooled(masked(logits_sv, masks), temperature_s) + gumbel(seeds_s2, positions_s, ids_sv)
    return jnp.where(temperature_s > 0, row_argmax(x_sv), 0)


def masked(logits_sv: jax.Array, masks: Masks | None) -> jax.Array:
    """Return logits, -inf where a mask does not allow a token."""
    if masks is None:
        return logits_sv
    num_rows, vocab_size = logits_sv.shape
    bits_sw32 = masks.allowed_bits_sw[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed_sv = bits_sw32.reshape(num_rows, -1)[:, :vocab_size] == 1
    return jnp.where(masks.masked_s[:, None] & ~allowed_sv, -jnp.inf, logits_sv)


def cooled(logits_sv: jax.Array, temperature_s: jax.Array) -> jax.Array:
    """Return logits over the temperature, where it is not 0."""
    return logits_sv / jnp.where(temperature_s > 0, temperature_s, 1)[:, None]


def gumbel(seeds_s2: jax.Array, positions_s: jax.Array, tokens_sk: jax.Array) -> jax.Array:
    """Define `Ops.gumbel`."""

    def row(seed: jax.Array, position: jax.Array, tokens_k: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        halves_k2 = jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token)))(tokens_k)
        bits_k = halves_k2[:, 0] ^ halves_k2[:, 1]
        uniform_k = lax.bitcast_convert_type(bits_k >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1  # in [0, 1)
        return -jnp.log(-jnp.log(jnp.maximum(uniform_k, jnp.finfo(jnp.float32).tiny)))

    return jax.vmap(row)(seeds_s2, positions_s, tokens_sk)


def ranks(logits_sv: jax.Array, tokens_s: jax.Array, wanted_s: jax.Array) -> jax.Array:
    """Define `Ops.ranks`."""
    value_s1 = jnp.take_along_axis(logits_sv, tokens_s[:, None], axis=1)
    return jnp.where(wanted_s, 1 + jnp.sum(logits_sv > value_s1, -1, dtype=jnp.int32), 0)


def top(x_sv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Define `Ops.top`.

    The best tokens lie in the k chunks with the highest maxima, the earlier of equal chunks first, because k tokens
    come before every token of another chunk. Two selections among about sqrt(k V) numbers are therefore enough.
    `lax.top_k` prefers the earlier of equal numbers, and orders 0 before -0.
    """
    num_rows, vocab_size = x_sv.shape
    x_sv = jnp.where(x_sv == 0, 0, x_sv)
    chunk = 2 ** max(0, round(math.log2(vocab_size / max(k, 1)) / 2))
    if chunk < MIN_CHUNK:
        best_sk, tokens_sk = lax.top_k(x_sv, k)
        return tokens_sk, best_sk
    padding = -vocab_size % chunk  # -inf with the highest ids: after every token
    x_snc = jnp.pad(x_sv, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(num_rows, -1, chunk)
    chunks_sn = jnp.sort(lax.top_k(x_snc.max(-1), k)[1])  # in the order of the ids again
    values_snc = jnp.take_along_axis(x_snc, chunks_sn[:, :, None], axis=1)
    ids_snc = chunks_sn[:, :, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
    best_sk, places_sk = lax.top_k(values_snc.reshape(num_rows, -1), k)
    return jnp.take_along_axis(ids_snc.reshape(num_rows, -1), places_sk, axis=1), best_sk

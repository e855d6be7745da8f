"""Definitions of the ops of sampling in jnp: the specification for kernels, and the implementation without one.

Axis letters of these ops: S samples, V the vocabulary, K tokens of a list. The functions expect arguments that `Ops`
has checked.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.reductions import row_argmax, row_logsumexp


def argmax_and_lse(logits_sv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Define `Ops.argmax_and_lse`."""
    return row_argmax(logits_sv), row_logsumexp(logits_sv)


def gumbel_argmax(
    logits_sv: jax.Array, temperature_s: jax.Array, seeds_s2: jax.Array, positions_s: jax.Array
) -> jax.Array:
    """Define `Ops.gumbel_argmax`."""
    ids_sv = jnp.broadcast_to(jnp.arange(logits_sv.shape[1], dtype=jnp.int32), logits_sv.shape)
    x_sv = cooled(logits_sv, temperature_s) + gumbel(seeds_s2, positions_s, ids_sv)
    return jnp.where(temperature_s > 0, row_argmax(x_sv), 0)


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

"""Choosing the next token, inside the step. Random bits depend on (seed, position) alone, so a request's tokens do
not depend on its neighbours; thresholds are found by bisection, because a sort of the vocabulary is slow on a GPU."""

import jax
import jax.numpy as jnp
from jax import lax


def sample(
    logits_sv: jax.Array,
    temperature_s: jax.Array,
    top_k_s: jax.Array,
    top_p_s: jax.Array,
    min_p_s: jax.Array,
    seeds_s2: jax.Array,
    positions_s: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Next token [S] int32 and its logprob [S] float32 under the model's own distribution.

    Args:
        logits_sv: [S, V] float32.
        temperature_s: [S] float32; 0 is greedy, and needs none of the rest.
        top_k_s, top_p_s, min_p_s: [S]; 0, 1 and 0 keep every token.
        seeds_s2: [S, 2] uint32, the request's seed.
        positions_s: [S] int32, where in the sequence the sampled token will stand.
    """
    greedy = jnp.argmax(logits_sv, -1).astype(jnp.int32)

    def draw():
        x = logits_sv / jnp.where(temperature_s > 0, temperature_s, 1)[:, None]
        filtered = (top_k_s > 0) | (top_p_s < 1) | (min_p_s > 0)
        x = lax.cond(jnp.any(filtered), lambda: _keep_likely(x, top_k_s, top_p_s, min_p_s), lambda: x)
        # argmax(x + Gumbel noise) is a draw from softmax(x).
        tokens = jnp.argmax(x + _gumbel(seeds_s2, positions_s, x.shape[1]), -1).astype(jnp.int32)
        return jnp.where(temperature_s > 0, tokens, greedy)

    tokens = lax.cond(jnp.any(temperature_s > 0), draw, lambda: greedy)
    chosen = jnp.take_along_axis(logits_sv, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits_sv, axis=-1)


def _gumbel(seeds_s2: jax.Array, positions_s: jax.Array, size: int) -> jax.Array:
    def row(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(row)(seeds_s2, positions_s)


def _keep_likely(x_sv: jax.Array, top_k_s: jax.Array, top_p_s: jax.Array, min_p_s: jax.Array) -> jax.Array:
    """-inf for every token but those that min-p, then top-k, then top-p keep. Tokens of equal logits stay together."""
    x_sv = jnp.where(x_sv >= x_sv.max(-1, keepdims=True) + jnp.log(min_p_s)[:, None], x_sv, -jnp.inf)
    order_sv = _order(x_sv)
    size = jnp.where(top_k_s > 0, top_k_s, x_sv.shape[1]).astype(jnp.float32)
    kept = order_sv >= _threshold(order_sv, jnp.ones_like(x_sv), size)
    p_sv = jax.nn.softmax(jnp.where(kept, x_sv, -jnp.inf), axis=-1)
    nucleus = order_sv >= _threshold(order_sv, p_sv, top_p_s)
    return jnp.where(kept & (nucleus | (top_p_s >= 1)[:, None]), x_sv, -jnp.inf)


def _order(x: jax.Array) -> jax.Array:
    """uint32 that compare as the float32 do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(order_sv: jax.Array, weight_sv: jax.Array, target_s: jax.Array) -> jax.Array:
    """The largest t [S, 1] such that what is >= t weighs at least `target`, found bit by bit; 0 if nothing does."""

    def bit(i, t):
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(order_sv >= higher[:, None], weight_sv, 0), -1)
        return jnp.where(weight >= target_s, higher, t)

    return lax.fori_loop(0, 32, bit, jnp.zeros(order_sv.shape[0], jnp.uint32))[:, None]

"""Truncated importance weights of tokens that another policy drew, for losses under `jax.jit`.

The engine draws a token with probability q, which follows from the engine's arithmetic and from the parameters at that
time. The trainer's forward pass gives the probability p under the present parameters. Each output's gradient is
multiplied by p / q, up to a cap (Ionides, 2008, "Truncated importance sampling"; for language models Yao et al., 2025,
https://fengyao.notion.site/off-policy-rl).
"""

import jax
import jax.numpy as jnp

from jpaged.core.params import InvalidParameter


def token_weights(
    logprobs_bw: jax.Array, drawn_bw: jax.Array, is_output_bw: jax.Array, *, token_cap: float
) -> jax.Array:
    """Return min(p / q, token_cap) of each token, [B, W] float32; 0 where nothing was drawn.

    No gradient passes through the weights.

    Args:
        logprobs_bw: [B, W] float32, log p, as `jpaged.rl.causal.token_logprobs` returns it.
        drawn_bw: [B, W] float32, log q: `Rollouts.logprobs`.
        is_output_bw: [B, W] bool: `Rollouts.is_output`.
        token_cap: the largest weight, positive.

    Raises:
        InvalidParameter: the cap is not positive.
    """
    weights_bw = _truncated_exp("token_cap", _log_ratios(logprobs_bw, drawn_bw, is_output_bw), token_cap)
    return jnp.where(is_output_bw, weights_bw, 0)


def sequence_weights(
    logprobs_bw: jax.Array, drawn_bw: jax.Array, is_output_bw: jax.Array, *, sequence_cap: float
) -> jax.Array:
    """Return min(product of p / q over the drawn tokens, sequence_cap) of each row, [B] float32.

    For arguments and errors see `token_weights`. The product takes the tokens of all turns.
    """
    ratios_b = _log_ratios(logprobs_bw, drawn_bw, is_output_bw).sum(axis=1)
    return _truncated_exp("sequence_cap", ratios_b, sequence_cap)


def _log_ratios(logprobs_bw: jax.Array, drawn_bw: jax.Array, is_output_bw: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(is_output_bw, logprobs_bw - drawn_bw, 0))


def _truncated_exp(name: str, log_ratios: jax.Array, cap: float) -> jax.Array:
    if not cap > 0:
        raise InvalidParameter(name, f"must be positive, not {cap}")
    return jnp.exp(jnp.minimum(log_ratios, jnp.log(cap)))  # in this order, because the exponential may overflow

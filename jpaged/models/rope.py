"""Rotary position embedding and its frequency scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.variation import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the angle per position [R/2] float32 of the rotary dim R, and the factor on cos and sin.

    R is the first `partial_rotary_factor` of the head dim. The angles are computed in float32, as in training: at long
    positions one more bit would already rotate the keys differently. Sources: RoFormer (arXiv 2104.09864); linear:
    position interpolation (arXiv 2306.15595); yarn: arXiv 2309.00071, equations 17-23, with the attention factor of its
    section 3.4; llama3: the release of Llama 3.1; longrope: arXiv 2402.13753, with the attention factor of Phi-3.
    """
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    wavelengths = np.float32(rope.theta) ** exponents
    frequencies = (1.0 / wavelengths).astype(np.float32)
    if rope.type == "linear":
        return frequencies / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.type == "yarn":
        return _yarn(rope, frequencies, rotary_dim), _attention_factor(rope)
    if rope.type == "longrope":
        factors = np.asarray(rope.long_factor if rope.is_long else rope.short_factor, np.float32)
        return (1.0 / (factors * wavelengths)).astype(np.float32), _attention_factor(rope)
    return frequencies, 1.0


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Stretch long waves by `factor`, keep short ones, and blend those between."""
    turns = np.float32(rope.original_max_position_embeddings) * frequencies / np.float32(2 * math.pi)
    keep = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return np.asarray((1 - keep) * frequencies / np.float32(rope.factor) + keep * frequencies, np.float32)


def _yarn(rope: RopeConfig, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
    """Keep dimensions that turn over `beta_fast` times within the original context; stretch those under `beta_slow`."""
    original, ends = rope.original_max_position_embeddings, (rope.beta_fast, rope.beta_slow)
    waves = [math.log(original / (turns * 2 * math.pi)) for turns in ends]
    low, high = (head_dim * wave / (2 * math.log(rope.theta)) for wave in waves)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = np.float32(high - low if high != low else 0.001)
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / span, 0.0, 1.0)
    return np.asarray(stretch * frequencies / np.float32(rope.factor) + (1 - stretch) * frequencies, np.float32)


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    stretched = math.log(max(rope.factor, 1.0))
    if rope.type == "longrope":
        return math.sqrt(1 + stretched / math.log(rope.original_max_position_embeddings))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * stretched + 1.0) / (0.1 * rope.mscale_all_dim * stretched + 1.0)
    return 0.1 * stretched + 1.0


def angles(positions_t: jax.Array, frequencies: np.ndarray, factor: float) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin [T, R/2] float32 of positions [T]."""
    angle = positions_t[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor

"""Angles of rotary embeddings against the formulas of their papers in float64, one dimension at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.rope import angles, inverse_frequencies
from jpaged.models.variation import RopeConfig

HEAD_DIM = 32


def plain(rope: RopeConfig) -> list[float]:
    size = int(HEAD_DIM * rope.partial_rotary_factor)
    return [rope.theta ** (-i / size) for i in range(0, size, 2)]


def rope_of(kind: str, **fields) -> RopeConfig:
    return RopeConfig(**dict(type=kind, factor=8.0, original_max_position_embeddings=256) | fields)


def test_angles_are_computed_in_float32_as_in_training():
    """One more bit would rotate keys at long positions otherwise."""
    found, factor = inverse_frequencies(RopeConfig(theta=5e5, partial_rotary_factor=0.75), HEAD_DIM)
    exponents = np.array([i / 24 for i in range(0, 24, 2)], np.float32)
    expected = np.float32(1) / np.power(np.float32(5e5), exponents)
    assert found.dtype == np.float32 and factor == 1
    np.testing.assert_array_equal(found, expected)
    assert (found != np.float32(plain(RopeConfig(theta=5e5, partial_rotary_factor=0.75)))).any()


def test_linear_scaling_divides_the_angles():
    rope = rope_of("linear", partial_rotary_factor=0.5)
    found, factor = inverse_frequencies(rope, HEAD_DIM)
    np.testing.assert_allclose(found, np.array(plain(rope)) / 8, rtol=1e-6)
    assert factor == 1


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    rope = rope_of("llama3", low_freq_factor=1.5, high_freq_factor=6.0, original_max_position_embeddings=64)
    found, factor = inverse_frequencies(rope, HEAD_DIM)
    expected = []
    for angle in plain(rope):
        wavelength = 2 * math.pi / angle
        part = (64 / wavelength - 1.5) / (6.0 - 1.5)
        kept = 1.0 if wavelength < 64 / 6.0 else 0.0 if wavelength > 64 / 1.5 else part
        expected.append(kept * angle + (1 - kept) * angle / 8)
    assert 0 < sum(expected[i] not in (angle, angle / 8) for i, angle in enumerate(plain(rope))) < 4
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert factor == 1


def yarn_bounds(rope: RopeConfig) -> list[float]:
    """The dimensions that turn `beta_fast` and `beta_slow` times within the original context of 256."""
    turns = (256 / (2 * math.pi * beta) for beta in (rope.beta_fast, rope.beta_slow))
    return [len(plain(rope)) * math.log(each, rope.theta) for each in turns]


@pytest.mark.parametrize(
    "fields, low, high",
    [
        ({"beta_fast": 8.0}, 2, 7),
        ({"beta_fast": 8.0, "partial_rotary_factor": 0.75}, 2, 5),
        ({"beta_fast": 8.0, "truncate": False}, None, None),
        ({"beta_fast": 4000.0}, 0, 7),  # no dimension turns so often
        ({"theta": 3.0, "beta_fast": 16.0}, 13, 31),  # all turn more than once
        ({"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}, None, None),  # from one dimension to the next
    ],
)
def test_yarn_stretches_the_dimensions_that_turn_slowly(fields, low, high):
    rope = rope_of("yarn", **fields)
    low, high = yarn_bounds(rope) if low is None else (low, high)
    expected = []
    for i, angle in enumerate(plain(rope)):
        stretched = min(max((i - low) / (high - low), 0), 1) if low != high else float(i > low)
        expected.append(stretched * angle / 8 + (1 - stretched) * angle)
    np.testing.assert_allclose(inverse_frequencies(rope, HEAD_DIM)[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, fields, factor",
    [
        ("yarn", {}, 0.1 * math.log(8) + 1),
        ("yarn", {"factor": 0.5}, 1),
        ("yarn", {"mscale": 1.5, "mscale_all_dim": 0.5}, (0.15 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ("yarn", {"mscale": 1.5}, 0.1 * math.log(8) + 1),
        ("yarn", {"mscale": 1.5, "mscale_all_dim": 0.5, "attention_factor": 0.7}, 0.7),
        ("longrope", {}, math.sqrt(1 + math.log(8) / math.log(256))),
        ("longrope", {"factor": 0.5}, 1),
        ("longrope", {"attention_factor": 0.7}, 0.7),
    ],
)
def test_the_factor_of_the_scores(kind, fields, factor):
    factors = {"short_factor": (1.0,) * 16, "long_factor": (1.0,) * 16}
    assert inverse_frequencies(rope_of(kind, **fields, **factors), HEAD_DIM)[1] == pytest.approx(factor)


@pytest.mark.parametrize("is_long", [True, False])
def test_longrope_divides_each_dimension_by_its_own_factor(is_long):
    short, long = tuple(1 + i / 8 for i in range(12)), tuple(1.5**i for i in range(12))
    rope = rope_of("longrope", short_factor=short, long_factor=long, is_long=is_long, partial_rotary_factor=0.75)
    found, _ = inverse_frequencies(rope, HEAD_DIM)
    np.testing.assert_allclose(found, np.array(plain(rope)) / (long if is_long else short), rtol=1e-6)


def test_positions_are_not_rounded():
    """100,003 takes 17 bits."""
    positions, frequencies = np.array([0, 1, 257, 100_003], np.int32), np.float32([1, 0.1])
    cos, sin = angles(jnp.asarray(positions), frequencies, 1.25)
    turns = np.float64(positions[:, None].astype(np.float32) * frequencies)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, 1.25 * np.cos(turns), atol=1e-5)
    np.testing.assert_allclose(sin, 1.25 * np.sin(turns), atol=1e-5)

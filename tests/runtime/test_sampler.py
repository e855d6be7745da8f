"""The sampler against numpy: which tokens may come, how often they do, and that neighbours don't matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.runtime.sampler import _keep_likely, sample

SAMPLE = jax.jit(sample)
KEEP = jax.jit(_keep_likely)


def arrays(rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    def full(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    seeds = np.stack([np.zeros(rows, np.uint32), full(seed, np.uint32)], axis=1)
    f32, i32 = np.float32, np.int32
    return full(temperature, f32), full(top_k, i32), full(top_p, f32), full(min_p, f32), seeds, full(position, i32)


def kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """By sorting, in float64: min-p, then top-k, then top-p; tokens as likely as the last one kept stay too."""
    x = logits.astype(np.float64)
    allowed = x >= x.max() + np.log(min_p) if min_p > 0 else np.full(len(x), True)
    if top_k:
        kth = np.sort(x[allowed])[::-1][:top_k][-1]
        allowed &= x >= kth
    p = np.where(allowed, np.exp(x - x.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        allowed &= p >= p[order[min(count, len(p)) - 1]]
    return set(np.flatnonzero(allowed).tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 7, 49, 50, 1000]),
    st.sampled_from([1.0, 0.99, 0.7, 0.31, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.4, 1.0]),
)
def test_the_tokens_kept_are_those_a_sort_would_keep(seed, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 3, 50).astype(np.float32)
    _, k, p, m, _, _ = arrays(1, top_k=top_k, top_p=top_p, min_p=min_p)
    got = np.isfinite(np.asarray(KEEP(logits[None], k, p, m))[0])
    assert set(np.flatnonzero(got).tolist()) == kept(logits, top_k, top_p, min_p)


def test_ties_stay_together():
    logits = np.asarray([[1.0, 2.0, 2.0, 2.0, -5.0]], np.float32)
    _, k, p, m, _, _ = arrays(1, top_k=2)
    assert np.isfinite(np.asarray(KEEP(logits, k, p, m)))[0].tolist() == [False, True, True, True, False]


def test_greedy_is_argmax_beside_sampled_rows():
    logits = np.random.default_rng(0).normal(0, 1, (6, 40)).astype(np.float32)
    tokens, _ = SAMPLE(logits, *arrays(6, temperature=[0, 1, 0, 1, 0, 1], seed=np.arange(6)))
    assert np.asarray(tokens)[::2].tolist() == logits.argmax(-1)[::2].tolist()


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(1).normal(0, 2, (8, 40)).astype(np.float32)
    tokens, logprobs = SAMPLE(logits, *arrays(8, temperature=0.3, top_k=5, seed=np.arange(8)))
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(8), np.asarray(tokens)], atol=1e-5)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8)])
def test_frequencies_follow_the_distribution(temperature, top_p):
    logits = np.asarray([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
    rows = 20000
    tokens, _ = SAMPLE(
        np.tile(logits, (rows, 1)), *arrays(rows, temperature=temperature, top_p=top_p, seed=np.arange(rows))
    )
    p = np.exp(logits / temperature)
    allowed = kept(logits / temperature, 0, top_p, 0.0)
    p = np.asarray([x if i in allowed else 0 for i, x in enumerate(p)])
    p /= p.sum()
    frequencies = np.bincount(np.asarray(tokens), minlength=len(p)) / rows
    # Five standard deviations of a binomial share.
    assert (np.abs(frequencies - p) <= 5 * np.sqrt(p * (1 - p) / rows)).all()


def test_a_token_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(2).normal(0, 1, (8, 1000)).astype(np.float32)
    whole = arrays(8, temperature=1.3, top_k=200, seed=np.arange(8), position=np.arange(8) * 3)
    tokens = np.asarray(SAMPLE(logits, *whole)[0])
    for i in (0, 3, 7):
        others = [np.flip(x, 0).copy() for x in whole]  # another place, other neighbours
        assert np.asarray(SAMPLE(logits[::-1].copy(), *others)[0])[7 - i] == tokens[i]
        alone = [np.repeat(x[i : i + 1], 2, axis=0) for x in whole]
        assert np.asarray(SAMPLE(np.repeat(logits[i : i + 1], 2, axis=0), *alone)[0])[0] == tokens[i]
    moved = np.asarray(SAMPLE(logits, *whole[:-1], whole[-1] + 1)[0])
    reseeded = np.asarray(SAMPLE(logits, *whole[:-2], whole[-2] + 1, whole[-1])[0])
    assert (moved != tokens).any() and (reseeded != tokens).any()


def test_no_sort_of_the_vocabulary():
    text = SAMPLE.lower(jnp.zeros((4, 5000)), *arrays(4)).as_text()
    assert "stablehlo.sort" not in text and "chlo.top_k" not in text

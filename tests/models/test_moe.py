"""Mixtures of experts against sums over single tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.checkpoint import on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.models.moe import ExpertMlps, MixtureOfExperts
from jpaged.models.variation import Experts
from jpaged.runtime.placement import Placement

D, F, E = 8, 12, 5
SIZES = np.array([3, 0, 4, 1, 0])  # rows of each expert
TOKENS = jnp.arange(8, dtype=jnp.int32)  # of the rows
CONFIG = ModelConfig(
    vocab_size=96, hidden_size=D, intermediate_size=F, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, hidden_act="gelu_pytorch_tanh",
)  # fmt: skip


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 1, shape).astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mixture(dtype: str = "float32", *, top_k: int = 2, normalizes: bool = False) -> MixtureOfExperts:
    make = lambda: MixtureOfExperts(CONFIG, Experts(E, top_k, F, normalizes), dtype, nnx.Rngs(0))
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)
    drawn = lambda leaf: jnp.asarray(rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape), leaf.dtype)
    return nnx.merge(graphdef, jax.tree.map(drawn, state))


def test_rows_are_multiplied_by_the_matrices_of_their_expert():
    """One after another in numpy. The initial weights leave the scale of the inputs as it is."""
    mlps, x_md, rows = mixture().experts, normal(8, D), []
    for x, expert in zip(x_md, np.repeat(np.arange(E), SIZES), strict=True):
        gate, up, down = (np.asarray(weight[expert]) for weight in (mlps.gate_proj, mlps.up_proj, mlps.down_proj))
        rows.append(down @ (gelu(gate @ x) * (up @ x)))
    found = jax.jit(mlps)(x_md, jnp.asarray(SIZES), TOKENS)
    np.testing.assert_allclose(found, np.stack(rows), rtol=1e-5, atol=1e-6)
    wide = ExpertMlps(16, 400, 2, "silu", "float32", nnx.Rngs(0))
    for weight, fan_in in ((wide.gate_proj, 16), (wide.up_proj, 16), (wide.down_proj, 400)):
        assert weight.shape[2] == fan_in and np.std(weight[...]) == pytest.approx(fan_in**-0.5, rel=0.1)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_fused_experts_compute_the_same_and_are_fused_once(num_devices):
    """On two devices the rows of gate and up lie in parts."""
    placement = Placement.on(jax.devices()[:num_devices], CONFIG)
    fused, x_md = mixture(), normal(8, D)
    expected = jax.jit(fused.experts)(x_md, jnp.asarray(SIZES), TOKENS)
    place = placement.of if num_devices > 1 else on_one_device
    fuse(fused, place)
    experts = fused.experts
    fuse(fused, place)
    assert fused.experts is experts and experts.joints["gate_up"].parts == num_devices
    found = jax.jit(experts)(x_md, jnp.asarray(SIZES), TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Multiples(nnx.Module):
    """Expert e returns its inputs times e + 1."""

    def __call__(self, x_md, sizes_e, tokens_m):
        factors = jnp.arange(1, E + 1, dtype=x_md.dtype)
        return x_md * jnp.repeat(factors, sizes_e, total_repeat_length=len(x_md))[:, None]


LIKELIEST = [(1, False, "float32"), (2, False, "bfloat16"), (3, True, "bfloat16"), (E, False, "float32")]
OTHERS = [(1, False, "bfloat16"), (2, False, "float32"), (3, True, "float32"), (E, False, "bfloat16")]


@pytest.mark.parametrize(
    "top_k, normalizes, dtype", [*LIKELIEST, *(pytest.param(*other, marks=pytest.mark.deep) for other in OTHERS)]
)
def test_the_likeliest_experts_of_a_token_are_weighted_by_their_probabilities(top_k, normalizes, dtype):
    """These are of float32 whatever the weights are; only the result is rounded."""
    moe, x_td = mixture(dtype, top_k=top_k, normalizes=normalizes), normal(400, D).astype(dtype)
    moe.experts = Multiples()
    scores = np.float64(x_td) @ np.float64(moe.gate.weight[...]).T
    p_te = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    p_te[p_te < np.sort(p_te, axis=1)[:, -top_k, None]] = 0
    p_te = p_te / p_te.sum(axis=1, keepdims=True) if normalizes else p_te
    found, rounding = jax.jit(moe)(x_td), 2.0**-8 if dtype == "bfloat16" else 1e-5
    assert found.dtype == dtype
    products = np.float64(np.stack([x_td * x_td.dtype.type(e + 1) for e in range(E)]))
    np.testing.assert_allclose(np.float64(found), np.einsum("te,etd->td", p_te, products), rtol=rounding)

"""Logits and greedy tokens against transformers' LlamaForCausalLM in float32, through the whole paged path."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.config import Limits
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from jpaged.models.variation import RopeConfig
from jpaged.runtime.batch import Buckets
from pallas_kernels import rotate
from tests.models.logits_runner import LogitsRunner, generate
from tests.oracle import make_fixtures
from tests.support import checkpoints

FIXTURES = np.load(Path(__file__).parents[1] / "fixtures" / "llama.npz")

CHUNKS = {"prefill": 128, "chunks": 16, "single rows": 1}
USUAL = {("gqa-tied", "chunks"), ("llama3", "chunks")}
WAYS = [
    pytest.param(name, chunk, id=f"{name}-{way}", marks=[] if (name, way) in USUAL else pytest.mark.deep)
    for name in checkpoints.CASES
    for way, chunk in CHUNKS.items()
]
# Cases without the paged path in the usual tier.
WHOLE = [pytest.param(name, marks=pytest.mark.deep if (name, "chunks") in USUAL else []) for name in checkpoints.CASES]


@pytest.fixture(scope="module", params=checkpoints.CASES)
def case(request, tmp_path_factory):
    config = checkpoints.CASES[request.param]
    directory = checkpoints.write(tmp_path_factory.mktemp(request.param), config)
    model = load_safetensors(directory, read_config(directory), Form("float32"), progress=False)
    return model, FIXTURES[f"{request.param}/tokens"].tolist(), FIXTURES[f"{request.param}/logits"]


@pytest.mark.parametrize(("case", "chunk"), WAYS, indirect=["case"])
def test_logits_and_greedy_tokens_equal_transformers(case, chunk):
    model, tokens, expected = case
    limits = Limits(max_model_len=len(tokens), max_num_seqs=1, max_num_batched_tokens=chunk)
    runner = LogitsRunner(model, limits, Buckets(limits))
    found = generate(runner, limits, tokens[: checkpoints.PROMPT], checkpoints.NEW_TOKENS)
    assert found == tokens
    assert 0.5 < expected.std() < 3, "the tolerance is meant for logits of unit scale"
    logits = np.stack([runner.logits[i] for i in range(len(tokens) - 1)])
    np.testing.assert_allclose(logits, expected[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", WHOLE, indirect=True)
def test_logits_without_a_cache_equal_transformers(case):
    """Without the scaling of positions they do not: the fixtures prove it past the original context, too."""
    model, tokens, expected = case
    graphdef, state = nnx.split(model)
    plain = nnx.merge(graphdef, state)
    plain.config = dataclasses.replace(model.config, rope=RopeConfig(theta=model.config.rope.theta))
    t = len(tokens)

    def attend(layer, q_tnh, k_tkh, v_tkh, cos, sin):
        q_tnh, k_tkh = (rotate(x, cos, sin) for x in (q_tnh, k_tkh))
        o = jax.nn.dot_product_attention(q_tnh[None], k_tkh[None], v_tkh[None], is_causal=True)
        return o[0]

    def error(model):
        logits = jax.jit(lambda tokens: model.logits(model(tokens, jnp.arange(t), attend)))(np.asarray(tokens))
        return np.abs(np.asarray(logits) - expected).max()

    assert error(model) < 1e-4
    assert model.config.rope.type == "default" or error(plain) > 1e-2


def test_fixtures_equal_transformers_where_torch_is_importable():
    pytest.importorskip("torch", reason="torch is not installed: the committed fixtures stand in for it")
    for name, config in checkpoints.CASES.items():
        result = make_fixtures.run(
            config, checkpoints.tensors(config), checkpoints.prompt(config), checkpoints.NEW_TOKENS
        )
        assert result["tokens"].tolist() == FIXTURES[f"{name}/tokens"].tolist()
        np.testing.assert_allclose(result["logits"], FIXTURES[f"{name}/logits"], atol=1e-5)

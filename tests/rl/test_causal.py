"""The trainer's forward pass: the engine's logprobs to the bit, with derivatives, in any program."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import InvalidParameter
from jpaged.core.commands import UpdateParams
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from jpaged.rl.causal import logits, token_logprobs
from pallas_kernels import ROW_ORDER
from tests.exact.cases import hf_of
from tests.models.test_architectures import write
from tests.rl.conftest import PARAMS, rolled_out
from tests.runtime.test_runner import LLAMA
from tests.support.random_model import random_model

# Windows, caps, other norms, experts and learned positions; dtypes of the model and of the pool; kernels.
CASES = [
    ("llama", "float32", {}, None),
    ("gemma2", "float32", {}, None),
    ("gemma3", "float32", {}, None),
    ("qwen3-moe", "float32", {}, None),
    ("mixtral", "float32", {}, None),
    ("opt", "float32", {}, None),
    ("gpt-oss", "float32", {}, None),
    ("qwen3-window", "float32", {"block_size": 64}, None),
    ("llama", "bfloat16", {}, None),
    ("gemma3", "bfloat16", {}, None),
    ("qwen3.5", "float32", {}, None),
    ("qwen3-moe", "bfloat16", {}, None),
    ("llama", "float32", {"kv_cache_dtype": "fp8"}, None),
    ("llama", "float32", {"kv_cache_dtype": "bfloat16"}, None),
    ("llama", "bfloat16", {"activation_dtype": "int8"}, None),
    ("llama", "float32", {"kernels": "reference"}, ROW_ORDER),
    ("qwen3-moe", "float32", {"kernels": "reference"}, ROW_ORDER),
]


def model_of(name, dtype, directory, quantization=None):
    write(directory, hf_of(name))
    form = Form(dtype, quantization=quantization)
    return load_safetensors(directory, read_config(directory).for_length(96), form, progress=False)


def loss_of(graphdef, numerics, params, tokens_bw, is_output_bw, drawn_bw):
    """A loss with the logprobs among others, as a trainer has."""
    logprobs_bw = token_logprobs(nnx.merge(graphdef, params), tokens_bw, is_output_bw, numerics)
    ratio_bw = jnp.exp(jnp.where(is_output_bw, logprobs_bw - drawn_bw, 0))
    return jnp.sum(ratio_bw * is_output_bw) / jnp.sum(is_output_bw), logprobs_bw


def num_differing(logprobs, rollouts) -> int:
    at = rollouts.is_output
    return int((np.asarray(logprobs)[at].view(np.uint32) != rollouts.logprobs[at].view(np.uint32)).sum())


LATER = [pytest.param(name, marks=pytest.mark.deep) for name in ("eager", "nnx.jit", "scan", "checkpoint")]


@pytest.mark.parametrize("program", ["jit", *LATER])
def test_a_trainer_computes_the_engines_logprobs_to_the_bit(llama, program):
    model, worker, rollouts = llama
    graphdef, params = nnx.split(model)
    tokens, is_output = jnp.asarray(rollouts.tokens), jnp.asarray(rollouts.is_output)
    loss = partial(loss_of, graphdef, worker.numerics)
    if program == "eager":
        found = jax.value_and_grad(loss, has_aux=True)(params, tokens, is_output, rollouts.logprobs)[0][1]
    elif program == "nnx.jit":
        found = nnx.jit(lambda model: token_logprobs(model, tokens, is_output, worker.numerics))(model)
    elif program == "scan":  # over parts of the batch
        parts = [x.reshape(4, -1, x.shape[1]) for x in (tokens, is_output, jnp.asarray(rollouts.logprobs))]
        found = jax.jit(lambda params: jax.lax.map(lambda part: jax.grad(loss, has_aux=True)(params, *part)[1], parts))(
            params
        ).reshape(tokens.shape)
    else:
        step = jax.grad(jax.checkpoint(loss) if program == "checkpoint" else loss, has_aux=True)
        found = jax.jit(step)(params, tokens, is_output, rollouts.logprobs)[1]
    assert num_differing(found, rollouts) == 0
    assert np.array_equal(rollouts.exact_versions, rollouts.versions)


@pytest.mark.deep
@pytest.mark.parametrize("name, dtype, settings, options", CASES)
def test_a_train_step_of_any_architecture_has_the_engines_bits(tmp_path, name, dtype, settings, options):
    model = model_of(name, dtype, tmp_path, "int4" if "activation_dtype" in settings else None)
    worker, rollouts = rolled_out(model, **settings)
    graphdef, params = nnx.split(model)
    step = jax.grad(partial(loss_of, graphdef, worker.numerics), has_aux=True, allow_int=True)
    arrays = rollouts.tokens, rollouts.is_output, rollouts.logprobs
    assert num_differing(jax.jit(step, compiler_options=options)(params, *arrays)[1], rollouts) == 0


def test_without_outputs_the_bits_are_those_of_scores(llama):
    model, worker, rollouts = llama
    logprobs = token_logprobs(model, jnp.asarray(rollouts.tokens), numerics=worker.numerics)
    assert np.array_equal(np.where(rollouts.is_output, logprobs, 0), worker.score(rollouts))


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_rollouts_say_in_which_versions_they_are_exact(llama, in_flight, monkeypatch):
    """Parameters are exchanged while outputs of all prompts grow."""
    model, worker, _ = llama
    engine, steps, step = worker.llm.engine, [], worker.llm.engine.step
    old, new = nnx.state(model), jax.tree.map(lambda x: 1.1 * x, nnx.state(model))

    def with_update():
        steps.append(step())
        if len(steps) == 12:
            engine.control(UpdateParams(new, in_flight))
        return steps[-1]

    before = worker.version
    monkeypatch.setattr(engine, "step", with_update)
    rollouts = worker.generate([[3, 4, 5], [*range(9, 50)]], PARAMS)
    monkeypatch.undo()
    worker.update(old)
    exact, at = rollouts.exact_versions, rollouts.is_output
    assert set(exact[~at]) == {-1} and set(rollouts.versions[at]) == {before, before + 1}
    tokens, is_output = jnp.asarray(rollouts.tokens), jnp.asarray(at)
    equal = {}
    for version, state in ((before, old), (before + 1, new)):
        logprobs = token_logprobs(nnx.merge(nnx.graphdef(model), state), tokens, is_output, worker.numerics)
        equal[version] = np.asarray(logprobs) == rollouts.logprobs
        assert equal[version][exact == version].all()
    if in_flight == "recompute":
        assert np.array_equal(exact, rollouts.versions), "computed tokens are computed again"
    else:
        assert before in exact and before + 1 not in exact
        mixed = at & (rollouts.versions == before + 1)
        assert not (equal[before] | equal[before + 1])[mixed].all(), "nobody can say what they equal"


def test_an_engine_that_is_not_exact_promises_nothing(llama, monkeypatch):
    _, worker, _ = llama
    limits = worker.llm.engine.limits
    monkeypatch.setattr(worker.llm.engine, "limits", dataclasses.replace(limits, exact=False))
    assert set(worker.generate([3, 4, 5], PARAMS).exact_versions.flat) == {-1}


def test_other_orders_are_noticed(llama):
    """The order of prompts and another block size give other bits: the comparison can fail."""
    model, worker, rollouts = llama
    tokens = jnp.asarray(rollouts.tokens)
    assert num_differing(token_logprobs(model, tokens, None, worker.numerics), rollouts) > 0
    others = dict(worker.numerics) | {"block_size": 4}
    assert num_differing(token_logprobs(model, tokens, jnp.asarray(rollouts.is_output), others), rollouts) > 0


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), pytest.param("bfloat16", 2e-2, marks=pytest.mark.deep)]
)
def test_gradients_are_those_of_dense_attention(dtype, tolerance):
    graphdef, params = nnx.split(random_model(dataclasses.replace(LLAMA, num_hidden_layers=1), dtype, 0))
    tokens = jnp.asarray([[3, 4, 5, 6, 7], [40, 41, 42, 43, 44]])

    def dense(model, tokens):
        positions, mask = jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.broadcast_to(jnp.tri(5, dtype=bool), (2, 5, 5))
        logprobs = jax.nn.log_softmax(logits(model, tokens, positions, mask)[:, :-1])
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)

    def gradients(function):
        return jax.jit(jax.grad(lambda params: function(nnx.merge(graphdef, params), tokens).sum()))(params)

    for found, expected in zip(*(jax.tree.leaves(gradients(function)) for function in (token_logprobs, dense))):
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), atol=tolerance * largest)


WIDTH = -(-LLAMA.vocab_size // 8)


@pytest.mark.parametrize(
    "name, shape, allowed", [("is_output_bw", (2, 3), "[2, 4]"), ("kept_tokens", (2, 4, 0), f"[2, 4, {WIDTH}]")]
)
def test_shapes_that_differ_are_refused(llama, name, shape, allowed):
    told = re.escape(f"{name}: must have the shape {allowed}, not {list(shape)}")
    with pytest.raises(InvalidParameter, match=f"^{told}$"):
        token_logprobs(llama[0], jnp.zeros((2, 4), jnp.int32), **{name: jnp.zeros(shape, jnp.uint8)})

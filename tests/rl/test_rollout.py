"""Rollouts for trainers: arrays, scores, the trainer's own forward pass, and GRPO."""

import dataclasses
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import transfer
from tokenizers import processors

from jpaged import LLM, InvalidParameter, SamplingParams
from jpaged.rl import (
    Rollouts,
    RolloutWorker,
    group_advantages,
    mask_stale,
    sequence_weights,
    staleness,
    token_weights,
)
from jpaged.rl.causal import logits, token_logprobs
from tests.engine.test_update_params import device_bytes
from tests.runtime.test_runner import LIMITS, LLAMA, Compilations
from tests.support.few_shapes import few_shapes
from tests.support.models import EOS, byte_tokenizer
from tests.support.random_model import random_model

ROOT = Path(__file__).parents[2]
# The limits of `conftest.SETTINGS`, so that the run compiles a step once.
SETTINGS = {"block_size": 8, "num_gpu_blocks_override": 160, "progress": False, "warm_up": True} | LIMITS
PROMPTS = [[3, 4, 5, 6, 7], [*range(40, 70)], [9]]
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=20, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA, "float32", 0)


@pytest.fixture(scope="module")
def worker(model):
    with few_shapes():
        return RolloutWorker(LLM(model, **SETTINGS), width=64, pad_id=1)


def test_rollouts_are_the_outputs_as_arrays(worker):
    found = worker.generate(PROMPTS, PARAMS)
    each = [dataclasses.replace(PARAMS, seed=4 + 2 * i, logprobs=0) for i in range(3)]
    outputs = worker.llm.generate(PROMPTS, each, use_tqdm=False)
    assert found.tokens.shape == found.logprobs.shape == (6, 64) and found.prompts.tolist() == [0, 0, 1, 1, 2, 2]
    pairs = [(output, one) for output in outputs for one in output.outputs]
    for row, (output, one) in enumerate(pairs):
        start, end = len(output.prompt_token_ids), found.lengths[row]
        assert found.tokens[row].tolist() == [*output.prompt_token_ids, *one.token_ids, *[1] * (64 - end)]
        assert found.is_output[row].tolist() == [start <= i < end for i in range(64)]
        logprobs = [logprob[token].logprob for token, logprob in zip(one.token_ids, one.logprobs)]
        assert found.logprobs[row, start:end].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert not found.logprobs[row][~found.is_output[row]].any()
    assert set(found.versions[found.is_output]) == {worker.llm.engine.runner.params_version}
    assert set(found.versions[~found.is_output]) == {-1}
    assert found.finish_reasons == ["length"] * 6 and len({tuple(row) for row in found.tokens}) == 6


@pytest.mark.parametrize(
    "max_tokens, most, prompt", [(20, 50, "30 tokens of prompt 1"), (None, 128, "5 tokens of prompt 0")]
)
def test_a_width_that_an_output_may_exceed_is_refused_before_anything_is_generated(
    worker, monkeypatch, max_tokens, most, prompt
):
    monkeypatch.setattr(worker.llm, "generate", pytest.fail)
    told = rf"^width: must be at least {most}, for the {prompt} and max_tokens \({max_tokens}\), not 40$"
    with pytest.raises(InvalidParameter, match=told):
        RolloutWorker(worker.llm, width=40).generate(PROMPTS, dataclasses.replace(PARAMS, max_tokens=max_tokens))


@pytest.fixture
def cached_tokens(worker, monkeypatch):
    """The tokens that the latest call found in the prefix cache, of each prompt."""
    found, generate = [], worker.llm.generate

    def recorded(*args, **options):
        outputs = generate(*args, **options)
        found[:] = [output.num_cached_tokens for output in outputs]
        return outputs

    monkeypatch.setattr(worker.llm, "generate", recorded)
    return found


TURN = dataclasses.replace(PARAMS, n=1, max_tokens=6)
OBSERVATIONS = [[11, 12, 13], [], None, [14], None, np.array([15, 16])]


def test_a_further_turn_is_an_observation_and_an_output_behind_the_tokens_so_far(worker, model, cached_tokens):
    worker.llm.reset_prefix_cache()
    first = worker.generate(PROMPTS, PARAMS)
    found = worker.extend(first, OBSERVATIONS, TURN)
    assert cached_tokens == [24, 24, 48, 20], "all of 24, 24 and 20 tokens with KV; of 49, one is alone in its block"
    assert found.prompts.tolist() == [0, 0, 1, 1, 2, 2] and found.finish_reasons == ["length"] * 6
    extended = [row for row, observation in enumerate(OBSERVATIONS) if observation is not None]
    starts = [int(first.lengths[row]) + len(OBSERVATIONS[row]) for row in extended]
    for row in range(6):
        before = int(first.lengths[row])
        start = starts[extended.index(row)] if row in extended else before
        end = start + 6 * (row in extended)
        assert found.lengths[row] == end and found.tokens[row, :before].tolist() == first.tokens[row, :before].tolist()
        assert found.tokens[row, before:start].tolist() == list(OBSERVATIONS[row] if row in extended else [])
        is_output = [first.is_output[row, i] if i < before else start <= i < end for i in range(64)]
        assert found.is_output[row].tolist() == is_output
        assert found.tokens[row, end:].tolist() == [1] * (64 - end)
    wholes = [found.tokens[row, :start].tolist() for row, start in zip(extended, starts)]
    each = [dataclasses.replace(TURN, seed=4 + row) for row in extended]
    for row, start, output in zip(extended, starts, worker.llm.generate(wholes, each, use_tqdm=False)):
        assert found.tokens[row, start : start + 6].tolist() == output.outputs[0].token_ids
    assert not found.logprobs[~found.is_output].any() and set(found.versions[~found.is_output]) == {-1}
    assert set(found.versions[found.is_output]) == {worker.version}
    trainer = np.asarray(token_logprobs(model, jnp.asarray(found.tokens)))
    for logprobs in (worker.score(found), np.where(found.is_output, trainer, 0)):
        np.testing.assert_allclose(logprobs, found.logprobs, atol=1e-5)
    again = worker.extend(found, [[17]] + [None] * 5, TURN)
    assert again.lengths.tolist() == [41, *found.lengths[1:]] and cached_tokens == [32]
    assert worker.extend(again, [None] * 6, TURN).lengths.tolist() == again.lengths.tolist()


def test_each_turn_keeps_the_versions_that_drew_it_and_stale_rows_are_masked(worker, model, cached_tokens):
    first, before = worker.generate(PROMPTS, PARAMS), worker.version
    worker.update(jax.tree.map(lambda x: 1.1 * x, nnx.state(model)))
    found = worker.extend(first, OBSERVATIONS, TURN)
    assert cached_tokens == [0] * 4, "the KV of old parameters is not found"
    worker.update(model)
    new = found.is_output & ~first.is_output
    assert set(found.versions[first.is_output]) == {before} and set(found.versions[new]) == {before + 1}
    fresh = worker.generate([9], dataclasses.replace(PARAMS, n=1))
    both = Rollouts(*(np.concatenate([a, b]) if isinstance(a, np.ndarray) else a + b for a, b in zip(found, fresh)))
    assert staleness(both, worker.version).tolist() == [2] * 6 + [0]
    assert staleness(found._replace(is_output=new), worker.version).tolist() == [1, 1, 0, 1, 0, 1]
    kept = mask_stale(both, worker.version, max_staleness=1).is_output
    assert not kept[:6].any() and kept[6].tolist() == fresh.is_output[0].tolist()
    assert mask_stale(both, worker.version, max_staleness=2).is_output.tolist() == both.is_output.tolist()


def test_an_observation_as_text_has_no_special_tokens(worker, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", EOS)])
    monkeypatch.setattr(worker.llm, "tokenizer", tokenizer)
    first = worker.generate(["a", "b"], TURN)
    found = worker.extend(first, ["cd", ""], TURN)
    assert first.tokens[:, 0].tolist() == [EOS, EOS]
    assert found.tokens[0, 8:10].tolist() == tokenizer.encode("cd", add_special_tokens=False).ids
    assert found.lengths.tolist() == [16, 14]


@pytest.mark.parametrize(
    "observations, changes, told",
    [
        ([[1]] * 5, {}, r"observations: must be as many as rollouts \(6\), not 5"),
        ([[1]] * 6, {"n": 2}, "n: must be 1 in a further turn, not 2"),
        ([[1]] * 6, {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens: must be None in a further turn, not 4"),
        ([*[None] * 3, [1] * 9, None, None], {}, "width: must be at least 65, for the 59 tokens of prompt 3.*, not 64"),
        ([[1], "text", *[None] * 4], {}, "prompts: this engine has no tokenizer, so prompts must be token ids"),
    ],
)  # fmt: skip
def test_a_turn_that_does_not_fit_is_refused_before_anything_is_generated(
    worker, monkeypatch, observations, changes, told
):
    first = worker.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(worker.llm, "generate", pytest.fail)
    with pytest.raises(InvalidParameter, match=f"^{told}$"):
        worker.extend(first, observations, dataclasses.replace(TURN, **changes))


def test_scores_and_the_trainers_logprobs_are_those_of_the_engine(worker, model):
    found = worker.generate(PROMPTS, PARAMS)
    trainer = np.asarray(token_logprobs(model, jnp.asarray(found.tokens)))
    for logprobs in (worker.score(found), np.where(found.is_output, trainer, 0)):
        np.testing.assert_allclose(logprobs, found.logprobs, atol=1e-5)


def test_an_output_without_tokens_has_no_score(worker):
    """As one of a request that was aborted before its first token."""
    found = worker.generate(PROMPTS, PARAMS)
    found.is_output[2], found.lengths[2] = False, 30
    scores = worker.score(found)
    assert not scores[2].any() and scores[3].any()


def test_scores_need_one_completion_for_each_prompt(worker):
    assert worker.llm.score([[3, 4]], [[5, 6, 7]])[0] == pytest.approx(worker.llm.score([3, 4], [5, 6, 7])[0])
    with pytest.raises(InvalidParameter, match=r"^completions: must be as many as prompts \(2\), not 1$"):
        worker.llm.score([[3], [4]], [[5]])


def test_an_update_changes_the_version_and_the_scores(worker, model):
    before, found = worker.llm.engine.runner.params_version, worker.generate(PROMPTS, PARAMS)
    worker.update(jax.tree.map(lambda x: 1.1 * x, nnx.state(model)))
    assert np.abs(worker.score(found) - found.logprobs).max() > 1e-2
    assert set(worker.generate(PROMPTS, PARAMS).versions[found.is_output]) == {before + 1}
    worker.update(model)


def test_an_update_copies_no_byte_and_compiles_nothing(worker, model):
    state = jax.block_until_ready(jax.tree.map(lambda x: 1.1 * x, nnx.state(model)))
    before = device_bytes()
    with Compilations() as compilations:
        worker.update(state)
        worker.generate(PROMPTS, PARAMS)
    assert compilations.count == 0 and device_bytes() == before
    pointers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)]
    assert [array.unsafe_buffer_pointer() for array in worker.llm.engine.runner.params] == pointers
    worker.update(model)


TRAINER = """
import jax
from flax import nnx
from jax.experimental import transfer
from tests.support.random_model import random_model
from tests.runtime.test_runner import LLAMA

server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
server.await_pull(1, nnx.to_pure_dict(nnx.state(random_model(LLAMA, "float32", 1))))
print(server.address(), flush=True)
input()
"""


@pytest.fixture
def trainer_address():
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        yield trainer.stdout.readline().strip()
        trainer.communicate("\n")


def test_parameters_of_another_process_are_pulled_and_served(worker, model, trainer_address):
    """As in docs/rollouts.md."""
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nnx.to_pure_dict(nnx.state(model))
    )
    server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    worker.update(server.connect(trainer_address).pull(1, specs))
    expected = jax.tree.leaves(nnx.state(random_model(LLAMA, "float32", 1)))
    for found, leaf in zip(worker.llm.engine.runner.params, expected, strict=True):
        np.testing.assert_array_equal(found, leaf)
    worker.update(model)


FILTERS = [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.05}]


def test_processed_logprobs_are_those_that_tokens_are_drawn_with(model):
    """A trainer has their bits with the sets of tokens that filters keep."""
    with few_shapes():
        worker = RolloutWorker(LLM(model, logprobs_mode="processed_logprobs", **SETTINGS), width=64)
    for filters in FILTERS:
        found = worker.generate(PROMPTS, dataclasses.replace(PARAMS, kept_tokens=True, **filters))
        assert np.abs(worker.score(found) - found.logprobs).max() > 0.01, "scores are the model's own logprobs"
        arrays, temperature = (found.tokens, found.is_output, worker.numerics), filters["temperature"]
        trainer = token_logprobs(model, *arrays, temperature=temperature, kept_tokens=found.kept_tokens)
        assert np.array_equal(found.logprobs, np.where(found.is_output, trainer, 0))
        if len(filters) > 1:
            cooled = token_logprobs(model, *arrays, temperature=temperature)
            assert np.abs(np.where(found.is_output, cooled, 0) - found.logprobs).max() > 0.1, "a biased ratio"
        else:
            assert (found.kept_tokens[~found.is_output] == 255).all()


def test_the_gradient_of_a_truncated_distribution_is_that_of_its_definition():
    graphdef, params = nnx.split(random_model(dataclasses.replace(LLAMA, num_hidden_layers=1), "float32", 0))
    tokens = jnp.asarray([[3, 4, 5, 6, 7]])
    kept = np.zeros((1, 5, LLAMA.vocab_size), np.uint8)
    kept[..., [2, 4, 5, 6, 7, 90]] = 1
    bits = np.packbits(kept, axis=2, bitorder="little")

    def found(params):
        return token_logprobs(nnx.merge(graphdef, params), tokens, temperature=1.5, kept_tokens=bits).sum()

    def defined(params):
        positions, mask = jnp.arange(5)[None], jnp.tri(5, dtype=bool)[None]
        logits_wv = logits(nnx.merge(graphdef, params), tokens, positions, mask)[0, :-1] / 1.5
        return jax.nn.log_softmax(jnp.where(kept[0, 1:] == 1, logits_wv, -jnp.inf))[jnp.arange(4), tokens[0, 1:]].sum()

    (value, gradients), (right, expected) = (jax.jit(jax.value_and_grad(each))(params) for each in (found, defined))
    assert value == pytest.approx(float(right), abs=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected)):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()) + 1e-9)


def test_a_further_turn_adds_the_sets_of_its_tokens(worker):
    first = worker.generate(PROMPTS, PARAMS)
    assert first.kept_tokens.shape == (6, 64, 0)
    found = worker.extend(first, OBSERVATIONS, dataclasses.replace(TURN, top_k=2, kept_tokens=True))
    counts = np.unpackbits(found.kept_tokens, axis=2).sum(2)
    new = found.is_output & ~first.is_output
    assert set(counts[new]) == {2} and (found.kept_tokens[~new] == 255).all()


def test_advantages_compare_the_outputs_of_a_prompt():
    advantages = group_advantages(np.array([0, 1, 0, 1, 1, 1, 1, 1]), 4)
    assert advantages.tolist() == pytest.approx([-1, 1, -1, 1, 0, 0, 0, 0], abs=1e-3)


@pytest.mark.parametrize("rewards, size, shape", [(np.zeros(30), 8, [30]), (np.zeros((4, 2)), 2, [4, 2])])
def test_rewards_that_are_no_groups_are_refused(rewards, size, shape):
    told = rf"^rewards: must have the shape \[B\], B a multiple of size \({size}\), not {re.escape(str(shape))}$"
    with pytest.raises(InvalidParameter, match=told):
        group_advantages(rewards, size)


MASK = jnp.array([[False, True, True, False], [True, True, True, False], [False, False, False, False]])
RATIOS = np.array([[7, 0.5, 3, 7], [2, 3, 0.25, 7], [7, 7, 7, 7]], np.float32)


def test_importance_weights_are_truncated_ratios_without_gradients():
    drawn = jnp.full((3, 4), -2.0)
    args = drawn + np.log(RATIOS), drawn, MASK
    np.testing.assert_allclose(
        jax.jit(partial(token_weights, token_cap=2.0))(*args),
        [[0, 0.5, 2, 0], [2, 2, 0.25, 0], [0, 0, 0, 0]], rtol=1e-5,
    )  # fmt: skip
    np.testing.assert_allclose(sequence_weights(*args, sequence_cap=1.4), [1.4, 1.4, 1], rtol=1e-5)
    np.testing.assert_allclose(sequence_weights(*args, sequence_cap=9.0), [1.5, 1.5, 1], rtol=1e-5)
    for weights in (partial(token_weights, token_cap=2.0), partial(sequence_weights, sequence_cap=2.0)):
        assert not jax.grad(lambda x, weights=weights: (weights(x, drawn, MASK) * x[:, :1]).sum())(args[0])[0, 1:].any()
        assert weights(drawn + 400, drawn, MASK).max() == pytest.approx(2), "a ratio that float32 can't hold"


@pytest.mark.parametrize("weights, name", [(token_weights, "token_cap"), (sequence_weights, "sequence_cap")])
def test_a_cap_that_is_not_positive_is_refused(weights, name):
    with pytest.raises(InvalidParameter, match=rf"^{name}: must be positive, not 0$"):
        weights(jnp.zeros((3, 4)), jnp.zeros((3, 4)), MASK, **{name: 0})


def test_certified_rollouts_can_be_replayed_from_their_arrays(worker, monkeypatch):
    worker.llm.reset_prefix_cache()  # generated tokens in it would round as decode tokens
    monkeypatch.setattr(worker.llm.engine.scheduler.pool, "enable_prefix_caching", False)
    params = dataclasses.replace(PARAMS, certificate=True)
    found = worker.generate(PROMPTS, params)
    assert {str(result) for result in worker.replay(found)} == {"equal"}
    turned = worker.extend(found, OBSERVATIONS, dataclasses.replace(TURN, certificate=True))
    assert [str(result) for result in worker.replay(turned)] == ["equal"] * 6, "rows without a turn are as before"
    row, position = 3, int(turned.lengths[3]) - 2
    turned.logprobs[row, position] = np.nextafter(turned.logprobs[row, position], np.float32(-9))
    results = worker.replay(turned)
    assert [result.equal for result in results] == [True] * 3 + [False] + [True] * 2
    assert (results[3].request_id, results[3].field, results[3].position) == ("3", "logprob", 4)
    turned.tokens[row, 0] += 1
    assert worker.replay(turned)[3].field == "prompt_token_ids"
    without = worker.replay(worker.generate(PROMPTS, PARAMS))
    assert {(result.field, result.replayed) for result in without} == {("certificate", False)}

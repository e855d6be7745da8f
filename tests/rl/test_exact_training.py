"""GRPO whose trainer has the engine's bits, and whose rollouts are replayed before each update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, SamplingParams, load
from jpaged.rl import RolloutWorker, group_advantages
from jpaged.rl.causal import token_logprobs
from tests.rl.conftest import SETTINGS
from tests.runtime.test_runner import Compilations
from tests.support.few_shapes import few_shapes

GROUP = 4


def train_step(graphdef, numerics, rate):
    """Return a step of GRPO by gradient descent, compiled, that donates the parameters; also the trainer's logprobs."""

    @partial(jax.jit, donate_argnums=0)
    def train(params, tokens_bw, is_output_bw, drawn_bw, advantage_b):
        def loss(params):
            logprobs_bw = token_logprobs(nnx.merge(graphdef, params), tokens_bw, is_output_bw, numerics)
            ratio_bw = jnp.exp(jnp.where(is_output_bw, logprobs_bw - drawn_bw, 0))
            return -jnp.sum(ratio_bw * advantage_b[:, None] * is_output_bw) / jnp.sum(is_output_bw), logprobs_bw

        gradients, logprobs_bw = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda x, g: x - rate * g, params, gradients), logprobs_bw

    return train


def train(worker, model, prompts, steps, rate):
    """Train on the share of even tokens. Return the last rollouts, their parameters and the rewards.

    Every step compares the trainer's logprobs with the engine's, bit by bit, and replays all rollouts.
    """
    graphdef, params = nnx.split(model)
    step, rewards = train_step(graphdef, worker.numerics, rate), []
    for number in range(steps):
        if number == 1:
            compilations = Compilations().__enter__()
        if number:
            worker.update(params)
        sampling = SamplingParams(n=GROUP, max_tokens=16, seed=1000 * number, certificate=True)
        rollouts = worker.generate(prompts, sampling)
        assert {str(result) for result in worker.replay(rollouts)} == {"equal"}
        at = rollouts.is_output
        reward = ((rollouts.tokens % 2 == 0) & at).sum(1) / at.sum(1)
        copy = jax.tree.map(jnp.copy, params)  # the step donates its own
        batch = rollouts.tokens, at, rollouts.logprobs, group_advantages(reward, GROUP)
        new, logprobs = step(copy, *batch)
        assert np.array_equal(np.asarray(logprobs)[at].view(np.uint32), rollouts.logprobs[at].view(np.uint32))
        assert np.array_equal(rollouts.exact_versions, rollouts.versions)
        params = new if number < steps - 1 else params
        rewards.append(float(reward.mean()))
    compilations.__exit__()
    assert compilations.count == 0
    return rollouts, params, rewards


def check_flips(worker, rollouts, params) -> None:
    """A flipped bit of a token, a logprob or a parameter of the last rollouts is named."""
    row, at = 5, int(np.flatnonzero(rollouts.is_output[5])[3])
    for name, position in (("tokens", 3), ("logprobs", 3)):
        array = getattr(rollouts, name).copy()
        array.view(np.uint32)[row, at] ^= 1
        results = worker.replay(rollouts._replace(**{name: array}))
        assert [i for i, result in enumerate(results) if not result.equal] == [row]
        assert (results[row].field, results[row].position) == (name.removesuffix("s"), position)
    leaves, tree = jax.tree.flatten(params)
    flipped = np.array(leaves[2])
    flipped.view(np.uint32).flat[7] ^= 1
    worker.update(jax.tree.unflatten(tree, [*leaves[:2], jnp.asarray(flipped), *leaves[3:]]))
    results = worker.replay(rollouts)
    assert {(result.field, result.replayed) for result in results} == {("parameters", False)}
    worker.update(params)
    assert {str(result) for result in worker.replay(rollouts)} == {"equal"}


def test_grpo_has_the_engines_bits_and_every_rollout_is_replayed(llama):
    model, worker, _ = llama
    rollouts, params, _ = train(worker, model, [[3, 4, 5], [*range(40, 60)]], 3, 0.5)
    check_flips(worker, rollouts, params)
    worker.update(model)


@pytest.mark.deep
def test_forty_steps_of_grpo_have_the_engines_bits():
    prompts = ["Once upon a time, there was", "One day,", "Lily had a", "In the garden there was"]
    model = load("demo", dtype="float32", progress=False)
    with few_shapes():
        worker = RolloutWorker(LLM(model, tokenizer="demo", max_model_len=96, **SETTINGS), width=48)
    rollouts, params, rewards = train(worker, model, prompts, 40, 0.3)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.05, rewards
    check_flips(worker, rollouts, params)

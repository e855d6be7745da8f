"""Train the demo model with GRPO to write about girls: an engine and an optimizer on the same arrays.

    python examples/grpo.py [STEPS [PLOT]]      40 steps: under two minutes on two cores; PLOT: a file such as grpo.png

A step generates eight stories for each prompt, gives a reward for the word girl, and trains on the logprobs that the
engine drew the tokens with (Shao et al., 2024, arXiv:2402.03300). On a CPU the trainer computes the same logprobs to
the bit: the mismatch is 0. The train step donates the parameters, and `worker.update` hands the new ones to the engine
without a copy.
"""

import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jpaged import LLM, SamplingParams, load
from jpaged.rl import RolloutWorker, group_advantages
from jpaged.rl.causal import token_logprobs

PROMPTS = ["Once upon a time, there was", "One day,", "Lily had a", "In the garden there was"]
GROUP, MAX_TOKENS, WIDTH = 8, 24, 48
CLIP = 0.2  # of the ratio of probabilities
Step = tuple[float, float, float, float, float]  # reward, mismatch, seconds of rollout, training and update


def reward(text: str) -> float:
    return float("girl" in text)


def main(steps: str = "40", plot: str = "") -> list[Step]:
    model = load("demo", dtype="float32", progress=False)
    llm = LLM(model, tokenizer="demo", progress=False, max_num_seqs=32, max_model_len=128, num_gpu_blocks_override=256,
              swap_space=0, exact=True)  # fmt: skip
    worker = RolloutWorker(llm, width=WIDTH)
    graphdef, params = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-4))
    moments = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(params, moments, tokens_bw, is_output_bw, drawn_bw, advantage_b):
        def loss(params):
            logprobs_bw = token_logprobs(nnx.merge(graphdef, params), tokens_bw, is_output_bw, worker.numerics)
            difference_bw = jnp.where(is_output_bw, logprobs_bw - drawn_bw, 0)
            ratio_bw, advantage_b1 = jnp.exp(difference_bw), advantage_b[:, None]
            gain_bw = jnp.minimum(ratio_bw * advantage_b1, jnp.clip(ratio_bw, 1 - CLIP, 1 + CLIP) * advantage_b1)
            return -jnp.sum(gain_bw * is_output_bw) / jnp.sum(is_output_bw), jnp.abs(difference_bw).max()

        gradients, mismatch = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, mismatch

    history: list[Step] = []
    for step in range(int(steps)):
        times = [time.perf_counter()]
        sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=MAX_TOKENS, seed=1000 * step)
        rollouts = worker.generate(PROMPTS, sampling)
        rewards = np.array([reward(text) for text in rollouts.texts])
        times.append(time.perf_counter())
        advantages = group_advantages(rewards, GROUP)
        params, moments, mismatch = jax.block_until_ready(
            train(params, moments, rollouts.tokens, rollouts.is_output, rollouts.logprobs, advantages)
        )
        times.append(time.perf_counter())
        worker.update(params)
        times.append(time.perf_counter())
        history.append((float(rewards.mean()), float(mismatch), *np.diff(times).tolist()))
        print(f"step {step:2}: reward {rewards.mean():.2f}, mismatch {mismatch:.1e}: {rollouts.texts[0][:50]!r}")
    rollout, training, update = 1e3 * np.median([row[2:] for row in history], axis=0)
    print(f"median of a step: rollout {rollout:.0f} ms, training {training:.0f} ms, update {update:.1f} ms")
    if plot:
        draw(history, Path(plot))
    return history


def draw(history: list[Step], path: Path) -> None:
    """Plot the reward, the mismatch of the logprobs, and the times of the steps."""
    from matplotlib.figure import Figure

    rewards, mismatches, *times = zip(*history)
    figure = Figure(figsize=(7, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    top.plot(rewards)
    top.set(ylabel="reward", ylim=(0, 1.02))
    middle.plot(mismatches)
    middle.set(ylabel="largest difference of\nlogprobs, engine and trainer")
    for name, seconds in zip(("rollout", "training", "update"), times):
        bottom.semilogy([1e3 * each for each in seconds], label=name)
    bottom.set(ylabel="ms", xlabel="step")
    bottom.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

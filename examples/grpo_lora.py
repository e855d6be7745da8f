"""Train a low-rank adapter of the demo model with GRPO, on a base that is frozen and may be quantized.

    python examples/grpo_lora.py [STEPS [BASE]]      40 steps: two minutes on two cores; BASE: float32, bfloat16 or int8

The engine serves the base once, and the adapter from a slot. The train step changes only the adapter's float32
matrices, and `worker.update` hands them to the engine. Reward and loss are those of `grpo.py`.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpaged import LLM, SamplingParams, load
from jpaged.rl import RolloutWorker, group_advantages
from jpaged.rl.causal import token_logprobs

PROMPTS = ["Once upon a time, there was", "One day,", "Lily had a", "In the garden there was"]
GROUP, MAX_TOKENS, WIDTH = 8, 24, 48
CLIP = 0.2  # of the ratio of probabilities
RANK, SCALE = 8, 2.0
LAYERS = {"self_attn": ("q_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def new_adapter(shapes, seed=0):
    """An adapter that changes nothing yet, of layers with these outputs and inputs."""
    keys, tree = iter(jax.random.split(jax.random.key(seed), len(shapes))), {}
    for name, (outputs, inputs) in shapes.items():
        *parents, layer = name.split(".")
        node = tree
        for each in (*parents, layer):
            node = node.setdefault(each, {})
        node["lora_a"] = jax.random.normal(next(keys), (inputs, RANK)) / inputs**0.5
        node["lora_b"] = jnp.zeros((RANK, outputs))
    return tree


def main(steps: str = "40", base: str = "float32") -> list[tuple[float, float]]:
    quantized = {"dtype": "float32", "quantization": base} if base == "int8" else {"dtype": base}
    model = load("demo", progress=False, **quantized)
    llm = LLM(model, tokenizer="demo", progress=False, max_num_seqs=32, max_model_len=128, num_gpu_blocks_override=256,
              swap_space=0, exact=True, enable_lora=True, max_loras=1, max_lora_rank=RANK,
              lora_dtype="float32")  # fmt: skip
    worker = RolloutWorker(llm, width=WIDTH, adapter="girls", scale=SCALE)
    shapes = {
        f"layers.{i}.{part}.{layer}": llm.engine.runner.adapters.form.layers[f"layers.{i}.{part}.{layer}"]
        for i in range(model.config.num_hidden_layers) for part, layers in LAYERS.items() for layer in layers
    }  # fmt: skip
    adapter = new_adapter(shapes)
    worker.update(adapter)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-3))
    moments = optimizer.init(adapter)

    @partial(jax.jit, donate_argnums=1)
    def train(adapter, moments, tokens_bw, is_output_bw, drawn_bw, advantage_b):
        def loss(adapter):
            given = tokens_bw, is_output_bw, worker.numerics
            logprobs_bw = token_logprobs(model, *given, adapter=adapter, scale=SCALE)
            difference_bw = jnp.where(is_output_bw, logprobs_bw - drawn_bw, 0)
            ratio_bw, advantage_b1 = jnp.exp(difference_bw), advantage_b[:, None]
            gain_bw = jnp.minimum(ratio_bw * advantage_b1, jnp.clip(ratio_bw, 1 - CLIP, 1 + CLIP) * advantage_b1)
            return -jnp.sum(gain_bw * is_output_bw) / jnp.sum(is_output_bw), jnp.abs(difference_bw).max()

        gradients, mismatch = jax.grad(loss, has_aux=True)(adapter)
        updates, moments = optimizer.update(gradients, moments, adapter)
        return optax.apply_updates(adapter, updates), moments, mismatch

    history = []
    for step in range(int(steps)):
        sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=MAX_TOKENS, seed=1000 * step)
        rollouts = worker.generate(PROMPTS, sampling)
        rewards = np.array([float("girl" in text) for text in rollouts.texts])
        advantages = group_advantages(rewards, GROUP)
        adapter, moments, mismatch = train(
            adapter, moments, rollouts.tokens, rollouts.is_output, rollouts.logprobs, advantages
        )
        worker.update(adapter)
        history.append((float(rewards.mean()), float(mismatch)))
        print(f"step {step:2}: reward {rewards.mean():.2f}, mismatch {mismatch:.1e}: {rollouts.texts[0][:50]!r}")
    return history


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Train the demo model with Tunix's own GRPO learner, with jpaged as its rollout engine.

pip install "jpaged[tunix]"
python examples/grpo_tunix.py [BATCHES]       40 batches: under two minutes on two cores
"""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from jpaged import load
from jpaged.demo import DIRECTORY
from jpaged.rl.tunix import CausalModel, rollout
from jpaged.tokenizer import encode, load_tokenizer

PROMPTS = ["Once upon a time, there was", "One day,", "Lily had a", "In the garden there was"]
ROLES = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)


def main(batches: str = "40") -> list[float]:
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    inner = load_tokenizer(DIRECTORY)
    # Tunix's interface of a tokenizer, with the demo model's ids.
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: encode(inner, text), decode=lambda ids, **_: inner.decode(ids),
        bos_id=lambda: 0, eos_id=lambda: 1, pad_id=lambda: 2,
    )  # fmt: skip

    def model() -> CausalModel:
        loaded = load("demo", dtype="float32", progress=False)
        nnx.update(loaded, jax.device_put(nnx.state(loaded), whole))
        return CausalModel(loaded)

    cluster = RLCluster(
        actor=model(), reference=model(), tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(ROLES, mesh),
            # The names of the parameters' axes: none is divided here.
            role_to_logical_axis_rule={
                role: tuple((axis, None) for axis in ("vocab", "heads", "kv_heads", "mlp")) for role in ROLES
            },
            rollout_engine=rollout("demo", max_num_seqs=32, num_gpu_blocks_override=256, swap_space=0),
            offload_to_cpu=False,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-4)), eval_every_n_steps=1000,
                max_steps=int(batches), mini_batch_size=4, train_micro_batch_size=4,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=24, max_prompt_length=16, temperature=1.0, top_p=1.0, top_k=None,
                kv_cache_size=64, return_logprobs=True,
            ),
        ),
    )  # fmt: skip
    rewards: list[float] = []

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        found = [float("girl" in text) for text in completions]
        rewards.append(float(np.mean(found)))
        print(f"batch {len(rewards):2}: reward {rewards[-1]:.2f}: {completions[0][:50]!r}")
        return found

    learner = GRPOLearner(
        rl_cluster=cluster, algo_config=GRPOConfig(num_generations=8, num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=reward,
    )  # fmt: skip
    learner.train([{"prompts": np.asarray(PROMPTS)} for _ in range(int(batches))])
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])

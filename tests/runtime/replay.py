"""A runner in a process of its own, which knows the plans of another one and nothing else.

python -m tests.runtime.replay FILE    reads pickled steps from FILE, and writes their results to standard output
"""

import pickle
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jpaged.config import EngineConfig, Limits
from jpaged.core.plan import StepPlan, StepResult
from jpaged.models.checkpoint import dummy_model
from jpaged.models.config import ModelConfig
from jpaged.runtime.runner import ModelRunner
from tests.support.runners import runner_of

LLAMA = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
)  # fmt: skip
NUM_BLOCKS, BLOCK_SIZE = 14, 4
LIMITS = Limits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16, block_size=BLOCK_SIZE)


class Recorded(NamedTuple):
    """A plan, and the masks of its rows."""

    plan: StepPlan
    masks: np.ndarray | None


def make_runner() -> ModelRunner:
    """A runner on a small pool. Its parameters are the same in every process."""
    config = EngineConfig(num_gpu_blocks_override=NUM_BLOCKS, swap_space=0.01)
    runner = runner_of(dummy_model(LLAMA, "float32", seed=3), config, LIMITS)
    runner.shapes.buckets.decode = runner.shapes.buckets.decode[-1:]  # soon compiled
    return runner


def replay(steps: list[Recorded]) -> list[StepResult]:
    """The results of some steps, each dispatched before the result of the one before it is taken."""
    runner, results, before = make_runner(), [], None
    for plan, masks in steps:
        pending = runner.dispatch(plan, None if masks is None else lambda masks=masks: masks)
        if before is not None:
            results.append(before.result())
        before = pending
    return [*results, before.result()]


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(replay(pickle.loads(Path(sys.argv[1]).read_bytes()))))

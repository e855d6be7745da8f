"""A model whose rollouts are exact, shared by the tests of this folder."""

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.rl import RolloutWorker
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

SETTINGS = LIMITS | dict(num_gpu_blocks_override=160, progress=False, exact=True)
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=20, seed=4, ignore_eos=True)
LENGTHS = (5, 1, 33, 60)  # of prompts: parts of blocks, several blocks and several chunks


def rolled_out(model, **settings):
    """Return a worker, and rollouts of random prompts."""
    with few_shapes():
        worker = RolloutWorker(LLM(model, **SETTINGS | {"block_size": 8} | settings), width=88)
    rng = np.random.default_rng(0)
    return worker, worker.generate([rng.integers(3, 60, length).tolist() for length in LENGTHS], PARAMS)


@pytest.fixture(scope="session")
def llama():
    model = random_model(LLAMA, "float32", 0)
    return model, *rolled_out(model)

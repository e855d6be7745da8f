"""Real models and their engines."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM
from tests.real.cases import FIXTURES, LONG
from tests.real.packages import GEMMA3, SMOLLM2
from tests.support.few_shapes import few_shapes


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: Q4_1, embeddings Q8_0."""
    return SMOLLM2.file


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The GGUF file of Gemma 3 270M, a base model: Q4_K_M, which is Q4_K, Q5_0, Q6_K and Q8_0."""
    return GEMMA3.file


def expected(name: str) -> dict[str, Any]:
    """Return the answers of transformers."""
    return json.loads((FIXTURES / f"{name}.json").read_text())


@pytest.fixture
def make_llm():
    """Makes engines with few shapes, which are dropped after the test."""

    def make(path: Path, **options: Any) -> LLM:
        limits = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256}
        with few_shapes():
            return LLM(str(path), progress=False, **limits | options)

    yield make
    gc.collect()


@pytest.fixture(scope="module")
def smollm2_exact(smollm2) -> LLM:
    """SmolLM2 with activations and KV in float32, as transformers computes the answers."""
    with few_shapes():
        return LLM(
            str(smollm2), progress=False, dtype="float32", max_model_len=LONG, max_num_seqs=8,
            max_num_batched_tokens=256, num_gpu_blocks_override=2 * LONG // 64,
        )  # fmt: skip

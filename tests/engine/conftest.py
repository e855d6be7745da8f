"""A model whose tokens are characters, and an engine with a draft model, which tests of drafts share."""

from pathlib import Path

import pytest

from jpaged.config import EngineConfig
from jpaged.core.drafting import Drafting
from jpaged.engine.engine import Engine
from jpaged.start.load import load_engine
from tests.support import checkpoints, models
from tests.support.few_shapes import few_shapes


def drafts_of(directory: Path, **settings) -> dict:
    return {"model": str(directory), "quantization": "int8", "num_speculative_tokens": 3} | settings


def drafting_config(directory: Path, **settings) -> EngineConfig:
    settings = dict(
        model=str(directory), max_num_seqs=8, max_num_batched_tokens=48, max_model_len=160, block_size=8,
        num_gpu_blocks_override=200, speculative_config=drafts_of(directory),
    ) | settings  # fmt: skip
    return EngineConfig(**settings)


@pytest.fixture(scope="session")
def characters(tmp_path_factory) -> Path:
    """The directory of a tiny model."""
    directory = tmp_path_factory.mktemp("model")
    checkpoints.write(directory, models.TINY | {"num_hidden_layers": 1}, generation={"eos_token_id": models.EOS})
    models.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def with_draft_model(characters) -> Engine:
    """An engine whose draft model is the model itself in 8 bits, which is right in most places, at unknown costs."""
    with few_shapes():
        engine = load_engine(drafting_config(characters), progress=False).engine
    engine.scheduler.drafting = Drafting(engine.limits, engine.scheduler.pool)
    return engine

"""Models, dtypes and kernels whose schedules are compared."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

import jpaged
from jpaged.config import EngineConfig, Limits
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from jpaged.runtime.runner import ModelRunner
from tests.exact.schedules import BLOCK, BLOCKS, LENGTH, SEQS, TOKENS
from tests.models.test_architectures import write
from tests.support import architectures, checkpoints, models, runners

DEMO = Path(jpaged.__file__).parent / "demo" / "model"
TINY = {"vocab_size": models.VOCAB, "eos_token_id": models.EOS}
LLAMA = checkpoints.CASES["biases"] | TINY | {"intermediate_size": 128}
# A layer of each kind.
SHALLOW = {
    "gemma3, shallow": architectures.CASES["gemma3"] | {"num_hidden_layers": 2},
    "qwen3.5, shallow": architectures.CASES["qwen3.5"] | {"num_hidden_layers": 2, "full_attention_interval": 2},
}


class Case(NamedTuple):
    """A model and its numerics."""

    model: str
    dtype: str = "float32"
    kernels: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"

    def __str__(self) -> str:
        return "-".join(part for part in self if part not in (None, "auto"))


def hf_of(name: str) -> dict:
    """The config of a random model."""
    return LLAMA if name == "llama" else (architectures.CASES | SHALLOW)[name] | TINY


def runner_of(case: Case, directory: Path, *, seqs: int = SEQS, tokens: int = TOKENS) -> tuple[ModelRunner, Tokenizer]:
    """Return a runner with all its shapes, and a tokenizer. `directory`: an empty one."""
    if case.model == "demo":
        directory, tokenizer = DEMO, Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    else:
        write(directory, hf_of(case.model))
        tokenizer = models.byte_tokenizer()
    form = Form(case.dtype, quantization=case.quantization)
    model = load_safetensors(directory, read_config(directory).for_length(LENGTH), form, progress=False)
    config = EngineConfig(
        num_gpu_blocks_override=BLOCKS, swap_space=1.0, kernels=case.kernels, kv_cache_dtype=case.kv_cache_dtype,
        activation_dtype=case.activation_dtype,
    )  # fmt: skip
    return runners.runner_of(model, config, Limits(LENGTH, seqs, tokens, BLOCK)), tokenizer

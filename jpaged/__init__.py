"""jpaged: a paged LLM engine for JAX. Importing it is cheap; jax is loaded when `LLM` is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.core.params import BeamSearchParams, InvalidParameter, SamplingParams, StructuredOutputsParams
    from jpaged.core.request import CompletionOutput, RequestMetrics, RequestOutput
    from jpaged.engine.async_engine import AsyncEngine
    from jpaged.engine.engine import Engine
    from jpaged.llm import LLM
    from jpaged.models.config import ModelConfig
    from jpaged.models.llama import Llama
    from jpaged.models.quantized import quantize
    from jpaged.runtime.placement import shard
    from jpaged.start.load import load

_HOME = {
    "LLM": "jpaged.llm",
    "AsyncEngine": "jpaged.engine.async_engine",
    "Engine": "jpaged.engine.engine",
    "Llama": "jpaged.models.llama",
    "EngineConfig": "jpaged.config",
    "ModelConfig": "jpaged.models.config",
    "BeamSearchParams": "jpaged.core.params",
    "InvalidParameter": "jpaged.core.params",
    "SamplingParams": "jpaged.core.params",
    "StructuredOutputsParams": "jpaged.core.params",
    "RequestMetrics": "jpaged.core.request",
    "RequestOutput": "jpaged.core.request",
    "CompletionOutput": "jpaged.core.request",
    "load": "jpaged.start.load",
    "quantize": "jpaged.models.quantized",
    "shard": "jpaged.runtime.placement",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "InvalidParameter",
    "Llama",
    "ModelConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "load",
    "quantize",
    "shard",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("jpaged")
    if name not in _HOME:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

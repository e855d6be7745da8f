"""jpaged: a paged LLM engine for JAX. Importing it is cheap; jax is loaded when `LLM` is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.core.lora_request import LoRARequest
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

_HOMES = {
    "config": ("EngineConfig",),
    "core.lora_request": ("LoRARequest",),
    "core.params": ("BeamSearchParams", "InvalidParameter", "SamplingParams", "StructuredOutputsParams"),
    "core.request": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "engine.async_engine": ("AsyncEngine",),
    "engine.engine": ("Engine",),
    "llm": ("LLM",),
    "models.config": ("ModelConfig",),
    "models.llama": ("Llama",),
    "models.quantized": ("quantize",),
    "runtime.placement": ("shard",),
    "start.load": ("load",),
}
__all__ = [
    "LLM", "AsyncEngine", "BeamSearchParams", "CompletionOutput", "Engine", "EngineConfig", "InvalidParameter", "Llama",
    "LoRARequest", "ModelConfig", "RequestMetrics", "RequestOutput", "SamplingParams", "StructuredOutputsParams",
    "load", "quantize", "shard",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("jpaged")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"jpaged.{module}"), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

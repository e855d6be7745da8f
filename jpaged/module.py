"""A checkpoint as a module, without an engine."""

import os

import jax

from jpaged.config import EngineConfig
from jpaged.engine.build import choose_devices, dtype_of, find_model, limits_of, load_model
from jpaged.models.base import Model
from jpaged.models.checkpoint import on_one_device
from jpaged.models.registry import read_config
from jpaged.runtime.compilation_cache import compilation_cache
from jpaged.runtime.placement import Placement


def load(
    model: str | os.PathLike[str] = "demo", *, revision: str | None = None, load_format: str = "auto",
    dtype: str = "auto", quantization: str | None = None, max_model_len: int | None = None, seed: int = 0,
    tensor_parallel_size: int | None = None, progress: bool = True,
) -> Model:  # fmt: skip
    """Load a checkpoint as the NNX module that `LLM` would serve, for a trainer, which may then pass it to `LLM`.

    Its layers are separate ones, as in the checkpoint, also on a GPU, where `LLM` fuses some of those that it loads.

    Args:
        model: "demo", a directory or a hub id.
        revision, load_format, dtype, quantization, max_model_len, seed: as in `EngineConfig`. A few models choose their
            rotary embedding by `max_model_len`.
        tensor_parallel_size: number of devices among which the parameters are divided; None: they lie on one.
        progress: show a progress bar.

    Raises:
        OSError, ValueError: there is no such model, or the model or the device does not allow a setting.
    """
    config = EngineConfig(
        model=os.fspath(model), revision=revision, load_format=load_format, dtype=dtype, quantization=quantization,
        max_model_len=max_model_len, seed=seed, tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    directory = find_model(config.model, revision=revision, weights=load_format != "dummy")
    platform = jax.default_backend()
    found = read_config(directory)
    found = found.for_length(limits_of(config, found, platform).max_model_len)
    place = on_one_device
    if tensor_parallel_size is not None:
        place = Placement.on(choose_devices(tensor_parallel_size)[0], found).of
    with compilation_cache():
        return load_model(
            directory, found, dtype=dtype_of(config, found, platform), load_format=load_format, seed=seed,
            progress=progress, place=place, quantization=quantization,
        )  # fmt: skip

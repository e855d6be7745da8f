"""From a name to an engine: finding the model, choosing what was left open, putting the parts together."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jpaged.config import EngineConfig, Limits, ModelConfig, sampling_defaults
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import Scheduler
from jpaged.demo import DIRECTORY as DEMO
from jpaged.engine import Engine
from jpaged.model.llama import Llama
from jpaged.model.weights import ORBAX, dummy_llama, load_orbax, load_safetensors
from jpaged.runtime.compilation_cache import compilation_cache
from jpaged.runtime.runner import ModelRunner
from jpaged.tokenizer import backend, load_tokenizer

logger = logging.getLogger(__name__)

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]


def find_model(name: str) -> Path:
    """The directory of a model: "demo", a path, or a hub id, which is downloaded if it is not in the hub's cache.

    Raises ValueError if there is none.
    """
    if name == "demo":
        return DEMO
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ValueError(f"model: {name} is not a directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's library has a dozen ways to say no
        raise ValueError(f"model: {name} is neither a directory nor a model the hub can give: {error}") from error


def load_model(
    directory: Path, config: ModelConfig, *, dtype: str, load_format: str, seed: int, progress: bool
) -> Llama:
    """The parameters, in `dtype`, by `load_format`; "auto" takes the Orbax checkpoint if there is one."""
    if load_format == "dummy":
        return dummy_llama(config, dtype, seed)
    if load_format == "orbax" or (load_format == "auto" and (directory / ORBAX).is_dir()):
        return load_orbax(directory, config, dtype)
    return load_safetensors(directory, config, dtype, progress=progress)


def limits_of(config: EngineConfig, model: ModelConfig, platform: str) -> Limits:
    """Settles the limits that the config left to the model and the device. Raises ValueError for what the model
    can't do."""
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len ({max_model_len}) exceeds the model's max_position_embeddings "
            f"({model.max_position_embeddings})"
        )
    seqs, tokens = (64, 512) if platform == "cpu" else (256, 2048)
    max_num_seqs = config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs)
    return Limits(max_model_len, max_num_seqs, config.max_num_batched_tokens or max(tokens, max_num_seqs))


def dtype_of(config: EngineConfig, model: ModelConfig, platform: str) -> str:
    """ "auto" settled: processors compute float32 fastest and most exactly, GPU kernels want 16 bits."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if platform == "cpu" else "bfloat16" if model.dtype == "float32" else model.dtype


class Loaded(NamedTuple):
    """An engine, its Hugging Face tokenizer (None if there is none), and the model's own sampling defaults."""

    engine: Engine
    tokenizer: Any
    sampling_defaults: dict[str, Any]


def load_engine(
    config: EngineConfig, *, model: Llama | None = None, tokenizer: Any = None, progress: bool = True
) -> Loaded:
    """An engine that is ready to step, and what belongs to it.

    Args:
        model: a Llama in hand; its arrays are used as they are, and `config.model` is only a name.
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`, instead of the model's own.
    """
    platform = jax.default_backend()
    defaults: dict[str, Any] = {}
    if model is None:
        directory = find_model(config.model)
        model_config = ModelConfig.from_directory(directory)
        limits = limits_of(config, model_config, platform)
        dtype = dtype_of(config, model_config, platform)
        tokenizer = tokenizer or load_tokenizer(directory)
        defaults = sampling_defaults(directory)
        logger.info("loading %s as %s", config.model, dtype)
        with compilation_cache():
            model = load_model(
                directory, model_config, dtype=dtype, load_format=config.load_format, seed=config.seed,
                progress=progress,
            )  # fmt: skip
    else:
        _check_module(config, model)
        limits = limits_of(config, model.config, platform)
    with compilation_cache():
        runner = ModelRunner(model, config, limits)
        if limits.max_num_seqs > runner.num_blocks:
            raise ValueError(
                f"max_num_seqs ({limits.max_num_seqs}) exceeds the {runner.num_blocks} blocks of the KV pool: "
                "every sequence needs at least one"
            )
        runner.warm_up(progress=progress)
    host_pool = None
    if runner.num_host_blocks and config.preemption_mode != "recompute":
        host_pool = BlockPool(runner.num_host_blocks, config.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
        limits,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        host_pool=host_pool,
        policy=config.scheduling_policy,
        preemption=config.preemption_mode,
        block_swap_cost=runner.block_swap_cost() if host_pool and config.preemption_mode == "auto" else 0.0,
    )
    inner = backend(tokenizer) if tokenizer is not None else None
    return Loaded(Engine(scheduler, runner, inner, seed=config.seed), tokenizer, defaults)


def _check_module(config: EngineConfig, model: Llama) -> None:
    if config.load_format != "auto":
        raise ValueError(f"load_format: nothing is loaded for a module in hand, so it can't be {config.load_format!r}")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))}
    if len(dtypes) != 1:
        raise ValueError(f"model: its parameters must have one dtype, not {', '.join(sorted(dtypes))}")
    (dtype,) = dtypes
    if config.dtype not in ("auto", dtype):
        raise ValueError(f"dtype: the model's parameters are {dtype}, and they are not copied to {config.dtype}")

"""Construction of an engine: find the model, resolve open settings, and assemble the parts."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jpaged.chat import check_template
from jpaged.config import DTYPE_ALIASES, QUANTIZATIONS, EngineConfig, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.demo import DIRECTORY as DEMO
from jpaged.engine.engine import Engine, Runner
from jpaged.models.base import Model, Place
from jpaged.models.checkpoint import Form, dummy_model, load_safetensors, on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import GENERATION, SAMPLING, sampling_defaults
from jpaged.models.fused import fuse
from jpaged.models.orbax_checkpoint import ORBAX, load_orbax
from jpaged.models.quantized_checkpoint import read_scheme
from jpaged.models.quantized_formats import Scheme
from jpaged.models.registry import read_config
from jpaged.runtime.compilation_cache import compilation_cache, every_process_writes
from jpaged.runtime.kernel_choice import select_kernels
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.memory import available_memory, given_num_blocks
from jpaged.runtime.parameters import by_name
from jpaged.runtime.placement import Placement, devices_of
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step_costs import step_overhead, tokens_beside_decodes
from jpaged.tokenizer import TOKENIZER_FILES, backend, has_tokenizer, load_tokenizer
from pallas_kernels import Kernels

logger = logging.getLogger(__name__)

FUSING = ("gpu", "cuda")  # platforms on which fewer products take less time
WEIGHTS = ["*.safetensors"]
SECOND_COPIES = ["consolidated*"]  # the same weights under Mistral's own names
SMALL_FILES = ["*.json", "*.model", "*.jinja", *TOKENIZER_FILES]  # config, tokenizer and chat templates


def find_model(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the directory of a model: "demo", a path, or a hub id.

    A model that is not in the hub's cache is downloaded.

    Args:
        revision: a branch, tag or commit of a hub id.
        weights: False leaves the weights of a hub id out: its config and its tokenizer can be checked before a long
            download.

    Raises:
        ValueError: there is no such model.
    """
    if revision is not None and (name == "demo" or Path(name).expanduser().is_dir()):
        raise ValueError(f"revision: only a hub id has revisions, and {name} is a directory")
    if name == "demo":
        return DEMO
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ValueError(f"model: {name} is not a directory")
    from huggingface_hub import snapshot_download

    try:
        patterns = [*SMALL_FILES, *(WEIGHTS if weights else ())]
        found = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES)
        return Path(found)
    except Exception as error:  # the hub's library has a dozen ways to say no
        raise ValueError(f"model: {name} is neither a directory nor a model on the hub: {error}") from error


def load_model(
    directory: Path, config: ModelConfig, *, dtype: str, load_format: str, seed: int, progress: bool,
    place: Place = on_one_device, quantization: str | None = None,
) -> Model:  # fmt: skip
    """Load the parameters, in `dtype`, by `load_format`; "auto" takes the Orbax checkpoint if it exists."""
    if load_format == "dummy":
        return dummy_model(config, dtype, seed, place, quantization=quantization)
    if load_format == "orbax" or (load_format == "auto" and (directory / ORBAX).is_dir()):
        return load_orbax(directory, config, Form(dtype, place, quantization), progress=progress)
    return load_safetensors(directory, config, Form(dtype, place, quantization), progress=progress)


def choose_devices(tensor_parallel_size: int, data_parallel_size: int = 1) -> list[list[jax.Device]]:
    """Return the devices of each of several engines: jax's default device, and further ones of this process.

    Raises:
        ValueError: there are fewer.
    """
    (first,) = jax.device_put(0).devices()
    devices = [first, *(device for device in jax.local_devices(backend=first.platform) if device != first)]
    if len(devices) < tensor_parallel_size * data_parallel_size:
        name, most, given = "tensor_parallel_size", len(devices), tensor_parallel_size
        if given <= most:
            name, most, given = "data_parallel_size", len(devices) // given, data_parallel_size
        hint = "; JAX_NUM_CPU_DEVICES sets the number of CPU devices" if first.platform == "cpu" else ""
        found = f"{len(devices)} device" + "s" * (len(devices) > 1)
        raise ValueError(f"{name}: must be at most {most}, as jax has {found}, not {given}{hint}")
    starts = range(0, tensor_parallel_size * data_parallel_size, tensor_parallel_size)
    return [devices[start : start + tensor_parallel_size] for start in starts]


def devices_of_nodes(size: int, nnodes: int) -> list[jax.Device]:
    """Return the devices that several processes share, equally many of each.

    Raises:
        ValueError: a process has fewer, or the processes can't have equally many.
    """
    if size % nnodes:
        raise ValueError(f"tensor_parallel_size: must be a multiple of nnodes ({nnodes}), not {size}")
    devices = [jax.local_devices(process_index=node)[: size // nnodes] for node in range(nnodes)]
    if short := [node for node, found in enumerate(devices) if len(found) < size // nnodes]:
        raise ValueError(
            f"tensor_parallel_size: node {short[0]} has {len(devices[short[0]])} devices, and {size} devices on "
            f"{nnodes} nodes need {size // nnodes} on each"
        )
    return [device for found in devices for device in found]


def limits_of(config: EngineConfig, model: ModelConfig, platform: str) -> Limits:
    """Resolve the limits that the config leaves to the model and the device.

    Raises:
        ValueError: the model does not support a value, or there are more sequences than blocks in the KV pool.
    """
    longest = model.context_length
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        scaled = "" if longest == model.max_position_embeddings else f" as {model.rope.type} rope_scaling extends them"
        raise ValueError(
            f"max_model_len: {max_model_len} exceeds the model's max_position_embeddings{scaled} ({longest})"
        )
    # A CPU computes 256 tokens about as efficiently as more, and decodes wait for a step with a prompt in it.
    seqs, tokens = (64, 256) if platform == "cpu" else (256, 2048)
    max_num_seqs = config.max_num_seqs or min(seqs, config.max_num_batched_tokens or seqs)
    # A CPU gathers long contexts faster in large blocks (0.7 of the time of attention over 512 tokens).
    block_size = config.block_size or (64 if platform == "cpu" and max_model_len >= 2048 else 16)
    max_num_batched_tokens = config.max_num_batched_tokens or max(tokens, max_num_seqs)
    max_logprobs = model.vocab_size if config.max_logprobs == -1 else config.max_logprobs
    limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens, block_size, max_logprobs)
    if config.num_gpu_blocks_override is not None:
        check_num_blocks(limits, config.num_gpu_blocks_override)
    return limits


def check_num_blocks(limits: Limits, num_blocks: int) -> None:
    """Check that the KV pool has a block for each sequence.

    Raises:
        ValueError: it has fewer.
    """
    if limits.max_num_seqs > num_blocks:
        raise ValueError(
            f"max_num_seqs: {limits.max_num_seqs} exceeds the {num_blocks} blocks of the KV pool, "
            "and each sequence needs at least one"
        )


def dtype_of(config: EngineConfig, model: ModelConfig, platform: str) -> str:
    """Resolve the dtype "auto": float32 on CPUs, where it is fastest and most exact, 16 bits on GPUs."""
    if config.dtype != "auto":
        return DTYPE_ALIASES.get(config.dtype, config.dtype)
    return "float32" if platform == "cpu" else "bfloat16" if model.dtype == "float32" else model.dtype


class Prepared(NamedTuple):
    """Checked settings of a model before its parameters are loaded; nothing large is in memory yet.

    Attributes:
        model: the model's config.
        placement: the places of parameters and KV pool.
        quantization: the one to apply while loading.
        kernels: the kernels, tested on the device.
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`; None if there is none.
        sampling_defaults: default sampling parameters of the model and the config.
    """

    model: ModelConfig
    placement: Placement
    limits: Limits
    dtype: str
    quantization: str | None
    kernels: Kernels
    tokenizer: Any
    sampling_defaults: dict[str, Any]


def prepare(
    config: EngineConfig, *, tokenizer: Any = None, chat_template: str | None = None, nnodes: int = 1
) -> Prepared:
    """Check all settings of a model before its parameters are loaded, which takes minutes for large ones.

    Args:
        tokenizer: a tokenizer, or the name of a directory or hub id, instead of the config's.
        chat_template: replaces the tokenizer's own; its syntax is checked.
        nnodes: number of processes of `jax.distributed` that share the model.

    Raises:
        ValueError: the model or the device does not allow a setting, or a file is missing or broken.
        NotImplementedError: the device does not have the requested kernels.
    """
    platform = jax.default_backend()
    directory = find_model(config.model, revision=config.revision, weights=False)
    model = read_config(directory, config.hf_overrides)
    scheme = read_scheme(directory) if config.load_format != "dummy" else None  # before a long download
    quantization = quantization_of(config, scheme)
    size = config.tensor_parallel_size or 1
    devices = devices_of_nodes(size, nnodes) if nnodes > 1 else choose_devices(size)[0]
    placement = Placement.on(devices, model)
    limits, dtype = limits_of(config, model, platform), dtype_of(config, model, platform)
    model = model.for_length(limits.max_model_len)
    defaults = default_sampling(config, directory)
    tokenizer = find_tokenizer(config, directory, tokenizer)
    if chat_template is not None:
        check_template(tokenizer, chat_template)
    kernels = select_kernels(config, model, limits.block_size, dtype, placement)  # may test them, which takes minutes
    cache = KVCache.of(model, limits.block_size, config.pool_dtype(dtype), kernels)
    # Again once the parameters are loaded, which leaves less memory.
    memory = available_memory(placement.local_devices)
    if num_blocks := given_num_blocks(config, cache.block_bytes // placement.kv_size, memory):
        check_num_blocks(limits, num_blocks)
    return Prepared(model, placement, limits, dtype, quantization, kernels, tokenizer, defaults)


def quantization_of(config: EngineConfig, scheme: Scheme | None) -> str | None:
    """Return the quantization to apply while loading: none if the config names the checkpoint's own method.

    Raises:
        ValueError: it names another one, which can't be applied.
    """
    given, own = config.quantization, scheme.method if scheme else None
    if given is None or given in QUANTIZATIONS:
        return given
    if given != own:
        told = f"is quantized by {own}" if own else "is not quantized"
        raise ValueError(
            f"quantization: the checkpoint {told}, so it can be {own or 'None'} or one of {', '.join(QUANTIZATIONS)}, "
            f"not {given!r}"
        )
    return None


def default_sampling(config: EngineConfig, directory: Path | None = None) -> dict[str, Any]:
    """Return the default sampling parameters of a model: those of its directory, and the config's overrides.

    Raises:
        ValueError: a value is invalid, or an override is not one of these parameters.
    """
    defaults: dict[str, Any] = {}
    if directory is not None and config.generation_config == "auto":
        defaults = sampling_defaults(directory)
        _check_sampling(defaults, str(directory / GENERATION))
    overrides = config.override_generation_config or {}
    if unknown := overrides.keys() - set(SAMPLING):
        raise ValueError(
            f"override_generation_config: {', '.join(sorted(unknown))} is not supported; "
            f"supported: {', '.join(SAMPLING)}"
        )
    _check_sampling(overrides, "override_generation_config")
    return {**defaults, **overrides}


def _check_sampling(values: Mapping[str, Any], source: str) -> None:
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def on_further_devices(prepared: Prepared, data_parallel_size: int) -> list[Prepared]:
    """Return the settings of several engines of a model, each on devices of its own; the first are the given ones.

    Raises:
        ValueError: there are too few devices.
    """
    if data_parallel_size == 1:
        return [prepared]
    groups = choose_devices(prepared.placement.size, data_parallel_size)
    return [prepared._replace(placement=Placement.on(group, prepared.model)) for group in groups]


def find_tokenizer(config: EngineConfig, directory: Path, tokenizer: Any = None) -> Any:
    """Return the given or named tokenizer, else the model's own; None if it has none, or it is to be skipped."""
    if config.skip_tokenizer_init:
        return None
    tokenizer = tokenizer or config.tokenizer
    if isinstance(tokenizer, str):
        return load_tokenizer(find_model(tokenizer, weights=False))
    if tokenizer is not None or has_tokenizer(directory):
        return tokenizer or load_tokenizer(directory)
    logger.warning("%s has no tokenizer: requests must be token ids, and answers have no text", config.model)
    return None


class Loaded(NamedTuple):
    """Engine with its Hugging Face tokenizer (None if there is none) and the model's own sampling defaults."""

    engine: Engine
    tokenizer: Any
    sampling_defaults: dict[str, Any]


def load_engine(
    config: EngineConfig, *, model: Model | None = None, tokenizer: Any = None, prepared: Prepared | None = None,
    progress: bool = True, lead: Callable[[ModelRunner], Runner] | None = None, allow_copy: bool = True,
) -> Loaded:  # fmt: skip
    """Return an engine that is ready to step, with its tokenizer and sampling defaults.

    Args:
        model: a loaded module, and `config.model` is only a name. Its arrays are used without a copy if they lie as the
            engine's and `config.dtype` is "auto" or theirs; else a line in the log has the bytes of the copy.
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`, or the name of a directory or hub id, instead
            of the model's own.
        prepared: the result of `prepare(config)`, from a caller with more to check before the parameters are loaded.
        lead: return the engine's runner, which drives this one and those of other processes.
        allow_copy: False: raise an error where parameters would be copied, now and in `Engine.update_params`, or would
            lie whole on each of several devices.
    """
    defaults: dict[str, Any] = {}
    kernels: Kernels | None = None
    if model is None:
        prepared = prepared or prepare(config, tokenizer=tokenizer)
        limits, kernels, tokenizer = prepared.limits, prepared.kernels, prepared.tokenizer
        defaults = prepared.sampling_defaults
        inner = backend(tokenizer) if tokenizer is not None else None
        model = _load_prepared(config, prepared, progress=progress)
    else:
        _check_module(config, model)
        defaults = default_sampling(config)
        limits = limits_of(config, model.config, jax.default_backend())
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(find_model(tokenizer, weights=False))
        inner = backend(tokenizer) if tokenizer is not None else None
    runner, block_swap_cost = _start_runner(model, config, limits, kernels, progress=progress, allow_copy=allow_copy)
    host_pool = None
    if _swaps(runner, config):
        host_pool = BlockPool(runner.blocks.num_host_blocks, limits.block_size, enable_prefix_caching=False)
    chunk, platform = None, runner.placement.device.platform
    if runner.costs and not config.max_num_batched_tokens:
        chunk = tokens_beside_decodes(runner.costs, platform, padded=runner.pads)
    scheduler = Scheduler(
        BlockPool(runner.blocks.num_blocks, limits.block_size, enable_prefix_caching=config.enable_prefix_caching),
        limits,
        vocab_size=model.config.vocab_size,
        eos_token_ids=_eos_token_ids(model.config, tokenizer),
        host_pool=host_pool,
        policy=config.scheduling_policy,
        preemption=config.preemption_mode,
        block_swap_cost=block_swap_cost,
        tokens_beside_decodes=chunk,
        step_overhead=step_overhead(runner.costs, platform),
        headroom=HEADROOM,
    )
    max_in_flight = 2 if config.async_scheduling else 1
    engine = Engine(scheduler, lead(runner) if lead else runner, inner, seed=config.seed, max_in_flight=max_in_flight)
    return Loaded(engine, tokenizer, defaults)


def _eos_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the model's files, and the tokenizer's own.

    Fine-tuned models often end their answers with a token that only their tokenizer names.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    if not isinstance(own, int) or not 0 <= own < model.vocab_size:
        return model.eos_token_ids
    return tuple(dict.fromkeys((*model.eos_token_ids, own)))


def load_follower(config: EngineConfig, prepared: Prepared, *, progress: bool = True) -> ModelRunner:
    """Return a runner that is ready for the plans of another process, which calls `load_engine`.

    Both run the same programs on the devices they share, in the same order.
    """
    model = _load_prepared(config, prepared, progress=progress)
    runner, _ = _start_runner(model, config, prepared.limits, prepared.kernels, progress=progress)
    return runner


def _load_prepared(config: EngineConfig, prepared: Prepared, *, progress: bool) -> Model:
    directory = find_model(config.model, revision=config.revision, weights=config.load_format != "dummy")
    logger.info("loading %s as %s", config.model, prepared.dtype)
    with compilation_cache():
        return _load(prepared, directory, load_format=config.load_format, seed=config.seed, progress=progress)


def load_params(prepared: Prepared, directory: Path) -> Model:
    """Return a model with other parameters for a running engine, in its dtype and on its devices.

    Raises:
        OSError, ValueError: the directory does not hold parameters of this model.
    """
    return _load(prepared, directory, load_format="auto", seed=0, progress=False)


def _load(prepared: Prepared, directory: Path, *, load_format: str, seed: int, progress: bool) -> Model:
    """Load a model as its device wants it."""
    place = prepared.placement.of
    model = load_model(
        directory, prepared.model, dtype=prepared.dtype, load_format=load_format, seed=seed, progress=progress,
        place=place, quantization=prepared.quantization,
    )  # fmt: skip
    if prepared.placement.platform in FUSING:
        fuse(model, place)
    return model


def _start_runner(
    model: Model, config: EngineConfig, limits: Limits, kernels: Kernels | None, *, progress: bool,
    allow_copy: bool = True,
) -> tuple[ModelRunner, float]:  # fmt: skip
    """Return a runner with its executables, and its `block_swap_cost` if the scheduler needs it and knows it, else 0.

    All processes that share the devices run these programs, in this order.
    """
    with compilation_cache(), every_process_writes():
        runner = ModelRunner(model, config, limits, kernels, allow_copy=allow_copy)
        check_num_blocks(limits, runner.blocks.num_blocks)
        if config.warm_up:
            runner.warm_up(progress=progress)
    measures = runner.costs and _swaps(runner, config) and config.preemption_mode == "auto"
    return runner, runner.block_swap_cost() if measures else 0.0


def _swaps(runner: ModelRunner, config: EngineConfig) -> bool:
    """Return whether preempted requests may be swapped to the host."""
    return bool(runner.blocks.num_host_blocks) and config.preemption_mode != "recompute"


def _check_module(config: EngineConfig, model: Model) -> None:
    if config.load_format != "auto":
        raise ValueError(f"load_format: must be auto for a module, which is not loaded, not {config.load_format!r}")
    if config.hf_overrides:
        raise ValueError("hf_overrides: can't be applied to a module, which has its config")
    if config.quantization is not None:
        raise ValueError(
            "quantization: can't be applied to a module, whose arrays are served as they are, not copied; pass "
            f"jpaged.quantize(module, {config.quantization!r}) instead"
        )
    leaves = by_name(nnx.state(model, nnx.Param))
    if not leaves:
        raise ValueError("model: must have parameters, variables of the type nnx.Param")
    if other := next((name for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)), None):
        raise ValueError(f"model: {other} must be a jax.Array, not {type(leaves[other]).__name__}")
    num_devices = len(devices_of(leaves.values()))
    if (config.tensor_parallel_size or 1) > num_devices:
        raise ValueError(
            f"tensor_parallel_size: must be at most the number of devices ({num_devices}) on which the module's "
            f"parameters lie, not {config.tensor_parallel_size}; jpaged.shard(module, devices) divides a module"
        )

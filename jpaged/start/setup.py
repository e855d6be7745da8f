"""Setup of an engine: its files, settings, devices, kernels and tokenizer, checked before parameters are loaded."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jpaged.chat import check_template
from jpaged.checkpoint_files import part_names
from jpaged.config import GGUF, EngineConfig
from jpaged.core.params import SamplingParams
from jpaged.gguf_file import FLOATS, open_gguf
from jpaged.gguf_tokenizer import load_gguf_tokenizer
from jpaged.models.base import Model
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import GENERATION, SAMPLING, sampling_defaults
from jpaged.models.quantized_checkpoint import read_scheme
from jpaged.models.registry import read_config
from jpaged.runtime.compilation_cache import cache_folder, compilation_cache
from jpaged.runtime.parameters import by_name
from jpaged.runtime.placement import Placement, devices_of
from jpaged.start.find import FILE_ON_HUB, find_local
from jpaged.start.pool import check_pool
from jpaged.start.resolve import Device, Resolved, draft_model_config, resolve
from jpaged.tokenizer import TOKENIZER_FILES, backend, has_tokenizer, load_tokenizer
from pallas_kernels import Kernels, SelfTest, compute_capability, select

logger = logging.getLogger(__name__)

SECOND_COPIES = ["consolidated*"]  # the same weights under Mistral's own names
SMALL_FILES = ["*.json", "*.model", "*.jinja", *TOKENIZER_FILES]  # config, tokenizer and chat templates


class Setup(NamedTuple):
    """Checked settings and devices of an engine before its parameters are loaded; nothing large is in memory yet.

    Attributes:
        placement: the places of parameters and KV pool.
        kernels: the kernels, tested on the device; None: they depend on the dtype that a module computes attention in.
        tokenizer: a Hugging Face tokenizer or a `tokenizers.Tokenizer`; None if there is none.
        sampling_defaults: default sampling parameters of the model and the config.
        draft_model: the setup of the draft model, on the same devices; None: there is none.
    """

    resolved: Resolved
    placement: Placement
    kernels: Kernels | None
    tokenizer: Any
    sampling_defaults: dict[str, Any]
    draft_model: "Setup | None" = None


def prepare(config: EngineConfig, *, tokenizer: Any = None, chat_template: str | None = None, nnodes: int = 1) -> Setup:
    """Check all settings of a model before its parameters are loaded, which takes minutes for large ones.

    Args:
        tokenizer: a tokenizer, or the name of a directory or hub id, instead of the config's.
        chat_template: a chat template in place of the tokenizer's; its syntax is checked.
        nnodes: number of processes of `jax.distributed` that share the model.

    Raises:
        ValueError: the model or the device does not allow a setting, or a file is missing or broken.
        NotImplementedError: the device does not have the requested kernels.
    """
    size = config.tensor_parallel_size or 1
    if nnodes > 1 and config.kv_cache_dir:
        raise ValueError(f"kv_cache_dir: needs one process, not {nnodes} (nnodes)")
    devices = devices_of_nodes(size, nnodes) if nnodes > 1 else choose_devices(size)[0]
    setup = _prepare_on(devices, config, tokenizer, chat_template)
    if config.speculative_config is None:
        return setup
    return setup._replace(draft_model=_prepare_draft_model(setup, devices, nnodes))


def _prepare_on(
    devices: Sequence[jax.Device], config: EngineConfig, tokenizer: Any = None, chat_template: str | None = None
) -> Setup:
    """Check all settings of a model on some devices, as `prepare` does."""
    directory, resolved = resolve_checkpoint(config, devices[0])
    placement = Placement.on(devices, resolved.model)
    defaults = default_sampling(
        directory if config.generation_config == "auto" else None, config.override_generation_config
    )
    if config.skip_tokenizer_init:
        tokenizer = None
    elif (tokenizer := find_tokenizer(tokenizer or config.tokenizer, directory)) is None:
        logger.warning("%s has no tokenizer: requests must be token ids, and answers have no text", config.model)
    if chat_template is not None:
        check_template(tokenizer, chat_template)
    kernels = select_kernels(resolved, placement)  # may test them, which takes minutes
    check_pool(resolved, placement, kernels, str(resolved.dtype))
    return Setup(resolved, placement, kernels, tokenizer, defaults)


def _prepare_draft_model(setup: Setup, devices: Sequence[jax.Device], nnodes: int = 1) -> Setup | None:
    """Check all settings of the draft model that a setup names, on the same devices; return None if it names none.

    Raises:
        ValueError: the draft model or the device does not allow a setting, or it has other tokens.
    """
    limits, model = setup.resolved.limits, setup.resolved.model
    try:
        if (config := draft_model_config(setup.resolved)) is None:
            return None
        if nnodes > 1:
            raise ValueError("it is not supported on several hosts")
        _, draft = resolve_checkpoint(config, devices[0])
        longest = min(limits.max_model_len, draft.limits.max_model_len)
        prepared = _prepare_on(devices, replace(config, max_model_len=longest))
    except ValueError as error:
        raise ValueError(f"speculative_config: the draft model: {error}") from error
    if None in (setup.tokenizer, prepared.tokenizer):
        are_equal = model.vocab_size == draft.model.vocab_size
    else:  # the sizes of models are often padded
        are_equal = backend(setup.tokenizer).get_vocab() == backend(prepared.tokenizer).get_vocab()
    if not are_equal:
        raise ValueError(f"speculative_config.model: {config.model} must have the tokens of the model")
    return prepared


def resolve_checkpoint(config: EngineConfig, device: jax.Device) -> tuple[Path, Resolved]:
    """Return the directory of a checkpoint and the settings for it. Weights on the hub are not downloaded.

    Args:
        device: one of the devices that will hold the model.

    Raises:
        ValueError: there is no such model, or a file of it is missing or invalid, or it does not allow a setting.
    """
    directory = find_model(config.model, revision=config.revision, weights=False)
    model, stored = _read_checkpoint(directory, config.hf_overrides, config.load_format != "dummy")
    return directory, resolve(config, model, device_of(device), **stored)


def _read_checkpoint(
    directory: Path, overrides: Mapping[str, Any] | None, has_weights: bool
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return a checkpoint's config, and the arguments of `resolve` that tell the form of its weights."""
    model = read_config(directory, overrides)
    if has_weights and directory.is_file():
        file = open_gguf(directory)
        is_quantized = any(tensor.kind not in FLOATS for tensor in file.tensors.values())
        weights = None if is_quantized else "bfloat16"
        return model, dict(stored_method=GGUF, stored_form=file.summary, stored_weights=weights)
    if has_weights and (scheme := read_scheme(directory)):
        form = "the method of the checkpoint"
        return model, dict(stored_method=scheme.method, stored_form=form, stored_weights=scheme.weights)
    return model, {}


def prepare_module(config: EngineConfig, module: Model, tokenizer: Any = None) -> Setup:
    """Check all settings of a loaded module.

    Args:
        tokenizer: a tokenizer, or the name of a directory or hub id; None: there is none.

    Raises:
        ValueError: the module or its devices do not allow a setting.
    """
    if config.load_format != "auto":
        raise ValueError(f"load_format: must be auto for a module, which is not loaded, not {config.load_format!r}")
    if config.hf_overrides:
        raise ValueError("hf_overrides: can't be applied to a module, which has its config")
    if config.quantization is not None:
        raise ValueError(
            "quantization: can't be applied to a module, whose arrays are served as they are, not copied; pass "
            f"jpaged.quantize(module, {config.quantization!r}) instead"
        )
    leaves = by_name(nnx.state(module, nnx.Param))
    if not leaves:
        raise ValueError("model: must have parameters, variables of the type nnx.Param")
    if other := next((name for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)), None):
        raise ValueError(f"model: {other} must be a jax.Array, not {type(leaves[other]).__name__}")
    devices = devices_of(leaves.values())
    if (config.tensor_parallel_size or 1) > len(devices):
        raise ValueError(
            f"tensor_parallel_size: must be at most the number of devices ({len(devices)}) on which the module's "
            f"parameters lie, not {config.tensor_parallel_size}; jpaged.shard(module, devices) divides a module"
        )
    resolved = resolve(config, module.config, device_of(devices[0]), module_size=len(devices))
    placement = Placement.on(devices[: config.tensor_parallel_size], module.config)
    defaults = default_sampling(None, config.override_generation_config)
    setup = Setup(resolved, placement, None, find_tokenizer(tokenizer), defaults)
    if config.speculative_config is None:
        return setup
    return setup._replace(draft_model=_prepare_draft_model(setup, placement.devices))


def on_further_devices(setup: Setup, data_parallel_size: int) -> list[Setup]:
    """Return the setups of several engines of a model, each on different devices. The first is `setup`.

    Raises:
        ValueError: there are too few devices.
    """
    if data_parallel_size == 1:
        return [setup]

    def on(devices: Sequence[jax.Device], setup: Setup) -> Setup:
        placement = Placement.on(devices, setup.resolved.model)
        return setup._replace(placement=placement, draft_model=setup.draft_model and on(devices, setup.draft_model))

    return [on(group, setup) for group in choose_devices(setup.placement.size, data_parallel_size)]


def select_kernels(
    resolved: Resolved, placement: Placement, dtype: str | None = None, *, retest: bool = False
) -> Kernels:
    """Choose the kernels for a model, with the heads that each device holds.

    On a GPU each op is tested first, on one device, unless a result is stored.

    Args:
        dtype: dtype of queries, keys and values; None: the resolved one.
        retest: ignore stored results.
    """
    config, model, device = resolved.config, resolved.model, resolved.device
    experts = model.variation.experts
    dtype = dtype or str(resolved.dtype)
    # A CPU's kernels are compiled to be chosen, and are kept. On a GPU tests should not depend on the cache.
    with compilation_cache() if device.platform == "cpu" else nullcontext():
        return select(
            config.kernels, platform=device.platform, device_kind=device.kind,
            compute_capability=device.compute_capability, dtype=dtype, pool_dtype=config.pool_dtype(dtype),
            head_dim=model.head_dim, num_heads=model.num_attention_heads // resolved.mesh.size,
            num_kv_heads=model.num_key_value_heads // resolved.mesh.kv, block_size=resolved.limits.block_size,
            sinks=model.variation.sinks, mxfp4=experts is not None and experts.activation is not None,
            int8_rows=config.activation_dtype == "int8",
            self_test=SelfTest.on(placement.device, cache_folder() / "selftest", retest=retest),
        )  # fmt: skip


def device_of(device: jax.Device) -> Device:
    """Return the description of one of jax's devices."""
    described = Device(device.device_kind, device.platform, compute_capability(device))
    if device.platform != "cpu":
        return described
    from pallas_kernels import cpu  # brings llvmlite with it

    return replace(described, bfloat16_weights=cpu.bfloat16_weights())


def choose_devices(tensor_parallel_size: int, data_parallel_size: int = 1) -> list[list[jax.Device]]:
    """Return the devices of each of several engines: jax's default device, and further ones of this process.

    Raises:
        ValueError: there are fewer.
    """
    (first,) = jax.device_put(0).devices()
    devices = [first, *(device for device in jax.local_devices(backend=first.platform) if device != first)]
    if len(devices) < tensor_parallel_size * data_parallel_size:
        name, most, size = "tensor_parallel_size", len(devices), tensor_parallel_size
        if size <= most:
            name, most, size = "data_parallel_size", len(devices) // size, data_parallel_size
        hint = "; JAX_NUM_CPU_DEVICES sets the number of CPU devices" if first.platform == "cpu" else ""
        count = f"{len(devices)} device" + "s" * (len(devices) > 1)
        raise ValueError(f"{name}: must be at most {most}, as jax has {count}, not {size}{hint}")
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
    if short := [node for node, local in enumerate(devices) if len(local) < size // nnodes]:
        raise ValueError(
            f"tensor_parallel_size: node {short[0]} has {len(devices[short[0]])} devices, and {size} devices on "
            f"{nnodes} nodes need {size // nnodes} on each"
        )
    return [device for local in devices for device in local]


def find_model(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the directory of a model, or its file in GGUF: "demo", a path, a hub id, or a hub id with :FILE.gguf.

    A model that is not in the hub's cache is downloaded.

    Args:
        revision: a branch, tag or commit of a hub id.
        weights: False leaves the weights of a hub id out: its config and its tokenizer can be checked before a long
            download. A file in GGUF has them inside, and is always downloaded.

    Raises:
        ValueError: there is no such model.
    """
    if (path := find_local(name, revision=revision)) is not None:
        return path
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if on_hub := FILE_ON_HUB.fullmatch(name):
            paths = [hf_hub_download(on_hub[1], name, revision=revision) for name in part_names(on_hub[2])]
            return Path(paths[0])
        patterns = [*SMALL_FILES, *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES))
    except Exception as error:  # the hub's library has a dozen ways to say no
        raise ValueError(f"model: {name} is neither a directory nor a model on the hub: {error}") from error


def find_tokenizer(tokenizer: Any, directory: Path | None = None) -> Any:
    """Return a tokenizer; None if there is none.

    Args:
        tokenizer: a tokenizer, or the name of a directory or hub id; None: that of the model.
        directory: the directory of the model.
    """
    if isinstance(tokenizer, str):
        directory, tokenizer = find_model(tokenizer, weights=False), None
        if not directory.is_file():
            return load_tokenizer(directory)
    if tokenizer is not None or directory is None:
        return tokenizer
    if directory.is_file():
        return load_gguf_tokenizer(open_gguf(directory))
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def default_sampling(directory: Path | None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return default sampling parameters: those in a model's directory, and the overrides.

    Args:
        directory: None: use no parameters of the model.
        overrides: as `EngineConfig.override_generation_config`.

    Raises:
        ValueError: a value is invalid, or an override is not one of these parameters.
    """
    defaults, overrides = {} if directory is None else sampling_defaults(directory), overrides or {}
    if unknown := overrides.keys() - set(SAMPLING):
        raise ValueError(
            f"override_generation_config: {', '.join(sorted(unknown))} is not supported; "
            f"supported: {', '.join(SAMPLING)}"
        )
    for values, source in (defaults, f"{directory}/{GENERATION}"), (overrides, "override_generation_config"):
        try:
            SamplingParams(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    return {**defaults, **overrides}

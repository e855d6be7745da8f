"""Resolution of the settings that a config leaves to the model and the device, before either is used."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jpaged.config import (
    BLOCK_SIZE,
    CPU_LONG,
    CPU_LONG_BLOCK_SIZE,
    DTYPE_ALIASES,
    QUANTIZATIONS,
    EngineConfig,
    Limits,
    Speculation,
    platform_defaults,
)
from jpaged.models.config import ModelConfig
from jpaged.runtime.mesh import MeshShape, mesh_shape

CPU_CACHE_BYTES = 64 * 2**20  # weights that the caches of processors may hold are not read from memory in each step


@dataclass(frozen=True)
class Device:
    """Device as jax describes it.

    Attributes:
        bfloat16_weights: dtypes of weights that a CPU multiplies faster by rows of bfloat16 than by rows of float32.
    """

    kind: str
    platform: str
    compute_capability: float | None = None
    bfloat16_weights: tuple[str, ...] = ()


class SettingChoice(NamedTuple):
    """Value of a setting, and the reason for it."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """Settings of an engine for one model and one kind of device; none of them is open.

    Attributes:
        config: the config, for the settings that need no resolution.
        model: the model's config, for sequences of at most `limits.max_model_len` tokens.
        device: a device that holds the model or a part of it.
        dtype: dtype of parameters and activations; None: a module keeps the dtypes of its arrays.
        quantization: method of quantizing weights while they are loaded; None: they stay as they are.
        mesh: shape of the mesh of devices.
        choices: the settings that a config may leave open.
    """

    config: EngineConfig
    model: ModelConfig
    device: Device
    limits: Limits
    dtype: str | None
    quantization: str | None
    mesh: MeshShape
    choices: tuple[SettingChoice, ...]

    @property
    def weights(self) -> str:
        """Return the form of the weights in words: how they are quantized, and in a file in GGUF their kinds."""
        return next((f"{c.value or 'none'}: {c.reason}" for c in self.choices if c.setting == "quantization"), "none")


def resolve(
    config: EngineConfig, model: ModelConfig, device: Device, *, stored_method: str | None = None,
    stored_form: str = "the checkpoint is not quantized", stored_weights: str | None = "bfloat16",
    module_size: int | None = None,
) -> Resolved:  # fmt: skip
    """Resolve the open settings of a config.

    Args:
        stored_method: method by which the checkpoint is quantized; None: it is not.
        stored_form: form of the checkpoint's weights, in words.
        stored_weights: their dtype if they are bfloat16, or int8 with one scale for each output; None: they are others.
        module_size: number of devices that hold a loaded module; None: the model is a checkpoint.

    Raises:
        ValueError: the model does not support a value, or there are more sequences than blocks in the KV pool.
    """
    choices, quantization = _Choices(config), None
    dtype: str | None
    if module_size is None:
        weights = config.quantization if config.quantization in QUANTIZATIONS else stored_weights
        # Products on several devices take other ways.
        is_faster = config.tensor_parallel_size in (None, 1) and weights in device.bfloat16_weights
        dtype = choices.choose("dtype", *_default_dtype(model, device, is_bfloat16_faster=is_faster))
        size = choices.choose("tensor_parallel_size", 1, "the default")
        quantization = _quantization(choices, stored_method, stored_form)
    else:
        dtype = choices.choose("dtype", None, "each array of the module keeps its dtype")
        size = choices.choose("tensor_parallel_size", module_size, "the module lies on these devices")
    dtype = DTYPE_ALIASES.get(dtype, dtype) if dtype else None
    if choices.choose("activation_dtype", dtype, "that of dtype") == "int8" and (device.platform != "cpu" or size > 1):
        raise ValueError(f"activation_dtype: int8 is for one CPU device, not for {size} of {device.platform}")
    choices.choose("kv_cache_dtype", dtype, "the dtype of the keys")
    limits = _limits(choices, model, device.platform)
    first = device.platform == "cpu" and size == 1
    choices.choose("warm_up", True, "the largest shape, then the others beside requests" if first else "the default")
    model = model.for_length(limits.max_model_len) if module_size is None else model
    return Resolved(config, model, device, limits, dtype, quantization, mesh_shape(model, size), tuple(choices.made))


def draft_model_config(resolved: Resolved) -> EngineConfig | None:
    """Return the config of the draft model beside a model; None if the settings name none."""
    config, limits = resolved.config, resolved.limits
    settings = Speculation.of(limits.speculative_config)
    if settings is None or settings.model is None:
        return None
    return EngineConfig(
        model=settings.model, revision=settings.revision, quantization=settings.quantization,
        load_format="dummy" if config.load_format == "dummy" else "auto", dtype=config.dtype,
        skip_tokenizer_init=config.skip_tokenizer_init, kv_cache_dtype=config.kv_cache_dtype, kernels=config.kernels,
        tensor_parallel_size=resolved.mesh.size, gpu_memory_utilization=config.gpu_memory_utilization, swap_space=0,
        block_size=limits.block_size, max_num_seqs=min(limits.max_num_seqs, limits.max_num_drafts),
        max_num_batched_tokens=limits.max_num_batched_tokens, async_scheduling=config.async_scheduling,
        warm_up=config.warm_up, preemption_mode="recompute", max_logprobs=0, generation_config="vllm",
    )  # fmt: skip


def check_num_blocks(limits: Limits, num_blocks: int, num_groups: int = 1) -> None:
    """Check that the KV pool has a block for each sequence in each group of layers.

    Raises:
        ValueError: it has fewer.
    """
    if limits.max_num_seqs * num_groups > num_blocks:
        least = "one" if num_groups == 1 else f"{num_groups}, one in each group of layers"
        raise ValueError(
            f"max_num_seqs: {limits.max_num_seqs} exceeds the {num_blocks} blocks of the KV pool, "
            f"and each sequence needs at least {least}"
        )


class _Choices:
    """Record of the choices for one config."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.made: list[SettingChoice] = []

    def choose[T](self, setting: str, default: T, reason: str) -> T:
        """Return the value that the config sets, else the default."""
        value: T = getattr(self.config, setting)
        value, reason = (default, reason) if value in (None, "auto") else (value, "set")
        self.made.append(SettingChoice(setting, value, reason))
        return value


def _default_dtype(model: ModelConfig, device: Device, *, is_bfloat16_faster: bool) -> tuple[str, str]:
    """Return the dtype of "auto", and the reason."""
    if device.platform == "cpu":
        size = model.num_hidden_layers * model.hidden_size * (
            2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
            + model.mlp_matrices * model.intermediate_size
        )  # fmt: skip
        if model.dtype == "bfloat16" and is_bfloat16_faster and 4 * size > CPU_CACHE_BYTES:
            return "bfloat16", "the dtype of the checkpoint; its products are faster here than those of float32"
        return "float32", "the fastest and most exact dtype on a CPU"
    if model.dtype == "float32":
        return "bfloat16", "the checkpoint has float32, and a GPU computes 16 bits faster"
    return model.dtype, "the dtype of the checkpoint"


def _quantization(choices: _Choices, stored_method: str | None, stored_form: str) -> str | None:
    """Return the method to apply while loading: None if the config names the method of the checkpoint."""
    method = choices.choose("quantization", stored_method, stored_form)
    if method in QUANTIZATIONS and choices.config.quantization:
        return method
    if method != stored_method:
        state = f"is quantized by {stored_method}" if stored_method else "is not quantized"
        raise ValueError(
            f"quantization: the checkpoint {state}, so it can be {stored_method or 'None'} or one of "
            f"{', '.join(QUANTIZATIONS)}, not {method!r}"
        )
    return None


def _limits(choices: _Choices, model: ModelConfig, platform: str) -> Limits:
    """Return the limits, with the errors of `resolve`."""
    config, defaults, choose = choices.config, platform_defaults(platform), choices.choose
    usual = f"the default on a {'CPU' if platform == 'cpu' else 'GPU'}"
    longest = model.context_length
    max_model_len = choose("max_model_len", longest, "the longest context of the model")
    if max_model_len > longest:
        scaled = "" if longest == model.max_position_embeddings else f" as {model.rope.type} rope_scaling extends them"
        raise ValueError(
            f"max_model_len: {max_model_len} exceeds the model's max_position_embeddings{scaled} ({longest})"
        )
    seqs, tokens = config.num_seqs(defaults.max_num_seqs), defaults.max_num_batched_tokens
    reason = "as many as max_num_batched_tokens" if seqs < defaults.max_num_seqs else usual
    seqs = choose("max_num_seqs", seqs, reason)
    reason = "as many as max_num_seqs" if seqs > tokens else usual
    tokens = choose("max_num_batched_tokens", max(tokens, seqs), reason)
    block_size, reason = BLOCK_SIZE, "the default"
    if platform == "cpu" and max_model_len >= CPU_LONG:
        block_size, reason = CPU_LONG_BLOCK_SIZE, "a CPU reads long contexts faster in large blocks"
    block_size = choose("block_size", block_size, reason)
    max_logprobs = model.vocab_size if config.max_logprobs == -1 else config.max_logprobs
    limits = Limits(max_model_len, seqs, tokens, block_size, max_logprobs, config.speculative_config, config.exact)
    if config.num_gpu_blocks_override is not None:
        check_num_blocks(limits, config.num_gpu_blocks_override)
    return limits

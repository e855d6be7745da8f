"""Configuration of the engine: frozen, plain values, dtypes as strings, no device library."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jpaged.kv_events import KVEvents
from jpaged.setting import check, documentation, setting

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = {
    "auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float16": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
QUANTIZATIONS = ("int8", "fp8", "int4")  # of the weights of linear layers
GGUF = "gguf"  # method of quantization of a file in GGUF
QUANTIZED_CHECKPOINTS = ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4")  # as config.json names their methods
KERNELS = ("auto", "reference", "mosaic", "triton", "cpu")
BLOCK_SIZE = 16
# A CPU reads long contexts a little faster in large blocks: behind 4,000 tokens, a float32 step of SmolLM2-135M takes
# 25.7 ms with blocks of 16 tokens, 24.8 with 32, and 23.9 with 64. Copies of larger blocks take much longer.
CPU_LONG_BLOCK_SIZE, CPU_LONG = 64, 2048


MAX_DRAFTS, MAX_MATCH = 32, 64  # drafts of a sequence in a step, and tokens that are compared to find them
DRAFTING_SEQS = 8  # a step has room for the drafts of so many sequences: more pay for padding, if they pay at all


class PlatformDefaults(NamedTuple):
    """Defaults that depend on the platform of the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_cost: float  # of a step with a chunk of a prompt, in decode steps, both on empty contexts


# A CPU computes 256 tokens about as efficiently as more, and decodes wait for a step with a prompt in it. It computes a
# prompt's tokens at about the same rate in any step: smaller chunks would delay first tokens by half, because each step
# with a chunk of a prompt also decodes.
CPU = PlatformDefaults(max_num_seqs=64, max_num_batched_tokens=256, max_chunk_cost=6)
# Chunks attend to a context many times. With contexts, inter-token latencies stay within three times their median.
GPU = PlatformDefaults(max_num_seqs=256, max_num_batched_tokens=2048, max_chunk_cost=2.5)


def platform_defaults(platform: str) -> PlatformDefaults:
    """Return the defaults on one of jax's platforms."""
    return CPU if platform == "cpu" else GPU


class DraftKey(NamedTuple):
    """Key of a `speculative_config`: the field of `Speculation` that it sets, and the values that it may have."""

    field: str
    whole: bool
    low: int
    high: int

    def check(self, name: str, value: Any) -> Any:
        """Return a value, None for the default.

        Raises:
            ValueError: the value is not one of the key.
        """
        is_number = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and self.low <= value <= self.high):
            number = "whole number" if self.whole else "number"
            raise ValueError(f"{name}: must be a {number} between {self.low} and {self.high}, not {value!r}")
        return value


class DraftName(NamedTuple):
    """Key of a `speculative_config` with a text."""

    field: str

    def check(self, name: str, value: Any) -> Any:
        """Return a value, None for the default.

        Raises:
            ValueError: the value is not a text.
        """
        if value is not None and not (isinstance(value, str) and value):
            raise ValueError(f"{name}: must be a text, not {value!r}")
        return value


# vLLM's methods, each with defaults and keys.
NUM_DRAFTS = {"num_speculative_tokens": DraftKey("num_tokens", True, 1, MAX_DRAFTS)}
DRAFT_MODEL = "draft_model"
DRAFT_METHODS: dict[str, tuple[dict[str, Any], Mapping[str, DraftKey | DraftName]]] = {
    "ngram": (
        {},
        NUM_DRAFTS
        | {
            "prompt_lookup_max": DraftKey("longest", True, 1, MAX_MATCH),
            "prompt_lookup_min": DraftKey("shortest", True, 1, MAX_MATCH),
        },
    ),
    "suffix": (
        {"num_tokens": 8, "longest": 24, "outputs": 10_000, "factor": 1.0, "least_share": 0.1},
        NUM_DRAFTS
        | {
            "suffix_decoding_max_tree_depth": DraftKey("longest", True, 1, MAX_MATCH),
            "suffix_decoding_max_cached_requests": DraftKey("outputs", True, 0, 10**9),
            "suffix_decoding_max_spec_factor": DraftKey("factor", False, 0, MAX_DRAFTS),
            "suffix_decoding_min_token_prob": DraftKey("least_share", False, 0, 1),
        },
    ),
    DRAFT_MODEL: (
        {},
        NUM_DRAFTS | {key: DraftName(key) for key in ("model", "revision", "quantization")},
    ),
}


@dataclass(frozen=True)
class Speculation:
    """Settings of drafts, tokens that are likely to come next.

    Attributes:
        num_tokens: maximum drafts of a sequence in a step.
        longest, shortest: the last tokens of a sequence are looked up among earlier ones; the place with the most
            equal tokens is taken. Fewer than `shortest` are no match, and more than `longest` are not compared.
        outputs: number of past outputs of the engine in which they are looked up too, in addition to the sequence.
        factor: maximum drafts for each equal token.
        least_share: a draft from past outputs is what follows in at least this share of the equal places.
        model: the draft model, named as in `EngineConfig`; None: drafts are looked up.
        revision, quantization: of the draft model, as in `EngineConfig`.
    """

    num_tokens: int = 4
    longest: int = 8
    shortest: int = 2
    outputs: int = 0
    factor: float = math.inf
    least_share: float = 0.0
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> "Speculation | None":
        """Return the settings of a `speculative_config`, None if there is none.

        Raises:
            ValueError: the config is invalid.
        """
        if config is None:
            return None
        name, method = "speculative_config", config.get("method", DRAFT_MODEL if "model" in config else "ngram")
        if method not in [*DRAFT_METHODS]:  # it may not be hashable
            raise ValueError(
                f"{name}.method: must be one of {', '.join(DRAFT_METHODS)}, not {method!r}: other sources of drafts "
                "are not supported"
            )
        defaults, keys = DRAFT_METHODS[method]
        if unknown := config.keys() - {"method", *keys}:
            raise ValueError(
                f"{name}: unknown {', '.join(sorted(unknown))} (allowed with the method {method}: {', '.join(keys)})"
            )
        given = {key.field: key.check(f"{name}.{each}", config[each]) for each, key in keys.items() if each in config}
        given = {field: value for field, value in given.items() if value is not None}
        if "longest" in given:
            given.setdefault("shortest", min(cls.shortest, given["longest"]))
        made = cls(**defaults | given)
        if method == DRAFT_MODEL and made.model is None:
            raise ValueError(f"{name}.model: must name the draft model")
        if made.shortest > made.longest:
            raise ValueError(
                f"{name}.prompt_lookup_min: must be at most prompt_lookup_max ({made.longest}), not {made.shortest}"
            )
        return made


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of a sequence, a step, a KV block and a list of logprobs, after all None are resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = BLOCK_SIZE
    max_logprobs: int = 20
    speculative_config: Mapping[str, Any] | None = None  # as in `EngineConfig`
    exact: bool = False  # as in `EngineConfig`

    @property
    def max_num_drafts(self) -> int:
        """Maximum drafts of a step."""
        drafts = Speculation.of(self.speculative_config)
        return drafts.num_tokens * min(self.max_num_seqs, DRAFTING_SEQS) if drafts else 0

    @property
    def max_num_decodes(self) -> int:
        """Maximum decode tokens of a step: one of each sequence, and the drafts that its budget has room for."""
        return max(self.max_num_seqs, min(self.max_num_seqs + self.max_num_drafts, self.max_num_batched_tokens))

    @property
    def blocks_per_seq(self) -> int:
        """Maximum KV blocks of a sequence in a group of layers."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_tokens_in_flight(self) -> int:
        """Maximum tokens of the steps in flight: one is planned while another one runs."""
        return 2 * self.max_num_batched_tokens


_model, _adapters, _memory, _scheduling = (
    partial(setting, group=group) for group in ("model", "adapters", "memory", "scheduling")
)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. None means that the model and the device decide when the engine is built."""

    model: str = _model("demo", "a directory, a file in GGUF, a Hugging Face hub id, or demo", unit="MODEL")
    revision: str | None = _model(None, "branch, tag or commit of a hub id", by="main", unit="NAME")
    tokenizer: str | None = _model(None, "directory or hub id of a tokenizer", by="the model's", unit="MODEL")
    skip_tokenizer_init: bool = _model(False, "load no tokenizer; requests and responses then hold token ids")
    load_format: str = _model(
        "auto", "format of the checkpoint; dummy: random weights", choices=("auto", "safetensors", "orbax", "dummy")
    )
    dtype: str = _model(
        "auto", "dtype of parameters and activations; auto: the checkpoint's, but bfloat16 for float32 on a GPU, and "
        "float32 on a CPU where that is faster", choices=("auto", *DTYPES, *DTYPE_ALIASES),
    )  # fmt: skip
    hf_overrides: Mapping[str, Any] | None = _model(
        None, "fields that replace those of the model's config.json", by="none", unit="JSON"
    )
    generation_config: str = _model(
        "auto", "source of default sampling parameters; auto: the model's files; vllm: the API",
        choices=("auto", "vllm"),
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] | None = _model(
        None, "default sampling parameters in place of those of generation_config", by="none", unit="JSON"
    )
    quantization: str | None = _model(
        None, "int8, fp8, int4: weights of linear layers in 8 or 4 bits, quantized while they are loaded; other "
        "methods are accepted for checkpoints that are quantized so, which need no setting", by="as in the checkpoint",
        choices=tuple(dict.fromkeys((*QUANTIZATIONS, *QUANTIZED_CHECKPOINTS, GGUF))),
    )  # fmt: skip
    activation_dtype: str = _model(
        "auto", "dtype of rows that are multiplied by weights of 8 and 4 bits in groups; auto: that of dtype; int8, on "
        "a CPU, rounds them, which takes less time", choices=("auto", "int8"),
    )  # fmt: skip
    kv_cache_dtype: str = _model(
        "auto", "dtype of the KV pool; auto: that of the keys; fp8 holds twice as many tokens as 16 bits, less "
        "exactly; 16 bits of float32 keys need a CPU",
        choices=tuple(KV_CACHE_DTYPES),
    )  # fmt: skip
    logprobs_mode: str = _model(
        "raw_logprobs", "logprobs of samples: the model's own, or those after masks, penalties, temperature and "
        "filters", choices=("raw_logprobs", "processed_logprobs"),
    )  # fmt: skip
    max_model_len: int | None = _model(
        None, "maximum tokens of a sequence, prompt and output", by="the model's", low=2, unit="TOKENS"
    )
    seed: int = _model(0, "seed of requests without a seed, and of dummy weights", unit="SEED")
    tensor_parallel_size: int | None = _model(
        None, "number of devices that share the model, its heads and the KV pool", by="1; for a module, the number of "
        "its devices", low=1, unit="DEVICES",
    )  # fmt: skip
    kernels: str = _model(
        "auto", "attention kernels; auto: the fastest that the device and the model allow", choices=KERNELS
    )

    enable_lora: bool = _adapters(False, "keep slots for low-rank adapters (LoRA), which requests choose by name")
    max_loras: int = _adapters(8, "slots: adapters of running requests; others wait on the host", low=1, unit="SLOTS")
    max_lora_rank: int = _adapters(16, "largest rank of an adapter", low=1, high=512, unit="RANK")
    lora_dtype: str = _adapters(
        "auto", "dtype of adapters in their slots; auto: that of activations", choices=("auto", *DTYPES)
    )
    lora_modules: Mapping[str, Any] | None = _adapters(
        None, 'adapters that are loaded at the start, as PEFT saves them: {"name": "directory"}', by="none", unit="JSON"
    )

    gpu_memory_utilization: float = _memory(
        0.92, "share of jax's memory on the device (XLA_PYTHON_CLIENT_MEM_FRACTION) for parameters, KV pool and "
        "temporaries", above=0, high=1, unit="SHARE",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = _memory(
        None, "number of KV blocks, instead of measuring memory", low=1, unit="BLOCKS"
    )
    kv_cache_memory_bytes: int | None = _memory(
        None, "bytes of the KV pool on each device, such as 1G, instead of measuring memory", low=1, unit="BYTES"
    )
    block_size: int | None = _memory(
        None, "tokens of a KV block", by=f"{BLOCK_SIZE}; {CPU_LONG_BLOCK_SIZE} on a CPU for sequences of {CPU_LONG:,} "
        "tokens and more", low=1, high=256, power_of_two=True, unit="TOKENS",
    )  # fmt: skip
    enable_prefix_caching: bool = _memory(True, "reuse the KV blocks of prompts with a common prefix")
    pinned_share: float = _memory(
        0.5, "maximum share of the KV pool for the prefixes that the requests of each API key have pinned (pin_s, "
        "prompt_cache_key, cache_control)", low=0, high=1,
    )  # fmt: skip
    kv_cache_dir: str | None = _memory(
        None, "folder for evicted blocks of the prefix cache, which further starts find; only this user may read it",
        unit="DIR",
    )  # fmt: skip
    kv_cache_dir_size: float = _memory(16.0, "maximum size of the files in kv_cache_dir, in GiB", low=0, unit="GIB")
    kv_events_config: Mapping[str, Any] | None = _memory(
        None, "tell the changes of the prefix cache, with the tokens of prompts, to routers on ZeroMQ sockets: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}', by="none",
        unit="JSON",
    )  # fmt: skip
    swap_space: float = _memory(
        4.0, "host memory for KV blocks of preempted requests and evicted ones of the prefix cache, in GiB; at most "
        "half of the free memory is used", low=0, unit="GIB",
    )  # fmt: skip

    max_num_seqs: int | None = _scheduling(
        None, "maximum sequences in a step", by=f"{CPU.max_num_seqs} on a CPU, {GPU.max_num_seqs} on a GPU", low=1,
        unit="SEQS",
    )  # fmt: skip
    max_num_batched_tokens: int | None = _scheduling(
        None, "maximum tokens in a step; longer prompts are computed in chunks",
        by=f"{CPU.max_num_batched_tokens} on a CPU, {GPU.max_num_batched_tokens:,} on a GPU; fewer in steps with "
        f"decodes if a step of that size takes more than {GPU.max_chunk_cost:g} decode steps "
        f"({CPU.max_chunk_cost:g} on a CPU)", low=1, unit="TOKENS",
    )  # fmt: skip
    warm_up: bool | None = _scheduling(
        None, "compile every shape of a step before the first request; otherwise each one when it is first needed, for "
        "short starts while a program is debugged", by="every shape; on a CPU whose kernels skip padding the largest "
        "one, and the others beside the first requests",
    )  # fmt: skip
    max_logprobs: int = _scheduling(
        Limits.max_logprobs, "maximum logprobs and prompt_logprobs of a request; -1: the whole vocabulary. Every step "
        "has room for so many for each sample", low=-1, unit="TOKENS",
    )  # fmt: skip
    exact: bool = _scheduling(
        False, "compute tokens of outputs one by one also after a preemption by recompute, and keep none of them in "
        "the prefix cache, so that neither changes a bit of an output"
    )  # fmt: skip
    speculative_config: Mapping[str, Any] | None = _scheduling(
        None, "draft tokens from a sequence's own text and its grammar, with the method suffix from past outputs, with "
        "a model from a draft model, and compute several in a step; outputs stay the same: "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 8, "prompt_lookup_min": 2}',
        by="none", unit="JSON",
    )  # fmt: skip
    async_scheduling: bool = _scheduling(True, "dispatch a step before the tokens of the previous one are known")
    scheduling_policy: str = _scheduling(
        "fcfs", "order of waiting requests; priority: lower priorities first", choices=("fcfs", "priority")
    )
    preemption_mode: str = _scheduling(
        "auto", "treatment of a preempted request's KV blocks: compute them again, or swap them to the host; auto: the "
        "cheaper one by the measured speed of the device", choices=("auto", "recompute", "swap"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.skip_tokenizer_init and self.tokenizer:
            raise ValueError(f"skip_tokenizer_init: can't be combined with tokenizer ({self.tokenizer!r})")
        Speculation.of(self.speculative_config)
        if self.kv_events_config and KVEvents.of(self.kv_events_config) and not self.enable_prefix_caching:
            raise ValueError("kv_events_config: needs enable_prefix_caching")
        if self.kv_cache_dir and not (self.enable_prefix_caching and self.swap_space):
            raise ValueError("kv_cache_dir: needs enable_prefix_caching and swap_space, through which blocks return")
        if self.kv_cache_memory_bytes and self.num_gpu_blocks_override:
            raise ValueError("kv_cache_memory_bytes: can't be combined with num_gpu_blocks_override")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: must be at least max_num_seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}"
            )

    def num_seqs(self, default: int) -> int:
        """Return `max_num_seqs`, or a default that `max_num_batched_tokens` may lower."""
        return self.max_num_seqs or min(default, self.max_num_batched_tokens or default)

    def pool_dtype(self, dtype: str) -> str:
        """Return the dtype of the KV pool for parameters of `dtype`."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or dtype


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n{documentation(EngineConfig)}"

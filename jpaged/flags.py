"""Flags of vLLM and SGLang, and the keywords of vLLM's `LLM`: their effect in jpaged.

Each flag that jpaged does not have under the same name is in one of three classes: it sets a flag of jpaged, it is not
needed (a notice says why), or it is not supported (an error says why). The table holds the flags of vLLM 0.11 to 0.33
(vllm/engine/arg_utils.py, vllm/entrypoints/common/cli_args.py) and SGLang 0.5.23 (sglang/srt/arg_groups/fields).
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.setting import kind, merged, settings

OFF = frozenset({"", "0", "false", "none", "null", "{}", "[]"})  # values that leave a feature unused
ANY: frozenset[str] | None = None
ON = frozenset({"true"})


@dataclass(frozen=True)
class Flag:
    """Flags with the same effect.

    Attributes:
        names: the flags; one with `*` is a pattern.
        ours: flag of jpaged that they set; None: they set none.
        convert: conversion of a value for `ours`; a mapping leaves other values as they are.
        harmless: values without an effect; None: all.
        reason: why these have no effect.
        refusal: the error for other values.
        nargs: number of values on the command line, as in argparse; 0: a switch.
    """

    names: tuple[str, ...]
    ours: str | None = None
    convert: Mapping[str, Any] | Callable[[Any], Any] | None = None
    harmless: frozenset[str] | None = frozenset()
    reason: str = ""
    refusal: str = ""
    nargs: int | str = 0

    def converted(self, value: Any) -> Any:
        """Return a value as `ours` takes it. Raises ValueError if it is not supported."""
        if isinstance(self.convert, Mapping):
            if self.refusal and as_text(value) not in self.convert:
                raise ValueError(self.refusal)
            return self.convert.get(as_text(value), value)
        return self.convert(parsed(value)) if self.convert else value


class Effect(NamedTuple):
    """Effect of a flag with a value: it sets `ours` to `value`; if that is None, `notice` says why it has none."""

    ours: str | None
    value: Any
    notice: str


def applied(
    names: str, ours: str, convert: Mapping[str, Any] | Callable[[Any], Any] | None = None, *, refusal: str = "",
    nargs: int | str = 1,
) -> Flag:  # fmt: skip
    """Return flags that set `ours`. With a refusal, `convert` is a mapping with all possible values."""
    return Flag(tuple(names.split()), ours, convert, refusal=refusal, nargs=nargs)


def needless(
    names: str, reason: str, harmless: Iterable[str] | None = ANY, refusal: str = "", nargs: int | str = 0
) -> Flag:
    """Return flags of which the harmless values have no effect, and the others are refused."""
    values = None if harmless is None else frozenset(harmless)
    return Flag(tuple(names.split()), harmless=values, reason=reason, refusal=refusal or reason, nargs=nargs)


def unsupported(names: str, refusal: str, *harmless: str) -> Flag:
    """Return flags that are refused, except for values that leave the feature unused."""
    return Flag(tuple(names.split()), harmless=OFF | {*harmless}, reason="the default", refusal=refusal, nargs="?")


ALWAYS_ON = "not needed, always on"
COMPILED = "not needed, every shape is compiled before the server is ready"
KERNELS = "not needed, jpaged selects its own kernels; see --kernels"
COLLECTIVES = "not needed, XLA selects the collective operations"
FILES = "not needed, safetensors are read in slices"
TEXT_ONLY = "not needed, only text models are served"
ONE_PROCESS = "not needed, one process serves all requests"
ALLOCATION = "not needed, blocks are allocated as tokens need them"
NO_MEDIA = "only text inputs are supported"
NO_EXPERT_PARALLELISM = "expert parallelism is not supported: use --tensor-parallel-size"
NO_TRANSFER = "transfer of KV blocks between servers is not supported"
NO_TIERS = "the prefix cache has no further tiers: --swap-space holds the KV blocks of preempted requests"
NO_OFFLOADING = "weights can't be offloaded to the host: use --quantization or --tensor-parallel-size"
NO_PLUGINS = "code of other packages is not loaded"
ATTENTION_ONLY = "only models with attention in every layer are supported"
OTHER_PARALLELISM = "not supported: use --tensor-parallel-size, --data-parallel-size or --nnodes"
NOT_LOGGED = "prompts and outputs are never logged: see --access-log"
REASONING = "reasoning stays in the content of the answer"
FIXED_LIMITS = "the limits of the HTTP library are fixed: use a proxy"
ENVIRONMENT = "set {} in the environment instead"
MARLIN = {"awq_marlin": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq"}
LOG_LEVELS = {name: name.lower() for name in ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")}
STREAMED = {name: "safetensors" for name in ("fastsafetensors", "runai_streamer", "instanttensor")}

FLAGS = (
    applied("--model-path", "--model"),
    applied("--tokenizer-path", "--tokenizer"),
    applied("--context-length", "--max-model-len", {"-1": "auto"}),
    applied("--max-model-len", "--max-model-len", {"-1": "auto"}),
    applied("--load-format", "--load-format", STREAMED),
    applied("--quantization -q", "--quantization", MARLIN),
    applied("--random-seed", "--seed"),
    applied("--sampling-defaults", "--generation-config", {"openai": "vllm", "model": "auto"}),
    applied("--json-model-override-args", "--hf-overrides"),
    applied("--rope-scaling", "--hf-overrides", lambda value: {"rope_scaling": value}),
    applied("--rope-theta", "--hf-overrides", lambda value: {"rope_theta": value}),
    applied("--tp-size --tp -tp", "--tensor-parallel-size"),
    applied("--dp-size --dp -dp", "--data-parallel-size"),
    applied("-n", "--nnodes"),
    applied("-r", "--node-rank"),
    applied("--nccl-init-addr", "--dist-init-addr"),
    applied("--device-memory-utilization --mem-fraction-static --mem-fraction", "--gpu-memory-utilization"),
    applied("--page-size", "--block-size"),
    applied("--disable-radix-cache", "--enable-prefix-caching", lambda value: not value, nargs=0),
    applied("--max-running-requests", "--max-num-seqs"),
    applied("--chunked-prefill-size", "--max-num-batched-tokens"),
    applied("--disable-overlap-schedule", "--async-scheduling", lambda value: not value, nargs=0),
    applied("--max-queued-requests", "--max-queue"),
    applied("--shutdown-timeout", "--drain-timeout"),
    applied("--fastapi-root-path", "--root-path"),
    applied("--log-level", "--log-level", LOG_LEVELS),
    applied("--disable-uvicorn-access-log", "--access-log", {"true": "none", "false": "-"}, nargs=0),
    applied(
        "--tool-call-parser",
        "--tool-call-parser", {"qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json"},
    ),

    # Always on.
    needless(
        "--enable-auto-tool-choice --enable-prompt-tokens-details --enable-request-id-headers --enable-metrics "
        "--enable-cache-report --enable-mixed-chunk --allow-deprecated-quantization",
        ALWAYS_ON, ON, "can't be switched off",
    ),
    needless("--enable-chunked-prefill", ALWAYS_ON, ON, "long prompts are always computed in chunks"),
    needless(
        "--enable-sleep-mode --enable-memory-saver --enable-cumem-allocator",
        "not needed, LLM.sleep is always there; for /sleep see --enable-weight-updates",
    ),
    needless("--enable-tokenizer-info-endpoint --enable-server-load-tracking", ALWAYS_ON),
    # Nothing to choose: compilation, kernels, collectives, files, memory.
    needless(
        "--enforce-eager --disable-cuda-graph --disable-cuda-graph-padding --disable-*-cuda-graph "
        "--enable-torch-compile --enable-torch-compile-debug-mode --enable-profile-cuda-graph --debug-cuda-graph "
        "--cudagraph-metrics --enable-cudagraph-gc --skip-server-warmup --jit-monitor-verbose",
        COMPILED,
    ),
    needless(
        "--compilation-config -cc -O --optimization-level --max-seq-len-to-capture --max-cudagraph-capture-size "
        "--cuda-graph-max-* --cuda-graph-backend-* --cuda-graph-config --cuda-graph-prefill-max-context "
        "--context-bucket --torch-compile-max-bs --jit-monitor-mode --warmups",
        COMPILED, nargs=1,
    ),
    needless("--cudagraph-capture-sizes --cuda-graph-sizes --cuda-graph-bs-*", COMPILED, nargs="+"),
    needless(
        "--attention-backend --decode-attention-backend --prefill-attention-backend --mm-attention-backend "
        "--mm-encoder-attn-backend --dsv4-* --attention-config -ac --linear-attn-* --moe-backend --moe-runner-backend "
        "--linear-backend --kernel-config --ir-op-priority --*-gemm-backend --dsa-*-backend --dsa-triton-union "
        "--sampling-backend --mamba-backend --gdn-prefill-backend --kda-*-backend --sparse-indexer-topk-backend "
        "--triton-attention-* --mamba-ssu-algorithm --flashinfer-autotune-skip-ops --flashinfer-mxfp4-moe-precision",
        KERNELS, nargs=1,
    ),
    needless(
        "--enable-flashinfer-autotune --disable-flashinfer-* --disable-cascade-attn --monokernel "
        "--enable-*-monokernel --monokernel-backend --enable-nvidia-megakernel --enable-fused-* "
        "--enable-lean-attention --flashinfer-mla-disable-ragged --disable-chunked-prefix-cache "
        "--*-shared-experts-fusion --enable-dsa-fused-indexer",
        KERNELS,
    ),
    needless(
        "--disable-custom-all-reduce --disable-nccl-for-dp-synchronization --enable-nccl-nvls --enable-symm-mem "
        "--enable-torch-symm-mem --enable-mscclpp --enable-p2p-check --pre-warm-nccl --enforce-disable-flashinfer-* "
        "--enable-*-allreduce-fusion --disable-*-allreduce-fusion* --enable-quant-communications",
        COLLECTIVES,
    ),
    needless(
        "--boundary-reduction --flashinfer-allreduce-fusion-backend --nccl-port --all2all-backend --moe-a2a-backend",
        COLLECTIVES, nargs=1,
    ),
    needless(
        "--safetensors-* --pt-load-map-location --max-parallel-loading-workers --weight-loader-prefetch-num-threads",
        FILES, nargs=1,
    ),
    needless(
        "--weight-loader-disable-mmap --weight-loader-prefetch-checkpoints --weight-loader-drop-cache-after-load",
        FILES,
    ),
    needless("--scheduler-reserve-full-isl --disable-hybrid-kv-cache-manager --disable-hybrid-swa-memory", ALLOCATION),
    needless("--num-reserved-decode-tokens --schedule-conservativeness --prefix-match-unit", ALLOCATION, nargs=1),
    needless("--prefix-caching-hash-algo", "not needed, prefixes are compared by their tokens", nargs=1),
    needless(
        "--guided-decoding-backend --grammar-backend --structured-outputs-config.backend",
        "not needed, llguidance compiles all structured outputs", nargs=1,
    ),
    needless(
        "--disable-outlines-disk-cache --structured-outputs-config.disable_fallback "
        "--guided-decoding-disable-fallback",
        "not needed, llguidance compiles all structured outputs",
    ),
    needless("--use-tqdm-on-load", "not needed, progress is shown on a terminal; LLM has the argument progress"),
    needless("--ignore-patterns", "not needed, only config, tokenizer and safetensors are downloaded", nargs=1),
    needless("--trust-remote-code", "not needed, no model brings code of its own"),
    needless("--code-revision", "not needed, no model brings code of its own", nargs=1),
    needless("--fail-on-environ-validation", "not needed, variables of vLLM are not read"),
    # Nothing to configure: logs, processes, text models.
    needless("--disable-log-requests", "not needed, prompts are never logged"),
    needless(
        "--disable-log-stats --aggregate-engine-logging --enable-logging-iteration-details --show-time-cost",
        "not needed, statistics are at /metrics and in no log",
    ),
    needless(
        "--decode-log-interval --show-hidden-metrics-for-version --kv-cache-metrics-sample "
        "--gc-warning-threshold-secs",
        "not needed, statistics are at /metrics and in no log", nargs=1,
    ),
    needless("--uvicorn-log-level --log-level-http", "not needed, see --log-level and --access-log", nargs=1),
    needless(
        "--max-log-len --log-requests-level --log-requests-format",
        "not needed, prompts are never logged", nargs=1,
    ),
    needless("--log-error-stack", "not needed, the log has the stack of every internal error"),
    needless("--enable-log-deltas", "not needed, outputs are never logged"),
    needless(
        "--disable-frontend-multiprocessing --enable-dynamic-batch-tokenizer --enable-tokenizer-batch-encode "
        "--disable-tokenizer-batch-decode --enable-http-worker-reuseport --enable-shm-tensor-arena",
        ONE_PROCESS,
    ),
    needless(
        "--api-server-count -asc --renderer-num-workers --tokenizer-worker-num --detokenizer-worker-num "
        "--dynamic-batch-tokenizer-* --batch-notify-size --scheduler-recv-interval --load-snapshot-publish-interval",
        ONE_PROCESS, nargs=1,
    ),
    needless(
        "--watchdog-timeout --soft-watchdog-timeout --watchdog-config",
        "not needed, no watchdog ends the server", nargs=1,
    ),
    needless(
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds --dist-timeout --data-parallel-backend "
        "--load-balance-method",
        "not needed, jpaged has its own processes", nargs=1,
    ),
    needless("--gc-threshold", "not needed, the server sets the thresholds of the garbage collector", nargs="+"),
    needless(
        "--language-model-only --skip-mm-profiling --interleave-mm-strings --disable-chunked-mm-input "
        "--disable-mm-preprocessor-cache --disable-fast-image-processor --mm-device-do-normalize "
        "--enable-mm-processor-stats --enable-mm-global-cache --enable-prefix-mm-cache --keep-mm-feature-on-device "
        "--enable-broadcast-mm-inputs-process --mm-enable-dp-encoder --enable-multimodal-encoder-data-parallel "
        "--enable-tower-connector-lora --trust-mm-content-hashes --enable-precise-embedding-interpolation "
        "--cohere-is-reasoning-model --enable-flash-late-interaction",
        TEXT_ONLY,
    ),
    needless(
        "--mm-encoder-tp-mode --mm-encoder-attn-dtype --mm-encoder-fp8-* --mm-processor-* --mm-hasher-algorithm "
        "--mm-shm-cache-max-object-size-mb --mm-tensor-ipc --mm-ipc-gpu-memory-gb --mm-*-size-mb "
        "--mm-feature-transport --mm-io-worker-num --mm-process-config --mm-global-cache-backend "
        "--image-processor-backend --media-url-max-file-size-mb --video-pruning-* --media-io-kwargs --asr-* "
        "--cohere-format",
        TEXT_ONLY, nargs=1,
    ),

    # Only some values.
    unsupported(
        "--pipeline-parallel-size -pp --pp-size --pp",
        "pipeline parallelism is not supported: use --tensor-parallel-size", "1",
    ),
    unsupported("--data-parallel-size", "an LLM is one engine: jpaged serve has --data-parallel-size", "1"),
    unsupported("--nnodes", "an LLM is one process: jpaged serve has --nnodes", "1"),
    needless(
        "--distributed-executor-backend",
        ONE_PROCESS,
        ("mp", "uni", "external_launcher"),
        "only mp and uni: jpaged serve has --ray, and --nnodes for several hosts",
        nargs=1,
    ),
    needless(
        "--tokenizer-mode",
        "the default",
        ("auto", "hf", "fast"),
        "only the fast tokenizers of Hugging Face are supported: name another one with --tokenizer",
        nargs=1,
    ),
    needless("--tokenizer-backend", "the default", ("huggingface",), "only Hugging Face's is supported", nargs=1),
    needless(
        "--config-format --model-config-parser",
        "the default", ("auto", "hf"), "only Hugging Face's config.json is supported", nargs=1,
    ),
    needless("--model-impl", "the default", ("auto", "vllm", "sglang"), "jpaged has its own models", nargs=1),
    needless(
        "--runner --task --convert",
        "the default", ("auto", "generate", "none"), "only generation is supported", nargs=1,
    ),
    needless(
        "--device",
        "the default", ("auto",), "JAX selects the device: set JAX_PLATFORMS in the environment", nargs=1,
    ),
    needless("--response-role", "the default", ("assistant",), "answers have the role assistant", nargs=1),
    needless("--stream-interval", "the default", ("1",), "each token is sent as soon as it is sampled", nargs=1),
    needless(
        "--performance-mode",
        "the default", ("balanced",), "set --max-num-seqs and --max-num-batched-tokens", nargs=1,
    ),
    needless("--schedule-policy", "the default", ("fcfs",), "use --scheduling-policy fcfs or priority", nargs=1),
    needless(
        "--radix-eviction-policy",
        "the default", ("lru",), "the least recently used blocks are evicted", nargs=1,
    ),
    needless(
        "--retraction-policy",
        "the default", ("length",), "see --preemption-mode and --scheduling-policy", nargs=1,
    ),
    needless(
        "--allowed-methods --allowed-headers",
        "the default", ("*", '["*"]'), "all methods and headers of the API are allowed; see --allowed-origins", nargs=1,
    ),
    needless(
        "--ssl-cert-reqs",
        "the default", ("0",), "use --ssl-ca-certs, which requires client certificates", nargs=1,
    ),
    needless("--fingerprint-mode", "the default", ("none",), "responses have no fingerprint of the server", nargs=1),
    unsupported("--lora-dtype", "LoRA adapters are not supported", "auto"),
    unsupported(
        "--num-continuous-decode-steps --max-num-partial-prefills --max-long-partial-prefills "
        "--prefill-schedule-interval --long-prefill-token-threshold --long-prefill-token-threshold-adaptive "
        "--prefill-max-requests --prefill-decode-interval --prefill-decode-interval-min-bs --enable-prefill-delayer "
        "--prefill-delayer-* --min-free-slots-delay --enable-dynamic-chunking",
        "the engine sizes chunks of prompts by the measured time of steps: see --max-num-batched-tokens", "1",
    ),

    # Other names or other means.
    unsupported("--download-dir", ENVIRONMENT.format("HF_HUB_CACHE")),
    unsupported("--hf-token", ENVIRONMENT.format("HF_TOKEN")),
    unsupported("--device-ids --base-gpu-id --gpu-id-step", ENVIRONMENT.format("CUDA_VISIBLE_DEVICES")),
    unsupported("--numa-* --sleep-on-idle", "use numactl"),
    unsupported(
        "--tokenizer-revision",
        "the tokenizer has the revision of the model: name a directory with --tokenizer",
    ),
    unsupported(
        "--hf-config-path --decrypted-* --model-weights",
        "config and weights are in one directory: use --hf-overrides",
    ),
    unsupported(
        "--quantization-config --quantization-param-path --quantize-and-serve --modelopt-* --rl-quant-profile",
        "use --quantization",
    ),
    unsupported("--use-ray", "use jpaged serve --ray"),
    unsupported("--headless", "use jpaged worker on the other hosts"),
    unsupported(
        "--master-addr --master-port --data-parallel-address -dpa --data-parallel-rpc-port -dpp",
        "use --dist-init-addr HOST:PORT",
    ),
    unsupported(
        "--max-num-queued-reqs --max-num-queued-tokens --max-num-active-seqs",
        "use --max-queue, which counts waiting requests",
    ),
    unsupported("--max-num-scheduled-tokens --max-prefill-tokens", "use --max-num-batched-tokens"),
    unsupported("--max-total-tokens", "use --kv-cache-memory-bytes or --num-gpu-blocks-override"),
    unsupported(
        "--enable-priority-scheduling --schedule-low-priority-values-first --disable-priority-preemption "
        "--default-priority-value --abort-on-priority-when-disabled --priority-scheduling-preemption-threshold",
        "use --scheduling-policy priority, in which lower values run first",
    ),
    unsupported("--disable-sliding-window", "windows are part of the model: use --max-model-len"),
    unsupported("--allow-auto-truncate", "send truncate_prompt_tokens in requests"),
    unsupported(
        "--return-tokens-as-token-ids --return-input-ids --return-output-ids",
        "send return_token_ids or return_tokens_as_token_ids in requests",
    ),
    unsupported(
        "--enable-force-include-usage --stream-response-default-include-usage",
        "send stream_options.include_usage in requests",
    ),
    unsupported("--exclude-tools-when-tool-choice-none", "leave tools out of requests"),
    unsupported(
        "--weight-transfer-config --custom-weight-loader --remote-instance-* --modelexpress-config "
        "--checkpoint-engine-* --startup-weight-load-mode --weight-cache-* --engine-info-bootstrap-port "
        "--weight-version --delete-ckpt-after-loading --model-checksum --model-loader-extra-config",
        "weights come from files; running servers take others with --enable-weight-updates", "off", "default",
    ),
    unsupported("--admin-api-key", "use --api-key or --api-key-file"),
    unsupported("--ssl-keyfile-password --ssl-ciphers --enable-ssl-refresh", "not supported: use a proxy"),
    unsupported("--allow-credentials", "clients send their key in the header Authorization"),
    unsupported("--h11-* --enable-http2 --http2-*", FIXED_LIMITS),
    unsupported("--disable-fastapi-docs --enable-offline-docs", "only /openapi.json describes the API"),
    unsupported(
        "--disable-access-log-for-endpoints --uvicorn-access-log-exclude-prefixes",
        "use --access-log FILE or none",
    ),
    unsupported("--log-config-file --logging-config --crash-dump-folder", "see --log-level and --access-log"),
    unsupported(
        "--enable-log-requests --log-requests --log-requests-target --enable-log-outputs "
        "--enable-request-time-stats-logging",
        NOT_LOGGED,
    ),

    # Missing features.
    unsupported(
        "--enable-lora --enable-lora-* --lora-* --max-lora* --max-cpu-loras --max-loaded-loras --default-mm-loras "
        "--fully-sharded-loras --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
        "--experts-shared-outer-loras --uno-lora-path",
        "LoRA adapters are not supported: merge them into the checkpoint",
    ),
    unsupported(
        "--speculative-* -sc --spec-* --decoupled-spec-* --num-lookahead-slots --enable-multi-layer-eagle "
        "--num-speculative-tokens --per-request-spec-decode-metrics",
        "speculative decoding is not supported",
    ),
    unsupported(
        "--reasoning-parser --reasoning-parser-plugin --reasoning-config --enable-reasoning --reasoning-effort-map "
        "--strip-thinking-cache --enable-strict-thinking --anthropic-disabled-thinking-effort "
        "--structured-outputs-config.reasoning_parser",
        REASONING, "auto",
    ),
    unsupported(
        "--structured-outputs-config --guided-decoding-disable-* --constrained-json-* --tool-strict-level",
        "send the options of structured_outputs in requests",
    ),
    unsupported(
        "--enable-expert-parallel -ep --ep --ep-* --expert-* --enable-eplb --eplb-* --num-redundant-experts "
        "--enable-dbo --dbo-* --ubatch-size --deepep-* --fuseep-mode --enable-elastic-* --elastic-ep-* --max-ep-size "
        "--moe-data-parallel-size --moe-dp-size --moe-dense-tp-size --init-expert-location --enable-two-batch-overlap "
        "--enable-single-batch-overlap --tbo-* --enable-waterfill --enable-ep-weight-filter --enable-*-megamoe "
        "--enable-megamoe-* --flashinfer-a2a-* --mooncake-ib-device",
        NO_EXPERT_PARALLELISM, "1",
    ),
    unsupported(
        "--data-parallel-* -dpn -dpr -dpl -dpb -dph -dpe -dpm --dp-* --prefill-context-parallel-size -pcp "
        "--decode-context-parallel-size -dcp --dcp-* --cp-* --attention-*-parallel-size --attn-*-size --dwdp-size "
        "--pp-* --enable-dp-* --enable-prefill-cp --enable-batch-sharded-sampling --enable-hc-sp "
        "--enable-layernorm-sp --enable-*-attn-tp --enable-attn-tp-* --disable-attn-tp-gather "
        "--enable-tp-lm-head-all-to-all --enable-scattered-sconv --shared-experts-tp-size --enable-kv-cache-sharding "
        "--enable-dsa-cache-layer-split --gated-launch-port",
        OTHER_PARALLELISM, "1",
    ),
    unsupported(
        "--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config --disaggregation-* "
        "--encoder-* --language-only --enable-pd* --pdmux-* --sm-group-num --optimistic-prefill-attempts "
        "--enable-adaptive-dispatch-to-encoder --enable-scale-out --tokens-only",
        NO_TRANSFER,
    ),
    unsupported(
        "--kv-offloading-* --enable-hierarchical-cache --enable-hicache --hicache-* --enable-lmcache "
        "--lmcache-config-file --enable-flexkv --flexkv-config-file --enable-unified-* --unified-cache-* "
        "--enable-linker-mla-dedup --radix-cache-backend --radix-eviction-policy-config --enable-session-radix-cache "
        "--enable-streaming-session --prefix-cache-retention-interval --enable-page-major-kv-layout",
        NO_TIERS,
    ),
    unsupported(
        "--cpu-offload-* --offload-* --ple-offload-* --kt-* --enable-paged-experts --paged-experts-num-resident",
        NO_OFFLOADING, "-1", "1", "auto",
    ),
    unsupported(
        "--mamba-* --*-mamba-* --max-mamba-cache-size --replayssm-* --use-replayssm --enable-linear-replayssm* "
        "--linear-replayssm-cache-len --swa-* --enable-*-swa-* --engram-config --kv-sharing-fast-prefill "
        "--enable-hisparse --hisparse-config --hierarchical-sparse-* --c128-page-size --enable-deepseek-v4-* --qsa-*",
        ATTENTION_ONLY, "auto",
    ),
    unsupported("--diffusion-config -dc --dllm-*", "diffusion models are not supported"),
    unsupported(
        "--limit-mm-per-prompt --limit-mm-per-prompt.* --limit-mm-data-per-request --mm-encoder-only "
        "--enable-mm-embeds --enable-prompt-embeds --allowed-local-media-path --allowed-media-domains "
        "--trust-request-mm-kwargs --enable-multimodal --enable-mis",
        NO_MEDIA,
    ),
    unsupported(
        "--pooler-config --override-pooler-config --is-embedding --prefill-only-disable-kv-cache",
        "only generation is supported",
    ),
    unsupported(
        "--logits-processors --logits-processor-pattern --enable-custom-logit-processor --io-processor-plugin "
        "--tool-parser-plugin --tool-server --middleware --scheduler-cls --worker-cls --worker-extension-cls "
        "--model-class-overrides --additional-config --forward-hooks --aux-output-config --sidecar --sidecar-args",
        NO_PLUGINS, "auto",
    ),
    unsupported("--hf-chat-template-name --completion-template", "use --chat-template FILE"),
    unsupported(
        "--kv-cache-dtype-skip-layers --override-attention-dtype --calculate-kv-scales --prefill-kv-cache-* "
        "--use-fp64-gumbel --enable-fp32-lm-head --enable-tf32-matmul",
        "see --dtype and --kv-cache-dtype",
    ),
    unsupported(
        "--otlp-* --collect-detailed-traces --enable-trace --trace-modules --profiler-config "
        "--enable-layerwise-nvtx-* --ray-workers-use-nsight --debug-tensor-* --msprobe-dump-config --kv-canary*",
        "tracing is not supported: see /metrics and the access log",
    ),
    unsupported(
        "--custom-histogram-buckets --bucket-* --*-tokens-buckets --enable-mfu-metrics --kv-cache-metrics "
        "--enable-per-request-metrics --enable-metrics-for-all-schedulers --tokenizer-metrics-* --extra-metric-labels "
        "--enable-forward-pass-metrics --forward-pass-metrics-* --export-metrics-* --load-publish-endpoint",
        "the metrics of /metrics are fixed",
    ),
    unsupported(
        "--enable-return-* --return-*-hidden-* --return-hidden-states-mode --return-sampling-mask "
        "--sampling-mask-max-tokens --enable-trace-replay",
        "only tokens and logprobs are returned",
    ),
    unsupported("--grpc --grpc-* --smg-*", "only HTTP is served"),
    unsupported("--enable-watermark --watermark-config", "watermarks are not supported"),
    unsupported("--watermark", "blocks are not held back: see --preemption-mode"),
    unsupported(
        "--rl-on-policy-target --enable-deterministic-inference",
        "see docs/kernels.md for the bits of results",
    ),
    unsupported("--fault-tolerance-config --enable-fault-tolerance", "a failed engine ends its server: restart it"),
    unsupported(
        "--sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names "
        "--enable-nccl-comm-suspend --enable-weights-cpu-backup --enable-draft-weights-cpu-backup",
        "levels of sleep: see LLM.sleep",
    ),
    unsupported(
        "--enable-response-store --file-storage-path --preferred-sampling-params --incremental-streaming-output",
        "this part of SGLang's API is not supported",
    ),
    unsupported("--sse-keep-alive-interval --fingerprint-value --mlx-enable-sampling", "not supported"),
)  # fmt: skip


class Table:
    """Flags by name.

    Args:
        flags: a name stands in one of them, or matches the pattern of one.
    """

    def __init__(self, flags: Iterable[Flag]):
        self.flags = tuple(flags)
        self._exact = {name: flag for flag in self.flags for name in flag.names if "*" not in name}
        self._patterns = {name: flag for flag in self.flags for name in flag.names if "*" in name}
        self._with_fields = {name.partition(".")[0] for name in (*self._exact, *self._patterns) if "." in name}

    @property
    def names(self) -> Set[str]:
        """Names of the flags, without patterns."""
        return self._exact.keys()

    def matches(self, name: str) -> list[Flag]:
        """Return the entry of a flag, or the entries whose patterns it matches."""
        if name in self._exact:
            return [self._exact[name]]
        return [flag for pattern, flag in self._patterns.items() if fnmatchcase(name, pattern)]

    def find(self, name: str) -> Flag | None:
        """Return the entry of a flag such as --enable-lora, or of a field of one such as -cc.mode; None without one."""
        if found := self.matches(name):
            return found[0]
        base, dot, _ = name.partition(".")
        return self.find(base) if dot else None

    def effects(self, name: str, value: Any) -> Iterator[Effect]:
        """Yield the effects of a flag of the table: one, or one for each field of an object.

        Args:
            value: of the command line (a text, or True or False for a switch) or of Python.

        Raises:
            ValueError: the flag is not supported with this value; the message is the reason.
        """
        flag = self.find(name)
        assert flag is not None, name
        if name in self._with_fields and isinstance(given := parsed(value), Mapping) and given:
            for each, inner in given.items():
                yield from self.effects(f"{name}.{each}", inner)
        elif flag.ours:
            yield Effect(flag.ours, flag.converted(value), "")
        elif flag.harmless is None or as_text(value).lower() in flag.harmless:
            yield Effect(None, None, flag.reason)
        else:
            raise ValueError(flag.refusal)


ENGINE = Table(FLAGS)


def parsed(value: Any) -> Any:
    """Return the value of a text in JSON; other values and other texts as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def as_text(value: Any) -> str:
    """Return a value as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def engine_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of `EngineConfig` that keywords of `LLM` set, and notices of keywords without an effect.

    None, and "auto" for a setting that the model or the device decides, leave a setting open.

    Raises:
        TypeError: a keyword is unknown.
        ValueError: a keyword is not supported with its value. Both messages have the keyword and the reason.
    """
    own = {each.name for each in fields(EngineConfig)}
    decided = {each.name for each, one in settings(EngineConfig) if one.default and kind(each)[0] in (int, float)}
    found: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in given.items():
        for ours, result, notice in _effects(name, value, own) if value is not None else ():
            setting = (ours or "").removeprefix("--").replace("-", "_")
            if ours is None:
                notices.append(f"{name}: {notice}")
            elif setting not in own:
                raise ValueError(f"{name}: a setting of jpaged serve, not of an engine")
            elif isinstance(result, Mapping) and isinstance(found.get(setting), Mapping):
                found[setting] = merged(found[setting], result)
            elif not (result == "auto" and setting in decided):
                found[setting] = result
    return found, notices


def _effects(keyword: str, value: Any, own: Set[str]) -> list[Effect]:
    name = "--" + keyword.replace("_", "-")
    flag = ENGINE.find(name)
    if keyword in own and not (flag and flag.ours == name):
        return [Effect(name, value, "")]
    if flag is None:
        close = difflib.get_close_matches(keyword, own, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"{keyword}: not a setting of an engine, whose settings are those of EngineConfig{hint}")
    try:
        return list(ENGINE.effects(name, value))
    except ValueError as error:
        raise ValueError(f"{keyword}: {error}") from None

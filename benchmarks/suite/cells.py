"""The cells of the GPU suite, by part: pieces of work for processes of their own. Imports neither jax nor numpy."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

FIRST = (
    "model",
    "exact",
    "demo",
    "ceilings",
    "step",
    "products",
    "anchors",
    "peers",
)  # parts, the most important first
PARTS = (*FIRST, "check", "sweep", "tune", "throughput")

# The most common models first; the fields are arguments of `slices.check`.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": dict(config="llama-3.1-8b", block_size=64),
    "Qwen3-8B": dict(config="qwen3-8b"),
    "Gemma-3-4B (window)": dict(config="gemma-3-4b"),
    "Qwen3-30B-A3B (8 of 8 experts)": dict(config="qwen3-30b-a3b", num_experts=8),
    "SmolLM2-135M (3 KV heads)": dict(config="smollm2-135m"),
    "Llama-3.1-8B, fp8 pool": dict(config="llama-3.1-8b", kv_cache_dtype="fp8"),
    "Gemma-2-2B (soft caps)": dict(config="gemma-2-2b"),
    "Llama-3.1-8B, 32 KV heads": dict(config="llama-3.1-8b", num_kv_heads=32),
    "Qwen2.5-7B (groups of 7)": dict(config="qwen2.5-7b"),
    "Llama-3.1-8B, 2 KV heads": dict(config="llama-3.1-8b", num_kv_heads=2),
}
WITH_TRITON = ("Llama-3.1-8B", "Gemma-3-4B (window)")
# Flags of ops.py, at the shapes of published figures.
DECODE = ["--batches 32 --contexts 1024 8192", "--batches 1 --contexts 8192 32768", "--batches 256 --contexts 1024"]
ANCHORS = {
    "decode": [f"{line} --lengths uniform --head-dims 128 --block-sizes 64" for line in DECODE],
    "prefill": ["--prompts 4096 8192 16384 --head-dims 128 --block-sizes 64"],
    "mixed": ["--head-dims 128 --block-sizes 64"],
    "decode, block 16": [f"{line} --lengths uniform --head-dims 128 --block-sizes 16" for line in DECODE],
}
EXACT = ("llama-3.1-8b", "qwen3-30b-a3b")
# Keys of `products.CASES`, and numbers of tokens.
PRODUCTS = (
    ("dense products", ("qkv", "gate and up", "down", "o"), (64, 1, 256, 2048, 16)),
    ("experts", ("experts' gate and up", "experts' down", "experts' gate and up, int8"), (64, 2048)),
    ("products of 8 bits", ("qkv, int8", "gate and up, int8", "qkv, fp8"), (64, 1, 2048)),
    ("products of 4 bits", ("qkv, 4 bits", "gate and up, 4 bits", "down, 4 bits"), (64, 1, 16, 2048)),
    ("other groups", ("qkv, 4 bits in groups of 128", "qkv, 8 bits in groups of 32"), (64, 1, 2048)),
    ("experts of 4 bits", ("experts' gate and up, 4 bits",), (64, 2048)),
)
SWEEP = ["--block-sizes 64 16 --batches 1 16 64 256 --contexts 4096 1024 16384"]
PEERS = {"flashinfer": ("torch", "flashinfer"), "torch": ("torch",), "jax": ()}  # with the packages that they need
SERVER_PACKAGES = ("aiohttp", "pydantic", "prometheus_client", "jinja2", "tqdm")


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One process."""

    part: str
    name: str
    function: str  # "module:function", called with (options, send, device)
    options: Mapping[str, Any]
    silence_s: float = 90.0  # without a message or a line in its log it is killed
    limit_s: float = math.inf
    alone: bool = True  # it measures, so nothing runs at the same time
    needs: tuple[str, ...] = ()  # packages without which it is skipped
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    command: tuple[str, ...] = ()  # runs the process, such as a checker with its flags


def cells(part: str, tiny: bool) -> Iterator[Cell]:
    """Yield the cells of a part, the most important first."""
    suite, engine, kernels = "benchmarks.suite", "benchmarks.engine", "benchmarks.kernels"
    ours, block_size = ("reference",) if tiny else ("mosaic", "triton"), 16 if tiny else 64

    def experiment(name: str, function: str, settings: Any, by: Any = (), peers: Any = (), **fields: Any) -> Cell:
        options = dict(experiment=function, settings=settings, implementations=by, peers=peers)
        return Cell(part, name, f"{suite}.measured:run", options, **fields)

    def grid(name: str, flags: list[str], by: str) -> Cell:
        settings, whose = dict(name=name.partition(",")[0], flags=flags), ([], [by]) if by in PEERS else ([by], [])
        more = dict(needs=PEERS.get(by, ()), silence_s=400 if by == "flashinfer" else 90)  # it runs nvcc for minutes
        return experiment(f"{name}, {by}", f"{suite}.measured:grids", settings, *whose, **more)

    if part == "model":
        for by in ("cpu",) if tiny else ours:
            for name in WITH_TRITON if by == "triton" else MODELS:
                settings, more = MODELS[name] | dict(name=name), dict(alone=False, limit_s=200)
                yield experiment(f"{name}, {by}", f"{engine}.slices:check", settings, [by], **more)
    elif part == "ceilings":
        yield experiment("ceilings", f"{kernels}.ceilings:ceilings", {})
    elif part == "exact":
        whole = ("cpu",) if tiny else ("mosaic",)
        for config in EXACT[: 1 if tiny else None]:
            settings, more = dict(config=config), dict(alone=False, limit_s=150)
            yield experiment(f"{config}, exact", f"{engine}.exactness:exactness", settings, whole, **more)
    elif part == "products":
        for name, names, rows in PRODUCTS[: 1 if tiny else None]:
            settings = dict(names=names, rows=rows)
            yield experiment(name, f"{kernels}.products:products", settings, ours)
    elif part == "anchors":
        yield from (grid(name, flags, by) for by in ours for name, flags in ANCHORS.items())
    elif part == "step":
        for batch in (2,) if tiny else (64, 1, 256, 16):
            model, contexts = ("tiny", [40]) if tiny else ("llama-3.1-8b", [1024])
            settings = dict(model=model, contexts=contexts, batches=[batch], block_size=block_size)
            more = dict(silence_s=200, environment=dict(XLA_PYTHON_CLIENT_MEM_FRACTION="0.92"))
            yield experiment(f"step of {batch}", f"{engine}.steps:step", settings, **more)
    elif part == "demo":
        options = dict(dtype="float32" if tiny else "bfloat16", kernels="cpu" if tiny else "auto")
        on_cpu, common = options | dict(kernels="reference", on_cpu=True), dict(silence_s=200, alone=False)
        generate, serve, environment = f"{suite}.demo:generate", f"{suite}.demo:serve", {"JAX_PLATFORMS": "cpu"}
        yield Cell(part, "demo on a CPU", generate, on_cpu, silence_s=200, environment=environment)
        yield Cell(part, "demo", generate, options, **common)
        yield Cell(part, "demo over HTTP", serve, options, needs=SERVER_PACKAGES, **common)
    elif part == "peers":
        yield from (grid(name, flags, by) for by in PEERS for name, flags in ANCHORS.items())
    elif part == "check":
        yield from (experiment(by, f"{kernels}.correctness:correctness", dict(implementation=by), [by]) for by in ours)
    elif part == "sweep":
        yield from (grid(name, SWEEP, by) for name in ("decode", "prefill") for by in (*ours, *PEERS))
        yield from (grid(name, SWEEP, by) for name in ("write", "paging") for by in ours)
    elif part == "tune":
        yield Cell(part, part, f"{suite}.measured:search", {}, silence_s=300)
    elif part == "throughput":
        load = dict(requests=4, low=4, high=12) if tiny else dict(requests=256, low=100, high=1024)
        settings = load | dict(model="tiny" if tiny else "llama-3.2-1b", block_size=block_size)
        yield experiment(part, f"{engine}.steps:throughput", settings, silence_s=300)

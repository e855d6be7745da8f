"""Computes the cost of a decode step on several H200s, and measures the router's table.

    python benchmarks/engine/scaling.py --out results      some seconds

Computed: a step reads all weights and the keys and values of its sequences once, multiplies at the peak rate, and makes
two all-reduces per layer and one for the embedding. Each of them takes a latency, and the time of its bytes over the
links. A step is as long as the longer of memory and products, plus the all-reduces: a lower bound, since nothing
reaches its peak rate. The host's work runs beside the device. Measured, on this machine: bytes and times of
`PrefixTable`.
"""

import argparse
import dataclasses
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged.engine.prefix_table import PrefixTable
from jpaged.models.config import ModelConfig

# NVIDIA H200 SXM (data sheet): memory, its bandwidth, dense bfloat16, NVLink in one direction.
MEMORY, BANDWIDTH, FLOPS, LINK = 141e9, 4.8e12, 989e12, 450e9
USED, TEMPORARIES = 0.92, 1e9  # the default of gpu_memory_utilization; bytes for the largest steps
LATENCIES_US = (5, 10, 20)  # of an all-reduce, assumed: an own kernel over NVLink, and NCCL at its best and usual
SIZES, SEQUENCES, CONTEXT, BLOCK = (1, 2, 4, 8), (1, 16, 64, 256), 1024, 16
ITEM = 2  # bytes of bfloat16


def shape(layers: int, hidden: int, mlp: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    )  # fmt: skip


MODELS = {"Llama-3.1-8B": shape(32, 4096, 14336, 32), "Llama-3.1-70B": shape(80, 8192, 28672, 64)}


@dataclasses.dataclass(frozen=True)
class Shared:
    """A model that `size` GPUs share."""

    model: ModelConfig
    size: int

    @property
    def parameters(self) -> int:
        m, head = self.model, self.model.head_dim
        attention = m.hidden_size * head * 2 * (m.num_attention_heads + m.num_key_value_heads)
        layer = attention + 3 * m.hidden_size * m.intermediate_size
        return m.num_hidden_layers * layer + 2 * m.vocab_size * m.hidden_size

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values on each GPU."""
        m = self.model
        return (
            2 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim * ITEM / min(self.size, m.num_key_value_heads)
        )

    @property
    def room(self) -> int:
        """Tokens that fit into the KV pool; 0 if the weights leave none."""
        left = USED * MEMORY - ITEM * self.parameters / self.size - TEMPORARIES
        return max(0, int(left / self.kv_bytes))

    def step(self, sequences: int, latency_us: float) -> dict[str, float]:
        """Return the milliseconds of the parts of a decode step."""
        m = self.model
        read = self.parameters - m.vocab_size * m.hidden_size  # the embedding gives a row for each sequence
        weights = ITEM * read / self.size / BANDWIDTH
        kv = sequences * CONTEXT * self.kv_bytes / BANDWIDTH
        products = 2 * read * sequences / self.size / FLOPS
        links = 0.0
        if self.size > 1:
            sent = sequences * m.hidden_size * ITEM * 2 * (self.size - 1) / self.size / LINK
            links = (2 * m.num_hidden_layers + 1) * (latency_us / 1e6 + sent)
        parts = {"weights_ms": weights, "kv_ms": kv, "products_ms": products, "reductions_ms": links}
        return {name: 1e3 * s for name, s in parts.items()} | {"step_ms": 1e3 * (max(weights + kv, products) + links)}


def computed() -> Iterator[dict[str, Any]]:
    for name, model in MODELS.items():
        for size in SIZES:
            shared = Shared(model, size)
            for sequences in SEQUENCES if shared.room >= CONTEXT else ():
                row = shared.step(sequences, LATENCIES_US[1])
                steps = {f"step_{us}us": shared.step(sequences, us)["step_ms"] for us in LATENCIES_US}
                yield {
                    "experiment": "step", "model": name, "gpus": size, "sequences": sequences, **row, **steps,
                    "tokens_per_s_and_gpu": sequences / row["step_ms"] * 1e3 / size,
                    "pool_tokens": shared.room, "fits": sequences * CONTEXT <= shared.room,
                }  # fmt: skip


def replicas() -> Iterator[dict[str, Any]]:
    """Yield steps of GPUs that share a model, beside steps of the smallest replicas with as many sequences per GPU."""
    for name, model in MODELS.items():
        least = smallest(model)
        for size in [size for size in SIZES if size > least.size]:
            for sequences in SEQUENCES:
                together = Shared(model, size).step(sequences * size, LATENCIES_US[1])["step_ms"]
                apart = least.step(sequences * least.size, LATENCIES_US[1])["step_ms"]
                yield {
                    "experiment": "replicas", "model": name, "gpus": size, "replicas": size // least.size,
                    "sequences_per_gpu": sequences, "shared_ms": together, "replicas_ms": apart,
                    "throughput_of_replicas": together / apart,
                }  # fmt: skip


def smallest(model: ModelConfig) -> Shared:
    """Return the fewest GPUs with room for 256 sequences."""
    sizes = (Shared(model, size) for size in SIZES)
    return next(shared for shared in sizes if shared.room >= SEQUENCES[-1] * CONTEXT)


def router() -> dict[str, float]:
    """Return the bytes of a stored prefix, and the time of a choice for a prompt of `CONTEXT` tokens."""
    prompts = [[n * 7919 % 100_000 + i for i in range(CONTEXT)] for n in range(1600)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    prefixes: PrefixTable[int] = PrefixTable(10**6, BLOCK)
    for n, prompt in enumerate(prompts):
        prefixes.remember(prompt, n % 8)
    per_prefix = (tracemalloc.get_traced_memory()[0] - before) / len(prefixes)
    tracemalloc.stop()
    loads = dict.fromkeys(range(8), 0.0)
    start = time.perf_counter()
    for prompt in prompts:
        prefixes.remember(prompt, prefixes.choose(prompt, loads))
    return {"bytes_per_prefix": per_prefix, "choice_us": 1e6 * (time.perf_counter() - start) / len(prompts)}


def clusters(bytes_per_prefix: float) -> Iterator[dict[str, Any]]:
    """Yield the memory of a router's table that knows every block of every GPU's pool."""
    for name, model in MODELS.items():
        shared = smallest(model)
        per_gpu = shared.room / BLOCK * bytes_per_prefix / shared.size
        yield {
            "experiment": "router", "model": name, "gpus": shared.size, "table_mib_per_gpu": per_gpu / 2**20,
            "gpus_in_1_gib": int(2**30 / per_gpu), "gpus_in_64_gib": int(2**36 / per_gpu),
        }  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return script_parser(__doc__, "scaling").parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment()
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    for row in (*computed(), *replicas()):
        report.add(**row)
    measured = router()
    report.add(experiment="table", **measured)
    for row in clusters(measured["bytes_per_prefix"]):
        report.add(**row)
    rows = {name: [row for row in report.rows if row["experiment"] == name] for name in ("step", "replicas", "router")}
    latencies = ", ".join(f"{us} us" for us in LATENCIES_US)
    steps = tuple(f"step_{us}us" for us in LATENCIES_US)
    report.publish(
        "Decode steps on H200s, and a router's table",
        f"**Computed**: sequences with {CONTEXT} tokens in bfloat16; a step with all-reduces of {latencies}; its "
        f"parts and the throughput for {LATENCIES_US[1]} us.",
        table(rows["step"], ("model", "gpus", "sequences", "weights_ms", "kv_ms", "products_ms", "reductions_ms",
                             *steps, "tokens_per_s_and_gpu", "pool_tokens")),
        f"**Computed**: GPUs that share a model, and the smallest replicas, with all-reduces of {LATENCIES_US[1]} us. "
        "Above 1, the replicas have more throughput.",
        table(rows["replicas"], ("model", "gpus", "replicas", "sequences_per_gpu", "shared_ms", "replicas_ms",
                                 "throughput_of_replicas")),
        f"**Measured** on this machine: a stored prefix takes {measured['bytes_per_prefix']:.0f} bytes, and a choice "
        f"for a prompt of {CONTEXT} tokens {measured['choice_us']:.0f} us. **Computed** from it: the memory of a table "
        f"with each block of {BLOCK} tokens of every pool.",
        table(rows["router"], ("model", "gpus", "table_mib_per_gpu", "gpus_in_1_gib", "gpus_in_64_gib")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles a step of a real model for a GPU that need not be present, and reads the program that XLA made of it.

    python benchmarks/kernels/compiled_step.py --model llama-3.1-8b --sequences 64
    python benchmarks/kernels/compiled_step.py --model gemma-3-4b --sequences 32 --tokens 512 --layers 2 --json

Compiles the model's part of the step with a number of layers and with one more, whose difference is a layer, and the
sampling. Without a device XLA does not tune its products: it takes Triton's, or with --cublas calls of cuBLAS.
No figure here is measured on a GPU. The estimate adds up parts by the rates that it names; it is a prediction.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import GPUS, Gpu
from benchmarks.shared.models import MODELS
from benchmarks.shared.program import Program
from benchmarks.shared.results import Row, table
from benchmarks.shared.step_program import DescribedStep, StepShape
from jpaged.config import QUANTIZATIONS

# Rates of the estimate, as parts of the data sheet's bandwidth: a kernel that only reads; products of few rows, which
# read their weights; a good decode kernel.
STREAM, PRODUCTS, ATTENTION = 0.9, 0.9 * 0.85, 0.87
LAUNCH_S = 1.15e-6  # of a node of a CUDA graph
WAIT_S = 1e-3  # of the host's work in a step, which a wait for the device exposes


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step of a whole model.

    Attributes:
        layers: number of layers of `fewer`; `more` has one more.
        described: the step with the fewer layers.
        pool_copies: number of copies of arrays of the pool.
    """

    shape: StepShape
    gpu: Gpu
    layers: int
    fewer: Program
    more: Program
    described: DescribedStep
    pool_copies: int

    @classmethod
    def of(cls, gpu: Gpu, shape: StepShape, layers: int) -> "StepFigures":
        """Compile the programs."""
        steps = [DescribedStep(gpu, shape.with_layers(count)) for count in (layers, layers + 1)]
        fewer, more = (step.forward() for step in steps)
        copies = sum(program.copies_of(steps[0].pool_array) for program in (fewer, more))
        return cls(shape, gpu, layers, fewer, more, steps[0], copies)

    @functools.cached_property
    def sampling(self) -> dict[str, Program]:
        """The programs of sampling by the settings that they serve, the simplest first; a step runs one of them."""
        return {settings.name.lower(): self.described.choose(settings) for settings in self.described.step.settings}

    def per_layer(self, figure: Callable[[Program], int]) -> int:
        """Return a figure of one layer."""
        return figure(self.more) - figure(self.fewer)

    def whole(self, figure: Callable[[Program], int]) -> int:
        """Return a figure of the model's part with all of its layers."""
        return figure(self.fewer) + (self.shape.config.num_hidden_layers - self.layers) * self.per_layer(figure)

    @property
    def summary(self) -> dict[str, int]:
        """The figures that tests and other programs read; of sampling those of the settings with the most."""
        sampling = self.sampling.values()
        return {
            "misaligned_operands": sum(len(each.misaligned_operands) for each in (self.more, *sampling)),
            "host_waits": len(self.more.host_waits) + max(len(each.host_waits) for each in sampling),
            "copied_parameter_bytes": self.whole(copied_bytes) + max(map(copied_bytes, sampling)),
            "pool_copies": self.pool_copies,
            "launches_per_layer": self.per_layer(num_launches),
            "temporaries_bytes": max(each.temp_bytes for each in (self.more, *sampling)),
            "command_buffers": self.more.command_buffers + max(each.command_buffers for each in sampling),
        }

    def estimate(self, context: int) -> list[Row]:
        """Return the predicted parts of a decode step with greedy sampling, with the source of each."""
        config, bandwidth = self.shape.config, self.gpu.memory_bandwidth
        greedy = next(iter(self.sampling.values()))
        weights = self.whole(lambda each: each.product_bytes) + greedy.product_bytes
        item_bytes = 1 if "float8" in self.shape.pool_dtype else 2
        heads = config.num_key_value_heads // min(self.shape.devices, config.num_key_value_heads)
        token_bytes = 2 * config.num_hidden_layers * heads * config.head_dim * item_bytes
        kv = self.shape.sequences * context * token_bytes
        copied = self.whole(lambda each: each.copied_bytes)
        launches = self.whole(num_launches) + num_launches(greedy)
        small = self.whole(lambda each: each.small_bytes) + greedy.small_bytes
        waits = len(self.more.host_waits) + len(greedy.host_waits)
        parts = [
            ("products", f"{weights / 1e9:.2f} GB of weights at {PRODUCTS:.3g} of the bandwidth",
             weights / bandwidth / PRODUCTS),
            ("attention", f"{kv / 1e9:.2f} GB of keys and values at {ATTENTION:g} of the bandwidth",
             kv / bandwidth / ATTENTION),
            ("launches", f"{launches} nodes of {1e6 * LAUNCH_S:g} us", launches * LAUNCH_S),
            ("other kernels", f"{small / 1e9:.2f} GB at {STREAM:g} of the bandwidth", small / bandwidth / STREAM),
            ("copied parameters", f"{copied / 1e9:.2f} GB, read and written", copied / bandwidth / STREAM),
            ("waits of the host", f"{waits}: {1e3 * WAIT_S:g} ms of its work is exposed if there are any",
             WAIT_S * (waits > 0)),
        ]  # fmt: skip
        rows = [dict(part=part, source=source, ms=1e3 * seconds) for part, source, seconds in parts]
        total = sum(seconds for *_, seconds in parts)
        floor = (weights + kv) / bandwidth
        return [
            *rows,
            dict(part="all", source="the sum", ms=1e3 * total),
            dict(part="floor", source="weights, keys and values at the whole bandwidth", ms=1e3 * floor),
        ]


def num_launches(program: Program) -> int:
    """Return the number of launches of a program."""
    return len(program.launches)


def copied_bytes(program: Program) -> int:
    """Return the bytes of parameters that a program writes again."""
    return sum(size for _, size in program.copied_params)


def report(figures: StepFigures, context: int) -> str:
    """Return the figures as Markdown."""
    programs = {"model's part": figures.more} | {f"sampling, {name}": each for name, each in figures.sampling.items()}
    rows = [
        dict(
            program=name, launches=num_launches(each), command_buffers=each.command_buffers,
            host_waits=len(each.host_waits), misaligned=len(each.misaligned_operands),
            copied_parameter_bytes=copied_bytes(each), temporaries_MB=each.temp_bytes / 1e6,
        )
        for name, each in programs.items()
    ]  # fmt: skip
    names = [thunk.name for thunk in figures.more.launches]
    layer = dict(figures.summary)
    lines = [
        f"Programs for one {figures.gpu.kind} ({figures.gpu.target}); the model's part has {figures.layers + 1} of "
        f"{figures.shape.config.num_hidden_layers} layers:",
        table(rows, list(rows[0])),
        "Figures of the step:",
        table([dict(figure=name, value=value) for name, value in layer.items()], ("figure", "value")),
        f"Launches of the model's part: {', '.join(names)}.",
    ]
    if figures.shape.tokens is None:
        lines += [
            f"Estimate of a greedy decode step at a context of {context} tokens, not measured:",
            table(figures.estimate(context), ("part", "source", "ms")),
        ]
    return "\n\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-3.1-8b")
    parser.add_argument("--sequences", type=int, default=64, metavar="S", help="padded number (default 64)")
    parser.add_argument("--tokens", type=int, metavar="T", help="of a mixed step; without it a decode step")
    parser.add_argument("--layers", type=int, default=2, help="that are compiled, and one more (default 2)")
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--block-size", type=int, default=16, metavar="B")
    parser.add_argument("--max-model-len", type=int, default=8192, metavar="TOKENS", help="that a block table holds")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--separate", action="store_true", help="weights of a module in hand, which are not fused")
    parser.add_argument("--cublas", action="store_true", help="products as calls of cuBLAS")
    parser.add_argument("--kernels", choices=("auto", "mosaic", "triton"), default="auto")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence in the estimate")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the last line")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if reason := deviceless.why_not():
        sys.exit(reason)
    shape = StepShape(
        MODELS[args.model], args.sequences, args.tokens, block_size=args.block_size, max_model_len=args.max_model_len,
        devices=args.tensor_parallel_size, quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype,
        fused=not args.separate, cublas=args.cublas, kernels=args.kernels,
    )  # fmt: skip
    if not 0 < args.layers < shape.config.num_hidden_layers:
        sys.exit(f"--layers: must be from 1 to {shape.config.num_hidden_layers - 1}, not {args.layers}")
    figures = StepFigures.of(GPUS[args.gpu], shape, args.layers)
    print(json.dumps(figures.summary) if args.json else report(figures, args.context))
    return 0


if __name__ == "__main__":
    sys.exit(main())

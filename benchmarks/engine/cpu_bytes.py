"""Share of a CPU's read bandwidth that a decode step of one row reaches, for each kind of weights.

    python benchmarks/engine/cpu_bytes.py --out results      five minutes, 8 GB of memory

The model is Llama 3.2 1B with random parameters, behind a short context. Quantized kinds have bfloat16 for everything
else, the embedding included. A step reads all parameters of the layers, the embedding as the head, and keys and values.
The bandwidth is that at which all threads read a large array in the same rounds, in one stream or four each. The parts
of the step are those of `cpu_step.py`.
"""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.cpu_step import BLOCK_SIZE, MAX_TOKENS, READ_BYTES, Case, calls_of, rows_of, timed
from benchmarks.engine.steps import random_model
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.models import MODELS
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.runners import runner_of
from jpaged.config import EngineConfig, Limits

# Name -> dtype of activations and of unquantized parameters, and quantization.
KINDS = {
    "float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8"),
    "fp8": ("bfloat16", "fp8"), "int4": ("bfloat16", "int4"),
}  # fmt: skip
LAYERS = 4  # of the float32 model: twice the bytes of the others


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "cpu_bytes")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often each part is measured")
    parser.add_argument("--context", type=int, default=128, metavar="TOKENS", help="context of the row")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS), help="kinds of weights")
    parser.add_argument("--tiny", action="store_true", help="one small layer: shows that the program works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    small = dict(num_hidden_layers=1, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=512)  # fmt: skip
    for kind in args.kinds:
        dtype, quantization = KINDS[kind]
        config = MODELS["llama-3.2-1b"]
        if args.tiny:
            config = dataclasses.replace(config, **small)
        elif kind == "float32":
            config = dataclasses.replace(config, num_hidden_layers=LAYERS)
        model, case = random_model(config, dtype, quantization), Case(1, args.context)
        blocks = EngineConfig(num_gpu_blocks_override=2 * (args.context // BLOCK_SIZE + 1), swap_space=0)
        runner = runner_of(model, blocks, Limits(max(512, args.context + BLOCK_SIZE), 1, MAX_TOKENS, BLOCK_SIZE))
        seconds = timed(calls_of(runner, model, case), args.rounds)
        bandwidth = READ_BYTES / seconds["read"]
        for row in rows_of(seconds, model, case, 1, runner.blocks.pool[0].dtype.itemsize):
            of_bandwidth = row["bytes"] / row["ms"] / 1e-3 / bandwidth if row["bytes"] else None
            row |= {"mb": row.pop("bytes") / 1e6, "of_bandwidth": of_bandwidth, "read_gb_s": bandwidth / 1e9}
            report.add(experiment="cpu bytes", kind=kind, layers=config.num_hidden_layers, **row, status="ok")
        del model, runner
        gc.collect()
    report.publish(
        "Bytes of a decode step of one row on a CPU",
        f"Llama 3.2 1B with random parameters ({LAYERS} layers in float32), behind {args.context} tokens. Medians of "
        f"{args.rounds} rounds.",
        table(report.rows, ("kind", "part", "ms", "mb", "of_bandwidth", "read_gb_s")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the steps of several real models for an H200 that need not be present, and compares them with earlier ones.

    python benchmarks/kernels/compiled_steps.py --out results                           ten minutes on two cores
    python benchmarks/kernels/compiled_steps.py --out results --before earlier.json     with the figures of earlier code

Writes results.json and report.md. No figure is measured on a GPU; `compiled_step.py` explains them.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from benchmarks.kernels.compiled_step import StepFigures
from benchmarks.shared.device import Device, environment
from benchmarks.shared.gpus import H200
from benchmarks.shared.models import MODELS
from benchmarks.shared.results import Report, Row, script_parser, table
from benchmarks.shared.step_program import StepShape

LLAMA = MODELS["llama-3.1-8b"]
STEPS = {
    "Llama-3.1-8B, decode 8": StepShape(LLAMA, 8),
    "Llama-3.1-8B, decode 16": StepShape(LLAMA, 16),
    "Llama-3.1-8B, decode 64": StepShape(LLAMA, 64),
    "Llama-3.1-8B, decode 256": StepShape(LLAMA, 256),
    "Llama-3.1-8B, decode 64, cuBLAS": StepShape(LLAMA, 64, cublas=True, products=False),
    "Llama-3.1-8B, decode 64, Triton's products": StepShape(LLAMA, 64, products=False),
    "Llama-3.1-8B, decode 64, fp8 pool": StepShape(LLAMA, 64, kv_cache_dtype="fp8"),
    "Llama-3.1-8B, decode 64, int8": StepShape(LLAMA, 64, quantization="int8"),
    "Llama-3.1-8B, decode 64, int4": StepShape(LLAMA, 64, quantization="int4"),
    "Llama-3.1-8B, decode 64, block 64": StepShape(LLAMA, 64, block_size=64),
    "Llama-3.1-8B, decode 64, 2 GPUs": StepShape(LLAMA, 64, devices=2),
    "Llama-3.1-8B, decode 64, 4 GPUs": StepShape(LLAMA, 64, devices=4),
    "Llama-3.1-8B, mixed 512": StepShape(LLAMA, 16, 512),
    "Llama-3.1-8B, mixed 2048": StepShape(LLAMA, 64, 2048),
    "Llama-3.1-8B, mixed 2048, 4 GPUs": StepShape(LLAMA, 64, 2048, devices=4),
    "Qwen3-8B, decode 64": StepShape(MODELS["qwen3-8b"], 64),
    "Qwen3-8B, mixed 2048": StepShape(MODELS["qwen3-8b"], 64, 2048),
    "Qwen2.5-7B, decode 64": StepShape(MODELS["qwen2.5-7b"], 64),
    "Gemma-2-2B, decode 16": StepShape(MODELS["gemma-2-2b"], 16),
    "Gemma-3-4B, decode 16": StepShape(MODELS["gemma-3-4b"], 16),
    "Gemma-3-4B, mixed 512": StepShape(MODELS["gemma-3-4b"], 32, 512),
    "SmolLM2-135M, decode 8": StepShape(MODELS["smollm2-135m"], 8),
    "SmolLM2-135M, decode 256": StepShape(MODELS["smollm2-135m"], 256),
    "SmolLM2-135M, mixed 512": StepShape(MODELS["smollm2-135m"], 16, 512),
    "Qwen3-30B-A3B, decode 64": StepShape(MODELS["qwen3-30b-a3b"], 64),
    "Qwen3-30B-A3B, mixed 2048": StepShape(MODELS["qwen3-30b-a3b"], 64, 2048),
    "Qwen3-30B-A3B, decode 64, XLA's products": StepShape(MODELS["qwen3-30b-a3b"], 64, products=False),
}
CONTEXT = 1024  # tokens of each sequence in the estimates
COLUMNS = {
    "launches_per_layer": "launches per layer",
    "copied_parameter_bytes": "parameters copied per step (GB)",
    "temporaries_bytes": "temporaries (MB)",
    "host_waits": "waits of the host",
    "command_buffers": "command buffers",
    "misaligned_operands": "misaligned operands",
    "estimate_ms": "estimate of a greedy step (ms)",
}
UNITS = {"copied_parameter_bytes": 1e9, "temporaries_bytes": 1e6}


def row_of(name: str, shape: StepShape) -> Row:
    """Compile a step, and return its figures."""
    figures = StepFigures.of(H200, shape, 2)
    row = dict(step=name, **figures.summary)
    if shape.tokens is None:
        row["estimate_ms"] = next(part["ms"] for part in figures.estimate(CONTEXT) if part["part"] == "all")
    return row


def compared(rows: Sequence[Row], before: Sequence[Row]) -> str:
    """Return a table with the figures, each after its earlier value."""
    earlier = {row["step"]: row for row in before}

    def shown(row: Row, column: str) -> str | None:
        if column not in row:
            return None
        number = row[column] / UNITS.get(column, 1)
        return f"{number:.3g}" if isinstance(number, float) else str(number)

    lines = []
    for row in rows:
        line = {"step": row["step"]}
        for column, title in COLUMNS.items():
            values = [shown(each, column) for each in (earlier.get(row["step"], {}), row)]
            line[title] = " → ".join(value for value in values if value is not None) or None
        lines.append(line)
    return table(lines, ("step", *COLUMNS.values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__, "compiled-steps")
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=list(STEPS), metavar="NAME")
    parser.add_argument("--before", type=Path, metavar="JSON", help="results of earlier code")
    args = parser.parse_args(argv)
    described = Device(
        "compiler", f"{H200.kind}, described to the compiler", H200.capability, H200.l2_cache, H200.memory
    )
    report = Report(args.out / "results.json", environment(described, False), quiet=True)
    for name in tqdm(args.steps, file=sys.stderr):
        report.add(**row_of(name, STEPS[name]))
    before = json.loads(args.before.read_text())["rows"] if args.before else ()
    report.publish("Steps as compiled", compared(report.rows, before))
    return 0


if __name__ == "__main__":
    sys.exit(main())

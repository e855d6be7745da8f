"""The table of GPUs in docs/kernels.md: `python -m tests.kernels.devices` writes it.

Every op is compiled for each GPU that jax can compile for without having it, for three shape classes.
"""

import pathlib
import re
import sys

from tqdm import tqdm

from benchmarks.shared.gpus import GPUS, Gpu
from pallas_kernels import select
from tests.kernels import figures, gpu_compiler

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- made by tests/kernels/devices.py -->", "<!-- end -->"
CLASSES = [(128, "bfloat16"), (256, "bfloat16"), (128, "float8_e4m3fn")]
# jax's tables lack the name of this GPU, and a compiler without the device can't ask it.
UNKNOWN_TO_JAX = ("rtx-5090",)


def implementation(gpu: Gpu, head_dim: int = 128, pool_dtype: str = "bfloat16") -> str:
    """Return the name of the implementation that `auto` takes on a GPU."""
    return select(
        "auto", platform="gpu", device_kind=gpu.kind, compute_capability=gpu.capability, dtype="bfloat16",
        pool_dtype=pool_dtype, head_dim=head_dim, num_heads=32, num_kv_heads=8, block_size=16,
    ).name  # fmt: skip


def compiled(gpu: Gpu) -> str:
    """Compile every op for a GPU, and return the worst figures in words."""
    spills, shared = 0, 0
    for head_dim, pool_dtype in CLASSES:
        program = implementation(gpu, head_dim, pool_dtype)
        case = figures.Case(program, head_dim, pool_dtype, 16, 4)
        ops = figures._ops(figures.PROGRAMS[program][0], case, {})
        kernels = gpu_compiler.compile_for(gpu, ops, *figures._avals(case), donate_argnums=(3, 4)).kernels.values()
        spills = max(spills, *(kernel.spill_bytes for kernel in kernels))
        shared = max(shared, *(kernel.shared_memory for kernel in kernels))
    assert shared <= gpu.shared_memory, f"{gpu.kind}: {shared} bytes of shared memory"
    return f"yes; spills of up to {spills} bytes, {shared:,} of {gpu.shared_memory:,} bytes of shared memory"


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| GPU | architecture | implementation | compiled without the device |", "|---|---|---|---|"]
    for name, gpu in tqdm(GPUS.items(), file=sys.stderr):
        result = "no: jax does not know its name, and asks the device" if name in UNKNOWN_TO_JAX else compiled(gpu)
        lines.append(f"| {gpu.kind} | {gpu.target} | {implementation(gpu)} | {result} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = re.escape(BEGIN), re.escape(END)
    PAGE.write_text(re.sub(rf"{begin}\n.*?{end}", f"{BEGIN}\n{table()}\n{END}", page, flags=re.DOTALL))

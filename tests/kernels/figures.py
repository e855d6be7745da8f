"""Every tuned configuration of every GPU kernel, compiled without a GPU: the table in docs/kernel-figures.md.

python -m tests.kernels.figures    writes the table of docs/kernel-figures.md
"""

import functools
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import A100, H200
from pallas_kernels import checks, mosaic, triton, tuning
from tests.kernels import gpu_compiler
from tests.kernels.implementations import ops_of

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "kernel-figures.md"
PROGRAMS = {"mosaic": (mosaic, H200), "triton": (triton, A100)}
SHAPES = [(8, 16), (16, 4), (64, 8), (128, 1)]  # block size, group
POOL_DTYPES = {"mosaic": ("bfloat16", "float8_e4m3fn"), "triton": ("bfloat16", "float8_e4m3fn", "float32")}


class Case(NamedTuple):
    """A shape class on the device that a program is meant for, and one block size and group of it."""

    program: str
    head_dim: int
    pool_dtype: str
    block_size: int
    group: int


CASES = [
    Case(program, head_dim, pool_dtype, *shape)
    for program, pool_dtypes in POOL_DTYPES.items()
    for head_dim in checks.HEAD_DIMS
    for pool_dtype in pool_dtypes
    for shape in SHAPES
]


@functools.cache
def compiled(case: Case, *, sinks: bool = False, **options: object) -> dict[str, gpu_compiler.KernelFigures]:
    """All ops in one function, their kernels by name; `options` are those of the attention ops."""
    module, device = PROGRAMS[case.program]
    if sinks:
        options |= dict(sinks_n=jnp.ones(_avals(case)[0].shape[1], jnp.float32))
    return gpu_compiler.compile_for(device, _ops(module, case, options), *_avals(case), donate_argnums=(3, 4)).kernels


def _ops(module: types.ModuleType, case: Case, options: dict):
    fp8, tiles = case.pool_dtype == checks.FP8.name, dict[str, tuning.Tiles]()
    for op in ("decode", "ragged"):
        tiles[op] = tuning.find(f"{case.program}.{op}", PROGRAMS[case.program][1].kind, case.head_dim, case.pool_dtype)

    implementation = ops_of(module, **tiles)

    def ops(q, k, v, k_pool, v_pool, slots, tables, contexts, cu, cos, sin, copies, scale):
        scales = dict(k_scale_k=scale, v_scale_k=scale) if fp8 else {}
        shared = dict(scale=case.head_dim**-0.5, **scales, **options)
        k_pool, v_pool = implementation.write_kv(k_pool, v_pool, k, v, slots, cos_t=cos, sin_t=sin, **scales)
        k_pool = implementation.copy_blocks(k_pool, copies, copies)
        mixed = implementation.ragged_paged_attention(q, k_pool, v_pool, tables, contexts, cu, **shared)
        return mixed, k_pool, v_pool

    return ops


def _avals(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    array, h, k, t, s = jax.ShapeDtypeStruct, case.head_dim, 4, 512, 16
    dtype = jnp.dtype("bfloat16" if case.pool_dtype == checks.FP8.name else case.pool_dtype)
    pool = array((1024, k, case.block_size, h), jnp.dtype(case.pool_dtype))
    ints = {n: array((n,), jnp.int32) for n in (t, s, s + 1)}
    angles = array((t, h // 2), jnp.float32)
    return (
        array((t, k * case.group, h), dtype), array((t, k, h), dtype), array((t, k, h), dtype), pool, pool, ints[t],
        array((s, 8192 // case.block_size), jnp.int32), ints[s], ints[s + 1], angles, angles, ints[s],
        array((k,), jnp.float32),
    )  # fmt: skip


HEADER = """# Figures of the compiled kernels

Every configuration that `pallas_kernels.tuning` has for a shape class, compiled without a GPU: Mosaic GPU kernels for
sm_90a (H200), Pallas-Triton kernels for sm_80 (A100). Each line is the worst over block sizes and groups of
{shapes}. Shared memory is that of the launch. Made by `python -m tests.kernels.figures` with
jax {jax} and ptxas {ptxas}; `tests/kernels/test_compile.py` checks that nothing spills and everything fits.

No figure on this page is a speed.

| program | kernel | head dim | pool | configuration | threads | registers | spills (bytes) | shared memory (bytes) |
|---|---|---|---|---|---|---|---|---|"""


def table() -> str:
    """Return the page in Markdown."""
    rows: dict[tuple, list[gpu_compiler.KernelFigures]] = {}
    for case in tqdm(CASES, file=sys.stderr):
        for kernel, figures in compiled(case).items():
            rows.setdefault((case.program, case.head_dim, case.pool_dtype, kernel), []).append(figures)
    ptxas = subprocess.run(
        [deviceless.find_tool("ptxas") or "ptxas", "--version"], capture_output=True, text=True
    ).stdout
    lines = [
        HEADER.format(
            shapes=", ".join(f"{b} and {g}" for b, g in SHAPES),
            jax=importlib.metadata.version("jax"),
            ptxas=re.findall(r"release ([\d.]+)", ptxas)[0],
        )
    ]
    for (program, head_dim, pool_dtype, kernel), seen in sorted(rows.items()):
        worst, tiles = gpu_compiler.worst(seen), configuration(program, kernel, head_dim, pool_dtype)
        shape = f"{program} | {kernel} | {head_dim} | {pool_dtype} | {tiles}"
        numbers = f"{worst.threads} | {worst.registers} | {worst.spill_bytes} | {worst.shared_memory:,}"
        lines.append(f"| {shape} | {numbers} |")
    return "\n".join(lines) + "\n"


def configuration(program: str, kernel: str, head_dim: int, pool_dtype: str) -> str:
    """The tiles of a kernel, as the table shows them; empty for one that has none."""
    op = next((op for op in ("decode", "ragged") if op in kernel and "combine" not in kernel), None)
    if op is None:
        return ""
    tiles = tuning.find(f"{program}.{op}", PROGRAMS[program][1].kind, head_dim, pool_dtype)
    return str(tiles).partition("(")[2].removesuffix(")")


if __name__ == "__main__":
    _, heading, rest = PAGE.read_text().partition("\n## ")  # the evidence below the table is written by hand
    PAGE.write_text(table() + heading + rest)

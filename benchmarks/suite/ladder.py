"""A red cell looked at closely: simpler forms of it, a run under a memory checker, and its machine code."""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.suite.cells import Cell
from benchmarks.suite.jobs import Job

CHECKER_S = 50.0  # compute-sanitizer makes a program many times slower
TOOL_S = 10.0  # for a run of ptxas or nvdisasm
TILE = 64  # tokens; also the block size of the last rung
SIMPLER: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "mosaic decode": (
        ("2 stages", dict(tiles=dict(stages=2))),
        ("1 thread block per SM", dict(tiles=dict(blocks_per_sm=1))),
    ),
    "mosaic ragged": (
        ("2 stages", dict(tiles=dict(stages=2))),
        ("1 warpgroup", dict(tiles=dict(warpgroups=1))),
    ),
    "triton decode": (("1 stage", dict(tiles=dict(num_stages=1))), ("1 warp", dict(tiles=dict(num_warps=1)))),
    "triton ragged": (("1 stage", dict(tiles=dict(num_stages=1))), ("4 warps", dict(tiles=dict(num_warps=4)))),
}


def rungs(cell: Cell) -> Iterator[tuple[str, Cell]]:
    """Yield forms of a cell, each simpler than the one before: the name of the last change, and the cell."""
    kind = cell.op.partition(",")[0]
    changes = list(SIMPLER.get(f"{cell.implementation} {kind}", ()))
    if kind == "decode":
        changes.append(("1 split", dict(contexts=tuple(min(512, n) for n in cell.contexts))))
    changes.append(("1 KV head", dict(num_kv_heads=1, num_heads=cell.num_heads // cell.num_kv_heads)))
    if cell.contexts:
        last = dict(contexts=cell.contexts[-1:], q_lens=cell.q_lens and cell.q_lens[-1:])
        if kind == "decode":
            last["contexts"] = (min(512, cell.contexts[-1]),)
        changes.append(("1 sequence", last))
        tile = dict(tile=TILE) if SIMPLER.get(f"{cell.implementation} {kind}") else {}
        changes.append(("block = tile", dict(block_size=TILE, tiles=tile)))
    for label, change in changes:
        tiles = {**cell.tiles, **change.get("tiles", {})}
        simpler = dataclasses.replace(cell, **change | dict(tiles=tiles))
        if simpler != cell:
            yield label, simpler
        cell = simpler


def evidence_job(cell: Cell, status: str, tiny: bool) -> Job:
    """A run of a red cell under compute-sanitizer, where it is installed.

    Args:
        status: of the cell; one that hung is checked for wrong synchronisation, another one for wrong addresses.
    """
    checker = tool("compute-sanitizer")
    check = "synccheck" if status == "killed" else "memcheck"
    command = (checker, "--tool", check, "--print-limit", "20") if checker else ()
    row = cell.row | dict(experiment="evidence", tool=check if checker else "compute-sanitizer is not installed")
    return Job(
        f"evidence {cell.name}", "cell", dict(cell=dataclasses.asdict(cell), tiny=tiny, row=row),
        silence_s=CHECKER_S, limit_s=CHECKER_S, command=command,
    )  # fmt: skip


def dumps(folder: Path) -> dict[str, str]:
    """The variables with which Mosaic and XLA write PTX, and SASS where nvdisasm is installed, to a folder."""
    variables = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",  # each array an allocation of its own, whose ends a checker knows
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # an executable from the cache is not dumped
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_emitter_re=ptx".strip(),
    }
    disassembler = tool("nvdisasm")
    if disassembler is None:
        return variables | {"MOSAIC_GPU_DUMP_PTX": "1"}  # into the log
    path = f"{Path(disassembler).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return variables | {"MOSAIC_GPU_DUMP_TO": str(folder), "PATH": path}


def disassemble(folder: Path) -> None:
    """Write the SASS of each PTX file that has none, where CUDA's tools are installed."""
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    if ptxas is None or nvdisasm is None:
        return
    for path in folder.glob("*.ptx"):
        target = re.search(r"^\.target (\w+)", path.read_text(errors="replace"), re.MULTILINE)
        if target is None or path.with_suffix(".sass").exists():
            continue
        cubin = path.with_suffix(".cubin")
        subprocess.run([ptxas, f"-arch={target[1]}", str(path), "-o", str(cubin)], timeout=TOOL_S, capture_output=True)
        if cubin.exists():
            done = subprocess.run([nvdisasm, str(cubin)], timeout=TOOL_S, capture_output=True)
            path.with_suffix(".sass").write_bytes(done.stdout)


def tool(name: str) -> str | None:
    """The path of one of CUDA's programs; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/opt/nvidia/nsight-compute")

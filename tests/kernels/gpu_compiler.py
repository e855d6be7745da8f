"""Kernels compiled for a GPU on a machine that has none, with their figures; see `benchmarks/shared/deviceless.py`."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.shared.deviceless import OPTIMIZED, abstract, find_tool, placed
from benchmarks.shared.gpus import H200, Gpu


@dataclasses.dataclass(frozen=True)
class KernelFigures:
    """The figures of ptxas and Mosaic or XLA for one Pallas kernel; of several with one name, the worst."""

    threads: int  # per thread block
    registers: int  # per thread
    spill_bytes: int  # stores and loads together
    shared_memory: int  # bytes per thread block, as the launch asks for them
    wgmma: int  # instructions in the PTX
    tma: int
    mma: int  # on tensor cores too, of a warp instead of a warpgroup
    wgmma_serialised: bool  # ptxas could not keep the tensor cores asynchronous, and said so
    sass: tuple[str, ...] = ()  # machine code of a Mosaic kernel, if it was asked for


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function compiled for one or several devices."""

    executable: jax.stages.Compiled
    kernels: dict[str, KernelFigures]  # by name; empty with figures=False

    @functools.cached_property
    def hlo(self) -> str:
        return self.executable.as_text() or ""

    @property
    def aliased_bytes(self) -> int:
        return self._memory.alias_size_in_bytes

    @property
    def temp_bytes(self) -> int:
        return self._memory.temp_size_in_bytes

    @functools.cached_property
    def _memory(self) -> Any:
        return self.executable.memory_analysis()

    @functools.cached_property
    def launches(self) -> collections.Counter[str]:
        """Kernel launches by kind: fusions, and custom calls by their target. Allocations launch nothing."""
        entry = self.hlo[self.hlo.index("\nENTRY ") :]
        kinds = re.findall(r"= [^=]*? (fusion|copy|sort|custom-call)\((?:.*custom_call_target=\"(\w+)\")?", entry)
        return collections.Counter(target or kind for kind, target in kinds if target != "AllocateBuffer")

    def copies_of(self, shape: Sequence[int], dtype: Any) -> int:
        """How many HLO copies (in fusions too) have an operand of this shape and dtype."""
        names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "uint8": "u8", "bool": "pred"}
        name = (names | {"float8_e4m3fn": "f8e4m3fn"})[np.dtype(dtype).name]
        array = re.escape(f"{name}[{','.join(map(str, shape))}]")
        return len(re.findall(rf"= \(?{array}[^=]* copy(?:-start)?\(", self.hlo))


def compile_for(
    device: Gpu,
    fn: Callable[..., Any],
    *avals: Any,
    donate_argnums: int | Sequence[int] = (),
    figures: bool = True,
    sass: bool = False,
) -> Compiled:
    """Compiles `fn` for one such device.

    `avals` are pytrees of ShapeDtypeStruct (or arrays); without a sharding they are whole on every device.
    `figures=False` leaves the figures of the kernels out, and saves their dumps, some megabytes each; `sass=True` adds
    their machine code, which takes nvdisasm.
    """
    avals = placed(device, avals)

    def lower() -> jax.stages.Lowered:
        with abstract(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            # A wrapper of its own: jit's cache may hold what `fn` was traced to elsewhere, under an interpreter say.
            return jax.jit(lambda *args: fn(*args), donate_argnums=donate_argnums).trace(*avals).lower()

    if not figures:
        return Compiled(lower().compile(OPTIMIZED), {})
    with tempfile.TemporaryDirectory(prefix="kernel_dump_") as name:
        mosaic, xla = pathlib.Path(name, "mosaic"), pathlib.Path(name, "xla")
        mosaic.mkdir()
        with _environment(MOSAIC_GPU_DUMP_TO=str(mosaic)):
            lowered = lower()
        # Not to a folder this time: that would ask for SASS too, and leave files in /tmp where there is no nvdisasm.
        asked = dict(MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1")
        if sass:
            tool = find_tool("nvdisasm")
            assert tool, "nvdisasm is not installed"
            asked |= dict(MOSAIC_GPU_DUMP_SASS="1", PATH=f"{pathlib.Path(tool).parent}{os.pathsep}{os.environ['PATH']}")
        with _environment(**asked), _stdout_to(mosaic / "printed"):
            executable = lowered.compile(OPTIMIZED | {"xla_dump_to": str(xla), "xla_dump_emitter_re": "ptx"})
        kernels = _read_figures(mosaic, (mosaic / "printed").read_text())
        return Compiled(executable, kernels | _read_triton_figures(xla, executable.as_text() or ""))


def compile_for_h200(fn: Callable[..., Any], *avals: Any, **options: Any) -> Compiled:
    """Compiles `fn` for one H200; see `compile_for`."""
    return compile_for(H200, fn, *avals, **options)


def lowered_for_h200(fn: Callable[..., Any], *avals: Any) -> list[tuple[str, str]]:
    """Lower `fn` for one H200; returns the name and the text of each Mosaic kernel after layout inference."""
    avals = placed(H200, avals)
    with tempfile.TemporaryDirectory(prefix="kernel_dump_") as folder:
        with _environment(MOSAIC_GPU_DUMP_TO=folder), abstract(H200):
            jax.jit(lambda *args: fn(*args)).trace(*avals).lower()
        paths = sorted(pathlib.Path(folder).glob("*.after_layout_inference.txt"))
        return [(path.name.split(".")[0].rpartition("_")[0], path.read_text()) for path in paths]


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Mosaic reads its variables whenever it lowers or compiles a kernel, so they can be set for one function."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _stdout_to(path: pathlib.Path) -> Iterator[None]:
    """Send the output of native code to a file."""
    sys.stdout.flush()
    before = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


# From jax 0.12 on a process compiles equal kernels once, so what was read of one is kept, by its text.
_SEEN: dict[str, KernelFigures] = {}


def _read_figures(folder: pathlib.Path, printed: str) -> dict[str, KernelFigures]:
    """`folder` holds the dumps of lowering, `printed` the PTX of each kernel and the output of ptxas."""
    texts: dict[str, set[str]] = collections.defaultdict(set)
    shared_memory: dict[str, int] = collections.defaultdict(int)
    for path in folder.glob("*.resources.txt"):
        dump = path.name.removesuffix(".resources.txt")
        name = dump.rpartition("_")[0]  # without its running number
        text = (folder / f"{dump}.after_layout_inference.txt").read_text()
        texts[name].add(text.replace(f'"{dump}"', f'"{name}"'))
        [used] = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", text)
        shared_memory[name] = max(int(used), shared_memory[name])
    kernels = {}
    for name in texts:
        figures = _figures_of(name, shared_memory[name], printed)
        for text in texts[name] - _SEEN.keys():
            assert figures is not None, f"{name} was not compiled"
            _SEEN[text] = figures
        kernels[name] = worst([_SEEN[text] for text in texts[name]])
    return kernels


def _figures_of(name: str, shared_memory: int, printed: str) -> KernelFigures | None:
    entry = f"{name}_mosaic_gpu_kernel"
    ptx = re.findall(rf"^\.visible \.entry {entry}\(.*?^}}", printed, re.MULTILINE | re.DOTALL)
    ptxas = re.findall(rf"Compiling entry function '{entry}'.*?Compile time", printed, re.DOTALL)
    assert len(ptx) == len(ptxas), f"{name}: {len(ptx)} times PTX, {len(ptxas)} times ptxas"
    if not ptx:
        return None
    threads = [re.findall(r"\.(?:reqntid|maxntid) (\d+), (\d+), (\d+)", text)[0] for text in ptx]
    return KernelFigures(
        threads=max(math.prod(map(int, axes)) for axes in threads),
        registers=max(int(n) for text in ptxas for n in re.findall(r"Used (\d+) registers", text)),
        spill_bytes=max(sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text))) for text in ptxas),
        shared_memory=shared_memory,
        wgmma=min(text.count("wgmma.mma_async") for text in ptx),
        tma=min(text.count("cp.async.bulk.tensor") for text in ptx),
        mma=min(text.count("mma.sync") for text in ptx),
        wgmma_serialised=bool(re.search(rf"instructions are serialized .*'{entry}'", printed)),
        sass=_sass_of(entry, printed),
    )


def _sass_of(entry: str, printed: str) -> tuple[str, ...]:
    """Return the instructions and the labels of a kernel."""
    section = re.search(
        rf"^\s*\.section\s+\.text\.{entry},.*?(?=^\s*\.section\s|\Z)", printed, re.MULTILINE | re.DOTALL
    )
    lines = re.findall(r"^\s*(?:/\*[0-9a-f]+\*/\s+(.*?) ;|(\.L_x_\d+:))", section[0], re.MULTILINE) if section else []
    return tuple(instruction or label for instruction, label in lines)


def _read_triton_figures(folder: pathlib.Path, hlo: str) -> dict[str, KernelFigures]:
    """`folder` holds XLA's dumps: the PTX of each kernel and fusion, and the list of their launches."""
    names = set(re.findall(r'"__gpu\$xla\.gpu\.triton".* name = "(\w+)"', hlo))
    [launches] = folder.glob("*.thunk_sequence.txt")
    kernels: dict[str, list[KernelFigures]] = collections.defaultdict(list)
    for path in folder.glob("*.ptx"):
        ptx = path.read_text()
        entry = "".join(re.findall(r"\.visible \.entry (\w+)\(", ptx))  # a Triton kernel is the only one in its PTX
        name = re.sub(r"_\d+$", "", entry)
        if name not in names:
            continue
        launch = re.search(rf" {entry} grid: .* threads: \[(.*)\]\s+shared_memory: (\d+)", launches.read_text())
        assert launch, f"{entry} is never launched"
        [target] = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
        command = [str(find_tool("ptxas")), "-v", f"-arch={target}", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        figures = KernelFigures(
            threads=math.prod(int(axis) for axis in launch[1].split(",")),
            registers=int(re.findall(r"Used (\d+) registers", said)[0]),
            spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))),
            shared_memory=int(launch[2]),
            wgmma=ptx.count("wgmma.mma_async"),
            tma=ptx.count("cp.async.bulk.tensor"),
            mma=ptx.count("mma.sync"),
            wgmma_serialised="instructions are serialized" in said,
        )
        kernels[name].append(figures)
    return {name: worst(figures) for name, figures in kernels.items()}


def worst(figures: list[KernelFigures]) -> KernelFigures:
    best_is_more = ("wgmma", "tma", "mma")
    names = [field.name for field in dataclasses.fields(KernelFigures) if field.name != "sass"]
    return KernelFigures(
        sass=figures[0].sass, **{n: (min if n in best_is_more else max)(getattr(f, n) for f in figures) for n in names}
    )

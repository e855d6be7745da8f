"""Compiling for NVIDIA GPUs (`gpus.py`) on a machine that has none.

XLA, Mosaic GPU and Triton compile for a described device: the JAX CUDA plugin and ptxas are needed, a GPU and its
driver are not. What comes back can be asserted on (memory analysis, HLO, thunks), never run or timed.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

# The plugin asks for libraries that only a machine with a GPU has, unless told not to.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, SingleDeviceSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from benchmarks.shared.gpus import H200, Gpu
from benchmarks.shared.program import Program


def why_not() -> str | None:
    """Why nothing can be compiled for a GPU here; None when it can."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "the JAX CUDA plugin is not installed (pip install jax-cuda13-plugin of jax's version)"
    if find_tool("ptxas") is None:
        return "ptxas was not found (pip install nvidia-cuda-nvcc, or a CUDA toolkit on PATH)"
    return None


OPTIMIZED = {"xla_backend_optimization_level": 3}  # also where XLA_FLAGS lowers it, as for the tests on a CPU


def program_of(device: Gpu, jitted: Any, *args: Any, options: dict[str, Any] | None = None) -> Program:
    """Compile a jitted function with its own options, and return the program.

    Args:
        args: pytrees of ShapeDtypeStruct or arrays, and static arguments that are not arrays.
        options: further options of XLA.
    """
    args = tuple(placed(device, arg) if _is_tree_of_arrays(arg) else arg for arg in args)
    with tempfile.TemporaryDirectory(prefix="program_") as folder:
        with abstract(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            lowered = jitted.trace(*args).lower()
        dumped = {"xla_dump_to": folder, "xla_dump_emitter_re": "none"}
        executable = lowered.compile(OPTIMIZED | dumped | (options or {}))
        # XLA leaves out the dump after the passes if they change nothing: then there is no command buffer.
        paths = pathlib.Path(folder).glob("*.thunk_sequence*.txt")
        thunks = max(paths, key=lambda path: ("after" in path.name, path.stat().st_size)).read_text()
    memory = executable.memory_analysis()
    return Program(executable.as_text() or "", thunks, memory.temp_size_in_bytes, memory.alias_size_in_bytes)


def _is_tree_of_arrays(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray) for leaf in leaves)


ONE = "1x1x1"  # slices x hosts x devices of a host


def abstract(device: Gpu) -> contextlib.AbstractContextManager[Any]:
    """Describe a GPU to lowerings within the block: Mosaic's asks for properties of the device."""
    described = AbstractDevice(device_kind=device.kind, num_cores=device.sms, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=described))


@functools.cache
def _topology(device: Gpu, shape: str) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        platform="cuda", topology_name=device.kind, topology=shape, target_config=device.description
    )


def gpus(device: Gpu, count: int) -> Sequence[jax.Device]:
    """Devices of one host that are only described."""
    return _topology(device, f"1x1x{count}").devices


def h200s(shape: str = ONE) -> Sequence[jax.Device]:
    """H200s that are only described: slices x hosts x devices of a host."""
    return _topology(H200, shape).devices


def placed(device: Gpu, avals: Any) -> Any:
    """Place arrays without a sharding on the mesh of the other arrays, or else on one device."""
    given = [x.sharding for x in jax.tree.leaves(avals) if isinstance(x, jax.ShapeDtypeStruct) and x.sharding]
    whole = NamedSharding(given[0].mesh, P()) if given else SingleDeviceSharding(_topology(device, ONE).devices[0])

    def place(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) and x.sharding else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, avals)


@functools.cache
def find_tool(name: str) -> str | None:
    """Return the path of ptxas or nvdisasm.

    The pip package's comes first, as in XLA, whose PTX may be too new for the ptxas of an older toolkit.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    from_pip = (str(path) for folder in folders for path in pathlib.Path(folder).glob(f"*/bin/{name}"))
    return next(from_pip, None) or shutil.which(name)

"""The device of a benchmark, its description in results, and the place of caches."""

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / "benchmarks" / ".cache"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "transformers", "numpy")
PEER_PACKAGES = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts of `jax.devices()[0]` for benchmarks.

    Attributes:
        platform: "gpu" or "cpu".
        l2_bytes: an upper bound of its last cache, which the data of a cold measurement has to exceed.
        memory_bytes: that jax may allocate.
    """

    platform: str
    kind: str
    compute_capability: float | None
    l2_bytes: int
    memory_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.platform == "gpu"


def prepare_environment() -> None:
    """Keeps every cache inside the checkout and leaves memory to peers outside jax. To be called first:
    torch, matplotlib and the hub's library read these variables as they are imported."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    folders = {
        "MPLCONFIGDIR": "matplotlib", "TRITON_CACHE_DIR": "triton",
        "CUDA_CACHE_PATH": "cuda", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "XDG_CACHE_HOME": "xdg",
    }  # fmt: skip
    for name, folder in folders.items():
        os.environ.setdefault(name, str(CACHE / folder))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The rest is for torch and FlashInfer, and for the memory of kernels outside XLA's own arena.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")
    import jax

    jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def open_device(tiny: bool) -> Device:
    """The first device of jax. Exits with a message where it is no GPU and the run is not `tiny`."""
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu" and not tiny:
        raise SystemExit(
            f"jax sees no GPU here, only {device.device_kind} ({device.platform}). Figures of a CPU say nothing about "
            "one: --tiny runs small shapes to show that the program works, and labels its results."
        )
    try:
        capability = float(getattr(device, "compute_capability", None))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        capability = None
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) if device.platform == "gpu" else 0
    # Hopper has 50 to 60 MB, Blackwell twice that.
    l2 = 64 * MIB if capability and capability < 10 else 128 * MIB
    return Device(
        device.platform, device.device_kind, capability,
        l2_bytes=l2 if device.platform == "gpu" else MIB // 64, memory_bytes=limit or 512 * MIB,
    )  # fmt: skip


def environment(device: Device, tiny: bool) -> dict[str, Any]:
    """Return the context of figures: device, driver, versions, date, commit."""
    versions = {name: _version(name) for name in PACKAGES}
    versions |= {name: _version(package) for name, package in PEER_PACKAGES.items() if name in sys.modules}
    return {
        "device_kind": device.kind,
        "platform": device.platform,
        "compute_capability": device.compute_capability,
        "tiny": tiny,
        "driver": _driver(),
        "card": _card() if device.is_gpu else None,
        "versions": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(sys.argv).replace(f"{CHECKOUT}/", ""),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        return path.read_text().splitlines()[0].strip()
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@functools.cache
def _card() -> str | None:
    query = "--query-gpu=name,power.limit,clocks.max.sm,clocks.max.mem"
    return _output("nvidia-smi", query, "--format=csv,noheader")


@functools.cache
def _commit() -> str | None:
    commit = _output("git", "-C", str(CHECKOUT), "rev-parse", "HEAD")
    changed = commit and _output("git", "-C", str(CHECKOUT), "status", "--porcelain")
    return f"{commit} with changes" if changed else commit


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

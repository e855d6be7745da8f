"""The versions of the software that compiles and runs the kernels."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

# Everything that compiles or runs a kernel. The ptxas that XLA prefers comes with nvidia-cuda-nvcc.
PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the installed packages of PACKAGES with their versions."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver_version(driver_file: Path = DRIVER_FILE) -> str | None:
    """Return the version of NVIDIA's driver, such as "580.65.06"; None if no driver answers."""
    try:
        if found := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", driver_file.read_text()):
            return found[1]
    except OSError:
        pass
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def cuda_version() -> int | None:
    """Return the CUDA runtime that jax uses, 1000 * major + 10 * minor; None without jax's CUDA plugin."""
    try:
        from jax._src.lib import cuda_versions  # jax has no public name for it
    except ImportError:
        return None
    return cuda_versions.cuda_runtime_get_version() if cuda_versions else None

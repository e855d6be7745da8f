"""Versions of the software that compiles and runs the kernels, and the versions known to miscompile them."""

import contextlib
import importlib.metadata
import re
import shutil
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
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def driver_version(driver_file: Path = DRIVER_FILE) -> str | None:
    """Return the version of NVIDIA's driver, such as "580.65.06"; None if no driver answers."""
    try:
        if match := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", driver_file.read_text()):
            return match[1]
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


def version_number(release: str) -> int:
    """Return a release such as "12.9" as `cuda_version` counts, 12090."""
    major, minor = release.split(".")[:2]
    return 1000 * int(major) + 10 * int(minor)


def miscompilation(cuda_version: int | None) -> str | None:
    """Return why causal attention is unreliable under a CUDA version; None if it is reliable or unknown.

    The bounds are from jax's Mosaic attention (jax/experimental/pallas/ops/gpu/attention_mgpu.py). The version does not
    tell 12.9.0 from 12.9.1.
    """
    if cuda_version is None or not 12080 <= cuda_version < 12091:
        return None
    return (
        f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10} is installed, and the ptxas of 12.8.0 to 12.9.1 "
        "miscompiles causal attention: install CUDA 13 (pip install 'jax[cuda13]')"
    )


def ptxas_version() -> str | None:
    """Return the release of the ptxas that jax finds first, such as "12.9"; None if there is none."""
    try:
        from jax._src.lib import cuda_path  # jax has no public name for it
    except ImportError:
        cuda_path = None
    ptxas = shutil.which("ptxas", path=f"{cuda_path}/bin") if cuda_path else None
    try:
        done = subprocess.run([ptxas or "ptxas", "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release ([\d.]+)", done.stdout)
    return match[1] if match else None

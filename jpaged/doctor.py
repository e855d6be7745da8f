"""Examination of a machine: devices and software, the kernels for a model, their self-test, and the caches."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import jax

from jpaged.config import EngineConfig
from jpaged.runtime.compilation_cache import executables_folder
from jpaged.runtime.placement import Placement
from jpaged.start.pool import available_host_memory
from jpaged.start.resolve import Device, Resolved, SettingChoice
from jpaged.start.setup import device_of, resolve_checkpoint, select_kernels
from pallas_kernels import toolchain
from pallas_kernels.dispatch import Choice
from pallas_kernels.selftest import FAILED, UNTESTED, Result

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """GPU as its driver sees it, whether jax uses it or not."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Cache:
    """Folder of compiled executables."""

    path: str
    entries: int
    size_bytes: int
    writable: bool


@dataclass(frozen=True)
class Host:
    """Free memory and disk space of the machine."""

    memory_available_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True)
class Report:
    """Result of an examination.

    Attributes:
        versions: by package; "driver", "cuda" and "ptxas" where they are known.
        model: the shape class that kernels were chosen for, in words.
        settings: the settings that may be left open, with their values.
        self_test: the reason why there are no tests; "" if there are.
        warnings: remarks on a machine that works.
        problems: failed tests, and reasons why nothing can run; empty if the machine works.
    """

    devices: tuple[Device, ...]
    cards: tuple[Card, ...]
    versions: dict[str, str]
    model: str
    settings: tuple[SettingChoice, ...]
    ops: tuple[Choice, ...]
    tests: tuple[Result, ...]
    self_test: str
    cache: Cache
    host: Host
    warnings: tuple[str, ...]
    problems: tuple[str, ...]


def examine(config: EngineConfig, *, retest: bool = False) -> Report:
    """Examine this machine for the model of a config.

    Args:
        retest: test kernels again and ignore stored results.

    Raises:
        ValueError: the model is missing or broken.
    """
    problems, kernels, resolved = [], None, None
    try:
        devices = jax.devices()
    except RuntimeError as error:
        devices = []
        problems.append(f"jax has no device: {error}")
    if devices:
        _, resolved = resolve_checkpoint(config, devices[0])
        placement = Placement.on(devices[: config.tensor_parallel_size or 1], resolved.model)
        try:
            kernels = select_kernels(resolved, placement, retest=retest)
        except NotImplementedError as error:
            problems.append(str(error))
    tests = kernels.tests if kernels else ()
    failed = [each for each in tests if each.status == FAILED]
    problems += [f"{each.program}: {each.test} failed its self-test: {each.reason}" for each in failed]
    cards, (cache, host) = _cards(), _cache_and_host()
    return Report(
        devices=tuple(map(device_of, devices)),
        cards=cards,
        versions=_versions(),
        model=_shapes(resolved) if resolved else "",
        settings=resolved.choices if resolved else (),
        ops=kernels.account if kernels else (),
        tests=tests,
        self_test="not listed: no kernels were chosen" if not kernels else "" if tests else "not needed on this device",
        cache=cache,
        host=host,
        warnings=tuple(_warnings([device.platform for device in devices], cards, tests, cache)),
        problems=tuple(problems),
    )


def _shapes(resolved: Resolved) -> str:
    """Return the shape class that kernels are chosen for, in words."""
    model = resolved.model
    return (
        f"{resolved.config.model}, {resolved.dtype}, head dim {model.head_dim}, {model.num_attention_heads} heads over "
        f"{model.num_key_value_heads}, blocks of {resolved.limits.block_size}"
    )


def _warnings(platforms: list[str], cards: tuple[Card, ...], tests: tuple[Result, ...], cache: Cache) -> list[str]:
    warnings = []
    if cards and "gpu" not in platforms:
        warnings.append("there is an NVIDIA GPU, but jax does not use it: pip install 'jpaged[cuda]'")
    ptxas = toolchain.ptxas_version()
    compilers = [toolchain.cuda_version(), toolchain.version_number(ptxas) if ptxas else None]
    if "gpu" in platforms and (wrong := next(filter(None, map(toolchain.miscompilation, compilers)), None)):
        warnings.append(wrong)
    warnings += [
        f"{result.program}: {result.test} is untested: {result.reason}" for result in tests if result.status == UNTESTED
    ]
    if not cache.writable:
        warnings.append(f"the compilation cache can't be written, so every start compiles everything: {cache.path}")
    return warnings


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("jpaged", "flax", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cuda = toolchain.cuda_version()
    known = {
        "driver": toolchain.driver_version(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "ptxas": toolchain.ptxas_version(),
    }
    return versions | toolchain.versions() | {name: version for name, version in known.items() if version}


def _cache_and_host() -> tuple[Cache, Host]:
    path = executables_folder()
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    cache = Cache(str(path), len(sizes), sum(sizes), os.access(existing, os.W_OK))
    return cache, Host(available_host_memory(), shutil.disk_usage(existing).free)


def _cards() -> tuple[Card, ...]:
    query = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rsplit(", ", 2) for line in done.stdout.splitlines()]
    return tuple(
        Card(name, int(free) * MIB, int(total) * MIB) for name, free, total in rows if (free + total).isdigit()
    )

"""The code of CPU kernels with and without LLVM's optimization, which takes two thirds of the time to make a kernel.

Results are the same bits: LLVM may not reorder operations. Functions with optimization have other names, so that a
process may have both.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Level:
    """Whether kernels are optimized from now on."""

    optimizes = True


@contextmanager
def unoptimized() -> Iterator[None]:
    """Compile kernels without optimization within the block, except in blocks of `optimized`."""
    if importlib.util.find_spec("llvmlite") is None:
        yield
        return
    from llvmlite import binding

    create, tune = binding.Target.create_target_machine, binding.create_pipeline_tuning_options
    level = lambda usual: usual if Level.optimizes else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Level, "optimizes", False)
        patch.setattr(
            binding.Target, "create_target_machine",
            lambda self, opt=2, **options: create(self, opt=level(opt), **options),
        )  # fmt: skip
        patch.setattr(
            binding, "create_pipeline_tuning_options", lambda speed_level=2: tune(speed_level=level(speed_level))
        )
        yield


@contextmanager
def optimized() -> Iterator[None]:
    """Compile kernels as users do within the block."""
    if importlib.util.find_spec("llvmlite") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Level, "optimizes", True)
        for name in ("attention", "product", "sampling", "writes"):
            module = importlib.import_module(f"pallas_kernels.cpu.{name}")
            patch.setattr(module, "VERSION", f"{module.VERSION}, optimized")  # part of the functions' names
        yield

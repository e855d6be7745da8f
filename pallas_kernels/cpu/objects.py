"""Machine code of LLVM modules, kept in the folder of jax's compilation cache between runs."""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import llvmlite
from llvmlite import binding, ir

from pallas_kernels.cpu.code import Machine
from pallas_kernels.cpu.team import num_threads

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32


def engine_of(name: str, write: Callable[[], ir.Module | str]) -> Any:
    """Return an engine with the compiled functions of a module, for this machine.

    The code is loaded from jax's cache (`jax_compilation_cache_dir`) if it is there. Otherwise the module is written,
    compiled and kept. It must therefore name what is at other addresses in another process (`binding.add_symbol`).

    Args:
        name: tells the module from all others that this version of the package writes for a machine.
        write: return the module, or its text.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = Machine.host()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3, jit=True
    )
    versions = binding.llvm_version_info, llvmlite.__version__, _sources()
    key = hashlib.sha256(repr((versions, machine, num_threads(), name)).encode()).hexdigest()
    folder = jax.config.jax_compilation_cache_dir
    file = Path(folder) / f"jpaged-llvm-{key[:40]}" if folder else None
    if file and (code := _read(file, key)) is not None:
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    else:
        parsed = binding.parse_assembly(str(write()))
        builder = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(parsed, builder)
        engine = binding.create_mcjit_compiler(parsed, target)
        engine.set_object_cache(lambda _, made: _write(file, key, made) if file else None, lambda _: None)
    engine.finalize_object()
    return engine


@functools.cache
def _sources() -> str:
    """Return a digest of the package's sources, which write the modules."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(file: Path, key: str) -> bytes | None:
    """Return the code in a file; None if there is none that is whole."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if digest == _digest(key, code) else None


def _write(file: Path, key: str, code: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(_digest(key, code) + code)
        os.replace(part.name, file)
    except OSError as error:
        logger.info("the code of a kernel is not kept: %s", error)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()

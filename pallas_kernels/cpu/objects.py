"""Machine code of LLVM modules, kept in the folder of jax's compilation cache between runs."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from llvmlite import binding, ir

from pallas_kernels.cpu.code import Machine

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32


def engine_of(module: ir.Module) -> Any:
    """Return an engine with the compiled functions of a module, for this machine.

    The code is loaded from jax's cache (`jax_compilation_cache_dir`) if it is there, and written otherwise. A module
    must therefore name what is at other addresses in another process (`binding.add_symbol`).
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine, text = Machine.host(), str(module)
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3, jit=True
    )
    described = repr((binding.llvm_version_info, machine.cpu, machine.features, text))
    key = hashlib.sha256(described.encode()).hexdigest()
    folder = jax.config.jax_compilation_cache_dir
    file = Path(folder) / f"jpaged-llvm-{key[:40]}" if folder else None
    parsed, code = binding.parse_assembly(text), _read(file, key) if file else None
    if code is None:
        builder = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(parsed, builder)
    engine = binding.create_mcjit_compiler(parsed, target)
    write = lambda _, made: _write(file, key, made) if file and code is None else None
    engine.set_object_cache(write, lambda _: code)
    engine.finalize_object()
    return engine


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

"""Machine code that is kept between runs."""

import ctypes

import jax
import pytest

pytest.importorskip("llvmlite")

from llvmlite import binding

from pallas_kernels.cpu import objects
from pallas_kernels.cpu.objects import engine_of

MODULE = "define i32 @f(i32 %x) {{\n  %y = mul i32 %x, {factor}\n  ret i32 %y\n}}\n"


@pytest.fixture
def folder(tmp_path):
    """The folder of jax's cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def result(factor: int) -> int:
    engine = engine_of(f"times {factor}", lambda: MODULE.format(factor=factor))
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(engine.get_function_address("f"))(7)


@pytest.fixture
def compiled(monkeypatch):
    """Counts the modules that are optimized."""
    calls, create = [], binding.create_pass_builder
    monkeypatch.setattr(objects.binding, "create_pass_builder", lambda *args: calls.append(1) or create(*args))
    return calls


def test_a_module_is_compiled_once(folder, compiled):
    assert [result(3), result(3), result(5), result(3)] == [21, 21, 35, 21]
    assert len(compiled) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[:-1], lambda code: code[:-1] + b"?"])
def test_a_damaged_file_is_written_again(folder, compiled, damage):
    result(3)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert result(3) == 21 and len(compiled) == 2
    assert [each.read_bytes() for each in folder.iterdir()] == [whole]


def test_the_code_of_another_module_is_not_used(folder):
    result(3)
    (three,) = folder.iterdir()
    result(5)
    (five,) = set(folder.iterdir()) - {three}
    five.write_bytes(three.read_bytes())
    assert result(5) == 35


def test_without_a_folder_nothing_is_kept(folder, compiled):
    jax.config.update("jax_compilation_cache_dir", None)
    assert [result(3), result(3)] == [21, 21] and len(compiled) == 2 and not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(folder, compiled):
    folder.rmdir()
    assert [result(3), result(3)] == [21, 21] and len(compiled) == 2

"""The cache of executables: jax's settings stay the program's, and a second start compiles nothing."""

import logging
import os
import re
import warnings
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jpaged import LLM, progress
from jpaged.config import EngineConfig, Limits
from jpaged.models.config import ModelConfig
from jpaged.runtime.compilation_cache import _warn_once, cache_folder, compilation_cache
from jpaged.runtime.swap import TRANSFERS
from jpaged.start import pool
from tests.runtime.caches import cache_of
from tests.support.random_model import random_model
from tests.support.runners import runner_of

pytestmark = pytest.mark.slow

FOLDER = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of executables: empty, and with a jax that has not opened a cache yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _warn_once.cache_clear()
    before = dict(jax.config.values)
    forget_cache()
    yield tmp_path / "jpaged" / "xla"
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)
    reset_cache()


def forget_cache():
    """Leave jax's cache as a process finds it."""
    jax.config.update(FOLDER, None)
    reset_cache()


class Loads:
    """Counts, while it is entered, the executables that jax compiles and those that it loads from its cache."""

    def __enter__(self):
        self.requests = self.loaded = 0
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)

    @property
    def compiled(self):
        return self.requests - self.loaded

    def _on_event(self, name, **_):
        self.loaded += name == "/jax/compilation_cache/cache_hits"

    def _on_duration(self, name, _seconds, **_kwargs):
        self.requests += name == "/jax/core/compile/backend_compile_duration"


def compile_anew(scale: float = 3.5) -> Loads:
    """Compile a small function that jax does not know yet; the same one for one scale."""

    def scaled(x):
        return jnp.sin(x) * scale

    with Loads() as loads:
        jax.jit(scaled).lower(jax.ShapeDtypeStruct((7,), jnp.float32)).compile()
    return loads


def entries(folder, function="scaled"):
    return sorted(folder.glob(f"jit_{function}-*-cache"))


def test_the_cache_is_where_programs_keep_theirs(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "jpaged"  # XDG_CACHE_HOME
    for unset in (lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""), lambda: monkeypatch.delenv("XDG_CACHE_HOME")):
        unset()
        assert cache_folder() == tmp_path / "home" / ".cache" / "jpaged"


def test_the_settings_are_the_programs_again_afterwards(folder):
    before = dict(jax.config.values)
    with pytest.raises(ValueError, match="within"), compilation_cache():
        compile_anew()
        raise ValueError("within")
    assert jax.config.values == before and len(entries(folder)) == 1
    compile_anew(scale=4.5)
    assert len(entries(folder)) == 1, "the program's own function was written to the engine's folder"


def test_a_folder_of_the_program_is_used_with_its_settings(folder, tmp_path):
    jax.config.update(FOLDER, str(tmp_path / "own"))
    for seconds, expected in ((60.0, 0), (0.0, 1)):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        before = dict(jax.config.values)
        with compilation_cache():
            compile_anew()
        assert len(entries(tmp_path / "own")) == expected and jax.config.values == before
    assert not folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100],
        lambda data: b"",
        lambda data: b"garbage" * 99,
        lambda data: zlib.compress(b"no program"),
    ],
    ids=["truncated", "empty", "garbage", "another content"],
)
def test_an_unreadable_entry_is_written_again(folder, damage, caplog):
    with compilation_cache():
        compile_anew()
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    caplog.set_level(logging.INFO, logger="jpaged")
    with compilation_cache():
        assert compile_anew().compiled == 1
    assert caplog.messages == [f"compilation cache: writing {entry} again"]
    with warnings.catch_warnings(action="error"), compilation_cache():
        assert compile_anew().compiled == 0
    assert len(entry.read_bytes()) > len(whole) / 2


@pytest.mark.parametrize("own", [False, True], ids=["folder of jpaged", "folder of the program"])
def test_an_entry_of_another_key_is_not_loaded(folder, tmp_path, own):
    if own:
        folder = tmp_path / "own"
        jax.config.update(FOLDER, str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def results():
        x = jnp.arange(4, dtype=jnp.float32)
        with compilation_cache(), Loads() as loads:
            functions = [jax.jit(lambda x, by=by: x * by).lower(x).compile() for by in (2, 3)]
        return [function(x).tolist() for function in functions], loads.compiled

    expected, _ = results()
    assert expected == [[0, 2, 4, 6], [0, 3, 6, 9]] and results() == (expected, 0)
    first, second = entries(folder, "_lambda")
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert results() == (expected, 2) and results() == (expected, 0)


def test_the_folder_is_private(folder):
    with compilation_cache():
        compile_anew()
    assert [each.stat().st_mode & 0o777 for each in (folder.parent, folder)] == [0o700, 0o700]


@pytest.mark.parametrize("depth, mode", [(0, 0o777), (0, 0o720), (1, 0o702), (1, 0o1777)])
def test_a_folder_that_others_may_write_is_not_used(folder, depth, mode, caplog):
    with compilation_cache():
        compile_anew()
    before = entries(folder)
    refused = (folder, folder.parent)[depth]
    refused.chmod(mode)
    for _ in range(2):
        with compilation_cache():
            assert compile_anew().compiled == 1 and compile_anew(scale=5.5).compiled == 1
    assert entries(folder) == before
    assert caplog.messages == [
        f"cache: not used: {refused} may be written by others: user {os.geteuid()} owns it, and its mode is {mode:o}; "
        "XDG_CACHE_HOME names another folder"
    ]
    refused.chmod(0o755)
    with compilation_cache():
        assert compile_anew().compiled == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_not_used(folder, caplog):
    folder.mkdir(0o700, parents=True)
    os.chown(folder, 12345, -1)
    with compilation_cache():
        compile_anew()
    assert not entries(folder)
    assert caplog.messages[0].startswith(f"cache: not used: {folder} may be written by others: user 12345 owns it")


def test_a_folder_that_cannot_be_created_is_named_in_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        with compilation_cache():
            assert compile_anew().compiled == 1
    (message,) = caplog.messages
    assert str(tmp_path / "file") in message and message.endswith("; XDG_CACHE_HOME names another folder")


@pytest.mark.parametrize("home", [None, "relative"])
def test_without_a_home_a_folder_for_temporary_files_is_used(tmp_path, monkeypatch, caplog, home):
    def unknown(_):
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    expected = tmp_path / f"jpaged-{os.geteuid()}"
    for _ in range(2):
        assert cache_folder() == expected
    with compilation_cache():
        compile_anew()
    assert len(entries(expected / "xla")) == 1
    (message,) = caplog.messages
    assert f"{expected} is used" in message and "XDG_CACHE_HOME" in message


def test_messages_of_jax_are_those_that_the_program_wants(folder, caplog):
    for name in (None, "jax._src.compilation_cache"):
        caplog.set_level(logging.INFO, logger=name)
    compiler = logging.getLogger("jax._src.compiler")
    with compilation_cache():
        compile_anew()
        compiler.info("a message")
    assert caplog.messages == ["a message"]
    assert compiler.level == logging.NOTSET and not compiler.filters


LLAMA = ModelConfig(
    vocab_size=2000, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64,
)  # fmt: skip
LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, block_size=8)  # three shapes of a step
GPU = {"bytes_limit": 2**24, "bytes_in_use": 2**20}
BLOCK_BYTES = cache_of(LLAMA, 8, "float32").block_bytes


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.fixture
def measured(monkeypatch):
    """A device that reports its memory, as GPUs do."""
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: GPU)


def test_a_second_start_compiles_nothing_where_the_pool_is_measured(measured, model, folder, monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    caplog.set_level(logging.INFO, logger="jpaged")
    pools, settings = [], dict(jax.config.values)
    for _ in range(2):
        with Loads() as loads:
            llm = LLM(
                model, block_size=8, swap_space=0, progress=False, max_num_seqs=2, max_num_batched_tokens=16,
                warm_up=True,
            )  # fmt: skip
        pools.append(llm.engine.runner.blocks.num_blocks)
        assert jax.config.values == settings
        forget_cache()
    assert loads.loaded > 0 and loads.compiled == 0
    assert pools[0] == pools[1] > 1000
    # Each of the three shapes once: the measurement shares them with the warm-up.
    assert [len(entries(folder, name)) for name in ("_forward", "_choose", "_score")] == [3, 2, 1]
    assert any(message.startswith("compiled 1 of 3 shapes, about ") for message in caplog.messages)
    assert any(re.fullmatch(r"compiled in \d+\.\d seconds", message) for message in caplog.messages)


@pytest.mark.parametrize(
    "sampling, model_part, swap_space, most",
    [
        (2**20, 2**22, 0.0, 2**22),
        (2**22, 2**20, 0.0, 2**22),
        (1, 1, 1.0, 2 * TRANSFERS[-1] * BLOCK_BYTES),
        (0, 0, 0.0, 0),
    ],
    ids=["model", "sampling", "swaps", "nothing"],
)
def test_the_pool_leaves_room_for_the_part_of_a_step_that_needs_most(
    measured, model, monkeypatch, sampling, model_part, swap_space, most
):
    monkeypatch.setattr(pool, "sampling_temporaries", lambda *_: sampling)
    monkeypatch.setattr(pool, "model_temporaries", lambda *_: model_part)
    config = EngineConfig(swap_space=swap_space, gpu_memory_utilization=0.75)
    assert runner_of(model, config, LIMITS).blocks.num_blocks == (12 * 2**20 - 2**20 - most) // BLOCK_BYTES


def test_pool_of_a_device_without_figures_holds_every_sequence_whole(model):
    """The device reports no memory, as a CPU does; the model is small enough for all blocks that could be in use."""
    runner = runner_of(model, EngineConfig(swap_space=0.0), LIMITS)
    assert runner.blocks.num_blocks == LIMITS.max_num_seqs * LIMITS.max_model_len // 8

"""The GPU kernels compiled for an H200 and an A100 without a GPU: the figures of ptxas and XLA."""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import H200
from pallas_kernels import mosaic
from tests.kernels import figures, gpu_compiler
from tests.kernels.implementations import ops_of

pytestmark = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))

REGISTERS_PER_SM = 65_536
S = jax.ShapeDtypeStruct
# The script and the deep tier compile the whole list, the usual tier one case. `test_triton.py` compiles Triton's
# configurations, `test_sass.py` the usual ones with head dim 128.
MOSAIC = [case for case in figures.CASES if case.program == "mosaic"]
USUAL = [(64, "bfloat16", 16)]
CASES = [case if case[1:4] in USUAL else pytest.param(case, marks=pytest.mark.deep) for case in MOSAIC]


def check(case: figures.Case, kernels: dict[str, gpu_compiler.KernelFigures]) -> None:
    device = figures.PROGRAMS[case.program][1]
    for name, seen in kernels.items():
        assert seen.spill_bytes == 0, (name, seen)
        assert seen.registers * seen.threads <= REGISTERS_PER_SM, (name, seen)
        assert seen.shared_memory < device.shared_memory, (name, seen)
        assert not seen.wgmma_serialised, (name, seen)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_fit(case):
    kernels = figures.compiled(case)
    check(case, kernels)
    assert kernels.keys() == {"kv_write", "copy_blocks", "paged_decode", "paged_decode_combine", "ragged_paged"}
    for name in ("paged_decode", "ragged_paged"):
        assert kernels[name].wgmma, f"{name}: no tensor cores"
        assert kernels[name].tma, f"{name}: no TMA"
    if case.head_dim < 256:  # two thread blocks of decode share an SM: one computes while the other waits for memory
        decode = kernels["paged_decode"]
        assert 2 * (decode.shared_memory + 1024) <= H200.shared_memory_per_sm
        assert 2 * decode.registers * decode.threads <= REGISTERS_PER_SM


@pytest.mark.deep
def test_kernels_with_every_option_fit():
    case = figures.Case("mosaic", 128, "bfloat16", 16, 4)
    check(case, figures.compiled(case, soft_cap=30.0, window=1000, return_lse=True))


# Head dims of the pool and query heads of a KV head of the checkpoints in docs/models.md, with their windows and caps.
MODELS = {
    "opt-125m": (64, 1, {}),
    "granite-3.3-2b": (64, 4, {}),
    "qwen2-0.5b": (64, 7, {}),
    "olmo-2-7b, phi-3.5-mini": (128, 1, {}),
    "gemma-2-27b": (128, 2, dict(soft_cap=50.0, window=4096)),
    "gemma-3-27b": (128, 2, dict(window=1024)),
    "phi-4-mini": (128, 3, {}),
    "llama-3, mistral, mixtral, qwen3, smollm3": (128, 4, dict(window=4096)),
    "qwen2.5-7b": (128, 7, {}),
    "qwen3-30b-a3b": (128, 8, {}),
    "gemma-2-9b": (256, 2, dict(soft_cap=50.0, window=4096)),
    "gemma-3-1b": (256, 4, dict(window=512)),
    "gpt-oss": (64, 8, dict(window=128, sinks=True)),
}


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_kernels_for_the_shapes_of_models_fit(model):
    head_dim, group, options = MODELS[model]
    case = figures.Case("mosaic", head_dim, "bfloat16", 16, group)
    check(case, figures.compiled(case, **options))


@pytest.mark.deep
def test_triton_kernels_with_sinks_fit():
    kernels = figures.compiled(figures.Case("triton", 64, "bfloat16", 16, 8), sinks=True, window=128)
    assert not any(seen.spill_bytes for seen in kernels.values()), kernels


def test_the_page_has_every_configuration():
    """Figures differ a little between compilers; which configurations they are of does not."""
    lines = [line for line in figures.PAGE.read_text().splitlines() if line.startswith(("| mosaic |", "| triton |"))]
    rows = {tuple(cell.strip() for cell in line.split("|")[1:6]) for line in lines}
    assert rows and all(line.split("|")[8].strip() == "0" for line in lines)
    for case in figures.CASES:
        for op in ("decode", "ragged"):
            expected = figures.configuration(case.program, op, case.head_dim, case.pool_dtype)
            shape = (case.program, str(case.head_dim), case.pool_dtype, expected)
            assert any((row[0], *row[2:]) == shape and op in row[1] for row in rows), shape


POOL, TOKENS = (4096, 8, 16, 128), (64, 8, 128)
POOL_BYTES = 4096 * 8 * 16 * 128 * 2
ANGLES = S((64, 64), jnp.float32)
STEP_ARGS = (
    S(TOKENS, jnp.bfloat16),
    S(TOKENS, jnp.bfloat16),
    S(TOKENS[:1], jnp.int32),
    [S(POOL, jnp.bfloat16)] * 8,
    ANGLES,
    ANGLES,
)


def step(k, v, slots, pools, cos, sin, *, order=None):
    """Four layers' KV writes, and results in `order`."""
    out = []
    for layer in range(0, len(pools), 2):
        out += ops_of(mosaic).write_kv(*pools[layer : layer + 2], k + layer, v + layer, slots, cos_t=cos, sin_t=sin)
    return out if order is None else [out[i] for i in order]


def test_donated_pools_are_written_in_place():
    result = gpu_compiler.compile_for_h200(step, *STEP_ARGS, donate_argnums=3, figures=False)
    assert result.aliased_bytes == 8 * POOL_BYTES
    assert result.copies_of(POOL, jnp.bfloat16) == 0
    assert result.temp_bytes < POOL_BYTES / 10


def test_copies_would_be_seen():
    """Results in another order than the donated arguments: XLA aliases all bytes, and copies pools all the same."""
    fn = functools.partial(step, order=[0, 2, 4, 6, 1, 3, 5, 7])
    result = gpu_compiler.compile_for_h200(fn, *STEP_ARGS, donate_argnums=3, figures=False)
    assert result.aliased_bytes == 8 * POOL_BYTES
    assert result.copies_of(POOL, jnp.bfloat16) > 0
    assert result.temp_bytes >= POOL_BYTES


def test_blocks_are_copied_in_place():
    """Through a copy of those blocks, and of no more."""
    indices = S((16,), jnp.int32)
    result = gpu_compiler.compile_for_h200(
        ops_of(mosaic).copy_blocks, S(POOL, jnp.bfloat16), indices, indices, donate_argnums=0, figures=False
    )
    assert result.aliased_bytes == POOL_BYTES
    assert result.copies_of(POOL, jnp.bfloat16) == 0
    assert result.temp_bytes < 1.1 * 16 * POOL_BYTES / POOL[0]


def test_compiling_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = S((1, 1, 64), jnp.bfloat16)
    pool = S((2, 1, 8, 64), jnp.bfloat16)
    result = gpu_compiler.compile_for_h200(ops_of(mosaic).write_kv, pool, pool, x, x, S((1,), jnp.int32))
    assert len(result.kernels) == 1
    assert not list(pathlib.Path(tmp_path).iterdir())
    assert not [name for name in os.environ if name.startswith("MOSAIC_GPU_DUMP")]

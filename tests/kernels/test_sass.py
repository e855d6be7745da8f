"""The evidence of each optimisation in the machine code for an H200. docs/kernel-figures.md has the numbers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.shared import deviceless
from pallas_kernels import mosaic, rotate
from pallas_kernels.mosaic import ragged
from tests.kernels import gpu_compiler, mosaic_program, sass
from tests.kernels.implementations import ops_of

pytestmark = pytest.mark.skipif(
    deviceless.why_not() is not None or deviceless.find_tool("nvdisasm") is None,
    reason=str(deviceless.why_not() or "nvdisasm was not found (pip install nvidia-cuda-nvdisasm)"),
)

S = jax.ShapeDtypeStruct
T, SEQS = 520, 12


@functools.cache
def code(kernel: str, head_dim: int = 128) -> tuple[str, ...]:
    """The machine code of an attention kernel: 8 KV heads of 4 query heads each, blocks of 16 tokens."""
    return compiled(head_dim)[kernel].sass


@functools.cache
def compiled(head_dim: int, **options: float) -> dict[str, gpu_compiler.KernelFigures]:
    pool, ints = S((999, 8, 16, head_dim), jnp.bfloat16), [S((n,), jnp.int32) for n in (SEQS, SEQS + 1)]

    def attend(q, pool, table, contexts, cu):
        return ops_of(mosaic).ragged_paged_attention(q, pool, pool, table, contexts, cu, scale=0.1, **options)

    q, table = S((T, 32, head_dim), jnp.bfloat16), S((SEQS, 500), jnp.int32)
    return gpu_compiler.compile_for_h200(attend, q, pool, table, *ints, sass=True).kernels


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.deep), 128])
def test_ragged_softmax_overlaps_with_the_product(head_dim):
    """No exponential stands between the wait for P V and the next product, in either loop."""
    loops = sass.main_loops(code("ragged_paged", head_dim))
    assert len(loops) == 2, "one loop with masks, one without"
    for loop in loops:
        assert sass.count(loop, "MUFU.EX2") == 66, "64 rows of 128 keys over 128 threads, and the factor of two rows"
        assert sass.exposed(loop) == 0


@pytest.mark.deep
def test_ragged_without_the_wait_for_k_exposes_the_softmax(monkeypatch):
    """The test above can fail: ptxas then moves the wait for P V above the softmax of a loop."""
    monkeypatch.setattr(ragged, "wait_for_keys", lambda *args: None)
    loops = sass.main_loops(compiled.__wrapped__(128)["ragged_paged"].sass)
    assert len(loops) == 2
    assert max(map(sass.exposed, loops)) > 50


def test_ragged_scale_costs_no_multiplication():
    """The maximum is taken on raw scores: the scale is the factor of one FFMA per score."""
    plain = min(sass.main_loops(code("ragged_paged")), key=len)
    assert len(plain) < 570, "597 instructions with the scale before the maximum"
    assert sass.count(plain, "FFMA") >= 64 and sass.count(plain, "FMUL") < 96


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param(dict(soft_cap=30.0, window=1000), id="capped, windowed", marks=pytest.mark.deep),
    ],
)
def test_ragged_loops_keep_everything_in_registers(options):
    loops = sass.main_loops(compiled(128, **options)["ragged_paged"].sass)
    assert len(loops) == 2 + ("window" in options)
    for loop in loops:
        assert sass.count(loop, "STL") == sass.count(loop, "LDL") == 0
        assert sass.exposed(loop) <= 2 * ("soft_cap" in options), "the factors of two rows at most"


@pytest.mark.parametrize(("kernel", "most"), [("ragged_paged", 8), ("paged_decode", 14), ("paged_decode_combine", 4)])
def test_few_barriers_of_a_warpgroup(kernel, most):
    """47, 34 and 18 with a barrier before every copy and around every store."""
    assert 0 < sass.count(code(kernel), "BAR.SYNC") <= most


@pytest.mark.parametrize("kernel", ["ragged_paged", "paged_decode"])
def test_no_barrier_between_the_boxes_of_a_tile(kernel):
    listing = code(kernel)
    copies = [at for at, line in enumerate(listing) if "UTMALDG" in line]
    assert len(copies) >= 8
    between = [sass.count(listing[a:b], "BAR.SYNC") for a, b in itertools.pairwise(copies)]
    assert not any(between), between


def test_combine_fetches_all_splits_at_once():
    """The loop that copies waits for nothing."""
    listing = code("paged_decode_combine")
    bodies = [listing[lines.start : lines.stop] for lines in sass.loops(listing)]
    fetch = next(body for body in bodies if sass.count(body, "UTMALDG") == 2)
    assert not sass.count(fetch, "SYNCS.PHASECHK") and not sass.count(fetch, "BAR.SYNC")


@pytest.mark.parametrize(("head_dim", "copies"), [(64, 11), (128, 7), (256, 5)])
def test_kv_write_fetches_angles_once_for_all_heads(head_dim, copies):
    """Both halves of K, V, and cos and sin for each head of a piece: 19 copies with a pair for each of 8 heads."""
    pool, k, angles = (
        S((64, 8, 16, head_dim), jnp.bfloat16),
        S((9, 8, head_dim), jnp.bfloat16),
        S((9, head_dim // 2), jnp.float32),
    )
    [(name, text)] = gpu_compiler.lowered_for_h200(
        lambda pool, k, slots, angles: ops_of(mosaic).write_kv(pool, pool, k, k, slots, cos_t=angles, sin_t=angles),
        pool, k, S((9,), jnp.int32), angles,
    )  # fmt: skip
    assert [event.what for event in mosaic_program.parse(name, text).events].count("load") == copies


@pytest.mark.deep
@pytest.mark.parametrize(("mixed", "kernels", "others"), [(False, 3, 6), (True, 4, 7)])
def test_launches_of_a_layer(mixed, kernels, others):
    """Expect, besides the kernels: the rotation of q, which also pads it, and in mixed steps another one for decode
    tokens; the split of k and v; two products with a reduction. Nothing is sliced, gathered or copied for attention."""
    per_layer = layers(2, mixed) - layers(1, mixed)
    assert per_layer["mosaic_gpu_v2"] == kernels
    assert per_layer.total() - kernels <= others, per_layer


def layers(number: int, mixed: bool):
    """The launches of so many layers of a Llama's attention."""
    n, k, h, d, t = 32, 8, 128, 1024, 64

    def layer(x, pools, slots, table, contexts, cu, cos, sin):
        for i in range(number):
            qkv = (x @ jnp.full((d, (n + 2 * k) * h), 0.1 + i, x.dtype)).reshape(t, n + 2 * k, h)
            q, key, v = rotate(qkv[:, :n], cos, sin), qkv[:, n : n + k], qkv[:, n + k :]
            pools[i] = ops_of(mosaic).write_kv(*pools[i], key, v, slots, cos_t=cos, sin_t=sin)
            if mixed:
                o = ops_of(mosaic).ragged_paged_attention(q, *pools[i], table, contexts, cu, scale=0.1)
            else:
                o = ops_of(mosaic).paged_decode_attention(q, *pools[i], table, contexts, scale=0.1)
            x = o.reshape(t, n * h) @ jnp.full((n * h, d), 0.2 + i, x.dtype)
        return x, pools

    seqs = SEQS if mixed else t
    pool, angles = S((77, k, 16, h), jnp.bfloat16), S((t, h // 2), jnp.float32)
    ints = S((t,), jnp.int32), S((seqs, 500), jnp.int32), S((seqs,), jnp.int32), S((seqs + 1,), jnp.int32)
    return gpu_compiler.compile_for_h200(
        layer, S((t, d), jnp.bfloat16), [(pool, pool)] * number, *ints, angles, angles, donate_argnums=1, figures=False
    ).launches

"""Rules of the hardware that interpreters and ptxas don't check, on every shape class; and planted violations."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import H200
from pallas_kernels import mosaic, tuning
from pallas_kernels.mosaic import combine, decode, ring, support, writes
from tests.kernels import gpu_compiler, mosaic_program
from tests.kernels.implementations import ops_of

pytestmark = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))

S = jax.ShapeDtypeStruct
FP8 = "float8_e4m3fn"
HEAD_DIMS, POOL_DTYPES, KV_HEADS = (64, 128, 256), ("bfloat16", FP8), (1, 2, 3, 5, 7, 8)
CLASSES = list(itertools.product(HEAD_DIMS, POOL_DTYPES))
T, SEQS, BLOCKS = 300, 16, 64
RESERVED = 1024  # bytes of shared memory that CUDA keeps for each thread block


def faults(fn, *avals) -> dict[str, list[str]]:
    """Return the faults of each kernel of a function; it must have some kernels.

    Decode is meant to have two thread blocks on a multiprocessor: one computes while the other waits for memory.
    """
    device, found = H200, dict[str, list[str]]()
    for dump in gpu_compiler.lowered_for_h200(fn, *avals):
        program = mosaic_program.parse(*dump)
        found[program.name] = program.faults(shared_memory=device.shared_memory)
        two = 2 * (program.shared_memory + RESERVED)
        if program.name == "paged_decode" and program.grid[0] > device.sms and two > device.shared_memory_per_sm:
            found[program.name].append(
                f"{program.shared_memory} bytes of shared memory leave room for one thread block"
            )
    assert found
    return found


def pool(head_dim: int, pool_dtype: str, num_kv_heads: int, block_size: int = 16) -> S:
    return S((BLOCKS, num_kv_heads, block_size, head_dim), jnp.dtype(pool_dtype))


def scales(pool_dtype: str, num_kv_heads: int) -> dict[str, jax.Array]:
    ones = jnp.ones(num_kv_heads, jnp.float32)
    return {} if pool_dtype == "bfloat16" else dict(k_scale_k=ones, v_scale_k=ones)


def write_faults(head_dim: int, pool_dtype: str, num_kv_heads: int) -> dict[str, list[str]]:
    """Faults of the forms of the KV write and of the block copy."""

    def ops(k, slots, angles, copies, k_pool):
        options, angles = scales(pool_dtype, num_kv_heads), dict(cos_t=angles, sin_t=angles)
        queries = jnp.tile(k, (1, 3, 1))
        return (
            ops_of(mosaic).write_kv(k_pool, k_pool, k, k, slots, **angles, **options),
            ops_of(mosaic).write_kv(k_pool, k_pool, k, k, slots, q_tnh=queries, **angles, **options),
            ops_of(mosaic).write_kv(k_pool, k_pool, k, k, slots, **options),
            ops_of(mosaic).copy_blocks(k_pool, copies, copies),
        )

    k, angles = S((T, num_kv_heads, head_dim), jnp.bfloat16), S((T, head_dim // 2), jnp.float32)
    return faults(ops, k, S((T,), jnp.int32), angles, S((5,), jnp.int32), pool(head_dim, pool_dtype, num_kv_heads))


def attention_faults(
    head_dim: int, pool_dtype: str, group: int, *, num_kv_heads: int = 2, block_size: int = 16, **options
) -> dict[str, list[str]]:
    """Faults of the ragged kernel and of both decode kernels: an op on a mixed batch has all three."""
    wide = S((T, num_kv_heads * group, head_dim), jnp.bfloat16)
    kv, ints = pool(head_dim, pool_dtype, num_kv_heads, block_size), [S((n,), jnp.int32) for n in (SEQS, SEQS + 1)]
    table = S((SEQS, 131_072 // block_size), jnp.int32)

    def ops(q, kv, table, contexts, cu):
        shared = dict(scale=0.1, **scales(pool_dtype, num_kv_heads), **options)
        return ops_of(mosaic).ragged_paged_attention(q, kv, kv, table, contexts, cu, **shared)

    return faults(ops, wide, kv, table, *ints)


def decode_faults(head_dim: int, pool_dtype: str, group: int, tiles=None, **options) -> dict[str, list[str]]:
    """Faults of both decode kernels."""
    heads = S((SEQS, 2 * group, head_dim), jnp.bfloat16)
    table, contexts = S((SEQS, 131_072 // 16), jnp.int32), S((SEQS,), jnp.int32)

    ops = ops_of(mosaic, decode=tiles)

    def op(q, kv, table, contexts):
        options_of_pool = scales(pool_dtype, 2)
        return ops.paged_decode_attention(q, kv, kv, table, contexts, scale=0.1, **options_of_pool, **options)

    return faults(op, heads, pool(head_dim, pool_dtype, 2), table, contexts)


def assert_none(found: dict[str, list[str]], *names: str) -> None:
    assert set(found) == set(names)
    assert not any(found.values()), found


def usual(all_cases, chosen) -> list:
    """All cases, the deep tier's marked."""
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.deep) for case in all_cases]


@pytest.mark.parametrize(
    ("head_dim", "pool_dtype", "num_kv_heads"),
    usual(
        [(*each, k) for each in CLASSES for k in KV_HEADS],
        [(64, "bfloat16", 1), (64, FP8, 3), (128, FP8, 8), (256, "bfloat16", 2)],
    ),
)
def test_writes_and_copies_keep_the_rules(head_dim, pool_dtype, num_kv_heads):
    assert_none(write_faults(head_dim, pool_dtype, num_kv_heads), "kv_write", "copy_blocks")


@pytest.mark.parametrize(
    ("head_dim", "pool_dtype", "group"),
    usual(
        [(*each, g) for each in CLASSES for g in range(1, 17)],
        [],  # the next test has more
    ),
)
def test_attention_keeps_the_rules(head_dim, pool_dtype, group):
    found = attention_faults(head_dim, pool_dtype, group)
    assert_none(found, "ragged_paged", "paged_decode", "paged_decode_combine")


@pytest.mark.deep
@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
@pytest.mark.parametrize("num_kv_heads", KV_HEADS)
@pytest.mark.parametrize(("head_dim", "pool_dtype"), CLASSES)
def test_attention_keeps_the_rules_at_any_block_size(head_dim, pool_dtype, num_kv_heads, block_size):
    options = dict(window=100, soft_cap=30.0, return_lse=True)
    found = attention_faults(head_dim, pool_dtype, 4, num_kv_heads=num_kv_heads, block_size=block_size, **options)
    assert_none(found, "ragged_paged", "paged_decode", "paged_decode_combine")


@pytest.mark.parametrize(
    ("head_dim", "pool_dtype", "group"),
    usual([(*each, g) for each in CLASSES for g in range(1, 17)], [(128, FP8, 8)]),
)
def test_attention_with_sinks_keeps_the_rules(head_dim, pool_dtype, group):
    options = dict(sinks_n=jnp.ones(2 * group, jnp.float32), window=128, return_lse=True)
    found = attention_faults(head_dim, pool_dtype, group, **options)
    assert_none(found, "ragged_paged", "paged_decode", "paged_decode_combine")


class TestLaunches:
    def test_large_axes_are_on_x(self):
        """70,000 tokens, sequences and copies: more than CUDA's y and z have."""
        n = 70_000

        def ops(q, k, slots, angles, kv, table):
            kv, _ = ops_of(mosaic).write_kv(kv, kv, k, k, slots, cos_t=angles, sin_t=angles)
            kv = ops_of(mosaic).copy_blocks(kv, slots, slots)
            return ops_of(mosaic).paged_decode_attention(q, kv, kv, table, slots, scale=0.1)

        found = faults(
            ops, S((n, 8, 64), jnp.bfloat16), S((n, 8, 64), jnp.bfloat16), S((n,), jnp.int32), S((n, 32), jnp.float32),
            pool(64, "bfloat16", 8), S((n, 2), jnp.int32),
        )  # fmt: skip
        assert_none(found, "kv_write", "copy_blocks", "paged_decode", "paged_decode_combine")

    def test_a_grid_beyond_the_limits_is_refused_by_name(self):
        support.check_grid("copy_blocks", (65_535, 2**31 - 1))
        with pytest.raises(NotImplementedError, match=r"copy_blocks: 65536 thread blocks along y .* at most 65535"):
            support.check_grid("copy_blocks", (65_536, 5))
        with pytest.raises(NotImplementedError, match=r"along x .* at most 2147483647"):
            support.check_grid("ragged_paged", (2**31,))


@pytest.mark.deep
class TestPlantedFaults:
    """Each rule is only worth something if its violation is found."""

    def test_rows_of_32_bytes_under_tma(self, monkeypatch):
        """The log-sum-exps of the combine kernel: M of them in a row."""
        monkeypatch.setattr(combine, "LANES", 8)
        monkeypatch.setattr(decode, "LANES", 8)
        found = decode_faults(128, "bfloat16", 4)["paged_decode_combine"]
        assert any("TMA load" in fault and "multiple of 32 bytes, not of 128" in fault for fault in found), found

    def test_tokens_of_64_bytes_under_tma(self, monkeypatch):
        """Several tokens of one KV head of 64 in one buffer, as an earlier KV write had them."""

        def kernel(x_ref, o_ref, smem, barrier):
            for y in range(2):
                plgpu.copy_gmem_to_smem(x_ref.at[y, 0, :, plgpu_half], smem.at[y], barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem.at[1], o_ref.at[0, 0, :, plgpu_half])
            plgpu.wait_smem_to_gmem(0)

        plgpu_half = slice(0, 32)
        x = S((2, 1, 1, 64), jnp.bfloat16)
        run = plgpu.kernel(
            kernel, out_type=x, kernel_name="tokens",
            scratch_types=[plgpu.SMEM((2, 1, 32), jnp.bfloat16), plgpu.Barrier(num_arrivals=2)],
        )  # fmt: skip
        [found] = faults(run, x).values()
        assert [fault.split(" at ")[0] for fault in found] == ["TMA load", "TMA store"], found
        assert all("a multiple of 64 bytes, not of 128" in fault for fault in found)

    def test_tokens_on_y(self, monkeypatch):
        monkeypatch.setattr(writes, "check_grid", lambda name, grid: None)
        original = plgpu.kernel

        def turned(body, *, grid, grid_names, **options):
            return original(body, grid=grid[::-1], grid_names=grid_names[::-1], **options)

        monkeypatch.setattr(writes.plgpu, "kernel", turned)
        k = S((70_000, 1, 64), jnp.bfloat16)
        found = faults(ops_of(mosaic).write_kv, *[pool(64, "bfloat16", 1)] * 2, k, k, S((70_000,), jnp.int32))
        assert found["kv_write"] == ["70000 thread blocks along y, at most 65535"]

    def test_too_much_shared_memory(self):
        [dump] = [d for d in dumps("bfloat16") if d[0] == "paged_decode"]
        program = mosaic_program.parse(*dump)
        assert not program.faults(shared_memory=program.shared_memory)
        assert program.faults(shared_memory=program.shared_memory - 1) == [
            f"{program.shared_memory} bytes of shared memory, at most {program.shared_memory - 1}"
        ]

    def test_one_thread_block_on_a_multiprocessor(self):
        tiles = tuning.MosaicDecode(stages=4)
        found = decode_faults(128, "bfloat16", 4, tiles=tiles)["paged_decode"]
        assert ["leave room for one thread block" in fault for fault in found] == [True], found

    @pytest.mark.parametrize(
        ("pool_dtype", "module", "kernel"),
        [
            ("bfloat16", decode, "paged_decode"),
            ("bfloat16", ring, "ragged_paged"),
            (FP8, ring, "paged_decode"),
        ],
        ids=["weights", "cleared tail", "converted tile"],
    )  # fmt: skip
    def test_no_fence_before_a_wgmma(self, monkeypatch, pool_dtype, module, kernel):
        """commit_smem left out: of the softmax weights, of V's cleared tail, of tiles converted from fp8."""
        found = mended_without(monkeypatch, module, "commit_smem", pool_dtype, kernel)
        assert any("without a proxy fence" in fault for fault in found), found

    @pytest.mark.parametrize("kernel", ["ragged_paged", "paged_decode"])
    def test_a_tile_handed_back_too_soon(self, kernel):
        """The wgmma that reads the tile is not waited for."""
        [(name, text)] = [dump for dump in dumps("bfloat16") if dump[0] == kernel]
        assert not mosaic_program.parse(name, text).faults(shared_memory=10**6)
        late = text.replace("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;")
        found = mosaic_program.parse(name, late).faults(shared_memory=10**6)
        assert any("handed back while a wgmma reads it" in fault for fault in found), found

    def test_a_box_of_too_many_rows(self):
        def kernel(x_ref, o_ref, smem, barrier):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(smem, o_ref)
            plgpu.wait_smem_to_gmem(0)

        [(name, text)] = gpu_compiler.lowered_for_h200(
            plgpu.kernel(
                kernel, out_type=S((256, 64), jnp.bfloat16), kernel_name="rows",
                scratch_types=[plgpu.SMEM((256, 64), jnp.bfloat16), plgpu.Barrier()],
            ),
            S((256, 64), jnp.bfloat16),
        )  # fmt: skip
        assert not mosaic_program.parse(name, text).faults(shared_memory=10**6)
        found = mosaic_program.parse(name, text.replace("256, 64>", "512, 64>").replace("256x64", "512x64"))
        assert any("more than 256 elements" in fault for fault in found.faults(shared_memory=10**6))
        odd = mosaic_program.parse(name, text.replace("memref<256x64xbf16>", "memref<256x63xbf16>"))
        assert any("no multiples of 16" in fault for fault in odd.faults(shared_memory=10**6))


@functools.cache
def dumps(pool_dtype: str) -> list[tuple[str, str]]:
    """The three attention kernels as they are."""
    found: list[tuple[str, str]] = []
    original = gpu_compiler.lowered_for_h200

    def keep(*args):
        found.extend(original(*args))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_compiler, "lowered_for_h200", keep)
        attention_faults(128, pool_dtype, 4)
    return found


def mended_without(monkeypatch, module, name: str, pool_dtype: str, kernel: str) -> list[str]:
    """Faults of a kernel if a module's calls of a `plgpu` function did nothing."""
    without = types.SimpleNamespace(**vars(plgpu) | {name: lambda *args: None})
    monkeypatch.setattr(module, "plgpu", without)
    found = attention_faults if kernel == "ragged_paged" else decode_faults
    return found(128, pool_dtype, 4)[kernel]

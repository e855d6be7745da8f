"""The kernels for CPUs: products, threads, other machines, executables on disk, and their absence."""

import importlib.util
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Weight, cpu, select
from pallas_kernels.cpu import attention, code, ffi
from pallas_kernels.cpu.tiles import SEGMENT
from pallas_kernels.rows import product as product_by_rows
from tests.kernels import cases
from tests.kernels.implementations import CPU, REFERENCE, ops_of
from tests.kernels.products import FORMS, exact_matrix, weight_in, x_of

MODEL = dict(platform="cpu", device_kind="cpu", compute_capability=None, head_dim=64, num_heads=6, num_kv_heads=2)
OPS = ops_of(cpu)


def arrays(rows: int, depth: int, outputs: int):
    return x_of(rows, depth), Weight(x_of(outputs, depth))


def test_calls_from_many_threads_at_once():
    """More calls at a time than XLA's pool has threads: each finishes, with its own result."""
    multiply = jax.jit(OPS.product)
    inputs = [arrays(i % 8 + 1, 256, 600) for i in range(8)]
    expected = [multiply(*args) for args in inputs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: multiply(*inputs[i % 8]), range(400)))
    for i, y_to in enumerate(found):
        np.testing.assert_array_equal(y_to, expected[i % 8])


# All pairs are in the deep tier.
@pytest.mark.parametrize(
    "block_size, group",
    [
        pytest.param(*pair, marks=[] if pair in ((1, 17), (5, 1), (67, 5), (128, 17)) else [pytest.mark.deep])
        for pair in itertools.product((1, 5, 67, 128), (1, 5, 17))
    ],
)
def test_any_block_size_and_group(block_size, group):
    for q_lens in (None, [1, 3, 150]):
        batch = cases.make_batch([1, 70, 150], q_lens=q_lens, group=group, block_size=block_size, dtype=jnp.float32)
        op = CPU.paged_decode_attention if q_lens is None else CPU.ragged_paged_attention
        batch.check(batch.run(op))


NARROW = [("cpu", None, "float16"), ("cpu", [1, 3, 150], "bfloat16")]


@pytest.mark.parametrize(
    ("name", "q_lens", "pool_dtype"),
    [
        pytest.param(
            *case, id="-".join([case[0], "ragged" if case[1] else "decode", case[2]]),
            marks=[] if case in NARROW else pytest.mark.deep,
        )
        for case in itertools.product(("cpu", "reference"), (None, [1, 3, 150]), ("float16", "bfloat16"))
    ],
)  # fmt: skip
def test_narrow_pools_are_read_as_their_float32_numbers(name, q_lens, pool_dtype):
    """Keys are multiplied one half after the other or all at once, in one order or another: within rounding."""
    ops, options = (CPU if name == "cpu" else REFERENCE), dict(q_lens=q_lens, group=3, block_size=64)
    batch = cases.make_batch([1, 70, 700], dtype=jnp.float32, window=300, **options)
    op = ops.paged_decode_attention if q_lens is None else ops.ragged_paged_attention
    narrow = replace(batch, k_pool=batch.k_pool.astype(pool_dtype), v_pool=batch.v_pool.astype(pool_dtype))
    wide = replace(batch, k_pool=narrow.k_pool.astype("float32"), v_pool=narrow.v_pool.astype("float32"))
    np.testing.assert_allclose(narrow.run(op), wide.run(op), rtol=1e-5, atol=1e-6)
    assert np.abs(np.nan_to_num(narrow.run(op) - batch.run(op))).max() > 1e-5


@pytest.mark.parametrize("pool_dtype", ["float16", "bfloat16"])
def test_writes_round_to_narrow_pools(pool_dtype):
    keys, values = np.random.default_rng(0).standard_normal((2, 5, 2, 64), np.float32)
    keys[0, 0, :3], largest = [3e38, -np.inf, np.nan], float(jnp.finfo(pool_dtype).max)
    slots = np.array([3, -1, 70, 9, 127], np.int32)
    pools = [np.zeros((2, 2, 64, 64), jnp.dtype(pool_dtype)) for _ in range(2)]
    for ops in (CPU, REFERENCE):
        for pool, x_tkh in zip(ops.write_kv(*pools, keys, values, slots), (keys, values)):
            rows = np.asarray(pool).swapaxes(1, 2).reshape(128, 2, 64)
            expected = np.zeros_like(rows)
            expected[slots[[0, 2, 3, 4]]] = np.clip(x_tkh, -largest, largest)[[0, 2, 3, 4]].astype(rows.dtype)
            np.testing.assert_array_equal(rows.astype(np.float32), expected.astype(np.float32))


FEW_FORMS = {name: FORMS[name] for name in ("float32", "fp8", "int4 in groups of 32")}


# All forms are in the deep tier.
@pytest.mark.parametrize(
    "lanes, registers, forms",
    [
        pytest.param(8, 16, FEW_FORMS, id="AVX2, few forms"), pytest.param(4, 32, FEW_FORMS, id="NEON, few forms"),
        pytest.param(4, 16, FEW_FORMS, id="SSE, few forms", marks=pytest.mark.deep),
        pytest.param(8, 16, FORMS, id="AVX2", marks=pytest.mark.deep),
        pytest.param(4, 32, FORMS, id="NEON", marks=pytest.mark.deep),
        pytest.param(4, 16, FORMS, id="SSE", marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_vectors_of_other_machines(lanes, registers, forms, monkeypatch):
    """Their code runs here too, on this machine's registers."""
    host = code.Machine.host()._replace(lanes=lanes, registers=registers)
    monkeypatch.setattr(code.Machine, "host", lambda: host)
    register = ffi.register
    named = lambda name, *writers, **options: register(f"{name}_{lanes}_{registers}", *writers, **options)
    for module in (attention, sys.modules["pallas_kernels.cpu.product"]):
        monkeypatch.setattr(module, "register", named)
    for q_lens in (None, [1, 3, 100]):
        batch = cases.make_batch([1, 70, 100], q_lens=q_lens, group=3, dtype=jnp.float32, soft_cap=1.0, window=50)
        batch.check(batch.run(CPU.paged_decode_attention if q_lens is None else CPU.ragged_paged_attention))
    multiply = jax.jit(lambda *args: OPS.product(*args))
    for rows in (1, 5, 70):
        for name, form in forms.items():
            x_ti, weight = x_of(rows, 3 * SEGMENT), weight_in(form, 50, 3 * SEGMENT)
            exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
            np.testing.assert_allclose(multiply(x_ti, weight), exact, rtol=1e-4, atol=1e-3, err_msg=name)


PROGRAM = """
import jax, jax.numpy as jnp, pallas_kernels
from pallas_kernels import cpu
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
ops = pallas_kernels.Ops(pallas_kernels.load(cpu.__name__))
print(float(jax.jit(ops.product)(jnp.ones((2, 64)), pallas_kernels.Weight(jnp.ones((8, 64)))).sum()))
print(sum(name.endswith("cache_hits") for name in events))
"""


def test_an_executable_on_disk_is_loaded_by_another_process(tmp_path):
    """And the code of its kernels, in which no address of a process is."""

    def run() -> list[str]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = run(), run()
    assert first[0] == second[0] == "1024.0" and int(second[1]) > int(first[1])
    assert len(list(tmp_path.glob("jpaged-llvm-*"))) == 2, "the product and the team of threads"


class TestSelection:
    def test_llvmlite_is_loaded_for_a_cpu_only(self):
        program = """
import sys, pallas_kernels, jpaged.llm
model = dict(dtype="bfloat16", head_dim=64, num_heads=6, num_kv_heads=2, block_size=16)
pallas_kernels.select(platform="gpu", device_kind="NVIDIA H200", compute_capability=9.0, **model)
assert not {"llvmlite", "pallas_kernels.cpu"} & sys.modules.keys()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_the_reference_serves_without_llvmlite(self, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llvmlite" else find(name))
        kernels = select(dtype="float32", block_size=16, **MODEL)
        assert kernels.name == "reference" and "not cpu: llvmlite is not installed" in kernels.reason
        assert kernels.implementation.product is product_by_rows

    def test_the_reference_serves_where_nothing_compiles(self, monkeypatch):
        def fail(dtype):
            raise RuntimeError("no such target")

        monkeypatch.setattr(cpu, "usual_target", fail)
        kernels = select(dtype="float32", block_size=16, **MODEL)
        assert kernels.name == "reference" and "no such target" in kernels.reason

    def test_products_come_with_the_attention(self):
        kernels = select(dtype="bfloat16", pool_dtype="float8_e4m3fn", block_size=16, **MODEL)
        assert kernels.implementation.product is cpu.product and kernels.skips_rows
        assert {each.op: each.implementation for each in kernels.account}["product"] == "cpu"
        by_rows = select("reference", dtype="float32", block_size=16, **MODEL)
        assert by_rows.implementation.product is product_by_rows and by_rows.skips_rows

"""The kernels for CPUs: products, threads, other machines, executables on disk, and their absence."""

import importlib.util
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.layers import Epilogue, multiplying, product
from pallas_kernels import cpu, select
from pallas_kernels.cpu import attention, code, ffi
from pallas_kernels.cpu.product import BLOCK, SEGMENT, UNIT_T, WHOLE
from tests.kernels import cases
from tests.kernels.implementations import CPU, ops_of

MODEL = dict(platform="cpu", device_kind="cpu", compute_capability=None, head_dim=64, num_heads=6, num_kv_heads=2)
DEPTHS = (16, 48, WHOLE, WHOLE + 16, 3 * SEGMENT)
USUAL = (15, 103)  # rows and outputs with every dtype


def arrays(rows: int, depth: int, outputs: int, dtype="float32"):
    x_ti, weight_oi = (jax.random.normal(jax.random.key(i), (n, depth)) for i, n in enumerate((rows, outputs)))
    return x_ti, weight_oi.astype(dtype)


class TestProduct:
    @pytest.mark.parametrize(
        "rows, outputs, depth, dtype",
        [
            pytest.param(*shape, depth, dtype, marks=[] if dtype == "float32" or shape == USUAL else [pytest.mark.deep])
            for shape in ((1, 1), (3, 6), (4, 48), USUAL, (UNIT_T + BLOCK + 5, 97))
            for depth in DEPTHS
            for dtype in cpu.DTYPES
        ],
    )
    def test_it_is_that_of_float64(self, rows, outputs, depth, dtype):
        x_ti, weight_oi = arrays(rows, depth, outputs, dtype)
        exact = np.asarray(x_ti, np.float64) @ np.asarray(weight_oi, np.float64).T
        np.testing.assert_allclose(jax.jit(cpu.product)(x_ti, weight_oi), exact, rtol=1e-5, atol=1e-5 * depth**0.5)

    @pytest.mark.parametrize("depth", DEPTHS)
    def test_a_row_has_the_same_bits_next_to_any_others(self, depth):
        x_ti, weight_oi = arrays(UNIT_T + 9, depth, 50)
        multiply = jax.jit(cpu.product)
        together = multiply(x_ti, weight_oi)
        for first, stop in ((0, 1), (5, 8), (BLOCK - 2, BLOCK + 2), (UNIT_T - 1, UNIT_T + 9)):
            np.testing.assert_array_equal(multiply(x_ti[first:stop], weight_oi), together[first:stop])

    @pytest.mark.parametrize("depth", [64, 3 * SEGMENT])
    @pytest.mark.parametrize(
        "wanted", [[], [0], [5, 6, 70], range(UNIT_T + 3), range(UNIT_T - 1, UNIT_T + 9), range(0, UNIT_T + 9, 2)]
    )
    def test_rows_that_nobody_wants_are_zero(self, wanted, depth):
        x_ti, weight_oi = arrays(UNIT_T + 9, depth, 50)
        wanted_t = jnp.zeros(UNIT_T + 9, bool).at[jnp.array(wanted, int)].set(True)
        whole = jnp.where(wanted_t[:, None], cpu.product(x_ti, weight_oi), 0.0)
        found = jax.jit(cpu.product)(jnp.where(wanted_t[:, None], x_ti, jnp.nan), weight_oi, wanted_t)
        np.testing.assert_array_equal(found, whole)

    def test_rows_of_another_number_are_an_error(self):
        with pytest.raises(ValueError, match=r"wanted_t: must have shape \(4,\), not \(5,\)"):
            cpu.product(*arrays(4, 64, 8), jnp.ones(5, bool))

    @pytest.mark.parametrize("depth, dtype", [(20, "float32"), (64, "int8")])
    def test_other_arguments_are_left_to_xla(self, depth, dtype):
        assert cpu.product(*arrays(4, depth, 8, dtype)) is None

    @pytest.mark.parametrize("dtype", cpu.DTYPES)
    def test_layers_use_it_where_they_are_told_to(self, dtype):
        x_ti, weight_oi = arrays(5, 64, 24, dtype)
        x_ti, bias_o = x_ti.astype(dtype), jnp.arange(24, dtype=dtype)

        def layer(x_ti):
            return product(x_ti, weight_oi, epilogue=Epilogue(bias_o=bias_o, activation=nnx.silu))

        own, xla = jax.jit(multiplying(cpu.product)(layer)), jax.jit(lambda x_ti: layer(x_ti))
        assert "jpaged_product" in own.lower(x_ti).as_text() and "jpaged_product" not in xla.lower(x_ti).as_text()
        assert own(x_ti).dtype == dtype
        tolerance = 1e-5 if dtype == "float32" else 0.05
        np.testing.assert_allclose(
            np.asarray(own(x_ti), "f8"), np.asarray(xla(x_ti), "f8"), rtol=tolerance, atol=tolerance
        )


def test_calls_from_many_threads_at_once():
    """More calls at a time than XLA's pool has threads: each finishes, with its own result."""
    multiply = jax.jit(cpu.product)
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


@pytest.mark.parametrize(
    "lanes, registers", [(8, 16), (4, 32), (4, 16)], ids=["AVX2", "NEON", "SSE"]
)  # fmt: skip
def test_vectors_of_other_machines(lanes, registers, monkeypatch):
    """Their code runs here too, on this machine's registers."""
    host = code.Machine.host()._replace(lanes=lanes, registers=registers)
    monkeypatch.setattr(code.Machine, "host", lambda: host)
    register = ffi.register
    named = lambda name, *writers, **options: register(f"{name}_{lanes}_{registers}", *writers, **options)
    for module in (attention, sys.modules["pallas_kernels.cpu.product"]):
        monkeypatch.setattr(module, "register", named)
    for q_lens in (None, [1, 3, 100]):
        batch = cases.make_batch([1, 70, 100], q_lens=q_lens, group=3, dtype=jnp.float32, soft_cap=1.0, window=50)
        ops = ops_of(cpu)
        batch.check(batch.run(ops.paged_decode_attention if q_lens is None else ops.ragged_paged_attention))
    for rows in (1, 5, 70):
        x_ti, weight_oi = arrays(rows, 3 * SEGMENT, 50)
        exact = np.asarray(x_ti, np.float64) @ np.asarray(weight_oi, np.float64).T
        np.testing.assert_allclose(cpu.product(x_ti, weight_oi), exact, rtol=1e-4, atol=1e-4)


PROGRAM = """
import jax, jax.numpy as jnp
from pallas_kernels import cpu
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
print(float(jax.jit(cpu.product)(jnp.ones((2, 64)), jnp.ones((8, 64))).sum()))
print(sum(name.endswith("cache_hits") for name in events))
"""


def test_an_executable_on_disk_is_loaded_by_another_process(tmp_path):
    def run() -> list[str]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = run(), run()
    assert first[0] == second[0] == "1024.0" and int(second[1]) > int(first[1])


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
        assert kernels.product is None

    def test_the_reference_serves_where_nothing_compiles(self, monkeypatch):
        def fail(dtype):
            raise RuntimeError("no such target")

        monkeypatch.setattr(cpu, "target", fail)
        kernels = select(dtype="float32", block_size=16, **MODEL)
        assert kernels.name == "reference" and "no such target" in kernels.reason

    def test_products_come_with_the_attention(self):
        assert select(dtype="bfloat16", pool_dtype="float8_e4m3fn", block_size=16, **MODEL).product is cpu.product
        assert select("reference", dtype="float32", block_size=16, **MODEL).product is None

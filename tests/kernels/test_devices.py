"""The implementations for kinds of GPUs, and their table in the documentation."""

import pytest

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import GPUS
from pallas_kernels import select
from pallas_kernels.selftest import FAILED, Result
from tests.kernels import devices

HOPPER = ("h100", "h200")


@pytest.mark.parametrize("name", GPUS)
def test_hopper_takes_mosaic_and_other_gpus_take_triton(name):
    expected = "mosaic" if name in HOPPER else "triton"
    assert devices.implementation(GPUS[name]) == expected
    assert f"| {GPUS[name].kind} | {GPUS[name].target} | {expected} |" in devices.PAGE.read_text()


@pytest.mark.deep
@pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))
def test_the_documentation_has_the_table():
    assert devices.table() in devices.PAGE.read_text()


@pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))
def test_a_gpu_that_jax_does_not_know_is_not_compiled_for_without_it():
    with pytest.raises(RuntimeError, match="No supported GPU devices found"):
        devices.compiled(GPUS["rtx-5090"])


def test_a_gpu_that_can_not_be_compiled_for_is_served_by_the_reference(caplog):
    """As jax's error becomes the result of each self-test."""

    class CanNotCompile:
        def run(self, subject):
            ops = ("write_kv", "copy_blocks", "paged_decode_attention", "ragged_paged_attention")
            reason = "RuntimeError: No supported GPU devices found"
            return [Result(op, op, FAILED, reason, "2026-11-25T00:00:00") for op in ops]

    kernels = select(
        "auto", platform="gpu", device_kind="NVIDIA GeForce RTX 9090", compute_capability=13.0, dtype="bfloat16",
        head_dim=128, num_heads=32, num_kv_heads=8, block_size=16, self_test=CanNotCompile(),
    )  # fmt: skip
    assert kernels.name == "reference" and "No supported GPU devices found" in kernels.reason
    assert "expect much lower throughput" in caplog.text


def test_a_gpu_before_ampere_is_served_by_the_reference(caplog):
    kernels = select(
        "auto", platform="gpu", device_kind="Tesla T4", compute_capability=7.5, dtype="float16", head_dim=128,
        num_heads=32, num_kv_heads=8, block_size=16,
    )  # fmt: skip
    assert kernels.name == "reference" and "Ampere" in kernels.reason and "Tesla T4" in caplog.text

"""The step of real models as XLA compiles it for an H200, with the kernels in it; no GPU is present.

Kernels that pass their own tests can still meet a program that hands them operands they refuse, waits for the host, or
copies weights in every step.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.kernels.compiled_step import StepFigures, num_launches
from benchmarks.kernels.compiled_steps import STEPS, compared
from benchmarks.shared import deviceless
from benchmarks.shared.gpus import H200
from benchmarks.shared.models import MODELS
from benchmarks.shared.program import Instruction, Program
from benchmarks.shared.step_program import DescribedStep, StepShape
from jpaged.runtime import batch, step
from jpaged.runtime.sampling_settings import Settings

pytestmark = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))

ROOT = Path(__file__).parents[2]


# The most launches of a layer. Where XLA multiplies, without a device it takes Triton's products, split along the sum:
# their parts are added in launches of their own.
LAUNCHES = {
    "Llama-3.1-8B, decode 8": 11,
    "Llama-3.1-8B, decode 16": 11,
    "Llama-3.1-8B, decode 64": 11,
    "Llama-3.1-8B, decode 256": 11,
    "Llama-3.1-8B, decode 64, cuBLAS": 13,
    "Llama-3.1-8B, decode 64, Triton's products": 13,
    "Llama-3.1-8B, decode 64, fp8 pool": 12,
    "Llama-3.1-8B, decode 64, int8": 11,
    "Llama-3.1-8B, decode 64, int4": 12,
    "Llama-3.1-8B, decode 64, block 64": 11,
    "Llama-3.1-8B, decode 64, 2 GPUs": 17,
    "Llama-3.1-8B, decode 64, 4 GPUs": 17,
    "Llama-3.1-8B, mixed 512": 14,
    "Llama-3.1-8B, mixed 2048": 15,
    "Llama-3.1-8B, mixed 2048, 4 GPUs": 19,
    "Qwen3-8B, decode 64": 14,
    "Qwen3-8B, mixed 2048": 19,
    "Qwen2.5-7B, decode 64": 13,
    "Gemma-2-2B, decode 16": 11,
    "Gemma-3-4B, decode 16": 13,
    "Gemma-3-4B, mixed 512": 15,
    "SmolLM2-135M, decode 8": 12,
    "SmolLM2-135M, decode 256": 12,
    "SmolLM2-135M, mixed 512": 14,
    "Qwen3-30B-A3B, decode 64": 32,
    "Qwen3-30B-A3B, mixed 2048": 41,
    "Qwen3-30B-A3B, decode 64, XLA's products": 29,
}
LLAMA, USUAL = "Llama-3.1-8B, decode 64", "SmolLM2-135M, mixed 512"


def check(found: StepFigures, name: str) -> None:
    """Assert the rules of every step."""
    for program in (found.fewer, found.more):
        assert not program.misaligned_operands and not program.copied_params and not program.host_waits
    pool = found.described.pool_array
    assert found.pool_copies == 0
    assert found.more.aliased_bytes == 2 * (found.layers + 1) * pool.nbytes, "the pool is updated in place"
    assert found.per_layer(num_launches) <= LAUNCHES[name]
    if found.shape.devices == 1:
        assert found.more.command_buffers == 1, "the model's part is one launch of the host"


def check_sampling(found: StepFigures) -> None:
    for program in found.sampling.values():
        check_program_of_sampling(found, program)


def check_program_of_sampling(found: StepFigures, program: Program) -> None:
    assert not program.host_waits and not program.copied_params
    assert program.command_buffers == 1 or found.shape.devices > 1


@pytest.mark.parametrize(
    "name", [USUAL, *(pytest.param(name, marks=pytest.mark.deep) for name in STEPS if name not in (USUAL, LLAMA))]
)
def test_a_step_copies_no_parameter_and_hands_kernels_aligned_operands(name):
    found = StepFigures.of(H200, STEPS[name], 1 if name == USUAL else 2)
    check(found, name)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [
        USUAL, "Llama-3.1-8B, decode 256", "Llama-3.1-8B, decode 64, 4 GPUs", "Qwen3-8B, decode 64",
        "SmolLM2-135M, decode 8",
    ],
)  # fmt: skip
def test_sampling_waits_for_nobody(name):
    check_sampling(StepFigures.of(H200, STEPS[name], 2))


@pytest.mark.deep
def test_a_decode_step_of_llama_3_1_8b():
    """Its estimate is a prediction from the compiled program, not a measurement. The floor is 4.92 ms."""
    found = StepFigures.of(H200, STEPS[LLAMA], 2)
    check(found, LLAMA)
    check_sampling(found)
    rows = {row["part"]: row["ms"] for row in found.estimate(1024)}
    assert 4.9 < rows["floor"] < 4.95 and rows["floor"] < rows["all"] <= 7.0
    assert rows["all"] == pytest.approx(sum(ms for part, ms in rows.items() if part not in ("all", "floor")))
    launches = {name: len(each.launches) for name, each in found.sampling.items()}
    assert launches["greedy"] <= 13 and launches["drawn"] <= 19 < launches["filtered"] < launches["any"]
    # The bits of logits and of their sums do not depend on the settings that other requests use.
    texts = {name: _of_logits(program) for name, program in found.sampling.items()}
    assert len(texts["greedy"]) > 1 and len(set(texts.values())) == 1, texts


def _of_logits(program: Program) -> tuple[str, ...]:
    """Return the operations of the fusions up to the sums of exponentials, without names."""
    fusions = [each for each in program.entry.values() if each.opcode == "fusion"]
    last = next(i for i, each in enumerate(fusions) if any("exponential" in body for body in _body(program, each)))
    return tuple(operation for each in fusions[: last + 1] for operation in _body(program, each))


def _body(program: Program, fusion: Instruction) -> list[str]:
    return [f"{each.opcode} {[*each.arrays]}" for each in program.computations[fusion.called or ""].values()]


@pytest.mark.deep
@pytest.mark.parametrize("cublas", [False, True])
def test_a_module_in_hand_is_served_without_copies_of_its_weights(cublas):
    shape = StepShape(MODELS["llama-3.1-8b"], 64, fused=False, cublas=cublas)
    program = first_of(shape).forward()
    assert not program.copied_params and not program.misaligned_operands


def test_figures_are_shown_after_the_earlier_ones():
    row = dict(
        step="a step", launches_per_layer=13, copied_parameter_bytes=0, temporaries_bytes=2_000_000, host_waits=0,
        command_buffers=2, misaligned_operands=0,
    )  # fmt: skip
    earlier = row | dict(launches_per_layer=16, copied_parameter_bytes=1_610_000_000, estimate_ms=8.391)
    *_, line = compared([row], [earlier]).splitlines()
    assert line == "| a step | 16 → 13 | 1.61 → 0 | 2 → 2 | 0 → 0 | 2 → 2 | 0 → 0 | 8.39 |"
    *_, line = compared([row], []).splitlines()
    assert line.startswith("| a step | 13 | 0 | 2 | 0 ")
    committed = json.loads((ROOT / "benchmarks/results/compiled_steps/results.json").read_text())
    assert {each["step"]: each["launches_per_layer"] for each in committed["rows"]} == LAUNCHES


# Planted faults: each assertion can fail.


def first_of(shape: StepShape) -> DescribedStep:
    return DescribedStep(H200, shape.with_layers(1))


SMALL = StepShape(MODELS["smollm2-135m"], 64)


@pytest.mark.deep
def test_it_finds_operands_off_the_boundary(monkeypatch):
    """Arrays one after another in the buffer, and XLA's own options."""
    monkeypatch.setattr(batch, "ALIGNMENT", 1)
    monkeypatch.setattr(step, "model_options", lambda *_, **__: None)
    found = first_of(SMALL).forward().misaligned_operands
    assert found and all("bytes into its buffer" in each for each in found)


@pytest.mark.deep
def test_either_remedy_aligns_the_operands(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(batch, "ALIGNMENT", 1)
        assert not first_of(SMALL).forward().misaligned_operands
    monkeypatch.setattr(step, "model_options", lambda *_, **__: None)
    program = first_of(SMALL).forward()
    assert not program.misaligned_operands and any(thunk.kind == "kDynamicSliceFusion" for thunk in program.thunks)


@pytest.mark.deep
def test_it_finds_waits_of_the_host(monkeypatch):
    monkeypatch.setattr(step, "sampling_options", lambda platform: None)
    assert first_of(SMALL).choose(Settings.FILTERED).host_waits


@pytest.mark.deep
def test_it_finds_concatenated_parameters(monkeypatch):
    """Of products of one array, which XLA merges unless it is told not to."""
    monkeypatch.setattr(step, "model_options", lambda *_, **__: None)
    shape = StepShape(MODELS["smollm2-135m"], 64, fused=False, cublas=True)
    assert sum(size for _, size in first_of(shape).forward().copied_params) >= (9 + 2 * 3) * 64 * 576 * 2


@pytest.mark.deep
def test_it_finds_converted_and_transposed_parameters():
    converted = first_of(StepShape(MODELS["smollm2-135m"], 64, quantization="int8", cublas=True))
    assert converted.forward().copied_params, "cuBLAS takes no weights of 8 bits"
    separate = first_of(StepShape(MODELS["qwen3-30b-a3b"], 8, fused=False))
    sizes = [size for _, size in separate.forward().copied_params]
    assert sizes == [128 * 768 * 2048 * 2] * 3, "weights of experts [E, out, in] are transposed in every step"


@pytest.mark.deep
def test_it_finds_a_copied_pool():
    described = first_of(SMALL)
    kept = jax.jit(lambda *args: described.step.forward.__wrapped__(*args, SMALL.bucket))
    args = described.params, described.pool, described.last_tokens, described.buffer
    program = deviceless.program_of(H200, kept, *args)
    assert program.copies_of(described.pool_array) == 2 and program.aliased_bytes == 0


@pytest.mark.deep
def test_it_finds_expanded_weights():
    """XLA writes all weights of 4 bits in another dtype in every step."""
    program = first_of(StepShape(MODELS["smollm2-135m"], 64, quantization="int4", products=False)).forward()
    assert len(program.copied_params) >= 4


def test_weights_of_8_bits_stay_with_triton():
    assert step.model_options("gpu", has_quantized_weights=True)["xla_gpu_cublas_fallback"] is False
    for platform, quantized in (("gpu", False), ("cpu", True)):
        assert "xla_gpu_cublas_fallback" not in step.model_options(platform, has_quantized_weights=quantized)


@pytest.mark.deep
def test_the_program_prints_one_json_object_in_its_last_line():
    command = [sys.executable, "benchmarks/kernels/compiled_step.py", "--model", "smollm2-135m", "--sequences", "4",
               "--layers", "1", "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {"misaligned_operands": 0, "host_waits": 0, "copied_parameter_bytes": 0, "pool_copies": 0}
    assert found.items() >= expected.items() and found["launches_per_layer"] > 5 and found["temporaries_bytes"] > 0

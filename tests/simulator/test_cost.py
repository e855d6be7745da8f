"""Durations of steps, by hand."""

import json
from dataclasses import replace

import pytest

from jpaged.core.plan import Scheduled, StepPlan
from jpaged.simulator.cost import CostTable, MeasuredStep, Roofline, StepLoad
from jpaged.simulator.gpu import CPUS, GPUS
from jpaged.simulator.shape import SHAPES

H100 = Roofline(GPUS["h100"], SHAPES["llama-3-8b"])
LAYERS, OUTPUT = 6_979_321_856, 525_336_576  # parameters of Llama-3-8B
BANDWIDTH, FLOPS = 0.75 * 3.35e12, 0.6 * 989e12
DECODES, PROMPTS = True, False


def decodes(rows, context):
    return StepLoad(rows, rows, rows, rows * context, rows * context)


def test_load_of_a_plan():
    plan = StepPlan(rows=(Scheduled(0, 99, 1, 1), Scheduled(1, 0, 4, 0), Scheduled(2, 10, 3, 2)))
    assert StepLoad.of(plan) == (3, 8, 3, 100 + 4 + 13, 100 + (1 + 2 + 3 + 4) + (11 + 12 + 13))


def test_a_decode_step_reads_parameters_and_kv_once():
    expected = 0.5e-3 + 2 * (LAYERS + OUTPUT) / BANDWIDTH + 131_072 * 64 * 1000 / BANDWIDTH
    assert H100.seconds(decodes(64, 1000)) == pytest.approx(expected)
    assert expected == pytest.approx(9.81e-3, rel=1e-3)


def test_a_prompt_step_computes():
    pairs = 2048 * 2049 / 2
    expected = 0.5e-3 + 2 * (2048 * LAYERS + OUTPUT) / FLOPS + 4 * 32 * 32 * 128 * pairs / FLOPS
    assert H100.seconds(StepLoad(1, 2048, 1, 2048, pairs)) == pytest.approx(expected)
    assert expected == pytest.approx(50.4e-3, rel=1e-2)


@pytest.mark.parametrize("change", [(1, 0, 0, 0), (0, 500, 0, 0), (0, 0, 500, 0), (0, 0, 0, 1e5)])
def test_wider_batches_cost_more(change):
    costs = []
    for times in range(1, 50):
        rows = 8 + times * change[0]
        tokens, samples = rows + times * change[1], rows + times * change[2]
        context = 1000 * rows + times * change[3]
        costs.append(H100.seconds(StepLoad(rows, tokens, samples, context, context)))
    assert costs == sorted(costs) and costs[-1] > costs[0]


def test_two_gpus_halve_the_work_and_add_all_reduces():
    load = decodes(64, 1000)
    halved = (H100.seconds(load) - 0.5e-3) / 2
    all_reduce = 15e-6 + 2 * (1 / 2) * 64 * 4096 * 2 / 450e9  # of 64 activations of 4,096 numbers of two bytes
    two = replace(H100, num_gpus=2)
    assert two.seconds(load) == pytest.approx(0.5e-3 + halved + 65 * all_reduce)
    assert "2 x H100" in two.source and "75%" in two.source and "2 x" not in H100.source


def test_more_gpus_than_kv_heads_read_them_more_than_once():
    shorter, longer = decodes(64, 1000), decodes(64, 3000)
    eight, sixteen = (replace(H100, num_gpus=gpus) for gpus in (8, 16))
    per_gpu = 131_072 * 64 * 2000 / 8 / BANDWIDTH
    assert eight.seconds(longer) - eight.seconds(shorter) == pytest.approx(per_gpu)
    assert sixteen.seconds(longer) - sixteen.seconds(shorter) == pytest.approx(per_gpu)


def test_fp8_kv_halves_the_time_of_attention():
    slow, fast = (replace(H100, kv_dtype_bytes=size).seconds(decodes(64, 1000)) for size in (2, 1))
    assert slow - fast == pytest.approx(65_536 * 64_000 / BANDWIDTH)


def test_weights_of_fewer_bits_are_read_faster_and_computed_alike():
    slow, fast = (replace(H100, weight_bits=bits).seconds(decodes(1, 1)) for bits in (16, 4))
    assert slow - fast == pytest.approx(1.5 * LAYERS / BANDWIDTH)
    prompts = StepLoad(1, 2048, 1, 2048, 2048)
    assert replace(H100, weight_bits=4).seconds(prompts) == H100.seconds(prompts)


def test_a_mixture_reads_all_experts_and_computes_them_for_each_row_of_a_token():
    without_kernels = GPUS["h100"]._replace(product_kernels=False)
    mixtral = Roofline(without_kernels, SHAPES["mixtral-8x7b"], launch_s=0)
    experts, others, output = 32 * 8 * 3 * 4096 * 14_336, 32 * (4096 * 128 * 80 + 8 * 4096), 32_000 * 4096
    assert mixtral.seconds(StepLoad(1, 1, 1, 0, 0)) == pytest.approx(2 * (experts + others + output) / BANDWIDTH)
    prompt = mixtral.seconds(StepLoad(1, 2048, 1, 0, 0))
    assert prompt == pytest.approx(2 * (2048 * (2 * experts + others) + output) / FLOPS)


def test_grouped_products_read_and_compute_only_the_experts_of_the_tokens():
    """One token reads its own experts; many tokens read all, and compute each row once."""
    cpu = Roofline(CPUS["epyc-9654"], SHAPES["mixtral-8x7b"], launch_s=0, weight_bits=5, embedding_bits=8.5)
    expert, others, output = 32 * 3 * 4096 * 14_336, 32 * (4096 * 128 * 80 + 8 * 4096), 32_000 * 4096
    for tokens, experts in ((1, 2), (2, 8 * (1 - 0.75**2)), (4, 8 * (1 - 0.75**4))):
        bits = 5 * (experts * expert + others) + 8.5 * output
        assert cpu.seconds(StepLoad(tokens, tokens, 1, 0, 0)) == pytest.approx(bits / 8 / (0.75 * 460.8e9))
    prompt = cpu.seconds(StepLoad(1, 2048, 1, 0, 0))
    assert prompt == pytest.approx(2 * (2048 * (2 * expert + others) + output) / (0.6 * 7.37e12))


TABLE = CostTable(
    [MeasuredStep(8, 8, DECODES, 1.0, 0.001), MeasuredStep(16, 16, DECODES, 2.0, 0.001),
     MeasuredStep(32, 4, PROMPTS, 3.0, 0.0), MeasuredStep(32, 16, PROMPTS, 4.0, 0.0),
     MeasuredStep(64, 16, PROMPTS, 6.0, 0.0)],
    "a device",
)  # fmt: skip


@pytest.mark.parametrize(
    "load, seconds",
    [
        (StepLoad(8, 8, 8, 100, 0), 1.1),
        (StepLoad(9, 9, 9, 100, 0), 2.1),
        (StepLoad(32, 32, 32, 100, 0), 2 * 2.0 + 0.1),
        (StepLoad(2, 20, 2, 0, 0), 3.0),
        (StepLoad(5, 20, 2, 0, 0), 4.0),  # a shape has room for sequences that are not sampled, too
        (StepLoad(1, 20, 5, 0, 0), 4.0),
        (StepLoad(2, 33, 2, 0, 0), 6.0),
        (StepLoad(2, 96, 2, 0, 0), 9.0),
        (StepLoad(32, 40, 32, 0, 0), 12.0),
    ],
)
def test_table_takes_the_smallest_shape_or_a_multiple_of_the_largest(load, seconds):
    assert TABLE.seconds(load) == pytest.approx(seconds)


def test_table_is_read_as_it_was_written(tmp_path):
    TABLE.save(tmp_path / "costs.json")
    read = CostTable.load(tmp_path / "costs.json")
    assert read.steps == TABLE.steps and read.source == "a device"


STEP = {"num_tokens": 8, "num_seqs": 8, "decode": True, "base": 1.0, "per_token": 0.0}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "holds no table"),
        ("[]", "holds no table"),
        ({"source": "x"}, "'steps' is missing"),
        ({"source": "x", "steps": []}, "both kinds"),
        ({"source": "x", "steps": [STEP]}, "both kinds"),
        ({"source": "x", "steps": [STEP | {"more": 1}]}, "more"),
        ({"source": "x", "steps": [STEP | {"base": -1.0}]}, "base: must be"),
        ({"source": "x", "steps": [STEP | {"base": 0}]}, "base: must be"),
        ({"source": "x", "steps": [STEP | {"per_token": "1"}]}, "per_token: must be"),
        ({"source": "x", "steps": [STEP | {"num_tokens": 0}]}, "num_tokens: must be"),
        ({"source": "x", "steps": [STEP | {"num_seqs": 1.5}]}, "num_seqs: must be"),
        ({"source": "x", "steps": [STEP | {"decode": 1}]}, "decode: must be"),
    ],
)
def test_broken_tables_are_errors(content, message, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"^costs: .*{message}"):
        CostTable.load(path)

"""Memory and settings of a deployment."""

from dataclasses import replace

import pytest

from jpaged.simulator.cost import CostTable, MeasuredStep, StepLoad
from jpaged.simulator.deployment import MAX_USERS, Deployment
from jpaged.simulator.gpu import CPUS, GPUS
from jpaged.simulator.shape import SHAPES

GIB = 2**30
H100 = Deployment(GPUS["h100"], SHAPES["llama-3-8b"], max_model_len=8192)
PARAMETERS = 2 * 8_029_995_008  # bytes


def test_pool_is_the_memory_beside_parameters_and_temporaries():
    assert H100.pool_tokens == int((0.92 * 79.6 * GIB - 2 * GIB - PARAMETERS) / 131_072) == 461_004
    two = replace(H100, num_gpus=2)
    assert two.pool_tokens == int((2 * (0.92 * 79.6 * GIB - 2 * GIB) - PARAMETERS) / 131_072)
    assert replace(H100, gpu_memory_utilization=0.5).pool_tokens == int(
        (0.5 * 79.6 * GIB - 2 * GIB - PARAMETERS) / 131_072
    )


def test_fp8_kv_doubles_the_pool():
    assert replace(H100, kv_dtype_bytes=1).pool_tokens in (2 * 461_004, 2 * 461_004 + 1)


def test_more_gpus_than_kv_heads_repeat_them():
    eight, sixteen = (replace(H100, num_gpus=count).pool_tokens for count in (8, 16))
    memory = 0.92 * 79.6 * GIB - 2 * GIB
    assert eight == int((8 * memory - PARAMETERS) / 131_072)
    assert sixteen == int((16 * memory - PARAMETERS) / 262_144)


def test_engine_has_the_settings():
    made = replace(H100, block_size=32, max_num_batched_tokens=512, max_model_len=4096).engine(100)
    scheduler = made.scheduler
    assert scheduler.pool.num_blocks == 461_004 // 32 and scheduler.pool.block_size == 32
    assert scheduler.pool.enable_prefix_caching and scheduler.headroom == 16
    assert (scheduler.limits.max_model_len, scheduler.limits.max_num_seqs) == (4096, 100)
    assert scheduler.limits.max_num_batched_tokens == 512
    assert not replace(H100, enable_prefix_caching=False).engine(1).scheduler.pool.enable_prefix_caching


def test_each_sequence_of_a_step_has_a_token():
    assert H100.engine(MAX_USERS).scheduler.limits.max_num_seqs == 2048
    assert replace(H100, max_num_seqs=7).engine(100).scheduler.limits.max_num_seqs == 7
    assert replace(H100, max_num_batched_tokens=8192).engine(9999).scheduler.limits.max_num_seqs == MAX_USERS


def test_host_keeps_evicted_blocks_at_the_cost_of_the_link():
    block_s = 16 * 131_072 / (0.75 * 64e9)
    token_s = H100.cost.seconds(StepLoad(1, 2048, 1, 2048, 2048**2 / 2)) / 2048
    hosted = replace(H100, host_bytes=2 * GIB)
    scheduler = hosted.engine(8).scheduler
    assert hosted.block_move_s == pytest.approx(block_s)
    assert scheduler.host_pool.num_blocks == 1024 and scheduler.memory.tier.is_worthwhile
    assert scheduler.memory.swap_costs[0] == pytest.approx(2 * block_s / token_s) == pytest.approx(3.5, abs=0.1)
    assert scheduler.memory.pins.most == scheduler.pool.num_blocks // 2
    assert H100.engine(8).scheduler.host_pool is None
    assert replace(hosted, enable_prefix_caching=False).engine(8).scheduler.host_pool is None
    assert replace(H100, num_gpus=2).block_move_s == pytest.approx(block_s / 2)


def test_states_on_the_host_are_refused():
    hybrid = next(shape for shape in SHAPES.values() if shape.state_bytes)
    with pytest.raises(ValueError, match=r"^host_bytes: must be 0 for .*moves of states"):
        Deployment(GPUS["h200"], hybrid, max_model_len=8192, host_bytes=GIB)


def test_measured_costs_replace_the_roofline():
    table = CostTable([MeasuredStep(8, 8, kind, 1.5, 0.0) for kind in (True, False)], "a device")
    made = replace(H100, costs=table)
    assert made.cost is table and made.cost.seconds(StepLoad(1, 1, 1, 5, 5)) == 1.5
    assert "H100" in H100.cost.source


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_gpus=0), "tensor_parallel_size: must be at least 1, not 0"),
        (dict(num_gpus=3), "tensor_parallel_size: 3 GPUs can't share the 32 heads and 8 KV heads of Llama-3-8B"),
        (dict(block_size=0), "block_size: must be a power of two between 1 and 256, not 0"),
        (dict(block_size=24), "block_size: must be a power of two"),
        (dict(max_model_len=1), "max_model_len: must be at least 2, not 1"),
        (dict(max_model_len=8193), "max_model_len: 8193 exceeds the 8192 tokens of Llama-3-8B"),
        (dict(max_num_seqs=0), "max_num_seqs: must be at least 1"),
        (dict(max_num_seqs=4096), "max_num_batched_tokens: must be at least max_num_seqs"),
        (dict(max_num_batched_tokens=0), "max_num_batched_tokens: must be at least 1"),
        (dict(gpu_memory_utilization=0.0), "gpu_memory_utilization: must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=1.1), "gpu_memory_utilization: must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=0.2), "gpu: no room .* use more GPUs .*--tensor-parallel-size"),
        (dict(shape=SHAPES["llama-3-70b"]), r"gpu: no room on 1 x H100 80GB for Llama-3-70B \(131.4 GiB\)"),
    ],
)  # fmt: skip
def test_impossible_settings_are_errors(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(H100, **change)


def test_the_pool_has_whole_blocks():
    long = replace(H100, shape=replace(H100.shape, context=2**20), max_model_len=460_992)
    assert long.engine(1).scheduler.pool.num_blocks * 16 == 460_992
    with pytest.raises(ValueError, match=r"^gpu: no room"):
        replace(long, max_model_len=460_993)


def test_a_model_that_fits_more_gpus_is_served_by_them():
    assert Deployment(GPUS["h100"], SHAPES["llama-3-70b"], num_gpus=4, max_model_len=8192).pool_tokens > 8192


def test_fewer_bits_leave_more_memory_for_kv():
    eight, four = (replace(H100, weight_bits=bits).pool_tokens for bits in (8, 4))
    assert eight == int((0.92 * 79.6 * GIB - 2 * GIB - H100.shape.param_bytes(8)) / 131_072) > H100.pool_tokens
    assert four > eight


def test_a_mixture_needs_memory_for_the_repeated_inputs_of_its_experts():
    mixture = Deployment(GPUS["b200"], SHAPES["qwen3-30b-a3b"], max_model_len=8192)
    left = 0.92 * 183_359 * 2**20 - 2 * GIB - 8 * GIB - 2 * 30_531_911_680
    assert mixture.pool_tokens == int(left / mixture.shape.kv_bytes(2))
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: 5 GPUs can't share"):
        replace(mixture, num_gpus=5)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_serves_a_small_model_with_a_long_context(gpu):
    made = Deployment(GPUS[gpu], SHAPES["llama-3.2-1b"], max_model_len=131_072)
    assert made.pool_tokens > 131_072 and made.cost.seconds(StepLoad(1, 1, 1, 131_072, 131_072)) < 0.02


def test_layers_with_windows_take_memory_for_what_they_see():
    shape = SHAPES["gemma-3-27b"]
    made = Deployment(GPUS["h200"], shape, max_model_len=131_072)
    whole = shape.kv_bytes(2) * 131_072
    assert made.groups.size == 10 and made.groups.windows.count(1024) == 6
    assert 10 / 62 * whole < made.kv_bytes(131_072) < 0.25 * whole
    pool = made.engine(8).scheduler.pool
    assert pool.num_blocks == made.num_blocks and pool.windows == made.groups.windows
    assert shape.share_seen(1024) == 1 and shape.share_seen(131_072) == pytest.approx((10 + 52 / 128) / 62)
    long, alike = StepLoad(1, 1, 1, 131_072, 131_072), replace(made, shape=replace(shape, windows=()))
    assert made.cost.seconds(long) < alike.cost.seconds(long) and alike.kv_bytes(131_072) == whole


@pytest.mark.parametrize("cpu", CPUS)
def test_every_cpu_serves_a_mixture_by_itself(cpu):
    made = Deployment(CPUS[cpu], SHAPES["qwen3-30b-a3b"], max_model_len=8192, weight_bits=5, embedding_bits=8.5)
    assert made.pool_tokens > 8192 and made.cost.embedding_bits == 8.5
    assert made.param_bytes == made.shape.param_bytes(5, 8.5)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: must be 1 on .*, not 2$"):
        replace(made, num_gpus=2)

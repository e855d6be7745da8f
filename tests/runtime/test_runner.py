"""The device side: the pool is aliased and never copied, nothing compiles after warm-up, block copies are real."""

import dataclasses
import math
import random
import types

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.shared import deviceless, gpus
from benchmarks.shared.program import Array
from jpaged import LLM, BeamSearchParams, ModelConfig, SamplingParams
from jpaged.config import EngineConfig, Limits
from jpaged.core.commands import UpdateParams
from jpaged.core.plan import Admitted, ParamsDeleted, Scheduled, StepPlan, StepResult
from jpaged.models.checkpoint import abstract_model
from jpaged.runtime.batch import Bucket, Layout
from jpaged.runtime.compilation_cache import cache_folder
from jpaged.runtime.device_rows import empty_state
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Step
from jpaged.runtime.swap import TRANSFERS
from jpaged.start import measure, pool, setup
from jpaged.start.resolve import resolve
from pallas_kernels import Kernels, SelfTest, select
from tests.runtime.caches import cache_of, placement_of
from tests.support.few_shapes import few_shapes, limiting
from tests.support.random_model import random_model
from tests.support.runners import runner_of

pytestmark = pytest.mark.slow

LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
H200 = {"platform": "gpu", "device_kind": "NVIDIA H200", "compute_capability": 9.0}


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA, "float32", seed=0)


@pytest.fixture(scope="module")
def llm(model):
    options = dict(preemption_mode="swap", progress=False, warm_up=True)
    return LLM(model, block_size=8, num_gpu_blocks_override=20, **options, **LIMITS)


class Compilations:
    """Counts what XLA compiles or loads from its cache while it is entered."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, name, *_args, **_kwargs):
        self.count += name in (
            "/jax/core/compile/jaxpr_trace_duration",
            "/jax/core/compile/jaxpr_to_mlir_module_duration",
            "/jax/core/compile/backend_compile_duration",
        )


class Waits:
    """Counts the ways in which Python waits for an array of the device, while it is entered."""

    def __init__(self, monkeypatch):
        self.count = 0
        array = type(jnp.ones(1))
        for owner, name in [(array, "__array__"), (array, "block_until_ready"), (jax, "device_get"),
                            (jax, "block_until_ready")]:  # fmt: skip
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        value = array._value
        monkeypatch.setattr(array, "_value", property(self._counted(value.fget)))

    def _counted(self, function):
        def counted(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("rounds", [4, pytest.param(700, marks=pytest.mark.deep)], ids=["", "10,000 steps"])
def test_only_the_tokens_are_waited_for_and_memory_does_not_grow(model, monkeypatch, rounds):
    """Requests of every kind, with swaps and copies. Only `device_put` sends to the device, nothing compiles, and
    `dispatch` waits for nothing."""
    with few_shapes():
        options = dict(preemption_mode="swap", progress=False, warm_up=True)
        llm = LLM(model, block_size=8, num_gpu_blocks_override=20, **options, **LIMITS)
    engine, rng = llm.engine, random.Random(2)
    engine.scheduler.headroom = 0  # many preemptions
    dispatch, waits, steps = engine.runner.dispatch, Waits(monkeypatch), []

    def watched(*args):
        before = waits.count
        pending = dispatch(*args)
        assert waits.count == before, "dispatch waits for the device"
        steps.append(pending)
        del steps[:-1]
        return pending

    engine.runner.dispatch = watched
    mix = [any_params(rng) for _ in range(24)]
    held, num_steps = [], 0
    with Compilations() as compilations, jax.transfer_guard("disallow"):
        for number in range(rounds):
            for index, params in enumerate(mix):
                engine.add(f"{number} {index}", [rng.randrange(300) for _ in range(rng.randint(1, 12))], params)
            while engine.has_work:
                engine.step()
                num_steps += 1
            engine.scheduler.pool.reset_prefix_cache()
            engine.runner.blocks.host.clear()  # on a CPU, copies would count as the device's
            held.append((len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())))
    assert compilations.count == 0 and num_steps >= 14 * rounds
    assert engine.scheduler.num_swapped_blocks > 0 and engine.scheduler.num_preemptions > 0
    assert max(held[1:]) <= held[0] or max(held[1:]) == min(held[1:]), held


@pytest.mark.warm
def test_nothing_compiles_after_warm_up_whatever_arrives(llm):
    rng = random.Random(0)
    with Compilations() as compilations:
        for count in (1, 2, 3, 8, 30):
            prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 90))] for _ in range(count)]
            llm.generate(prompts, [any_params(rng) for _ in prompts], use_tqdm=False)
    scheduler = llm.engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.num_swapped_blocks > 0, "the mix must include both"
    assert compilations.count == 0


def any_params(rng) -> SamplingParams | BeamSearchParams:
    common = {
        "max_tokens": rng.randint(4, 30), "min_tokens": rng.choice([0, 4]), "stop_token_ids": rng.choice([(), (1, 2)]),
        "presence_penalty": rng.choice([0, 1]), "logit_bias": rng.choice([None, {3: 2.0}]),
        "logprobs": rng.choice([None, 0, 20]), "prompt_logprobs": rng.choice([None, None, 2]),
    }  # fmt: skip
    if rng.random() < 0.3:
        return BeamSearchParams(beam_width=rng.choice([1, 2, 4]), **common)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 5]), top_p=rng.choice([0.5, 1.0]),
        seed=rng.choice([None, 2**63 + 1]), n=rng.choice([1, 1, 3]), **common,
    )  # fmt: skip


def test_the_counter_counts(model):
    with Compilations() as compilations:
        jax.jit(lambda x: x * 3.5)(jnp.ones(7)).block_until_ready()
    assert compilations.count > 0


def test_a_module_in_hand_is_served_with_its_own_arrays(model, llm):
    mine = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(model))}
    served = llm.engine.runner.params
    assert {x.unsafe_buffer_pointer() for x in served} == mine and len(served) == len(mine)


def test_where_the_best_token_is_forbidden_the_next_best_is_generated(llm):
    def first(**options) -> tuple[int, list[int]]:
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=2, **options)
        (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs
        return output.token_ids[0], list(output.logprobs[0])

    best, (_, second) = first()
    assert first(min_tokens=2, stop_token_ids=[best])[0] == second != best


def test_tokens_with_a_seed_do_not_depend_on_the_batch(llm):
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7, max_tokens=20)
    alone = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    others = [dataclasses.replace(params, seed=i, temperature=0.5) for i in range(6)]
    batch = llm.generate([[i] * 9 for i in range(6)] + [[5, 6, 7]], [*others, params], use_tqdm=False)
    assert batch[-1].outputs[0].token_ids == alone
    reseeded = llm.generate([5, 6, 7], dataclasses.replace(params, seed=8), use_tqdm=False)
    assert reseeded[0].outputs[0].token_ids != alone


POOL_BLOCKS, BLOCK = 512, 16


def step_avals(config: ModelConfig, dtype: str, bucket: Bucket):
    graphdef, leaves = abstract_model(config, dtype)
    params, treedef = jax.tree.flatten([nnx.from_flat_state(leaves)])
    shape = (POOL_BLOCKS, config.num_key_value_heads, BLOCK, config.head_dim)
    pool = [jax.ShapeDtypeStruct(shape, dtype)] * (2 * config.num_hidden_layers)
    rows = bucket.num_seqs + 3  # no array of samples is like one of rows
    state = jax.eval_shape(lambda: empty_state(rows, config.vocab_size)), jax.ShapeDtypeStruct((rows,), jnp.int32)
    return graphdef, treedef, params, pool, state, Layout(bucket, 8)


def samples_of(bucket: Bucket, hidden) -> tuple:
    """Return the arguments of `choose` except its parameters and the arrays that it changes."""
    bits = jax.ShapeDtypeStruct((bucket.num_seqs, -(-LLAMA.vocab_size // 32)), jnp.uint32)
    return hidden, jax.ShapeDtypeStruct((bucket.num_seqs, ROW_WORDS), jnp.int32), bits


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_of_a_block(dtype: str) -> int:
    return cache_of(LLAMA, BLOCK, dtype).block_bytes


def cache_for(name: str, dtype: str) -> KVCache:
    kernels = select(
        name, dtype=dtype, head_dim=LLAMA.head_dim, num_heads=LLAMA.num_attention_heads,
        num_kv_heads=LLAMA.num_key_value_heads, block_size=BLOCK, **H200,
    )  # fmt: skip
    return KVCache.of(LLAMA, BLOCK, dtype, kernels)


def test_kernels_may_want_a_wider_pool_than_the_model(llm, model, monkeypatch):
    """As GPU kernels do for an unsupported head dim; the result is the same."""

    def generated(llm):
        params = SamplingParams(max_tokens=10, temperature=0, logprobs=0)
        outputs = llm.generate([[1, 2, 3] * 9, [4]], params, use_tqdm=False)
        return llm.engine.runner.blocks.pool[0].shape[3], [output.outputs[0].token_ids for output in outputs]

    wide = lambda *args, **shapes: dataclasses.replace(select(*args, **shapes), head_dim=96)
    monkeypatch.setattr(setup, "select", wide)
    with few_shapes():
        width, tokens = generated(LLM(model, block_size=8, progress=False, num_gpu_blocks_override=20, **LIMITS))
    assert (width, generated(llm)) == (96, (64, tokens))


BUCKETS = [Bucket(8, 8, True), Bucket(64, 8, False)]


@pytest.mark.parametrize("bucket", BUCKETS, ids=["decode", "mixed"])
def test_the_step_aliases_the_pool_and_copies_none_of_it_on_a_cpu(bucket):
    graphdef, treedef, params, pool, (state, last), layout = step_avals(LLAMA, "float32", bucket)
    cache, buffer = cache_for("reference", "float32"), layout.empty()[0]
    step = Step(graphdef, treedef, cache, {bucket: layout}, placement_of(LLAMA))
    lowered = step.forward.lower(params, pool, last, buffer, bucket)
    assert (lowered.out_info[0].x_td is None) == bucket.decode, "only a prompt's tokens may be scored"
    compiled, pool_bytes = lowered.compile(), POOL_BLOCKS * bytes_of_a_block("float32")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / len(pool)
    assert copies(compiled.as_text(), pool[0].shape, "f32") == 0
    taken = samples_of(bucket, lowered.out_info[0].x_sd)
    assert lowered.out_info[0].rows_sf.shape == taken[1].shape
    if not bucket.decode:  # sampling depends on the number of samples only
        return
    compiled = step.choose.lower(params, state, last, *taken, Settings.ANY).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes((state, last))
    assert all(copies(compiled.as_text(), x.shape, name) == 0 for x, name in zip(state, ("s32", "pred", "f32")))


@pytest.mark.deep  # tests/kernels/test_compiled_step.py expects the same of a mixed step of a real model
@pytest.mark.parametrize("bucket", BUCKETS, ids=["decode", "mixed"])
def test_the_step_aliases_the_pool_and_copies_none_of_it_on_an_h200(bucket):
    if reason := deviceless.why_not():
        pytest.skip(reason)
    graphdef, treedef, params, pool, (_, last), layout = step_avals(LLAMA, "bfloat16", bucket)
    placement = placement_of(LLAMA, deviceless.h200s())
    step = Step(graphdef, treedef, cache_for("mosaic", "bfloat16"), {bucket: layout}, placement)
    program = deviceless.program_of(gpus.H200, step.forward, params, pool, last, layout.empty()[0], bucket)
    pool_bytes = POOL_BLOCKS * bytes_of_a_block("bfloat16")
    assert program.aliased_bytes == pool_bytes
    assert program.temp_bytes < pool_bytes / len(pool)
    assert program.copies_of(Array("bf16", pool[0].shape)) == 0
    assert "mosaic_gpu" in program.hlo


@pytest.mark.deep
def test_choosing_aliases_its_state_and_copies_none_of_it_on_an_h200():
    if reason := deviceless.why_not():
        pytest.skip(reason)
    bucket = BUCKETS[0]
    graphdef, treedef, params, _, (state, last), layout = step_avals(LLAMA, "bfloat16", bucket)
    placement = placement_of(LLAMA, deviceless.h200s())
    step = Step(graphdef, treedef, cache_for("mosaic", "bfloat16"), {bucket: layout}, placement)
    x_sd = jax.ShapeDtypeStruct((bucket.num_seqs, LLAMA.hidden_size), "bfloat16")
    taken = samples_of(bucket, x_sd)
    for settings in step.settings:
        program = deviceless.program_of(gpus.H200, step.choose, params, state, last, *taken, settings)
        assert program.aliased_bytes == nbytes((state, last))
        assert all(program.copies_of(Array(name, x.shape)) == 0 for x, name in zip(state, ("s32", "pred", "f32")))


def copies(hlo: str, shape, dtype: str) -> int:
    array = f"{dtype}[{','.join(map(str, shape))}]"
    return sum(array in line.partition(" copy(")[0] for line in hlo.splitlines() if " copy(" in line)


def test_block_copies_alias_the_pool_too():
    _, _, _, pool, *_ = step_avals(LLAMA, "float32", BUCKETS[0])
    indices = jax.ShapeDtypeStruct((8,), jnp.int32)
    copy = jax.jit(cache_for("reference", "float32").copy, donate_argnums=0)
    compiled = copy.lower(pool, indices, indices).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == POOL_BLOCKS * bytes_of_a_block("float32")
    assert copies(compiled.as_text(), pool[0].shape, "f32") == 0


def test_the_copy_test_can_fail():
    """A pool that is kept and changed must be copied."""
    shape = (POOL_BLOCKS, 2, BLOCK, 64)

    def keep(pool):
        return pool, pool.at[0].set(1)

    compiled = jax.jit(keep, donate_argnums=0).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    assert copies(compiled.as_text(), shape, "f32") > 0


def test_gpu_memory_utilization_sizes_the_pool(model, monkeypatch):
    gib = 2**30
    stats = {"bytes_limit": 2 * gib, "bytes_in_use": gib // 4}
    sizes = {}
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: stats)
    monkeypatch.setattr(pool, "sampling_temporaries", lambda *args: gib // 4)
    monkeypatch.setattr(pool, "model_temporaries", lambda *args: gib // 8)
    monkeypatch.setattr(KVCache, "allocate", lambda *args: [])
    for utilization in (0.5, 0.75):
        config = EngineConfig(gpu_memory_utilization=utilization, swap_space=0.0)
        sizes[utilization] = runner_of(model, config, Limits(128, 8, 32, 8)).blocks.num_blocks
    bytes_per_block = cache_of(LLAMA, 8, "float32").block_bytes
    assert sizes == {0.5: gib // 2 // bytes_per_block, 0.75: gib // bytes_per_block}


def test_the_cost_of_a_swap_is_in_tokens_per_block(llm, monkeypatch):
    runner, limits = llm.engine.runner, llm.engine.limits
    monkeypatch.setattr(measure, "stored_costs", lambda _, key, buckets, measure, *__: dict(zip(buckets, measure())))
    largest, blocks = runner.shapes.buckets.mixed[-1], TRANSFERS[-1]
    tokens = largest.num_tokens
    monkeypatch.setattr(measure, "_seconds", lambda run: run())
    costs = {largest: 0.25 * tokens}  # a quarter of a second for each token
    monkeypatch.setattr(runner.blocks, "swap_round_trip", lambda count: 2.0 * count)  # two seconds for each block
    assert blocks != tokens and measure.block_swap_cost(runner, limits, costs) == 8.0
    monkeypatch.setattr(runner.blocks, "swap_round_trip", lambda count: 2.0 if count == blocks else 0.0)
    assert measure.block_swap_cost(runner, limits, costs) == 8.0 / blocks, "of the largest transfer"
    assert llm.engine.scheduler.memory.swap_costs[0] > 0, "the scheduler is given the measured cost"


def test_steep_costs_add_shapes_and_shorten_chunks(llm, monkeypatch):
    """The shapes that are added are compiled before the first request."""
    model = random_model(dataclasses.replace(LLAMA, num_hidden_layers=1), "float32", seed=0)
    cost = lambda bucket: bucket.num_tokens / (5 if bucket.decode else 10)
    monkeypatch.setattr(measure, "stored_costs", lambda _, key, buckets, *__: {b: cost(b) for b in buckets})
    monkeypatch.setattr(setup, "resolve", limiting(setup.resolve, max_num_batched_tokens=64))
    compiled = []
    monkeypatch.setattr(ModelRunner, "run_padding", lambda self, bucket, **how: compiled.append(bucket))
    monkeypatch.setattr(Kernels, "skips_rows", False)  # a step costs as much as its whole shape
    options = dict(max_num_seqs=4, block_size=8, num_gpu_blocks_override=20, swap_space=0, progress=False)
    steep = LLM(model, kernels="reference", **options)
    assert steep.engine.scheduler.tokens_beside_decodes == 48 < steep.engine.scheduler.limits.max_num_batched_tokens
    assert llm.engine.scheduler.tokens_beside_decodes == LIMITS["max_num_batched_tokens"], "it was given"
    shapes = steep.engine.runner.shapes
    assert [b.num_tokens for b in shapes.buckets.decode] == [1, 2, 3, 4]
    assert [b.num_tokens for b in shapes.buckets.mixed] == [32, 48, 64]
    assert sorted(compiled) == sorted(shapes.buckets.all)


def test_costs_are_measured_once(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(measure, "_seconds", lambda run: measured.append(run()) or 0.001)
    monkeypatch.setattr(ModelRunner, "run_padding", lambda self, bucket, *_, **__: bucket)  # compiles nothing
    settings = EngineConfig(num_gpu_blocks_override=4)
    costs = []
    other = nnx.merge(*nnx.split(model))
    other.__class__ = type("Other", (type(model),), {})
    for each, block_size in ((model, 8), (model, 8), (model, 4), (other, 4)):
        limits = Limits(16, 2, 8, block_size)
        runner = runner_of(each, settings, limits)
        costs.append((measure.warm_up(runner, limits, progress=False), len(measured)))
    shapes = [Bucket(1, 1, True), Bucket(2, 2, True), Bucket(16, 2, False)]
    assert measured == shapes * 5 * 3, "five times, for other block sizes and classes"
    assert [count for _, count in costs] == [15, 15, 30, 45]
    assert costs[0][0] == costs[1][0] == dict.fromkeys(runner.shapes.buckets.all, 0.001)


def test_without_a_warm_up_shapes_compile_when_first_needed(model, llm, monkeypatch):
    compiled = []
    run = ModelRunner.run_padding
    monkeypatch.setattr(
        ModelRunner, "run_padding", lambda self, bucket, **how: compiled.append(bucket) or run(self, bucket, **how)
    )
    late = LLM(model, block_size=8, num_gpu_blocks_override=20, progress=False, warm_up=False, **LIMITS)
    assert compiled == [] and late.engine.scheduler.step_overhead == math.inf
    assert late.engine.scheduler.tokens_beside_decodes == late.engine.scheduler.limits.max_num_batched_tokens
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=1)
    answers = [
        [one.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0] for _ in range(2)] for one in (late, llm)
    ]
    assert [answer.token_ids for answer in answers[0]] == [answer.token_ids for answer in answers[1]]
    assert compiled == [Bucket(32, 8, False), Bucket(1, 1, True)], "once each"


@pytest.fixture
def runner(model):
    """A runner of 4 blocks and 2 rows that is not warmed up."""
    return runner_of(model, EngineConfig(num_gpu_blocks_override=4, swap_space=1.0), Limits(16, 2, 8, 8))


def test_a_plan_without_rows_has_an_empty_result(runner):
    assert runner.dispatch(StepPlan(swap_out=((2, 5),))).result() == StepResult(())


def test_prompts_are_scored_only_where_a_logprob_is_wanted(runner, monkeypatch):
    """The target may be token 0."""
    wanted = SamplingParams(prompt_logprobs=1)
    admitted = Admitted(0, (5, 0), 2, wanted, 0, ((1,),), num_scored=0)
    found = runner.dispatch(StepPlan((Scheduled(0, 0, 2, 1),), admitted=(admitted,))).result()
    (scored,) = found.prompt[0]
    assert found.prompt.keys() == {0} and scored.token == 0 and scored.logprob < 0 and len(scored.top_tokens) == 1
    monkeypatch.setattr(runner.step, "score", None)
    plain = Admitted(1, (5, 0), 2, SamplingParams(), 0, ((2,),))
    found = runner.dispatch(StepPlan((Scheduled(1, 0, 2, 1),), admitted=(plain,))).result()
    assert len(found.samples) == 1 and found.prompt == {}
    assert runner.dispatch(StepPlan((Scheduled(0, 2, 1, 1), Scheduled(1, 2, 1, 1)))).result().prompt == {}


@pytest.mark.deep  # tests/engine/test_update_params.py has it of an engine
def test_other_parameters_are_served_from_the_next_step_on(runner):
    before, other = list(runner.params), random_model(LLAMA, "float32", seed=1)
    runner.check(UpdateParams(other))
    assert all(now is old for now, old in zip(runner.params, before, strict=True))
    runner.control(UpdateParams(other))
    leaves = jax.tree.leaves(nnx.state(other))
    assert [x.unsafe_buffer_pointer() for x in runner.params] == [x.unsafe_buffer_pointer() for x in leaves]
    narrow = random_model(LLAMA, "bfloat16", seed=1)
    for call in (runner.check, runner.control):
        with pytest.raises(ValueError, match=r"params: .* is bfloat16, not float32"):
            call(UpdateParams(narrow))
    assert [x.unsafe_buffer_pointer() for x in runner.params] == [x.unsafe_buffer_pointer() for x in leaves]


def test_deleted_parameters_are_named():
    runner = runner_of(
        random_model(LLAMA, "float32", seed=1), EngineConfig(num_gpu_blocks_override=4), Limits(16, 2, 8, 8)
    )
    runner.params[3].delete()
    admitted = Admitted(0, (5, 0), 2, SamplingParams(), 0, ((1,),))
    with pytest.raises(ParamsDeleted, match=r"^params: .* were deleted, .* without donation$"):
        runner.dispatch(StepPlan((Scheduled(0, 0, 2, 1),), admitted=(admitted,)))


@pytest.mark.parametrize(
    "blocks, caches, expected", [(0, True, 0), (2.75, True, 2), (4, True, 4), (100, False, 4), (100, True, 16)]
)
def test_the_host_has_room_for_all_blocks_of_all_sequences_or_for_copies_of_four_pools(model, blocks, caches, expected):
    swap_space = blocks * cache_of(LLAMA, 8, "float32").block_bytes / 2**30
    config = EngineConfig(num_gpu_blocks_override=4, swap_space=swap_space, enable_prefix_caching=caches)
    assert runner_of(model, config, Limits(16, 2, 8, 8)).blocks.num_host_blocks == expected


def test_a_pool_in_bytes_has_the_blocks_that_fit(model):
    config = EngineConfig(kv_cache_memory_bytes=5 * cache_of(LLAMA, 8, "float32").block_bytes + 1)
    assert runner_of(model, config, Limits(16, 2, 8, 8)).blocks.num_blocks == 5


@pytest.mark.parametrize("most, sizes", [(2, (8,)), (8, (8,)), (32, (8, 32)), (64, (16, 64))])
def test_copies_are_padded_to_few_sizes(model, most, sizes):
    config = EngineConfig(num_gpu_blocks_override=64)
    runner = runner_of(model, config, Limits(16, most, most, 8))
    assert runner.blocks.copy_sizes == runner.rows.copy_sizes == sizes


def test_kernels_are_chosen_for_the_model_and_its_device(model, monkeypatch):
    chosen = {}

    def watched(*args, **options):
        chosen.update(options, args=args)
        return select(*args, **options)

    monkeypatch.setattr(setup, "select", watched)
    config = EngineConfig(num_gpu_blocks_override=4, kernels="reference", kv_cache_dtype="fp8")
    runner_of(model, config, Limits(16, 2, 8, 8))
    assert chosen == {
        "self_test": None, "args": ("reference",), "platform": "cpu", "device_kind": jax.devices()[0].device_kind,
        "compute_capability": None, "dtype": "float32", "pool_dtype": "float8_e4m3fn", "head_dim": 64, "num_heads": 4,
        "num_kv_heads": 2, "block_size": 8, "sinks": False, "mxfp4": False, "int8_rows": False,
    }  # fmt: skip


def test_recovery_makes_what_a_failed_step_has_lost(runner):
    for array in (*runner.blocks.pool, *runner.rows.state, runner.rows.last_tokens):
        array.delete()
    runner.recover()
    assert not any(array.any() for array in (*runner.blocks.pool, *runner.rows.state, runner.rows.last_tokens))
    runner.dispatch(StepPlan(swap_out=((2, 5),)))
    assert len(runner.blocks.host) == 1


@pytest.mark.parametrize("options", [{}, {"retest": True}])
def test_kernels_of_a_gpu_are_tested_first(options, monkeypatch):
    chosen = {}
    monkeypatch.setattr(setup, "select", lambda *_, **given: chosen.update(given))
    device = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", local_hardware_id=3
    )
    placement = types.SimpleNamespace(device=device)
    resolved = resolve(EngineConfig(block_size=32, tensor_parallel_size=4), LLAMA, setup.device_of(device))
    setup.select_kernels(resolved, placement, **options)
    retest = options.get("retest", False)
    assert chosen["self_test"] == SelfTest(cache_folder() / "selftest", device=3, retest=retest)
    assert (chosen["platform"], chosen["device_kind"], chosen["compute_capability"]) == ("gpu", "NVIDIA H200", 9.0)
    assert chosen["dtype"] == chosen["pool_dtype"] == "bfloat16" and chosen["block_size"] == 32
    assert (chosen["num_heads"], chosen["num_kv_heads"]) == (
        LLAMA.num_attention_heads // 4,
        LLAMA.num_key_value_heads // 2,
    )


def test_temporaries_are_xlas_own_account(llm):
    runner = llm.engine.runner
    hidden = 4 * LLAMA.hidden_size * LIMITS["max_num_batched_tokens"]
    of_model = [pool.model_temporaries(runner, num_blocks) for num_blocks in (64, 4096)]
    assert hidden <= of_model[0] == of_model[1]
    assert 4 * LLAMA.vocab_size * len(runner.rows.last_tokens) <= pool.sampling_temporaries(runner)


@pytest.mark.parametrize(
    "override, platform, name",
    [
        (10**5, "cpu", "num_gpu_blocks_override"),
        (None, "cpu", "num_gpu_blocks_override"),  # its pool is not sized by the memory
        (None, "gpu", "gpu_memory_utilization"),
    ],
)
def test_an_error_for_want_of_memory_names_the_field_that_sized_the_pool(model, monkeypatch, override, platform, name):
    pools = []

    monkeypatch.setattr(pool, "fill_memory", lambda *_, **__: 10**5)
    monkeypatch.setattr(type(jax.devices()[0]), "platform", platform)
    monkeypatch.setattr(pool, "available_memory", lambda device: 2**40)
    monkeypatch.setattr(KVCache, "allocate", lambda *args: pools.append(args) or [])
    runner = runner_of(model, EngineConfig(num_gpu_blocks_override=override), Limits(16, 2, 8, 8))
    assert pools == [(runner.blocks.cache, 10**5, 0, runner.placement.pool)]
    size = 10**5 * cache_of(LLAMA, 8, "float32").block_bytes / 2**30
    words = rf"^{name}: no memory is left with a KV pool of 100000 blocks \({size:.2f} GiB\)"
    with pytest.raises(ValueError, match=words), runner.blocks.exhaustion():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.parametrize("stats", [None, {"bytes_limit": 2**30, "bytes_in_use": 2**29}], ids=["cpu", "gpu"])
def test_a_pool_beyond_the_memory_is_an_error_with_the_flag_and_the_numbers(model, monkeypatch, stats):
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: stats)
    monkeypatch.setattr(pool, "available_host_memory", lambda: 2**29)
    block = cache_of(LLAMA, 8, "float32").block_bytes
    words = (
        rf"num_gpu_blocks_override: {10**6} blocks take {10**6 * block / 2**30:.2f} GiB, more than the 0.50 GiB of "
        rf"free memory \(at most {2**29 // block} blocks\)"
    )
    with pytest.raises(ValueError, match=words):
        LLM(model, block_size=8, num_gpu_blocks_override=10**6, progress=False, **LIMITS)


def test_a_pool_that_cannot_be_allocated_is_an_error_in_one_line(model, monkeypatch):
    monkeypatch.setattr(pool, "available_memory", lambda device: 2**80)  # more than there is
    with pytest.raises(ValueError, match=r"num_gpu_blocks_override: .* \(RESOURCE_EXHAUSTED: Out of memory") as error:
        LLM(model, block_size=8, num_gpu_blocks_override=10**12, progress=False, **LIMITS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: Out of memory\nat a buffer", "INTERNAL: a fault"])
def test_a_step_without_room_beside_the_pool_is_an_error_in_one_line(llm, monkeypatch, message):
    def run(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(llm.engine.runner, "run_padding", run)
    expected = (jax.errors.JaxRuntimeError, "^INTERNAL: a fault$") if "INTERNAL" in message else (
        ValueError, r"^num_gpu_blocks_override: .* \(RESOURCE_EXHAUSTED: Out of memory\)$"
    )  # fmt: skip
    with pytest.raises(expected[0], match=expected[1]):
        measure.warm_up(llm.engine.runner, llm.engine.limits, progress=False)

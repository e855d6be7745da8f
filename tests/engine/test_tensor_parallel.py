"""Meshes of several devices: the tokens of one device, few collectives, a pool that stays in place."""

import collections
import functools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import H200
from jpaged import LLM, BeamSearchParams, ModelConfig, SamplingParams, StructuredOutputsParams
from jpaged.config import EngineConfig, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.models.checkpoint import abstract_model
from jpaged.models.variation import Variation
from jpaged.runtime.batch import Bucket, Layout
from jpaged.runtime.device_rows import empty_state
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import GROUP, KV, Placement, shard
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Step
from jpaged.runtime.tensor_parallel import divide_kernels
from jpaged.start.load import load_checkpoint
from jpaged.start.measure import warm_up
from jpaged.start.setup import choose_devices, prepare
from jpaged.tokenizer import backend
from pallas_kernels import select
from tests.runtime.caches import placement_of
from tests.runtime.test_runner import Compilations, any_params, copies
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model
from tests.support.runners import runner_of

pytestmark = pytest.mark.slow

BLOCK, ROOM = 8, 300
LIMITS = Limits(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=32, block_size=BLOCK)
SHAPES = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    max_position_embeddings=256,
)  # fmt: skip
# Blocks of the pool, and the preemption mode.
POOLS = {"room": (ROOM, "recompute"), "swap": (30, "swap"), "recompute": (30, "recompute")}


@functools.cache
def runner_on(directory: Path, num_devices: int) -> tuple[ModelRunner, object]:
    """A runner of a model, and its tokenizer."""
    config = EngineConfig(
        model=str(directory), num_gpu_blocks_override=ROOM, swap_space=1.0, tensor_parallel_size=num_devices,
        block_size=8,
    )  # fmt: skip
    setup = prepare(config)
    model = load_checkpoint(setup, progress=False)
    with few_shapes():
        runner = runner_of(model, config, LIMITS)
    warm_up(runner, LIMITS, progress=False)
    return runner, backend(setup.tokenizer)


def engine_on(runner: ModelRunner, pool: str, tokenizer=None) -> Engine:
    blocks, mode = POOLS[pool]
    scheduler = Scheduler(
        BlockPool(blocks, BLOCK), LIMITS, vocab_size=runner.vocab_size, preemption=mode, eos_token_ids=[1],
        host_pool=BlockPool(ROOM, BLOCK, enable_prefix_caching=False) if mode == "swap" else None,
    )  # fmt: skip
    return Engine(scheduler, runner, tokenizer, max_in_flight=2)


def requests(engine: Engine) -> list[tuple[list[int], object, dict]]:
    """Requests of every kind."""
    tokens = lambda text: engine.tokenizer.encode(text).ids
    drawn = dict(temperature=0.9, max_tokens=24, ignore_eos=True)
    phrase = StructuredOutputsParams(regex="(one|two) (cats|dogs)")
    compiler = engine.grammar_compiler()
    return [
        (tokens("Once upon a time"), SamplingParams(temperature=0, max_tokens=40), {}),
        (tokens("The little fox"), SamplingParams(seed=3, top_k=20, top_p=0.9, **drawn), {}),
        (tokens("Who are you?"), SamplingParams(seed=4, min_p=0.1, **drawn), {}),
        (tokens("One day, a girl"), SamplingParams(
            n=3, seed=5, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={200: 2.0},
            **drawn), {}),
        (tokens("A boy named Tim had a red ball"), SamplingParams(
            temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=2), {}),
        (tokens("The sun"), BeamSearchParams(beam_width=3, max_tokens=16), {}),
        (tokens("I have"), SamplingParams(seed=6, temperature=1.0, max_tokens=12, structured_outputs=phrase),
         {"constraint": compiler.compile(phrase)}),
        (tokens("The king said"), SamplingParams(temperature=0, max_tokens=30, stop=["."], min_tokens=4), {}),
    ]  # fmt: skip


def run(engine: Engine) -> list[list]:
    """The outputs of all requests at once, and again, with the prefix cache."""
    found = []
    for turn in range(2):
        added = [engine.add(f"{turn} {i}", *each[:2], **each[2]) for i, each in enumerate(requests(engine))]
        while engine.has_work:
            engine.step()
        engine.scheduler.check_invariants()
        found += [request.outputs for request in added]
    return found


def assert_same(outputs, expected, atol: float = 1e-4) -> None:
    """Expect the same tokens, texts and ends, and logprobs that differ by the order of sums only."""
    for choices, others in zip(outputs, expected, strict=True):
        for one, other in zip(choices, others, strict=True):
            assert (one.output_token_ids, one.text, one.finish_reason) == (
                other.output_token_ids, other.text, other.finish_reason,
            )  # fmt: skip
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=atol) and a.top_tokens == b.top_tokens


@pytest.mark.parametrize(
    ("num_devices", "pools"),
    [
        pytest.param(2, POOLS, id="2", marks=pytest.mark.deep),
        pytest.param(4, ["swap"], id="4"),
        pytest.param(4, ["room", "recompute"], id="4, other pools", marks=pytest.mark.deep),
    ],
)
def test_the_tokens_are_those_of_one_device(characters, num_devices, pools):
    """In pools with room, with swaps and with recomputation. With four devices, each of two KV heads is on two of them.

    Only swaps have executables of their own.
    """
    runner, tokenizer = runner_on(characters, num_devices)
    assert runner.placement.mesh.shape == {KV: 2, GROUP: num_devices // 2}
    one_device, tokenizer = runner_on(characters, 1)
    expected = run(engine_on(one_device, "room", tokenizer))
    for pool in pools:
        engine = engine_on(runner, pool, tokenizer)
        with Compilations() as compilations:
            found = run(engine)
        assert compilations.count == 0, "something was compiled after the warm-up"
        scheduler = engine.scheduler
        assert (scheduler.num_preemptions > 0) == (pool != "room")
        assert (scheduler.num_swapped_blocks > 0) == (pool == "swap")
        assert_same(found, expected)


def model_config(**changes) -> ModelConfig:
    return ModelConfig(**SHAPES | dict(num_key_value_heads=4) | changes)


# KV heads as many as devices, or fewer; a vocabulary that four devices can't divide; biases, sinks and tied embeddings.
MODELS = {
    "4 KV heads": model_config(),
    "2 KV heads, tied, biases, sinks": model_config(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        variation=Variation(sinks=True),
    ),
    "1 KV head, 257 tokens": model_config(num_key_value_heads=1, vocab_size=257, num_hidden_layers=1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) for name in ("1 KV head, 257 tokens", *list(MODELS)[:2])]
)
def test_models_of_other_shapes(name):
    """Drawn and greedy tokens with penalties and logprobs, in an fp8 pool."""
    config, found = MODELS[name], []
    for num_devices in (1, 4):
        placement = placement_of(config, jax.devices()[:num_devices])
        model = random_model(config, "float32", 0, placement.of)
        settings = EngineConfig(num_gpu_blocks_override=ROOM, swap_space=0, kv_cache_dtype="fp8")
        with few_shapes():
            engine = engine_on(runner_of(model, settings, LIMITS), "room")
        rng = random.Random(7)
        added = [
            engine.add(str(i), [rng.randrange(257) for _ in range(rng.randint(1, 40))], any_params(rng))
            for i in range(12)
        ]
        while engine.has_work:
            engine.step()
        found.append([request.outputs for request in added])
    # A sum halfway between two numbers of fp8 is rounded up or down: 2.1e-4 was seen, and 1.4e-6 in a float32 pool.
    assert_same(*found, atol=1e-3)


def avals(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def step_on(devices, config: ModelConfig, bucket: Bucket, *, kernels: str, dtype: str, blocks: int, width: int):
    """Return (forward, its arguments), (choose, its arguments), and the bytes of the pool on each device."""
    placement = Placement.on(devices, config)
    gpu = kernels != "reference"
    chosen = select(
        kernels, platform="gpu" if gpu else "cpu", device_kind="NVIDIA H200" if gpu else "cpu",
        compute_capability=9.0 if gpu else None, dtype=dtype, head_dim=config.head_dim,
        num_heads=config.num_attention_heads // placement.size,
        num_kv_heads=config.num_key_value_heads // placement.kv_size, block_size=16,
    )  # fmt: skip
    cache = KVCache.of(config, 16, dtype, divide_kernels(chosen, placement))
    graphdef, leaves = abstract_model(config, dtype)
    placed = {
        path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.of(leaf)))
        for path, leaf in leaves.items()
    }
    params, treedef = jax.tree.flatten([nnx.from_flat_state(placed)])
    layout = Layout(bucket, width)
    step = Step(graphdef, treedef, cache, {bucket: layout}, placement)
    pool = [jax.ShapeDtypeStruct(cache.shape(blocks), dtype, sharding=placement.pool)] * (2 * cache.groups.size)
    whole = functools.partial(jax.ShapeDtypeStruct, sharding=placement.whole)
    rows = bucket.num_seqs + 3
    last = whole((rows,), jnp.int32)
    state = avals(jax.eval_shape(lambda: empty_state(rows, config.vocab_size)), placement.whole)
    x_sd, bits = whole((bucket.num_seqs, config.hidden_size), dtype), -(-config.vocab_size // 32)
    rows_sf = whole((bucket.num_seqs, ROW_WORDS), jnp.int32)
    forward = step.forward, (params, pool, last, avals(layout.empty()[0], placement.whole), bucket)
    taken = params, state, last, x_sd, rows_sf, whole((bucket.num_seqs, bits), jnp.uint32), Settings.ANY
    return forward, (step.choose, taken), blocks * cache.block_bytes // placement.kv_size


def collectives(hlo: str) -> collections.Counter[str]:
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return collections.Counter(re.findall(rf"= [^=]*? ({names})(?:-start)?\(", hlo))


@pytest.mark.parametrize(
    "bucket",
    [
        pytest.param(Bucket(8, 8, True), id="decode"),
        pytest.param(Bucket(64, 8, False), id="mixed", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param("4 KV heads", marks=pytest.mark.deep), "2 KV heads, tied, biases, sinks"]
)
def test_a_step_has_two_reductions_per_layer_and_the_pool_stays_in_place(name, bucket):
    config = MODELS[name]
    options = dict(kernels="reference", dtype="float32", blocks=64, width=8)
    (forward, args), (choose, others), pool_bytes = step_on(jax.devices()[:4], config, bucket, **options)
    compiled = forward.lower(*args).compile()
    assert collectives(compiled.as_text()) == {"all-reduce": 2 * config.num_hidden_layers + 1}
    assert compiled.memory_analysis().alias_size_in_bytes == pool_bytes
    shape = (64, config.num_key_value_heads // min(4, config.num_key_value_heads), 16, config.head_dim)
    assert copies(compiled.as_text(), shape, "f32") == 0
    if bucket.decode:  # sampling depends on the number of samples only
        compiled = choose.lower(*others).compile()
        assert collectives(compiled.as_text()) == {"all-to-all": 1, "all-gather": 1}
        state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(others[1:3]))
        assert compiled.memory_analysis().alias_size_in_bytes == state_bytes


LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
)  # fmt: skip


deviceless_only = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))
ON_H200S = dict(kernels="mosaic", dtype="bfloat16", blocks=4096, width=512)


@pytest.mark.deep
@deviceless_only
@pytest.mark.parametrize(
    "topology, bucket",
    [
        pytest.param("1x1x4", Bucket(64, 64, True), id="4 H200s, decode"),
        pytest.param("1x1x8", Bucket(64, 64, True), id="8 H200s, decode"),
        pytest.param("1x1x8", Bucket(2048, 64, False), id="8 H200s, mixed"),
        pytest.param("1x2x4", Bucket(64, 64, True), id="two hosts of 4 H200s, decode"),
    ],
)
def test_two_layers_of_an_8b_model_on_h200s(topology, bucket):
    (forward, args), _, pool_bytes = step_on(deviceless.h200s(topology), LLAMA_8B, bucket, **ON_H200S)
    compiled = deviceless.program_of(H200, forward, *args)
    assert collectives(compiled.hlo) == {"all-reduce": 5} and "mosaic_gpu" in compiled.hlo
    assert compiled.aliased_bytes == pool_bytes
    assert compiled.temp_bytes < 2**26


@pytest.mark.deep
@deviceless_only
@pytest.mark.parametrize("topology", ["1x1x4", "1x1x8", "1x2x4"])
def test_sampling_of_an_8b_model_on_h200s(topology):
    """Compiling it takes ten seconds; on a CPU its collectives are those of the test of two reductions per layer."""
    _, (choose, args), _ = step_on(deviceless.h200s(topology), LLAMA_8B, Bucket(64, 64, True), **ON_H200S)
    compiled = deviceless.program_of(H200, choose, *args)
    assert collectives(compiled.hlo) == {"all-to-all": 1, "all-gather": 1}
    assert compiled.temp_bytes < 2**27, "the head's weights are gathered"


@pytest.fixture(scope="module")
def on_a_mesh():
    config = model_config(num_hidden_layers=1)
    return random_model(config, "float32", 0, placement_of(config, jax.devices()[:2]).of)


@pytest.fixture(scope="module")
def served(on_a_mesh):
    with few_shapes():
        return LLM(on_a_mesh, swap_space=0, **FEW)


FEW = dict(block_size=8, num_gpu_blocks_override=20, max_num_seqs=2, max_num_batched_tokens=16, progress=False)


def pointers(model) -> set[int]:
    leaves = jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)
    return {shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards}


def test_a_module_is_sharded_as_the_engine_serves_it(on_a_mesh):
    config = on_a_mesh.config
    sharded = shard(random_model(config, "float32", 0), jax.devices()[:2])
    for (path, leaf), (_, other) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (sharded, on_a_mesh)), strict=True):
        assert leaf[...].sharding == other[...].sharding and bool((leaf[...] == other[...]).all()), path
    assert pointers(shard(sharded, jax.devices()[:2])) == pointers(sharded)


def test_a_module_on_a_mesh_is_served_with_its_own_arrays(on_a_mesh, served):
    llm, runner = served, served.engine.runner
    assert runner.placement.size == 2 and pointers(runner.params) == pointers(on_a_mesh)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    before = llm.generate([3, 4, 5], params, use_tqdm=False)[0].outputs[0].token_ids
    other = random_model(on_a_mesh.config, "float32", 1, runner.placement.of)
    with Compilations() as compilations:
        llm.update_params(other)
        after = llm.generate([3, 4, 5], params, use_tqdm=False)[0].outputs[0].token_ids
    assert compilations.count == 0 and pointers(runner.params) == pointers(other) and before != after
    llm.update_params(on_a_mesh)


def test_a_module_that_lies_otherwise_is_copied(on_a_mesh, served, caplog):
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size: must be at most the number of devices \(2\) on which"
    ):
        LLM(on_a_mesh, tensor_parallel_size=4, **FEW)
    mesh = Mesh(jax.devices()[:2], "x")
    graphdef, state = nnx.split(on_a_mesh)
    moved = nnx.merge(graphdef, jax.device_put(state, NamedSharding(mesh, P())))
    with caplog.at_level("INFO"), few_shapes():
        copied = LLM(moved, swap_space=0, **FEW)
    assert re.search(r"params: \d+ of \d+ arrays \(first: \S+\) are copied, [\d,]+ bytes", caplog.text)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = [llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0] for llm in (copied, served)]
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize(
    "changes, size, told",
    [
        ({}, 3, r"must divide num_attention_heads \(4\) of the model, not 3"),
        ({"intermediate_size": 98}, 4, r"must divide intermediate_size \(98\) of the model, not 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4,
         r"must divide num_key_value_heads \(6\) of the model or be a multiple of it, not 4"),
    ],
)  # fmt: skip
def test_a_model_that_devices_cannot_share_is_refused(changes, size, told):
    with pytest.raises(ValueError, match=f"^tensor_parallel_size: {told}$"):
        Placement.on([jax.devices()[0]] * size, model_config(**changes))


def test_more_devices_than_there_are():
    told = "tensor_parallel_size: must be at most 4, as jax has 4 devices, not 8; JAX_NUM_CPU_DEVICES sets the number"
    with pytest.raises(ValueError, match=f"^{told}"):
        LLM(tensor_parallel_size=8)
    with pytest.raises(ValueError, match=r"^data_parallel_size: must be at most 2, as jax has 4 devices, not 3"):
        choose_devices(2, 3)
    assert choose_devices(2, 2) == [jax.devices()[:2], jax.devices()[2:4]]


def test_the_pool_and_the_host_memory_are_counted_per_device():
    config = model_config(num_key_value_heads=2, num_hidden_layers=1)
    sizes = {}
    for num_devices in (1, 4):
        model = random_model(config, "float32", 0, placement_of(config, jax.devices()[:num_devices]).of)
        settings = EngineConfig(num_gpu_blocks_override=16, swap_space=2**-10)
        runner = runner_of(model, settings, LIMITS)
        sizes[num_devices] = runner.blocks.num_host_blocks, runner.blocks.pool[0].addressable_shards[0].data.nbytes
    block_bytes = 2 * 2 * BLOCK * 16 * 4
    assert sizes[1] == (2**20 // block_bytes, 16 * block_bytes // 2)
    # Half of the KV heads on each device, and each half on two of them.
    assert sizes[4] == (2**20 // (2 * block_bytes), 8 * block_bytes // 2)
    np.testing.assert_array_equal(runner.placement.mesh.devices.shape, (2, 2))


COMMAND_BUFFERS = """
import collections, pathlib, re, sys
from tests.engine import test_tensor_parallel as tests
from tests.support.runners import runner_of
(forward, args), _, _ = tests.step_on(
    tests.deviceless.h200s("1x1x4"), tests.LLAMA_8B, tests.Bucket(64, 64, True), kernels="mosaic", dtype="bfloat16",
    blocks=4096, width=512,
)
folder = pathlib.Path(sys.argv[1])
with tests.deviceless.abstract(tests.H200):
    lowered = forward.trace(*args).lower()
lowered.compile({"xla_dump_to": str(folder), **tests.deviceless.OPTIMIZED})
thunks = max(folder.glob("*thunk_sequence*"), key=lambda path: path.stat().st_size).read_text()
print(collections.Counter(re.findall(r"^ *[0-9]+: (k[A-Za-z]+)", thunks, re.M))["kCommandBuffer"])
"""


@pytest.mark.deep
@pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))
def test_a_flag_puts_all_reduces_into_the_command_buffer(tmp_path):
    """Without it, each all-reduce ends a command buffer and the next one begins."""
    counts = {}
    for flags in ("", "--xla_gpu_enable_command_buffer=+COLLECTIVES"):
        (folder := tmp_path / str(len(counts))).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", COMMAND_BUFFERS, folder], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        counts[flags] = int(done.stdout.split()[-1])
    assert counts == {"": 5, "--xla_gpu_enable_command_buffer=+COLLECTIVES": 1}

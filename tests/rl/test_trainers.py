"""Modules that trainers have, served as they are: the recipes of docs/adding-a-model.md, and GRPO beside the engine."""

import contextlib
import io
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged import LLM, SamplingParams, shard
from jpaged.rl import RolloutWorker, causal, group_advantages
from jpaged.runtime.parameters import ParamTree, by_name
from jpaged.runtime.placement import Placement
from tests.runtime.test_runner import Compilations
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"
ENGINE = dict(max_num_seqs=8, max_num_batched_tokens=16, num_gpu_blocks_override=40, progress=False, warm_up=True)
GROUP, WIDTH = 4, 24
PROMPTS = [[3, 4, 5], [*range(40, 50)]]


def recipes(*, served: bool) -> dict:
    """Run the page's recipes, and return their names; the engine's construction and use only if `served`."""
    page = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", page[: page.index("## An architecture")], re.DOTALL)
    found: dict = {}
    with few_shapes():
        for block in blocks:
            exec(block if served else block.partition("llm = ")[0], found)
    return found


@pytest.fixture(scope="module")
def page():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = recipes(served=True)
    return found | {"printed": printed.getvalue()}


def test_the_first_recipe_serves_a_module_and_takes_its_new_arrays(page):
    before, after = page["printed"].splitlines()
    assert before != after
    tree, params = page["llm"].engine.runner.tree, page["llm"].engine.runner.params
    assert dict(zip(tree.expected, params))["gpt.norm.bias"].tolist() == [1.0] * 64


def own_logits(module, tokens_bw):
    """The logits of a wrapper, by the trainer's attention."""
    positions_bw = jnp.broadcast_to(jnp.arange(tokens_bw.shape[1]), tokens_bw.shape)
    seen = jnp.broadcast_to(jnp.tri(tokens_bw.shape[1], dtype=bool), (*tokens_bw.shape, tokens_bw.shape[1]))
    return causal.logits(module, tokens_bw, positions_bw, seen)


def maxtext_tree(model) -> dict:
    """The parameters of a Llama in MaxText's form."""
    config = model.config
    n, k, h, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
    stack = lambda leaf_of: jnp.stack([leaf_of(layer) for layer in model.layers], axis=1)
    kernel = lambda part, name: {"kernel": stack(lambda layer: getattr(getattr(layer, part), name).weight[...].T)}
    heads = lambda name, count, scale=1.0: {
        "kernel": kernel("self_attn", name)["kernel"].reshape(d, -1, count, h) * scale
    }
    norm = lambda name: {"scale": stack(lambda layer: getattr(layer, name).scale[...])}
    layers = {
        "pre_self_attention_layer_norm": norm("input_layernorm"),
        "post_self_attention_layer_norm": norm("post_attention_layernorm"),
        "self_attention": {
            "query": heads("q_proj", n, h**-0.5), "key": heads("k_proj", k), "value": heads("v_proj", k),
            "out": {"kernel": stack(lambda layer: layer.self_attn.o_proj.weight[...].T.reshape(n, h, d))},
        },
        "mlp": {"wi_0": kernel("mlp", "gate_proj"), "wi_1": kernel("mlp", "up_proj"), "wo": kernel("mlp", "down_proj")},
    }  # fmt: skip
    decoder = {"layers": layers, "decoder_norm": {"scale": model.norm.scale[...]}}
    decoder["logits_dense"] = {"kernel": model.lm_head.weight[...].T}
    return {"params": {"token_embedder": {"embedding": model.embed_tokens.embedding[...]}, "decoder": decoder}}


def recipe(page, name):
    """A recipe's wrapper, and a function that returns the same logits in another way."""
    if name == "tree":
        model = random_model(page["config"], "float32", 0)
        return page["ServedTree"](maxtext_tree(model), page["config"]), partial(nnx.jit(own_logits), model)
    module = page["Served"](page[name], page["config"]) if name == "separate" else page[name]
    gpt = page["scanned"].gpt if name == "separate" else module.gpt
    return module, partial(nnx.jit(lambda gpt, tokens_bw: gpt(tokens_bw)), gpt)


# "separate" has the parameters of "scanned".
@pytest.mark.parametrize(
    "name",
    ["lora", "separate", "tree", *(pytest.param(each, marks=pytest.mark.deep) for each in ("scanned", "sharded"))],
)
def test_a_recipes_wrapper_computes_what_the_trainers_module_does(page, name):
    module, logits_of = recipe(page, name)
    tokens_bw = jnp.arange(24).reshape(2, 12)
    np.testing.assert_allclose(nnx.jit(own_logits)(module, tokens_bw), logits_of(tokens_bw), atol=5e-5)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["scanned", "sharded", "tree"])
def test_a_recipe_is_served_and_updated_without_a_copy(page, name):
    module, logits_of = recipe(page, name)
    with few_shapes():
        llm = LLM(module, allow_copy=False, **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logprobs = jax.nn.log_softmax(logits_of(jnp.array([PROMPTS[1] + tokens]))[0, 9:-1])
    assert tokens == logprobs.argmax(1).tolist()
    found = [each[token].logprob for token, each in zip(tokens, output.outputs[0].logprobs, strict=True)]
    assert found == pytest.approx(logprobs.max(1).tolist(), abs=1e-5)
    trained = module.gpt if hasattr(module, "gpt") else {"params": module.tree["params"]}
    with Compilations() as compilations:
        llm.update_params(trained)
    assert compilations.count == 0 and pointers(llm.engine.runner.params) == pointers(
        by_name(
            trained,
        ).values()
    )


def pointers(arrays) -> list[int]:
    """The addresses of arrays of floating-point numbers, on all of their devices."""
    found = (array for array in arrays if jnp.issubdtype(array.dtype, jnp.floating))
    return [shard.data.unsafe_buffer_pointer() for array in found for shard in array.addressable_shards]


def with_lora(gpt):
    for block in gpt.blocks:
        block.out = nnx.LoRA(64, 8, 64, base_module=block.out, rngs=nnx.Rngs(1))
    return gpt


# A trainer's module, the variables that it trains, the source of an update (None: the engine notices it), and the
# largest mismatch of logprobs. In float32 both sides differ by the order of their sums. Numbers of bfloat16 have 8
# significant bits, so that a logit between 2 and 4 is off by 2**-7 if its rounding falls to the other side; the LoRA's
# module rounds its logits only, the last one ten times on the way to them.
TRAINERS = {
    "dropout": (lambda make: make(), nnx.Param, lambda gpt: gpt, 1e-5),
    "step counter": (lambda make: nnx.view(make(), deterministic=True), nnx.Param, None, 1e-5),
    "float32 LoRA on bfloat16": (
        lambda make: with_lora(make(param_dtype=jnp.bfloat16)), nnx.LoRAParam,
        lambda gpt: nnx.to_pure_dict(nnx.state(gpt, nnx.LoRAParam)), 3e-2,
    ),
    "bfloat16 computation": (
        lambda make: make(dtype=jnp.bfloat16, param_dtype=jnp.float32), nnx.Param,
        lambda gpt: nnx.state(gpt, nnx.Param), 0.1,
    ),
}  # fmt: skip


def token_logprobs(gpt, tokens_bw):
    logprobs_bwv = jax.nn.log_softmax(gpt(tokens_bw)[:, :-1])
    return jnp.pad(jnp.take_along_axis(logprobs_bwv, tokens_bw[:, 1:, None], axis=2)[..., 0], ((0, 0), (1, 0)))


def train_step(gpt, trained):
    """Return a step of GRPO by gradient descent, compiled, that writes the new arrays into the module."""
    split = partial(nnx.split, gpt, trained, nnx.Param, ...)  # parameters that are trained, others, and other variables
    graphdef, params, _, variables = split()

    @partial(jax.jit, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, (params, variables)))
    def step(params, frozen, variables, tokens_bw, is_output_bw, drawn_bw, advantage_b):
        def loss(params):
            model = nnx.merge(graphdef, params, frozen, jax.tree.map(jnp.asarray, variables))  # of this trace
            ratio_bw = jnp.exp(jnp.where(is_output_bw, token_logprobs(model, tokens_bw) - drawn_bw, 0))
            gain_bw = jnp.minimum(ratio_bw * advantage_b[:, None], jnp.clip(ratio_bw, 0.8, 1.2) * advantage_b[:, None])
            return -jnp.sum(gain_bw * is_output_bw) / jnp.sum(is_output_bw), nnx.state(model, nnx.Not(nnx.Param))

        gradients, variables = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda x, g: (x - 0.5 * g).astype(x.dtype), params, gradients), variables

    def train(*batch):
        nnx.update(gpt, *step(*split()[1:], *batch))

    return train


def mismatches_of(gpt, trained, source_of, worker) -> list[float]:
    """Train five steps of GRPO; return the largest difference of logprobs, trainer and engine, before each.

    After the first step, neither the engine nor the trainer compiles anything.
    """
    train, found, compilations = train_step(gpt, trained), [], Compilations()
    graphdef = nnx.graphdef(nnx.view(gpt, deterministic=True))
    trainers = jax.jit(lambda state, tokens_bw: token_logprobs(nnx.merge(graphdef, state), tokens_bw))
    for step in range(5):
        if step == 1:
            compilations.__enter__()
        before = nnx.to_pure_dict(nnx.state(gpt))
        rollouts = worker.generate(PROMPTS, SamplingParams(n=GROUP, max_tokens=10, seed=step, ignore_eos=True))
        untouched = jax.tree.map(lambda x, y: x is y, before, nnx.to_pure_dict(nnx.state(gpt)))
        assert all(jax.tree.leaves(untouched)), "the engine writes nothing back"
        logprobs = trainers(nnx.state(gpt), rollouts.tokens)
        found.append(float(np.abs(np.where(rollouts.is_output, logprobs - rollouts.logprobs, 0)).max()))
        rewards = ((rollouts.tokens % 2) * rollouts.is_output).sum(1)
        train(rollouts.tokens, rollouts.is_output, rollouts.logprobs, group_advantages(rewards, GROUP))
        if source_of is not None:
            worker.update(source_of(gpt))
    compilations.__exit__()
    assert compilations.count == 0
    assert worker.llm.engine.runner.params_version == 5 - (source_of is None)
    return found


@pytest.mark.deep  # test_exact_training.py trains beside an engine in the usual tier
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainers_module_is_trained_beside_the_engine(page, name):
    make, trained, source_of, bound = TRAINERS[name]
    gpt = fsdp(make(partial(page["GPT"], page["config"], nnx.Rngs(0))), jax.devices()[:1])
    with few_shapes():
        llm = LLM(page["Served"](gpt, page["config"]), allow_copy=False, **ENGINE)
    first = nnx.to_pure_dict(nnx.state(gpt, trained))
    found = mismatches_of(gpt, trained, source_of, RolloutWorker(llm, width=WIDTH))
    print(name, *(f"{mismatch:.1e}" for mismatch in found))
    assert max(found) < bound
    assert not any(jax.tree.leaves(jax.tree.map(jnp.array_equal, first, nnx.to_pure_dict(nnx.state(gpt, trained)))))
    for leaf in jax.tree.leaves(nnx.state(gpt, nnx.Not(nnx.Param))):
        leaf.delete()  # as a train step that donates its random keys
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert pointers(llm.engine.runner.params) == pointers(by_name(nnx.state(gpt, nnx.Param)).values())


@pytest.mark.deep  # tests/runtime/test_parameters.py casts parameters in the usual tier
def test_float32_masters_are_served_in_bfloat16(page):
    """Each update casts them into the same memory, also that of a sleeping engine's next parameters."""
    gpt = page["GPT"](page["config"], nnx.Rngs(0))
    with few_shapes():
        llm = LLM(page["Served"](gpt, page["config"]), dtype="bfloat16", **ENGINE)
    runner, params = llm.engine.runner, SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    assert {str(array.dtype) for array in (*runner.params, *runner.blocks.pool)} == {"bfloat16"}
    for change in ("notice", "update", "asleep"):
        before = pointers(runner.params)
        if change == "asleep":
            llm.sleep(1)
        nnx.update(gpt, jax.tree.map(lambda x: 1.1 * x, nnx.state(gpt, nnx.Param)))
        with Compilations() as compilations:
            if change != "notice":
                llm.update_params(gpt)
            assert llm.engine.asleep == ({"kv_cache"} if change == "asleep" else set())
            llm.wake_up()
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        assert compilations.count == 0 and (change == "asleep" or pointers(runner.params) == before)
        tokens = output.outputs[0].token_ids
        narrow = nnx.view(gpt, deterministic=True)
        logprobs = jax.nn.log_softmax(narrow(jnp.array([PROMPTS[1] + tokens]))[0, 9:-1])
        for token, found, expected in zip(tokens, output.outputs[0].logprobs, logprobs, strict=True):
            assert found[token].logprob == pytest.approx(float(expected[token]), abs=0.1)


def test_layers_that_compute_in_another_dtype_are_named(page):
    gpt = page["GPT"](page["config"], nnx.Rngs(0), dtype=jnp.float32)
    with pytest.raises(
        ValueError, match=r"^dtype: the module computes queries, keys and values in float32 even if its"
    ):
        LLM(page["Served"](gpt, page["config"]), dtype="bfloat16", **ENGINE)


def test_parameters_that_lie_whole_on_two_devices_are_told(page, caplog):
    module = shard(page["Served"](page["GPT"](page["config"], nnx.Rngs(0)), page["config"]), jax.devices()[:2])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))
    told = rf"params: all 28 arrays \(first: \S+\) lie whole on each of 2 devices, {size:,} bytes more than on one"
    with pytest.raises(ValueError, match=f"^{told}.*; allow_copy=False forbids that$"):
        LLM(module, allow_copy=False, **ENGINE)
    tree = ParamTree(module, Placement.on(jax.devices()[:2], page["config"]))
    assert [bool(re.match(told, message)) for message in caplog.messages] == [True]
    tree.place(module)
    assert len(caplog.messages) == 1, "nothing is copied"


def fsdp(gpt, devices):
    """Divide a module's arrays among devices along their first axis, if that is possible."""
    mesh = jax.sharding.Mesh(devices, "fsdp")
    divides = lambda leaf: leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("fsdp") if divides(leaf) else P()))
    nnx.update(gpt, jax.tree.map(place, nnx.state(gpt)))
    return gpt


def train_divided(name) -> None:
    """Train a module divided among eight devices beside an engine on two of them; print the results for a test."""
    page = recipes(served=False)
    make, trained, source_of, bound = TRAINERS[name]
    gpt = fsdp(make(partial(page["ShardedGPT"], page["config"], nnx.Rngs(0))), jax.devices())
    module, settings = page["Served"](gpt, page["config"]), dict(tensor_parallel_size=2, **ENGINE)
    with pytest.raises(
        ValueError, match=r"^params: \d+ of \d+ arrays .* are copied, [\d,]+ bytes, .*; allow_copy=False"
    ):
        LLM(module, allow_copy=False, **settings)
    with few_shapes():
        llm = LLM(module, **settings)
    assert max(mismatches_of(gpt, trained, source_of, RolloutWorker(llm, width=WIDTH))) < bound
    assert {len(array.sharding.device_set) for array in llm.engine.runner.params} == {2}
    up = llm.engine.runner.params[list(llm.engine.runner.tree.expected).index("gpt.blocks.0.up.kernel")]
    assert up.addressable_shards[0].data.shape == (64, 64)
    print("trained", name)


@pytest.mark.deep
@pytest.mark.parametrize("name", TRAINERS)
def test_a_module_divided_among_eight_devices_is_trained_beside_an_engine_on_two(name):
    program = f"from tests import conftest; from tests.rl import test_trainers; test_trainers.train_divided({name!r})"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=PAGE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"trained {name}" in done.stdout
    told = re.findall(r"^params: \d+ of \d+ arrays \(first: \S+\) are copied, [\d,]+ bytes", done.stderr, re.MULTILINE)
    assert 1 <= len(told) <= 2, "once for the start, and once for updates of a part"

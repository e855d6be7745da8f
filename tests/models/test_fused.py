"""Fused layers: the same results as of separate ones, on one device and on several, quantized, updated and served."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, SamplingParams, quantize
from jpaged.config import EngineConfig, Limits
from jpaged.models.checkpoint import on_one_device
from jpaged.models.fused import FusedLinear, fuse, joints_of
from jpaged.models.moe import ExpertMlps, FusedExperts, cost_of
from jpaged.models.quantized import quantizable, quantize_weights
from jpaged.models.registry import architectures as registered
from jpaged.rl.causal import logits
from jpaged.runtime.parameters import by_name
from jpaged.runtime.placement import Placement, shard
from jpaged.start import load
from pallas_kernels import Kernels
from pallas_kernels.weights import Format
from tests.support import architectures
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model
from tests.support.runners import runner_of

TOKENS = np.arange(24).reshape(2, 12) * 7 % 96
ENGINE = dict(block_size=8, max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=40, progress=False)
PROMPTS = [[3, 9, 27], list(range(40, 63)), [5] * 11]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
MOE = "qwen3-moe-dense"  # with dense layers, too
SHARED = "qwen2-moe-dense"  # with an expert that all tokens share
LINEAR = ["gate_up_proj", "qkv_proj"]
deep = pytest.mark.deep
# Quantized layers of qwen2 are fused with their biases below.
NAMES = [MOE, *(pytest.param(name, marks=deep) for name in ("qwen2", "mistral", "qwen3", "gemma3", "opt", SHARED))]


def model_of(name: str, seed: int = 0, **sizes):
    hf = architectures.CASES[name] | sizes
    config = next(each.config for each in registered() if each.config.describes(hf)).from_hf(hf)
    return random_model(config, seed=seed)


def served_model(seed: int, **sizes):
    """One layer with dense products and one with experts."""
    return model_of(MOE, seed, num_hidden_layers=2, **sizes)


def fused_copy(model, place=on_one_device):
    copied = nnx.merge(*nnx.split(model))
    fuse(copied, place)
    return copied


compiled = nnx.jit(logits)


def computed(model) -> np.ndarray:
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    mask = np.broadcast_to(np.tri(12, dtype=bool), (2, 12, 12))
    return np.asarray(compiled(model, TOKENS, positions, mask))


def kinds(model) -> list[str]:
    return sorted(
        {str(path[-1]) for path, each in nnx.iter_modules(model) if isinstance(each, FusedLinear | FusedExperts)}
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_computes_the_same_logits(name):
    model = served_model(0) if name == MOE else model_of(name)
    fused = fused_copy(model)
    others = {"opt": [], MOE: ["experts", *LINEAR], SHARED: ["experts", *LINEAR]}
    assert kinds(fused) == others.get(name, LINEAR) and kinds(model) == []
    np.testing.assert_allclose(computed(fused), computed(model), rtol=0, atol=1e-5)
    size = lambda model: sum(leaf.nbytes for leaf in by_name(model).values())
    assert size(fused) == size(model)


def test_experts_with_biases_are_fused():
    model, rng = model_of("gpt-oss", num_hidden_layers=1, layer_types=None), np.random.default_rng(0)
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    biases = {path: rng.standard_normal(leaf.shape) for path, leaf in leaves.items() if "bias" in path[-1]}
    nnx.update(model, nnx.from_flat_state({path: nnx.Param(jnp.float32(bias)) for path, bias in biases.items()}))
    fused = fused_copy(model)
    assert kinds(fused) == ["experts", "qkv_proj"]
    np.testing.assert_allclose(computed(fused), computed(model), rtol=0, atol=1e-4)
    experts = fused.layers[0].mlp.experts
    experts.gate_up_bias[...] = jnp.roll(experts.gate_up_bias[...], 1, axis=1)
    assert np.abs(computed(fused) - computed(model)).max() > 1e-2


@pytest.mark.parametrize("quantization", [*(pytest.param(name, marks=deep) for name in ("int8", "fp8")), "int4"])
def test_quantized_layers_are_fused_with_their_scales(quantization):
    model = quantize(model_of("qwen2", intermediate_size=96, num_hidden_layers=1), quantization)
    fused = fused_copy(model)
    layer = fused.layers[0].self_attn.qkv_proj
    assert layer.weight.shape[0] == layer.weight_scale.shape[0] == layer.bias.shape[0]
    assert not hasattr(layer, "weight_min") or layer.weight_min.shape == layer.weight_scale.shape
    assert hasattr(layer, "weight_min") == (quantization == "int4")
    assert layer.weight.dtype == model.layers[0].self_attn.q_proj.weight.dtype
    np.testing.assert_allclose(computed(fused), computed(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=deep), "int4"])
def test_quantized_experts_stay_separate(quantization):
    model = quantize(served_model(0, moe_intermediate_size=32, intermediate_size=96, head_dim=16), quantization)
    fused = fused_copy(model)
    assert kinds(fused) == LINEAR
    np.testing.assert_allclose(computed(fused), computed(model), rtol=0, atol=1e-5)


def test_layers_of_different_dtypes_stay_separate():
    separate = model_of("mistral", num_hidden_layers=2)
    model = quantize(separate, "int8")
    attention = model.layers[1].self_attn
    attention.k_proj = separate.layers[1].self_attn.k_proj
    fuse(model, on_one_device)
    assert not hasattr(attention, "qkv_proj") and hasattr(model.layers[0].self_attn, "qkv_proj")


def test_layers_of_groups_of_different_sizes_stay_separate():
    """In files of GGUF, Q6_K has groups of 16 and Q8_0 has groups of 32, both of int8."""
    model = model_of("mistral", num_hidden_layers=1)
    forms = [Format("int8", "float16", None, group) for group in (16, 32)]
    weights = {path: forms["v_proj" in path] for path in quantizable(model) if "self_attn" in path}
    quantize_weights(model, weights)
    attention = model.layers[0].self_attn
    assert attention.v_proj.weight.dtype == attention.k_proj.weight.dtype
    fuse(model, on_one_device)
    assert not hasattr(attention, "qkv_proj")


@pytest.mark.parametrize(("name", "devices", "expected"), [
    pytest.param("qwen2", 2, LINEAR, marks=deep),
    ("qwen2", 4, LINEAR[:1]),  # two KV heads: keys and values lie twice, queries do not
    pytest.param(MOE, 2, ["experts", *LINEAR], marks=deep),
])  # fmt: skip
def test_on_several_devices_each_holds_rows_of_all_members(name, devices, expected):
    model = model_of(name, **({} if name == MOE else {"num_hidden_layers": 1}))
    placement = Placement.on(jax.devices()[:devices], model.config)
    sharded = shard(model, placement.devices)
    fused = fused_copy(sharded, placement.of)
    assert kinds(fused) == expected
    for leaf in by_name(fused).values():
        assert leaf.sharding.device_set == set(placement.devices)
    mlp = next(layer.mlp for layer in fused.layers if hasattr(layer.mlp, "gate_up_proj"))
    own = mlp.gate_up_proj.weight[...].addressable_shards[1].data
    index = next(i for i, layer in enumerate(fused.layers) if layer.mlp is mlp)
    gate, up = (getattr(model.layers[index].mlp, f"{each}_proj").weight[...] for each in ("gate", "up"))
    rows = slice(len(gate) // devices, 2 * len(gate) // devices)
    np.testing.assert_array_equal(own, np.concatenate([gate[rows], up[rows]]))
    np.testing.assert_allclose(computed(fused), computed(model), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def expected():
    """The greedy tokens of two models with separate layers, by their logits without a cache."""
    graphdef, _ = nnx.split(served_model(0))
    length = max(map(len, PROMPTS)) + PARAMS.max_tokens
    positions = jnp.broadcast_to(jnp.arange(length), (len(PROMPTS), length))
    mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(PROMPTS), length, length))
    compute = jax.jit(lambda state, tokens: logits(nnx.merge(graphdef, state), tokens, positions, mask))

    def greedy(model) -> list[list[int]]:
        texts, state = [list(prompt) for prompt in PROMPTS], nnx.state(model)
        for _ in range(PARAMS.max_tokens):
            tokens = np.array([text + [0] * (length - len(text)) for text in texts])
            for text, logits_tv in zip(texts, compute(state, tokens), strict=True):
                text.append(int(logits_tv[len(text) - 1].argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS)]

    return [greedy(served_model(seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def llm():
    with few_shapes():
        return LLM(fused_copy(served_model(0)), kernels="reference", **ENGINE)  # products by XLA, as on GPUs


def generated(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_a_fused_model_is_served_and_takes_separate_parameters(llm, expected):
    """As a trainer has them; fused ones are used without a copy."""
    assert expected[0] != expected[1] and generated(llm) == expected[0]
    llm.update_params(served_model(1))
    assert generated(llm) == expected[1]
    fused = fused_copy(served_model(0))
    llm.update_params(fused)
    assert generated(llm) == expected[0]
    pairs = zip(by_name(fused).values(), llm.engine.runner.params, strict=True)
    assert all(given.unsafe_buffer_pointer() == served.unsafe_buffer_pointer() for given, served in pairs)


def test_parameters_that_do_not_match_are_named(llm, expected):
    model = served_model(1)
    mixed = nnx.to_pure_dict(nnx.state(model))
    for change, message in (
        (lambda x: x.pop("k_proj"), r"layers\.0\.self_attn\.k_proj\.weight is missing"),
        (lambda x: x["k_proj"].update(weight=x["k_proj"]["weight"][:-1]), r"k_proj\.weight has the shape"),
        (lambda x: x["v_proj"].update(weight=x["v_proj"]["weight"].astype(jnp.bfloat16)), "v_proj.weight is bfloat16"),
        (lambda x: x.update(other=x["q_proj"]), r"self_attn\.other\.weight is not a parameter"),
    ):
        state = jax.tree.map(lambda x: x, mixed)
        change(state["layers"][0]["self_attn"])
        with pytest.raises(ValueError, match=message):
            llm.update_params(state)
    assert generated(llm) == expected[0], "nothing has changed"


def test_joints_have_the_names_of_a_checkpoints_leaves():
    model = served_model(0)
    joints = joints_of(fused_copy(model))
    names = set(itertools.chain.from_iterable(joint.names for joint in joints.values()))
    assert names < set(by_name(model)) and len(names) == sum(len(joint.names) for joint in joints.values())
    assert joints_of(model) == {} and any(isinstance(each, ExpertMlps) for _, each in nnx.iter_modules(model))


def test_models_are_fused_on_gpus_only(tiny, loaded, monkeypatch):
    """The CPU stands in for one here, so that a loaded model is fused and served."""
    monkeypatch.setattr(load, "FUSING", ("cpu",))
    with few_shapes():
        fused = LLM(str(tiny), **ENGINE)
    engine = loaded.engine
    assert [bool(each.runner.tree.joints) for each in (engine, fused.engine)] == [False, True]
    requests = [engine.add(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert [request.sequences[0].output_token_ids for request in requests] == generated(fused)


def test_the_start_tells_the_cost_of_experts_without_grouped_products(caplog, monkeypatch):
    """On a CPU a row is multiplied by its expert only; XLA's product multiplies all rows by all experts."""

    def told(**settings) -> list[str]:
        caplog.clear()
        runner_of(model_of(MOE), EngineConfig(num_gpu_blocks_override=4, **settings), Limits(64, 2, 4096, 16))
        return [record.message for record in caplog.records if "mixture of experts" in record.message]

    assert told() == told(kernels="reference") == []
    monkeypatch.setattr(Kernels, "multiplies", False)
    (message,) = told()
    assert "multiplies each token 2 times by all 4 experts, 4 times the operations of a grouped product" in message
    assert "about 0.0039 GiB" in message and "a step of 4096 tokens (max_num_batched_tokens" in message
    assert cost_of(model_of("qwen2").config, 4096) is None

"""Every architecture against transformers in float32: logits and greedy tokens through the whole paged path."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.config import Limits
from jpaged.models import registry
from jpaged.models.checkpoint import Form, abstract_model, load_safetensors, save_safetensors, tensors_of
from jpaged.models.interleaved import joined_shapes
from jpaged.models.orbax_checkpoint import load_orbax, save_orbax
from jpaged.models.variation import RopeConfig
from jpaged.rl.sequences import causal_attention
from jpaged.runtime.batch import Bucket, Buckets
from jpaged.runtime.placement import AXES, Placement
from tests.models.logits_runner import LogitsRunner, generate
from tests.support import architectures
from tests.support.architectures import CASES, NEW_TOKENS, PROMPT, ROWS
from tools import models_page

FIXTURES = np.load(Path(__file__).parents[1] / "fixtures" / "architectures.npz")
CONFIGS = json.loads((Path(__file__).parents[1] / "fixtures" / "architectures.json").read_text())
CHUNK, LENGTH = 24, PROMPT + NEW_TOKENS
TOLERANCE = 1e-4


# One case of each module, with as many of its variations as one config can have. Cases with special attention or pools
# use the paged path: windows with other ropes, states, soft caps, sinks, no rope.
PAGED = ("gemma3", "qwen3.5")
ONE_PREFILL = ("gemma2", "gpt-oss", "opt-350m")
WHOLE = (
    "mistral-window", "qwen2-window", "qwen3-window", "phi3-long", "olmo2", "granite-biases", "smollm3-window",
    "mixtral-window", "qwen3-moe-dense",
    "olmo3", "ministral", "ministral3-window", "qwen2-moe-dense", "glm",
    "glm4", "glm4-moe-groups", "granite-moe", "granite-moe-shared", "qwen3.5-moe",
)  # fmt: skip
USUAL = PAGED + ONE_PREFILL + WHOLE
TEXT_PARTS = {  # decoders of other architectures
    "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}  # fmt: skip


def usual(*names: str) -> list:
    """All cases, those of other names in the deep tier: each compiles its model again."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.deep) for name in CASES]


def write(directory: Path, hf: dict) -> dict[str, np.ndarray]:
    """A checkpoint with jpaged's names of tensors; the oracle's values follow from transformers' names."""
    (directory / "config.json").write_text(json.dumps(hf))
    config = registry.read_config(directory)
    _, shapes = tensors_of(config, abstract_model(config, "float32")[1])
    shapes = joined_shapes(shapes, registry.architecture_of(config).interleaved)
    tensors = {name: architectures.tensor(name, shape, hf) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    tensors = write(directory, CASES[name])
    config = registry.read_config(directory).for_length(LENGTH)
    model = load_safetensors(directory, config, Form("float32"), progress=False)
    return model, tensors, FIXTURES[f"{name}/tokens"].tolist(), FIXTURES[f"{name}/logits"]


def test_every_architecture_has_two_cases():
    counts = dict.fromkeys(registry._ARCHITECTURES, 0)
    for hf in CASES.values():
        counts[hf["architectures"][0]] += 1
    for name in TEXT_PARTS:
        counts[name] += 1
    del counts["LlamaForCausalLM"]  # test_logits.py
    assert min(counts.values()) >= 2, counts
    usually = {CASES[name]["architectures"][0] for name in USUAL}
    assert usually == counts.keys() - TEXT_PARTS


@pytest.mark.parametrize("name", CASES)
def test_a_config_that_transformers_has_rewritten_is_read_alike(name, tmp_path):
    """Transformers 5 writes `rope_parameters`, `layer_types` and the defaults."""
    read = []
    for hf in (CASES[name], CONFIGS[name]):
        (tmp_path / "config.json").write_text(json.dumps(hf))
        read.append(registry.read_config(tmp_path))
    assert read[0] == read[1]


def generated(model, prompt: list[int], new_tokens: int, chunk: int) -> tuple[list[int], np.ndarray]:
    """The prompt in chunks and greedy tokens; logits [R, V] of the stored positions."""
    limits = Limits(max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=chunk)
    buckets = Buckets(limits)
    buckets.decode, buckets.mixed = buckets.decode[-1:], (Bucket(chunk, 1, False),)
    buckets.all = buckets.decode + buckets.mixed
    runner = LogitsRunner(model, limits, buckets)
    found = generate(runner, limits, prompt, new_tokens)
    return found, np.stack([runner.logits[i] for i in ROWS])


@pytest.mark.parametrize("case", usual(*PAGED), indirect=True)
def test_logits_and_greedy_tokens_equal_transformers(case):
    """With a prompt in chunks, and decode steps."""
    model, _, tokens, expected = case
    assert 0.4 < expected.std() < 3, "the tolerance is meant for logits of unit scale"
    found, logits = generated(model, tokens[:PROMPT], NEW_TOKENS, CHUNK)
    assert found == tokens
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", usual(*ONE_PREFILL), indirect=True)
def test_logits_of_one_prefill_equal_transformers(case):
    model, _, tokens, expected = case
    _, logits = generated(model, tokens[:-1], 1, LENGTH)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def changed(config, **changes):
    return dataclasses.replace(config, variation=dataclasses.replace(config.variation, **changes))


def planted(config) -> dict[str, dataclasses.dataclass]:
    """Configs of the same parameters with an error in each variation that a config has."""
    variation, faults = config.variation, {}
    if any(variation.windows):
        faults["window"] = changed(config, windows=tuple(window and window + 1 for window in variation.windows))
        faults["no window"] = changed(config, windows=())
    neutral = dict(
        local_rope=None, no_rope=(), adjacent_rope=False, scale=None, query_growth=0.0, soft_cap=None,
        final_soft_cap=None, embedding_multiplier=1.0, residual_multiplier=1.0, logits_divisor=1.0,
    )  # fmt: skip
    for name, value in neutral.items():
        if getattr(variation, name) != value:
            faults[name] = changed(config, **{name: value})
    if variation.experts is not None:
        experts = variation.experts
        further = dict(norm_topk_prob=not experts.norm_topk_prob, num_experts_per_tok=1)
        further |= dict(groups_per_tok=experts.groups_per_tok + 1) if experts.groups > 1 else {}
        further |= dict(scale=1.0) if experts.scale != 1 else {}
        if experts.activation is not None:
            further["activation"] = None
        for name, value in further.items():
            faults[name] = changed(config, experts=dataclasses.replace(experts, **{name: value}))
    if config.rope.type != "default":
        kept = ("theta", "partial_rotary_factor", "original_max_position_embeddings")
        rope = RopeConfig(**{name: getattr(config.rope, name) for name in kept})
        faults["rope"] = dataclasses.replace(config, rope=rope)
    if config.rope.type == "longrope":
        rope = dataclasses.replace(config.rope, is_long=not config.rope.is_long)
        faults["factors"] = dataclasses.replace(config, rope=rope)
    return faults


def whole_logits(model, tokens):
    """Logits [R, V] of the stored positions, without a cache."""
    x_td = model(jnp.asarray(tokens), jnp.arange(LENGTH), causal_attention(model, 1, LENGTH))
    return model.logits(x_td)[np.asarray(ROWS)]


@pytest.mark.parametrize("case", usual(*WHOLE), indirect=True)
def test_logits_without_a_cache_equal_transformers(case):
    model, _, tokens, expected = case
    graphdef, state = nnx.split(model)
    logits = jax.jit(lambda state: whole_logits(nnx.merge(graphdef, state), tokens))(state)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.deep
def test_planted_errors_are_noticed(case):
    """Otherwise the fixtures would prove nothing about windows, caps, factors, norms, experts and rotary embeddings."""
    model, _, tokens, expected = case
    graphdef, state = nnx.split(model)

    def error(config, state=state) -> float:
        module = registry.architecture_of(config).module
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: module(config, dtype="float32", rngs=nnx.Rngs(0))))
        return np.abs(jax.jit(lambda state: whole_logits(nnx.merge(graphdef, state), tokens))(state) - expected).max()

    assert error(model.config) < TOLERANCE
    for name, config in planted(model.config).items():
        assert error(config) > 100 * TOLERANCE, name
    run = jax.jit(lambda state: whole_logits(nnx.merge(graphdef, state), tokens))
    leaves = dict(nnx.to_flat_state(state))
    for path, leaf in leaves.items():
        no_effect = model.config.model_type == "opt" and path[-2:] == ("k_proj", "bias")  # no rotation: softmax(x + c)
        if no_effect or (path[0] == "layers" and path[1] != 1):  # one layer stands for all
            continue
        moved = leaves | {path: leaf.replace(jnp.roll(leaf[...], 1, axis=int(leaf.shape[0] == 1)))}
        assert np.abs(run(nnx.from_flat_state(moved)) - expected).max() > 10 * TOLERANCE, path


@pytest.mark.parametrize(
    "case",
    ["olmo2", *(pytest.param(name, marks=pytest.mark.deep) for name in ("mixtral", "granite-moe-shared"))],
    indirect=True,
)
def test_logits_on_four_devices_equal_transformers(case, tmp_path):
    """Each layer has two all-reduces, and two more for norms over all queries and all keys."""
    model, tensors, tokens, expected = case
    save_file(tensors, tmp_path / "model.safetensors")
    placement = Placement.on(jax.devices()[:4], model.config)
    divided = load_safetensors(tmp_path, model.config, Form("float32", placement.of), progress=False)
    compiled = jax.jit(lambda model: whole_logits(model, tokens)).lower(divided).compile()
    np.testing.assert_allclose(compiled(divided), expected, atol=TOLERANCE, rtol=0)
    layers, norms = model.config.num_hidden_layers, model.config.variation.qk_norm == "projection"
    assert compiled.as_text().count(" all-reduce(") == layers * (2 + 2 * norms) + 1


@pytest.mark.parametrize("case", usual(*USUAL), indirect=True)
def test_parameters_are_saved_as_they_were_loaded(case, tmp_path):
    model, tensors, _, _ = case
    save_safetensors(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


@pytest.mark.parametrize("case", usual(*USUAL), indirect=True)
def test_every_parameter_names_its_axes(case):
    """Matrices of layers are divided among devices, except those of routers, recurrent layers and embeddings."""
    model, *_ = case
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        names = leaf.get_metadata()["out_sharding"]
        assert len(names) == leaf.ndim, path
        undivided = {"gate", "shared_expert_gate", "embed_positions", "project_in", "project_out", "linear_attn"}
        whole = (undivided | {"down_proj_bias"}) & set(path)
        assert (any(name in AXES for name in names)) == (leaf.ndim > 1 and not whole) or leaf.ndim == 1, path


def test_the_bias_of_a_router_stays_float32(tmp_path):
    """Rounded to 16 bits, it would choose other experts. Layers after the last one are not read."""
    tensors, config = write(tmp_path, CASES["glm4-moe"]), registry.read_config(tmp_path)
    further = {"model.layers.3.eh_proj.weight": np.zeros((64, 128), np.float32)}
    save_file(tensors | further, tmp_path / "model.safetensors")
    model = load_safetensors(tmp_path, config, Form("bfloat16"), progress=False)
    save_orbax(model, tmp_path)
    for loaded in (model, load_orbax(tmp_path, config, Form("bfloat16"), progress=False)):
        dtypes = {str(leaf.dtype) for path, leaf in nnx.to_flat_state(nnx.state(loaded)) if path[-1] != "gate_bias"}
        expected = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        np.testing.assert_array_equal(loaded.layers[1].mlp.gate_bias[...], expected)
        assert dtypes == {"bfloat16"}


def test_page_of_models_is_generated_from_the_registry():
    assert models_page.PAGE.read_text() == models_page.page(), "run: python -m tools.models_page"
    assert all(architecture.examples and architecture.features for architecture in registry.architectures())


@pytest.mark.parametrize("name", ["qwen3.5-moe-untied", "qwen3.5-moe-text-part", "qwen3-moe"])
def test_weights_of_all_experts_may_be_one_tensor(name, tmp_path):
    tensors = write(tmp_path, CASES[name])
    config, experts = registry.read_config(tmp_path), {name for name in tensors if ".experts." in name}
    expected = load_safetensors(tmp_path, config, Form("float32"), progress=False)
    joint = {name: x for name, x in tensors.items() if name not in experts}
    for block in {name.partition(".experts.")[0] for name in experts}:
        gate, up, down = (
            np.stack(
                [tensors[f"{block}.experts.{i}.{weight}.weight"] for i in range(config.variation.experts.num_experts)]
            )
            for weight in ("gate_proj", "up_proj", "down_proj")
        )
        joint |= {f"{block}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{block}.experts.down_proj": down}
    save_file(joint, tmp_path / "model.safetensors")
    found = load_safetensors(tmp_path, config, Form("float32"), progress=False)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


@pytest.mark.parametrize("name", ["gemma3-text-part", "mistral3-text-part"])
def test_tensors_of_a_multimodal_checkpoint_have_either_form_of_names(name, tmp_path):
    """Images' tensors are not read, and transformers 5 names the text part's otherwise."""
    tensors = write(tmp_path, CASES[name])
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): x
        for name, x in tensors.items()
    }
    assert not renamed.keys() & tensors.keys()
    config, further = registry.read_config(tmp_path), {"model.vision_tower.x.weight": np.zeros(3, np.float32)}
    save_file(renamed | further, tmp_path / "model.safetensors")
    model = load_safetensors(tmp_path, config, Form("float32"), progress=False)
    np.testing.assert_array_equal(model.norm.scale[...], tensors["language_model.model.norm.weight"])

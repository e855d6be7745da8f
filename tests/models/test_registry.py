"""A second architecture is served through the registry, with nothing changed outside its own file."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import LLM, SamplingParams
from jpaged.models import registry
from jpaged.models.base import LeafSource, Model, Part
from jpaged.models.checkpoint import Form, dummy_model, load_safetensors, save_safetensors
from tests.models import toy
from tests.support.few_shapes import few_shapes

pytestmark = pytest.mark.slow

ENGINE = dict(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=64, skip_tokenizer_init=True,
    progress=False,
)  # fmt: skip
PROMPTS = [[3, 9, 27], list(range(40, 63)), [5] * 11]


@pytest.fixture(scope="module", autouse=True)
def registered():
    before = dict(registry._ARCHITECTURES)
    registry.register(toy.ARCHITECTURE)
    yield
    registry._ARCHITECTURES.clear()
    registry._ARCHITECTURES.update(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy")
    save_file(toy.tensors(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(toy.HF))
    return directory


def test_it_is_served_and_generates_what_its_formulas_say(directory):
    with few_shapes():
        llm = LLM(str(directory), **ENGINE)
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False)):
        (choice,) = output.outputs
        tokens = prompt + choice.token_ids
        logits = toy.logits(tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == choice.token_ids
        expected = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        found = [logprobs[token].logprob for token, logprobs in zip(choice.token_ids, choice.logprobs)]
        np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.deep  # tests/rl/test_trainers.py serves modules and updates them, too
def test_a_module_in_hand_is_served_and_its_parameters_updated(directory):
    config = registry.read_config(directory)
    assert isinstance(config, toy.ToyConfig) and config.sliding_window == 8
    models = [dummy_model(config, "float32", seed) for seed in range(2)]
    assert all(isinstance(model, Model) for model in models)
    with few_shapes():
        llm = LLM(models[0], **ENGINE)
    first = llm.generate(PROMPTS, use_tqdm=False)
    llm.update_params(models[1])
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, use_tqdm=False)] != [
        o.outputs[0].token_ids for o in first
    ]


def test_fused_separate_and_stacked_tensors_are_loaded_and_written_back(directory, tmp_path):
    config = registry.read_config(directory)
    model, tensors = load_safetensors(directory, config, Form("float32"), progress=False), toy.tensors()
    layer = model.layers[2]
    fused = np.concatenate([tensors[f"model.layers.2.{name}.weight"] for name in "qkv"])
    np.testing.assert_array_equal(layer.qkv.weight[...], fused)
    np.testing.assert_array_equal(layer.up.weight[...], tensors["model.layers.2.gate_up.weight"][48:])
    np.testing.assert_array_equal(layer.experts[...][1], tensors["model.layers.2.experts.1.down.weight"])
    save_safetensors(model, tmp_path, max_shard_bytes=20_000)
    written = {}
    for file in tmp_path.glob("*.safetensors"):
        written |= load_file(file)
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    "name, told",
    [("model.layers.0.gate_up.weight", r"\[96, 32\]"), ("model.layers.3.k.weight", r"\[16, 32\]"),
     ("model.layers.1.experts.0.down.weight", r"\[32, 48\]")],
)  # fmt: skip
def test_a_missing_or_misshapen_part_is_named(directory, tmp_path, name, told):
    tensors, config = toy.tensors(), registry.read_config(directory)
    tensors[name] = tensors[name][1:]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected {told}"):
        load_safetensors(tmp_path, config, Form("float32"), progress=False)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing {name} {told}"):
        load_safetensors(tmp_path, config, Form("float32"), progress=False)


def test_parts_that_do_not_make_up_a_leaf_are_refused(directory, monkeypatch):
    short = toy.ARCHITECTURE._replace(source=lambda path, config: LeafSource((Part(".".join(map(str, path)), 0, 3),)))
    monkeypatch.setitem(registry._ARCHITECTURES, "ToyForCausalLM", short)
    with pytest.raises(AssertionError, match="and its parts have 3"):
        load_safetensors(directory, registry.read_config(directory), Form("float32"), progress=False)


def test_an_architecture_that_is_not_registered_is_refused():
    class Unknown(toy.ToyConfig):
        architecture = "UnknownForCausalLM"

    config = Unknown.from_hf(toy.HF)
    with pytest.raises(ValueError, match=r"^architecture UnknownForCausalLM is not supported; supported: Llama"):
        registry.architecture_of(config)

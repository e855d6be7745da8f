"""Metadata of files in GGUF as configs: defaults of llama.cpp, and values that a config.json does not have."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from jpaged.gguf_file import open_gguf
from jpaged.models.gguf_config import hf_of
from jpaged.models.registry import read_config


def write(path: Path, architecture: str, tensors: tuple[str, ...] = (), **fields) -> Path:
    """A file of a model of two layers with the sizes that all architectures need; None leaves a field out."""
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "embedding_length": 64, "block_count": 2, "context_length": 128, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    for name, value in (common | fields).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(f"{architecture}.{name}", value)
    for name in ("token_embd.weight", "output_norm.weight", *tensors):
        writer.add_tensor(name, np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def hf(tmp_path):
    def read(architecture: str, tensors: tuple[str, ...] = (), **fields):
        return hf_of(open_gguf(write(tmp_path / "model.gguf", architecture, tensors, **fields)))

    return read


def test_sizes_follow_from_tensors_where_the_metadata_lacks_them(hf):
    assert hf("llama")["vocab_size"] == 32 and hf("llama")["tie_word_embeddings"]
    found = hf("llama", ("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias"))
    assert not found["tie_word_embeddings"] and found["attention_bias"] and found["mlp_bias"]


@pytest.mark.parametrize(
    "architecture, fields, expected",
    [
        ("llama", {}, "LlamaForCausalLM"),
        ("llama", {"attention.sliding_window": 16}, "MistralForCausalLM"),
        ("llama", {"attention.sliding_window": 0}, "LlamaForCausalLM"),
        ("llama", {"expert_count": 4, "expert_used_count": 2}, "MixtralForCausalLM"),
        ("llama", {"expert_count": 0}, "LlamaForCausalLM"),
    ],
)
def test_llama_is_the_name_of_several_architectures(architecture, fields, expected, tmp_path):
    assert read_config(write(tmp_path / "model.gguf", architecture, **fields)).architecture == expected


def test_lists_for_layers_must_have_one_value(hf):
    assert hf("llama", **{"attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count_kv: must be the same number for all layers"):
        hf("llama", **{"attention.head_count_kv": [2, 4]})


@pytest.mark.parametrize("architecture, layers", [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_gemma_27b_have_another_divisor(hf, architecture, layers):
    fields = {"attention.key_length": 32, "attention.value_length": 32}
    assert hf(architecture, **fields)["query_pre_attn_scalar"] == 32
    tensors = tuple(map(str, range(layers)))
    assert hf(architecture, tensors, block_count=layers, **fields)["query_pre_attn_scalar"] == 64 // 4


def test_gemma_3_may_have_no_windows(tmp_path):
    config = read_config(write(tmp_path / "model.gguf", "gemma3"))
    assert config.variation.windows == (None, None)
    config = read_config(write(tmp_path / "model.gguf", "gemma3", **{"attention.sliding_window": 16}))
    assert config.variation.windows == (16, 16)  # every sixth layer has none


def test_granite_has_neutral_factors_by_default(tmp_path):
    variation = read_config(write(tmp_path / "model.gguf", "granite", logit_scale=4.0)).variation
    assert (variation.scale, variation.embedding_multiplier, variation.residual_multiplier) == (0.25, 1, 1)
    assert variation.logits_divisor == 4
    with pytest.raises(ValueError, match=r"granite\.rope\.scaling\.finetuned: must be true"):
        read_config(write(tmp_path / "model.gguf", "granite", **{"rope.scaling.finetuned": False}))


def test_qwen_3_norms_the_weights_of_experts_unless_the_file_denies_it(hf):
    fields = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
    assert hf("qwen3moe", **fields)["norm_topk_prob"]
    assert not hf("qwen3moe", expert_weights_norm=False, **fields)["norm_topk_prob"]


def test_qwen_2_has_sizes_of_experts_by_that_of_the_mlp(hf):
    found = hf("qwen2moe", expert_count=4, expert_used_count=2)
    assert (found["moe_intermediate_size"], found["shared_expert_intermediate_size"]) == (48, 96)
    with pytest.raises(ValueError, match=r"qwen3moe\.expert_shared_feed_forward_length: 24 is not supported"):
        hf("qwen3moe", expert_shared_feed_forward_length=24)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("olmo2", {}, "Olmo2ForCausalLM"),
        ("olmo2", {"attention.sliding_window": 16}, "Olmo3ForCausalLM"),
        ("mistral3", {}, "MistralForCausalLM"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "Ministral3ForCausalLM"),
    ],
)
def test_a_value_tells_two_architectures_apart(architecture, fields, expected, tmp_path):
    config = read_config(write(tmp_path / "model.gguf", architecture, **fields))
    assert config.architecture == expected
    assert config.variation.query_growth == pytest.approx(fields.get("attention.temperature_scale", 0))
    assert bool(any(config.variation.windows)) == ("attention.sliding_window" in fields)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
             "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 2.0},
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 16,
             "attention_factor": pytest.approx(2 * (0.1 * np.log(4) + 1))},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.25},
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "attention_factor": 1.25},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.5},
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
             "attention_factor": pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))},
        ),
    ],
)  # fmt: skip
def test_scaling_of_the_rotary_embedding(hf, fields, expected):
    assert hf("llama", **fields).get("rope_scaling") == expected


@pytest.mark.parametrize("name", ["embedding_length", "block_count", "attention.layer_norm_rms_epsilon"])
def test_missing_fields_are_named(hf, name):
    with pytest.raises(ValueError, match=rf"model\.gguf: llama\.{name}: is missing"):
        hf("llama", **{name: None})


def test_numbers_of_another_type_are_named(hf):
    with pytest.raises(ValueError, match=r"llama\.block_count: must be a whole number"):
        hf("llama", block_count=2.0)
    with pytest.raises(ValueError, match=r"llama\.context_length: must be a number, not 'long'"):
        hf("llama", context_length="long")

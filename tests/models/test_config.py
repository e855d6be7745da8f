"""Hugging Face configs, read and refused."""

import dataclasses
import json

import pytest

from jpaged.checkpoint_files import read_json
from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import sampling_defaults
from jpaged.models.registry import read_config
from jpaged.models.variation import RopeConfig
from tests.support.architectures import CASES
from tests.support.checkpoints import BASE, LLAMA3


def read(**changes):
    return ModelConfig.from_hf({k: v for k, v in (BASE | changes).items() if v != "absent"})


def test_defaults_of_old_configs():
    config = read(num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rope.type == "default" and config.rope.theta == 10000.0
    assert config.eos_token_ids == () and not config.tie_word_embeddings


def test_eos_ids_of_the_generation_config_win():
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 2}, {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 2}, {"eos_token_id": None}).eos_token_ids == (2,)


def test_the_original_context_is_the_models_if_rope_scaling_names_none():
    assert read(rope_scaling=LLAMA3).rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported, because .* cached keys",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope' needs 'short_factor' and 'long_factor'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor' and 'high_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: only 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported by LlamaForCausalLM"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: only one rotary embedding"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "rope_parameters: only one"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "long_factor: must be 8 numbers, half of the rotary dim, not 7",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}},
            "short_factor: must be numbers above 0",
        ),
        ({"sliding_window": 8}, "sliding_window: 8 is not supported by LlamaForCausalLM; supported: null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: .* is not supported"),
        ({"residual_multiplier": 0.2}, "residual_multiplier: 0.2 is not supported by .*; supported: null, 1"),
        ({"num_local_experts": 4}, "num_local_experts: 4 is not supported"),
        ({"hidden_act": "swish7"}, "hidden_act: 'swish7' is not supported"),
        ({"num_key_value_heads": 3}, r"num_attention_heads: must be a multiple of num_key_value_heads \(3\), not 4"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be at least 1, not 0"),
        ({"vocab_size": "absent", "hidden_size": "absent"}, "config.json lacks vocab_size, hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 512, not 1000000000"),
        ({"vocab_size": 10**400}, "vocab_size: must be a whole number, not 1000"),
        ({"hidden_size": "64", "head_dim": 16}, "hidden_size: must be a whole number, not '64'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a finite number, not nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false, not 'no'"),
        ({"eos_token_id": ["a"]}, r"eos_token_id: must be token ids, not \('a',\)"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "above 0, not 10000, 0, 32 and 1"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"rope_scaling": [["type", "linear"]]}, "must be JSON objects"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor: must exceed low_freq_factor",
        ),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": -1}}, "must be at least 1, not -1"),
    ],
)
def test_what_a_llama_here_cannot_do_is_refused_with_its_reason(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mamba"}, "LlamaForCausalLM"),
        ({"architectures": [["llama"], 5]}, r"\['llama'\], 5"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"architectures": 5}, "5"),
    ],
)
def test_other_architectures_are_refused_by_name(changes, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    told = f"^{tmp_path}/config.json: architecture {told} is not supported; supported: LlamaForCausalLM"
    with pytest.raises(ValueError, match=told):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "changes, closest",
    [
        ({"architectures": ["Qwen4MoeForCausalLM"], "model_type": "qwen4_moe"}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}, "Olmo3ForCausalLM"),
        ({"architectures": None, "model_type": "x" * 10_000}, ".*ForC.*"),
    ],
)
def test_the_error_of_another_architecture_names_the_closest(changes, closest, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    with pytest.raises(ValueError, match=f"is not supported; supported: Llama.*, OPTForCausalLM; closest: {closest}$"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"])
def test_llama_4_is_refused_with_the_reason(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"architectures": [name], "model_type": "llama4"}))
    with pytest.raises(ValueError, match=rf"architecture {name} is not supported: .* chunks of attention_chunk_size"):
        read_config(tmp_path)


def test_multimodal_models_are_refused(tmp_path):
    names = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(names | {"text_config": BASE, "vision_config": {}}))
    told = r"; of multimodal models, only the text parts of Gemma 3, Mistral 3 and Qwen 3.5 are supported$"
    with pytest.raises(ValueError, match=told):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "case, changes, words",
    [
        ("mistral-window", {"layer_types": ["full_attention"] * 3}, "layer_types: must be sliding_attention in every"),
        ("mistral-window", {"sliding_window": 0}, "sliding_window: must be at least 1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window: must be a number of tokens"),
        ("qwen3-window", {"layer_types": ["full_attention"]}, r"must name num_hidden_layers \(4\) layers, not 1"),
        (
            "qwen3-window",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types: .* is not supported; supported: full",
        ),
        ("qwen3-moe", {"num_experts_per_tok": 6}, r"must be between 1 and the number of experts \(5\), not 6"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: must be at least 1, not 0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping: must be above 0, not -1.0"),
        ("phi3-long", {"partial_rotary_factor": 0.7}, "partial_rotary_factor: 0.7 of head_dim .* must be even"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: must be 0 or 1 for each of 4 layers"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier: must be above 0"),
        ("mixtral", {"num_local_experts": 5000}, "num_experts: must be at most 4096, not 5000"),
        ("mistral", {"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 512, not 1000000000"),
        ("mistral", {"num_hidden_layers": "3"}, "num_hidden_layers: must be a whole number, not '3'"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine: only true is supported"),
        ("gemma3-text-part", {"text_config": None}, "config.json lacks text_config"),
        ("mistral3-text-part", {"text_config": {"model_type": "qwen3"}}, "text_config: model_type 'qwen3' is not supp"),
        ("ministral3", {"rope_parameters": {"rope_theta": 1e4}}, "needs llama_4_scaling_beta, original_max_position"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit: must be 7.0, not 6.0"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: must be 1.702, not 1.0"),
    ],
)
def test_values_that_an_architecture_does_not_support_are_named(case, changes, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CASES[case] | changes))
    with pytest.raises(ValueError, match=words):
        read_config(tmp_path)


def test_longrope_takes_the_long_factors_if_a_sequence_may_pass_the_original_context(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CASES["phi3-long"]))
    config = read_config(tmp_path)
    assert config.rope.is_long and config.for_length(33) == config
    assert not config.for_length(32).rope.is_long and read().for_length(8) == read()


@pytest.mark.parametrize(
    "scaling, length",
    [
        ({"type": "linear", "factor": 2.5}, 640),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),  # never less
        ({"type": "yarn", "original_max_position_embeddings": 32}, 256),
        ({"type": "yarn", "factor": 3.0}, 768),
        ({"type": "yarn", "factor": 1e300}, 2**31 - 1),
        (LLAMA3, 256),
        ({"type": "default"}, 256),
    ],
)
def test_linear_and_yarn_extend_the_context_by_their_factor(scaling, length):
    assert read(rope_scaling=scaling, max_position_embeddings=256).context_length == length


def test_gpt_oss_has_the_defaults_of_transformers(tmp_path):
    """Those of openai/gpt-oss-20b, except for the numbers of layers and experts."""
    hf = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = read_config(tmp_path)
    sizes = config.vocab_size, config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    assert sizes == (201_088, 2880, 64, 8) and config.head_dim == 64 and config.attention_bias
    assert config.variation.windows == (128, None) * 12 and config.variation.sinks
    assert (config.variation.experts.num_experts_per_tok, config.variation.experts.intermediate_size) == (4, 2880)
    rope = config.rope
    assert (rope.type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150_000, 32, False)
    assert rope.original_max_position_embeddings == 4096 and config.context_length == 131_072


def test_gemma_3_has_defaults_for_the_fields_that_its_checkpoints_leave_out(tmp_path):
    """As in the config.json of google/gemma-3-4b-it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"text_config": text | scaling, "vision_config": {}}))
    config = read_config(tmp_path)
    sizes = config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert sizes == (262_208, 8, 4, 256) and config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    assert config.variation.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.rope.type, config.rope.theta, config.rope.factor) == ("linear", 1e6, 8.0)
    assert config.variation.local_rope == RopeConfig(original_max_position_embeddings=2048)
    assert config.context_length == 131_072  # which the factor has extended


@pytest.mark.parametrize(
    "changes, overrides, rope",
    [
        ({}, {"rope_theta": 5e5}, RopeConfig("default", 5e5, original_max_position_embeddings=256)),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         RopeConfig("yarn", factor=4.0, original_max_position_embeddings=256)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
         {"rope_scaling": {"rope_type": "linear", "factor": 2}},
         RopeConfig("linear", 1e6, factor=2, original_max_position_embeddings=256)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 5e5},
         RopeConfig("default", 5e5, original_max_position_embeddings=256)),
        ({"rope_theta": 1e6, "rope_scaling": LLAMA3}, {"rope_parameters": {"rope_type": "default"}},
         RopeConfig("default", 1e6, original_max_position_embeddings=256)),
    ],
)  # fmt: skip
def test_overrides_of_the_rotary_embedding_replace_the_configs_own(changes, overrides, rope, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"max_position_embeddings": 256} | changes))
    assert read_config(tmp_path, overrides) == dataclasses.replace(read_config(tmp_path), rope=rope)
    assert read_config(tmp_path).rope != rope


def test_overrides_replace_fields_also_of_the_text_config_and_are_checked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    config = read_config(tmp_path, {"num_hidden_layers": 1, "eos_token_id": 7})
    assert config == dataclasses.replace(read_config(tmp_path), num_hidden_layers=1, eos_token_ids=(7,))
    with pytest.raises(ValueError, match=r"^hf_overrides: rope_tehta is not a field .* did you mean rope_theta\?$"):
        read_config(tmp_path, {"rope_tehta": 5})
    with pytest.raises(ValueError, match=r"config\.json, hf_overrides: vocab_size: must be a whole number, not '4'"):
        read_config(tmp_path, {"vocab_size": "4"})
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "sliding_window": 8, "rope_theta": 1e4}
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"quantization_config": {}}))
    changed = read_config(tmp_path, {"text_config": {"num_hidden_layers": 1, "rope_theta": 5e5}})
    assert (changed.num_hidden_layers, changed.hidden_size, changed.rope.theta) == (1, 64, 5e5)
    for overrides in ({"rope_theta": 5}, {"text_config": {"rope_tehta": 5}}, {"quantization_config": {"bits": 4}}):
        with pytest.raises(ValueError, match=r"^hf_overrides.*: \w+ is not a field of the model's config\.json"):
            read_config(tmp_path, overrides)


@pytest.mark.parametrize("names", [["llama"], ["Unknown", "LlamaForCausalLM"], None])
def test_a_llama_is_known_by_either_name(names, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"architectures": names}))
    assert read_config(tmp_path) == ModelConfig.from_hf(BASE)


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    assert read_json(tmp_path / "other.json", missing_ok=True) == {}


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 0, "num_attention_heads": 0}, {"hidden_size": "64", "head_dim": None}, 
     {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": "32"}, {"eos_token_id": {}}],
)  # fmt: skip
def test_an_error_of_a_config_names_its_file(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json: "):
        read_config(tmp_path)


def test_sampling_defaults(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("dtype", "int8", "dtype: must be one of auto, float32"),
        ("load_format", "gguf", "load_format: must be one of auto, safetensors"),
        ("kernels", "cuda", "kernels: must be one of auto, reference, mosaic"),
        ("block_size", 0, "block_size: must be a power of two between 1 and 256, not 0"),
        ("block_size", 24, "block_size: must be a power of two between 1 and 256, not 24"),
        ("gpu_memory_utilization", 0.0, "above 0 and at most 1, not 0.0"),
        ("gpu_memory_utilization", 1.5, "above 0 and at most 1, not 1.5"),
        ("max_model_len", 1, "max_model_len: must be at least 2"),
        ("max_num_seqs", "8", "max_num_seqs: must be at least 1, not '8'"),
        ("max_num_seqs", True, "max_num_seqs: must be at least 1, not True"),
        ("seed", 0.5, "seed: must be a whole number, not 0.5"),
        ("model", 5, "model: must be a text, not 5"),
        ("block_size", 2**1100, "block_size: must be a power of two between 1 and 256, not 1"),
        ("swap_space", float("nan"), "swap_space: must be at least 0, not nan"),
        ("enable_prefix_caching", 1, "enable_prefix_caching: must be true or false, not 1"),
        ("max_num_seqs", 0, "max_num_seqs: must be at least 1, not 0"),
        ("max_num_batched_tokens", -5, "max_num_batched_tokens: must be at least 1, not -5"),
        ("num_gpu_blocks_override", 0, "num_gpu_blocks_override: must be at least 1, not 0"),
    ],
)
def test_engine_settings_out_of_range_are_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{field: value})


def test_more_sequences_than_tokens_in_a_step():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens: must be at least max_num_seqs \(8\), not 4"):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=4)


def test_docstring_of_the_engine_config_lists_each_setting_with_its_default():
    assert (
        "    max_num_seqs: maximum sequences in a step (default: 64 on a CPU, 256 on a GPU).\n" in EngineConfig.__doc__
    )
    names = [line.split(":")[0].strip() for line in EngineConfig.__doc__.partition("Attributes:\n")[2].splitlines()]
    assert [name for name in names if name] == [field.name for field in dataclasses.fields(EngineConfig)]

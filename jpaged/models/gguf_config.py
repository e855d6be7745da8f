"""Metadata of a file in GGUF as the content of a config.json, which configurations read.

Fields and defaults follow llama.cpp: its `conversion` writes them, and its `src/models` read them.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as Kind

from jpaged.gguf_file import GgufFile, open_gguf
from jpaged.models.variation import MAX_SIZE, Hf

# Fields below the architecture's name, and the fields of a config.json that they are.
COMMON = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
}  # fmt: skip
REQUIRED = (
    "embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
WITHOUT_MLP = ("feed_forward_length", "qwen35moe")  # a mixture in every layer
# Fields whose 0 means that the model has none. An architecture that does not read one of them refuses other values.
OPTIONAL = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
# Fields that most architectures have with no other values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.temperature_scale": (0,), "use_parallel_residual": (False,),
    "expert_shared_count": (0,), "expert_shared_feed_forward_length": (0,), "expert_group_count": (0, 1),
    "expert_gating_func": (1, 0), "expert_weights_scale": (0, 1), "leading_dense_block_count": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1), "nextn_predict_layers": (0,),
}  # fmt: skip
# Fields above that an architecture has with other values.
READS = {
    "mistral3": ("attention.temperature_scale",),
    "qwen2moe": ("expert_shared_feed_forward_length",),
    "granitemoe": ("expert_shared_feed_forward_length",),
    "qwen35": ("nextn_predict_layers",),
    "qwen35moe": ("expert_shared_feed_forward_length", "nextn_predict_layers"),
    "glm4moe": (
        "expert_shared_count", "expert_group_count", "expert_gating_func", "expert_weights_scale",
        "leading_dense_block_count", "nextn_predict_layers",
    ),
}  # fmt: skip
END_OF_TURN = (  # texts of tokens that end an answer, which most files do not mark in another way
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>",
)  # fmt: skip
CONTROL = 3  # type of such tokens


def hf_of(file: GgufFile) -> Hf:
    """Return the content of a config.json for a file. Raises ValueError with the file and the field."""
    if file.architecture not in ARCHITECTURES:
        file.fail("general.architecture", f"{file.architecture:.100} is not supported; supported: {SUPPORTED}")
    hf = _common(file)
    if (rope := _rope(file, hf)) is not None:
        hf["rope_scaling"] = rope
    return ARCHITECTURES[file.architecture](file, hf)


def read_gguf_config(path: Path) -> Hf:
    """Return the content of a config.json for the file at a path. Raises ValueError with the file and the field."""
    return hf_of(open_gguf(path))


def _value(file: GgufFile, name: str, default: float | None = None) -> Any:
    """Return a number below the architecture's name; of a list, the number that all its items are."""
    full = f"{file.architecture}.{name}"
    if file.length(full) is not None:
        values = set(file.items(full) or ())
        if len(values) != 1 or not isinstance(value := values.pop(), int | float):
            file.fail(full, "must be the same number for all layers")
        return value
    return file.number(full, default)


def _common(file: GgufFile) -> Hf:
    """Return the fields that all architectures have."""
    for name in REQUIRED:
        if f"{file.architecture}.{name}" not in file.fields and (name, file.architecture) != WITHOUT_MLP:
            file.fail(f"{file.architecture}.{name}", "is missing")
    for name, accepted in NEUTRAL.items():
        if name in READS.get(file.architecture, ()):
            continue
        if (value := file.fields.get(full := f"{file.architecture}.{name}", accepted[0])) not in accepted:
            file.fail(full, f"{value!r:.100} is not supported; supported: {', '.join(map(str, accepted))}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        file.fail("tensor token_embd.weight", "must be a matrix" if embedding else "is missing")
    if (file.length("tokenizer.ggml.tokens") or 0) > embedding.shape[0]:
        file.fail("tokenizer.ggml.tokens", f"must be at most {embedding.shape[0]}, the rows of the embedding")
    for name, ours in COMMON.items():
        if not ours.endswith(("eps", "theta")) and type(_value(file, name, 1)) is not int:
            file.fail(f"{file.architecture}.{name}", "must be a whole number")
    if (layers := _value(file, "block_count")) > len(file.tensors):  # tracing missing layers takes minutes
        file.fail(f"{file.architecture}.block_count", f"is {layers}, and the file has {len(file.tensors)} tensors")
    hf: Hf = {"vocab_size": embedding.shape[0], "dtype": _dtype(file), "tie_word_embeddings": True}
    hf |= {"eos_token_id": end_tokens(file)}
    hf |= {ours: value for name, ours in COMMON.items() if (value := _value(file, name)) is not None}
    heads = max(hf["num_attention_heads"], 1)
    hf = {"num_key_value_heads": heads, "head_dim": hf["hidden_size"] // heads, "rope_theta": 10000.0} | hf
    hf |= {ours: value for name, ours in OPTIONAL.items() if (value := _value(file, name, 0))}
    if (length := _value(file, "attention.value_length")) not in (None, hf["head_dim"]):
        file.fail(f"{file.architecture}.attention.value_length", f"must be the key length, not {length}")
    if type(last := _value(file, "nextn_predict_layers", 0)) is not int or not 0 <= last < layers:
        file.fail(f"{file.architecture}.nextn_predict_layers", f"must be from 0 to {layers - 1}, not {last}")
    hf["num_hidden_layers"] -= last  # these predict several tokens, and are not used
    hf["tie_word_embeddings"] = "output.weight" not in file.tensors
    hf["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    hf["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return hf


def _dtype(file: GgufFile) -> str:
    """Return the dtype that computes a model best: that of its matrices, or 16 bits of a wide range."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {Kind.F32: "float32", Kind.F16: "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def end_tokens(file: GgufFile) -> list[int]:
    """Return the tokens that end an answer: end tokens of the metadata, and control tokens by their texts."""
    tokens, kinds = file.items("tokenizer.ggml.tokens") or [], file.items("tokenizer.ggml.token_type") or []
    named = [file.number(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL}
    ends = [*named, *(known[text] for text in END_OF_TURN if text in known)]
    return list(dict.fromkeys(token for token in ends if token is not None))


def _rope(file: GgufFile, hf: Hf) -> Hf | None:
    """Return the scaling of the rotary embedding; None: there is none. Adds the rotary part of heads to `hf`."""
    scaling = f"{file.architecture}.rope.scaling."
    get: Callable[..., Any] = lambda name, default=None: file.number(scaling + name, default)
    if (rotary := _value(file, "rope.dimension_count", hf["head_dim"])) != hf["head_dim"] and hf["head_dim"]:
        hf["partial_rotary_factor"] = rotary / hf["head_dim"]
    kind = file.text(scaling + "type", "none")
    factor = get("factor") or _value(file, "rope.scale_linear", 0) or 1.0
    length = get("original_context_length") or hf["max_position_embeddings"]
    attention = get("attn_factor", 1.0)
    short, long = (_factors(file, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if (factors := _factors(file, "rope_freqs.weight")) is not None:
        short = long = factors
    if short is not None and long is not None:
        hf["original_max_position_embeddings"] = length
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
    if kind == "linear" or (kind == "none" and factor != 1):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        stretch = 0.1 * math.log(max(factor, 1.0))
        if log_mul := get("yarn_log_multiplier", 0):
            attention *= (stretch + 1) / (stretch * log_mul + 1)
        else:
            attention = get("yarn_attn_factor") or attention * (stretch + 1)
        betas = {"beta_fast": get("yarn_beta_fast"), "beta_slow": get("yarn_beta_slow")}
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        return rope | {"attention_factor": attention} | {name: beta for name, beta in betas.items() if beta is not None}
    if kind not in ("none", "longrope"):
        file.fail(scaling + "type", f"{kind!r:.100} is not supported; supported: none, linear, yarn, longrope")
    return None


def _factors(file: GgufFile, name: str) -> list[float] | None:
    """Return divisors of the frequencies of a rotary embedding; None: there are none."""
    if (tensor := file.tensors.get(name)) is None:
        return None
    if tensor.kind != Kind.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        file.fail(f"tensor {name}", f"must be at most 4096 numbers in F32, not {tensor.kind.name} {list(tensor.shape)}")
    factors: list[float] = tensor.data.view("<f4").tolist()
    return factors


def _named(architecture: str, model_type: str, **fixed: Any) -> Callable[[GgufFile, Hf], Hf]:
    """Return a function that names an architecture, and adds values that its files do not have."""
    return lambda file, hf: {"architectures": [architecture], "model_type": model_type} | hf | fixed


def _llama(file: GgufFile, hf: Hf) -> Hf:
    """Llama, and the architectures whose files say so: Mistral, if it has a window, and Mixtral."""
    if experts := _value(file, "expert_count", 0):
        hf |= {"num_local_experts": experts, "num_experts_per_tok": _value(file, "expert_used_count", 2)}
        return _named("MixtralForCausalLM", "mixtral")(file, hf)
    if "sliding_window" in hf:
        return _named("MistralForCausalLM", "mistral")(file, hf)
    return _named("LlamaForCausalLM", "llama")(file, hf)


def _qwen3moe(file: GgufFile, hf: Hf) -> Hf:
    experts = {
        "num_experts": _value(file, "expert_count", 0), "num_experts_per_tok": _value(file, "expert_used_count", 0),
        "moe_intermediate_size": _value(file, "expert_feed_forward_length", 0),
        "norm_topk_prob": file.flag("qwen3moe.expert_weights_norm", True),
    }  # fmt: skip
    return _named("Qwen3MoeForCausalLM", "qwen3_moe")(file, hf | experts)


def _qwen2moe(file: GgufFile, hf: Hf) -> Hf:
    experts, used = _value(file, "expert_count", 0), _value(file, "expert_used_count", 0)
    dense = hf["intermediate_size"]
    own = {
        "num_experts": experts, "num_experts_per_tok": used,
        "moe_intermediate_size": _value(file, "expert_feed_forward_length", dense // max(used, 1)),
        "shared_expert_intermediate_size": _value(file, "expert_shared_feed_forward_length", dense),
    }  # fmt: skip
    return _named("Qwen2MoeForCausalLM", "qwen2_moe", qkv_bias=hf["attention_bias"])(file, hf | own)


def _gemma2(file: GgufFile, hf: Hf) -> Hf:
    return _named("Gemma2ForCausalLM", "gemma2", query_pre_attn_scalar=_scalar(file, hf, 46))(file, hf)


def _gemma3(file: GgufFile, hf: Hf) -> Hf:
    """Gemma 3. Layers with a window have an unscaled rotary embedding with a base of their own."""
    layers = hf["num_hidden_layers"]
    local: Hf = {"query_pre_attn_scalar": _scalar(file, hf, 62), "rope_local_base_freq": 1e4}
    if (base := _value(file, "rope.freq_base_swa")) is not None:
        local["rope_local_base_freq"] = base
    if "sliding_window" not in hf:
        local |= {"sliding_window": MAX_SIZE, "layer_types": ["full_attention"] * min(layers, MAX_LAYER_TYPES)}
    elif (types := _layer_types(file)) is not None:
        local["layer_types"] = types
    else:
        local["sliding_window_pattern"] = file.number("gemma3.attention.sliding_window_pattern", 6)
    return _named("Gemma3ForCausalLM", "gemma3_text")(file, hf | local)


def _layer_types(file: GgufFile) -> list[str] | None:
    """Return the types of layers by the list that says which have a window; None: there is none."""
    pattern = f"{file.architecture}.attention.sliding_window_pattern"
    if file.length(pattern) is None:
        return None
    return ["sliding_attention" if each else "full_attention" for each in file.items(pattern) or []]


def _olmo2(file: GgufFile, hf: Hf) -> Hf:
    """OLMo 2, and OLMo 3 if it has windows. Layers with a window have an unscaled rotary embedding."""
    if "sliding_window" not in hf:
        return _named("Olmo2ForCausalLM", "olmo2")(file, hf)
    local = {"rope_theta": _value(file, "rope.freq_base_swa", hf["rope_theta"])}
    return _named("Olmo3ForCausalLM", "olmo3", layer_types=_layer_types(file), local_rope_parameters=local)(file, hf)


def _mistral3(file: GgufFile, hf: Hf) -> Hf:
    """Ministral 3, and Mistral Small 3 if queries do not grow with their position."""
    if not (growth := _value(file, "attention.temperature_scale", 0)):
        return _named("MistralForCausalLM", "mistral")(file, {"sliding_window": None} | hf)
    scaling = hf.get("rope_scaling") or {"original_max_position_embeddings": hf["max_position_embeddings"]}
    hf["rope_scaling"] = scaling | {"llama_4_scaling_beta": growth}
    return _named("Ministral3ForCausalLM", "ministral3")(file, hf)


def _scalar(file: GgufFile, hf: Hf, layers_of_27b: int) -> float:
    """Return the number whose root divides scores in Gemma: that of the size of heads, except in models of 27B."""
    sizes = hf["hidden_size"] // max(hf["num_attention_heads"], 1)
    scalar: float = sizes if hf["num_hidden_layers"] == layers_of_27b else hf["head_dim"]
    return scalar


def _glm(file: GgufFile, hf: Hf) -> Hf:
    named = ("Glm4ForCausalLM", "glm4") if file.architecture == "glm4" else ("GlmForCausalLM", "glm")
    return _named(*named)(file, {"partial_rotary_factor": 1.0} | hf)


def _glm4moe(file: GgufFile, hf: Hf) -> Hf:
    """GLM-4.5. Files without a kind of gate have that of this model, sigmoids."""
    if (gate := _value(file, "expert_gating_func", 2)) != 2:
        file.fail("glm4moe.expert_gating_func", f"must be 2, sigmoids, not {gate}")
    counts = {
        "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
    }  # fmt: skip
    own = {ours: _value(file, name, 0) for ours, name in counts.items()}
    own |= {
        "routed_scaling_factor": _value(file, "expert_weights_scale", 1.0),
        "n_group": _value(file, "expert_group_count", 1), "topk_group": _value(file, "expert_group_used_count", 1),
        "norm_topk_prob": file.flag("glm4moe.expert_weights_norm", True),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }  # fmt: skip
    return _named("Glm4MoeForCausalLM", "glm4_moe")(file, {"partial_rotary_factor": 1.0} | hf | own)


def _qwen35(file: GgufFile, hf: Hf) -> Hf:
    """Qwen 3.5 and 3.6."""
    heads = _value(file, "ssm.time_step_rank", 0)
    sizes = {
        "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
    }  # fmt: skip
    own = {ours: size for ours, name in sizes.items() if (size := _value(file, name)) is not None}
    own |= {"partial_rotary_factor": 1.0} | hf
    own |= {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": _value(file, "ssm.inner_size", 0) // max(heads, 1),
    }
    if file.length(listed := f"{file.architecture}.attention.recurrent_layers") is not None:
        kinds = (file.items(listed) or [])[: hf["num_hidden_layers"]]
        own["layer_types"] = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in kinds]
    else:
        own["full_attention_interval"] = _value(file, "full_attention_interval", 4)
    if file.architecture == "qwen35":
        return _named("Qwen3_5ForCausalLM", "qwen3_5_text")(file, own)
    counts = {
        "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }  # fmt: skip
    own |= {ours: _value(file, name, 0) for ours, name in counts.items()}
    return _named("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")(file, own)


def _phi3(file: GgufFile, hf: Hf) -> Hf:
    return _named("Phi3ForCausalLM", "phi3")(file, {"sliding_window": None} | hf)


def _granite(file: GgufFile, hf: Hf) -> Hf:
    """Granite, and its mixtures with and without an expert that all tokens share."""
    if not file.flag(field := f"{file.architecture}.rope.scaling.finetuned", True):
        file.fail(field, "must be true: models without rotary embedding are not supported")
    hf = {"attention_multiplier": max(hf["head_dim"], 1) ** -0.5, "residual_multiplier": 1.0} | hf
    if file.architecture == "granite":
        return _named("GraniteForCausalLM", "granite")(file, hf)
    hf |= {
        "num_local_experts": _value(file, "expert_count", 0),
        "num_experts_per_tok": _value(file, "expert_used_count", 0),
    }
    if shared := _value(file, "expert_shared_feed_forward_length", 0):
        named = _named("GraniteMoeSharedForCausalLM", "granitemoeshared", shared_intermediate_size=shared)
        return named(file, hf)
    return _named("GraniteMoeForCausalLM", "granitemoe")(file, hf)


def _gpt_oss(file: GgufFile, hf: Hf) -> Hf:
    """gpt-oss: every second layer from the first on has a window. The model was trained without truncated bounds."""
    counts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    experts = {ours: _value(file, name, 0) for ours, name in counts.items()}
    if (size := _value(file, "expert_feed_forward_length", hf["intermediate_size"])) != hf["intermediate_size"]:
        file.fail("gpt-oss.expert_feed_forward_length", f"must be the feed_forward_length, not {size}")
    if "rope_scaling" in hf:
        hf["rope_scaling"] = hf["rope_scaling"] | {"truncate": False}
    else:
        hf["rope_parameters"] = {"rope_type": "default", "rope_theta": hf["rope_theta"]}
    return _named("GptOssForCausalLM", "gpt_oss")(file, hf | experts)


MAX_LAYER_TYPES = 1024
ARCHITECTURES: dict[str, Callable[[GgufFile, Hf], Hf]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen2": _named("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _named("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "chatglm": _glm,
    "glm4": _glm,
    "glm4moe": _glm4moe,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "granitemoe": _granite,
    "gpt-oss": _gpt_oss,
    "smollm3": _named("SmolLM3ForCausalLM", "smollm3"),
}
SUPPORTED = ", ".join(ARCHITECTURES)

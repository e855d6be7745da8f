"""Models of Hugging Face's form written as files in GGUF, under the names and conventions of llama.cpp's converter."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from jpaged.demo import DIRECTORY

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2",
    "granite": "granite", "smollm3": "smollm3", "olmo3": "olmo2", "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe", "glm4": "glm4", "gpt_oss": "gpt-oss", "glm": "chatglm", "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
ROTARY = {"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}  # of heads
PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3", "ministral3")
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "input_layernorm": "attn_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps", "shared_mlp.output_linear": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def norm_names(hf: dict[str, Any]) -> dict[str, str]:
    """The names of the norms around the MLP, which depend on the architecture."""
    if hf["model_type"] in ("gemma2", "gemma3_text", "olmo2", "olmo3", "gpt_oss"):
        after = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
        return after | {"pre_feedforward_layernorm": "ffn_norm"}
    if hf["model_type"] in ("glm4_moe", "qwen3_5_text", "qwen3_5_moe_text"):
        return {"post_attention_layernorm": "post_attention_norm"}
    after = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}  # of GLM-4
    return after | {"post_attention_layernorm": "ffn_norm"}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of a rotation of adjacent dims, one row after the other."""
    size, out = len(rows) // heads, np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def renamed(hf: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under llama.cpp's names, with its order of rows, its norms of Gemma and its stacks of experts."""
    found: dict[str, Any] = {}
    names = NAMES | norm_names(hf)
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf.get("num_key_value_heads", hf["num_attention_heads"])}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("shared_expert_gate") and hf["model_type"] == "qwen2_moe":
            tensor = tensor.reshape(-1)
        if hf["model_type"].startswith(("gemma", "qwen3_5")) and stem.endswith("norm") and "linear_attn" not in stem:
            tensor = tensor + np.float32(1)
        if ".linear_attn." in name:
            name, tensor = of_recurrence(hf, name, tensor)
            stem, _, leaf = name.rpartition(".")
        if hf["model_type"].startswith(PERMUTED):
            for part, count in heads.items():
                tensor = permuted(tensor, count) if stem.endswith(part) else tensor
        if stem in TOP:
            found[f"{TOP[stem]}.{leaf}"] = tensor
            continue
        if hf["model_type"] == "gpt_oss" and (found_one := of_gpt_oss(name)):
            found[found_one] = tensor
            continue
        if name.startswith("blk."):
            found[name] = tensor
            continue
        layer, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem).groups()
        if leaf == "e_score_correction_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = tensor
            continue
        if inner.endswith("input_linear"):  # gate and up
            kind = "exps" if "sparse" in inner else "shexp"
            for part, half in zip(("gate", "up"), np.split(tensor, 2, axis=-2)):
                found[f"blk.{layer}.ffn_{part}_{kind}.weight"] = half
            continue
        if expert := re.search(r"experts\.(\d+)\.(\w+)", inner):
            found.setdefault(f"blk.{layer}.{EXPERTS[expert[2]]}.{leaf}", {})[int(expert[1])] = tensor
        else:
            found[f"blk.{layer}.{names[inner]}.{leaf}"] = tensor
    stacked = lambda each: np.stack([each[i] for i in sorted(each)]) if isinstance(each, dict) else each
    return {name: stacked(each) for name, each in found.items()}


def of_recurrence(hf: dict[str, Any], name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a recurrent layer with llama.cpp's values and order of heads, and its name."""
    layer, _, part = name.removeprefix("model.layers.").partition(".linear_attn.")
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    size, before = hf["linear_value_head_dim"], 2 * keys * hf["linear_key_head_dim"]
    part = part.removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        tensor = np.concatenate([tensor[:before], tiled(tensor[before:], keys, values, size)])
    elif part == "in_proj_z":
        tensor = tiled(tensor, keys, values, size)
    elif part == "out_proj":
        tensor = tiled(tensor.T, keys, values, size).T
    elif part != "norm":
        tensor = tiled(tensor, keys, values, 1)
    if part == "A_log":
        return f"blk.{layer}.ssm_a", -np.exp(tensor)
    if part == "dt_bias":
        return f"blk.{layer}.ssm_dt.bias", tensor
    return name, tensor[:, 0] if part == "conv1d" else tensor


def tiled(rows: np.ndarray, keys: int, values: int, size: int) -> np.ndarray:
    """Rows of heads of values, `size` each: the first head of each head of keys, then the second ones."""
    heads = [rows[head * size : (head + 1) * size] for head in range(values)]
    each = values // keys
    return np.concatenate([heads[key * each + number] for number in range(each) for key in range(keys)])


def of_gpt_oss(name: str) -> str | None:
    """The names of gpt-oss's tensors whose names in Hugging Face's form end without .weight or .bias."""
    _, _, layer, *rest = name.split(".")
    match rest:
        case ["self_attn", "sinks"]:
            return f"blk.{layer}.attn_sinks.weight"
        case ["mlp", "experts", weight]:
            matrix, _, bias = weight.partition("_proj")
            return f"blk.{layer}.ffn_{matrix}_exps.{'bias' if bias else 'weight'}"
    return None


def add_fields(writer: gguf.GGUFWriter, hf: dict[str, Any]) -> None:
    """Metadata of a model."""
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    if "intermediate_size" in hf:
        writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(hf.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    if hf.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = hf.get("rope_parameters") or {}
    default = ROTARY.get(hf["model_type"], 1)
    factor = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", default))
    writer.add_rope_dimension_count(int(head_dim * factor))
    for name, add in {
        "attention_multiplier": writer.add_attention_scale, "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale, "logits_scaling": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "num_local_experts": writer.add_expert_count, "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "rope_local_base_freq": writer.add_rope_freq_base_swa,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_routed_experts": writer.add_expert_count, "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale, "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count, 
        "linear_key_head_dim": writer.add_ssm_state_size, "linear_num_key_heads": writer.add_ssm_group_count,
        "linear_num_value_heads": writer.add_ssm_time_step_rank,
    }.items():  # fmt: skip
        if hf.get(name) is not None:
            add(hf[name])
    if hf["model_type"] == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(hf.get("norm_topk_prob", True))
    if hf["model_type"].startswith("qwen3_5"):
        count, interval = hf["num_hidden_layers"], hf.get("full_attention_interval", 4)
        kinds = hf.get("layer_types") or ["full_attention" if (i + 1) % interval == 0 else "" for i in range(count)]
        recurrent = [kind != "full_attention" for kind in kinds]
        writer.add_array(f"{ARCHITECTURES[hf['model_type']]}.attention.recurrent_layers", recurrent)
        writer.add_ssm_conv_kernel(hf.get("linear_conv_kernel_dim", 4))
        writer.add_ssm_inner_size(hf["linear_num_value_heads"] * hf["linear_value_head_dim"])
    if hf["model_type"] in ("gemma2", "gemma3_text", "phi3", "olmo3", "gpt_oss"):
        writer.add_sliding_window(hf.get("sliding_window") or 0)
    if hf["model_type"] in ("gemma3_text", "olmo3"):
        types = hf.get("layer_types")
        default = hf.get("sliding_window_pattern") or [(i + 1) % 4 > 0 for i in range(hf["num_hidden_layers"])]
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in types] if types else default)
    add_rope(writer, hf, head_dim)


def add_rope(writer: gguf.GGUFWriter, hf: dict[str, Any], head_dim: int) -> None:
    """Metadata of the rotary embedding; the factors of llama3 and longrope are tensors."""
    rope = (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(theta := rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    original = rope.get("original_max_position_embeddings", hf.get("original_max_position_embeddings"))
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
        if hf["model_type"] == "gpt_oss":
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = hf["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(stretch) / np.log(original)) if stretch > 1 else 1.0)
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.float32(rope[f"{name}_factor"]))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope | {"rope_theta": theta}, head_dim))


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Divisors of the frequencies, one after the other: long waves are stretched, short ones kept."""
    factors, original = [], rope["original_max_position_embeddings"]
    for i in range(0, head_dim, 2):
        turns = original * rope["rope_theta"] ** (-i / head_dim) / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.float32(factors)


def quantized(tensor: np.ndarray, kind: Kind) -> np.ndarray:
    """A tensor in a kind, as bytes; the K kinds have random blocks, because `gguf` can't make them."""
    try:
        data = gguf.quantize(tensor, kind)
        return data if data.dtype == np.uint8 else np.ascontiguousarray(data).view(np.uint8)
    except NotImplementedError:
        return random_blocks(tensor.shape, kind, np.random.default_rng(tensor.size))


SCALES_AT = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


def random_blocks(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator, scale: float = 1e-3) -> np.ndarray:
    """Valid blocks of a K kind: random bytes, with scales of this size."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = (scale * rng.uniform(0.5, 1, blocks.shape[:-1])).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path, hf: dict[str, Any], tensors: Mapping[str, np.ndarray], *, kind: Kind = Kind.F32,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a model, with the matrices whose rows are whole blocks in a kind, and return its tensors by GGUF's names.

    Args:
        more: adds further fields or tensors.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURES[hf["model_type"]])
    add_fields(writer, hf)
    if more:
        more(writer)
    written, (block, _) = renamed(hf, tensors), gguf.GGML_QUANT_SIZES[kind]
    for name, tensor in written.items():
        if kind == Kind.F32 or tensor.ndim == 1 or tensor.shape[-1] % block:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, quantized(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_tokenizer(writer: gguf.GGUFWriter, model: str, tokens: list[str], kinds: list[int], **fields: Any) -> None:
    """Metadata of a tokenizer; fields below `tokenizer.ggml.` by their types."""
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add_byte_level(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """Metadata of the byte-level tokenizer in a folder, with its chat template."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = content["model"]["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    special = {each["id"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    marked = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    numbers = {f"{ours}_token_id": ids[settings[name]] for ours, name in marked.items() if settings.get(name)}
    kinds = [special.get(ids[token], 1) for token in tokens]
    add_tokenizer(writer, "gpt2", tokens, kinds, pre=pre, merges=merges, **numbers)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def write_demo(path: Path, kind: Kind = Kind.F32, more: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """The demo model, with its tokenizer, which cuts digits like SmolLM's."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer, DIRECTORY, "smollm")
        writer.add_add_bos_token(True)
        if more:
            more(writer)

    hf = json.loads((DIRECTORY / "config.json").read_text())
    with safe_open(DIRECTORY / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    assert ml_dtypes.bfloat16, "numpy knows the dtype of the file once this is imported"
    write(path, hf, tensors, kind=kind, more=add)
    return path

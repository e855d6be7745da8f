"""Tiny random checkpoints of every architecture, whose tensors follow from their names and shapes. Imports numpy alone,
because the oracle builds them beside torch, in another interpreter than the tests."""

import zlib

import numpy as np

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 24
PROMPT, NEW_TOKENS = 96, 64
ROWS = [*range(0, PROMPT + NEW_TOKENS - 1, 6), PROMPT + NEW_TOKENS - 2]  # positions whose logits are stored


def config(architecture: str, model_type: str, **fields) -> dict:
    return BASE | {"architectures": [architecture], "model_type": model_type} | fields


def gemma(number: int, **fields) -> dict:
    model_type = {2: "gemma2", 3: "gemma3_text"}[number]
    head = {"head_dim": 32, "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}
    return config(
        f"Gemma{number}ForCausalLM", model_type, sliding_window=WINDOW, tie_word_embeddings=True, **head | fields
    )


def phi3(original: int, limit: int, rotary_dim: int, **fields) -> dict:
    factors = np.linspace(1, 1.5, rotary_dim // 2), np.geomspace(1, 12, rotary_dim // 2)
    short, long = ([round(float(x), 3) for x in factor] for factor in factors)
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    lengths = {"max_position_embeddings": limit, "original_max_position_embeddings": original}
    return config("Phi3ForCausalLM", "phi3", rope_scaling=scaling, sliding_window=None, **lengths | fields)


def experts(model_type: str, **fields) -> dict:
    name = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
            "qwen2_moe": "Qwen2MoeForCausalLM"}[model_type]  # fmt: skip
    return config(name, model_type, num_experts_per_tok=2, **fields)


def granite_moe(shared: bool = False, **fields) -> dict:
    factors = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6,
               "logits_scaling": 1.5, "intermediate_size": 24}  # fmt: skip
    name, model_type = "GraniteMoeForCausalLM", "granitemoe"
    if shared:
        name, model_type = "GraniteMoeSharedForCausalLM", "granitemoeshared"
    return config(name, model_type, **factors | fields)


def glm4_moe(**fields) -> dict:
    mixture = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    return config("Glm4MoeForCausalLM", "glm4_moe", **mixture | fields)


def gpt_oss(**fields) -> dict:
    rope = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 32}  # fmt: skip
    own = {"num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 32, "num_hidden_layers": 4}
    window = {"sliding_window": WINDOW, "attention_bias": True, "rope_theta": 150.0, "rope_scaling": rope}
    return config("GptOssForCausalLM", "gpt_oss", **own | window | fields)


def opt(**fields) -> dict:
    known = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    own = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 112, "max_position_embeddings": 256}
    return known | tokens | own | fields


def ministral3(**fields) -> dict:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    own = {"head_dim": 24, "rope_parameters": rope, "sliding_window": None}
    return config("Ministral3ForCausalLM", "ministral3", **own | fields)


def mistral3(text: dict) -> dict:
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}  # fmt: skip
    own = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 95}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return own | tied | {"eos_token_id": None, "text_config": text, "vision_config": vision}


def qwen35(**fields) -> dict:
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True}  # fmt: skip
    own = {"head_dim": 16, "num_hidden_layers": 4, "full_attention_interval": 2, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "rope_parameters": rope,
           "tie_word_embeddings": True}  # fmt: skip
    return config("Qwen3_5ForCausalLM", "qwen3_5_text", **own | fields)


def qwen35_moe(**fields) -> dict:
    own = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40}  # fmt: skip
    names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    return {name: value for name, value in qwen35(**own | fields).items() if name != "intermediate_size"} | names


def qwen35_vision(text: dict) -> dict:
    moe = "moe" in text["model_type"]
    kind = text["model_type"].replace("text", "vision")
    vision = {"model_type": kind, "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
              "out_hidden_size": BASE["hidden_size"], "num_position_embeddings": 16}  # fmt: skip
    name, model_type = ("Qwen3_5Moe", "qwen3_5_moe") if moe else ("Qwen3_5", "qwen3_5")
    own = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": model_type, "image_token_id": 95}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return own | tied | {"eos_token_id": None, "text_config": text, "vision_config": vision}


CASES = {
    "mistral": config("MistralForCausalLM", "mistral", sliding_window=None, head_dim=24),
    "mistral-window": config("MistralForCausalLM", "mistral", sliding_window=WINDOW),
    "ministral": config("MinistralForCausalLM", "ministral", sliding_window=WINDOW, num_hidden_layers=4, head_dim=16,
                        layer_types=["sliding_attention", "full_attention"] * 2),
    "ministral-window": config("MinistralForCausalLM", "ministral", sliding_window=WINDOW, head_dim=24),
    "ministral3": ministral3(),
    "ministral3-window": ministral3(sliding_window=WINDOW, tie_word_embeddings=True),
    "mistral3-text-part": mistral3(ministral3(num_hidden_layers=2)),
    "mistral3-mistral": mistral3(config("MistralForCausalLM", "mistral", sliding_window=None, head_dim=24,
                                        tie_word_embeddings=True)),
    "qwen2": config("Qwen2ForCausalLM", "qwen2", rope_theta=1e6, tie_word_embeddings=True),
    "qwen2-window": config("Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=WINDOW,
                           max_window_layers=1),
    "qwen3": config("Qwen3ForCausalLM", "qwen3", head_dim=32, rope_theta=1e6),
    "qwen3-window": config("Qwen3ForCausalLM", "qwen3", head_dim=24, attention_bias=True, use_sliding_window=True,
                           sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
                           num_hidden_layers=4),
    "gemma2": gemma(2, attn_logit_softcapping=3.0, final_logit_softcapping=2.5),
    "gemma2-256": gemma(2, head_dim=256, attn_logit_softcapping=None, final_logit_softcapping=None,
                        num_hidden_layers=2),
    "gemma3": gemma(3, sliding_window_pattern=2, num_hidden_layers=4, rope_theta=1e6, rope_local_base_freq=100.0,
                    rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3-types": gemma(3, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                          rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                                           "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}),
    "gemma3-text-part": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": None,
        "image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93, "mm_tokens_per_image": 4,
        "text_config": gemma(3, sliding_window_pattern=3),
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
    "phi3-short": phi3(256, 512, 16),
    "phi3-long": phi3(32, 256, 12, partial_rotary_factor=0.75, tie_word_embeddings=True),
    "phi3-window": config("Phi3ForCausalLM", "phi3", sliding_window=WINDOW),
    "glm": config("GlmForCausalLM", "glm", head_dim=24, rms_norm_eps=1e-6),
    "glm-whole": config("GlmForCausalLM", "glm", head_dim=20, partial_rotary_factor=1.0, attention_bias=False),
    "glm4": config("Glm4ForCausalLM", "glm4", head_dim=32),
    "glm4-no-biases": config("Glm4ForCausalLM", "glm4", head_dim=16, attention_bias=False, tie_word_embeddings=True),
    "glm4-moe": glm4_moe(n_routed_experts=5, norm_topk_prob=False, use_qk_norm=True, head_dim=24, attention_bias=True),
    "glm4-moe-groups": glm4_moe(n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=2, num_experts_per_tok=3,
                                routed_scaling_factor=2.5),
    "olmo2": config("Olmo2ForCausalLM", "olmo2", rope_theta=5e5),
    "olmo2-mha": config("Olmo2ForCausalLM", "olmo2", num_key_value_heads=4, attention_bias=True),
    "olmo3": config("Olmo3ForCausalLM", "olmo3", num_hidden_layers=4, sliding_window=WINDOW, rope_theta=5e5,
                    rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}),
    "olmo3-types": config("Olmo3ForCausalLM", "olmo3", sliding_window=WINDOW, attention_bias=True,
                          layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                          rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                                           "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}),
    "granite": config("GraniteForCausalLM", "granite", embedding_multiplier=3.0, attention_multiplier=0.4,
                      residual_multiplier=0.6, logits_scaling=1.5),
    "granite-biases": config("GraniteForCausalLM", "granite", embedding_multiplier=12.0, attention_multiplier=0.1,
                             residual_multiplier=0.22, logits_scaling=1.2, attention_bias=True, mlp_bias=True),
    "granite-moe": granite_moe(num_local_experts=6),
    "granite-moe-tied": granite_moe(num_local_experts=4, tie_word_embeddings=True, attention_bias=True),
    "granite-moe-shared": granite_moe(True, num_local_experts=5, shared_intermediate_size=40),
    "granite-moe-not-shared": granite_moe(True, num_local_experts=6, num_experts_per_tok=3),
    "smollm3": config("SmolLM3ForCausalLM", "smollm3", no_rope_layer_interval=2, num_hidden_layers=4,
                      tie_word_embeddings=True),
    "smollm3-window": config("SmolLM3ForCausalLM", "smollm3", no_rope_layers=[0, 1, 1], use_sliding_window=True,
                             sliding_window=WINDOW, attention_bias=True),
    "mixtral": experts("mixtral", num_local_experts=4),
    "mixtral-window": experts("mixtral", num_local_experts=6, sliding_window=WINDOW, tie_word_embeddings=True),
    "qwen3-moe": experts("qwen3_moe", num_experts=5, moe_intermediate_size=24, norm_topk_prob=True),
    "qwen3-moe-dense": experts("qwen3_moe", num_experts=4, moe_intermediate_size=40, norm_topk_prob=False,
                               num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], head_dim=24,
                               use_sliding_window=True, sliding_window=WINDOW),
    "qwen3.5": qwen35(),
    "qwen3.5-types": qwen35(
        num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"], head_dim=32,
        linear_num_key_heads=4, linear_conv_kernel_dim=3, linear_key_head_dim=32, linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5}, tie_word_embeddings=False,
    ),
    "qwen3.5-text-part": qwen35_vision(qwen35(num_hidden_layers=2)),
    "qwen3.5-moe": qwen35_moe(num_hidden_layers=3, full_attention_interval=3),
    "qwen3.5-moe-untied": qwen35_moe(num_hidden_layers=2, num_experts_per_tok=3, tie_word_embeddings=False),
    "qwen3.5-moe-text-part": qwen35_vision(qwen35_moe(num_hidden_layers=2)),
    "qwen2-moe": experts("qwen2_moe", num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40,
                         norm_topk_prob=True),
    "qwen2-moe-dense": experts("qwen2_moe", num_experts=4, moe_intermediate_size=40, num_hidden_layers=4,
                               shared_expert_intermediate_size=24, decoder_sparse_step=2, mlp_only_layers=[3],
                               use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    "gpt-oss": gpt_oss(),
    "gpt-oss-plain": gpt_oss(num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
                             num_local_experts=5, num_experts_per_tok=3, num_attention_heads=6, head_dim=24,
                             attention_bias=False, rope_scaling=None, rope_theta=1e4,
                             rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=True),
    "opt": opt(),
    "opt-350m": opt(do_layer_norm_before=False, word_embed_proj_dim=40, activation_function="gelu"),
}  # fmt: skip


# Larger scores than in an untrained model, and larger logits of opt-350m, which has no norm before them.
FACTORS = {".q_proj": 1.5, ".k_proj": 1.5, "project_out": 3}


def tensor(name: str, shape: tuple[int, ...], config: dict) -> np.ndarray:
    """A parameter float32 of the scale that a trained one would have, so that every part of the model matters."""
    config = config.get("text_config", config)
    tied = config.get("tie_word_embeddings", config["model_type"] == "opt")
    x = np.random.default_rng(zlib.crc32(f"{name}{list(shape)}".encode())).standard_normal(shape)
    if name.endswith("bias"):
        x = 0.3 * x
    elif name.endswith("sinks"):  # about as large as the maxima of scores
        x = 2 * x + 1
    elif ".mlp.experts." in name and config["model_type"] == "gpt_oss":  # [E, in, out]; some numbers are clipped
        x = 4 * x / np.sqrt(shape[-2]) if "gate_up" in name else x / np.sqrt(shape[-2])
    elif "norm" in name:
        x = 0.3 * x + 1
        if tied and "layers" not in name:
            x = 3 * x
        x = x - (config["model_type"].startswith(("gemma", "qwen3_5")) and "linear_attn" not in name)
    elif name.endswith("A_log"):
        x = 0.5 * x - 3
    elif "embed" not in name:
        x = x / np.sqrt(shape[-1]) * next((c for part, c in FACTORS.items() if part in name), 1)
    elif tied:  # small, or else every token would predict itself
        x = 0.3 * x / np.sqrt(shape[-1])
    return x.astype(np.float32)


def prompt(seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], PROMPT).tolist()

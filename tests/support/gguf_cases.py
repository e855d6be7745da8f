"""Configurations of models that a file in GGUF can describe, in Hugging Face's form."""

from tests.support import architectures, checkpoints

LLAMA3 = ("llama3", "llama3-new")
# Windows of Mistral and Qwen and layers of Qwen without experts are none.
CASES = {
    **{name: checkpoints.CASES[name] for name in ("llama2", "gqa-tied", "biases", "linear", "yarn", *LLAMA3)},
    **{name: architectures.CASES[name] for name in (
        "mistral", "qwen2", "qwen3", "phi3-short", "phi3-long", "phi3-window", "olmo2", "granite", "qwen3-moe",
        "olmo3", "olmo3-types", "ministral3", "glm4", "qwen3.5", "qwen3.5-types", "qwen3.5-moe",
        "qwen3.5-moe-untied", "gpt-oss",
    )},
    # Fields without defaults, because files have none.
    **{name: architectures.CASES[name] | {"num_experts_per_tok": 2} for name in (
        "granite-moe", "granite-moe-tied", "granite-moe-shared",
    )},
    "glm4-moe": architectures.CASES["glm4-moe"] | {"n_shared_experts": 1},
    "glm4-moe-groups": architectures.CASES["glm4-moe-groups"] | {"norm_topk_prob": True},
    "glm": architectures.CASES["glm"] | {"head_dim": 16},  # files have no size of heads
    "mixtral": architectures.CASES["mixtral"] | {"rope_theta": 1e6},
    "qwen2-moe": architectures.CASES["qwen2-moe"] | {"norm_topk_prob": False},
    # The size of heads is the scalar, except in models of 27B.
    **{name: architectures.CASES[name] | {"query_pre_attn_scalar": 32} for name in (
        "gemma2", "gemma3", "gemma3-types",
    )},
    "smollm3": architectures.CASES["smollm3"] | {"no_rope_layer_interval": 4, "rope_theta": 2e6},
}  # fmt: skip

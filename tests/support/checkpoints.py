"""Random Llama checkpoints in Hugging Face's form, the same from the same seed wherever numpy is. Imports numpy alone,
because the oracle builds them beside torch, in another interpreter than the tests."""

import json
from pathlib import Path

import numpy as np

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"original_max_position_embeddings": 32}

# The family's variety: heads, head_dim, tying, biases, and every kind of rope, past its original context.
CASES = {
    "llama2": BASE,
    "gqa-tied": BASE | {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
                        "tie_word_embeddings": True, "rope_theta": 100000.0},
    "biases": BASE | {"num_key_value_heads": 2, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "mqa-gelu": BASE | {"num_key_value_heads": 1, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "linear": BASE | {"num_key_value_heads": 2, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": BASE | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 500000.0,
                      "rope_scaling": LLAMA3 | LONG},
    "llama3-new": BASE | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3,
                          "rope_parameters": LLAMA3 | LONG | {"rope_theta": 1000.0, "factor": 32.0}},
    "yarn": BASE | {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0} | LONG},
    "yarn-mscale": BASE | {"num_key_value_heads": 2, "head_dim": 24, "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "rope_theta": 5000.0, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.5,
        "mscale_all_dim": 0.5, "truncate": False} | LONG},
}  # fmt: skip
PROMPT, NEW_TOKENS = 96, 32


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters [out, in] float32 by name, scaled so that logits have unit scale."""
    rng = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    h = config.get("head_dim") or d // heads
    n, k = heads * h, config.get("num_key_value_heads", heads) * h
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention = {"q": (n, d), "k": (k, d), "v": (k, d), "o": (d, n)}
        mlp = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        for part, biased, matrices in (
            ("self_attn", config.get("attention_bias"), attention),
            ("mlp", config.get("mlp_bias"), mlp),
        ):
            for name, shape in matrices.items():
                shapes[f"{layer}{part}.{name}_proj.weight"] = shape
                if biased:
                    shapes[f"{layer}{part}.{name}_proj.bias"] = shape[:1]
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (d,)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(shape)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif name.endswith("bias"):
            x = 0.3 * x
        elif name != "model.embed_tokens.weight" or config.get("tie_word_embeddings"):
            x = x / np.sqrt(shape[1])
        return x.astype(np.float32)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def prompt(config: dict, length: int = PROMPT, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, config["vocab_size"], length).tolist()


def write(directory: Path, config: dict, seed: int = 0, *, dtype=np.float32, generation: dict | None = None) -> Path:
    """A checkpoint's directory, without a tokenizer."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    save_file({k: v.astype(dtype) for k, v in tensors(config, seed).items()}, directory / "model.safetensors")
    return directory

"""Shapes of real models, by the names of their checkpoints. No parameters: benchmarks draw random ones."""

import dataclasses
from typing import Any

from jpaged.models.config import ModelConfig
from jpaged.models.gemma import Gemma2Config, Gemma3Config
from jpaged.models.qwen import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from jpaged.models.variation import RopeConfig


def _llama3(factor: float) -> RopeConfig:
    return RopeConfig("llama3", 500000.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def _read(config: type[ModelConfig], **fields: Any) -> ModelConfig:
    """Return the config of a checkpoint from the fields of its config.json that are not its architecture's defaults."""
    return config.from_hf({"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16"} | fields)


MODELS = {
    "llama-3.1-8b": ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, rope=_llama3(8.0),
        dtype="bfloat16",
    ),
    "llama-3.2-1b": ModelConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope=_llama3(32.0), dtype="bfloat16",
    ),
    "qwen2.5-7b": _read(  # 7 query heads on each KV head, and biases
        Qwen2Config, vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768, rope_theta=1e6,
    ),
    "qwen3-8b": _read(
        Qwen3Config, vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
    ),
    "qwen3-30b-a3b": _read(
        Qwen3MoeConfig, vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, rope_theta=1e6,
    ),
    "gemma-2-2b": _read(
        Gemma2Config, vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256,
    ),
    "gemma-3-4b": _read(
        Gemma3Config, vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
}  # fmt: skip


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """Return a config with the first layers only; those with a window and those without are kept alternating."""
    variation = config.variation
    windows = variation.windows
    if windows is not None and layers < len(windows):
        kinds = list(dict.fromkeys(windows))
        windows = tuple(kinds[i % len(kinds)] for i in range(layers))
    variation = dataclasses.replace(variation, windows=windows)
    return dataclasses.replace(config, num_hidden_layers=layers, variation=variation)

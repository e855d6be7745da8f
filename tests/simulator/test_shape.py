"""The sizes of models, against published ones."""

import json

from jpaged.config import ModelConfig
from jpaged.simulator.shape import SHAPES, ModelShape

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14_336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256, rms_norm_eps=1e-5,
    max_position_embeddings=8192, rope_theta=500_000.0, tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip


def test_llama_3_8b_has_the_parameters_of_its_checkpoint():
    shape = SHAPES["llama-3-8b"]
    norms = 65 * 4096
    assert shape.num_params + norms == 8_030_261_248  # the checkpoint's
    assert shape.layer_params == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert shape.kv_bytes(2) == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    assert shape.kv_bytes(1) == 64 * 1024


def test_opt_13b_has_800_kb_of_kv_per_token():
    """As the PagedAttention paper says (arXiv:2309.06180, section 3)."""
    assert SHAPES["opt-13b"].kv_bytes(2) == 800 * 1024
    assert 12.8e9 < SHAPES["opt-13b"].num_params < 12.9e9
    assert 174e9 < SHAPES["opt-175b"].num_params < 176e9 and 65e9 < SHAPES["opt-66b"].num_params < 67e9


def test_kv_bytes_more_gpus_than_heads_repeats_heads():
    shape = SHAPES["llama-3-8b"]
    assert shape.kv_bytes(2, 8) == shape.kv_bytes(2)
    assert shape.kv_bytes(2, 16) == 2 * shape.kv_bytes(2)


def test_shape_of_a_config_equals_the_known_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelShape.of(ModelConfig.from_directory(tmp_path), "Llama-3-8B") == SHAPES["llama-3-8b"]


def test_tied_matrices_are_counted_once():
    shape = SHAPES["llama-3.2-1b"]
    assert shape.num_params == shape.layer_params + 128_256 * 2048
    assert 1.23e9 < shape.num_params < 1.24e9

"""The sizes of models, against published ones."""

import json
import random
from statistics import fmean

import pytest

from jpaged.models.registry import read_config
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
    assert shape.linear_params == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
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
    assert ModelShape.of(read_config(tmp_path), "Llama-3-8B") == SHAPES["llama-3-8b"]


def test_tied_matrices_are_counted_once():
    shape = SHAPES["llama-3.2-1b"]
    assert shape.num_params == shape.linear_params + 128_256 * 2048
    assert 1.23e9 < shape.num_params < 1.24e9


MIXTRAL = LLAMA | dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=32_000, max_position_embeddings=32_768,
    rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
)  # fmt: skip
QWEN = LLAMA | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
    num_hidden_layers=48, num_key_value_heads=4, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[],
)  # fmt: skip


GPT_OSS = dict(
    architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32
)  # fmt: skip


@pytest.mark.parametrize("name, config", [("mixtral-8x7b", MIXTRAL), ("qwen3-30b-a3b", QWEN), ("gpt-oss-20b", GPT_OSS)])
def test_shape_of_a_mixture_equals_the_known_one(name, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.of(read_config(tmp_path), SHAPES[name].name) == SHAPES[name]


def test_mixtures_have_the_parameters_of_their_checkpoints():
    mixtral, qwen = SHAPES["mixtral-8x7b"], SHAPES["qwen3-30b-a3b"]
    assert mixtral.num_params + 65 * 4096 == 46_702_792_704
    assert qwen.num_params + 97 * 2048 + 2 * 48 * 128 == 30_532_122_624
    gpt_oss, of_layer = SHAPES["gpt-oss-20b"], 64 * 64 + 2 * 8 * 64 + 2880 + 64 + 32 + 32 * 3 * 2880 + 2 * 2880
    assert gpt_oss.num_params + 24 * of_layer + 2880 == 20_914_757_184
    assert mixtral.expert_params == 32 * 8 * 3 * 4096 * 14_336
    expanded, routed = (mixtral.layer_products(grouped) - mixtral.linear_params for grouped in (False, True))
    assert expanded == 2 * mixtral.expert_params, "as XLA expands the product"
    assert routed == mixtral.expert_params // 4
    assert SHAPES["llama-3-8b"].layer_products(True) == SHAPES["llama-3-8b"].layer_products(False)


def test_the_experts_of_a_step_are_counted_once():
    """Beside the mean of drawn routes; all of them are read where they are not grouped."""
    qwen, rng = SHAPES["qwen3-30b-a3b"], random.Random(0)
    for tokens in (1, 8, 64):
        drawn = [len({e for _ in range(tokens) for e in rng.sample(range(128), 8)}) for _ in range(300)]
        assert qwen.experts_read(tokens, grouped=True) == pytest.approx(fmean(drawn), rel=0.02)
        assert qwen.experts_read(tokens, grouped=False) == 128
    assert SHAPES["llama-3-8b"].experts_read(5, grouped=True) == 0
    assert qwen.expanded_bytes(16, grouped=True) == 0 < qwen.expanded_bytes(16, grouped=False)


def test_some_layers_of_a_mixture_may_be_dense(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"mlp_only_layers": [0, 5]}))
    shape = ModelShape.of(read_config(tmp_path), "")
    assert shape.num_dense_layers == 2 and shape.expert_params == 46 * 128 * 3 * 2048 * 768
    attention = 48 * 2048 * 128 * 2 * (32 + 4)
    assert shape.linear_params == attention + 2 * 3 * 2048 * 6144 + 46 * 128 * 2048


def test_an_expert_that_all_tokens_share_is_counted(tmp_path):
    """In Qwen1.5-MoE-A2.7B, which has 14,315,784,192 parameters."""
    mixture = dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    sizes = dict(
        vocab_size=151_936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, shared_expert_intermediate_size=5632, **mixture,
    )  # fmt: skip
    names = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    (tmp_path / "config.json").write_text(json.dumps(names | sizes))
    shape = ModelShape.of(read_config(tmp_path), "")
    norms, biases, gates = 49 * 2048, 24 * 3 * 2048, 24 * 2048
    assert shape.num_params + norms + biases + gates == 14_315_784_192


def test_embeddings_have_bits_of_their_own():
    dense, mixture = SHAPES["llama-3-8b"], SHAPES["mixtral-8x7b"]
    assert dense.param_bytes(16) == 2 * dense.num_params
    assert dense.param_bytes(8) == dense.linear_params + 4 * dense.output_params
    in_layers = mixture.linear_params + mixture.expert_params
    assert mixture.param_bytes(4) == in_layers / 2 + 4 * mixture.output_params
    assert mixture.param_bytes(4, 8) == in_layers / 2 + 2 * mixture.output_params

"""Settings that the model and the device decide."""

import dataclasses
import types

import pytest
from huggingface_hub.utils import filter_repo_objects

from jpaged.config import EngineConfig, Limits
from jpaged.engine.build import _eos_token_ids, find_model, limits_of
from jpaged.models.config import ModelConfig
from jpaged.models.rope_config import RopeConfig

MODEL = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
)  # fmt: skip


@pytest.mark.parametrize("own, expected", [(None, (2, 3)), (3, (2, 3)), (5, (2, 3, 5)), (128, (2, 3))])
def test_texts_end_with_the_tokenizers_own_token_too(own, expected):
    model = dataclasses.replace(MODEL, eos_token_ids=(2, 3))
    assert _eos_token_ids(model, types.SimpleNamespace(eos_token_id=own)) == expected
    assert _eos_token_ids(model, None) == (2, 3)


@pytest.mark.parametrize(
    "platform, settings, expected",
    [
        ("cpu", {}, Limits(4096, 64, 256, 64)),
        ("cuda", {}, Limits(4096, 256, 2048, 16)),
        ("cpu", {"max_model_len": 2048}, Limits(2048, 64, 256, 64)),
        ("cpu", {"max_model_len": 2047}, Limits(2047, 64, 256, 16)),
        ("cpu", {"block_size": 16}, Limits(4096, 64, 256, 16)),
        ("cuda", {"block_size": 128}, Limits(4096, 256, 2048, 128)),
        ("cpu", {"max_num_seqs": 300}, Limits(4096, 300, 300, 64)),
        ("cpu", {"max_num_batched_tokens": 8}, Limits(4096, 8, 8, 64)),
        ("cuda", {"max_num_seqs": 2, "max_num_batched_tokens": 4096}, Limits(4096, 2, 4096, 16)),
    ],
)
def test_limits_by_device(platform, settings, expected):
    assert limits_of(EngineConfig(**settings), MODEL, platform) == expected


def test_limits_that_the_model_or_the_pool_does_not_allow():
    with pytest.raises(ValueError, match=r"max_model_len: 4097 exceeds the model's max_position_embeddings \(4096\)"):
        limits_of(EngineConfig(max_model_len=4097), MODEL, "cpu")
    with pytest.raises(ValueError, match=r"max_num_seqs: 64 exceeds the 63 blocks of the KV pool"):
        limits_of(EngineConfig(num_gpu_blocks_override=63), MODEL, "cpu")
    scaled = dataclasses.replace(MODEL, rope=RopeConfig("linear", factor=4.0, original_max_position_embeddings=4096))
    assert limits_of(EngineConfig(), scaled, "cpu").max_model_len == 16384
    with pytest.raises(ValueError, match=r"max_model_len: 16385 .* as linear rope_scaling extends them \(16384\)"):
        limits_of(EngineConfig(max_model_len=16385), scaled, "cpu")
    small = dataclasses.replace(MODEL, max_position_embeddings=1024)
    assert limits_of(EngineConfig(), small, "cpu").block_size == 16


@pytest.mark.parametrize("weights", [True, False])
def test_all_files_of_a_tokenizer_are_downloaded(weights, monkeypatch, tmp_path):
    tokenizer = [
        "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
        "spiece.model", "tiktoken.model", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
        "chat_template.json", "additional_chat_templates/tools.jinja", "config.json", "generation_config.json",
    ]  # fmt: skip
    others = ["README.md", "LICENSE.txt", "pytorch_model.bin", "consolidated.safetensors", "model.onnx"]
    found = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        files = [*tokenizer, *others, "model-00001-of-00002.safetensors"]
        found[:] = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_model("some/model", weights=weights) == tmp_path
    assert found == [*tokenizer, *(["model-00001-of-00002.safetensors"] if weights else [])]

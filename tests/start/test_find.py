"""Files of a model on the hub."""

import pytest
from huggingface_hub.utils import filter_repo_objects

from jpaged.start.setup import find_model


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

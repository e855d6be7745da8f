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


@pytest.fixture
def folder(tmp_path):
    """A directory with a file in GGUF."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    return tmp_path


def test_a_file_in_gguf_is_found_by_its_path_and_by_its_directory(folder):
    assert find_model(str(folder / "model.gguf")) == find_model(str(folder)) == folder / "model.gguf"
    (folder / "config.json").write_text("{}")
    assert find_model(str(folder)) == folder  # a checkpoint in Hugging Face's form, with a further file


def test_a_file_on_the_hub_is_downloaded_alone(folder, monkeypatch):
    asked = []

    def hf_hub_download(*args, **options):
        asked.append((args, options))
        return str(folder / "model.gguf")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    for name, file in (("org/some-model:model.Q4_K_M.gguf", "model.Q4_K_M.gguf"), ("a/b:c/d.gguf", "c/d.gguf")):
        assert find_model(name, revision="main", weights=False) == folder / "model.gguf"
        assert asked.pop() == ((name.partition(":")[0], file), {"revision": "main"})


def test_all_parts_of_a_split_file_are_found_and_downloaded(tmp_path, monkeypatch):
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_model(str(tmp_path)) == tmp_path / names[0]
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda org, name, revision: asked.append(name) or str(tmp_path / name)
    )
    assert find_model(f"org/some-model:{names[0]}") == tmp_path / names[0] and asked == names


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing.gguf", r"model: .*missing\.gguf is not a directory or a file in GGUF"),
        ("missing/missing.gguf", "is not a directory or a file in GGUF"),
        ("notes.txt", r"notes\.txt is not a directory or a file in GGUF"),
        ("several", r"several has 2 files in GGUF, a\.gguf, b\.gguf; name the file"),
        ("linked", r"must not be a link out of the checkpoint's folder"),
    ],
)
def test_what_is_no_model_is_refused(name, message, folder):
    (folder / "notes.txt").write_text("no model")
    for inner in ("several", "linked"):
        (folder / inner).mkdir()
    for file in "ab":
        (folder / "several" / f"{file}.gguf").write_bytes(b"GGUF")
    (folder / "linked" / "a.gguf").symlink_to(folder / "model.gguf")
    with pytest.raises(ValueError, match=message):
        find_model(str(folder / name))


def test_a_relative_name_that_ends_in_gguf_is_no_hub_id():
    with pytest.raises(ValueError, match=r"model: models/model\.gguf is not a directory or a file in GGUF"):
        find_model("models/model.gguf")


def test_a_file_has_no_revision(folder):
    with pytest.raises(ValueError, match=r"revision: only a hub id has revisions, and .*model\.gguf is a file"):
        find_model(str(folder / "model.gguf"), revision="main")

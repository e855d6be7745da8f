"""Checkpoints in and out: safetensors in one file and in shards, Orbax, strict both ways, little host memory."""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import types
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jpaged import checkpoint_files, progress
from jpaged.config import EngineConfig
from jpaged.convert import convert, stored_dtype
from jpaged.demo import DIRECTORY
from jpaged.models import checkpoint, safetensors_files
from jpaged.models.checkpoint import (
    Form,
    dummy_model,
    load_safetensors,
    save_safetensors,
)
from jpaged.models.config import ModelConfig
from jpaged.models.orbax_checkpoint import load_orbax, save_orbax
from jpaged.models.registry import read_config
from jpaged.runtime.placement import Placement
from jpaged.start.load import load_model
from jpaged.start.setup import find_model, prepare
from tests.support import checkpoints, models
from tests.support.random_model import random_model

HF = checkpoints.CASES["biases"]
CONFIG = ModelConfig.from_hf(HF)


def leaves(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype and np.array_equal(a[path], b[path]), path


@pytest.fixture
def directory(tmp_path):
    return checkpoints.write(tmp_path / "model", HF)


def test_loading_without_a_bar_is_logged(directory, monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    caplog.set_level(logging.INFO, logger="jpaged")
    load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"loaded 1 of {len(checkpoints.tensors(HF))} parameters"
    ]


def test_every_parameter_comes_from_its_tensor(directory):
    model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    tensors, layer = checkpoints.tensors(HF), model.layers[1]
    np.testing.assert_array_equal(layer.mlp.up_proj.weight[...], tensors["model.layers.1.mlp.up_proj.weight"])
    np.testing.assert_array_equal(layer.self_attn.q_proj.bias[...], tensors["model.layers.1.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.lm_head.weight[...], tensors["lm_head.weight"])
    assert len(leaves(model)) == len(tensors)


@pytest.mark.parametrize(
    "stored, dtype", [(ml_dtypes.bfloat16, "float32"), (np.float32, "bfloat16"), (np.float16, "float16")]
)
def test_dtypes(tmp_path, stored, dtype):
    directory = checkpoints.write(tmp_path, HF, dtype=stored)
    for array in leaves(load_safetensors(directory, CONFIG, Form(dtype), progress=False)).values():
        assert array.dtype == dtype


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.deep), "bfloat16"])
def test_shards_and_orbax_give_back_the_very_same_bits(tmp_path, dtype):
    model = random_model(CONFIG, dtype, seed=3)
    save_safetensors(model, tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    assert_same(load_safetensors(tmp_path, CONFIG, Form(dtype), progress=False), model)
    save_orbax(model, tmp_path)
    assert_same(load_orbax(tmp_path, CONFIG, Form(dtype)), model)
    assert_same(load_model(tmp_path, CONFIG, dtype=dtype, load_format="auto", seed=0, progress=False), model)


def test_a_written_checkpoint_is_what_transformers_would_have_written(directory, tmp_path):
    save_safetensors(load_safetensors(directory, CONFIG, Form("float32"), progress=False), tmp_path)
    written, original = load_file(tmp_path / "model.safetensors"), load_file(directory / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[name], original[name]) for name in original)


def test_one_error_lists_every_missing_unexpected_and_misshapen_tensor(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.bias"]
    tensors |= {"extra.one": np.zeros(2), "extra.two": np.zeros(3)}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    for words in (
        "missing model.norm.weight [64]", "missing model.layers.0.mlp.up_proj.bias [112]", "unexpected extra.one [2]",
        "unexpected extra.two [3]", "lm_head.weight has shape [64, 96], expected [96, 64]",
    ):  # fmt: skip
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_orbax_is_strict_too(tmp_path):
    save_orbax(random_model(CONFIG), tmp_path)
    other = ModelConfig.from_hf(HF | {"num_hidden_layers": 3, "mlp_bias": False})
    with pytest.raises(
        ValueError, match=r"missing layers\.2\.input_layernorm.*unexpected layers\.0\.mlp\.down_proj\.bias"
    ):
        load_orbax(tmp_path, other, Form("float32"))


def test_tensors_that_follow_from_others_are_passed_over(tmp_path):
    hf = checkpoints.CASES["gqa-tied"]
    directory = checkpoints.write(tmp_path, hf)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tensors, directory / "model.safetensors")
    load_safetensors(directory, ModelConfig.from_hf(hf), Form("float32"), progress=False)


def test_missing_and_broken_files(directory, tmp_path):
    (directory / safetensors_files.INDEX).write_text(
        json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"lacks x-1\.safetensors, x-2\.safetensors, named in"):
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    (directory / safetensors_files.INDEX).unlink()
    (directory / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    with pytest.raises(ValueError, match=r"has no safetensors file; .* \(\*\.bin, \*\.pth\) are not read"):
        load_safetensors(tmp_path, CONFIG, Form("float32"), progress=False)


@pytest.fixture
def fifo(tmp_path):
    """A FIFO that does not block: it has a reader and a writer."""
    os.mkfifo(tmp_path / "fifo")
    number = os.open(tmp_path / "fifo", os.O_RDWR)
    yield tmp_path / "fifo"
    os.close(number)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_fifo_in_place_of_parameters_is_not_opened(directory, fifo, name):
    (directory / "model.safetensors").unlink()
    fifo.rename(directory / name)
    words = rf"^model: {directory / name} must be a regular file, not a folder, FIFO, socket or device$"
    for load in (
        lambda: load_safetensors(directory, CONFIG, Form("float32"), progress=False),
        lambda: stored_dtype(directory),
    ):
        with pytest.raises(ValueError, match=words):
            load()


def test_links_out_of_the_folder_are_refused(directory, tmp_path):
    link, target = directory / "model.safetensors", tmp_path / "elsewhere.safetensors"
    link.rename(target)
    link.symlink_to(target)
    told = f"^model: {link} must not be a link out of the checkpoint's folder, to {target}$"
    with pytest.raises(ValueError, match=told):
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    link.unlink()
    target.rename(directory / "part.safetensors")
    link.symlink_to("part.safetensors")
    load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    (tmp_path / "alias").symlink_to(directory)
    load_safetensors(tmp_path / "alias", CONFIG, Form("float32"), progress=False)


def test_links_of_the_hubs_cache_lead_to_blobs_of_the_same_model(directory, tmp_path):
    home = tmp_path / "models--someone--tiny"
    snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in directory.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    load_safetensors(snapshot, read_config(snapshot), Form("float32"), progress=False)
    blobs.rename(tmp_path / "blobs")
    for file in snapshot.iterdir():
        file.unlink()
        file.symlink_to(tmp_path / "blobs" / file.name)
    with pytest.raises(ValueError, match="must not be a link out of"):
        load_safetensors(snapshot, CONFIG, Form("float32"), progress=False)


def test_orbax_checkpoints_hold_files_alone_and_their_own(directory, tmp_path, fifo):
    save_orbax(load_safetensors(directory, CONFIG, Form("float32"), progress=False), directory)
    load = functools.partial(load_orbax, directory, CONFIG, Form("float32"), progress=False)
    load()
    orbax = directory / "orbax"
    stranger = orbax / "d" / "x"
    fifo.rename(stranger)
    with pytest.raises(ValueError, match=f"^model: {stranger} must be a regular file"):
        load()
    stranger.unlink()
    orbax.rename(tmp_path / "elsewhere")
    orbax.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"^model: {orbax} must not be a link out of"):
        load()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_files_of_json_are_regular_and_of_bounded_size(directory, tmp_path, name):
    def load():
        read_config(directory)
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)

    file = directory / name
    file.unlink(missing_ok=True)
    file.mkdir()
    with pytest.raises(ValueError, match=f"^model: {file} must be a regular file"):
        load()
    file.rmdir()
    file.touch()
    os.truncate(file, 2**26 + 1)  # without blocks on the disk
    with pytest.raises(ValueError, match=rf"^model: {file} must have at most \d+ bytes, not 67108865$"):
        load()
    file.unlink()
    (tmp_path / "elsewhere.json").write_text("{}")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match=f"^model: {file} must not be a link out of"):
        load()


def test_a_fifo_that_takes_the_place_of_a_checked_file_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "config.json")
    monkeypatch.setattr(checkpoint_files, "check_file", lambda *_: None)
    assert checkpoint_files.read_file(tmp_path / "config.json", 9) == b""


def test_conversion_copies_no_file_of_another_folder(directory, tmp_path):
    (tmp_path / "private.txt").write_text("private")
    (directory / "notes.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(ValueError, match=f"^model: {directory / 'notes.txt'} must not be a link out of"):
        convert(str(directory), tmp_path / "new", "orbax")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [5, "", "../x.safetensors", "/dev/zero", ".", "a\0b"])
def test_an_index_must_name_files_beside_it(directory, name):
    (directory / safetensors_files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"index\.json must lead from tensors to names of files"):
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)


def test_parameters_of_another_dtype_are_refused_by_name(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors in F32, BF16, F16: model\.norm\.weight as I32$"):
        load_safetensors(directory, CONFIG, Form("float32"), progress=False)


def test_more_layers_than_there_are_tensors_are_refused_before_they_are_traced(directory, monkeypatch):
    monkeypatch.setattr(checkpoint, "abstract_model", None)
    other = ModelConfig.from_hf(HF | {"num_hidden_layers": 500})
    with pytest.raises(ValueError, match=r"\d+ tensors for the 500 layers of config\.json"):
        load_safetensors(directory, other, Form("float32"), progress=False)


def test_a_long_list_of_problems_is_cut(tmp_path):
    with pytest.raises(ValueError, match=r"missing a49 \[1\]; and 50 more$"):
        checkpoint.check_names({f"a{i}": (1,) for i in range(100)}, {}, tmp_path)


def test_other_formats_beside_the_checkpoint_are_passed_over(directory):
    save_file({"tok_embeddings.weight": np.zeros((2, 2), np.float32)}, directory / "consolidated.safetensors")
    load_safetensors(directory, CONFIG, Form("float32"), progress=False)


def test_a_missing_orbax_checkpoint(directory):
    with pytest.raises(ValueError, match="has no Orbax checkpoint: no folder orbax in it"):
        load_model(directory, CONFIG, dtype="float32", load_format="orbax", seed=0, progress=False)


def test_parameters_in_pytorchs_format_are_refused_with_the_command_that_converts_them(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    told = (
        f"M.from_pretrained('{tmp_path}', dtype='auto').save_pretrained('{tmp_path}-safetensors'); "
        f"T.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}-safetensors')\""
    )
    with pytest.raises(ValueError, match=rf"has no safetensors file; .*{re.escape(told)}$"):
        load_safetensors(tmp_path, CONFIG, Form("float32"), progress=False)
    cached = tmp_path / "models--someone--tiny" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"M\.from_pretrained\('someone/tiny', .*save_pretrained\('tiny-safetensors'\)"
    ):
        load_safetensors(cached, CONFIG, Form("float32"), progress=False)


class Watched(np.ndarray):
    """A part of a tensor on the host."""


class Slice:
    """A slice of safetensors that records the parts that are read, and where they end up."""

    def __init__(self, inner, read):
        self.inner, self.read = inner, read

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, index):
        assert not any(ref() is not None for ref, _ in self.read), "the last part is still held on the host"
        part = self.inner[index].view(Watched)
        self.read.append((weakref.ref(part), part.size))
        return part


@pytest.fixture
def read(monkeypatch):
    """The parts that are read from safetensors: weak references and sizes."""
    parts = []

    @contextlib.contextmanager
    def opened(file):
        with safe_open(file, "numpy") as tensors:
            yield types.SimpleNamespace(keys=tensors.keys, get_slice=lambda name: Slice(tensors.get_slice(name), parts))

    monkeypatch.setattr(safetensors_files, "_open", opened)
    return parts


def test_tensors_are_streamed(directory, read):
    """Never more than one tensor on the host: each is on the device before the next is read."""
    load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    assert len(read) == len(checkpoints.tensors(HF))


@pytest.mark.parametrize("load_format", ["safetensors", "orbax", "dummy"])
def test_each_device_gets_its_part(directory, read, load_format):
    placement = Placement.on(jax.devices()[:4], CONFIG)
    if load_format == "orbax":
        save_orbax(random_model(CONFIG), directory)
    options = dict(dtype="float32", load_format=load_format, seed=0, progress=False)
    whole = load_model(directory, CONFIG, **options)
    read.clear()
    divided = load_model(directory, CONFIG, place=placement.of, **options)
    assert_same(divided, whole)
    for path, leaf in nnx.to_flat_state(nnx.state(divided)):
        assert leaf[...].sharding == placement.of(leaf), path
    if load_format == "safetensors":
        sizes = [size for _, size in read]
        assert max(sizes) == max(x.size for x in leaves(whole).values()) / 4
        assert sum(sizes) == sum(x.size for x in leaves(whole).values()), "each part is read once"


def test_parameters_carry_their_axes():
    model = dummy_model(CONFIG, "float32", 0)
    axes = {path[-2:]: leaf.get_metadata()["out_sharding"] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert axes["q_proj", "weight"] == ("heads", None) and axes["o_proj", "weight"] == (None, "heads")
    assert axes["up_proj", "weight"] == ("mlp", None) and axes["down_proj", "weight"] == (None, "mlp")
    assert axes["embed_tokens", "embedding"] == ("vocab", None) and axes["lm_head", "weight"] == ("vocab", None)
    assert len(axes) > 10 and all(axes.values())


def test_dummy_weights_depend_on_the_seed_alone():
    first, again, other = (dummy_model(CONFIG, "bfloat16", seed) for seed in (1, 1, 2))
    assert_same(first, again)
    assert not np.array_equal(*(jax.tree.leaves(nnx.state(model))[0] for model in (first, other)))


def test_convert_there_and_back(directory, tmp_path):
    models.write_tokenizer(directory)
    convert(str(directory), tmp_path / "orbax", "orbax")
    convert(str(tmp_path / "orbax"), tmp_path / "back", "safetensors")
    original, back = load_file(directory / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert original.keys() == back.keys() and all(np.array_equal(original[n], back[n]) for n in original)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (directory / name).read_bytes()
    assert not list((tmp_path / "orbax").glob("*.safetensors")) and not (tmp_path / "back" / "orbax").exists()
    with pytest.raises(ValueError, match="already exists"):
        convert(str(directory), tmp_path / "back", "orbax")
    with pytest.raises(ValueError, match="is not a directory"):
        convert(str(tmp_path / "nowhere"), tmp_path / "new", "orbax")


@pytest.mark.parametrize(
    "stored", [np.float16, *(pytest.param(each, marks=pytest.mark.deep) for each in (np.float32, ml_dtypes.bfloat16))]
)
def test_conversion_keeps_the_stored_dtype_whatever_the_config_says(tmp_path, stored):
    directory = checkpoints.write(tmp_path / "model", HF | {"torch_dtype": "bfloat16"}, dtype=stored)
    convert(str(directory), tmp_path / "orbax", "orbax")
    convert(str(tmp_path / "orbax"), tmp_path / "back", "safetensors")
    original, back = load_file(directory / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[n].dtype == stored and np.array_equal(original[n], back[n]) for n in original)


def test_where_models_are_found(directory, tmp_path, monkeypatch):
    assert find_model(str(directory)) == directory
    assert (find_model("demo") / "config.json").is_file()
    for name in ("./nowhere", "/nowhere/at/all", "nowhere", "~/nowhere/x", str(directory / "config.json")):
        with pytest.raises(ValueError, match=re.escape(f"model: {name} is not a directory")):
            find_model(name)
    with pytest.raises(ValueError, match="someone/something is neither a directory nor a model on the hub"):
        find_model("someone/something")


def test_a_hub_id_comes_from_the_hubs_cache(directory, tmp_path, monkeypatch):
    """The hub's own layout of a downloaded model; no network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    directory.rename(home / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = find_model("someone/tiny")
    assert found == home / "snapshots" / commit
    load_safetensors(found, read_config(found), Form("float32"), progress=False)


@pytest.mark.parametrize("temperature", [-1, "hot", 10**400], ids=["negative", "text", "huge"])
def test_sampling_defaults_out_of_range_name_their_file(tmp_path, temperature):
    shutil.copytree(DIRECTORY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature: must be a number of at least 0"):
        prepare(EngineConfig(model=str(tmp_path)))

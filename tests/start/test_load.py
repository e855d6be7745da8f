"""A checkpoint as a module, and parts of an engine."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from flax import nnx

import jpaged
from jpaged.models.registry import read_config
from jpaged.start import load
from jpaged.start.load import eos_token_ids
from pallas_kernels.weights import Format
from tests.models.test_checkpoint import assert_same
from tests.start.test_resolve import MODEL
from tests.support import architectures


def arrays(module):
    return jax.tree.leaves(nnx.state(module))


def test_a_module_has_the_config_and_the_arrays_that_an_engine_loads(tiny, loaded):
    module = jpaged.load(tiny, progress=False)
    assert module.config == read_config(tiny)
    for own, served in zip(arrays(module), loaded.engine.runner.params, strict=True):
        assert own.dtype == served.dtype and np.array_equal(own, served)


def test_settings_of_a_module_are_those_of_an_engine(tiny):
    options = {"load_format": "dummy", "dtype": "half", "seed": 3, "progress": False}
    whole = jpaged.load(str(tiny), **options)
    assert {x.dtype.name for x in arrays(whole)} == {"float16"}
    divided = jpaged.load(tiny, tensor_parallel_size=2, **options)
    assert_same(divided, whole)
    assert {len(x.sharding.device_set) for x in arrays(divided)} == {2}
    assert {len(x.sharding.device_set) for x in arrays(whole)} == {1}
    quantized = jpaged.load(tiny, quantization="int8", progress=False)
    assert "int8" in {x.dtype.name for x in arrays(quantized)}


@pytest.mark.parametrize("max_model_len, is_long", [(None, True), (64, False)])
def test_the_length_of_sequences_chooses_the_factors_of_longrope(tmp_path, max_model_len, is_long):
    (tmp_path / "config.json").write_text(json.dumps(architectures.phi3(original=64, limit=128, rotary_dim=16)))
    module = jpaged.load(tmp_path, load_format="dummy", max_model_len=max_model_len, progress=False)
    assert module.config.rope.is_long == is_long


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"dtype": "float8"}, "dtype: must be one of"),
        ({"load_format": "gguf"}, "load_format: must be one of"),
        ({"max_model_len": 10**6}, "max_model_len: 1000000 exceeds"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size: must be at most 4"),
        ({"revision": "main"}, "revision: only a hub id has revisions"),
    ],
)
def test_settings_that_are_not_possible_are_refused(tiny, settings, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        jpaged.load(tiny, progress=False, **settings)
    with pytest.raises(ValueError, match=r"^model: nowhere is not a directory"):
        jpaged.load("nowhere")


@pytest.mark.parametrize("own, expected", [(None, (2, 3)), (3, (2, 3)), (5, (2, 3, 5)), (128, (2, 3))])
def test_texts_end_with_the_tokenizers_own_token_too(own, expected):
    model = dataclasses.replace(MODEL, eos_token_ids=(2, 3))
    assert eos_token_ids(model, types.SimpleNamespace(eos_token_id=own)) == expected
    assert eos_token_ids(model, None) == (2, 3)


@pytest.mark.parametrize(
    ("platform", "capability", "devices", "kernels", "keeps", "takes"),
    [
        ("cpu", None, 1, "auto", True, [True, True]),
        ("cpu", None, 2, "auto", False, None),
        ("gpu", 9.0, 1, "auto", True, [True, False]),
        ("gpu", 9.0, 2, "auto", False, None),
        ("gpu", 9.0, 1, "triton", False, None),
        ("gpu", 8.9, 1, "auto", False, None),
    ],
)
def test_weights_with_groups_stay_where_kernels_multiply_them(
    platform, capability, devices, kernels, keeps, takes, monkeypatch
):
    """One Hopper GPU takes groups of 32 inputs, and no groups of 24."""
    seen = {}
    monkeypatch.setattr(load, "load_model", lambda *args, **options: seen.update(options))
    monkeypatch.setattr(load, "fuse", lambda model, place, gates: seen.update(gates=gates))
    monkeypatch.setattr(load, "described", lambda model: "")
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    resolved = types.SimpleNamespace(
        device=device,
        model=None,
        dtype="bfloat16",
        quantization=None,
        config=types.SimpleNamespace(kernels=kernels, enable_lora=False, lora_modules=None),
    )
    setup = types.SimpleNamespace(resolved=resolved, placement=types.SimpleNamespace(of=None, size=devices))
    load.load_params(setup, "somewhere")
    assert seen["keeps_groups"] == keeps and seen.get("gates", True) == (platform == "cpu" or not keeps)
    if keeps:
        forms = [Format("int8", "float16", None, group) for group in (32, 24)]
        assert [seen["takes"](form, (64, 192)) for form in forms] == takes

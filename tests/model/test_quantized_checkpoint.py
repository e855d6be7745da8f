"""Quantized checkpoints of the hub against numbers that were packed one by one, and the refusal of others."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.config import EngineConfig
from jpaged.convert import convert
from jpaged.engine.build import prepare
from jpaged.models.checkpoint import load_safetensors
from jpaged.models.quantized_checkpoint import Float8, Lazy, Scheme, dequantized, read_scheme
from jpaged.models.registry import read_config
from jpaged.runtime.parameters import by_name
from jpaged.runtime.placement import Placement
from tests import checkpoints
from tests import quantized_checkpoints as quantized
from tests.test_quantization import exact, rounded

FIXTURES = np.load(Path(__file__).parents[1] / "fixtures" / "quantized.npz")
NAMES = {"awq": "awq", "gptq": "gptq", "fp8": "fp8-tensor", "compressed-tensors": "packed-4"}


@pytest.fixture(scope="module", params=quantized.CASES)
def case(request, tmp_path_factory):
    """A checkpoint's directory, the weights it stands for, and the dtype in which they are kept."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, quantized.write(directory, request.param), quantized.CASES[request.param][-1]


def load(directory, quantization=None, place=None):
    options = {} if place is None else {"place": place}
    config = read_config(directory)
    return load_safetensors(directory, config, "float32", quantization=quantization, progress=False, **options)


def test_weights_are_those_that_the_stored_numbers_stand_for(case):
    directory, expected, kept = case
    model = load(directory)
    leaves, numbers = by_name(model), exact(model)
    for name, tensor in expected.items():
        leaf = (
            name.removeprefix("model.")
            .replace("norm.weight", "norm.scale")
            .replace("tokens.weight", "tokens.embedding")
        )
        np.testing.assert_array_equal(numbers[leaf], tensor, err_msg=name)
        is_quantized = "_proj" in name and kept is not None
        assert leaves[leaf].dtype == (kept if is_quantized else np.float32), name
        assert (leaf + "_scale" in leaves) == is_quantized


class Stored(Lazy):
    """Array with the interface of a slice of safetensors."""

    def get_dtype(self):
        return {"int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32"}[str(self[()].dtype)]


@pytest.mark.parametrize("name", sorted({name.partition("/")[0] for name in FIXTURES}))
def test_weights_are_those_that_other_libraries_read(name):
    """compressed-tensors and transformers; `tests/oracle/make_quantized_fixtures.py` writes the fixtures."""
    arrays = {key.partition("/")[2]: FIXTURES[key] for key in FIXTURES if key.startswith(f"{name}/")}
    expected = arrays.pop("expected")
    tensors = {
        "layer." + key: Float8(array.view(ml_dtypes.float8_e4m3fn))
        if array.dtype == np.uint8
        else Stored(array.shape, array.__getitem__)
        for key, array in arrays.items()
    }
    is_block = name == "fp8-block"
    scheme = Scheme("fp8" if is_block else "compressed-tensors", block=(16, 32) if is_block else None)
    weight = dequantized(tensors, scheme, ())["layer.weight"]
    assert weight.get_shape() == [48, 64]
    np.testing.assert_allclose(weight[slice(0, 48), slice(0, 64)], expected, rtol=1e-6)
    np.testing.assert_allclose(weight[slice(5, 23), slice(17, 50)], expected[5:23, 17:50], rtol=1e-6)


def test_each_device_gets_its_part(case):
    directory, _, _ = case
    placement = Placement.on(jax.devices()[:4], read_config(directory))
    divided, whole = load(directory, place=placement.of), by_name(load(directory))
    for path, leaf in nnx.to_flat_state(nnx.state(divided)):
        assert leaf[...].sharding == placement.of(leaf), path
    for name, leaf in by_name(divided).items():
        np.testing.assert_array_equal(leaf, whole[name], err_msg=name)


def test_quantization_rounds_other_numbers_again_and_keeps_its_own(case):
    directory, expected, kept = case
    for quantization, dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn")):
        model = by_name(load(directory, quantization))
        if kept == dtype:
            model, own = exact(load(directory, quantization)), exact(load(directory))
            assert all(np.array_equal(model[name], own[name]) for name in own)
        else:
            values, scale = rounded(expected["model.layers.1.mlp.up_proj.weight"], quantization)
            np.testing.assert_array_equal(model["layers.1.mlp.up_proj.weight_scale"], scale)
            np.testing.assert_array_equal(model["layers.1.mlp.up_proj.weight"], values)


def change(directory, method, edit):
    """Write a checkpoint of a method with other tensors."""
    quantized.write(directory, NAMES[method])
    tensors = load_file(directory / "model.safetensors") if method != "fp8" else None
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    "method, leaf, edit, told",
    [
        ("awq", "qzeros", None, "lacks model.layers.1.mlp.up_proj.qzeros"),
        ("awq", "scales", lambda x: x[:1], r"qzeros has shape \[2, 12\], expected \[1, 12\]"),
        ("awq", "qweight", lambda x: x[:-1], r"scales has 2 groups, which do not divide the weight's 63 inputs"),
        ("awq", "qzeros", lambda x: x.astype(np.int8), "qzeros is I8, and must be I32"),
        ("gptq", "scales", lambda x: x.astype(np.int32), "scales is I32, and must be F32 or F16 or BF16"),
        ("gptq", "g_idx", lambda x: x + 1, "g_idx must be between 0 and 1"),
        ("gptq", "g_idx", lambda x: x[1:], r"g_idx has shape \[63\], expected \[64\]"),
        ("gptq", "bias", lambda x: x + 1, r"unexpected model.layers.1.mlp.up_proj.bias \[96\]"),
        ("gptq", "qweight", lambda x: x[0], "qweight has shape .*, and must be a matrix"),
        ("compressed-tensors", "weight_shape", lambda x: x + 9, "weight_packed has shape .*, and .*weight_shape"),
        ("compressed-tensors", "weight_scale", lambda x: x[:5], "weight_scale has shape .* does not fit a weight"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(tmp_path, method, leaf, edit, told):
    name = f"model.layers.1.mlp.up_proj.{leaf}"

    def applied(tensors):
        array = tensors.pop(name)
        if edit:
            tensors[name] = np.ascontiguousarray(edit(array))

    change(tmp_path, method, applied)
    with pytest.raises(ValueError, match=told):
        load(tmp_path)


@pytest.mark.parametrize(
    "described, told",
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method 'bitsandbytes' is not supported; supported: awq, gptq, fp8"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported"),
        ({"load_in_4bit": True}, "quant_method None is not supported"),
        (["awq"], "must be a JSON object"),
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point False is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (quantized.compressed("nvfp4-pack-quantized", 4, "float"), "format 'nvfp4-pack-quantized' is not supported"),
        (quantized.compressed("pack-quantized", 3, "int"), "num_bits 3 is not supported; supported: 4, 8"),
        (quantized.compressed("float-quantized", 8, "float") | {"transform_config": {"config_groups": {}}},
         "transform_config is not supported"),
    ],
)  # fmt: skip
def test_other_quantizations_are_refused_before_the_weights_are_loaded(tmp_path, described, told):
    checkpoints.write(tmp_path, quantized.HF | {"quantization_config": described})
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config: {told}"):
        prepare(EngineConfig(model=str(tmp_path), skip_tokenizer_init=True))


def test_a_checkpoint_without_quantization_has_no_scheme(tmp_path):
    assert read_scheme(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert read_scheme(tmp_path) is None


def test_conversion_refuses_quantized_checkpoints(tmp_path):
    quantized.write(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"^model: .* is quantized \(awq\), and conversion keeps parameters exactly$"):
        convert(str(tmp_path), tmp_path / "new", "orbax")


def test_scales_without_a_scheme_are_unexpected_tensors(tmp_path):
    quantized.write(tmp_path, "int-channel")
    (tmp_path / "config.json").write_text(json.dumps(quantized.HF))
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.mlp\.down_proj\.input_scale \[1\]"):
        load(tmp_path)

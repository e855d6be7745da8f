"""Quantized checkpoints of the hub against numbers that were packed one by one, and the refusal of others."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.config import QUANTIZED_CHECKPOINTS, EngineConfig
from jpaged.convert import convert
from jpaged.models import quantized_weight
from jpaged.models.checkpoint import (
    Form,
    abstract_model,
    common_form,
    load_safetensors,
    on_one_device,
    takes_all,
    tensors_of,
)
from jpaged.models.layers import weight_of
from jpaged.models.quantized import has_groups, weights_of
from jpaged.models.quantized_checkpoint import FORMATS, dequantized, read_scheme, scheme_of
from jpaged.models.quantized_weight import QuantizedWeight
from jpaged.models.registry import architectures as registered
from jpaged.models.registry import read_config
from jpaged.models.safetensors_files import DerivedTensor, float8_tensors
from jpaged.runtime.parameters import by_name
from jpaged.runtime.placement import Placement
from jpaged.start.setup import prepare
from pallas_kernels import Weight
from pallas_kernels.weights import Format
from tests.engine.test_quantization import exact, rounded
from tests.support import architectures, checkpoints
from tests.support import quantized_checkpoints as quantized

FIXTURES = np.load(Path(__file__).parents[1] / "fixtures" / "quantized.npz")
NAMES = {"awq": "awq", "gptq": "gptq", "fp8": "fp8-tensor", "compressed-tensors": "packed-4"}


# A case of each form in which weights are kept is divided in the usual tier, the others in deep.
FORMS = {str(kept): name for name, (*_, kept) in quantized.CASES.items()}
DIVIDED = [pytest.param(name, marks=[] if name in FORMS.values() else pytest.mark.deep) for name in quantized.CASES]


@pytest.fixture(scope="module", params=quantized.CASES)
def case(request, tmp_path_factory):
    """A checkpoint's directory, the weights it stands for, and the form in which one CPU keeps them."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, quantized.write(directory, request.param), quantized.CASES[request.param][-1]


def load(directory, quantization=None, place=None, *, keeps_groups=False, takes=takes_all):
    form = Form("float32", place or on_one_device, quantization, keeps_groups, takes)
    return load_safetensors(directory, read_config(directory), form, progress=False)


def dense_tensors(hf) -> dict[str, np.ndarray]:
    """The tensors of a tiny checkpoint of an architecture."""
    config = next(each.config for each in registered() if each.config.describes(hf)).from_hf(hf)
    _, shapes = tensors_of(config, abstract_model(config, "float32")[1])
    return {name: architectures.tensor(name, shape, hf) for name, shape in shapes.items()}


# In the usual tier: each case in one way, and one of each method in both.
WAYS = [
    pytest.param(name, keeps, marks=[] if keeps == bool(kept) or name in NAMES.values() else pytest.mark.deep)
    for name, (*_, kept) in quantized.CASES.items()
    for keeps in (False, True)
]


@pytest.mark.parametrize(("case", "keeps_groups"), WAYS, indirect=["case"])
def test_weights_are_those_that_the_stored_numbers_stand_for(case, keeps_groups, caplog):
    """To the bit, kept or not: -scale * zero is exact in float32."""
    directory, expected, kept = case
    kept = kept if keeps_groups or (kept and not kept.group) else None
    model = load(directory, keeps_groups=keeps_groups)
    forms = {".".join(map(str, path)): weight_of(module, name).format for path, module, name in weights_of(model)}
    numbers = exact(model)
    for name, tensor in expected.items():
        leaf = (
            name.removeprefix("model.")
            .replace("norm.weight", "norm.scale")
            .replace("tokens.weight", "tokens.embedding")
        )
        np.testing.assert_array_equal(numbers[leaf], tensor, err_msg=name)
        if leaf in forms:
            assert forms[leaf] == (kept if "_proj" in name and kept else Format("float32")), name
    told = [record.message for record in caplog.records if "become float32" in record.message]
    assert len(told) == (kept is None)
    if told:
        size = 4 * sum(tensor.size for name, tensor in expected.items() if "_proj" in name)
        assert re.match(rf"quantization: 14 weights \(first: layers.0.*\) become float32, {size:,} bytes, be", told[0])


def test_weights_that_products_do_not_take_become_dense(tmp_path, caplog):
    """They are chosen by form and shape."""
    expected = quantized.write(tmp_path, "awq")
    seen = []
    model = load(tmp_path, keeps_groups=True, takes=lambda *weight: seen.append(weight))
    assert {form for form, _ in seen} == {quantized.CASES["awq"][-1]} and not has_groups(model)
    most = max(outputs for _, (outputs, _) in seen)
    model = load(tmp_path, keeps_groups=True, takes=lambda form, shape: shape[0] != most)
    weights = {".".join(map(str, path)): weight_of(module, name) for path, module, name in weights_of(model)}
    for name, weight in weights.items():
        if "_proj" in name:
            assert weight.has_groups == (weight.shape[0] != most), name
            np.testing.assert_array_equal(weight.dense(np), expected[f"model.{name}"])
    assert has_groups(model) and not has_groups(model, lambda form, shape: True)
    assert "become float32" in caplog.text and "products have no code for their groups" in caplog.text


def test_rows_of_a_tensor_are_kept_as_leaves_of_several_layers(tmp_path):
    """Phi-3's tensors hold queries, keys and values, and gate and up; its layers are separate."""
    architecture = architectures.CASES["phi3-short"] | {"hidden_size": 64, "intermediate_size": 96}
    tensors = dense_tensors(architecture)
    rng, parts, expected = np.random.default_rng(0), {}, {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        packed, expected[name] = quantized.awq(tensors.pop(name).shape, rng)
        parts |= {name.removesuffix("weight") + part: array for part, array in packed.items()}
    (tmp_path / "config.json").write_text(json.dumps(architecture | {"quantization_config": quantized.AWQ}))
    save_file(tensors | parts, tmp_path / "model.safetensors")
    model = load(tmp_path, keeps_groups=True)
    attention, numbers = model.layers[1].self_attn, exact(model)
    assert attention.k_proj.weight.dtype == np.uint8 and attention.k_proj.weight_min.shape == (32, 2)
    rows = [numbers[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(np.concatenate(rows), expected["model.layers.1.self_attn.qkv_proj.weight"])
    rows = [numbers[f"layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(np.concatenate(rows), expected["model.layers.1.mlp.gate_up_proj.weight"])


@pytest.mark.parametrize("name", ["awq", "packed-4", "naive-group", "fp8-tensor"])
def test_experts_are_kept_in_one_stack(tmp_path, name):
    hf = architectures.CASES["qwen3-moe"] | {"moe_intermediate_size": 64, "num_hidden_layers": 1}
    described, make, options, kept = quantized.CASES[name]
    tensors = dense_tensors(hf)
    rng, parts, expected = np.random.default_rng(0), {}, {}
    for tensor in [tensor for tensor in tensors if ".experts." in tensor]:
        stored, expected[tensor] = make(tensors.pop(tensor).shape, rng, **options)
        parts |= {tensor.removesuffix("weight") + part: array for part, array in stored.items()}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"quantization_config": described}))
    save_file(tensors | parts, tmp_path / "model.safetensors")
    experts = load(tmp_path, keeps_groups=True).layers[0].mlp.experts
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        weight = weight_of(experts, leaf)
        assert weight.format == kept
        for number, matrix in enumerate(weight.dense(np)):
            np.testing.assert_array_equal(matrix, expected[f"model.layers.0.mlp.experts.{number}.{leaf}.weight"])


def test_parts_of_one_weight_with_and_without_zero_points_are_kept_together():
    """The first ones get minima, too."""
    rng = np.random.default_rng(1)
    weights, matrices = [], []
    for asymmetric in (False, True):
        parts, expected = quantized.pack_quantized((8, 64), rng, bits=4, group=32, asymmetric=asymmetric)
        parts["weight_scale"] = np.float32(parts["weight_scale"])
        weights.append(weight_of_tensors(parts, "compressed-tensors"))
        matrices.append(expected)
    form = common_form([weight.kept for weight in weights])
    assert [weight.kept.minima for weight in weights] == [None, "float32"] and form == weights[1].kept
    for weight, expected in zip(weights, matrices):
        leaves = [weight.leaf(field, form)[(slice(0, 8), slice(None))] for field in ("values", "scales", "minima")]
        np.testing.assert_array_equal(Weight(*leaves).dense(np), expected)
    assert common_form([weights[0].kept, None]) is None and common_form([Format("int8"), Format("uint8")]) is None


def test_the_checkpoints_own_method_may_be_named_and_another_one_is_refused(case):
    directory, _, _ = case
    own = read_scheme(directory).method
    for name in QUANTIZED_CHECKPOINTS:
        config = EngineConfig(model=str(directory), quantization=name)
        if name in (own, "fp8"):
            assert prepare(config).resolved.quantization == ("fp8" if name == "fp8" else None)
        else:
            with pytest.raises(ValueError, match=rf"^quantization: the checkpoint is quantized by {own}, .*'{name}'$"):
                prepare(config)


DTYPES = {"int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def stored(parts: dict[str, np.ndarray]) -> dict[str, DerivedTensor]:
    return {
        f"layer.{name}": DerivedTensor(array.shape, DTYPES[str(array.dtype)], array.__getitem__)
        for name, array in parts.items()
    }


def weight_of_tensors(parts: dict[str, np.ndarray], method: str, **options) -> QuantizedWeight:
    """The weight of a layer with these tensors."""
    return dequantized(stored(parts), scheme_of({"quant_method": method, **options}), ())["layer.weight"]


@pytest.mark.parametrize("name", sorted({name.partition("/")[0] for name in FIXTURES} - {"mxfp4"}))
def test_weights_are_those_that_other_libraries_read(name):
    """compressed-tensors and transformers; `tests/oracle/make_quantized_fixtures.py` writes the fixtures."""
    arrays = {key.partition("/")[2]: FIXTURES[key] for key in FIXTURES if key.startswith(f"{name}/")}
    expected = arrays.pop("expected")
    parts = {n: a.view(ml_dtypes.float8_e4m3fn) if a.dtype == np.uint8 else a for n, a in arrays.items()}
    if name == "fp8-block":
        weight = weight_of_tensors(parts, "fp8", weight_block_size=[16, 32])
    else:
        weight = weight_of_tensors(parts, "compressed-tensors")
    assert weight.get_shape() == [48, 64]
    np.testing.assert_allclose(weight[slice(0, 48), slice(0, 64)], expected, rtol=1e-6)
    np.testing.assert_allclose(weight[slice(5, 23), slice(17, 50)], expected[5:23, 17:50], rtol=1e-6)


@pytest.mark.parametrize("name", ["awq", "gptq-8", "gptq-act-order", "packed-4-asymmetric", "packed-4-act-order"])
def test_parts_of_a_weight_are_read_in_chunks_of_rows(monkeypatch, name):
    """A part begins and ends within chunks, within words and within groups."""
    monkeypatch.setattr(quantized_weight, "CHUNK_ROWS", 5)
    described, make, options, _ = quantized.CASES[name]
    parts, expected = make((24, 96), np.random.default_rng(1), **options)
    parts = {leaf: np.float32(array) if array.dtype.kind in "fV" else array for leaf, array in parts.items()}
    weight = dequantized(stored(parts), scheme_of(described), ())["layer.weight"]
    for rows, columns in (((0, 24), (0, 96)), ((3, 22), (13, 75)), ((9, 10), (95, 96)), ((4, 4), (0, 96))):
        np.testing.assert_array_equal(weight[slice(*rows), slice(*columns)], expected[slice(*rows), slice(*columns)])


def test_kept_leaves_are_read_in_parts_and_in_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(quantized_weight, "CHUNK_ROWS", 5)
    rng = np.random.default_rng(1)
    for make, options in ((quantized.awq, {}), (quantized.gptq, {}), (quantized.gptq, {"bits": 8})):
        parts, expected = make((24, 96), rng, **options)
        parts["scales"] = np.float32(parts["scales"])
        weight = weight_of_tensors(parts, make.__name__, **{"bits": 4, **options})
        whole, form = (slice(None), slice(None)), weight.kept
        leaves = [weight.leaf(field, form) for field in ("values", "scales", "minima")]
        np.testing.assert_array_equal(Weight(*(leaf[whole] for leaf in leaves)).dense(np), expected)
        for leaf in leaves:
            assert leaf[whole].shape == tuple(leaf.get_shape())
            np.testing.assert_array_equal(leaf[slice(3, 22), slice(1, 3)], leaf[whole][3:22, 1:3])


def test_scales_of_rows_are_read_in_parts():
    parts, _ = quantized.pack_quantized((24, 32), np.random.default_rng(1), bits=8)
    scales = parts["weight_scale"] = np.float32(parts["weight_scale"])
    weight = weight_of_tensors(parts, "compressed-tensors")
    leaf = weight.leaf("scales", weight.kept)
    assert leaf.get_shape() == [24] and weight.leaf("values", weight.kept).get_shape() == [24, 32]
    np.testing.assert_array_equal(leaf[(slice(5, 9),)], scales[5:9, 0])


def test_equal_zero_points_in_the_middle_need_no_minima():
    """GPTQ writes zero points for symmetric weights, too."""
    parts, _ = quantized.gptq((8, 64), np.random.default_rng(1))
    parts["scales"] = np.float32(parts["scales"])
    parts["qzeros"] = np.full_like(parts["qzeros"], 0x77777777)
    assert weight_of_tensors(parts, "gptq").kept == Format("uint8", "float32", None, 32)
    parts["qzeros"][0, 0] += 1
    assert weight_of_tensors(parts, "gptq").kept == Format("uint8", "float32", "float32", 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_may_exceed_the_stored_numbers(bits):
    """The first version stores one less, in as many bits."""
    parts, _ = quantized.gptq((8, 32), np.random.default_rng(1), bits=bits)
    parts["qzeros"], parts["scales"] = np.full_like(parts["qzeros"], -1), np.ones((1, 8), np.float32)
    weights = [
        weight_of_tensors(parts, "gptq", bits=bits, checkpoint_format=version) for version in ("gptq_v2", "gptq")
    ]
    v2, v1 = (weight[slice(0, 8), slice(0, 32)] for weight in weights)
    assert -(2**bits) < v2.min() < v2.max() <= 0 and (v1 == v2 - 1).all()


@pytest.mark.parametrize("size", [29, 33])
def test_the_last_word_of_a_row_may_have_fewer_numbers(size):
    parts, expected = quantized.pack_quantized((8, size), np.random.default_rng(1), bits=4)
    parts["weight_scale"] = np.float32(parts["weight_scale"])
    weight = weight_of_tensors(parts, "compressed-tensors")
    np.testing.assert_array_equal(weight[slice(0, 8), slice(0, size)], expected)


def test_the_last_word_of_zero_points_may_have_fewer_numbers():
    parts, expected = quantized.gptq((12, 32), np.random.default_rng(1))
    parts["scales"] = np.float32(parts["scales"])
    weight = weight_of_tensors(parts, "gptq")
    np.testing.assert_array_equal(weight[slice(0, 12), slice(0, 32)], expected)


SIZE, ROWS = (6, 60), Format("int8", "float32")


def eight_bits(scales: tuple[int, ...], block=None, **further):
    """A weight [6, 60] of 3 with scales 1, 2, ... of a shape."""
    grid = np.arange(1, np.prod(scales) + 1, dtype=np.float32).reshape(scales)
    parts = {"weight": np.full(SIZE, 3, np.int8), "weight_scale": grid, **further}
    groups = {"all": {"format": "int-quantized", "weights": {"num_bits": 8, "block_structure": block}}}
    return weight_of_tensors(parts, "compressed-tensors", config_groups=groups)


@pytest.mark.parametrize(
    "scales, block, further, kept",
    [
        ((1,), None, {}, ROWS),
        ((6, 1), None, {}, ROWS),
        ((6,), None, {}, ROWS),
        ((6, 1), (4, 24), {}, ROWS),  # a layer with scales of rows beside others with blocks
        ((6, 3), None, {}, None),  # groups of 20
        ((2, 1), (4, 60), {}, ROWS),  # blocks of whole rows
        ((6, 1), None, {"weight_zero_point": np.zeros((6, 1), np.int8)}, ROWS),
        ((6, 1), None, {"weight_zero_point": np.ones((6, 1), np.int8)}, None),  # a group of 60
        ((6, 1), None, {"weight_g_idx": np.zeros(60, np.int32)}, ROWS),
        ((6, 2), None, {"weight_g_idx": np.arange(60) % 2}, None),
    ],
)
def test_weights_are_kept_in_groups_of_a_multiple_of_32_inputs_or_whole_rows(scales, block, further, kept):
    weight = eight_bits(scales, block, **further)
    assert weight.kept == kept
    if kept:
        leaves = [weight.leaf(field, kept)[(slice(0, 6), slice(0, 60))] for field in ("values", "scales")]
        np.testing.assert_array_equal(Weight(*leaves).dense(np), weight[slice(0, 6), slice(0, 60)])


@pytest.mark.parametrize(("size", "group"), [(64, 64), (96, 32), (128, 128), (256, 64)])
def test_groups_of_several_sizes_are_kept(size, group):
    for bits in (4, 8):
        parts, expected = quantized.pack_quantized(
            (8, size), np.random.default_rng(1), bits=bits, group=group, asymmetric=True
        )
        parts["weight_scale"] = np.float32(parts["weight_scale"])
        weight = weight_of_tensors(parts, "compressed-tensors")
        assert weight.kept == Format({4: "uint8", 8: "int8"}[bits], "float32", "float32", group)
        leaves = [
            weight.leaf(field, weight.kept)[(slice(0, 8), slice(None))] for field in ("values", "scales", "minima")
        ]
        np.testing.assert_array_equal(Weight(*leaves).dense(np), expected)


@pytest.mark.parametrize(
    "scales, block, scale_of",
    [
        ((6, 3), None, lambda row, column: row * 3 + column // 20),
        ((6, 3), (1, 24), lambda row, column: row * 3 + column // 24),  # as many rows of blocks as rows
        ((2, 3), (4, 24), lambda row, column: row // 4 * 3 + column // 24),
        ((2, 1), (4, 60), lambda row, column: row // 4),
    ],
)
def test_scales_belong_to_groups_or_to_blocks(scales, block, scale_of):
    """The last block of a row, and of a column, may be smaller."""
    found = eight_bits(scales, block)[slice(0, 6), slice(0, 60)]
    np.testing.assert_array_equal(found, 3 * (1 + np.vectorize(scale_of)(*np.indices(SIZE))))


@pytest.mark.parametrize("scales, block, told", [
    ((2, 2), (4, 24), r"weight_scale has shape \[2, 2\], expected \[2, 3\]"),
    ((6, 7), None, "weight_scale has 7 groups, which do not divide the weight's 60 inputs"),
    ((6, 0), None, "weight_scale has 0 groups, which do not divide the weight's 60 inputs"),
])  # fmt: skip
def test_scales_of_other_shapes_are_refused(scales, block, told):
    with pytest.raises(ValueError, match=rf"^model: layer\.{told}$"):
        eight_bits(scales, block)


@pytest.mark.parametrize("group", [-1, 3])
def test_groups_out_of_range_are_refused_when_read(group):
    weight = eight_bits((6, 3), weight_g_idx=np.full(60, group, np.int32))
    with pytest.raises(ValueError, match=r"^model: layer\.weight_g_idx must be between 0 and 2$"):
        weight[slice(0, 6), slice(0, 60)]


def test_the_shape_of_a_packed_weight_must_be_that_of_its_words():
    parts, _ = quantized.pack_quantized((8, 32), np.random.default_rng(1), bits=4)
    parts["weight_scale"] = np.float32(parts["weight_scale"])
    for shape in ([9, 32], [8, 33], [8, 24], [8]):
        with pytest.raises(ValueError, match=r"weight_packed has shape \[8, 4\], and layer\.weight_shape \["):
            weight_of_tensors(parts | {"weight_shape": np.array(shape)}, "compressed-tensors")


@pytest.mark.parametrize("bias, expected, is_left", [(0, False, False), (1, False, True), (0, True, True)])
def test_zeros_as_bias_are_left_out_of_a_model_without_it(bias, expected, is_left):
    parts, _ = quantized.gptq((8, 32), np.random.default_rng(1))
    parts = parts | {"scales": np.float32(parts["scales"]), "bias": np.full(8, bias, np.float32)}
    tensors = dequantized(stored(parts), scheme_of({"quant_method": "gptq"}), {"layer.bias"} if expected else ())
    assert tensors.keys() == {"layer.weight"} | ({"layer.bias"} if is_left else set())


def test_numbers_of_activations_and_of_the_cache_are_left_out():
    names = (
        "input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "activation_scale",
    )  # fmt: skip
    tensors = stored(dict.fromkeys(names, np.ones(1, np.float32)) | {"norm": np.ones(4, np.float32)})
    assert dequantized(tensors, scheme_of({"quant_method": "fp8"}), ()).keys() == {"layer.norm"}


def test_numbers_of_8_bits_are_copied_from_their_file(tmp_path):
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn)
    save_file({"a": np.ones(5, np.float32), "b": numbers}, tmp_path / "some.safetensors")
    ((name, tensor),) = float8_tensors(tmp_path / "some.safetensors").items()
    assert name == "b" and tensor.get_shape() == [2, 3] and tensor.get_dtype() == "F8_E4M3"
    part = tensor[slice(1, 2), slice(0, 2)]
    assert part.tolist() == [[3, 4]] and part.dtype == numbers.dtype and type(part) is np.ndarray and part.flags.owndata
    save_file({}, tmp_path / "none.safetensors")
    assert float8_tensors(tmp_path / "none.safetensors") == {}


@pytest.mark.parametrize("case", DIVIDED, indirect=True)
def test_each_device_gets_its_part(case):
    directory, _, _ = case
    placement = Placement.on(jax.devices()[:4], read_config(directory))
    divided, whole = load(directory, place=placement.of), by_name(load(directory))
    for path, leaf in nnx.to_flat_state(nnx.state(divided)):
        assert leaf[...].sharding == placement.of(leaf), path
    for name, leaf in by_name(divided).items():
        np.testing.assert_array_equal(leaf, whole[name], err_msg=name)


ROUNDED = [
    pytest.param(name, marks=[] if name in ("gptq-8", "packed-8", "float-channel") else pytest.mark.deep)
    for name in quantized.CASES
]


@pytest.mark.parametrize("case", ROUNDED, indirect=True)
def test_quantization_rounds_other_numbers_again_and_keeps_its_own(case):
    directory, expected, kept = case
    for quantization, dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn")):
        model = by_name(load(directory, quantization))
        if kept and not kept.group and kept.dtype == dtype:
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
        ({"quant_method": "nvfp4"}, "quant_method 'nvfp4' is not supported"),
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
        (quantized.compressed("float-quantized", 4, "float"), "num_bits 4 is not supported; supported: 8"),
        (quantized.compressed("float-quantized", 8, "float") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
         "sparsity_config is not supported"),
        ({"quant_method": "awq", "bits": 4.0}, r"bits 4\.0 is not supported; supported: 4"),
        ({"quant_method": "awq", "zero_point": 1}, "zero_point 1 is not supported; supported: True"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be at least 1"),
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


@pytest.mark.parametrize(
    "described, options",
    [
        ({"quant_method": "gptq", "bits": 8}, {"axis": 0, "bits": 8, "zero_offset": 1}),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, {"axis": 0, "bits": 4, "zero_offset": 0}),
        ({"quant_method": "fp8", "weight_block_size": [1, 1]}, {"block": (1, 1)}),
        (quantized.compressed("float-quantized", 8, "float", block_structure="128x64"), {"block": (128, 64)}),
        (quantized.compressed("int-quantized", 8, "int") | {"sparsity_config": {"format": "dense"}}, {"block": None}),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "int-quantized", "weights": {}}}},
         {"block": None}),
    ],
)  # fmt: skip
def test_schemes_are_read_from_either_field(tmp_path, described, options):
    for field in ("quantization_config", "compression_config"):
        (tmp_path / "config.json").write_text(json.dumps({field: described}))
        scheme = read_scheme(tmp_path)
        assert scheme.method == described["quant_method"] and scheme.read.keywords == options


@pytest.mark.parametrize(
    "form, further, expected",
    [
        (("int-quantized", 8, "int"), {"strategy": "channel"}, "int8"), (("int-quantized", 8, "int"), {}, None),
        (("int-quantized", 8, "int"), {"strategy": "group", "group_size": 32}, None),
        (("int-quantized", 8, "int"), {"strategy": "channel", "symmetric": False}, None),
        (("pack-quantized", 4, "int"), {"strategy": "channel"}, None),
        (("float-quantized", 8, "float"), {"strategy": "channel"}, None),
    ],
)  # fmt: skip
def test_a_scheme_tells_whether_each_output_has_one_scale_for_int8(form, further, expected):
    described = quantized.compressed(*form, **further)
    assert scheme_of(described).weights == expected
    groups = described["config_groups"]
    groups["group_1"] = {"weights": {"num_bits": 4, "strategy": "channel"}}
    assert scheme_of(described).weights is None


def test_the_flag_accepts_the_names_of_all_formats():
    assert tuple(FORMATS) == QUANTIZED_CHECKPOINTS


def test_groups_with_different_blocks_are_refused(tmp_path):
    groups = {str(rows): {"weights": {"num_bits": 8, "block_structure": [rows, 64]}} for rows in (64, 128)}
    described = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(ValueError, match=r"quantization_config: config_groups with different block_structures are not"):
        read_scheme(tmp_path)


def test_conversion_refuses_quantized_checkpoints(tmp_path):
    quantized.write(tmp_path, "awq")
    with pytest.raises(ValueError, match=r"^model: .* is quantized \(awq\), and conversion keeps parameters exactly$"):
        convert(str(tmp_path), tmp_path / "new", "orbax")


def test_scales_without_a_scheme_are_unexpected_tensors(tmp_path):
    quantized.write(tmp_path, "int-channel")
    (tmp_path / "config.json").write_text(json.dumps(quantized.HF))
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.mlp\.down_proj\.input_scale \[1\]"):
        load(tmp_path)

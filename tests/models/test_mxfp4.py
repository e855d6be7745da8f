"""Checkpoints in MXFP4 against transformers' dequantization, kept as they are and expanded."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.layers import weight_of
from jpaged.models.mxfp4 import FORM, Mxfp4Weight
from jpaged.models.quantized import weights_of
from jpaged.models.quantized_checkpoint import dequantized, scheme_of
from jpaged.models.registry import read_config
from jpaged.models.safetensors_files import DerivedTensor
from pallas_kernels import Weight
from tests.models.test_architectures import whole_logits, write
from tests.support.architectures import gpt_oss

FIXTURES = np.load(Path(__file__).parents[1] / "fixtures" / "quantized.npz")
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
WHOLE = (slice(None),) * 3


def stored(array: np.ndarray) -> DerivedTensor:
    return DerivedTensor(array.shape, "U8", lambda index: array[index])


def weight_of_fixture(place: int = 0, parts: int = 1) -> Mxfp4Weight:
    return Mxfp4Weight(stored(FIXTURES["mxfp4/blocks"]), stored(FIXTURES["mxfp4/scales"]), place, parts)


def kept(weight: Mxfp4Weight, index=WHOLE) -> Weight:
    return Weight(*(weight.leaf(field, FORM)[index] for field in ("values", "scales")))


class TestNumbers:
    """Equal to those of transformers, to the bit."""

    EXPECTED = FIXTURES["mxfp4/expected"].swapaxes(1, 2)  # [E, out, in]

    def test_expanded(self):
        np.testing.assert_array_equal(weight_of_fixture()[WHOLE], self.EXPECTED)

    def test_kept(self):
        np.testing.assert_array_equal(kept(weight_of_fixture()).dense(np), self.EXPECTED)

    def test_of_two_weights_in_turn(self):
        for place in range(2):
            weight, expected = weight_of_fixture(place, 2), self.EXPECTED[:, place::2]
            assert weight.get_shape() == [*expected.shape]
            np.testing.assert_array_equal(weight[WHOLE], expected)
            np.testing.assert_array_equal(kept(weight).dense(np), expected)

    def test_parts(self):
        weight, part = weight_of_fixture(1, 2), (slice(1, 2), slice(3, 9), slice(32, 64))
        np.testing.assert_array_equal(weight[part], self.EXPECTED[:, 1::2][part])
        halves = weight.leaf("values", FORM)[slice(1, 2), slice(3, 9), slice(16, 32)]
        np.testing.assert_array_equal(halves, kept(weight).values[1:2, 3:9, 16:32])

    def test_an_exchange_of_the_halves_is_noticed(self):
        weight = weight_of_fixture()
        wrong = Mxfp4Weight(stored(FIXTURES["mxfp4/blocks"] << 4 | FIXTURES["mxfp4/blocks"] >> 4), weight.scales)
        assert not np.array_equal(wrong[WHOLE], self.EXPECTED)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint in MXFP4."""
    directory = tmp_path_factory.mktemp("mxfp4")
    hf = gpt_oss(intermediate_size=96, num_hidden_layers=2, num_local_experts=4) | QUANTIZED
    tensors, rng = write(directory, hf), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(121, 126, shape, np.uint8)
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: Path, *, keeps_groups: bool):
    return load_safetensors(
        directory, read_config(directory), Form("float32", keeps_groups=keeps_groups), progress=False
    )


def test_experts_stay_as_they_are_or_become_dense(checkpoint, caplog):
    """One line of the log names the bytes that expanded weights take; the weights and logits are equal."""
    as_stored, expanded = load(checkpoint, keeps_groups=True), None
    assert not caplog.records
    expanded = load(checkpoint, keeps_groups=False)
    (record,) = caplog.records
    assert "6 weights (first: layers.0.mlp.experts.gate_proj) become float32, 589,824 bytes" in record.getMessage()
    forms = {path[-1]: weight_of(module, name, bias=None).format for path, module, name in weights_of(as_stored)}
    assert {name for name, form in forms.items() if form == FORM} == {"gate_proj", "up_proj", "down_proj"}
    for (path, module, name), (_, dense, _) in zip(weights_of(as_stored), weights_of(expanded), strict=True):
        weight = weight_of(module, name, bias=None)
        np.testing.assert_array_equal(weight.dense(), getattr(dense, name)[...], err_msg=str(path))
    tokens = np.random.default_rng(1).integers(0, 96, 160).tolist()
    run = jax.jit(lambda model: whole_logits(model, tokens))
    np.testing.assert_allclose(run(as_stored), run(expanded), atol=1e-4)


def test_experts_that_products_do_not_take_become_bfloat16(checkpoint):
    form = Form("bfloat16", keeps_groups=True, takes=lambda form, shape: not form.is_mxfp4)
    model = load_safetensors(checkpoint, read_config(checkpoint), form, progress=False)
    experts = model.layers[0].mlp.experts
    assert experts.gate_proj.dtype == jnp.bfloat16 and not hasattr(experts, "gate_proj_scale")
    exact = load(checkpoint, keeps_groups=False).layers[0].mlp.experts.gate_proj[...]
    np.testing.assert_array_equal(experts.gate_proj[...].astype(jnp.float32), exact)


@pytest.mark.parametrize("edit, told", [
    (lambda tensors, name: tensors.pop(name + "scales"), "lacks .*gate_up_proj_scales"),
    (lambda tensors, name: tensors.pop(name + "blocks"), "lacks .*gate_up_proj_blocks"),
    (lambda tensors, name: tensors.update({name + "blocks": np.zeros((4, 191, 2, 16), np.uint8)}),
     r"gate_up_proj_blocks has shape \[4, 191, 2, 16\], expected \[E, 2 outputs, groups, 16\]"),
    (lambda tensors, name: tensors.update({name + "scales": np.zeros((4, 192, 3), np.uint8)}),
     r"gate_up_proj_scales has shape \[4, 192, 3\], expected \[4, 192, 2\]"),
    (lambda tensors, name: tensors.update({name + "scales": np.zeros((4, 192, 2), np.float32)}),
     "gate_up_proj_scales is F32, and must be U8"),
])  # fmt: skip
def test_missing_and_misshapen_tensors_are_named(checkpoint, tmp_path, edit, told):
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors, "model.layers.1.mlp.experts.gate_up_proj_")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match=told):
        load(tmp_path, keeps_groups=True)


def test_other_tensors_of_the_checkpoint_are_unchanged():
    tensors = {"model.norm.weight": stored(np.zeros(3, np.uint8))}
    assert dequantized(tensors, scheme_of(json.loads('{"quant_method": "mxfp4"}')), ()) == tensors

"""Models in GGUF against the same models in safetensors: every architecture, and every kind of tensors."""

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from jpaged.gguf_file import FLOATS, QUANTIZED, GgufFile, open_gguf
from jpaged.models import registry
from jpaged.models.checkpoint import Form, abstract_model, load_safetensors, tensors_of
from jpaged.models.gguf_checkpoint import load_gguf
from jpaged.models.gguf_config import hf_of, read_gguf_config
from jpaged.models.gguf_names import named_tensors
from jpaged.models.interleaved import joined_shapes, separated
from jpaged.models.layers import MINIMUM, SCALE, weight_of
from jpaged.models.rope import inverse_frequencies
from jpaged.models.safetensors_files import DerivedTensor
from jpaged.rl.causal import token_logprobs
from jpaged.runtime.parameters import by_name
from pallas_kernels import takes_weight
from pallas_kernels.weights import Format, Weight
from tests.support import architectures, checkpoints, gguf_models
from tests.support.gguf_cases import CASES

ROUNDED = re.compile(r"rope_freqs\.weight|blk\.\d+\.ssm_a")  # computed by other functions


def write(directory, hf) -> dict[str, np.ndarray]:
    """Write a model in Hugging Face's form, and return its tensors."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf))
    config = registry.read_config(directory)
    _, shapes = tensors_of(config, abstract_model(config, "float32")[1])
    place_of = registry.architecture_of(config).interleaved
    tensors = {name: architectures.tensor(name, shape, hf) for name, shape in joined_shapes(shapes, place_of).items()}
    save_file(tensors, directory / "model.safetensors")
    apart = {name: DerivedTensor(x.shape, "F32", lambda index, x=x: x[index]) for name, x in tensors.items()}
    apart = separated(apart, shapes, place_of)
    return {name: apart[name][tuple(slice(size) for size in shape)] for name, shape in shapes.items()}


# In the usual tier: the first case of each architecture.
NAMED = {hf["architectures"][0]: name for name, hf in reversed(CASES.items())}
FIRST = [pytest.param(name, marks=[] if name in NAMED.values() else pytest.mark.deep) for name in CASES]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A directory in Hugging Face's form, and a file in GGUF with the same model."""
    directory, hf = tmp_path_factory.mktemp(request.param), CASES[request.param]
    tensors = write(directory / "hf", hf)
    gguf_models.write(directory / "model.gguf", hf, tensors)
    return directory / "hf", directory / "model.gguf"


def test_every_architecture_but_opt_is_written():
    written = {hf["architectures"][0] for hf in CASES.values()}
    # Text parts have the names of their decoders in GGUF, and llama.cpp has no windows of Ministral.
    others = {"OPTForCausalLM", "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"}
    others |= {"MinistralForCausalLM", *(f"Qwen3_5{kind}ForConditionalGeneration" for kind in ("", "Moe"))}
    assert {each.config.architecture for each in registry.architectures()} == written | others


CONVERTED = json.loads((Path(__file__).parents[1] / "fixtures" / "gguf.json").read_text())


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_tensors_are_those_of_llama_cpps_converter(case, request):
    """The test files equal the converter's files of the same models."""
    found = {
        name: [[size for size in tensor.shape if size > 1], hashlib.sha256(tensor.data.tobytes()).hexdigest()[:12]]
        for name, tensor in open_gguf(case[1]).tensors.items()
    }
    wanted = CONVERTED[request.node.callspec.params["case"]]["tensors"]
    exact = {
        name: [[size for size in shape if size > 1], digest]
        for name, (shape, digest) in wanted.items()
        if not ROUNDED.fullmatch(name)
    }
    assert {name: each for name, each in found.items() if not ROUNDED.fullmatch(name)} == exact
    assert found.keys() == wanted.keys()


# Models whose converter leaves out fields that llama.cpp reads.
UNDESCRIBED = dict.fromkeys(("gemma3", "gemma3-types"), "the converter expects a pattern of 6 layers") | {
    "glm": "the converter takes the lengths and norms of the model's first form"
}


class Converted(GgufFile):
    """A file with other fields, some of which are lists."""

    def length(self, name):
        return len(self.fields[name]) if isinstance(self.fields.get(name), list) else None

    def items(self, name):
        return self.fields.get(name)


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_config_of_llama_cpps_converter_is_the_same(case, request):
    name, file = request.node.callspec.params["case"], open_gguf(case[1])
    if name in UNDESCRIBED:
        pytest.skip(UNDESCRIBED[name])
    fields = CONVERTED[name]["fields"] | {"general.architecture": file.architecture}
    short = {name: float(str(np.float32(x))) if isinstance(x, float) else x for name, x in fields.items()}
    assert hf_of(Converted(file.path, short, file.tensors, file.data)) == read_gguf_config(case[1])


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_config_and_parameters_are_those_of_the_safetensors(case):
    directory, file = case
    expected, config = registry.read_config(directory), registry.read_config(file)
    for length in (32, 256):
        ropes = [each.for_length(length) for each in (expected, config)]
        frequencies, factors = zip(*(inverse_frequencies(each.rope, each.head_dim) for each in ropes))
        np.testing.assert_allclose(*frequencies, rtol=3e-7)
        np.testing.assert_allclose(*factors, rtol=1e-7)
    same = {name: getattr(expected, name) for name in ("rope", "dtype", "eos_token_ids")}
    if config.architecture == "LlamaForCausalLM":  # Mistral without a window
        expected = type(config)(**{**vars(expected), "variation": replace(expected.variation, windows=())})
    assert replace(config, **same) == expected
    assert config.context_length == expected.context_length
    ours = by_name(load_gguf(file, config, Form("float32"), progress=False))
    theirs = by_name(load_safetensors(directory, registry.read_config(directory), Form("float32"), progress=False))
    assert ours.keys() == theirs.keys()
    for name, leaf in theirs.items():
        # The file has 1 + weight, and -exp(A_log), in float32.
        is_rounded = "A_log" in name or ("norm" in name and config.model_type.startswith(("gemma", "qwen3_5")))
        np.testing.assert_allclose(ours[name], leaf, rtol=0, atol=5e-7 * is_rounded, err_msg=name)


@pytest.mark.deep
def test_logprobs_are_those_of_the_safetensors(case):
    directory, file = case
    configs = [registry.read_config(path).for_length(256) for path in (directory, file)]
    models = [
        load(path, config, Form("float32"), progress=False)
        for load, path, config in zip((load_safetensors, load_gguf), (directory, file), configs)
    ]
    tokens = np.asarray([architectures.prompt()], np.int32)
    expected, found = (np.asarray(token_logprobs(model, tokens)) for model in models)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


WIDE = checkpoints.BASE | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
DENSE = WIDE | {"num_hidden_layers": 1}
MIXTURE = architectures.CASES["mixtral"] | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


# Kinds in the usual tier as stacked matrices: of floats, with both scales, and in smaller groups.
STACKED = (Kind.BF16, Kind.Q4_K, Kind.Q6_K)


@pytest.mark.parametrize(
    ("hf", "kind"),
    [
        pytest.param(
            hf, kind, id=f"{name}-{kind.name}",
            marks=[pytest.mark.deep] if name == "experts" and kind not in STACKED else [],
        )
        for name, hf in (("dense", DENSE), ("experts", MIXTURE))
        for kind in (*FLOATS, *QUANTIZED)
    ],
)  # fmt: skip
def test_weights_of_every_kind_stay_as_they_are_stored(kind, hf, tmp_path):
    written = gguf_models.write(tmp_path / "model.gguf", hf, write(tmp_path / "hf", hf), kind=kind)
    exact = {name: stored(tensor, kind) for name, tensor in written.items()}
    config = registry.read_config(tmp_path / "model.gguf")
    kept = load_gguf(tmp_path / "model.gguf", config, Form("float32", keeps_groups=True), progress=False)
    dense = load_gguf(tmp_path / "model.gguf", config, Form("float32"), progress=False)
    # In the K kinds, scales and minima are rounded to float16.
    tolerance = 2**-11 if kind.name.endswith("_K") else 0
    for model, rtol in ((kept, tolerance), (dense, 0)):
        for name, weight in weights(model).items():
            expected = exact[name]
            if name.startswith("blk") and name.split(".")[2] in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
                expected = unpermuted(expected, heads)
            np.testing.assert_allclose(
                np.asarray(weight.dense(np), np.float32), expected, rtol=0, atol=2 * rtol * np.abs(expected).max(),
                err_msg=name,
            )  # fmt: skip
    forms = {weight.format for weight in weights(kept).values()}
    if kind in QUANTIZED:
        (form,) = forms
        packed = kind.name in ("Q4_0", "Q4_1", "Q4_K", "MXFP4")
        minima = kind.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
        assert form.dtype == ("uint8" if packed else "int8")
        assert form.scales == ("uint8" if kind == Kind.MXFP4 else "float16")
        assert form.minima == ("float16" if minima else None)
        assert form.group == (16 if kind.name in ("Q2_K", "Q3_K", "Q6_K") else 32)
    else:
        embedding = str(kept.embed_tokens.embedding.dtype)
        assert {form.dtype for form in forms} - {embedding} == {FLOAT_DTYPES[kind]} - {embedding}
        assert embedding == FLOAT_DTYPES[kind] and {weight.format.dtype for weight in weights(dense).values()} == {
            "float32"
        }


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path):
    hf = architectures.CASES["gpt-oss"] | {"intermediate_size": 96, "num_hidden_layers": 1, "layer_types": None}
    written = gguf_models.write(tmp_path / "model.gguf", hf, write(tmp_path / "hf", hf), kind=Kind.MXFP4)
    config = registry.read_config(tmp_path / "model.gguf")
    for keeps_groups in (True, False):
        form = Form("float32", keeps_groups=keeps_groups)
        experts = load_gguf(tmp_path / "model.gguf", config, form, progress=False).layers[0].mlp.experts
        for part in ("gate", "up", "down"):
            weight = weight_of(experts, f"{part}_proj", bias=None)
            assert weight.format.is_mxfp4 == keeps_groups
            expected = stored(written[f"blk.0.ffn_{part}_exps.weight"], Kind.MXFP4)
            np.testing.assert_array_equal(weight.dense(np), expected)


FLOAT_DTYPES = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bfloat16"}


def stored(tensor: np.ndarray, kind: Kind) -> np.ndarray:
    """The numbers that a tensor has in a file, by the package `gguf`."""
    if tensor.ndim == 1:
        return tensor
    return gguf.dequantize(gguf_models.quantized(tensor, kind), kind).reshape(tensor.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    places = gguf_models.permuted(np.arange(len(rows)), heads)
    return rows[np.argsort(places)]


def weights(model) -> dict:
    """The weights of a model by their names in GGUF."""
    found = {"token_embd.weight": weight_of(model.embed_tokens, "embedding"), "output.weight": weight_of(model.lm_head)}
    for i, layer in enumerate(model.layers):
        attention = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
        for ours, name in attention.items():
            found[f"blk.{i}.{name}.weight"] = weight_of(getattr(layer.self_attn, f"{ours}_proj"))
        experts = hasattr(layer.mlp, "experts")
        for part in ("gate", "up", "down"):
            name = f"blk.{i}.ffn_{part}{'_exps' * experts}.weight"
            module = layer.mlp.experts if experts else getattr(layer.mlp, f"{part}_proj")
            found[name] = weight_of(module, f"{part}_proj", bias=None) if experts else weight_of(module)
        if experts:
            found[f"blk.{i}.ffn_gate_inp.weight"] = weight_of(layer.mlp.gate)
    return found


def all_weights(model) -> dict:
    """The weights of a model by their names in the module, without `.weight` at the end."""
    leaves = by_name(model)
    return {
        name.removesuffix(".weight"): Weight(leaf, leaves.get(name + SCALE), leaves.get(name + MINIMUM))
        for name, leaf in leaves.items()
        if not name.endswith((SCALE, MINIMUM))
    }


def test_layers_that_predict_several_tokens_are_not_used(tmp_path):
    hf, path = CASES["glm4-moe"], tmp_path / "model.gguf"
    last = f"blk.{hf['num_hidden_layers']}.attn_norm.weight"
    extra = lambda writer: writer.add_tensor(last, np.ones(64, np.float32))
    gguf_models.write(path, hf, write(tmp_path / "hf", hf), more=extra)
    config, file = registry.read_config(path), open_gguf(path)
    assert last in named_tensors(file, config, {})
    more = {"glm4moe.block_count": config.num_hidden_layers + 1, "glm4moe.nextn_predict_layers": 1}
    file = replace(file, fields=file.fields | more)
    assert hf_of(file)["num_hidden_layers"] == config.num_hidden_layers
    assert last not in named_tensors(file, config, {}) and "blk.0.attn_norm.weight" in named_tensors(file, config, {})
    with pytest.raises(ValueError, match=r"nextn_predict_layers: must be from 0 to \d+, not 99"):
        hf_of(replace(file, fields=file.fields | {"glm4moe.nextn_predict_layers": 99}))


WIDE_CASES = {
    "granite-moe-shared": {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256,
                           "head_dim": 64},
    "qwen3.5": {"hidden_size": 256, "intermediate_size": 256, "linear_num_value_heads": 8, "linear_value_head_dim": 32,
                "head_dim": 64},
    "glm4-moe": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
}  # fmt: skip


JOINED = dict(zip(WIDE_CASES, (Kind.Q8_0, Kind.Q4_1, Kind.Q4_K)))  # in the usual tier


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind.name}", marks=[] if JOINED[name] == kind else pytest.mark.deep)
        for name in WIDE_CASES
        for kind in JOINED.values()
    ],
)
def test_joined_and_reordered_weights_stay_as_they_are_stored(name, kind, tmp_path):
    """Gate and up in one tensor, columns of heads in another order: scales move with their groups."""
    hf = CASES[name] | WIDE_CASES[name]
    gguf_models.write(tmp_path / "model.gguf", hf, write(tmp_path / "hf", hf), kind=kind)
    config = registry.read_config(tmp_path / "model.gguf")
    kept, dense = (
        load_gguf(tmp_path / "model.gguf", config, Form("float32", keeps_groups=keeps), progress=False)
        for keeps in (True, False)
    )
    ours, theirs = all_weights(kept), all_weights(dense)
    assert ours.keys() == theirs.keys()
    held = {path for path, weight in ours.items() if weight.values.dtype.itemsize == 1}
    assert {path.rpartition(".")[2] for path in held} >= {"q_proj", "gate_proj", "up_proj", "down_proj"}
    assert name != "qwen3.5" or any(path.endswith(".out_proj") for path in held)
    for path, weight in ours.items():
        expected = np.asarray(theirs[path].values, np.float32)
        atol = 2 * 2**-11 * np.abs(expected).max()  # in the K kinds, scales and minima are rounded to float16
        np.testing.assert_allclose(np.asarray(weight.dense(np), np.float32), expected, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize(("kind", "forms"), [
    (Kind.F16, {Format("bfloat16")}),
    (Kind.Q6_K, {Format("int8", "float16", None, 16), Format("bfloat16")}),
])  # fmt: skip
def test_weights_have_forms_that_a_hopper_gpu_multiplies(kind, forms, tmp_path):
    """Rows are bfloat16; the embedding's 96 rows are no multiple of 64."""
    gguf_models.write(tmp_path / "model.gguf", DENSE, write(tmp_path / "hf", DENSE), kind=kind)
    form = Form("bfloat16", keeps_groups=True, takes=partial(takes_weight, dtype="bfloat16"))
    model = load_gguf(tmp_path / "model.gguf", registry.read_config(tmp_path / "model.gguf"), form, progress=False)
    found = weights(model)
    assert {weight.format for weight in found.values()} == forms
    assert found["token_embd.weight"].format == Format("bfloat16")


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-8])
def test_scales_beyond_float16_are_float32(scale, tmp_path):
    """A block's scale is float16, and that of a group is up to 63 times as large."""
    written: dict[str, np.ndarray] = {}

    def more(writer):
        blocks = gguf_models.random_blocks((96, 256), Kind.Q4_K, np.random.default_rng(0), scale * 60)
        written["embedding"] = gguf.dequantize(blocks, Kind.Q4_K)
        writer.add_tensor("token_embd.weight", blocks, raw_dtype=Kind.Q4_K)

    tensors = write(tmp_path / "hf", DENSE)
    del tensors["model.embed_tokens.weight"]
    gguf_models.write(tmp_path / "model.gguf", DENSE, tensors, more=more)
    config = registry.read_config(tmp_path / "model.gguf")
    model = load_gguf(tmp_path / "model.gguf", config, Form("float32", keeps_groups=True), progress=False)
    weight = weight_of(model.embed_tokens, "embedding")
    assert weight.format.scales == weight.format.minima == ("float16" if scale == 1 else "float32")
    largest = np.abs(written["embedding"]).max()
    assert np.isfinite(largest) and largest > 0
    np.testing.assert_allclose(weight.dense(np), written["embedding"], rtol=0, atol=largest * 2**-10 * (scale == 1))


def test_experts_in_tensors_of_their_own_are_read(tmp_path):
    """Files of the first months of 2024 have them."""
    hf = MIXTURE
    tensors, path = write(tmp_path / "hf", hf), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_models.add_fields(writer, hf)
    for name, tensor in gguf_models.renamed(hf, tensors).items():
        for index, matrix in enumerate(tensor) if "_exps" in name else [(None, tensor)]:
            writer.add_tensor(
                name if index is None else name.replace("_exps", f".{index}"), np.ascontiguousarray(matrix)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = by_name(load_gguf(path, registry.read_config(path), Form("float32"), progress=False))
    theirs = by_name(
        load_safetensors(tmp_path / "hf", registry.read_config(tmp_path / "hf"), Form("float32"), progress=False)
    )
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(ours[name], leaf, err_msg=name)


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.deep), "int4"])
def test_quantization_applies_to_dense_files_and_replaces_stored_forms(quantization, tmp_path):
    tensors = write(tmp_path / "hf", WIDE)
    for kind in (Kind.F32, Kind.Q4_0):
        gguf_models.write(tmp_path / "model.gguf", WIDE, tensors, kind=kind)
        config = registry.read_config(tmp_path / "model.gguf")
        form = Form("float32", quantization=quantization, keeps_groups=True)
        model = load_gguf(tmp_path / "model.gguf", config, form, progress=False)
        dtype = {"int8": "int8", "int4": "uint8"}[quantization]
        assert weight_of(model.layers[0].mlp.up_proj).format.dtype == dtype
        assert weight_of(model.layers[0].mlp.up_proj).format.group == {"int8": None, "int4": 32}[quantization]


def test_files_have_bytes_of_each_kind(tmp_path):
    gguf_models.write(tmp_path / "model.gguf", WIDE, write(tmp_path / "hf", WIDE), kind=Kind.Q8_0)
    kinds = open_gguf(tmp_path / "model.gguf").kinds
    assert list(kinds) == ["Q8_0", "F32"] and kinds["F32"] == 5 * 256 * 4

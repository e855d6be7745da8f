"""Weights of 8 bits: rounding, products, loading from every format, devices, exchange, and refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, Llama, SamplingParams, quantize
from jpaged.config import EngineConfig
from jpaged.models import registry
from jpaged.models.checkpoint import Form, abstract_model, dummy_model, load_safetensors, save_safetensors
from jpaged.models.config import ModelConfig
from jpaged.models.layers import MANY_ROWS, Epilogue, product
from jpaged.models.orbax_checkpoint import save_orbax
from jpaged.models.quantized import round_weight
from jpaged.rl.causal import logits
from jpaged.runtime.parameters import ParamTree, by_name
from jpaged.runtime.placement import Placement, shard
from jpaged.start.load import load_model
from tests.support import architectures, checkpoints
from tests.support.few_shapes import few_shapes

pytestmark = pytest.mark.slow

HF = checkpoints.CASES["biases"] | {"vocab_size": 256}
CONFIG = ModelConfig.from_hf(HF)
STORED = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
ENGINE = dict(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=64, skip_tokenizer_init=True,
    progress=False,
)  # fmt: skip
PROMPTS = [[3, 9, 27], list(range(40, 63)), [5] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight: np.ndarray, quantization: str) -> tuple[np.ndarray, np.ndarray]:
    """Round one row after the other to the nearest number."""
    values, scales = np.zeros(weight.shape, STORED[quantization]), np.ones(len(weight), np.float32)
    for i, row in enumerate(weight.astype(np.float32)):
        if top := np.abs(row).max():
            scales[i] = top * np.float32(1 / (127 if quantization == "int8" else 448))
        scaled = row * (1 / scales[i])
        values[i] = np.rint(scaled) if quantization == "int8" else scaled
    return values, scales


def exact(model):
    """Return the parameters of a quantized model by name in float32, each weight multiplied by its scale."""
    leaves = {name: np.asarray(leaf) for name, leaf in by_name(model).items()}
    scales = {name.removesuffix("_scale"): leaves.pop(name) for name in list(leaves) if name.endswith("weight_scale")}
    return {n: x.astype(np.float32) * scales[n][:, None] if n in scales else x for n, x in leaves.items()}


def assert_same(model, other):
    found, expected = by_name(model), by_name(other)
    assert list(found) == list(expected)
    for name, leaf in found.items():
        assert leaf.dtype == expected[name].dtype and np.array_equal(leaf, expected[name]), name


@pytest.fixture
def directory(tmp_path):
    return checkpoints.write(tmp_path / "model", HF)


@pytest.fixture(scope="module", params=["int8", pytest.param("fp8", marks=pytest.mark.deep)])
def served(request, tmp_path_factory):
    """An engine with a quantized model, and the directory of the model's checkpoint."""
    directory = checkpoints.write(tmp_path_factory.mktemp("served"), HF)
    with few_shapes():
        return LLM(str(directory), quantization=request.param, **ENGINE), directory, request.param


def outputs(llm):
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", STORED)
def test_weights_are_rounded_to_the_nearest_number_of_their_row(quantization, dtype):
    weight = np.random.default_rng(0).standard_normal((50, 40)) * np.logspace(-6, 6, 50)[:, None]
    weight[3], weight[4, :20] = 0, 0
    weight = weight.astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    values, scale = round_weight(jnp.asarray(weight), np.dtype(STORED[quantization]).name)
    expected, scales = rounded(weight, quantization)
    np.testing.assert_array_equal(scale, scales)
    np.testing.assert_array_equal(values, expected)
    assert scale.dtype == np.float32 and values.dtype == STORED[quantization]
    largest = 127 if quantization == "int8" else 448
    assert (np.abs(np.asarray(values, np.float32)).max(1)[np.arange(50) != 3] == largest).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, MANY_ROWS])
@pytest.mark.parametrize("quantization", STORED)
def test_a_product_is_scaled_before_the_bias_and_the_activation(quantization, rows, dtype):
    rng = np.random.default_rng(rows)
    x, bias = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, 24), (40,)))
    weight, scale = round_weight(jnp.asarray(rng.standard_normal((40, 24))), np.dtype(STORED[quantization]).name)
    y = jax.jit(lambda *a: product(a[0], a[1], epilogue=Epilogue(a[2], a[3], nnx.relu)))(x, weight, scale, bias)
    plain = np.asarray(x, float) @ (np.asarray(weight, float) * np.asarray(scale)[:, None]).T
    expected = np.maximum(plain + np.asarray(bias, float), 0)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, float), expected, rtol=1e-5 if dtype == "float32" else 2e-2, atol=5e-2
                               if dtype == "bfloat16" else 1e-5)  # fmt: skip


@pytest.mark.parametrize("quantization", STORED)
def test_linear_layers_are_quantized_and_nothing_else(directory, quantization):
    model = load_safetensors(directory, CONFIG, Form("float32", quantization=quantization), progress=False)
    tensors, leaves = checkpoints.tensors(HF), {name: np.asarray(leaf) for name, leaf in by_name(model).items()}
    for name in PROJECTIONS:
        part = "mlp" if name in PROJECTIONS[4:] else "self_attn"
        values, scale = rounded(tensors[f"model.layers.1.{part}.{name}.weight"], quantization)
        np.testing.assert_array_equal(leaves[f"layers.1.{part}.{name}.weight"], values)
        np.testing.assert_array_equal(leaves[f"layers.1.{part}.{name}.weight_scale"], scale)
    small = {name for name, leaf in leaves.items() if leaf.dtype.itemsize == 1}
    assert len(small) == 2 * len(PROJECTIONS) and all(name.split(".")[-2] in PROJECTIONS for name in small)
    np.testing.assert_array_equal(leaves["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.deep
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_every_format_gives_the_same_arrays_on_one_device_and_on_four(directory, quantization):
    options = dict(dtype="float32", seed=0, progress=False, quantization=quantization)
    float_model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    model = load_model(directory, CONFIG, load_format="safetensors", **options)
    assert_same(quantize(float_model, quantization), model)
    save_orbax(float_model, directory)
    assert_same(load_model(directory, CONFIG, load_format="orbax", **options), model)
    dummy = load_model(directory, CONFIG, load_format="dummy", **options)
    for name, numbers in exact(quantize(dummy_model(CONFIG, "float32", 0), quantization)).items():
        np.testing.assert_allclose(exact(dummy)[name], numbers, rtol=0.1, atol=2e-3, err_msg=name)
    placement = Placement.on(jax.devices()[:4], CONFIG)
    for load_format, expected in (("safetensors", model), ("orbax", model), ("dummy", dummy)):
        divided = load_model(directory, CONFIG, load_format=load_format, place=placement.of, **options)
        assert_same(divided, expected)
        for path, leaf in nnx.to_flat_state(nnx.state(divided)):
            assert leaf[...].sharding == placement.of(leaf), path
    assert_same(shard(model, jax.devices()[:4]), model)


def test_scales_are_divided_as_the_rows_of_their_weights():
    _, leaves = abstract_model(CONFIG, "float32")
    quantized = {path: "int8" for path in leaves if path[-2] in PROJECTIONS and path[-1] == "weight"}
    _, leaves = abstract_model(CONFIG, "float32", quantized)
    axes = {path[-2:]: leaf.get_metadata()["out_sharding"] for path, leaf in leaves.items()}
    assert axes["q_proj", "weight_scale"] == ("heads",) and axes["up_proj", "weight_scale"] == ("mlp",)
    assert axes["o_proj", "weight_scale"] == axes["down_proj", "weight_scale"] == (None,)
    assert axes["o_proj", "weight"] == (None, "heads")


def test_a_quantized_model_is_served_as_its_numbers_say(served):
    """The tokens and logprobs are those of a model without quantization that has the quantized numbers as weights."""
    llm, directory, quantization = served
    model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    numbers = exact(load_safetensors(directory, CONFIG, Form("float32", quantization=quantization), progress=False))
    state = nnx.state(model)
    for path, leaf in nnx.to_flat_state(state):
        leaf[...] = jnp.asarray(numbers[".".join(map(str, path))])
    with few_shapes():
        plain = LLM(model, **ENGINE)
    assert llm.engine.runner.pads, "XLA multiplies weights of 8 bits, with all rows of a shape"
    assert plain.engine.runner.pads == (plain.engine.runner.kernels.product is None)
    expected = outputs(plain)
    for found, other in zip(outputs(llm), expected):
        assert found.token_ids == other.token_ids
        logprobs = [[next(iter(each.values())).logprob for each in one.logprobs] for one in (found, other)]
        np.testing.assert_allclose(*logprobs, atol=1e-3)


def test_other_parameters_are_served_once_they_are_quantized(served, tmp_path):
    llm, directory, quantization = served
    other = dummy_model(CONFIG, "float32", seed=5)
    before, dtype = outputs(llm), np.dtype(STORED[quantization]).name
    told = rf"^params: layers\.0\.mlp\.down_proj\.weight is float32, not {dtype}: .* jpaged\.quantize\(model, "
    with pytest.raises(ValueError, match=told + f"'{quantization}'"):
        llm.update_params(other)
    llm.update_params(quantize(other, quantization))
    changed = [each.token_ids for each in outputs(llm)]
    assert changed != [each.token_ids for each in before]
    with few_shapes():
        assert [each.token_ids for each in outputs(LLM(quantize(other, quantization), **ENGINE))] == changed
    llm.update_params(load_safetensors(directory, CONFIG, Form("float32", quantization=quantization), progress=False))
    assert [each.token_ids for each in outputs(llm)] == [each.token_ids for each in before]


def test_a_copy_is_quantized_and_the_module_stays(directory):
    model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    quantized, leaves = by_name(quantize(model, "int8")), by_name(model)
    assert {str(leaf.dtype) for leaf in leaves.values()} == {"float32"}
    assert all(quantized[name] is leaf for name, leaf in leaves.items() if quantized[name].dtype == np.float32)


def test_refusals(directory, tmp_path):
    with pytest.raises(ValueError, match=r"^quantization: must be one of int8, fp8, awq, gptq, .*, not 'exl2'$"):
        EngineConfig(quantization="exl2")
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^quantization: must be one of int8, fp8, not 'int4'$"):
        quantize(model, "int4")
    with pytest.raises(ValueError, match=r"^quantization: .* pass jpaged\.quantize\(module, 'fp8'\) instead$"):
        LLM(model, quantization="fp8", **ENGINE)
    quantized = quantize(model, "fp8")
    with pytest.raises(ValueError, match=r"^quantization: the model is quantized already$"):
        quantize(quantized, "fp8")
    for save in (save_orbax, save_safetensors):
        with pytest.raises(ValueError, match=r"^model: its weights are quantized, and no format"):
            save(quantized, tmp_path)


def test_a_dtype_of_a_module_leaves_its_weights_of_8_bits_and_their_scales_as_they_are():
    quantized = quantize(Llama(CONFIG, rngs=nnx.Rngs(0)), "fp8")
    tree = ParamTree(quantized, Placement.on(jax.devices()[:1], CONFIG), dtype="bfloat16")
    dtypes = {name.rpartition(".")[2]: str(leaf.dtype) for name, leaf in tree.expected.items() if "proj.w" in name}
    assert dtypes == {"weight": "float8_e4m3fn", "weight_scale": "float32"}
    assert {str(leaf.dtype) for name, leaf in tree.expected.items() if "proj.w" not in name} == {"bfloat16"}


@pytest.mark.deep
@pytest.mark.parametrize("case", ["mixtral", "opt"])
def test_models_of_other_modules_compute_with_the_rounded_weights(case):
    """A product that ignored the scale of a weight would change every logit."""
    hf = architectures.CASES[case]
    config = next(one.config for one in registry.architectures() if one.config.describes(hf)).from_hf(hf)
    model = dummy_model(config, "float32", 0)
    rounded_model = quantize(model, "int8")
    graphdef, state = nnx.split(model)
    for path, leaf in nnx.to_flat_state(state):
        leaf.set_value(jnp.asarray(exact(rounded_model)[".".join(map(str, path))]))
    tokens, mask = jnp.arange(8)[None], jnp.tril(jnp.ones((1, 8, 8), bool))
    compute = nnx.jit(lambda model: logits(model, tokens, tokens, mask))
    found, expected = compute(rounded_model), compute(nnx.merge(graphdef, state))
    assert jnp.abs(found - expected).max() < 1e-4 * jnp.abs(expected).max()

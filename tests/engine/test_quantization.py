"""Weights of 8 and 4 bits: rounding, loading from every format, devices, exchange, serving, and refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, SamplingParams, quantize
from jpaged.config import EngineConfig
from jpaged.models import registry
from jpaged.models.checkpoint import Form, abstract_model, dummy_model, load_safetensors, save_safetensors
from jpaged.models.config import ModelConfig
from jpaged.models.layers import weight_of
from jpaged.models.orbax_checkpoint import save_orbax
from jpaged.models.quantized import FORMATS, weights_of
from jpaged.rl.causal import logits
from jpaged.runtime.parameters import ParamTree, by_name
from jpaged.runtime.placement import Placement, shard
from jpaged.start.load import load_model
from pallas_kernels.weights import Weight
from pallas_kernels.weights import quantize as quantize_weight
from tests.support import architectures, checkpoints
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

pytestmark = pytest.mark.slow

HF = checkpoints.CASES["biases"] | {"vocab_size": 256, "intermediate_size": 128, "num_hidden_layers": 1}
CONFIG = ModelConfig.from_hf(HF)
STORED = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn, "int4": np.uint8}
EIGHT_BITS = ("int8", "fp8")
ENGINE = dict(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=64, skip_tokenizer_init=True,
    progress=False,
)  # fmt: skip
PROMPTS = [[3, 9, 27], list(range(40, 63)), [5] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight: np.ndarray, quantization: str) -> tuple[np.ndarray, ...]:
    """Round one row, or one group of a row, after the other to the nearest number."""
    if quantization == "int4":
        return rounded_in_groups(weight)
    values, scales = np.zeros(weight.shape, STORED[quantization]), np.ones(len(weight), np.float32)
    for i, row in enumerate(weight.astype(np.float32)):
        if top := np.abs(row).max():
            scales[i] = top * np.float32(1 / (127 if quantization == "int8" else 448))
        scaled = row * (1 / scales[i])
        values[i] = np.rint(scaled) if quantization == "int8" else scaled
    return values, scales


def rounded_in_groups(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers from 0 to 15 of groups of 32, the number of input j in the low half of byte j, that of j + 16 above."""
    rows, groups = len(weight), weight.shape[1] // 32
    values = np.zeros((rows, groups, 16), np.uint8)
    scales, minima = np.ones((rows, groups), np.float16), np.zeros((rows, groups), np.float16)
    for i in range(rows):
        for g in range(groups):
            group = weight[i, 32 * g : 32 * g + 32].astype(np.float32)
            minima[i, g], span = group.min(), (group.max() - group.min()) * np.float32(1 / 15)
            scales[i, g] = span or 1
            scaled = (group - np.float32(minima[i, g])) * (1 / np.float32(scales[i, g]))
            numbers = np.clip(np.rint(scaled), 0, 15).astype(np.uint8)
            for j in range(16):
                values[i, g, j] = numbers[j] + 16 * numbers[j + 16]
    return values.reshape(rows, -1), scales, minima


def exact(model):
    """Return the parameters of a quantized model by name, those of a quantized weight as the matrix in float32."""
    leaves = {name: np.asarray(leaf) for name, leaf in by_name(model).items()}
    for path, module, name in weights_of(model):
        weight = Weight(*(leaf if leaf is None else np.asarray(leaf) for leaf in weight_of(module, name, bias=None)))
        leaves[".".join(map(str, path))] = weight.dense(np)
    return {name: leaf for name, leaf in leaves.items() if not name.endswith(("_scale", "_min"))}


def with_dense_weights(model, quantized):
    """Return a model with the numbers of a quantized one."""
    graphdef, state = nnx.split(model)
    numbers = exact(quantized)
    dense = [leaf.replace(jnp.asarray(numbers[".".join(map(str, p))])) for p, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(zip([p for p, _ in nnx.to_flat_state(state)], dense)))


def assert_same(model, other):
    found, expected = by_name(model), by_name(other)
    assert list(found) == list(expected)
    for name, leaf in found.items():
        assert leaf.dtype == expected[name].dtype and np.array_equal(leaf, expected[name]), name


@pytest.fixture
def directory(tmp_path):
    return checkpoints.write(tmp_path / "model", HF)


@pytest.fixture(
    scope="module", params=["int4", *(pytest.param(name, marks=pytest.mark.deep) for name in ("int8", "fp8"))]
)
def served(request, tmp_path_factory):
    """An engine with a quantized model, and the directory of the model's checkpoint.

    Products with weights of 8 bits are compared with float64 in tests/kernels/test_product.py.
    """
    directory = checkpoints.write(tmp_path_factory.mktemp("served"), HF)
    with few_shapes():
        return LLM(str(directory), quantization=request.param, **ENGINE), directory, request.param


def outputs(llm):
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", EIGHT_BITS)
def test_weights_of_8_bits_are_rounded_to_the_nearest_number_of_their_row(quantization, dtype):
    weight = np.random.default_rng(0).standard_normal((50, 40)) * np.logspace(-6, 6, 50)[:, None]
    weight[3], weight[4, :20] = 0, 0
    weight = weight.astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    values, scale, *_ = quantize_weight(jnp.asarray(weight), FORMATS[quantization])
    expected, scales = rounded(weight, quantization)
    np.testing.assert_array_equal(scale, scales)
    np.testing.assert_array_equal(values, expected)
    assert scale.dtype == np.float32 and values.dtype == STORED[quantization]
    largest = 127 if quantization == "int8" else 448
    assert (np.abs(np.asarray(values, np.float32)).max(1)[np.arange(50) != 3] == largest).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_4_bits_are_rounded_to_the_nearest_number_of_their_group(dtype):
    weight = np.random.default_rng(0).standard_normal((50, 96)) * np.logspace(-2, 2, 50)[:, None]
    weight[3], weight[4, :40], weight[5] = 0, 0, 7.5
    weight = weight.astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    found = quantize_weight(jnp.asarray(weight), FORMATS["int4"])
    for array, expected in zip(found, rounded(weight, "int4")):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
    steps = np.repeat(np.asarray(found.scales, np.float32), 32, axis=1)
    assert (np.abs(found.dense(np) - weight.astype(np.float32)) <= 0.51 * steps).all()


@pytest.mark.parametrize("quantization", STORED)
def test_linear_layers_are_quantized_and_nothing_else(directory, quantization):
    model = load_safetensors(directory, CONFIG, Form("float32", quantization=quantization), progress=False)
    tensors, leaves = checkpoints.tensors(HF), {name: np.asarray(leaf) for name, leaf in by_name(model).items()}
    for name in PROJECTIONS:
        part = "mlp" if name in PROJECTIONS[4:] else "self_attn"
        expected = rounded(tensors[f"model.layers.0.{part}.{name}.weight"], quantization)
        for end, array in zip(("", "_scale", "_min"), expected):
            np.testing.assert_array_equal(leaves[f"layers.0.{part}.{name}.weight{end}"], array)
    small = {name for name, leaf in leaves.items() if leaf.dtype.itemsize == 1}
    assert len(small) == len(PROJECTIONS) and all(name.split(".")[-2] in PROJECTIONS for name in small)
    np.testing.assert_array_equal(leaves["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.deep
@pytest.mark.parametrize("quantization", STORED)
def test_every_format_gives_the_same_arrays_on_one_device_and_on_four(directory, quantization):
    options = dict(dtype="float32", seed=0, progress=False, quantization=quantization)
    float_model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    model = load_model(directory, CONFIG, load_format="safetensors", **options)
    assert_same(quantize(float_model, quantization), model)
    save_orbax(float_model, directory)
    assert_same(load_model(directory, CONFIG, load_format="orbax", **options), model)
    dummy = load_model(directory, CONFIG, load_format="dummy", **options)
    for name, numbers in exact(quantize(dummy_model(CONFIG, "float32", 0), quantization)).items():
        np.testing.assert_allclose(
            exact(dummy)[name], numbers, rtol=0.1, atol=2e-3 if quantization != "int4" else 4e-2, err_msg=name
        )
    placement = Placement.on(jax.devices()[:4], CONFIG)
    for load_format, expected in (("safetensors", model), ("orbax", model), ("dummy", dummy)):
        divided = load_model(directory, CONFIG, load_format=load_format, place=placement.of, **options)
        assert_same(divided, expected)
        for path, leaf in nnx.to_flat_state(nnx.state(divided)):
            assert leaf[...].sharding == placement.of(leaf), path
    assert_same(shard(model, jax.devices()[:4]), model)


def test_scales_are_divided_as_the_rows_and_groups_of_their_weights():
    _, leaves = abstract_model(CONFIG, "float32")
    for quantization in ("int8", "int4"):
        form = FORMATS[quantization]
        quantized = {path: form for path in leaves if path[-2] in PROJECTIONS and path[-1] == "weight"}
        _, found = abstract_model(CONFIG, "float32", quantized)
        axes = {path[-2:]: leaf.get_metadata()["out_sharding"] for path, leaf in found.items()}
        ends = ("heads",), ("mlp",), (None,)
        if quantization == "int4":
            ends = ("heads", None), ("mlp", None), (None, "mlp")
            assert axes["up_proj", "weight_min"] == ends[1] and axes["down_proj", "weight_min"] == ends[2]
        assert axes["q_proj", "weight_scale"] == ends[0] and axes["up_proj", "weight_scale"] == ends[1]
        assert axes["down_proj", "weight_scale"] == ends[2]
        assert axes["o_proj", "weight"] == (None, "heads")


def test_groups_that_the_devices_do_not_divide_are_refused(tmp_path):
    """112 inputs of down_proj are no groups of 32; 96 are three groups, for two devices."""
    told = r"^quantization: int4 has groups of 32 inputs, and layers\.0\.mlp\.down_proj\.weight has 112 inputs$"
    with pytest.raises(ValueError, match=told):
        quantize(random_model(ModelConfig.from_hf(HF | {"intermediate_size": 112})), "int4")
    hf = HF | {"intermediate_size": 96}
    directory, config = checkpoints.write(tmp_path / "model", hf), ModelConfig.from_hf(hf)
    placement = Placement.on(jax.devices()[:2], config)
    told = r"quantization: layers\.0\.mlp\.down_proj\.weight has 3 groups of inputs, which 2 devices do not divide"
    for load_format in ("safetensors", "dummy"):
        with pytest.raises(ValueError, match=told):
            load_model(
                directory, config, load_format=load_format, dtype="float32", seed=0, progress=False,
                quantization="int4", place=placement.of,
            )  # fmt: skip
    whole = quantize(random_model(config), "int4")
    with pytest.raises(ValueError, match=told):
        shard(whole, jax.devices()[:2])
    with pytest.raises(ValueError, match=told):
        ParamTree(whole, placement)


def test_a_quantized_model_is_served_as_its_numbers_say(served):
    """The tokens and logprobs are those of a model without quantization that has the quantized numbers as weights."""
    llm, directory, quantization = served
    model = load_safetensors(directory, CONFIG, Form("float32"), progress=False)
    quantized = load_safetensors(directory, CONFIG, Form("float32", quantization=quantization), progress=False)
    with few_shapes():
        plain = LLM(with_dense_weights(model, quantized), **ENGINE)
    assert llm.engine.runner.pads == plain.engine.runner.pads == (not plain.engine.runner.kernels.skips_rows)
    expected = outputs(plain)
    for found, other in zip(outputs(llm), expected):
        assert found.token_ids == other.token_ids
        logprobs = [[next(iter(each.values())).logprob for each in one.logprobs] for one in (found, other)]
        np.testing.assert_allclose(*logprobs, atol=1e-3)


def test_other_parameters_are_served_once_they_are_quantized(served, tmp_path):
    llm, directory, quantization = served
    other = random_model(CONFIG, seed=5)
    before, dtype = outputs(llm), np.dtype(STORED[quantization]).name
    problem = r"has the shape \[64, 128\], not \[64, 64\]" if quantization == "int4" else f"is float32, not {dtype}"
    told = rf"^params: layers\.0\.mlp\.down_proj\.weight {problem}: pass the model through jpaged\.quantize\(model, "
    with pytest.raises(ValueError, match=told + f"'{quantization}'"):
        llm.update_params(other)
    llm.update_params(quantize(other, quantization))
    changed = [each.token_ids for each in outputs(llm)]
    assert changed != [each.token_ids for each in before]
    llm.sleep(level=1)
    llm.wake_up()
    assert [each.token_ids for each in outputs(llm)] == changed
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
    with pytest.raises(ValueError, match=r"^quantization: must be one of int8, fp8, int4, awq, gptq, .*, not 'exl2'$"):
        EngineConfig(quantization="exl2")
    model = random_model(CONFIG)
    with pytest.raises(ValueError, match=r"^quantization: must be one of int8, fp8, int4, not 'int2'$"):
        quantize(model, "int2")
    with pytest.raises(ValueError, match=r"^quantization: .* pass jpaged\.quantize\(module, 'fp8'\) instead$"):
        LLM(model, quantization="fp8", **ENGINE)
    with pytest.raises(ValueError, match=r"^activation_dtype: int8 needs weights of 8 or 4 bits in groups of 32, and"):
        LLM(quantize(model, "int8"), activation_dtype="int8", **ENGINE)
    quantized = quantize(model, "fp8")
    with pytest.raises(ValueError, match=r"^quantization: the model is quantized already$"):
        quantize(quantized, "fp8")
    for save in (save_orbax, save_safetensors):
        with pytest.raises(ValueError, match=r"^model: its weights are quantized, and no format"):
            save(quantized, tmp_path)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_dtype_of_a_module_leaves_its_quantized_weights_as_they_are(quantization):
    quantized = quantize(random_model(CONFIG), quantization)
    tree = ParamTree(quantized, Placement.on(jax.devices()[:1], CONFIG), dtype="bfloat16")
    dtypes = {name.rpartition(".")[2]: str(leaf.dtype) for name, leaf in tree.expected.items() if "proj.w" in name}
    form = FORMATS[quantization]
    expected = {"weight": form.dtype, "weight_scale": form.scales, "weight_min": form.minima}
    assert dtypes == {name: dtype for name, dtype in expected.items() if dtype}
    assert {str(leaf.dtype) for name, leaf in tree.expected.items() if "proj.w" not in name} == {"bfloat16"}


MODELS = [
    "qwen3-moe", *(pytest.param(name, marks=pytest.mark.deep) for name in ("mixtral", "opt", "gemma3", "qwen2-moe"))
]  # fmt: skip


def model_of(case: str, seed: int = 0):
    """A model whose sizes are multiples of a group."""
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 32, "ffn_dim": 96, "shared_expert_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1} if case == "qwen3-moe" else {}
    hf = {key: sizes.get(key, value) for key, value in architectures.CASES[case].items()}
    config = next(one.config for one in registry.architectures() if one.config.describes(hf)).from_hf(hf)
    return random_model(config, seed=seed)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.deep), "int4"])
def test_models_of_other_modules_compute_with_the_rounded_weights(case, quantization):
    """A product that ignored the scale of a weight would change every logit. Experts are quantized, routers are not."""
    model = model_of(case)
    quantized = quantize(model, quantization)
    dtypes = {name: str(leaf.dtype) for name, leaf in by_name(quantized).items()}
    of_experts = [dtype for name, dtype in dtypes.items() if ".experts." in name and name.endswith("_proj")]
    assert set(of_experts) <= {FORMATS[quantization].dtype} and bool(of_experts) == (case == "mixtral" or "moe" in case)
    routers = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
    assert all(dtype == "float32" for name, dtype in dtypes.items() if name.endswith(routers))
    assert dtypes.get("layers.0.mlp.shared_expert.up_proj.weight", FORMATS[quantization].dtype) == (
        FORMATS[quantization].dtype
    )
    tokens, mask = jnp.arange(8)[None], jnp.tril(jnp.ones((1, 8, 8), bool))
    compute = nnx.jit(lambda model: logits(model, tokens, tokens, mask))
    found, expected = compute(quantized), compute(with_dense_weights(model, quantized))
    assert jnp.abs(found - expected).max() < 1e-4 * jnp.abs(expected).max()


@pytest.mark.deep  # tests/models/test_moe.py and the test above compute with such experts
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_mixture_of_quantized_experts_is_served_as_its_numbers_say(quantization):
    model = model_of("qwen3-moe")
    quantized = quantize(model, quantization)
    with few_shapes():
        found, expected = (
            [each.token_ids for each in outputs(LLM(each, **ENGINE | {"max_model_len": 128}))]
            for each in (quantized, with_dense_weights(model, quantized))
        )
    assert found == expected


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_rows_of_int8_change_the_logprobs_a_little(kernels):
    """In chunks of another size and alone, a request has the same ones."""
    model = quantize(random_model(CONFIG), "int4")
    with few_shapes():
        plain = LLM(model, **ENGINE)
        rounding = LLM(model, activation_dtype="int8", kernels=kernels, **ENGINE)
    together = rounding.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, each in zip(PROMPTS, together):
        (alone,) = rounding.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == each.outputs[0].token_ids
        assert alone.outputs[0].logprobs == each.outputs[0].logprobs
    first = [[next(iter(each.outputs[0].logprobs[0].values())).logprob for each in llm.generate(
        PROMPTS, GREEDY, use_tqdm=False)] for llm in (plain, rounding)]  # fmt: skip
    assert 0 < np.abs(np.subtract(*first)).max() < 0.2
    assert rounding.engine.runner.numerics["activation_dtype"] == "int8"
    assert plain.engine.runner.numerics["activation_dtype"] == "float32"


@pytest.mark.deep
def test_a_model_of_4_bits_with_chunks_prefixes_and_preemption(directory):
    """A small pool and long prompts change neither tokens nor logprobs."""
    prompts = [[*range(60), *([7 * i] * 3)] for i in range(5)]

    def run(blocks: int):
        settings = ENGINE | dict(quantization="int4", num_gpu_blocks_override=blocks, max_num_batched_tokens=16)
        with few_shapes():
            llm = LLM(str(directory), **settings | {"max_model_len": 96})
        done = llm.generate(prompts, GREEDY, use_tqdm=False)
        found = [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob, one.num_cached_tokens) for one in done]
        return found, llm.engine.scheduler.num_preemptions

    (roomy, none), (tight, some) = run(200), run(36)
    assert none == 0 < some and sum(cached for *_, cached in roomy) > 0
    assert [each[:2] for each in tight] == [each[:2] for each in roomy]

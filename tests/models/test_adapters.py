"""Low-rank adapters in every architecture, beside checkpoints into which they are merged."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import pallas_kernels
from jpaged.models import registry
from jpaged.models.adapter_state import adapter_of
from jpaged.models.adapters import Adapter, Pair, attach, slots_form, write_slot
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.peft import CONFIG, TENSORS, places_of, read_adapter
from jpaged.rl.sequences import causal_attention
from tests.models.test_architectures import write
from tests.support.architectures import CASES

TOKENS, RANK = 12, 4
ALPHA = 6
# These multiply the last bits of layers: by norms, by recurrence.
TOLERANCE = dict.fromkeys(("gemma2-256", "qwen3.5", "qwen3.5-moe"), 5e-5)
CHEAP = ("phi3-long", "opt-350m", "qwen3.5", "qwen2-moe-dense", "gpt-oss")
NAMES = [pytest.param(name, marks=() if name in CHEAP else pytest.mark.deep) for name in CASES]
# In the usual tier, models have a layer of each of their kinds.
SHALLOW = {
    "phi3-long": {"num_hidden_layers": 1},
    "opt-350m": {"num_hidden_layers": 1},
    "qwen3.5": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen2-moe-dense": {"num_hidden_layers": 2, "max_window_layers": 1},
    "gpt-oss": {"num_hidden_layers": 2},
}


def write_adapter(directory, modules, *, rank=RANK, alpha=ALPHA, dtype=np.float32, seed=0, **fields):
    """A directory as PEFT saves it, for modules {name: (outputs, inputs)}; their matrices are returned."""
    rng, matrices = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in modules.items():
        a = rng.normal(size=(rank, inputs)) / inputs**0.5
        matrices[name] = a.astype(dtype), (0.2 * rng.normal(size=(outputs, rank))).astype(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": ["all-linear"]}
    (directory / CONFIG).write_text(json.dumps(config | fields))
    tensors = {
        f"base_model.model.{name}.lora_{matrix}.weight": array
        for name, pair in matrices.items() for matrix, array in zip("AB", pair)
    }  # fmt: skip
    save_file(tensors, directory / TENSORS)
    return matrices


def logits(model):
    return model.logits(model(np.arange(TOKENS) * 7 % 96, np.arange(TOKENS), causal_attention(model, 1, TOKENS)))


def functions_of(model, form, adapters):
    """Compiled functions of the state of a model: its logits, and those with the adapters of the rows' slots."""
    graphdef, filled = nnx.graphdef(model), form.empty()
    for number, adapter in enumerate(adapters):
        filled = write_slot(filled, form.padded(adapter), number)

    def adapted(state, filled, slots):
        model = nnx.merge(graphdef, state)
        attach(model, form, filled, slots, pallas_kernels.low_rank)
        return logits(model)

    adapted = jax.jit(adapted)
    whole = jax.jit(lambda state: logits(nnx.merge(graphdef, state)))
    return (lambda state: np.asarray(whole(state))), (
        lambda state, slot: np.asarray(adapted(state, filled, np.full(TOKENS, slot, np.int32)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_equals_the_merged_checkpoint(name, tmp_path):
    tensors = write(tmp_path, CASES[name] | SHALLOW.get(name, {}))
    config = registry.read_config(tmp_path).for_length(TOKENS)
    load = lambda: load_safetensors(tmp_path, config, Form("float32"), progress=False)
    model = load()
    form = slots_form(model, 3, RANK, "float32")
    shapes = {module: tensors[f"{module}.weight"].shape for module in places_of(config, form)}
    assert len(form.layers) >= len(shapes) > 3
    matrices = write_adapter(tmp_path / "adapter", shapes)
    adapter = read_adapter(tmp_path / "adapter", config, form)
    form.check(adapter)
    other = Adapter({layer: Pair(-a, b) for layer, (a, b) in adapter.pairs.items()}, adapter.scales)
    whole, adapted = functions_of(model, form, [other, adapter])
    state = nnx.state(model)
    base, found = whole(state), adapted(state, 1)
    np.testing.assert_array_equal(adapted(state, -1), base)
    for module, (a, b) in matrices.items():
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + ALPHA / RANK * b @ a
    save_file(tensors, tmp_path / "model.safetensors")
    merged = whole(nnx.state(load()))
    assert np.abs(merged - base).max() > 100 * np.abs(found - merged).max()
    np.testing.assert_allclose(found, merged, atol=TOLERANCE.get(name, 1e-5), rtol=1e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    write(directory, CASES["qwen2-window"])
    config = registry.read_config(directory).for_length(TOKENS)
    model = load_safetensors(directory, config, Form("float32"), progress=False)
    return config, slots_form(model, 2, RANK, "float32"), model


PROJECTIONS = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.2.mlp.down_proj": (64, 112)}


class TestPeft:
    def test_scales(self, small, tmp_path):
        config, form, _ = small
        scale = lambda layer, **fields: (
            write_adapter(tmp_path, PROJECTIONS, **fields),
            read_adapter(tmp_path, config, form).scales[layer],
        )[1]
        assert scale("layers.0.self_attn.q_proj") == ALPHA / RANK
        assert scale("layers.0.self_attn.q_proj", use_rslora=True) == ALPHA / RANK**0.5
        patterns = {"alpha_pattern": {"q_proj": 32}}
        assert scale("layers.0.self_attn.q_proj", **patterns) == 32 / RANK
        assert scale("layers.2.mlp.down_proj", **patterns) == ALPHA / RANK

    def test_bfloat16(self, small, tmp_path):
        config, form, _ = small
        matrices = write_adapter(tmp_path, PROJECTIONS, dtype=ml_dtypes.bfloat16)
        found = read_adapter(tmp_path, config, form).pairs["layers.0.self_attn.q_proj"]
        a, b = matrices["model.layers.0.self_attn.q_proj"]
        for array, expected in zip(found, (a, b.T), strict=True):
            assert array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(array, expected)

    @pytest.mark.parametrize(
        "fields, error",
        [
            ({"use_dora": True}, r"use_dora is True"),
            ({"bias": "all"}, r"bias is 'all'"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
            ({"peft_type": "IA3"}, r"peft_type is 'IA3'"),
            ({"r": 8}, r"has rank 4 in its tensors, and 8"),
            ({"lora_alpha": "x"}, r"lora_alpha must be a finite number"),
            ({"alpha_pattern": 3}, r"alpha_pattern must be an object"),
        ],
    )
    def test_refused_fields(self, small, tmp_path, fields, error):
        write_adapter(tmp_path, PROJECTIONS, **fields)
        with pytest.raises(ValueError, match=f"^adapter: .*{error}"):
            read_adapter(tmp_path, *small[:2])

    def test_refused_tensors(self, small, tmp_path):
        config, form, _ = small

        def error(modules) -> str:
            write_adapter(tmp_path, modules)
            with pytest.raises(ValueError, match=r"^adapter: ") as raised:
                form.check(read_adapter(tmp_path, config, form))
            return str(raised.value)

        assert "lm_head is no linear layer" in error({"lm_head": (96, 64)})
        assert "layers.0.self_attn.q_proj has A [4, 32] and B [64, 4], expected [r, 64] and [64, r]" in error(
            {"model.layers.0.self_attn.q_proj": (64, 32)}
        )
        write_adapter(tmp_path, PROJECTIONS, rank=RANK + 1)
        with pytest.raises(ValueError, match=r"has rank 5, more than max_lora_rank \(4\)$"):
            form.check(read_adapter(tmp_path, config, form))
        save_file({"base_model.model.x.lora_embedding_A": np.zeros((2, 2), np.float32)}, tmp_path / TENSORS)
        with pytest.raises(ValueError, match=r"lora_embedding_A is neither"):
            read_adapter(tmp_path, config, form)
        save_file({f"base_model.model.{next(iter(PROJECTIONS))}.lora_A.weight": np.zeros((4, 64), np.float32)},
                  tmp_path / TENSORS)  # fmt: skip
        with pytest.raises(ValueError, match=r"q_proj lacks lora_B$"):
            read_adapter(tmp_path, config, form)

    def test_pickles(self, small, tmp_path):
        write_adapter(tmp_path, PROJECTIONS)
        (tmp_path / TENSORS).rename(tmp_path / "adapter_model.bin")
        with pytest.raises(ValueError, match=r"no adapter_model.safetensors; files in PyTorch's format"):
            read_adapter(tmp_path, *small[:2])
        with pytest.raises(ValueError, match=r"has no adapter_config.json"):
            read_adapter(tmp_path / "nowhere", *small[:2])


class TestState:
    def test_of_a_trainers_module(self, small):
        """`nnx.LoRA` layers beside the linear layers that they change."""
        _, form, _ = small

        class Layer(nnx.Module):
            def __init__(self):
                self.q_proj = nnx.LoRALinear(64, 64, lora_rank=3, rngs=nnx.Rngs(0))

        class Trained(nnx.Module):
            def __init__(self):
                self.layers = nnx.List([nnx.Dict(self_attn=Layer())])

        module = Trained()
        adapter = adapter_of(module, scale=0.5)
        form.check(adapter)
        (pair,) = adapter.pairs.values()
        np.testing.assert_array_equal(pair.a, module.layers[0]["self_attn"].q_proj.lora.lora_a[...].T)
        assert dict(adapter.scales) == {"layers.0.self_attn.q_proj": 0.5}

    def test_errors(self, small):
        _, form, _ = small
        with pytest.raises(ValueError, match=r"^adapter: there are no arrays named lora_a and lora_b$"):
            adapter_of({"w": jnp.zeros(3)})
        with pytest.raises(ValueError, match=r"^adapter: x lacks lora_b$"):
            adapter_of({"x": {"lora_a": jnp.zeros((2, 3))}})
        with pytest.raises(ValueError, match=r"^adapter: must be a directory, .* not int$"):
            adapter_of(3)
        q_proj = {"lora_a": jnp.full((64, 2), jnp.nan), "lora_b": jnp.zeros((2, 64))}
        with pytest.raises(ValueError, match=r"not finite"):
            form.check(adapter_of({"layers": {"0": {"self_attn": {"q_proj": q_proj}}}}))

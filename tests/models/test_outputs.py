"""Modules with outputs of wrong shapes or dtypes are refused by name before anything is compiled."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged import LLM, ModelConfig
from jpaged.models.base import AttentionSpec
from jpaged.models.outputs import Outputs, outputs_of
from tests.runtime.test_runner import Compilations

CONFIG = ModelConfig(
    vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64,
)  # fmt: skip


class Toy(nnx.Module):
    """A module without layers' weights, with one change."""

    def __init__(self, **changed):
        self.config, self.changed = CONFIG, changed
        self.embedding = nnx.Param(jnp.ones((30, 16)))

    @property
    def attention_specs(self):
        return (AttentionSpec(0.5),) * 2

    def __call__(self, tokens_t, positions_t, attend):
        x_td = self.embedding[...][tokens_t]
        t = len(x_td)
        forms = {"q": ((4, 4), "float32"), "k": ((2, 4), "float32"), "v": ((2, 4), "float32"), "cos": None, "sin": None}
        forms |= {name: form for name, form in self.changed.items() if name in forms}
        arguments = [form and jnp.ones((t, *form[0]), form[1]) for form in forms.values()]
        for layer in self.changed.get("layers", (0, 1)):
            x_td = x_td + attend(layer, *arguments).reshape(t, -1)
        return x_td[: self.changed.get("tokens", t)]

    def logits(self, x_sd):
        return (x_sd @ self.embedding[...].T).astype(self.changed.get("logits", jnp.float32))


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"layers": (0,)}, r"must call attend for each of its layers, but layer 1 does not"),
        ({"layers": (0, 1, 1)}, r"must call attend once for each of its layers \(0 to 1\), not twice for layer 1"),
        ({"layers": (0, 1, 2)}, r"must call attend once for each of its layers \(0 to 1\), not for layer 2"),
        ({"k": ((4, 4), "float32")}, r"k of 4 tokens must be .* of the shape \[4, 2, 4\], .* float32 of \[4, 4, 4\]"),
        ({"v": ((2, 4), "int32")}, r"v of 4 tokens must be float32 or bfloat16 or float16 .* not int32"),
        ({"cos": ((2,), "bfloat16")}, r"cos of 4 tokens must be float32 of the shape \[4, 2\], .* bfloat16"),
        ({"tokens": 3}, r"its hidden states must be \[T, D\] \(\[4, D\]\), not \[3, 16\]"),
        ({"logits": jnp.bfloat16}, r"logits of 4 tokens must be float32 of the shape \[4, 30\], .* not bfloat16"),
    ],
)  # fmt: skip
def test_a_module_that_computes_something_else_is_refused(changed, told, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    with pytest.raises(ValueError, match=f"^model: {told}"):
        LLM(Toy(**changed), progress=False)


def test_the_dtypes_of_layers_are_promoted():
    """Those of q, k and v together, as the sum of a bfloat16 layer and a float32 adapter has float32."""
    narrow = {"q": ((4, 4), "bfloat16"), "k": ((2, 4), "bfloat16"), "v": ((2, 4), "bfloat16")}
    for changed, dtype in ((narrow | {"v": ((2, 4), "float32")}, "float32"), (narrow, "bfloat16")):
        module = Toy(**changed)
        assert outputs_of(lambda _, module=module: module, (), CONFIG) == Outputs(dtype, 16, "float32")


@pytest.mark.parametrize(
    "value, told", [(None, "must have parameters"), (1.0, "embedding must be a jax.Array, not float")]
)
def test_a_module_without_arrays_is_refused(value, told):
    module = Toy()
    module.embedding = nnx.Variable(jnp.ones(2)) if value is None else nnx.Param(value)
    with Compilations() as compilations, pytest.raises(ValueError, match=f"^model: {told}"):
        LLM(module, progress=False)
    assert compilations.count == 0

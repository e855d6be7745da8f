"""Parameters by name, and the refusal of those that differ."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.config import ModelConfig
from jpaged.core.plan import ParamsDeleted
from jpaged.models.checkpoint import dummy_model, on_one_device
from jpaged.models.fused import fuse, joints_of
from jpaged.runtime.parameters import ModuleArrays, by_name, check, described, explain_deletion, placed
from jpaged.runtime.placement import Placement
from tests import models

CONFIG = ModelConfig.from_hf(models.TINY)
NORM = "layers.1.input_layernorm.scale"


@pytest.fixture(scope="module")
def model():
    return dummy_model(CONFIG, "float32", seed=0)


@pytest.fixture
def expected(model):
    return described(nnx.state(model), Placement.on(jax.devices()[:1], CONFIG))


@pytest.fixture
def leaves(model):
    return by_name(model)


def nested(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(int(parent) if parent.isdigit() else parent, {})
        at[last] = leaf
    return tree


@pytest.mark.parametrize("form", [lambda m: m, nnx.state, lambda m: nnx.to_pure_dict(nnx.state(m))])
def test_a_module_its_state_and_nested_dicts_have_the_same_leaves(model, leaves, form):
    found = by_name(form(model))
    assert list(found) == list(leaves) and all(found[name] is leaves[name] for name in leaves)
    assert [leaf is other for leaf, other in zip(jax.tree.leaves(nnx.split(model)[1]), leaves.values(), strict=True)]
    assert "layers.1.self_attn.q_proj.weight" in found


def test_arrays_keep_their_memory_and_the_order_that_is_expected(leaves, expected):
    found = placed(nested(dict(reversed(leaves.items()))), expected)
    assert [array.unsafe_buffer_pointer() for array in found] == [
        leaf.unsafe_buffer_pointer() for leaf in leaves.values()
    ]
    assert all(array.committed for array in found)
    backwards = placed(nested(leaves), dict(reversed(expected.items())))
    assert [array.shape for array in backwards] == [leaf.shape for leaf in reversed(leaves.values())]


@pytest.mark.parametrize(
    "changed, told",
    [
        ({NORM: None}, "is missing"),
        ({"layers.2.input_layernorm.scale": jnp.ones(64)}, "is not a parameter of the model"),
        ({NORM: np.ones(64, np.float32)}, "must be a jax.Array, not ndarray"),
        ({NORM: jnp.ones(65)}, r"has the shape \[65\], not \[64\]"),
        ({NORM: jnp.ones((1, 64))}, r"has the shape \[1, 64\], not \[64\]"),
        ({NORM: jnp.ones(64, jnp.bfloat16)}, "is bfloat16, not float32"),
        ({NORM: jnp.ones(64, jnp.int32)}, "is int32, not float32"),
        ({NORM: None, "a": jnp.ones(64)}, "is missing"),
    ],
)
def test_the_first_difference_is_named(leaves, expected, changed, told):
    other = {name: leaf for name, leaf in (leaves | changed).items() if leaf is not None}
    with pytest.raises(ValueError, match=rf"^params: {next(iter(changed))} {told}$"):
        check(nested(other), expected)


def test_deleted_arrays_are_refused_and_named(leaves, expected):
    gone = jnp.ones(64)
    gone.delete()
    with pytest.raises(ValueError, match=f"^params: {NORM} was deleted, as a train step"):
        check(nested(leaves | {NORM: gone}), expected)
    told = r"^params: .* were deleted, .* update_params, .* without donation$"
    with pytest.raises(ParamsDeleted, match=told), explain_deletion([gone]):
        gone.block_until_ready()
    with pytest.raises(ParamsDeleted, match=told), explain_deletion([jnp.ones(2), gone]):
        gone.block_until_ready()
    with pytest.raises(RuntimeError, match=r"^another$"), explain_deletion([jnp.ones(2)]):
        raise RuntimeError("another")


@pytest.mark.parametrize("num_devices, spec, shared", [(1, P(), True), (1, P("x"), True), (2, P("x"), False)])
def test_arrays_of_another_mesh_share_memory_if_they_lie_in_the_same_way(
    leaves, expected, num_devices, spec, shared, caplog
):
    caplog.set_level("INFO", "jpaged.runtime.parameters")
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], "x")
    moved = jax.device_put(leaves[NORM], jax.NamedSharding(mesh, spec))
    found = dict(zip(expected, placed(nested(leaves | {NORM: moved}), expected)))[NORM]
    assert found.sharding == expected[NORM].sharding and found.tolist() == leaves[NORM].tolist()
    pointers = [shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards]
    assert (found.unsafe_buffer_pointer() in pointers) == shared
    told = f"params: 1 of {len(expected)} arrays lie otherwise than the engine's, and are copied"
    assert caplog.messages == ([] if shared else [told])


@pytest.mark.parametrize("dtype, quantization", [(jnp.int8, "int8"), (jnp.float8_e4m3fn, "fp8")])
def test_what_is_to_be_quantized_is_told(leaves, expected, dtype, quantization):
    other = expected | {NORM: jax.ShapeDtypeStruct((64,), dtype)}
    told = rf": pass the model through jpaged\.quantize\(model, '{quantization}'\)$"
    with pytest.raises(ValueError, match=f"^params: {NORM} is float32, not {jnp.dtype(dtype)}{told}"):
        check(nested(leaves), other)


@pytest.fixture
def fused(model):
    copied = nnx.merge(*nnx.split(model))
    fuse(copied, on_one_device)
    return copied


def test_separate_leaves_become_those_that_replace_them(model, fused):
    """In the order of the joint; a leaf that is fused already is taken as it is."""
    expected, joints = described(nnx.state(fused), Placement.on(jax.devices()[:1], CONFIG)), joints_of(fused)
    assert len(joints) == 2 * CONFIG.num_hidden_layers
    own = list(by_name(fused).values())
    for array, other in zip(placed(model, expected, joints), own, strict=True):
        np.testing.assert_array_equal(array, other)
    again = placed(fused, expected, joints)
    assert [array.unsafe_buffer_pointer() for array in again] == [array.unsafe_buffer_pointer() for array in own]
    name = "layers.1.self_attn.k_proj.weight"
    narrow = by_name(model) | {name: by_name(model)[name].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match=f"^params: {name} is bfloat16, not float32$"):
        placed(nested(narrow), expected, joints)


def test_a_module_has_changed_once_any_of_its_arrays_has():
    module = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)))
    arrays = ModuleArrays(module)
    assert not arrays.has_changed
    module.b[...] = jnp.ones(2)
    assert arrays.has_changed
    arrays.mark()
    assert not arrays.has_changed
    seen = weakref.ref(module.a.get_value())
    module.a.set_value(jnp.zeros(2))
    gc.collect()
    assert arrays.has_changed and seen() is None, "the former array is not kept alive"

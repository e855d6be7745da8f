"""Parameters by name, and the refusal of those that differ."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.core.plan import ParamsDeleted
from jpaged.models.checkpoint import on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.runtime.parameters import ModuleArrays, ParamTree, by_name, explain_deletion
from jpaged.runtime.placement import Placement
from tests.runtime.test_runner import Compilations
from tests.support import models
from tests.support.random_model import random_model
from tests.support.trees import nested

CONFIG = ModelConfig.from_hf(models.TINY)
NORM = "layers.1.input_layernorm.scale"


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, "float32", seed=0)


def tree_of(model, **options):
    return ParamTree(model, Placement.on(jax.devices()[:1], CONFIG), **options)


@pytest.fixture
def tree(model):
    return tree_of(model)


@pytest.fixture
def leaves(model):
    return by_name(model)


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


@pytest.mark.parametrize("form", [lambda m: m, nnx.state, lambda m: nnx.to_pure_dict(nnx.state(m))])
def test_a_module_its_state_and_nested_dicts_have_the_same_leaves(model, leaves, form):
    found = by_name(form(model))
    assert list(found) == list(leaves) and all(found[name] is leaves[name] for name in leaves)
    assert [leaf is other for leaf, other in zip(jax.tree.leaves(nnx.split(model)[1]), leaves.values(), strict=True)]
    assert "layers.1.self_attn.q_proj.weight" in found


def test_arrays_keep_their_memory_and_the_order_that_is_expected(leaves, tree):
    found = tree.place(nested(dict(reversed(leaves.items()))))
    assert pointers(found) == pointers(leaves.values())
    assert all(array.committed for array in found)
    tree.expected = dict(reversed(tree.expected.items()))
    assert [array.shape for array in tree.place(nested(leaves))] == [leaf.shape for leaf in reversed(leaves.values())]


def test_a_part_of_the_parameters_leaves_the_others_as_they_are(leaves, tree):
    present, part = tree.place(nested(leaves)), {NORM: jnp.zeros(64)}
    found = dict(zip(tree.expected, tree.place(nested(part), present)))
    assert pointers(found.values()) == pointers((leaves | part).values())
    with pytest.raises(ValueError, match=r"^params: embed_tokens.embedding is missing$"):
        tree.place(nested(part))
    gone = [array.copy() for array in present]
    gone[1].delete()
    with pytest.raises(ValueError, match=f"^params: {list(leaves)[1]} is missing$"):
        tree.place(nested(part), gone)


@pytest.mark.parametrize("path", ["gpt", "inner.gpt"])
def test_a_trainers_own_tree_is_that_below_the_declared_path(path):
    """Even if the trainer's module has a part of the same name as the path."""
    trained = nnx.Dict(gpt=nnx.Dict(w=nnx.Param(jnp.ones(2)), calls=nnx.Variable(0)), head=nnx.Param(jnp.ones(3)))
    wrapper = trained
    for name in reversed(path.split(".")):
        wrapper = nnx.Dict({name: wrapper})
    wrapper.trained_path = path
    tree, other = tree_of(wrapper), jax.tree.map(jnp.zeros_like, nnx.state(trained))
    present = tree.place(wrapper)
    for source in (other, nnx.to_pure_dict(other), wrapper):
        wanted = wrapper if source is wrapper else other
        assert pointers(tree.place(source, present)) == pointers(by_name(nnx.state(wanted, nnx.Param)).values())
    for part in ({"head": other["head"]}, {"gpt": {"w": other["gpt"]["w"]}}):
        assert len(tree.place(part, present)) == 2
    with pytest.raises(ValueError, match=rf"^params: {path}\.gpt\.b is not a parameter of the model$"):
        tree.place({"gpt": {"b": jnp.ones(2)}}, present)
    wrapper.trained_path = "model"
    with pytest.raises(ValueError, match=r"^trained_path: no parameter of the module lies below 'model'$"):
        tree_of(wrapper)


def test_other_variables_than_parameters_are_carried_and_never_refused(caplog):
    module = nnx.Dict(
        w=nnx.Param(jnp.ones(2)), lora=nnx.LoRAParam(jnp.ones(3)), drop=nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
        calls=nnx.Variable(0), cache=nnx.Cache(jnp.ones((2, 4))),
    )  # fmt: skip
    tree = tree_of(module, allow_copy=False)
    assert list(tree.expected) == ["lora", "w"] and len(tree.carried) == 4
    present, before = tree.place(module), dict(tree.carried)
    assert before["cache"].unsafe_buffer_pointer() == module.cache[...].unsafe_buffer_pointer()
    module.drop(jnp.ones(2))
    module.cache.set_value(jnp.ones((3, 4)))
    module.extra = nnx.BatchStat(jnp.ones(2))
    for source in (module, nnx.state(module), nnx.state(module, nnx.Param), {"w": module.w[...]}):
        assert pointers(tree.place(source, present)) == pointers(present)
    assert tree.carried["drop.rngs.count"] == 1 and tree.carried["cache"] is before["cache"]
    assert tree.merge([*present, *tree.carried.values()]).lora[...] is present[0]


def test_parameters_are_cast_into_the_same_memory_by_one_program():
    module = nnx.Dict(w=nnx.Param(jnp.ones((64, 8))), lora=nnx.LoRAParam(jnp.ones(3, jnp.bfloat16)))
    tree = tree_of(module, dtype="bfloat16")
    present = tree.place(module)
    assert {str(array.dtype) for array in present} == {"bfloat16"}
    assert present[0].unsafe_buffer_pointer() == module.lora[...].unsafe_buffer_pointer()
    module.w[...] = 1 / jnp.arange(1, 513, dtype=jnp.float32).reshape(64, 8)
    before = pointers(present)
    with Compilations() as compilations:
        after = tree.place(module, present)
    assert compilations.count == 0 and pointers(after) == before and present[1].is_deleted()
    np.testing.assert_array_equal(after[1], module.w[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"^params: w is bfloat16, not float32$"):
        tree.place({"w": after[1]}, after)
    told = r"^params: 1 of 2 arrays \(first: w\) are copied, 1,024 bytes, .*; allow_copy=False forbids that"
    with pytest.raises(ValueError, match=told):
        tree_of(module, dtype="bfloat16", allow_copy=False).place(module)


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
def test_the_first_difference_is_named(leaves, tree, changed, told):
    other = {name: leaf for name, leaf in (leaves | changed).items() if leaf is not None}
    with pytest.raises(ValueError, match=rf"^params: {next(iter(changed))} {told}$"):
        tree.check(nested(other))


def test_deleted_arrays_are_refused_and_named(leaves, tree):
    gone = jnp.ones(64)
    gone.delete()
    with pytest.raises(ValueError, match=f"^params: {NORM} was deleted, as a train step"):
        tree.check(nested(leaves | {NORM: gone}))
    told = r"^params: .* were deleted, .* update_params, .* without donation$"
    with pytest.raises(ParamsDeleted, match=told), explain_deletion([gone]):
        gone.block_until_ready()
    with pytest.raises(ParamsDeleted, match=told), explain_deletion([jnp.ones(2), gone]):
        gone.block_until_ready()
    with pytest.raises(RuntimeError, match=r"^another$"), explain_deletion([jnp.ones(2)]):
        raise RuntimeError("another")


@pytest.mark.parametrize("num_devices, spec, shared", [(1, P(), True), (1, P("x"), True), (2, P("x"), False)])
def test_arrays_of_another_mesh_share_memory_if_they_lie_in_the_same_way(
    leaves, tree, num_devices, spec, shared, caplog
):
    caplog.set_level("INFO", "jpaged.runtime.parameters")
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], "x")
    moved = jax.device_put(leaves[NORM], jax.NamedSharding(mesh, spec))
    source = nested(leaves | {NORM: moved})
    found = dict(zip(tree.expected, tree.place(source)))[NORM]
    tree.place(source)
    assert found.sharding == tree.expected[NORM].sharding and found.tolist() == leaves[NORM].tolist()
    pointers = [shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards]
    assert (found.unsafe_buffer_pointer() in pointers) == shared
    told = (
        f"params: 1 of {len(leaves)} arrays (first: {NORM}) are copied, 256 bytes, as the engine has them in another "
    )
    assert [message[: len(told)] for message in caplog.messages] == ([] if shared else [told]), "once"


@pytest.mark.parametrize("dtype, quantization", [(jnp.int8, "int8"), (jnp.float8_e4m3fn, "fp8")])
def test_what_is_to_be_quantized_is_told(leaves, tree, dtype, quantization):
    tree._module_params[NORM] = jax.ShapeDtypeStruct((64,), dtype)
    told = rf": pass the model through jpaged\.quantize\(model, '{quantization}'\)$"
    with pytest.raises(ValueError, match=f"^params: {NORM} is float32, not {jnp.dtype(dtype)}{told}"):
        tree.check(nested(leaves))


@pytest.fixture
def fused(model):
    copied = nnx.merge(*nnx.split(model))
    fuse(copied, on_one_device)
    return copied


def test_separate_leaves_become_those_that_replace_them(model, fused):
    """In the order of the joint; a leaf that is fused already is taken as it is."""
    tree = tree_of(fused)
    assert len(tree.joints) == 2 * CONFIG.num_hidden_layers
    own = list(by_name(fused).values())
    for array, other in zip(tree.place(model), own, strict=True):
        np.testing.assert_array_equal(array, other)
    present = tree.place(fused)
    assert pointers(present) == pointers(own)
    with pytest.raises(ValueError, match=r"allow_copy=False forbids that"):
        tree_of(fused, allow_copy=False).check(model)
    name = "layers.1.self_attn.k_proj.weight"
    narrow = by_name(model) | {name: by_name(model)[name].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match=f"^params: {name} is bfloat16, not float32$"):
        tree.place(nested(narrow))
    part = {each: leaf for each, leaf in by_name(model).items() if "layers.1.self_attn" in each}
    assert len(tree.place(nested(part), present)) == len(own)
    part.pop(name)
    with pytest.raises(ValueError, match=f"^params: {name} is missing$"):
        tree.place(nested(part), present)


def test_a_module_has_changed_once_any_of_its_parameters_has():
    module = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2)), calls=nnx.Variable(jnp.array(0)))
    arrays = ModuleArrays(module)
    module.calls.set_value(jnp.array(1))
    assert not arrays.has_changed
    module.b[...] = jnp.ones(2)
    assert arrays.has_changed
    arrays.mark()
    assert not arrays.has_changed
    seen = weakref.ref(module.a.get_value())
    module.a.set_value(jnp.zeros(2))
    gc.collect()
    assert arrays.has_changed and seen() is None, "the former array is not kept alive"

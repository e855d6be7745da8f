"""Parameters of a model by name, and their exchange for others of the same tree, shapes and dtypes."""

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jpaged.config import DTYPES
from jpaged.core.plan import ParamsDeleted
from jpaged.models.fused import joiner, joints_of
from jpaged.models.layers import MINIMUM, SCALE, Embedding
from jpaged.models.quantized import FORMATS, check_groups
from jpaged.runtime.placement import Placement

logger = logging.getLogger(__name__)


def by_name(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by name, such as `layers.0.mlp.up_proj.weight`, in the order of its pytree.

    Args:
        state: an `nnx.Module`, an `nnx.State`, or nested dicts of arrays or variables.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    if isinstance(state, nnx.State):
        state = nnx.to_pure_dict(state)
    value = lambda leaf: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    state = jax.tree.map(value, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


class ParamTree:
    """Parameters of a served module by name, and their exchange for others.

    Parameters are the variables of the type `nnx.Param`. The module's other variables, such as random keys, counters,
    statistics and caches, are carried: steps take them as they are and write nothing back.

    Args:
        dtype: the dtype that parameters of another floating-point dtype are cast to. Layers without a dtype compute in
            it. None: each parameter keeps its dtype.
        allow_copy: whether parameters may be copied, or lie whole on each of several devices.

    Attributes:
        expected: shape, dtype and sharding of each parameter in steps, in the order of the pytree.
        carried: arrays of the other variables.
        joints: the result of `joints_of`.

    Raises:
        ValueError: no parameter lies below the model's `trained_path`, or `allow_copy` is False and all parameters lie
            whole on each of several devices.
    """

    def __init__(self, model: Any, placement: Placement, *, dtype: str | None = None, allow_copy: bool = True):
        split: Any = nnx.split(_embedding_in(dtype, model) if dtype else model, nnx.Param, ...)
        self.graphdef, params, others = split
        self.treedef = jax.tree.structure([params, others])
        self._prefix = f"{model.trained_path}." if hasattr(model, "trained_path") else ""
        if not any(name.startswith(self._prefix) for name in by_name(params)):
            raise ValueError(f"trained_path: no parameter of the module lies below {model.trained_path!r}")
        self._module_params = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in by_name(params).items()}
        leaves = dict(nnx.to_flat_state(params))
        check_groups(leaves, placement.of)
        shardings = {".".join(map(str, path)): placement.of(leaf) for path, leaf in leaves.items()}
        self.expected = {
            name: jax.ShapeDtypeStruct(x.shape, _served_dtype(name, str(x.dtype), dtype), sharding=shardings[name])
            for name, x in self._module_params.items()
        }
        self.joints = joints_of(model)
        self.carried = {name: jnp.asarray(leaf) for name, leaf in by_name(others).items()}
        devices, whole = set(placement.devices), placement.whole
        self._places = {
            name: leaf.sharding if leaf.sharding.device_set == devices else whole for name, leaf in self.carried.items()
        }
        self._carry(self.carried)
        self._allow_copy, self._logged = allow_copy, set[str]()
        if placement.size > 1 and all(leaf.sharding.is_fully_replicated for leaf in self.expected.values()):
            once = sum(map(_nbytes, self.expected.values())) // placement.size
            self._warn_once(
                f"all {len(self.expected)} arrays (first: {next(iter(self.expected))}) lie whole on each of "
                f"{placement.size} devices, {once * (placement.size - 1):,} bytes more than on one, because no axis of "
                "theirs is named heads, kv_heads, mlp or vocab (out_sharding)"
            )

    def merge(self, leaves: Iterable[Any]) -> Any:
        """Return the module with other arrays: parameters in the order of `expected`, then those of `carried`."""
        return nnx.merge(self.graphdef, *jax.tree.unflatten(self.treedef, leaves))

    def check(self, source: Any, present: Sequence[jax.Array] = ()) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Return the parameters of a source and its other variables, by the module's names.

        Args:
            source: as in `by_name`: the module's tree, that of its `trained_path`, or a part of either. In place of a
                fused leaf it may hold those that this replaces.
            present: the parameters that a missing one is left at, in the order of `expected`, or none.

        Raises:
            ValueError: a name is unknown, a parameter is missing, a shape or a dtype differs, an array was deleted, or
                one must be copied and `allow_copy` is False. The message has the first difference.
        """
        params, others = self._read(source)
        if not params:
            raise ValueError("params: must have parameters of the model, and has none")
        wanted = dict(self._module_params)
        for name, joint in self.joints.items():
            dtype = wanted[name].dtype
            wanted |= {each: jax.ShapeDtypeStruct(shape, dtype) for each, shape in zip(joint.names, joint.shapes)}
        kept = {name for name, array in zip(self.expected, present) if not array.is_deleted()}
        for name in self.expected:
            parts = self.joints[name].names if name in self.joints else ()
            needed = parts if params.keys() & set(parts) else (name,)
            if missing := [each for each in needed if each not in params and each not in kept]:
                raise ValueError(f"params: {missing[0]} is missing")
        for name, leaf in params.items():
            if problem := _problem(leaf, wanted.get(name)):
                raise ValueError(f"params: {name} {problem}")
        if copied := [name for name, leaf in params.items() if not _lies_as(leaf, self.expected.get(name))]:
            size = sum(_nbytes(self.expected.get(name, params[name])) for name in copied)
            self._warn_once(
                f"{len(copied)} of {len(self.expected)} arrays (first: {copied[0]}) are copied, {size:,} bytes, as the "
                "engine has them in another layout or dtype, or on other devices"
            )
        return params, others

    def place(self, source: Any, present: Sequence[jax.Array] = ()) -> list[jax.Array]:
        """Return parameters in the order of `expected`, and carry the other variables; arguments and errors of `check`.

        Arrays of the source with the expected placement, under any mesh, share their memory with the result. They get
        the expected form of the sharding, because an executable is compiled for one form. Fused leaves are made in new
        memory. Parameters that are cast take the memory of the present ones, which are deleted.
        """
        params, others = self.check(source, present)
        self._carry(others)
        for name, joint in self.joints.items():
            if name not in params and joint.names[0] in params:
                replaced = [params.pop(each) for each in joint.names]
                params[name] = joiner(joint._replace(names=()), self.expected[name].sharding)(replaced)
        kept = dict(zip(self.expected, present))
        places = {name: leaf.sharding for name, leaf in self.expected.items()}
        arrays = kept | params
        placed = dict(zip(places, jax.device_put([arrays[name] for name in places], list(places.values()))))
        if cast := {name: leaf for name, leaf in self.expected.items() if placed[name].dtype != leaf.dtype}:
            buffers = [
                kept[name] if _lies_as(kept.get(name), leaf) else jnp.zeros(leaf.shape, leaf.dtype, device=places[name])
                for name, leaf in cast.items()
            ]
            convert = caster(tuple(places[name] for name in cast))
            placed |= dict(zip(cast, convert([placed[name] for name in cast], buffers)))
        return list(placed.values())

    def _read(self, source: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parameters of a source and its other variables, by the module's names as far as it has them."""
        source = nnx.state(source) if isinstance(source, nnx.Module) else source
        params = by_name(source)
        leaves = nnx.to_flat_state(source) if isinstance(source, nnx.State) else ()
        others = {}
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
                name = ".".join(map(str, path))
                others[name] = params.pop(name)
        if not params.keys() & self._module_params.keys():
            params, others = ({self._prefix + name: leaf for name, leaf in each.items()} for each in (params, others))
        return params, others | {name: params.pop(name) for name in self.carried.keys() & params.keys()}

    def _carry(self, others: Mapping[str, Any]) -> None:
        """Take the variables of the same form as the carried ones."""
        for name, leaf in others.items():
            old, new = self.carried.get(name), jnp.asarray(leaf)
            if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype) and not new.is_deleted():
                self.carried[name] = jax.device_put(new, self._places[name])

    def _warn_once(self, text: str) -> None:
        """Log a warning about copied parameters, once.

        Raises:
            ValueError: `allow_copy` is False.
        """
        if not self._allow_copy:
            raise ValueError(f"params: {text}; allow_copy=False forbids that")
        if text not in self._logged:
            logger.warning("params: %s", text)
            self._logged.add(text)


@cache
def caster(shardings: tuple[Sharding, ...]) -> Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]:
    """Return a function that casts arrays into the memory of others, which are deleted; both lie in these places."""

    def cast(arrays: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
        return [array.astype(other.dtype) for array, other in zip(arrays, others)]

    # An argument that is not used is dropped by default, and its memory with it.
    return jax.jit(cast, donate_argnums=1, keep_unused=True, out_shardings=list(shardings))


class ModuleArrays:
    """Module that a trainer may change, and its parameters at the last `mark`, which are not kept alive."""

    def __init__(self, module: Any):
        self.module = module
        # Reading the state of a module with 300 parameters takes 50 ms; reading its variables takes 2 ms.
        params = nnx.state(module, nnx.Param)
        self._variables = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self.mark()

    def mark(self) -> None:
        """Remember the present parameters."""
        self._seen = [weakref.ref(variable.get_value()) for variable in self._variables]

    @property
    def has_changed(self) -> bool:
        """Whether the module has other parameters than at the last `mark`."""
        return any(variable.get_value() is not seen() for variable, seen in zip(self._variables, self._seen))


@contextlib.contextmanager
def explain_deletion(params: Iterable[jax.Array]) -> Iterator[None]:
    """Raise ParamsDeleted if a computation fails because an array of the module was deleted."""
    try:
        yield
    except RuntimeError as error:
        if "deleted" not in str(error) or not any(array.is_deleted() for array in params):
            raise
        raise ParamsDeleted(
            "params: the engine's arrays were deleted, as by a train step that donates them; pass the new arrays to "
            "update_params, or write them into the module that the engine was built from, or train without donation"
        ) from error


def _embedding_in(dtype: str, model: Any) -> Any:
    """Return a module with the same arrays whose embeddings are in a dtype, unless they were given another one.

    Without a dtype, an `nnx.Embed` takes that of its parameter when it is made. Other layers have None.
    """
    copied = nnx.merge(*nnx.split(model))
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(copied))
    for _, layer in modules:
        is_default = isinstance(layer, nnx.Embed) and layer.dtype == layer.embedding.dtype
        if is_default or isinstance(layer, Embedding):
            layer.dtype = jnp.dtype(dtype)
    return copied


def _served_dtype(name: str, module_dtype: str, dtype: str | None) -> str:
    """Return the dtype of a parameter in steps, which is `dtype` unless it belongs to a quantized weight."""
    return dtype if dtype and module_dtype in DTYPES and not name.endswith((SCALE, MINIMUM)) else module_dtype


def _lies_as(leaf: Any, expected: jax.ShapeDtypeStruct | None) -> bool:
    """Return whether an array has this form and place; None has none."""
    if leaf is None or expected is None or leaf.dtype != expected.dtype:
        return False
    return bool(leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)) and not leaf.is_deleted()


def _nbytes(leaf: Any) -> int:
    """Return the bytes of an array on all of its devices."""
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * int(leaf.dtype.itemsize) * len(leaf.sharding.device_set)


def _problem(leaf: Any, expected: jax.ShapeDtypeStruct | None) -> str | None:
    """Return the difference between a leaf and the expected one; None if there is none."""
    if expected is None:
        return "is not a parameter of the model"
    if not isinstance(leaf, jax.Array):
        return f"must be a jax.Array, not {type(leaf).__name__}"
    quantization = {form.dtype: name for name, form in FORMATS.items()}.get(str(expected.dtype))
    if leaf.dtype == expected.dtype or quantization is None:
        hint = ""
    else:
        hint = f": pass the model through jpaged.quantize(model, {quantization!r})"
    if leaf.shape != expected.shape:
        return f"has the shape {list(leaf.shape)}, not {list(expected.shape)}{hint}"
    if leaf.dtype != expected.dtype:
        return f"is {leaf.dtype}, not {expected.dtype}{hint}"
    if leaf.is_deleted():
        return "was deleted, as a train step deletes its donated arguments: pass the new arrays"
    return None

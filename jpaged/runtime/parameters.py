"""Parameters of a model by name, and their exchange for others of the same tree, shapes and dtypes."""

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from jpaged.config import QUANTIZATIONS
from jpaged.core.plan import ParamsDeleted
from jpaged.models.fused import Joint, joiner
from jpaged.runtime.placement import Placement

logger = logging.getLogger(__name__)


def by_name(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by name, such as `layers.0.mlp.up_proj.weight`, in the order of its pytree.

    Args:
        state: an `nnx.Module`, an `nnx.State`, or nested dicts of arrays, as `nnx.to_pure_dict` returns them.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    if isinstance(state, nnx.State):
        state = nnx.to_pure_dict(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def described(state: nnx.State[Any, Any], placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and sharding of each parameter by name, in the order of the state's pytree."""
    shardings = {".".join(map(str, path)): placement.of(variable) for path, variable in nnx.to_flat_state(state)}
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in by_name(state).items()
    }


def check(
    state: Any, expected: Mapping[str, jax.ShapeDtypeStruct], joints: Mapping[str, Joint] | None = None
) -> dict[str, jax.Array]:
    """Return the arrays of a state by name.

    Args:
        state: as in `by_name`.
        expected: the result of `described`.
        joints: the result of `joints_of`. In place of a leaf of these a state may hold those that it replaces.

    Raises:
        ValueError: the tree, a shape or a dtype differs, or an array was deleted; the message has the first difference.
    """
    found, wanted = by_name(state), dict(expected)
    for name, joint in (joints or {}).items():
        if name not in found:
            dtype = wanted.pop(name).dtype
            wanted |= {each: jax.ShapeDtypeStruct(shape, dtype) for each, shape in zip(joint.names, joint.shapes)}
    for name in itertools.chain(wanted, found):
        if problem := _problem(name, found, wanted):
            raise ValueError(f"params: {name} {problem}")
    return found


def placed(
    state: Any, expected: Mapping[str, jax.ShapeDtypeStruct], joints: Mapping[str, Joint] | None = None
) -> list[jax.Array]:
    """Return the arrays of a state in the order of `expected`, with its shardings; arguments and errors of `check`.

    They share the memory of the state's own arrays wherever these lie in the same way, under any mesh. An executable is
    compiled for one form of a sharding, and for arrays that are bound to their devices or are not. Leaves that replace
    others are made of them, in new memory.
    """
    by_path = check(state, expected, joints)
    for name, joint in (joints or {}).items():
        if name not in by_path:
            replaced = [by_path[each] for each in joint.names]
            by_path[name] = joiner(joint._replace(names=()), expected[name].sharding)(replaced)
    found, shardings = [by_path[name] for name in expected], [leaf.sharding for leaf in expected.values()]
    if moved := sum(not x.sharding.is_equivalent_to(place, x.ndim) for x, place in zip(found, shardings)):
        logger.info("params: %d of %d arrays lie otherwise than the engine's, and are copied", moved, len(found))
    arrays: list[jax.Array] = jax.device_put(found, shardings)
    return arrays


class ModuleArrays:
    """Module that a trainer may change, and its arrays at the last `mark`, which are not kept alive."""

    def __init__(self, module: Any):
        self.module = module
        # Reading the state of a module with 300 parameters takes 50 ms; reading its variables takes 2 ms.
        self._variables = jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self.mark()

    def mark(self) -> None:
        """Remember the present arrays."""
        self._seen = [weakref.ref(variable.get_value()) for variable in self._variables]

    @property
    def has_changed(self) -> bool:
        """Whether the module has other arrays than at the last `mark`."""
        return any(variable.get_value() is not seen() for variable, seen in zip(self._variables, self._seen))


WAYS_OUT = (
    "params: the engine's arrays were deleted, as by a train step that donates them; pass the new arrays to "
    "update_params, or write them into the module that the engine was built from, or train without donation"
)


@contextlib.contextmanager
def explain_deletion(params: Iterable[jax.Array]) -> Iterator[None]:
    """Raise ParamsDeleted if a computation fails because a parameter was deleted."""
    try:
        yield
    except RuntimeError as error:
        if not any(array.is_deleted() for array in params):
            raise
        raise ParamsDeleted(WAYS_OUT) from error


def _problem(name: str, found: Mapping[str, Any], expected: Mapping[str, jax.ShapeDtypeStruct]) -> str | None:
    """Return the difference between a leaf and the expected one; None if there is none."""
    if name not in found or name not in expected:
        return "is missing" if name in expected else "is not a parameter of the model"
    leaf, other = found[name], expected[name]
    if not isinstance(leaf, jax.Array):
        return f"must be a jax.Array, not {type(leaf).__name__}"
    if leaf.shape != other.shape:
        return f"has the shape {list(leaf.shape)}, not {list(other.shape)}"
    if leaf.dtype != other.dtype:
        quantization = {dtype: name for name, dtype in QUANTIZATIONS.items()}.get(str(other.dtype))
        hint = f": pass the model through jpaged.quantize(model, {quantization!r})" if quantization else ""
        return f"is {leaf.dtype}, not {other.dtype}{hint}"
    if leaf.is_deleted():
        return "was deleted, as a train step deletes its donated arguments: pass the new arrays"
    return None

"""Parameters of a model by name, and their exchange for others of the same tree, shapes and dtypes."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from jpaged.runtime.placement import Placement


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


def checked(state: Any, expected: Mapping[str, jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return the arrays of a state in the order of `expected`. They share the memory of the state's own arrays.

    Args:
        state: as in `by_name`.
        expected: the result of `described`.

    Raises:
        ValueError: the tree, a shape or a dtype differs, or an array was deleted or lies elsewhere; the message has the
            first difference.
    """
    found = by_name(state)
    for name in itertools.chain(expected, found):
        if problem := _problem(name, found, expected):
            raise ValueError(f"params: {name} {problem}")
    # An executable is compiled for one form of a sharding, and for arrays that are bound to their devices or are not.
    shardings = [leaf.sharding for leaf in expected.values()]
    placed: list[jax.Array] = jax.device_put([found[name] for name in expected], shardings)
    return placed


@contextlib.contextmanager
def explain_deletion(params: Iterable[jax.Array]) -> Iterator[None]:
    """Raise a RuntimeError that names the cause if a computation fails because a parameter was deleted."""
    try:
        yield
    except RuntimeError as error:
        if not any(array.is_deleted() for array in params):
            raise
        raise RuntimeError(
            "params: the engine's arrays were deleted, as by a train step that donates them; pass the new arrays to "
            "update_params"
        ) from error


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
        return f"is {leaf.dtype}, not {other.dtype}"
    if leaf.is_deleted():
        return "was deleted, as a train step deletes its donated arguments"
    if not leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim):
        return f"lies {_told(leaf.sharding)}, not {_told(other.sharding)}"
    return None


def _told(sharding: Sharding) -> str:
    """Return a sharding in words."""
    devices: list[Any] = sorted(sharding.device_set, key=lambda device: device.id)
    if len(devices) == 1:
        return f"on {devices[0]} alone"
    on = f"on {', '.join(map(str, devices))}"
    if sharding.is_fully_replicated:
        return f"whole {on}"
    if isinstance(sharding, NamedSharding):
        sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"as {sharding.spec} of a mesh ({sizes}) {on}"
    return f"as {sharding}"

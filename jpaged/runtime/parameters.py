"""Parameters of a model by name, and their exchange for others of the same tree, shapes and dtypes."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

Leaf = jax.Array | jax.ShapeDtypeStruct


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


def checked(state: Any, expected: Mapping[str, Leaf], device: jax.Device) -> list[jax.Array]:
    """Return the arrays of a state in the order of `expected`. They share the memory of the state's own arrays.

    Args:
        state: as in `by_name`.
        device: the device that must hold every array whole.

    Raises:
        ValueError: the tree, a shape or a dtype differs, or an array was deleted or lies elsewhere; the message has the
            first difference.
    """
    found = by_name(state)
    for name in itertools.chain(expected, found):
        if problem := _problem(name, found, expected, device):
            raise ValueError(f"params: {name} {problem}")
    # An executable is compiled for arrays that are bound to their device, or for those that are not.
    placed: list[jax.Array] = jax.device_put([found[name] for name in expected], device)
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


def _problem(name: str, found: Mapping[str, Any], expected: Mapping[str, Leaf], device: jax.Device) -> str | None:
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
    if leaf.devices() != {device}:
        return f"lies on {', '.join(sorted(map(str, leaf.devices())))}, not on {device} alone"
    return None

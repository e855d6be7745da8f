"""Conversion of parameters between Orbax and NNX, as strict as that of safetensors.

Orbax is imported by the functions that need it: it takes a fifth of a second, and most starts read safetensors.
"""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jpaged.checkpoint_files import check_tree
from jpaged.models.base import Leaf, LeafPath, Model, Place
from jpaged.models.checkpoint import Form, abstract_model, check_names, exact_leaves, filled, merged
from jpaged.models.config import ModelConfig
from jpaged.models.quantized import formats_of

ORBAX = "orbax"


def load_orbax(directory: Path, config: ModelConfig, form: Form, *, progress: bool = True) -> Model:
    """Load a model from the Orbax checkpoint that `save_orbax` writes.

    All parameters are read at once, or one after the other if they are quantized.

    Raises:
        ValueError: there is no such checkpoint, or an array is missing, unexpected or misshapen.
    """
    folder, stored = (directory / ORBAX).absolute(), stored_arrays(directory)
    graphdef, leaves = abstract_model(config, form.dtype)
    names = {path: ".".join(map(str, path)) for path in leaves}
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    check_names({name: leaves[path].shape for path, name in names.items()}, shapes, directory / ORBAX)
    if form.quantization is None:
        target = {names[path]: _described(leaf, str(leaf.dtype), form.place) for path, leaf in leaves.items()}
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(folder, target)
        return merged(graphdef, {path: leaf.replace(arrays[names[path]]) for path, leaf in leaves.items()})
    rounded = formats_of(merged(graphdef, leaves), form.quantization)

    def read(path: LeafPath, leaf: Leaf) -> jax.Array:
        import orbax.checkpoint as ocp

        dtype = str(stored[names[path]].dtype) if path in rounded else str(leaf.dtype)
        item = {names[path]: _described(leaf, dtype, form.place)}
        as_stored = ocp.checkpoint_utils.construct_restore_args(item)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(folder, ocp.args.PyTreeRestore(item, as_stored, partial_restore=True))
        return cast(jax.Array, restored[names[path]])

    return filled(config, form, read, rounded, progress=progress)


def save_orbax(model: Model, directory: Path) -> None:
    """Write the parameters, as `exact_leaves`, as an Orbax checkpoint in a new folder `orbax` of a directory."""
    arrays = {".".join(map(str, path)): array for path, array in exact_leaves(model).items()}
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ORBAX).absolute(), arrays)


def stored_arrays(directory: Path) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays of an Orbax checkpoint. Raises ValueError if it may not be opened."""
    if not (directory / ORBAX).is_dir():
        raise ValueError(f"model: {directory} has no Orbax checkpoint: no folder {ORBAX} in it")
    check_tree(directory / ORBAX)
    with _checkpointer() as checkpointer:
        return cast(dict[str, Any], checkpointer.metadata((directory / ORBAX).absolute()).item_metadata.tree)


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()


def _described(leaf: Leaf, dtype: str, place: Place) -> jax.ShapeDtypeStruct:
    """Return the shape and the place of a parameter with a dtype."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=place(leaf))

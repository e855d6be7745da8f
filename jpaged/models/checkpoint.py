"""Conversion of parameters between checkpoints and NNX: strict both ways, one tensor in host memory at a time."""

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import save_file

from jpaged.config import CONFIG, DTYPES, ModelConfig, read_json
from jpaged.models.base import LeafPath, Model, Part
from jpaged.models.registry import architecture_of
from jpaged.progress import track

ORBAX = "orbax"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
MAX_PROBLEMS = 50  # tensors named in an error
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Of each tensor in a checkpoint, its rows, the leaf that holds them, and where they begin there.
Uses = dict[str, list[tuple[Part, LeafPath, int]]]


def abstract_model(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef[Any], dict[LeafPath, nnx.Variable[Any]]]:
    """Return a model without memory: its graph, and its leaves by path, with shapes and dtypes only."""
    module = architecture_of(config).module
    graphdef, state = nnx.split(nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graphdef, dict(nnx.to_flat_state(state))


def dummy_model(config: ModelConfig, dtype: str, seed: int) -> Model:
    """Return a model with random parameters."""
    module = architecture_of(config).module
    graphdef, _ = abstract_model(config, dtype)
    state = jax.jit(lambda: nnx.state(module(config, dtype=dtype, rngs=nnx.Rngs(seed))))()
    model: Model = nnx.merge(graphdef, state)
    return model


def tensors_of(config: ModelConfig, leaves: Mapping[LeafPath, Any]) -> tuple[Uses, dict[str, tuple[int, ...]]]:
    """Return the use of each tensor of a checkpoint, and the tensors' shapes.

    Args:
        leaves: leaves of the model by path; only their shapes are used.
    """
    source = architecture_of(config).source
    uses: Uses = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in leaves.items():
        first, (parts, stacked) = 0, source(path, config)
        for part in parts:
            rows = (leaf.shape[1] if stacked else leaf.shape[0]) if part.rows is None else part.rows
            uses.setdefault(part.name, []).append((part._replace(rows=rows), path, first))
            rest = leaf.shape[2:] if stacked else leaf.shape[1:]
            most = max(part.start + rows, shapes.get(part.name, (0,))[0])
            shapes[part.name] = (most, *rest)
            first += 1 if stacked else rows
        assert first == leaf.shape[0], f"{path} has {leaf.shape[0]} rows, and its parts have {first}"
    return uses, shapes


def check_names(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: Path) -> None:
    """Check the names and shapes of the tensors of a checkpoint.

    Raises:
        ValueError: the message lists every missing, unexpected and misshapen tensor.
    """
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    problems += [f"unexpected {name} {list(found[name])}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        told = "; ".join(problems[:MAX_PROBLEMS]) + f"; and {len(problems) - MAX_PROBLEMS} more" * (
            len(problems) > MAX_PROBLEMS
        )
        raise ValueError(f"{where} does not hold this model's tensors: {told}")


def load_safetensors(directory: Path, config: ModelConfig, dtype: str, *, progress: bool = True) -> Model:
    """Load a model from the safetensors of a directory, in one file or in shards, each tensor straight to its dtype.

    Raises:
        ValueError: a file or shard is missing, or a tensor is missing, unexpected or misshapen.
    """
    files = safetensors_files(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found = tensors.get_slice(name)
                shapes[name] = tuple(found.get_shape())
                dtypes[name] = found.get_dtype()
    if config.num_hidden_layers > len(shapes):  # to trace hundreds of layers that are not there takes minutes
        told = f"{len(shapes)} tensors for the {config.num_hidden_layers} layers of {CONFIG}"
        raise ValueError(f"{directory} does not hold this model's tensors: {told}")
    graphdef, leaves = abstract_model(config, dtype)
    uses, expected = tensors_of(config, leaves)
    is_derived = architecture_of(config).is_derived
    check_names(expected, {n: s for n, s in shapes.items() if not is_derived(n, config)}, directory)
    if unknown := [f"{name} as {dtypes[name]}" for name in uses if dtypes[name] not in STORED]:
        told = "; ".join(unknown[:MAX_PROBLEMS])
        raise ValueError(f"{directory} does not hold this model's tensors in {', '.join(STORED)}: {told}")
    parts: dict[LeafPath, dict[int, jax.Array]] = {path: {} for path in leaves}
    for name, array in track(_read(files, uses, dtype), len(uses), "loaded", "tensor", bar=progress):
        for part, path, first in uses[name]:
            whole = part.rows == array.shape[0]
            parts[path][first] = array if whole else lax.slice_in_dim(array, part.start, part.start + (part.rows or 0))
    for path, leaf in leaves.items():
        leaves[path] = leaf.replace(_joined(parts.pop(path), leaf.shape))
    model: Model = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    return model


def save_safetensors(model: Model, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the parameters as a Hugging Face checkpoint: one file, or shards with an index."""
    leaves = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    uses, shapes = tensors_of(model.config, leaves)
    itemsize = next(iter(leaves.values())).dtype.itemsize
    sizes = {name: itemsize * math.prod(shape) for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name in uses:
        if shards[-1] and size + sizes[name] > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards):
        save_file(
            {name: _tensor(uses[name], shapes[name], leaves) for name in names}, directory / file, {"format": "pt"}
        )
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def load_orbax(directory: Path, config: ModelConfig, dtype: str) -> Model:
    """Load a model from the Orbax checkpoint that `save_orbax` writes, as strictly as `load_safetensors` does."""
    if not (directory / ORBAX).is_dir():
        raise ValueError(f"model: {directory} has no Orbax checkpoint: no folder {ORBAX} in it")
    graphdef, leaves = abstract_model(config, dtype)
    paths = {".".join(map(str, path)): path for path in leaves}
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata((directory / ORBAX).absolute()).item_metadata
        found = {name: tuple(array.shape) for name, array in metadata.tree.items()}
        check_names({name: leaves[path].shape for name, path in paths.items()}, found, directory / ORBAX)
        device = SingleDeviceSharding(jax.devices()[0])
        target = {n: jax.ShapeDtypeStruct(leaves[p].shape, jnp.dtype(dtype), sharding=device) for n, p in paths.items()}
        arrays = checkpointer.restore((directory / ORBAX).absolute(), target)
    model: Model = nnx.merge(graphdef, nnx.from_flat_state({p: leaves[p].replace(arrays[n]) for n, p in paths.items()}))
    return model


def save_orbax(model: Model, directory: Path) -> None:
    """Write the parameters as an Orbax checkpoint, in a new folder `orbax` of a directory."""
    arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ORBAX).absolute(), arrays)


def stored_dtype(directory: Path) -> str:
    """Return the dtype that holds every parameter of a checkpoint exactly, regardless of its config."""
    if (directory / ORBAX).is_dir():
        with _checkpointer() as checkpointer:
            metadata = checkpointer.metadata((directory / ORBAX).absolute()).item_metadata
        found = {str(array.dtype) for array in metadata.tree.values()}
    else:
        found = set()
        for file in safetensors_files(directory):
            with _open(file) as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        found = {STORED.get(dtype, dtype) for dtype in found}
    if unknown := found - set(DTYPES):
        raise ValueError(f"model: {directory} holds {', '.join(sorted(unknown))}; supported: {', '.join(DTYPES)}")
    return found.pop() if len(found) == 1 else "float32"


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, by its index if it has one.

    Raises:
        ValueError: a file is missing.
    """
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
            raise ValueError(
                f"model: weight_map of {directory / INDEX} must lead from tensors to names of files beside it"
            )
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ValueError(f"model: {directory} lacks {', '.join(missing)}, named in {INDEX}")
        files = [directory / name for name in names]
    elif (directory / SINGLE).is_file():
        files = [directory / SINGLE]  # beside it there may be the same in another form
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {directory} has no safetensors file")
    return files


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # here, since it takes a fifth of a second and most starts read safetensors

    return ocp.StandardCheckpointer()


def _read(files: Iterable[Path], names: Container[str], dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Yield each named tensor, on the device, as soon as it is read: the host holds one at a time."""
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in names:
                    yield name, jnp.array(jnp.asarray(tensors.get_tensor(name)).astype(dtype), copy=True)


def _joined(parts: Mapping[int, jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return a leaf from its parts, by their places."""
    arrays = [parts[first] for first in sorted(parts)]
    if arrays[0].ndim < len(shape):
        return jnp.stack(arrays)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _tensor(
    uses: Iterable[tuple[Part, LeafPath, int]], shape: tuple[int, ...], leaves: Mapping[LeafPath, jax.Array]
) -> np.ndarray:
    """Return a tensor of a checkpoint from the leaves that hold its rows."""
    rows: dict[int, np.ndarray] = {}
    for part, path, first in uses:
        leaf = leaves[path]
        stacked = leaf.ndim > len(shape)
        assert part.rows is not None
        rows[part.start] = np.asarray(leaf[first] if stacked else leaf[first : first + part.rows])
    return np.ascontiguousarray(np.concatenate([rows[start] for start in sorted(rows)]))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) < 256 and name == Path(name).name and "\0" not in name


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # the library raises its own type, and OSError for paths that are no files
        raise ValueError(f"model: {file} can't be read: {error}") from error

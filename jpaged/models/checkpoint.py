"""Conversion of parameters between checkpoints and NNX: strict both ways, one parameter in host memory at a time."""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import save_file

from jpaged.checkpoint_files import MAX_INDEX_BYTES, check_file, check_tree, read_json
from jpaged.config import DTYPES, QUANTIZATIONS
from jpaged.models.base import LeafPath, Model, Part
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import CONFIG
from jpaged.models.quantized import SCALE, is_quantized, quantizable, quantize_weights, rounder
from jpaged.models.quantized_checkpoint import FLOAT8, dequantized, float8_tensors, read_scheme
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

Place = Callable[[nnx.Variable[Any]], Sharding]  # of a parameter; its metadata names its axes


def on_one_device(variable: nnx.Variable[Any]) -> Sharding:
    """Place a parameter on jax's default device."""
    (device,) = jnp.zeros(()).devices()
    return SingleDeviceSharding(device)


def abstract_model(
    config: ModelConfig, dtype: str, quantized: Mapping[LeafPath, str] | None = None
) -> tuple[nnx.GraphDef[Any], dict[LeafPath, nnx.Variable[Any]]]:
    """Return a model without memory: its graph, and its leaves by path, with shapes and dtypes only.

    Args:
        quantized: the dtypes of quantized weights by path.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _new(config, dtype, 0, quantized or {})))
    return graphdef, dict(nnx.to_flat_state(state))


def dummy_model(
    config: ModelConfig, dtype: str, seed: int, place: Place = on_one_device, *, quantization: str | None = None
) -> Model:
    """Return a model with random parameters."""
    quantized = dtypes_of_weights(*abstract_model(config, dtype), quantization)
    graphdef, leaves = abstract_model(config, dtype, quantized)
    shardings = tuple((path, place(leaf)) for path, leaf in leaves.items())
    found = _drawing(config, dtype, tuple(quantized.items()), shardings)(jax.random.key(seed))
    return _merged(graphdef, {path: leaf.replace(found[path]) for path, leaf in leaves.items()})


def dtypes_of_weights(
    graphdef: nnx.GraphDef[Any], leaves: Mapping[LeafPath, nnx.Variable[Any]], quantization: str | None
) -> dict[LeafPath, str]:
    """Return the dtypes of the weights that `quantization` applies to, by path."""
    if quantization is None:
        return {}
    return dict.fromkeys(quantizable_paths(graphdef, leaves), QUANTIZATIONS[quantization])


def quantizable_paths(graphdef: nnx.GraphDef[Any], leaves: Mapping[LeafPath, nnx.Variable[Any]]) -> list[LeafPath]:
    """Return the paths of the weights of a model without memory that `quantization` applies to."""
    return quantizable(nnx.merge(graphdef, nnx.from_flat_state(leaves)))


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


def load_safetensors(
    directory: Path, config: ModelConfig, dtype: str, place: Place = on_one_device, *, quantization: str | None = None,
    progress: bool = True,
) -> Model:  # fmt: skip
    """Load a model from the safetensors of a directory, in one file or in shards.

    Each device's part of a parameter is read from the files and converted to the dtype there. A weight that
    `quantization` applies to is read in its stored dtype, and converted to 8 bits on the devices.

    Raises:
        ValueError: a file or shard is missing, or a tensor is missing, unexpected or misshapen.
    """
    files = safetensors_files(directory)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_open(file)) for file in files]
        rename = architecture_of(config).rename
        tensors = {rename(name): file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
        if any(tensor.get_dtype() == FLOAT8 for tensor in tensors.values()):
            for file in files:
                tensors |= {rename(name): tensor for name, tensor in float8_tensors(file).items()}
        return _load(tensors, directory, config, dtype, place, quantization, progress=progress)


def _load(
    tensors: Mapping[str, Any], directory: Path, config: ModelConfig, dtype: str, place: Place,
    quantization: str | None, *, progress: bool,
) -> Model:  # fmt: skip
    """Load a model from slices of opened safetensors."""
    if config.num_hidden_layers > len(tensors):  # to trace hundreds of layers that are not there takes minutes
        told = f"{len(tensors)} tensors for the {config.num_hidden_layers} layers of {CONFIG}"
        raise ValueError(f"{directory} does not hold this model's tensors: {told}")
    graphdef, leaves = abstract_model(config, dtype)
    uses, expected = tensors_of(config, leaves)
    if scheme := read_scheme(directory):
        tensors = dequantized(tensors, scheme, expected)
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    dtypes = {name: tensor.get_dtype() for name, tensor in tensors.items()}
    is_derived = architecture_of(config).is_derived
    check_names(expected, {n: s for n, s in shapes.items() if not is_derived(n, config)}, directory)
    if unknown := [f"{name} as {dtypes[name]}" for name in uses if dtypes[name] not in STORED]:
        told = "; ".join(unknown[:MAX_PROBLEMS])
        raise ValueError(f"{directory} does not hold this model's tensors in {', '.join(STORED)}: {told}")
    parts: dict[LeafPath, dict[int, Part]] = {path: {} for path in leaves}
    for used in uses.values():
        for part, path, first in used:
            parts[path][first] = part

    def read(path: LeafPath) -> jax.Array:
        leaf, stored = leaves[path], {STORED[dtypes[part.name]] for part in parts[path].values()}
        own = stored.pop() if path in quantized and len(stored) == 1 else dtype
        return _read(tensors, parts[path], leaf.shape, own, place(leaf))

    def read_kept(path: LeafPath, weight: Sharding, scale: Sharding) -> tuple[jax.Array, jax.Array]:
        shape, names = leaves[path].shape, {part.name for part in parts[path].values()}
        numbers = {name: tensors[name].stored for name in names}
        scales = {name: tensors[name].row_scales for name in names}
        return (
            _read(numbers, parts[path], shape, kept[path], weight),
            _read(scales, parts[path], shape[:1], "float32", scale),
        )

    quantized = dtypes_of_weights(graphdef, leaves, quantization)
    kept: dict[LeafPath, str] = {}
    for path in quantizable_paths(graphdef, leaves):
        stored = {getattr(tensors[part.name], "kept", None) for part in parts[path].values()}
        if len(stored) == 1 and (own := stored.pop()) and own == quantized.get(path, own):
            kept[path] = own
    return _filled(config, dtype, quantized | kept, read, place, kept=kept, read_kept=read_kept, progress=progress)


def _filled(
    config: ModelConfig, dtype: str, quantized: Mapping[LeafPath, str], read: Callable[[LeafPath], jax.Array],
    place: Place, *, progress: bool, kept: Collection[LeafPath] = (),
    read_kept: Callable[[LeafPath, Sharding, Sharding], tuple[jax.Array, jax.Array]] | None = None,
) -> Model:  # fmt: skip
    """Return a model whose parameters are read one after the other.

    Args:
        quantized: the dtypes of quantized weights by path.
        read: return a parameter of the model that is not quantized, in its place.
        kept: the paths of weights that the checkpoint holds quantized as the model does.
        read_kept: return such a weight and its scale, in their places.
    """
    graphdef, leaves = abstract_model(config, dtype, quantized)
    paths = [path for path in leaves if path[-1] != SCALE]
    for path in track(paths, len(paths), "loaded", "parameter", bar=progress):
        if path in quantized:
            both = path, (*path[:-1], SCALE)
            weight, scale = (place(leaves[one]) for one in both)
            if path in kept:
                assert read_kept is not None
                arrays = read_kept(path, weight, scale)
            else:
                arrays = jax.block_until_ready(rounder(quantized[path], (weight, scale))(read(path)))
            leaves |= {one: leaves[one].replace(array) for one, array in zip(both, arrays)}
        else:
            leaves[path] = leaves[path].replace(read(path))
    return _merged(graphdef, leaves)


def save_safetensors(model: Model, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the parameters as a Hugging Face checkpoint: one file, or shards with an index.

    Raises:
        ValueError: they are quantized.
    """
    _check_exact(model)
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


def load_orbax(
    directory: Path, config: ModelConfig, dtype: str, place: Place = on_one_device, *, quantization: str | None = None,
    progress: bool = True,
) -> Model:  # fmt: skip
    """Load a model from the Orbax checkpoint that `save_orbax` writes, as strictly as `load_safetensors` does.

    All parameters are read at once, or one after the other if they are quantized.
    """
    if not (directory / ORBAX).is_dir():
        raise ValueError(f"model: {directory} has no Orbax checkpoint: no folder {ORBAX} in it")
    graphdef, leaves = abstract_model(config, dtype)
    paths = {".".join(map(str, path)): path for path in leaves}
    check_tree(directory / ORBAX)
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata((directory / ORBAX).absolute()).item_metadata
        found = {name: tuple(array.shape) for name, array in metadata.tree.items()}
        check_names({name: leaves[path].shape for name, path in paths.items()}, found, directory / ORBAX)
        if quantization is None:
            target = {name: _described(leaves[path], dtype, place) for name, path in paths.items()}
            arrays = checkpointer.restore((directory / ORBAX).absolute(), target)
            return _merged(graphdef, {path: leaves[path].replace(arrays[name]) for name, path in paths.items()})
    names = {path: name for name, path in paths.items()}
    quantized = dtypes_of_weights(graphdef, leaves, quantization)

    def read(path: LeafPath) -> jax.Array:
        own = str(metadata.tree[names[path]].dtype) if path in quantized else dtype
        return _restore_one((directory / ORBAX).absolute(), names[path], _described(leaves[path], own, place))

    return _filled(config, dtype, quantized, read, place, progress=progress)


def save_orbax(model: Model, directory: Path) -> None:
    """Write the parameters as an Orbax checkpoint, in a new folder `orbax` of a directory.

    Raises:
        ValueError: they are quantized.
    """
    _check_exact(model)
    arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ORBAX).absolute(), arrays)


def stored_dtype(directory: Path) -> str:
    """Return the dtype that holds every parameter of a checkpoint exactly, regardless of its config."""
    if (directory / ORBAX).is_dir():
        check_tree(directory / ORBAX)
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
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())):
            raise ValueError(
                f"model: weight_map of {directory / INDEX} must lead from tensors to names of files beside it"
            )
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ValueError(f"model: {directory} lacks {', '.join(missing)}, named in {INDEX}")
        files = [directory / name for name in names]
    elif (directory / SINGLE).exists():
        files = [directory / SINGLE]  # beside it there may be the same in another form
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {directory} has no safetensors file; {_conversion(directory)}")
    return files


def _conversion(directory: Path) -> str:
    """Return the command that converts parameters in PyTorch's format, which can run code when they are read."""
    # The hub's cache keeps a model in models--org--name/snapshots/COMMIT.
    cached = next((each.name for each in directory.parents if each.name.startswith("models--")), None)
    source = "/".join(cached.split("--")[1:]) if cached else str(directory)
    target = (cached.split("--")[-1] if cached else source) + "-safetensors"
    load = f"from_pretrained({source!r}"
    save = f"save_pretrained({target!r})"
    program = f"M.{load}, dtype='auto').{save}; T.{load}).{save}"
    return (
        "parameters in PyTorch's format (*.bin, *.pth) are not read; convert them where torch and transformers are "
        f'installed: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; {program}"'
    )


def _check_exact(model: Model) -> None:
    if is_quantized(model):
        raise ValueError("model: its weights are quantized, and no format of checkpoints holds them without loss")


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # here, since it takes a fifth of a second and most starts read safetensors

    return ocp.StandardCheckpointer()


def _restore_one(directory: Path, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Return one array of an Orbax checkpoint."""
    import orbax.checkpoint as ocp

    item = {name: target}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        options = ocp.args.PyTreeRestore(item, ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True)
        array: jax.Array = checkpointer.restore(directory, options)[name]
    return array


def _described(leaf: nnx.Variable[Any], dtype: str, place: Place) -> jax.ShapeDtypeStruct:
    """Return the shape and the place of a parameter with a dtype."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=place(leaf))


@functools.lru_cache(maxsize=8)
def _drawing(
    config: ModelConfig, dtype: str, quantized: tuple[tuple[LeafPath, str], ...],
    shardings: tuple[tuple[LeafPath, Sharding], ...],
) -> Callable[[jax.Array], dict[LeafPath, jax.Array]]:  # fmt: skip
    """Return a compiled function from a random key to the parameters of a model, by path."""

    def arrays(key: jax.Array) -> dict[LeafPath, jax.Array]:
        state = nnx.state(_new(config, dtype, key, dict(quantized)))
        return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}

    return jax.jit(arrays, out_shardings=dict(shardings))


def _new(config: ModelConfig, dtype: str, seed: int | jax.Array, quantized: Mapping[LeafPath, str]) -> Model:
    """Return a model with random parameters, with quantized weights where `quantized` has a dtype."""
    model: Any = architecture_of(config).module(config, dtype=dtype, rngs=nnx.Rngs(seed))
    quantize_weights(model, quantized)
    return cast(Model, model)


def _merged(graphdef: nnx.GraphDef[Any], leaves: Mapping[LeafPath, nnx.Variable[Any]]) -> Model:
    model: Model = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    return model


def _read(
    tensors: Mapping[str, Any], parts: Mapping[int, Part], shape: tuple[int, ...], dtype: str, sharding: Sharding
) -> jax.Array:
    """Read a parameter: each part of it from the files to the devices that hold it."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))
        devices.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    for bounds, holders in devices.items():
        arrays += _copies(_rows(tensors, parts, shape, bounds), dtype, holders)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _copies(host: np.ndarray, dtype: str, devices: Iterable[jax.Device]) -> list[jax.Array]:
    """Return a copy on each device, once all are made: the host holds one array at a time."""
    copies = [jnp.array(jnp.asarray(host, device=device).astype(dtype), copy=True) for device in devices]
    return [copy.block_until_ready() for copy in copies]


def _rows(
    tensors: Mapping[str, Any], parts: Mapping[int, Part], shape: tuple[int, ...], bounds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return the elements within `bounds` of a parameter from the tensors that hold its rows."""
    (low, high), *rest = bounds
    found = []
    for first, part in sorted(parts.items()):
        tensor = tensors[part.name]
        if len(tensor.get_shape()) < len(shape):  # a stack of tensors
            if low <= first < high:
                (start, stop), *others = rest
                found.append(tensor[(slice(part.start + start, part.start + stop), *(slice(*b) for b in others))][None])
        else:
            assert part.rows is not None
            start, stop = max(low, first) - first, min(high, first + part.rows) - first
            if start < stop:
                found.append(tensor[(slice(part.start + start, part.start + stop), *(slice(*b) for b in rest))])
    return found[0] if len(found) == 1 else np.concatenate(found)


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
    check_file(file)  # the library holds Python's lock while it opens
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # the library raises its own type, and OSError for paths that are no files
        raise ValueError(f"model: {file} can't be read: {error}") from error

"""Conversion of parameters between safetensors and NNX: strict both ways, one parameter in host memory at a time."""

import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors.numpy import save_file

from jpaged.models.base import Graph, Leaf, LeafPath, Leaves, Model, Place
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import CONFIG
from jpaged.models.interleaved import joined, joined_shapes, members, separated
from jpaged.models.joined_experts import of_each_expert
from jpaged.models.quantized import (
    Formats,
    Takes,
    check_groups,
    dense_leaf,
    formats_of,
    is_quantized,
    leaf_paths,
    quantize_weights,
    quantizer,
    weights_of,
)
from jpaged.models.quantized_checkpoint import dequantized, read_scheme
from jpaged.models.quantized_weight import QuantizedWeight
from jpaged.models.registry import architecture_of
from jpaged.models.safetensors_files import FLOATS, INDEX, KeptTensor, StoredTensor, StoredTensors, open_tensors
from jpaged.progress import track
from pallas_kernels.weights import Format

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 50  # tensors named in an error

Shapes = dict[str, tuple[int, ...]]  # of tensors by name
Read = Callable[[LeafPath, Leaf], jax.Array]  # returns a parameter, in its place
Find = Callable[[Shapes], StoredTensors]  # from the shapes of a model's tensors to the tensors of a checkpoint


class Use(NamedTuple):
    """Use of a stored tensor for a leaf.

    Attributes:
        path: path of the leaf.
        first: first row of the leaf that the tensor holds; of a stack, the row that is the whole tensor.
        start: row of the tensor that is this row.
        rows: number of rows.
        axis: axis of rows.
    """

    path: LeafPath
    first: int
    start: int
    rows: int
    axis: int = 0


type Items[Value] = tuple[tuple[LeafPath, Value], ...]  # of a dict, to be hashed
Pieces = list[tuple[StoredTensor, Use]]  # of a leaf
LeafShapes = Mapping[LeafPath, tuple[int, ...]]


def on_one_device(variable: Leaf) -> Sharding:
    """Place a parameter on jax's default device."""
    (device,) = jnp.zeros(()).devices()
    return SingleDeviceSharding(device)


def takes_all(form: Format, shape: tuple[int, ...]) -> bool:
    """Return True: a CPU's products take every form."""
    return True


class Form(NamedTuple):
    """Form of the parameters of a model in memory.

    Attributes:
        dtype: dtype of parameters that are not quantized.
        place: sharding of a parameter.
        quantization: quantization to apply, as `EngineConfig.quantization`; None: none.
        keeps_groups: whether weights that are stored in 8 or 4 bits with scales of groups stay so; otherwise they
            become `dtype`.
        takes: whether products take a weight of a shape in a form. Others become `dtype`.
    """

    dtype: str
    place: Place = on_one_device
    quantization: str | None = None
    keeps_groups: bool = False
    takes: Takes = takes_all


def abstract_model(
    config: ModelConfig, dtype: str, quantized: Formats | None = None
) -> tuple[Graph, dict[LeafPath, Leaf]]:
    """Return a model without memory: its graph, and its leaves by path, with shapes and dtypes only."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _random_model(config, dtype, 0, quantized or {})))
    return graphdef, dict(nnx.to_flat_state(state))


def dummy_model(
    config: ModelConfig, dtype: str, seed: int, place: Place = on_one_device, *, quantization: str | None = None
) -> Model:
    """Return a model with random parameters."""
    quantized = formats_of(merged(*abstract_model(config, dtype)), quantization)
    graphdef, leaves = abstract_model(config, dtype, quantized)
    check_groups(leaves, place)
    shardings = tuple((path, place(leaf)) for path, leaf in leaves.items())
    arrays = _drawing(config, dtype, tuple(quantized.items()), shardings)(jax.random.key(seed))
    return merged(graphdef, {path: leaf.replace(arrays[path]) for path, leaf in leaves.items()})


def merged(graphdef: Graph, leaves: Leaves) -> Model:
    """Return the model with these leaves."""
    return cast(Model, nnx.merge(graphdef, nnx.from_flat_state(leaves)))


def filled(
    config: ModelConfig, form: Form, read: Read, rounded: Formats, kept: Formats | None = None, *, progress: bool
) -> Model:
    """Return a model whose parameters are read one after the other.

    Args:
        rounded: weights that are quantized once they are read.
        kept: weights that are stored quantized, and read like their scales and minima.
    """
    graphdef, leaves = abstract_model(config, form.dtype, {**rounded, **(kept or {})})
    check_groups(leaves, form.place)
    made = {leaf for path, each in rounded.items() for leaf in leaf_paths(path, each).values()}
    paths = [path for path in leaves if path in rounded or path not in made]
    for path in track(paths, len(paths), "loaded", "parameter", bar=progress):
        if path in rounded:
            of_weight = leaf_paths(path, rounded[path])
            places = tuple(form.place(leaves[each]) for each in of_weight.values())
            dense = leaves[path].replace(dense_leaf(leaves[path].get_value(), rounded[path]))
            weight = jax.block_until_ready(quantizer(rounded[path], places)(read(path, dense)))
            leaves |= {each: leaves[each].replace(getattr(weight, field)) for field, each in of_weight.items()}
        else:
            leaves[path] = leaves[path].replace(read(path, leaves[path]))
    return merged(graphdef, leaves)


def tensors_of(config: ModelConfig, leaves: Mapping[LeafPath, Any]) -> tuple[dict[str, list[Use]], Shapes]:
    """Return the uses of each tensor of a checkpoint by leaves of these shapes, and the tensors' shapes."""
    source = architecture_of(config).source
    uses: dict[str, list[Use]] = {}
    shapes: Shapes = {}
    for path, leaf in leaves.items():
        first, (parts, stacked, axis) = 0, source(path, config)
        shape = leaf.shape[1:] if stacked else leaf.shape
        for part in parts:
            rows = shape[axis] if part.rows is None else part.rows
            uses.setdefault(part.name, []).append(Use(path, first, part.start, rows, axis))
            known = shapes[part.name][axis] if part.name in shapes else 0
            shapes[part.name] = (*shape[:axis], max(part.start + rows, known), *shape[axis + 1 :])
            first += 1 if stacked else rows
        assert first == leaf.shape[axis], f"{path} has {leaf.shape[axis]} rows, and its parts have {first}"
    return uses, shapes


def check_names(expected: Shapes, stored: Shapes, where: Path) -> None:
    """Check the tensors of a checkpoint. The ValueError lists every missing, unexpected and misshapen one."""
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in stored]
    problems += [f"unexpected {name} {list(stored[name])}" for name in stored if name not in expected]
    misshapen = [name for name in expected if name in stored and stored[name] != expected[name]]
    problems += [f"{name} has shape {list(stored[name])}, expected {list(expected[name])}" for name in misshapen]
    if problems:
        listed, further = "; ".join(problems[:MAX_PROBLEMS]), len(problems) - MAX_PROBLEMS
        more = f"; and {further} more" if further > 0 else ""
        raise ValueError(f"{where} does not hold this model's tensors: {listed}{more}")


def load_safetensors(directory: Path, config: ModelConfig, form: Form, *, progress: bool = True) -> Model:
    """Load a model from the safetensors of a directory, in one file or in shards.

    Each device's part of a parameter is read from the files and converted to the dtype there. A weight to be quantized
    is read in its stored dtype, and quantized on the devices.

    Raises:
        ValueError: a file or shard is missing, or a tensor is missing, unexpected or misshapen.
    """
    architecture = architecture_of(config)
    with open_tensors(directory) as stored:
        tensors = {architecture.rename(name): tensor for name, tensor in stored.items()}
        if config.num_hidden_layers > len(tensors):  # tracing hundreds of layers that are missing takes minutes
            number = f"{len(tensors)} tensors for the {config.num_hidden_layers} layers of {CONFIG}"
            raise ValueError(f"{directory} does not hold this model's tensors: {number}")
        scheme = read_scheme(directory)

        def find(expected: Shapes) -> StoredTensors:
            found = separated(of_each_expert(tensors, expected), expected, architecture.interleaved)
            return dequantized(found, scheme, expected) if scheme else found

        return load_tensors(find, directory, config, form, progress=progress)


def load_tensors(find: Find, where: Path, config: ModelConfig, form: Form, *, progress: bool) -> Model:
    """Load a model from the tensors that `find` returns for the shapes of the model's, in Hugging Face's form.

    Raises:
        ValueError: a tensor is missing, unexpected or misshapen.
    """
    graphdef, leaves = abstract_model(config, form.dtype)
    uses, expected = tensors_of(config, leaves)
    tensors = find(expected)
    _check_tensors(tensors, config, expected, where)
    pieces: dict[LeafPath, Pieces] = {path: [] for path in leaves}
    for name, uses_of_tensor in uses.items():
        for use in uses_of_tensor:
            pieces[use.path].append((tensors[name], use))
    model = merged(graphdef, leaves)
    rounded = formats_of(model, form.quantization)
    shapes = {path: leaves[path].shape for path, *_ in weights_of(model)}
    kept, dtypes = _kept_weights(pieces, shapes, rounded, form)
    rounded = {path: each for path, each in rounded.items() if path not in kept}
    for path in rounded:
        kinds = {FLOATS[tensor.get_dtype()] for tensor, _ in pieces[path]}
        dtypes[path] = kinds.pop() if len(kinds) == 1 else form.dtype
    if form.keeps_groups:
        dtypes = _kept_dtypes(pieces, shapes, form.takes) | dtypes
    read = lambda path, leaf: _read(pieces[path], leaf.shape, dtypes.get(path, str(leaf.dtype)), form.place(leaf))
    return filled(config, form, read, rounded, kept, progress=progress)


def _check_tensors(tensors: StoredTensors, config: ModelConfig, expected: Shapes, directory: Path) -> None:
    """Check names, shapes and dtypes of the tensors of a checkpoint. Raises ValueError."""
    is_derived = architecture_of(config).is_derived
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items() if not is_derived(name, config)}
    check_names(expected, shapes, directory)
    dtypes = {name: tensors[name].get_dtype() for name in expected}
    if unknown := [f"{name} as {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]:
        listed = "; ".join(unknown[:MAX_PROBLEMS])
        raise ValueError(f"{directory} does not hold this model's tensors in {', '.join(FLOATS)}: {listed}")


def _kept_weights(
    pieces: dict[LeafPath, Pieces], shapes: LeafShapes, rounded: Formats, form: Form
) -> tuple[dict[LeafPath, Format], dict[LeafPath, str]]:
    """Return the forms of weights that are stored as the model can hold them, and the dtypes of their leaves.

    Their pieces are replaced by the stored numbers, and those of their scales and minima are added.
    """
    kept: dict[LeafPath, Format] = {}
    dtypes: dict[LeafPath, str] = {}
    expanded: list[LeafPath] = []
    for path, shape in shapes.items():
        quantized = [(tensor, use) for tensor, use in pieces[path] if isinstance(tensor, KeptTensor)]
        if not any(isinstance(tensor, QuantizedWeight) or tensor.kept for tensor, _ in quantized):
            continue
        stored = common_form([tensor.kept for tensor, _ in quantized]) if len(quantized) == len(pieces[path]) else None
        has_groups = stored is not None and stored.group
        stays = form.keeps_groups and stored is not None and form.takes(stored, shape)
        if stored is None or (has_groups and not stays) or stored != rounded.get(path, stored):
            expanded += [path] * (path not in rounded)
            continue
        kept[path] = stored
        for field, leaf in leaf_paths(path, stored).items():
            dtypes[leaf] = stored.dtype if field == "values" else getattr(stored, field)
            pieces[leaf] = [(tensor.leaf(field, stored), use) for tensor, use in quantized]
    if expanded:
        size = sum(use.rows * math.prod(tensor.get_shape()[1:]) for path in expanded for tensor, use in pieces[path])
        logger.warning(
            "quantization: %d weights (first: %s) become %s, %s bytes, because %s", len(expanded),
            ".".join(map(str, expanded[0])), form.dtype, f"{size * jnp.dtype(form.dtype).itemsize:,}",
            "products have no code for their groups" if form.keeps_groups
            else "their groups are kept on one CPU or one Hopper GPU only",
        )  # fmt: skip
    return kept, dtypes


def common_form(forms: Sequence[Format | None]) -> Format | None:
    """Return the form of a weight whose parts are stored in these; None if they do not fit together."""
    with_minima = next((form for form in forms if form and form.minima), None)
    common = {form and form._replace(minima=with_minima.minima) if with_minima else form for form in forms}
    return common.pop() if len(common) == 1 else None


def _kept_dtypes(pieces: dict[LeafPath, Pieces], shapes: LeafShapes, takes: Takes) -> dict[LeafPath, str]:
    """Return the dtypes of 16 bits in which weights of a file in GGUF stay: activations may have another dtype."""
    stored = {
        path: {FLOATS[t.get_dtype()] if isinstance(t, KeptTensor) else "" for t, _ in pieces[path]} for path in shapes
    }
    return {
        path: dtype for path, dtypes in stored.items() for dtype in ("float16", "bfloat16")
        if dtypes == {dtype} and takes(Format(dtype), shapes[path])
    }  # fmt: skip


def save_safetensors(model: Model, directory: Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write the parameters, as `exact_leaves`, as a Hugging Face checkpoint: one file, or shards with an index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    leaves = exact_leaves(model)
    uses, separate = tensors_of(model.config, leaves)
    place_of = architecture_of(model.config).interleaved
    of_stored, shapes = members(separate, place_of), joined_shapes(separate, place_of)

    def tensor(name: str) -> np.ndarray:
        arrays = [_tensor(uses[each], separate[each], leaves) for each in of_stored.get(name, [name])]
        return joined(arrays) if name in of_stored else arrays[0]

    num_bytes = lambda shape: next(iter(leaves.values())).dtype.itemsize * math.prod(shape)
    split = split_state_dict_into_shards_factory(
        shapes, get_storage_size=num_bytes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {name: tensor(name) for name in names}
        save_file(tensors, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def exact_leaves(model: Model) -> dict[LeafPath, jax.Array]:
    """Return the parameters of a model by path. Raises ValueError if they are quantized."""
    if is_quantized(model):
        raise ValueError("model: its weights are quantized, and no format of checkpoints holds them without loss")
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}


@functools.lru_cache(maxsize=8)
def _drawing(
    config: ModelConfig, dtype: str, quantized: Items[Format], shardings: Items[Sharding]
) -> Callable[[jax.Array], dict[LeafPath, jax.Array]]:
    """Return a compiled function from a random key to the parameters of a model, by path."""

    def arrays(key: jax.Array) -> dict[LeafPath, jax.Array]:
        state = nnx.state(_random_model(config, dtype, key, dict(quantized)))
        return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}

    return jax.jit(arrays, out_shardings=dict(shardings))


def _random_model(config: ModelConfig, dtype: str, seed: int | jax.Array, quantized: Formats) -> Model:
    """Return a model with random parameters, with quantized weights where `quantized` has a dtype."""
    model = architecture_of(config).module(config, dtype=dtype, rngs=nnx.Rngs(seed))
    quantize_weights(cast(nnx.Module, model), quantized)
    return model


def _read(pieces: Pieces, shape: tuple[int, ...], dtype: str, sharding: Sharding) -> jax.Array:
    """Read a parameter: each part of it from the files to the devices that hold it."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))
        devices.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    for bounds, holders in devices.items():
        arrays += _copies(_rows(pieces, bounds), dtype, holders)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _copies(host: np.ndarray, dtype: str, devices: Iterable[jax.Device]) -> list[jax.Array]:
    """Return a copy on each device, once all are made: the host holds one array at a time."""
    copies = [jnp.array(jnp.asarray(host, device=device).astype(dtype), copy=True) for device in devices]
    return [copy.block_until_ready() for copy in copies]


def _rows(pieces: Pieces, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the elements within `bounds` of a parameter from the tensors that hold its rows."""
    arrays, axis = [], pieces[0][1].axis
    low, high = bounds[axis]
    for tensor, use in sorted(pieces, key=lambda piece: piece[1].first):
        if len(tensor.get_shape()) < len(bounds):  # a stack of tensors
            if low <= use.first < high:
                (start, stop), *others = bounds[1:]
                arrays.append(tensor[(slice(use.start + start, use.start + stop), *(slice(*b) for b in others))][None])
        else:
            start, stop = max(low, use.first) - use.first, min(high, use.first + use.rows) - use.first
            if start < stop:
                index = [slice(*each) for each in bounds]
                index[axis] = slice(use.start + start, use.start + stop)
                arrays.append(tensor[tuple(index)])
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis)


def _tensor(uses: Sequence[Use], shape: tuple[int, ...], leaves: Mapping[LeafPath, jax.Array]) -> np.ndarray:
    """Return a tensor of a checkpoint from the leaves that hold its rows."""
    rows, axis = {}, uses[0].axis
    for use in uses:
        leaf = leaves[use.path]
        within = (slice(None),) * axis + (slice(use.first, use.first + use.rows),)
        rows[use.start] = np.asarray(leaf[use.first] if leaf.ndim > len(shape) else leaf[within])
    return np.ascontiguousarray(np.concatenate([rows[start] for start in sorted(rows)], axis=axis))

"""Parameters between checkpoints and NNX: one table of names, strict both ways, one tensor in host memory at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import save_file

from jpaged.config import CONFIG, DTYPES, ModelConfig, read_json
from jpaged.model.llama import Llama
from jpaged.progress import track

ORBAX = "orbax"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
MAX_PROBLEMS = 50  # tensors named in an error
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# An NNX leaf -> its Hugging Face name, and whether the checkpoint holds it transposed ([out, in]).
LEAVES = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
}

Path_ = tuple[Any, ...]  # of a leaf in an NNX state, e.g. ("layers", 0, "mlp", "up_proj", "kernel")


def tensor_name(path: Path_) -> str:
    """A leaf's name in a Hugging Face checkpoint."""
    prefix = "" if path[0] == "lm_head" else "model."
    return prefix + ".".join(map(str, path[:-1])) + "." + LEAVES[path[-1]][0]


def is_derived(name: str, config: ModelConfig) -> bool:
    """True for tensors some checkpoints carry beside the parameters: they follow from the config or from others."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def abstract_llama(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict[Path_, nnx.Variable]]:
    """A Llama without memory: its graph, and its leaves by path, of shapes and dtypes alone."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return graphdef, dict(nnx.to_flat_state(state))


def dummy_llama(config: ModelConfig, dtype: str, seed: int) -> Llama:
    """Random parameters."""
    graphdef, _ = abstract_llama(config, dtype)
    state = jax.jit(lambda: nnx.state(Llama(config, dtype=dtype, rngs=nnx.Rngs(seed))))()
    return nnx.merge(graphdef, state)


def check_names(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: Path) -> None:
    """Raises one ValueError that lists every missing, unexpected and misshapen tensor."""
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


def load_safetensors(directory: Path, config: ModelConfig, dtype: str, *, progress: bool = True) -> Llama:
    """A Llama from the safetensors of a directory, in one file or in shards, each tensor straight to its dtype.

    Raises ValueError for a missing file or shard, and for any tensor missing, unexpected or misshapen.
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
    graphdef, leaves = abstract_llama(config, dtype)
    paths = {tensor_name(path): path for path in leaves}
    expected = {name: _checkpoint_shape(path, leaves[path].shape) for name, path in paths.items()}
    check_names(expected, {n: s for n, s in shapes.items() if not is_derived(n, config)}, directory)
    if unknown := [f"{name} as {dtypes[name]}" for name in paths if dtypes[name] not in STORED]:
        told = "; ".join(unknown[:MAX_PROBLEMS])
        raise ValueError(f"{directory} does not hold this model's tensors in {', '.join(STORED)}: {told}")
    for path, array in track(_read(files, paths, dtype), len(paths), "loaded", "tensor", bar=progress):
        leaves[path] = leaves[path].replace(array)
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def save_safetensors(model: Llama, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the parameters as a Hugging Face checkpoint has them: one file, or shards with an index."""
    leaves = {tensor_name(path): (path, leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    shards: list[list[str]] = [[]]
    size = 0
    for name, (_, array) in leaves.items():
        if shards[-1] and size + array.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += array.nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards):
        save_file({name: _to_host(*leaves[name]) for name in names}, directory / file, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        total = sum(array.nbytes for _, array in leaves.values())
        (directory / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        )


def load_orbax(directory: Path, config: ModelConfig, dtype: str) -> Llama:
    """A Llama from the Orbax checkpoint that `save_orbax` writes below a directory; strict as `load_safetensors` is."""
    if not (directory / ORBAX).is_dir():
        raise ValueError(f"model: {directory} has no Orbax checkpoint: no folder {ORBAX} in it")
    graphdef, leaves = abstract_llama(config, dtype)
    paths = {".".join(map(str, path)): path for path in leaves}
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata((directory / ORBAX).absolute()).item_metadata
        found = {name: tuple(array.shape) for name, array in metadata.tree.items()}
        check_names({name: leaves[path].shape for name, path in paths.items()}, found, directory / ORBAX)
        device = SingleDeviceSharding(jax.devices()[0])
        target = {n: jax.ShapeDtypeStruct(leaves[p].shape, jnp.dtype(dtype), sharding=device) for n, p in paths.items()}
        arrays = checkpointer.restore((directory / ORBAX).absolute(), target)
    return nnx.merge(graphdef, nnx.from_flat_state({p: leaves[p].replace(arrays[n]) for n, p in paths.items()}))


def save_orbax(model: Llama, directory: Path) -> None:
    """Writes the parameters as an Orbax checkpoint, in the folder `orbax` below a directory that has none yet."""
    arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    with _checkpointer() as checkpointer:
        checkpointer.save((directory / ORBAX).absolute(), arrays)


def stored_dtype(directory: Path) -> str:
    """The dtype that holds every parameter of a checkpoint exactly, whatever its config says."""
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
    """The files of a checkpoint, by its index if it has one. Raises ValueError if one is missing."""
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


def _checkpointer():
    import orbax.checkpoint as ocp  # here, since it takes a fifth of a second and most starts read safetensors

    return ocp.StandardCheckpointer()


def _read(files: Iterable[Path], paths: Mapping[str, Path_], dtype: str) -> Iterator[tuple[Path_, jax.Array]]:
    """Yield the leaf of each name in `paths`, on the device, as soon as it is read."""
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if path := paths.get(name):
                    yield path, _to_device(tensors.get_tensor(name), path, dtype)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) < 256 and name == Path(name).name and "\0" not in name


def _open(file: Path):
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # the library raises its own type, and OSError for what isn't a file
        raise ValueError(f"model: {file} can't be read: {error}") from error


def _checkpoint_shape(path: Path_, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if LEAVES[path[-1]][1] else shape


def _to_device(tensor: np.ndarray, path: Path_, dtype: str) -> jax.Array:
    """Cast and transposed on the device, so that the host holds the tensor once."""
    array = jnp.asarray(tensor).astype(dtype)
    return array.T if LEAVES[path[-1]][1] else jnp.array(array, copy=True)


def _to_host(path: Path_, array: jax.Array) -> np.ndarray:
    host = np.asarray(array)
    return np.ascontiguousarray(host.T if LEAVES[path[-1]][1] else host)

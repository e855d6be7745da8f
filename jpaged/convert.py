"""Conversion of parameters to another format."""

import shutil
from pathlib import Path

from jpaged.checkpoint_files import check_file
from jpaged.config import DTYPES
from jpaged.models.checkpoint import save_safetensors
from jpaged.models.orbax_checkpoint import ORBAX, save_orbax, stored_arrays
from jpaged.models.quantized_checkpoint import read_scheme
from jpaged.models.registry import read_config
from jpaged.models.safetensors_files import FLOATS, INDEX, open_tensors
from jpaged.start.load import load_model
from jpaged.start.setup import find_model

SAVE = {"orbax": save_orbax, "safetensors": save_safetensors}


def convert(source: str, target: Path, to: str) -> str:
    """Store a model's parameters without loss, with its config and its tokenizer, and return their dtype.

    Args:
        source: a directory, a hub id, or "demo".
        target: the directory to create.
        to: "orbax" or "safetensors".

    Raises:
        ValueError: there is no such model, or the target exists.
    """
    directory = find_model(source)
    config = read_config(directory)
    if scheme := read_scheme(directory):
        raise ValueError(f"model: {directory} is quantized ({scheme.method}), and conversion keeps parameters exactly")
    others = [
        file for file in directory.iterdir() if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX
    ]
    for file in others:
        check_file(file)
    dtype = stored_dtype(directory)
    model = load_model(directory, config, dtype=dtype, load_format="auto", seed=0, progress=True)
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"target: {target} already exists") from error
    for file in others:
        shutil.copy(file, target)
    SAVE[to](model, target)
    return dtype


def stored_dtype(directory: Path) -> str:
    """Return the dtype that holds every parameter of a checkpoint exactly, regardless of its config."""
    if (directory / ORBAX).is_dir():
        dtypes = {str(array.dtype) for array in stored_arrays(directory).values()}
    else:
        with open_tensors(directory) as tensors:
            dtypes = {FLOATS.get(dtype, dtype) for dtype in (tensor.get_dtype() for tensor in tensors.values())}
    if unknown := dtypes - set(DTYPES):
        raise ValueError(f"model: {directory} holds {', '.join(sorted(unknown))}; supported: {', '.join(DTYPES)}")
    return dtypes.pop() if len(dtypes) == 1 else "float32"

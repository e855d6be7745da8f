"""Conversion of parameters to another format."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from gguf.constants import GGMLQuantizationType as Kind

from jpaged.checkpoint_files import check_file
from jpaged.config import DTYPES
from jpaged.gguf_file import open_gguf
from jpaged.gguf_tokenizer import load_gguf_tokenizer
from jpaged.models.checkpoint import save_safetensors
from jpaged.models.config_file import CONFIG
from jpaged.models.gguf_config import hf_of
from jpaged.models.orbax_checkpoint import ORBAX, save_orbax, stored_arrays
from jpaged.models.quantized_checkpoint import read_scheme
from jpaged.models.registry import read_config
from jpaged.models.safetensors_files import FLOATS, INDEX, open_tensors
from jpaged.start.load import load_model
from jpaged.start.setup import find_model

SAVE = {"orbax": save_orbax, "safetensors": save_safetensors}


def convert(source: str, target: Path, to: str, dtype: str | None = None) -> str:
    """Store a model's parameters, with its config and its tokenizer, and return their dtype.

    Args:
        source: a directory, a file in GGUF, a hub id, or "demo".
        target: the directory to create.
        to: "orbax" or "safetensors".
        dtype: dtype of the new parameters; None: the one that holds all of them without loss.

    Raises:
        ValueError: there is no such model, or the target exists.
    """
    directory = find_model(source)
    config = read_config(directory)
    if scheme := read_scheme(directory):
        raise ValueError(f"model: {directory} is quantized ({scheme.method}), and conversion keeps parameters exactly")
    copy = _small_files(directory)
    dtype = dtype or stored_dtype(directory)
    model = load_model(directory, config, dtype=dtype, load_format="auto", seed=0, progress=True)
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"target: {target} already exists") from error
    copy(target, dtype)
    SAVE[to](model, target)
    return dtype


def _small_files(directory: Path) -> Callable[[Path, str], None]:
    """Return a function that stores the config and the tokenizer of a model in a directory, for parameters of a dtype.

    Raises:
        ValueError: a file may not be opened, or a file in GGUF has a tokenizer that is not supported.
    """
    if directory.is_file():
        file = open_gguf(directory)
        tokenizer = load_gguf_tokenizer(file)

        def write(target: Path, dtype: str) -> None:
            (target / CONFIG).write_text(json.dumps(hf_of(file) | {"dtype": dtype}, indent=2))
            if tokenizer is not None:
                tokenizer.save_pretrained(target)

        return write
    others = [
        file for file in directory.iterdir() if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX
    ]
    for each in others:
        check_file(each)

    def copy(target: Path, dtype: str) -> None:
        for each in others:
            shutil.copy(each, target)

    return copy


def stored_dtype(directory: Path) -> str:
    """Return the dtype that holds every parameter of a checkpoint exactly, regardless of its config."""
    if directory.is_file():
        names = {Kind.F16: "float16", Kind.BF16: "bfloat16"}
        dtypes = {names.get(tensor.kind, "float32") for tensor in open_gguf(directory).tensors.values()}
    elif (directory / ORBAX).is_dir():
        dtypes = {str(array.dtype) for array in stored_arrays(directory).values()}
    else:
        with open_tensors(directory) as tensors:
            dtypes = {FLOATS.get(dtype, dtype) for dtype in (tensor.get_dtype() for tensor in tensors.values())}
    if unknown := dtypes - set(DTYPES):
        raise ValueError(f"model: {directory} holds {', '.join(sorted(unknown))}; supported: {', '.join(DTYPES)}")
    return dtypes.pop() if len(dtypes) == 1 else "float32"

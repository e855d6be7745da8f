"""Files of safetensors in a checkpoint's directory, and the tensors in them."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jpaged.checkpoint_files import MAX_INDEX_BYTES, check_file, read_json
from pallas_kernels.weights import Format

INDEX = "model.safetensors.index.json"
FLOAT8 = "F8_E4M3"  # safetensors' name
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names of the dtypes of parameters


class StoredTensor(Protocol):
    """Tensor whose elements are read part by part: the interface of a slice of safetensors."""

    def get_shape(self) -> list[int]:
        """Return the shape."""

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part."""


@runtime_checkable
class KeptTensor(StoredTensor, Protocol):
    """Quantized weight of a checkpoint, which is read dense, or as it is stored."""

    @property
    def kept(self) -> Format | None:
        """Form in which a model can hold the weight as it is; None: there is none."""

    def leaf(self, field: str, form: Format) -> StoredTensor:
        """Return an array of the weight in a form, by its name in `pallas_kernels.Weight`.

        Args:
            form: `kept`, or the same with minima.
        """


StoredTensors = Mapping[str, StoredTensor]  # by name


@dataclass(frozen=True)
class DerivedTensor:
    """A `StoredTensor` that is computed when it is read."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Any], np.ndarray]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return self.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part."""
        return self.read(index)


@contextlib.contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Open the files of a checkpoint, and give its tensors by name. Raises ValueError if one is missing or broken."""
    with contextlib.ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {}
        files = safetensors_files(directory)
        for file in files:
            opened = stack.enter_context(_open(file))
            tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        if any(tensor.get_dtype() == FLOAT8 for tensor in tensors.values()):
            for file in files:
                tensors |= float8_tensors(file)
        yield tensors


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, by its index if it has one. Raises ValueError if one is missing."""
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map", {})
        fits = lambda x: isinstance(x, str) and 0 < len(x) < 256 and x == Path(x).name and "\0" not in x
        if not isinstance(weight_map, dict) or not all(map(fits, weight_map.values())):
            where = f"weight_map of {directory / INDEX}"
            raise ValueError(f"model: {where} must lead from tensors to names of files beside it")
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ValueError(f"model: {directory} lacks {', '.join(missing)}, named in {INDEX}")
        files = [directory / name for name in names]
    elif (single := directory / "model.safetensors").exists():
        files = [single]  # further files may hold the same parameters in another form
    else:
        files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    # Parameters in PyTorch's format can run code when they are read. The hub's cache keeps a model in
    # models--org--name/snapshots/COMMIT.
    cached = next((each.name for each in directory.parents if each.name.startswith("models--")), None)
    source = "/".join(cached.split("--")[1:]) if cached else str(directory)
    target = (cached.split("--")[-1] if cached else source) + "-safetensors"
    load, save = f"from_pretrained({source!r}", f"save_pretrained({target!r})"
    program = f"M.{load}, dtype='auto').{save}; T.{load}).{save}"
    raise ValueError(
        f"model: {directory} has no safetensors file; parameters in PyTorch's format (*.bin, *.pth) are not read; "
        "convert them where torch and transformers are installed: python -c "
        f'"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; {program}"'
    )


def float8_tensors(file: Path) -> dict[str, DerivedTensor]:
    """Return the tensors of float8_e4m3fn in a file, which safetensors 0.8 can't read for numpy.

    The file must have been opened, and thereby checked, by safetensors. It begins with the length of a JSON header, in
    8 bytes; offsets count from the header's end.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    data = np.memmap(file, np.uint8, "r", offset=8 + length) if file.stat().st_size > 8 + length else np.empty(0)

    def tensor(shape: list[int], offsets: list[int]) -> DerivedTensor:
        numbers = data[slice(*offsets)].view(ml_dtypes.float8_e4m3fn).reshape(shape)
        return DerivedTensor(tuple(shape), FLOAT8, lambda index: np.array(numbers[index]))  # a copy

    entries = {name: entry for name, entry in header.items() if entry.get("dtype") == FLOAT8}
    return {name: tensor(entry["shape"], entry["data_offsets"]) for name, entry in entries.items()}


def _open(file: Path) -> Any:
    check_file(file)  # the library holds Python's lock while it opens
    try:
        return safe_open(file, "numpy")
    except Exception as error:  # the library raises its own type, and OSError for paths that are no files
        raise ValueError(f"model: {file} can't be read: {error}") from error

"""Files in GGUF, the format of llama.cpp: metadata and tensors, checked before anything is read at their sizes.

A file begins with the number of tensors and of fields, then has the fields of its metadata, the places of its tensors,
and their data (github.com/ggml-org/ggml/blob/master/docs/gguf.md). The reader of the package `gguf` makes several
arrays for each element of a list, which takes 23 s and 0.7 GB for a vocabulary of 262,144 tokens, and trusts the file's
counts. Here, lists are read when they are needed.
"""

import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from gguf.constants import GGMLQuantizationType as Kind

from jpaged.checkpoint_files import part_names

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS, MAX_TENSORS = 4096, 2**16
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_STRING_BYTES = 2**16 - 1, 256, 16 * 2**20
MAX_ITEMS = 4 * 2**20  # of a list
MAX_DIMS, MAX_SIZE = 4, 2**40  # of a tensor: dims, and the size of one
MAX_ALIGNMENT = 2**20

NUMBERS = {  # types of the numbers of a field, as numpy names them
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip
# Kinds of tensors that models are made of, by the names of llama.cpp.
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
QUANTIZED = (
    Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.MXFP4,
)  # fmt: skip


class GgufTensor(NamedTuple):
    """Tensor in a file.

    Attributes:
        kind: form of its numbers.
        shape: as in PyTorch: the last axis is contiguous.
        data: [..., bytes of a row] uint8, mapped into memory.
    """

    kind: Kind
    shape: tuple[int, ...]
    data: np.ndarray


class _List(NamedTuple):
    """List in the metadata: the type of its items, their number, and the place of the first."""

    type: GGUFValueType
    length: int
    start: int


@dataclass(frozen=True)
class GgufFile:
    """File in GGUF.

    Attributes:
        fields: numbers, booleans and texts of the metadata; lists are returned by `items`.
        tensors: tensors by name.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: np.ndarray

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model's architecture."""
        return self.text("general.architecture")

    @property
    def kinds(self) -> dict[str, int]:
        """Return the number of bytes of each kind of tensors, the largest first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.data.nbytes
        return dict(sorted(sizes.items(), key=lambda each: -each[1]))

    @property
    def summary(self) -> str:
        """Return the kinds of tensors with their sizes, in words."""
        return ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in self.kinds.items())

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text of the metadata. Raises ValueError if it is missing without a default, or no text."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            self.fail(name, f"must be a text, not {value!r:.100}")
        return value

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number of the metadata; `default` if it is missing. Raises ValueError if it is no number."""
        value = self.fields.get(name, default)
        if name in self.fields and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.fail(name, f"must be a number, not {value!r:.100}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean of the metadata. Raises ValueError if it is none."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, not {value!r:.100}")
        return value

    def length(self, name: str) -> int | None:
        """Return the number of items of a list of the metadata; None if there is no such list."""
        value = self.fields.get(name)
        return value.length if isinstance(value, _List) else None

    def items(self, name: str) -> list[Any] | None:
        """Return a list of the metadata; None if it is missing. Raises ValueError if it is no list."""
        if name not in self.fields:
            return None
        place = self.fields[name]
        if not isinstance(place, _List):
            self.fail(name, "must be a list")
        if place.type != GGUFValueType.STRING:
            dtype = np.dtype(NUMBERS[place.type])
            values: list[Any] = self.data[place.start :][: place.length * dtype.itemsize].view(dtype).tolist()
            return values
        buffer, at, texts = memoryview(self.data), place.start, []
        for _ in range(place.length):
            (length,) = struct.unpack_from("<Q", buffer, at)
            texts.append(bytes(buffer[at + 8 : at + 8 + length]))
            at += 8 + length
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            self.fail(name, f"must be UTF-8: {error}")

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raise the ValueError of a field."""
        raise ValueError(f"model: {self.path}: {field}: {problem}")


def open_gguf(path: Path) -> GgufFile:
    """Open and check a file, or all parts of a split file. Its data is mapped into memory, and read when it is used.

    Args:
        path: of the file, or of the first part, which has the metadata.

    Raises:
        OSError: there is no such file, or a part is missing.
        ValueError: it is no regular file, not in GGUF, truncated, or contradicts itself; the message has the path and
            the field or the tensor.
    """
    first = _open_one(path)
    count, number = first.number("split.count", 1), first.number("split.no", 0)
    if count == 1:
        return first
    names, tensors = part_names(path.name), dict(first.tensors)
    if number != 0 or count != len(names):
        first.fail("split.no", f"name the first part, as NAME-00001-of-{count:05}.gguf; this is part {number + 1}")
    for number, name in enumerate(names[1:], 1):
        part = _open_one(path.with_name(name))
        if (part.number("split.no"), part.number("split.count")) != (number, count):
            part.fail("split.no", f"must be part {number + 1} of {count}")
        if twice := tensors.keys() & part.tensors.keys():
            part.fail(f"tensor {min(twice)}", "occurs in another part, too")
        tensors |= part.tensors
    if (total := first.number("split.tensors.count", len(tensors))) != len(tensors):
        first.fail("split.tensors.count", f"must be the number of tensors in all parts ({len(tensors)}), not {total}")
    return replace(first, tensors=tensors)


def _open_one(path: Path) -> GgufFile:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise ValueError(f"model: {path} must be a regular file, not a FIFO, socket or device")
        empty = os.fstat(content.fileno()).st_size == 0
        data = np.empty(0, np.uint8) if empty else np.asarray(np.memmap(content, np.uint8, "r"))
    return _Scan(path, data).read()


class _Scan:
    """Scan of a file from its start to the places of its tensors.

    Attributes:
        at: place of the next byte.
        field: name of the field or the tensor that is being read, for errors.
    """

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.data, self.buffer = path, data, memoryview(data)
        self.at, self.field = 0, "header"

    def read(self) -> GgufFile:
        """Return the file."""
        if bytes(self.take(4)) != MAGIC:
            self.fail("is not a GGUF file: its first bytes are not GGUF")
        version = self.number("<I")
        if version not in VERSIONS:
            order = "; a version in the other byte order" if version & 0xFFFF == 0 else ""
            self.fail(f"version must be {' or '.join(map(str, VERSIONS))}, not {version}{order}")
        num_tensors = self.count("number of tensors", MAX_TENSORS)
        num_fields = self.count("number of fields", MAX_FIELDS)
        fields = self.read_fields(num_fields)
        self.field = "general.alignment"
        alignment = fields.get(self.field, 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(f"must be a power of two of at most {MAX_ALIGNMENT}, not {alignment!r:.100}")
        tensors = self.read_tensors(num_tensors, alignment)
        return GgufFile(self.path, fields, tensors, self.data)

    def read_fields(self, count: int) -> dict[str, Any]:
        """Return the metadata."""
        fields: dict[str, Any] = {}
        for index in range(count):
            self.field = f"field {index}"
            key = self.text(MAX_KEY_BYTES)
            self.field = f"{key:.100}"
            if key in fields:
                self.fail("occurs twice")
            fields[key] = self.value(self.type())
        return fields

    def value(self, kind: GGUFValueType) -> Any:
        """Return the value of a field."""
        if kind == GGUFValueType.STRING:
            return self.text(MAX_STRING_BYTES)
        if kind != GGUFValueType.ARRAY:
            dtype = np.dtype(NUMBERS[kind])
            number = self.take(dtype.itemsize).view(dtype)[0]
            # The shortest decimal that is this float32: a config.json has 1e-05, not 9.999999747378752e-06.
            return float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()
        inner, count = self.type(), self.count("number of items", MAX_ITEMS)
        place = _List(inner, count, self.at)
        if inner == GGUFValueType.ARRAY:
            self.fail("lists of lists are not supported")
        if inner != GGUFValueType.STRING:
            self.take(count * np.dtype(NUMBERS[inner]).itemsize)
            return place
        self.skip_texts(count)
        return place

    def skip_texts(self, count: int) -> None:
        """Pass over the texts of a list."""
        at, last, length_of = self.at, len(self.data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + length_of(self.buffer, at)[0]
        else:
            if at <= len(self.data):
                self.at = at
                return
        self.fail(f"is truncated: the texts of the list pass the end of the file, which has {len(self.data)} bytes")

    def read_tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors by name; each lies in the file, and none in another one."""
        found: dict[str, tuple[Kind, tuple[int, ...], int, int]] = {}
        for index in range(count):
            self.field = f"tensor {index}"
            name = self.text(MAX_NAME_BYTES)
            self.field = f"tensor {name}"
            if name in found:
                self.fail("occurs twice")
            found[name] = self.tensor(alignment)
        begin, end = -(-self.at // alignment) * alignment, 0
        tensors = {}
        for name, (kind, shape, offset, size) in sorted(found.items(), key=lambda each: each[1][2]):
            self.field = f"tensor {name}"
            if offset < end:
                self.fail(f"overlaps another tensor: it begins at byte {offset} of the data, not after {end}")
            end = offset + size
            if begin + end > len(self.data):
                available = max(len(self.data) - begin, 0)
                self.fail(f"is truncated: it ends at byte {end} of the data, and the file has {available}")
            rows = size // math.prod(shape[:-1])
            tensors[name] = GgufTensor(kind, shape, self.data[begin + offset : begin + end].reshape(*shape[:-1], rows))
        return tensors

    def tensor(self, alignment: int) -> tuple[Kind, tuple[int, ...], int, int]:
        """Return the kind and the shape of a tensor, and its place and size in bytes."""
        num_dims = self.number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"must have 1 to {MAX_DIMS} dims, not {num_dims}")
        shape = tuple(self.number("<Q") for _ in range(num_dims))[::-1]
        if not all(1 <= size <= MAX_SIZE for size in shape):
            self.fail(f"must have dims from 1 to {MAX_SIZE}, not {list(shape)}")
        number, offset = self.number("<I"), self.number("<Q")
        known = {kind.value: kind for kind in (*FLOATS, *QUANTIZED)}
        if number not in known:
            name = next((kind.name for kind in Kind if kind == number), str(number))
            supported = ", ".join(kind.name for kind in known.values())
            self.fail(f"type {name} is not supported; supported: {supported}")
        block, block_bytes = GGML_QUANT_SIZES[known[number]]
        if shape[-1] % block:
            self.fail(f"must have rows of whole blocks of {block} numbers, not of {shape[-1]}")
        if offset % alignment:
            self.fail(f"must begin at a multiple of {alignment} bytes, not at {offset}")
        return known[number], shape, offset, math.prod(shape) // block * block_bytes

    def take(self, size: int) -> np.ndarray:
        """Return the next bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            self.fail(f"is truncated: it ends at byte {self.at}, and the file has {len(self.data)}")
        return self.data[start : self.at]

    def number(self, form: str) -> int:
        """Return a whole number in a form of `struct`."""
        start = self.at
        self.at += struct.calcsize(form)
        if self.at > len(self.data):
            self.fail(f"is truncated: it ends at byte {self.at}, and the file has {len(self.data)}")
        (value,) = struct.unpack_from(form, self.buffer, start)
        return int(value)

    def count(self, what: str, limit: int) -> int:
        """Return a number of things, of at most `limit`."""
        if (value := self.number("<Q")) > limit:
            self.fail(f"{what} must be at most {limit}, not {value}")
        return value

    def text(self, limit: int) -> str:
        """Return a text of at most `limit` bytes."""
        length = self.count("length of a text", limit)
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError as error:
            self.fail(f"must be UTF-8: {error}")

    def type(self) -> GGUFValueType:
        """Return the type of a value."""
        if (number := self.number("<I")) not in {*NUMBERS, GGUFValueType.STRING, GGUFValueType.ARRAY}:
            self.fail(f"has the unknown type {number}")
        return GGUFValueType(number)

    def fail(self, problem: str) -> NoReturn:
        """Raise the ValueError of the field that is being read."""
        raise ValueError(f"model: {self.path}: {self.field}: {problem}")

"""Files in GGUF: their content, and the errors of broken and hostile files."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

from jpaged import gguf_file
from jpaged.checkpoint_files import part_names
from jpaged.gguf_file import open_gguf

UINT32, STRING, ARRAY = Type.UINT32, Type.STRING, Type.ARRAY


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def items(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = Kind.F32, offset: int = 0, dims=None) -> bytes:
    dims = len(shape) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims, *shape, kind, offset)


def content(
    fields: list[bytes] = (), tensors: list[bytes] = (), data: int = 128, *, version: int = 3, magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """A file with these fields and places of tensors, and zeros as data."""
    header = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(fields))))
    header += b"".join(fields) + b"".join(tensors)
    return header + bytes(-len(header) % 32 + data)


def open_bytes(tmp_path: Path, data: bytes) -> gguf_file.GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_gguf(path)


def test_files_of_the_package_gguf_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -5)
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "Zürich")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    matrix = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("vector", np.arange(3, dtype=np.float16))
    writer.add_tensor("packed", gguf.quantize(matrix, Kind.Q4_0), raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "model.gguf")
    assert file.architecture == "llama" and file.text("text") == "Zürich" and file.flag("flag", False)
    assert [file.number(name) for name in ("u8", "i64", "f32", "f64")] == [200, -5, 1e-5, 0.1]
    assert (file.number("none"), file.number("none", 7), file.items("none")) == (None, 7, None)
    assert file.items("words") == ["a", "", "ü"] and file.items("numbers") == [1, -2, 3]
    assert file.items("flags") == [True, False]
    assert {name: (each.kind, each.shape) for name, each in file.tensors.items()} == {
        "matrix": (Kind.F32, (2, 32)), "vector": (Kind.F16, (3,)), "packed": (Kind.Q4_0, (2, 32)),
    }  # fmt: skip
    np.testing.assert_array_equal(file.tensors["matrix"].data.view(np.float32), matrix)
    np.testing.assert_array_equal(file.tensors["packed"].data, gguf.quantize(matrix, Kind.Q4_0))
    assert file.kinds == {"F32": 256, "Q4_0": 36, "F16": 6}


def test_the_alignment_of_a_file_is_kept(tmp_path):
    fields = [field("general.alignment", UINT32, struct.pack("<I", 64))]
    head = content(fields, [tensor(shape=(1,)), tensor("b", (1,), offset=64)], 0)
    data = head[: len(head) // 64 * 64] if len(head) % 64 == 0 else head + bytes(-len(head) % 64)
    file = open_bytes(tmp_path, data + struct.pack("<f60xf", 1.5, 2.5))
    assert [file.tensors[name].data.view(np.float32).item() for name in "ab"] == [1.5, 2.5]


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


BROKEN = {
    "empty": (b"", "header: is truncated: it ends at byte 4, and the file has 0"),
    "no GGUF": (content(magic=b"GGML"), "header: is not a GGUF file"),
    "version 1": (content(version=1), "header: version must be 2 or 3, not 1"),
    "big endian": (content(version=3 << 24), "in the other byte order"),
    "cut header": (content()[:20], "header: is truncated: it ends at byte 24, and the file has 20"),
    "many fields": (content(counts=(0, 2**63)), "header: number of fields must be at most 4096"),
    "many tensors": (content(counts=(2**40, 0)), "header: number of tensors must be at most 65536"),
    "too few fields": (content(counts=(0, 3), data=0)[:24], "field 0: is truncated: it ends at byte 32"),
    "long key": (content([text("a" * 70_000)], counts=(0, 1)), "field 0: length of a text must be at most 65535"),
    "key of bytes": (content([field(b"\xff", UINT32, numbers(1))]), "field 0: must be UTF-8"),
    "unknown type": (content([field("a", 13, numbers(1))]), "a: has the unknown type 13"),
    "twice": (content([field("a", UINT32, numbers(1))] * 2), "a: occurs twice"),
    "long text": (content([field("a", STRING, struct.pack("<Q", 2**62))]), "a: length of a text must be at most"),
    "cut text": (content([field("a", STRING, struct.pack("<Q", 5000))]), "a: is truncated: it ends at byte"),
    "no UTF-8": (content([field("a", STRING, text(b"\xff"))]), "a: must be UTF-8"),
    "long list": (content([field("a", ARRAY, items(UINT32, 2**62, b""))]), "a: number of items must be at most"),
    "cut list": (content([field("a", ARRAY, items(UINT32, 10**6, b""))]), "a: is truncated"),
    "cut texts": (content([field("a", ARRAY, items(STRING, 10**6, b""))]), "a: is truncated: the texts of the list"),
    "hostile texts": (content([field("a", ARRAY, items(STRING, 9, struct.pack("<Q", 2**64 - 1)))]), "a: is truncated"),
    "lists of lists": (content([field("a", ARRAY, items(ARRAY, 1, items(UINT32, 1, numbers(1))))]), "lists of lists"),
    "alignment": (content([field("general.alignment", UINT32, numbers(48))]), "general.alignment: must be a power of"),
    "no alignment": (content([field("general.alignment", UINT32, numbers(0))]), "general.alignment: must be a power"),
    "alignment text": (content([field("general.alignment", STRING, text("32"))]), "general.alignment: must be a power"),
    "long name": (content(tensors=[tensor("a" * 300)]), "tensor 0: length of a text must be at most 256"),
    "tensor twice": (content(tensors=[tensor(), tensor()]), "tensor a: occurs twice"),
    "no dims": (content(tensors=[tensor(shape=())]), "tensor a: must have 1 to 4 dims, not 0"),
    "many dims": (content(tensors=[tensor(dims=10**9)]), "tensor a: must have 1 to 4 dims, not 1000000000"),
    "size 0": (content(tensors=[tensor(shape=(0, 5))]), r"tensor a: must have dims from 1 to \d+, not \[5, 0\]"),
    "huge size": (content(tensors=[tensor(shape=(2**63, 2))]), "tensor a: must have dims from 1 to"),
    "overflow": (content(tensors=[tensor(shape=(2**40, 2**40, 2**40))]), "tensor a: is truncated"),
    "kind": (content(tensors=[tensor(kind=Kind.IQ2_XS)]), "tensor a: type IQ2_XS is not supported; supported: F32, F1"),
    "IQ4_NL": (content(tensors=[tensor(kind=Kind.IQ4_NL)]), "tensor a: type IQ4_NL is not supported"),
    "number": (content(tensors=[tensor(kind=999)]), "tensor a: type 999 is not supported"),
    "integers": (content(tensors=[tensor(kind=Kind.I32)]), "tensor a: type I32 is not supported"),
    "half a block": (content(tensors=[tensor(shape=(48,), kind=Kind.Q8_0)]), "tensor a: must have rows of whole"),
    "unaligned": (content(tensors=[tensor(offset=4)]), "tensor a: must begin at a multiple of 32 bytes, not at 4"),
    "cut": (content(tensors=[tensor(shape=(33,))]), "tensor a: is truncated: it ends at byte 132 of the data"),
    "far": (content(tensors=[tensor(offset=2**60)]), "tensor a: is truncated"),
    "no data": (content(tensors=[tensor()], data=0)[:-1], "tensor a: is truncated"),
    "overlap": (content(tensors=[tensor(), tensor("b", offset=96)]), "tensor b: overlaps another tensor"),
    "same place": (content(tensors=[tensor(), tensor("b")]), "tensor b: overlaps another tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_with_the_file_and_the_field(name, tmp_path):
    data, message = BROKEN[name]
    with pytest.raises(ValueError, match=rf"^model: {tmp_path}/model\.gguf: .*{message}"):
        open_bytes(tmp_path, data)


def test_every_beginning_of_a_file_is_refused(tmp_path):
    whole = content(
        [field("a", STRING, text("b")), field("c", ARRAY, items(STRING, 2, text("d") + text("e")))],
        [tensor(), tensor("b", (32,), Kind.Q8_0, 128)], 128 + 34,
    )  # fmt: skip
    open_bytes(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"model\.gguf: "):
            open_bytes(tmp_path, whole[:length])


def test_fields_of_another_type_are_refused(tmp_path):
    fields = [field("a", STRING, text("b")), field("n", UINT32, numbers(1)), field("f", Type.BOOL, b"\1")]
    fields += [field("bytes", ARRAY, items(STRING, 1, text(b"\xff"))), field("l", ARRAY, items(UINT32, 1, numbers(1)))]
    file = open_bytes(tmp_path, content(fields))
    for call, message in (
        (lambda: file.number("a"), "a: must be a number, not 'b'"),
        (lambda: file.number("f"), "f: must be a number, not True"),
        (lambda: file.number("l"), "l: must be a number"),
        (lambda: file.text("n"), "n: must be a text, not 1"),
        (lambda: file.text("missing"), "missing: must be a text, not None"),
        (lambda: file.flag("n", True), "n: must be true or false, not 1"),
        (lambda: file.items("n"), "n: must be a list"),
        (lambda: file.items("bytes"), "bytes: must be UTF-8"),
    ):
        with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
            call()


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="must be a regular file"):
        open_gguf(tmp_path / "model.gguf")


def split_file(folder: Path) -> list[Path]:
    """Write a file in three parts with the package gguf, and return their paths."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_string("text", "of all")
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((2, 3), number, np.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_the_parts_of_a_split_file_are_one_file(tmp_path):
    parts = split_file(tmp_path)
    assert [path.name for path in parts] == part_names(parts[1].name) == [f"model-0000{n}-of-00003.gguf" for n in "123"]
    file = open_gguf(parts[0])
    assert file.text("text") == "of all" and file.kinds == {"F32": 5 * 24}
    found = {name: each.data.view(np.float32)[0].tolist() for name, each in file.tensors.items()}
    assert found == {f"t{n}": [n, n, n] for n in range(5)}


def test_parts_that_do_not_fit_together_are_refused(tmp_path):
    parts = split_file(tmp_path)
    with pytest.raises(ValueError, match=r"split.no: name the first part, as NAME-00001-of-00003.gguf; this is part 2"):
        open_gguf(parts[1])
    renamed = parts[0].with_name("model.gguf")
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"model.gguf: split.no: name the first part"):
        open_gguf(renamed)
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"00002-of-00003.gguf: split.no: must be part 2 of 3"):
        open_gguf(parts[0])
    parts[1].write_bytes(second.replace(b"t2", b"t0"))
    with pytest.raises(ValueError, match=r"00002-of-00003.gguf: tensor t0: occurs in another part, too"):
        open_gguf(parts[0])
    parts[1].write_bytes(second)
    first = parts[0].read_bytes()
    total = first.index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(first[:total] + struct.pack("<i", 6) + first[total + 4 :])
    with pytest.raises(ValueError, match=r"split.tensors.count: must be the number of tensors in all parts .5., not 6"):
        open_gguf(parts[0])
    parts[0].write_bytes(first)
    parts[2].unlink()
    with pytest.raises(OSError, match="00003-of-00003"):
        open_gguf(parts[0])

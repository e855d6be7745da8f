"""Files of blocks: their content returns, and broken, foreign and unfinished files are told and ignored."""

import errno
import logging
import os
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.runtime import disk_store
from jpaged.runtime.disk_store import DiskStore, open_folder, store_in

NAMES = [f"{i:064x}-{i % 2}" for i in range(8)]


def block(i: int, dtype=np.float32) -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(2, 3, 4).astype(dtype) + np.array(i, dtype)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def written(folder, count=3) -> DiskStore:
    store = DiskStore(folder)
    for i, name in enumerate(NAMES[:count]):
        store.write(name, block(i))
    store.flush()
    return store


def read(store: DiskStore, names, form=None):
    return list(store.read(names, [block(0) if form is None else form] * len(names)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_blocks_return_as_they_were_written_also_to_another_store(folder, dtype):
    store = DiskStore(folder)
    for i, name in enumerate(NAMES):
        store.write(name, jnp.asarray(block(i, dtype)))
    store.close()
    again = DiskStore(folder)
    assert again.names == NAMES
    for i, found in enumerate(read(again, NAMES, block(0, dtype))):
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, block(i, dtype))
    again.close()


def test_a_block_returns_before_its_file_is_there(folder, monkeypatch):
    may_write, write = threading.Event(), DiskStore._write
    monkeypatch.setattr(DiskStore, "_write", lambda *args: (may_write.wait(), write(*args)))
    store = DiskStore(folder)
    store.write(NAMES[0], block(5))
    np.testing.assert_array_equal(read(store, NAMES[:1])[0], block(5))
    store.delete(NAMES[:1])
    assert read(store, NAMES[:1]) == [None]
    may_write.set()
    store.flush()
    assert read(store, NAMES[:1]) == [None] and os.listdir(folder) == [], "a deleted file is not written later"


def test_a_disk_that_is_slower_than_evictions_gets_fewer_files(folder, monkeypatch):
    may_write, write = threading.Event(), DiskStore._write
    monkeypatch.setattr(disk_store, "MAX_WAITING", 2)
    monkeypatch.setattr(DiskStore, "_write", lambda *args: (may_write.wait(), write(*args)))
    store = DiskStore(folder)
    for i, name in enumerate(NAMES):
        store.write(name, block(i))
    may_write.set()
    store.flush()
    found = [each is not None for each in read(store, NAMES)]
    assert 2 <= sum(found) <= 3 and sum(found) == len(os.listdir(folder))


@pytest.mark.parametrize("fault", ["cut", "longer", "changed", "other form", "other name", "empty"])
def test_a_broken_file_is_told_and_deleted(folder, caplog, fault):
    written(folder).close()
    path = folder / NAMES[1]
    content = bytearray(path.read_bytes())
    match fault:
        case "cut":
            content = content[:-1]
        case "longer":
            content += b"x"
        case "changed":
            content[-5] ^= 1
        case "other form":
            content[9] ^= 1
        case "other name":
            content = bytearray((folder / NAMES[0]).read_bytes())
        case "empty":
            content = bytearray()
    path.write_bytes(content)
    store = DiskStore(folder)
    with caplog.at_level(logging.WARNING):
        found = read(store, NAMES[:3])
    assert [each is not None for each in found] == [True, False, True]
    assert [record.message for record in caplog.records] == [f"kv_cache_dir: {path} is broken, and is deleted"]
    assert not path.exists() and read(store, NAMES[1:2]) == [None]


def test_a_block_of_another_shape_is_not_used(folder):
    store = written(folder)
    assert read(store, NAMES[:1], np.zeros((2, 3, 5), np.float32)) == [None]


def test_the_rest_of_a_crash_and_foreign_files_are_ignored(folder, caplog):
    written(folder).close()
    (folder / "tmpabc.part").write_bytes(b"half a block")
    (folder / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        assert DiskStore(folder).names == NAMES[:3]
    assert caplog.records[0].message == f"kv_cache_dir: 1 files in {folder} are not blocks, and are ignored"
    assert (folder / "notes.txt").exists() and not (folder / "tmpabc.part").exists()


def test_a_full_disk_ends_the_writing_and_not_the_reading(folder, caplog, monkeypatch):
    store = written(folder)

    def full(source, destination):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_store.os, "replace", full)
    with caplog.at_level(logging.WARNING):
        for i, name in enumerate(NAMES[3:], start=3):
            store.write(name, block(i))
        store.flush()
    assert [record.message for record in caplog.records] == [
        "kv_cache_dir: no further files are written until the next start: [Errno 28] No space left on device"
    ]
    assert [each is not None for each in read(store, NAMES)] == [True] * 3 + [False] * 5
    assert sorted(os.listdir(folder)) == sorted(NAMES[:3])


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o704])
def test_a_folder_that_others_may_read_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"must belong to this user, with mode 700: .* its mode {mode:o}$"):
        open_folder(folder)


def test_folders_and_files_are_of_this_user_alone(folder):
    store, _ = store_in(folder, "model", 2**30)
    store.write(NAMES[0], block(0))
    store.flush()
    (inner,) = folder.iterdir()
    (file,) = inner.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder, inner, file)] == [0o700, 0o700, 0o600]


def test_models_have_folders_of_their_own_and_old_files_of_others_give_way(folder):
    size, written_bytes = 0, []
    for identity in ("a", "b"):
        store, room = store_in(folder, identity, 2**30)
        written_bytes.append(2**30 - room)
        for i, name in enumerate(NAMES):
            store.write(name, block(i))
        store.close()
        size = next(next(iter(folder.iterdir())).iterdir()).stat().st_size
    assert written_bytes == [0, 8 * size]
    store, room = store_in(folder, "b", 8 * size)
    assert store.names == NAMES and room == 4 * size
    assert store_in(folder, "a", 2**30)[0].names == NAMES[4:], "the last ones of the other model"


def test_the_least_recently_used_files_come_first(folder):
    store = written(folder)
    for at, name in enumerate(NAMES[:3]):
        os.utime(folder / name, (at, at))
    read(store, NAMES[:1])
    store.close()
    assert DiskStore(folder).names == [NAMES[1], NAMES[2], NAMES[0]]

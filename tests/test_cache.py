"""The object cache: what it gives back, what it refuses, and what it says when it can't work."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expertile.codegen import cache as cache_module
from expertile.codegen.cache import ObjectCache, default_directory
from expertile.codegen.errors import CodegenError

KEY = "k" * 64
DATA = bytes(range(256)) * 3


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache")


def the_file(cache: ObjectCache) -> Path:
    (file,) = cache.directory.glob("*.obj")
    return file


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Storing and finding ------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0", DATA])
def test_round_trip(cache: ObjectCache, data: bytes) -> None:
    with no_warning():
        assert cache.get(KEY) is None
        cache.put(KEY, data)
        assert cache.get(KEY) == data
        assert ObjectCache(cache.directory).get(KEY) == data
        assert cache.get("another") is None


def test_a_later_object_replaces_the_earlier(cache: ObjectCache) -> None:
    cache.put(KEY, b"old")
    cache.put(KEY, b"new")
    assert cache.get(KEY) == b"new"
    assert cache.info().entries == 1


def test_info_counts_objects_and_bytes(cache: ObjectCache) -> None:
    empty = cache.info()
    assert (empty.entries, empty.bytes, empty.enabled, empty.reason) == (0, 0, True, "")
    assert not cache.directory.exists()  # asking creates nothing
    cache.put("a", DATA)
    cache.put("b", DATA)
    full = cache.info()
    assert full.directory == cache.directory
    assert full.entries == 2
    assert full.bytes == sum(file.stat().st_size for file in cache.directory.glob("*.obj"))
    assert full.enabled


@pytest.mark.parametrize("key", ["", "a/b", "../a", ".", "a.b", "a\n", "k" * 129, "ä"])
def test_a_key_that_is_no_file_name_is_an_error(cache: ObjectCache, key: str) -> None:
    with pytest.raises(ValueError, match="key: expected"):
        cache.get(key)
    with pytest.raises(ValueError, match="key: expected"):
        cache.put(key, DATA)


# Damaged files ------------------------------------------------------------------------------------


def assert_absent_then_usable(cache: ObjectCache) -> None:
    file = the_file(cache)
    with no_warning():
        assert cache.get(KEY) is None
        assert not os.path.lexists(file)
        cache.put(KEY, DATA)
        assert cache.get(KEY) == DATA


def test_a_file_cut_short_anywhere_counts_as_absent(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    whole = the_file(cache).read_bytes()
    for length in range(len(whole)):
        the_file(cache).write_bytes(whole[:length])
        assert_absent_then_usable(cache)


def test_a_bit_flipped_anywhere_counts_as_absent(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    whole = the_file(cache).read_bytes()
    for at in range(len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 1 << at % 8
        the_file(cache).write_bytes(altered)
        assert_absent_then_usable(cache)


def test_a_longer_file_counts_as_absent(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    with the_file(cache).open("ab") as file:
        file.write(b"\0")
    assert_absent_then_usable(cache)


def test_the_file_of_another_key_counts_as_absent(cache: ObjectCache) -> None:
    cache.put("another", DATA)
    the_file(cache).rename(cache.directory / f"{KEY}.obj")
    assert_absent_then_usable(cache)


def test_a_link_counts_as_absent_and_its_target_stays(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    elsewhere = cache.directory.parent / "elsewhere"
    the_file(cache).rename(elsewhere)
    (cache.directory / f"{KEY}.obj").symlink_to(elsewhere)
    assert_absent_then_usable(cache)
    assert elsewhere.exists()


def test_a_pipe_counts_as_absent_and_blocks_nobody(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    file = the_file(cache)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert_absent_then_usable(cache)


def test_a_file_others_can_write_counts_as_absent(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    the_file(cache).chmod(0o620)
    assert_absent_then_usable(cache)


# Directories that can't be trusted ----------------------------------------------------------------


def assert_out_of_use(cache: ObjectCache, reason: str) -> None:
    """Nothing can be stored or found; one warning, and info(), say why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (KEY, "another"):
            assert cache.get(key) is None
            cache.put(key, DATA)
            assert cache.get(key) is None
    assert [each.category for each in caught] == [RuntimeWarning]
    assert reason in str(caught[0].message)
    info = cache.info()
    assert not info.enabled
    assert reason in info.reason


def assert_refused(cache: ObjectCache, reason: str) -> None:
    before = sorted(os.listdir(cache.directory))
    assert_out_of_use(cache, reason)
    assert sorted(os.listdir(cache.directory)) == before
    with pytest.raises(CodegenError, match="can't be cleared"):
        ObjectCache(cache.directory).clear()
    assert sorted(os.listdir(cache.directory)) == before


def test_the_directory_is_created_for_its_owner_alone(cache: ObjectCache) -> None:
    umask = os.umask(0)
    try:
        cache.put(KEY, DATA)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o720, 0o702, 0o1777])
def test_a_directory_others_can_write_is_refused(cache: ObjectCache, mode: int) -> None:
    cache.put(KEY, DATA)
    cache.directory.chmod(mode)
    assert_refused(ObjectCache(cache.directory), "others can write to it")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_directory_others_can_only_read_is_used(cache: ObjectCache, mode: int) -> None:
    cache.put(KEY, DATA)
    cache.directory.chmod(mode)
    with no_warning():
        assert cache.get(KEY) == DATA


def test_a_directory_that_becomes_writable_to_others_is_refused(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    assert cache.get(KEY) == DATA
    cache.directory.chmod(0o777)
    assert_refused(cache, "others can write to it")


def test_another_users_directory_is_refused(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(KEY, DATA)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert_refused(cache, f"belongs to user {stranger - 1}, not to {stranger}")


def test_a_link_to_a_directory_is_refused(cache: ObjectCache) -> None:
    cache.put(KEY, DATA)
    link = cache.directory.parent / "link"
    link.symlink_to(cache.directory)
    assert_refused(ObjectCache(link), "symbolic link")


# Disks that don't work ----------------------------------------------------------------------------


def test_a_full_disk_is_reported_once(cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def on_full_disk(path: Any, flags: int, mode: int = 0o777, **where: Any) -> int:
        if flags & os.O_CREAT:
            return real("/dev/full", os.O_WRONLY)  # every write: no space left on device
        return real(path, flags, mode, **where)

    monkeypatch.setattr(os, "open", on_full_disk)
    assert_out_of_use(cache, os.strerror(errno.ENOSPC))


def test_a_failed_rename_leaves_no_file(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_where: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    assert_out_of_use(cache, os.strerror(errno.ENOSPC))
    assert os.listdir(cache.directory) == []


def test_a_read_only_disk_is_reported_once(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777, **where: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode, **where)

    monkeypatch.setattr(os, "open", read_only)
    assert_out_of_use(cache, os.strerror(errno.EROFS))


def test_a_directory_that_cannot_be_created_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert_out_of_use(ObjectCache(tmp_path / "file" / "cache"), os.strerror(errno.ENOTDIR))


def test_info_tells_that_a_directory_is_not_writable(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(KEY, DATA)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere
    info = cache.info()
    assert not info.enabled
    assert "not writable" in info.reason
    assert info.entries == 1


# Clearing -----------------------------------------------------------------------------------------


def test_clear_removes_objects_and_leftovers(cache: ObjectCache) -> None:
    assert cache.clear() == 0
    for key in ("a", "b", "c"):
        cache.put(key, DATA)
    (cache.directory / ".d.obj.1.tmp").write_bytes(b"half an obj")
    (cache.directory / "notes.txt").write_bytes(b"someone's")
    assert cache.clear() == 3
    assert cache.get("a") is None
    assert not list(cache.directory.glob("*.tmp"))
    assert not list(cache.directory.glob(".*.tmp"))
    assert (cache.directory / "notes.txt").exists()
    cache.put("a", DATA)
    assert cache.get("a") == DATA


def test_a_put_overtaken_by_clear_is_no_trouble(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def cleared_first(*args: Any, **where: Any) -> None:
        cache.clear()
        real(*args, **where)

    monkeypatch.setattr(os, "replace", cleared_first)
    with no_warning():
        cache.put(KEY, DATA)
        assert cache.get(KEY) is None
        assert cache.info().enabled
        monkeypatch.undo()
        cache.put(KEY, DATA)
        assert cache.get(KEY) == DATA


_PUTS = """
import sys
from expertile.codegen.cache import ObjectCache
cache = ObjectCache(sys.argv[1])
data = {str(n): bytes([n]) * 4000 for n in range(8)}
for _ in range(50):
    for key in data:
        cache.put(key, data[key])
        assert cache.get(key) in (None, data[key])
assert cache.info().enabled, cache.info().reason
"""

_CLEARS = """
import sys
from pathlib import Path
from expertile.codegen.cache import ObjectCache
cache, stop = ObjectCache(sys.argv[1]), Path(sys.argv[2])
removed = 0
while not stop.exists():
    removed += cache.clear()
removed += cache.clear()  # whenever the others came to run: somebody removes what they have put
assert cache.info().enabled, cache.info().reason
print(removed)
"""


def test_processes_that_put_and_clear_do_not_disturb_each_other(
    cache: ObjectCache, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"

    def start(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", program, str(cache.directory), str(stop)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    clearing, putting = [start(_CLEARS) for _ in "12"], [start(_PUTS) for _ in "12"]
    try:
        assert [process.wait(timeout=120) for process in putting] == [0, 0]
    finally:
        stop.touch()
    removed = [int(process.communicate(timeout=120)[0]) for process in clearing]
    assert sum(removed) > 0
    assert [process.returncode for process in clearing] == [0, 0]
    assert not list(cache.directory.glob(".*.tmp"))
    assert cache.info().entries == 0


# Where it is --------------------------------------------------------------------------------------


def test_the_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTILE_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERTILE_CACHE_DIR", "relative")
    assert default_directory() == tmp_path / "relative"


@pytest.mark.skipif(sys.platform != "linux", reason="XDG directories are for Linux")
def test_the_default_is_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("EXPERTILE_CACHE_DIR")
        else:
            monkeypatch.setenv("EXPERTILE_CACHE_DIR", unset)
        assert default_directory() == tmp_path / "expertile"


def test_importing_the_cache_imports_no_helpers() -> None:
    program = (
        "import sys, expertile; before = set(sys.modules); import expertile.codegen.cache\n"
        "assert not {'filelock', 'platformdirs'} & (set(sys.modules) - before)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_other_systems_work_uncached(cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.os, "name", "nt")
    assert_out_of_use(cache, "POSIX")

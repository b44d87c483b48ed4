"""A persistent cache of object code, one file an object, named by its key.

The files are machine code that will be executed, so the directory is created with mode 0700 and is
not used if anyone else owns it or can write to it.  Whatever is wrong with a file (cut short,
altered, of another key, not ours), it counts as absent and is removed.  Whatever is wrong with the
directory, work goes on uncached, and one warning says so.

Environment:
    EXPERTILE_CACHE_DIR   the directory (default: the user's cache directory, on Linux
                          ~/.cache/expertile)
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from expertile.codegen.errors import CodegenError

DIRECTORY_VARIABLE = "EXPERTILE_CACHE_DIR"

_MAGIC = b"XPTOBJ1\n"
_DIGEST_BYTES = sha256().digest_size
_SUFFIX = ".obj"
_TEMPORARY = ".tmp"
_LOCK = ".lock"
_KEY = re.compile(r"[0-9A-Za-z_-]{1,128}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class CacheInfo:
    """What `expertile cache info` shows."""

    directory: Path
    entries: int
    bytes: int
    enabled: bool
    """Objects are read and written."""
    reason: str
    """Why not, or ""."""


def default_directory() -> Path:
    """EXPERTILE_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("expertile")


@cache
def default_cache() -> ObjectCache:
    """The cache of this process."""
    return ObjectCache(default_directory())


class ObjectCache:
    """Objects by key in one directory; safe among threads and processes.

    Every operation opens the directory, examines what it has opened, and works relative to that, so
    that nobody can exchange it in between.  A key is up to 128 letters, digits, "_" and "-"; other
    keys raise ValueError.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._trouble = ""  # why this process no longer uses the cache

    def get(self, key: str) -> bytes | None:
        """The object stored under `key`, or None."""
        name = _file_name(key)
        if self._trouble:
            return None
        try:
            with self._folder() as folder:
                data = _unpack(key, _read(folder, name))
                if data is None:
                    _remove(folder, name)
                return data
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None

    def put(self, key: str, data: bytes) -> None:
        """Store an object; other processes see all of it or nothing."""
        name = _file_name(key)
        if self._trouble:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._folder() as folder:
                _write(folder, name, _pack(key, data))
        except OSError as error:
            self._give_up(error)

    def info(self) -> CacheInfo:
        """Number and size of the objects, and whether the cache is in use."""
        sizes: list[int] = []
        reason = self._trouble
        try:
            with self._folder() as folder:
                sizes = _sizes(folder)
                if not os.access(self.directory, os.W_OK | os.X_OK):
                    reason = reason or f"{self.directory} is not writable"
        except FileNotFoundError:
            pass  # the first object creates it
        except OSError as error:
            reason = reason or str(error)
        return CacheInfo(self.directory, len(sizes), sum(sizes), not reason, reason)

    def clear(self) -> int:
        """Remove all objects; how many.

        Raises CodegenError if the directory is not ours alone or can't be written.
        """
        from filelock import FileLock

        try:
            with self._folder() as folder, FileLock(self.directory / _LOCK):
                names = os.listdir(folder)
                for name in names:
                    # Left by a process that died, or in use by a put() that will notice.
                    if name.endswith(_TEMPORARY):
                        _remove(folder, name)
                return sum(_remove(folder, name) for name in names if name.endswith(_SUFFIX))
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise CodegenError(f"the cache can't be cleared: {error}") from error

    @contextmanager
    def _folder(self) -> Iterator[int]:
        """The directory's file descriptor. Raises OSError, PermissionError with the reason."""
        if os.name != "posix":
            raise PermissionError("the object cache needs a POSIX file system")
        if stat.S_ISLNK(os.lstat(self.directory).st_mode):
            raise PermissionError(
                f"{self.directory} is a symbolic link; "
                f"set {DIRECTORY_VARIABLE} to the directory itself"
            )
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._refuse_if_shared(os.fstat(folder))
            yield folder
        finally:
            os.close(folder)

    def _refuse_if_shared(self, status: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"{self.directory} holds machine code and belongs to user {status.st_uid}, "
                f"not to {os.geteuid()}; set {DIRECTORY_VARIABLE} to a directory of your own"
            )
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise PermissionError(
                f"{self.directory} holds machine code and others can write to it "
                f"(mode {stat.S_IMODE(status.st_mode):04o}); empty it, then `chmod 700` it"
            )

    def _give_up(self, error: OSError) -> None:
        """Work uncached from now on, and say so once."""
        if self._trouble:
            return
        self._trouble = str(error)
        warnings.warn(
            f"Expertile's object cache is off, kernels are compiled anew in each process: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


def _file_name(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key: expected up to 128 letters, digits, '_' and '-', got {key!r}")
    return key + _SUFFIX


def _pack(key: str, data: bytes) -> bytes:
    return _MAGIC + sha256(key.encode()).digest() + sha256(data).digest() + data


def _unpack(key: str, packed: bytes) -> bytes | None:
    """The object, or None if these bytes aren't exactly what _pack(key, …) made."""
    data = packed[len(_MAGIC) + 2 * _DIGEST_BYTES :]
    return data if packed == _pack(key, data) else None


def _read(folder: int, name: str) -> bytes:
    """The content of a file that is ours alone; empty for a link, a pipe, someone else's file."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError:
        return b""
    try:
        status = os.fstat(file)
        ours = status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
        if not (ours and stat.S_ISREG(status.st_mode)):
            return b""
        with open(file, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(file)


def _write(folder: int, name: str, content: bytes) -> None:
    """Write under a temporary name, then rename."""
    temporary = f".{name}.{os.getpid()}.{os.urandom(8).hex()}{_TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        file = os.open(temporary, flags, 0o600, dir_fd=folder)
        with open(file, "wb") as stream:
            stream.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:
        pass  # someone cleared the cache meanwhile: nothing is stored and nothing is wrong
    except OSError:
        _remove(folder, temporary)
        raise


def _remove(folder: int, name: str) -> bool:
    """Remove a file if it is there and can be; whether it was."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    return False


def _sizes(folder: int) -> list[int]:
    sizes = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            with suppress(FileNotFoundError):  # removed since the listing
                sizes.append(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size)
    return sizes

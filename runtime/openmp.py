"""The one pool of threads: the OpenMP runtime that PyTorch has loaded.

A second OpenMP library in the process would mean a second pool of spinning threads, so the library is looked for among
those already mapped, and called by address.  libomp and Intel's libiomp5 export libgomp's entry points too.

libgomp's threads do not survive a fork: a parallel region in the child waits for threads that are not there.  A call
therefore notices a new process id and runs on one thread (see :func:`threads`).
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from functools import cache

import torch

_LIBRARY = re.compile(r"/lib(gomp|omp|iomp5)[-.\w]*\.so")
_ENTRIES = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num")


@dataclass(frozen=True)
class OpenMP:
    """Addresses of the entry points, and where they come from."""

    path: str
    parallel: int
    barrier: int
    thread_number: int


@cache
def runtime() -> OpenMP | None:
    """The OpenMP runtime in this process, PyTorch's own first; None if there is none (then one thread does it all)."""
    for path in sorted(_mapped_libraries(), key=lambda path: "torch" not in path):
        library = ctypes.CDLL(path)
        try:
            entries = [getattr(library, name) for name in _ENTRIES]
        except AttributeError:
            continue
        addresses = [ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in entries]
        return OpenMP(path, *addresses)
    return None


def _mapped_libraries() -> set[str]:
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/lib" in line}
    except OSError:
        return set()
    return {path for path in paths if _LIBRARY.search(path)}


_home = os.getpid()


def threads() -> int:
    """Threads for a call: PyTorch's setting; 1 in a forked child or without an OpenMP runtime."""
    if os.getpid() != _home or runtime() is None:
        return 1
    return torch.get_num_threads()

"""The system calls of memory placement on x86-64, called directly: the tests' own view of where pages are."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import numpy as np

PAGE = 4096
HUGE_PAGE = 2 << 20

MPOL_PREFERRED, MPOL_INTERLEAVE, MPOL_WEIGHTED_INTERLEAVE = 1, 3, 6
_MMAP, _MUNMAP, _MREMAP, _MADVISE = 9, 11, 25, 28
_MBIND, _SET_MEMPOLICY, _MOVE_PAGES = 237, 238, 279
_PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, _MAP_NORESERVE = 0x3, 0x22, 0x4000
_MREMAP_MAYMOVE_FIXED = 3
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: int) -> int:
    result: int = _libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result


def allocate(size: int, *, huge: bool = False) -> int:
    """The address of new private memory that nobody has touched; `huge` asks for pages of 2 MiB."""
    address = _call(
        _MMAP, 0, size, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    _call(_MADVISE, address, size, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
    return address


def free(address: int, size: int) -> None:
    """Give memory back."""
    _call(_MUNMAP, address, size)


def touch(address: int, size: int) -> None:
    """Write to each page, at which the kernel chooses its node; not zeros, as it may take pages of zeros away again."""
    np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))[::PAGE] = 1


def set_policy(mode: int, nodes: Iterable[int]) -> None:
    """What `numactl` does: the policy of this thread, and of the threads and processes that it starts."""
    mask = _mask(nodes)
    _call(_SET_MEMPOLICY, mode, mask.ctypes.data, _MASK_BITS)


def bind(address: int, size: int, mode: int, nodes: Iterable[int]) -> None:
    """The policy of a range that is still untouched."""
    mask = _mask(nodes)
    _call(_MBIND, address, size, mode, mask.ctypes.data, _MASK_BITS, 0)


_MASK_BITS = 65
"""Of a word of 64: the kernel reads one bit less than it is told."""


def _mask(nodes: Iterable[int]) -> np.ndarray:
    return np.array([sum(1 << node for node in nodes)], np.uint64)


def move_mapping(address: int, size: int, target: int) -> None:
    """Give memory another address without moving it to other pages, as a large `realloc` does."""
    _call(_MREMAP, address, size, size, _MREMAP_MAYMOVE_FIXED, target)


def nodes_of(address: int, size: int) -> np.ndarray:
    """The node of each page, int32; a negative error number for pages that aren't there."""
    pages = np.arange(address, address + size, PAGE, dtype=np.uint64)
    nodes = np.empty(pages.size, np.int32)
    _call(_MOVE_PAGES, 0, pages.size, pages.ctypes.data, 0, nodes.ctypes.data, 0)
    return nodes

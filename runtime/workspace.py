"""Scratch memory, reused between calls.

One workspace serves one call at a time; a pool hands them out, so that any number of Python threads can call at once.
EXPERTILE_DEBUG=poison fills the scratch with NaN before each call, to show a read of something never written.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque

import torch

from expertile.runtime import call

_NUMA = struct.Struct(f"={len(call.NUMA)}q")
_POISON = "poison" in os.environ.get("EXPERTILE_DEBUG", "").split(",")


class Workspace:
    """A call record and a buffer that grows."""

    def __init__(self) -> None:
        self._record = ctypes.create_string_buffer(call.RECORD.size + _NUMA.size)
        self.record = ctypes.addressof(self._record)
        self._bytes = memoryview(self._record).cast("B")
        self._allocate(0)

    def reserve(self, size: int) -> int:
        """The address, a multiple of 64, of at least `size` bytes."""
        if self.capacity < size + 64:
            self._allocate(size + 64)
        if _POISON:
            # NaN as bf16 and as fp32; fill_() would want threads, which a forked child doesn't have
            ctypes.memset(self._buffer.data_ptr(), 0xFF, self.capacity)
        return self._base

    def _allocate(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.capacity = size
        """Bytes held."""
        self._base = (self._buffer.data_ptr() + 63) & ~63

    def write(self, *fields: int) -> None:
        """Set all fields of the record up to those for several memory nodes, in order."""
        call.RECORD.pack_into(self._record, 0, *fields)

    def copy(self, image: bytes, *caller: int) -> None:
        """Likewise from the bytes of a record, but for the addresses of the caller's tensors."""
        self._bytes[: len(image)] = image
        call.CALLER.pack_into(self._record, 0, *caller)

    def write_numa(self, *fields: int) -> None:
        """Set the others."""
        _NUMA.pack_into(self._record, call.RECORD.size, *fields)

    def read(self, name: str) -> int:
        """A field, as the driver left it."""
        return int(struct.unpack_from("=q", self._record, call.OFFSETS[name])[0])


_pool: deque[Workspace] = deque()


def acquire() -> Workspace:
    """A workspace nobody else uses (deque operations are atomic)."""
    try:
        return _pool.pop()
    except IndexError:
        return Workspace()


def release(workspace: Workspace) -> None:
    """Give it back."""
    _pool.append(workspace)


def held_bytes() -> int:
    """Scratch memory the pool holds now."""
    return sum(workspace.capacity for workspace in list(_pool))


def clear() -> None:
    """Free the pool's scratch memory."""
    _pool.clear()

"""What generated code reads: every load notes its address, its size and its thread in a log.

    log = Log()
    with recording(log):                       # code written in here takes notes
        ir = kernel.ir()
    log.watch(first, end)                      # of what touches these addresses
    …                                          # run it
    log.loads()

Neither templates nor ISAs know: the builder tells the tracer of each load that it emits (`ir.Builder.reads`), before
optimisation. Prefetches are none. Notes are taken in line, without a call, as tiles don't survive one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from expertile.codegen.cache import ObjectCache
from expertile.codegen.errors import CodegenError
from expertile.codegen.ir import Builder, L, Value, i64, ptr, tracer, void

LOAD = np.dtype([(name, np.int64) for name in ("thread", "address", "bytes", "rows", "stride")])
"""A load: the thread (its thread pointer), and `rows` times `bytes` bytes from `address` on, `stride` bytes apart."""

_NOTE = "note_load"
_CURSOR, _FIRST, _END = 0, 8, 16
_HEADER = 64
"""Bytes in front of the loads: how many there were, and the addresses that are watched."""


class Log:
    """Room for `capacity` loads by any threads; memory is taken as it fills.

    It must live as long as code that takes notes in it.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._capacity = capacity
        # What is not watched, or too much, is written behind the last one.
        self._memory = np.empty(_HEADER + (capacity + 1) * LOAD.itemsize, np.uint8)
        self._header = self._memory[:_HEADER].view(np.int64)
        self._loads = self._memory[_HEADER:].view(LOAD)
        self.watch(0, 0)

    def watch(self, first: int, end: int) -> None:
        """Begin anew, with loads of which a byte lies at `first`…`end` − 1."""
        self._header[:3] = 0, first, end

    def loads(self) -> np.ndarray:
        """Those noted, `LOAD` `[n]`, about in the order in which they happened.

        Raises CodegenError if they were more than there is room for.
        """
        count = int(self._header[0])
        if count > self._capacity:
            raise CodegenError(
                f"log: expected at most {self._capacity} loads of watched addresses, got {count}; watch fewer"
            )
        return self._loads[:count].copy()

    def note(self, b: Builder, address: Value, size: Value, rows: int, stride: int) -> None:
        """The code of a note: see `ir.Tracer`."""
        if _NOTE not in b.module.globals:
            self._define(b.module)
        arguments = (address, size, b.const(i64, rows), b.const(i64, stride))
        b.call(_NOTE, void, arguments)

    def _define(self, module: L.Module) -> None:
        """The function that takes a note, to be inlined."""
        function = L.Function(module, L.FunctionType(void, [ptr, i64, i64, i64]), _NOTE)
        function.linkage = "private"
        function.attributes.add("alwaysinline")
        with recording(None):  # it reads itself
            b = Builder(module, function)
        address, size, rows, stride = map(b.wrap, function.args)
        header, place = b.to_ptr(b.const(i64, self._memory.ctypes.data)), b.to_int(address)
        first, end = (header.at(offset).load(i64) for offset in (_FIRST, _END))
        watched = (place < end) & (place + (rows - 1) * stride + size > first)
        number = b.atomic_add(header.at(_CURSOR), watched.zext(i64))
        slot = b.select(watched & (number < self._capacity), number, self._capacity)
        into = header.at(slot * LOAD.itemsize + _HEADER)
        thread = b.to_int(b.call("llvm.thread.pointer", ptr, []))
        for index, value in enumerate((thread, place, size, rows, stride)):
            into.at(8 * index).store(value)
        b.ret()
        b.finish()


@contextmanager
def recording(log: Log | None) -> Iterator[None]:
    """Code that this thread writes meanwhile takes notes in a log; or in none, as usual."""
    token = tracer.set(log)
    try:
        yield
    finally:
        tracer.reset(token)


class Unkept(ObjectCache):
    """A cache that keeps nothing: code with the address of a log in it is good for this process only."""

    def __init__(self) -> None:
        super().__init__("")

    def get(self, key: str) -> None:
        return None

    def put(self, key: str, data: bytes) -> None:
        pass

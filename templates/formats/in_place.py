"""Rows that tiles are loaded from where they lie: K contiguous elements each, any distance apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from expertile.codegen.ir import Builder, L, Value, element_bytes, i32, vec
from expertile.codegen.layouts import GROUP
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import ByRows, Matrix

_BYTES = 64
"""Of a chunk."""


class InPlace(ByRows):
    """Elements that a machine multiplies as they are."""

    direct = True
    decode_cycles = 0.0
    element: ClassVar[L.Type]

    def code_bytes(self, columns: int) -> int:
        return element_bytes(self.element) * columns

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        address = matrix.codes.at(row * self.row_bytes).at(chunk * _BYTES)
        return address.load(vec(i32, GROUP), align=element_bytes(self.element))

    def stage(
        self,
        b: Builder,
        vectors: Vectors,
        sources: Sequence[Matrix],
        rows: int,
        first: int,
        end: int,
        into: Sequence[Value],
        stride: int,
    ) -> None:
        size = element_bytes(self.element)
        chunk = _BYTES // size
        type_ = vec(self.element, chunk)
        full = first + (end - first) // chunk * chunk
        for block, panel in zip(sources, into, strict=True):
            with b.loop(0, rows) as row:
                source, target = block.codes.at(row * self.row_bytes), panel.at(row * stride)
                with b.loop(first, full, chunk) as k:
                    target.at((k - first) * size).store(source.at(k * size).load(type_))
                if full < end:
                    tail = source.at(size * full).load_masked(type_, end - full)
                    target.at(size * (full - first)).store(tail)
            with b.loop(rows, GROUP) as row, b.loop(0, size * (end - first), _BYTES) as offset:
                panel.at(row * stride + offset).store(b.zero(type_))

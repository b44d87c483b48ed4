"""bf16 rows, K contiguous elements each, any distance apart: read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value, i16, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP, chunks_of
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import ByRows, Matrix

_Row = vec(i16, CHUNK)


@dataclass(frozen=True)
class RowMajor(ByRows):
    """`W[N][K]`."""

    name = "bf16"
    direct = True

    def code_bytes(self, columns: int) -> int:
        return 2 * columns

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        return matrix.codes.at(row * self.row_bytes).at(chunk * 64).load(vec(i32, GROUP), align=2)

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
        full = first + (end - first) // CHUNK * CHUNK
        for block, panel in zip(sources, into, strict=True):
            with b.loop(0, rows) as row:
                source, target = block.codes.at(row * self.row_bytes), panel.at(row * stride)
                with b.loop(first, full, CHUNK) as k:
                    target.at((k - first) * 2).store(source.at(k * 2).load(_Row))
                if full < end:
                    tail = source.at(2 * full).load_masked(_Row, end - full)
                    target.at(2 * (full - first)).store(tail)
            with b.loop(rows, GROUP) as row, b.loop(0, chunks_of(end - first)) as chunk:
                panel.at(row * stride + chunk * (2 * CHUNK)).store(b.zero(_Row))

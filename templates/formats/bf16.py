"""bf16 rows, K contiguous elements each, any distance apart: read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value, i16, vec
from expertile.codegen.layouts import CHUNK, GROUP, chunks_of
from expertile.templates.formats.base import WeightFormat

_Row = vec(i16, CHUNK)


@dataclass(frozen=True)
class RowMajor(WeightFormat):
    """`W[N][K]`."""

    name = "bf16"
    direct = True

    def row_offset(self, row: Value) -> Value:
        return row * self.row_bytes

    def stage(
        self,
        b: Builder,
        sources: Sequence[Value],
        rows: int,
        first: int,
        end: int,
        into: Sequence[Value],
        stride: int,
    ) -> None:
        full = first + (end - first) // CHUNK * CHUNK
        for block, panel in zip(sources, into, strict=True):
            with b.loop(0, rows) as row:
                source, target = block.at(row * self.row_bytes), panel.at(row * stride)
                with b.loop(first, full, CHUNK) as k:
                    target.at((k - first) * 2).store(source.at(k * 2).load(_Row))
                if full < end:
                    tail = source.at(2 * full).load_masked(_Row, end - full)
                    target.at(2 * (full - first)).store(tail)
            with b.loop(rows, GROUP) as row, b.loop(0, chunks_of(end - first)) as chunk:
                panel.at(row * stride + chunk * (2 * CHUNK)).store(b.zero(_Row))

"""bf16 columns: `W[K][N]`, as gpt-oss keeps its experts in Transformers. Read in place, transposed block by block.

With gate and up interleaved, output n of a half is column 2n or 2n + 1: `column_bytes` is 4 instead of 2, and the two
halves of a word belong to gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value, i16, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP, transpose
from expertile.templates.formats.base import WeightFormat

_Columns = vec(i16, GROUP)


@dataclass(frozen=True)
class Transposed(WeightFormat):
    """`W[K][N]`; `row_bytes` is the distance of two k's, `column_bytes` that of two outputs."""

    name = "bf16_transposed"
    direct = False

    column_bytes: int

    def row_offset(self, row: Value) -> Value:
        return row * self.column_bytes

    def stage(
        self, b: Builder, block: Value, rows: int, first: int, end: int, into: Value, stride: int
    ) -> None:
        full = first + (end - first) // CHUNK * CHUNK
        with b.loop(first, full, CHUNK) as k:
            self._chunk(
                b, block.at(k * self.row_bytes), rows, CHUNK, into.at((k - first) * 2), stride
            )
        if full < end:
            source, target = block.at(full * self.row_bytes), into.at(2 * (full - first))
            self._chunk(b, source, rows, end - full, target, stride)

    def _chunk(
        self, b: Builder, source: Value, rows: int, ks: int, into: Value, stride: int
    ) -> None:
        """32 k's of 16 outputs: pairs of k's become words, then the words are transposed."""
        columns = [self._columns(b, source.at(k * self.row_bytes), rows) for k in range(ks)]
        columns += [b.zero(_Columns)] * (CHUNK - ks)
        words = [
            columns[k].zext(vec(i32, GROUP)) | (columns[k + 1].zext(vec(i32, GROUP)) << 16)
            for k in range(0, CHUNK, 2)
        ]
        for row, vector in enumerate(transpose(b, words)):
            into.at(row * stride).store(vector)

    def _columns(self, b: Builder, source: Value, rows: int) -> Value:
        if self.column_bytes == 2:
            return source.load_masked(_Columns, rows) if rows < GROUP else source.load(_Columns)
        # Every second element. The last one's neighbour is not ours to read, hence the mask even for 16.
        pairs = source.load_masked(vec(i16, 2 * GROUP), 2 * rows - 1)
        return pairs.shuffle(range(0, 2 * GROUP, 2))

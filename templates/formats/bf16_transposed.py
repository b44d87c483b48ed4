"""bf16 columns: `W[K][N]`, as gpt-oss keeps its experts in Transformers. Read in place, transposed block by block.

A row of memory holds one k of all outputs, and the next k is far away: reading a few outputs of it fetches a cache line
from a page of its own.  So many outputs are staged together (a few hundred bytes of each row), and the rows to come are
prefetched by address, which no hardware prefetcher would guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertile.codegen.ir import Builder, Value, i16, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP, transpose
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import Matrix, WeightFormat

_Words = vec(i32, GROUP)
_LINE = 64
_AHEAD = 2 * CHUNK
"""k's from a row to the one prefetched meanwhile."""


@dataclass(frozen=True)
class Transposed(WeightFormat):
    """`W[K][N]`; `row_bytes` is the distance of two k's.

    outputs: outputs staged together.
    interleaved: gate and up alternate, output n of the two being the halves of word n of a row.
    """

    name = "bf16_transposed"

    outputs: int
    interleaved: bool

    @property
    def staged_rows(self) -> int:
        return self.outputs

    @property
    def _column_bytes(self) -> int:
        return 4 if self.interleaved else 2

    def code_bytes(self, columns: int) -> int:
        return 2 * columns

    def offsets(self, row: Any) -> tuple[Any, Any]:
        return row * self._column_bytes, 0

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
        starts = [matrix.codes for matrix in sources]
        if self.interleaved:
            starts = starts[:1]  # up lies between the gates
        full = first + (end - first) // CHUNK * CHUNK
        with b.loop(first, full, CHUNK) as k:
            for source in starts:
                self._prefetch(source.at((k + _AHEAD) * self.row_bytes), rows)
            self._chunk(
                b, starts, k, CHUNK, rows, [panel.at((k - first) * 2) for panel in into], stride
            )
        if full < end:
            tails = [panel.at(2 * (full - first)) for panel in into]
            self._chunk(b, starts, b.const(k.type, full), end - full, rows, tails, stride)

    def _prefetch(self, source: Value, rows: int) -> None:
        # Into L2: the misses of L1 are too few at a time to cover the latency of single lines (half the speed).
        for k in range(CHUNK):
            for offset in range(0, rows * self._column_bytes, _LINE):
                source.at(k * self.row_bytes + offset).prefetch(2)

    def _chunk(
        self,
        b: Builder,
        sources: Sequence[Value],
        k: Value,
        ks: int,
        rows: int,
        into: Sequence[Value],
        stride: int,
    ) -> None:
        """`ks` k's from `k` on, of all blocks of 16 outputs; the last block may be smaller."""
        whole, rest = divmod(rows, GROUP)
        with b.loop(0, whole) as block:
            starts = [source.at(block * (GROUP * self._column_bytes)) for source in sources]
            panels = [panel.at(block * (GROUP * stride)) for panel in into]
            self._block(b, starts, k, ks, GROUP, panels, stride)
        if rest:
            starts = [source.at(whole * GROUP * self._column_bytes) for source in sources]
            panels = [panel.at(whole * GROUP * stride) for panel in into]
            self._block(b, starts, k, ks, rest, panels, stride)

    def _block(
        self,
        b: Builder,
        sources: Sequence[Value],
        k: Value,
        ks: int,
        rows: int,
        into: Sequence[Value],
        stride: int,
    ) -> None:
        """32 k's of up to 16 outputs: pairs of k's become words, then the words are transposed."""
        matrices: list[list[Value]] = [[] for _ in into]
        for pair in range(0, CHUNK, 2):
            both = [
                [self._columns(b, source.at((k + i) * self.row_bytes), rows) for source in sources]
                if i < ks
                else [b.zero(_Words)] * len(sources)
                for i in (pair, pair + 1)
            ]
            for matrix, words in zip(matrices, self._pairs(b, *both), strict=True):
                matrix.append(words)
        for matrix, panel in zip(matrices, into, strict=True):
            for row, vector in enumerate(transpose(b, matrix)):
                panel.at(row * stride).store(vector)

    def _columns(self, b: Builder, source: Value, rows: int) -> Value:
        """One k of 16 outputs, a word each, zero from `rows` on."""
        type_ = _Words if self.interleaved else vec(i16, GROUP)
        if rows == GROUP:
            columns = source.load(type_, align=2)
        else:
            words = 2 * rows if self.interleaved else rows
            columns = source.load_masked(vec(i16, 2 * GROUP if self.interleaved else GROUP), words)
            columns = columns.bitcast(type_)
        return columns if self.interleaved else columns.zext(_Words)

    def _pairs(self, b: Builder, even: list[Value], odd: list[Value]) -> list[Value]:
        """Words of the pair (k, k+1) for each matrix."""
        if not self.interleaved:
            return [x | (y << 16) for x, y in zip(even, odd, strict=True)]
        (x,), (y,) = even, odd
        return [(x & 0xFFFF) | (y << 16), (x >> 16) | ((y >> 16) << 16)]

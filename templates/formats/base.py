"""What a weight format is.

A matrix of N rows (outputs) by K (inputs) is multiplied in blocks of 16 rows and chunks of 32 k, as bf16.  A format
says how tensors hold it and how a kernel comes by its rows:

    direct      rows of what is multiplied, loaded as tiles from where they lie: bf16, or int8 by int8 activations,
                of which 64 make a chunk
    by rows     any chunk of a row can be had in a register: `words` (quantised formats, see `formats.quantized`)
    otherwise   only blocks of several rows can, as the memory runs across them

What is not loaded from where it lies is **staged**: written as plain bf16 rows into per-thread scratch.  That serves
the ragged edges of a direct format too: the last k's of a row and the last rows of a matrix go through scratch that is
padded with zeros, because a tile load takes whole tiles and the memory behind them belongs to somebody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import GROUP
from expertile.codegen.vectors import Vectors


@dataclass(frozen=True)
class Matrix:
    """Where a matrix begins, or its rows from some row on: an address for each part of a format."""

    codes: Value
    """The elements, whatever they are."""
    scales: Value
    """Of rows or groups, for the formats that keep them apart; else not to be read."""
    factor: Value
    """The factor of the whole matrix, for the formats that have one; else not to be read."""


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How rows of weights come to be bf16. Frozen: it is part of a kernel's spec."""

    name: ClassVar[str]
    direct: ClassVar[bool] = False
    """Whether full chunks of full row blocks are read from memory as they lie, `row_bytes` apart."""

    decode_cycles: ClassVar[float] = 0.0
    """Core cycles to work out a chunk of a row while it is multiplied, about, with 512-bit vectors: for the cost model.
    Tables that take registers away from sums cost more than their instructions."""
    crowded_cycles: ClassVar[float] = 0.0
    """More, where sums leave few registers: of a format whose tables want some."""
    stage_cycles: ClassVar[float] = 0.0
    """Likewise while rows are staged."""
    carry_cycles: ClassVar[float] = 0.0
    """Likewise while rows are staged and others multiplied, beside what multiplying hides."""

    row_bytes: int
    """Bytes of codes from an output row to the next (or, for a transposed matrix, from an input to the next)."""

    @property
    def staged_rows(self) -> int:
        """Rows staged together, a multiple of 16."""
        return GROUP

    @abstractmethod
    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of a row."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, all its parts, without gaps."""
        return rows * self.code_bytes(columns)

    def every(self, step: int) -> Self:
        """The format of the matrix that each `step`-th row belongs to."""
        return replace(self, row_bytes=step * self.row_bytes)

    def offsets(self, row: Any) -> tuple[Any, Any]:
        """Bytes from the beginning of the codes and of the scales to row `row`: a number or a Value."""
        return row * self.row_bytes, 0

    def rows(self, matrix: Matrix, row: Value) -> Matrix:
        """The matrix from row `row`, a multiple of 16, on."""
        codes, scales = self.offsets(row)
        return Matrix(matrix.codes.at(codes), matrix.scales.at(scales), matrix.factor)

    def row_scale(self, b: Builder, matrix: Matrix, rows: int) -> Value | None:
        """What the sums of 16 rows, from where `matrix` begins, have yet to be multiplied by: an fp32 vector.

        Zero from `rows` on, which are not read; None if there is no such factor.
        """
        return None

    @abstractmethod
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
        """Write k = `first`…`end` of `rows` rows of each matrix in `sources` to each address in `into`.

        The sources are the matrices multiplied together (gate and up), from the same row on. `first` is a multiple of
        32, `rows` at most `staged_rows`. Rows are `stride` bytes apart in `into`; what is missing to a multiple of 16
        rows and of 32 k's becomes zero, and nothing outside the named rows and k's is read.
        """


@dataclass(frozen=True)
class ByRows(WeightFormat):
    """A format that can give any chunk of a row."""

    unit: ClassVar[int] = 1
    """Chunks that share something which is worth working out once for all of them."""
    step: ClassVar[int] = 1
    """Chunks among them that are decoded at once; it divides `unit`."""

    shared_rows: ClassVar[int] = 1
    """Rows that share a row of scales."""

    def unit_of(self, chunks: int) -> int:
        """`unit`, or less in rows of a number of chunks that it does not divide."""
        return self.unit if chunks % self.unit == 0 else self.step

    @property
    def grain(self) -> int:
        """Chunks that can be read apart from their neighbours in a row: where a row may be divided."""
        return self.step

    @abstractmethod
    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        """The k's from 32 · chunk on of row `row` (0…15, from where `matrix` begins): 16 words of bf16 pairs.

        Reads nothing that is not of this row.
        """

    def decoder(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, first: Value
    ) -> Callable[[Value], Iterable[Value]]:
        """What gives the words of `step` chunks, from one of the `unit` chunks from `first` on.

        `first` is a multiple of what `unit_of` says, and what it is called with, of `step`.
        """
        return lambda chunk: [self.words(b, vectors, matrix, row, chunk)]

    def decoders(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], first: Value
    ) -> list[Callable[[Value], Iterable[Value]]]:
        """The decoders of several rows, which may share something as well."""
        return [self.decoder(b, vectors, matrix, row, first) for row in rows]

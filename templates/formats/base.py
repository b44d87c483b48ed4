"""What a weight format is.

A matrix of N rows (outputs) by K (inputs) is multiplied in blocks of 16 rows.  A format either offers the rows as
they lie in memory (`direct`), or **stages** a block: writes it as 16 plain bf16 rows into per-thread scratch, where
the tile loads then read it.  Staging also serves the ragged edges of a direct format: the last k's of a row and the
last rows of a matrix go through scratch that is padded with zeros, because a tile load takes whole tiles and the
memory behind them belongs to somebody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from expertile.codegen.ir import Builder, Value


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How 16 rows of weights come to be plain bf16 rows. Frozen: it is part of a kernel's spec."""

    name: ClassVar[str]
    direct: ClassVar[bool]
    """Whether full chunks of full row blocks are read from memory as they lie, `row_bytes` apart."""

    row_bytes: int
    """Bytes from an output row to the next (or, for a transposed matrix, from an input to the next)."""

    @abstractmethod
    def row_offset(self, row: Value) -> Value:
        """Byte offset of output row `row` from the matrix's address."""

    @abstractmethod
    def stage(
        self, b: Builder, block: Value, rows: int, first: int, end: int, into: Value, stride: int
    ) -> None:
        """Write k = `first`…`end` of the first `rows` (≤ 16) rows of the block at address `block` to `into`.

        `first` is a multiple of 32. Rows are `stride` bytes apart there; what is missing to 16 rows and to a multiple
        of 32 k's becomes zero, and nothing outside the named rows and k's is read.
        """

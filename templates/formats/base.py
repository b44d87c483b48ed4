"""What a weight format is.

A matrix of N rows (outputs) by K (inputs) is multiplied in blocks of 16 rows.  A format either offers the rows as
they lie in memory (`direct`), or **stages** some blocks: writes them as plain bf16 rows into per-thread scratch, where
the tile loads then read them.  Staging also serves the ragged edges of a direct format: the last k's of a row and the
last rows of a matrix go through scratch that is padded with zeros, because a tile load takes whole tiles and the
memory behind them belongs to somebody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import GROUP


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How rows of weights come to be plain bf16 rows. Frozen: it is part of a kernel's spec."""

    name: ClassVar[str]
    direct: ClassVar[bool]
    """Whether full chunks of full row blocks are read from memory as they lie, `row_bytes` apart."""

    row_bytes: int
    """Bytes from an output row to the next (or, for a transposed matrix, from an input to the next)."""

    @property
    def staged_rows(self) -> int:
        """Rows staged together, a multiple of 16."""
        return GROUP

    @abstractmethod
    def row_offset(self, row: Value) -> Value:
        """Byte offset of output row `row` from the matrix's address."""

    @abstractmethod
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
        """Write k = `first`…`end` of `rows` rows from each address in `sources` to each in `into`.

        The sources are the matrices multiplied together (gate and up), at the same rows. `first` is a multiple of 32,
        `rows` at most `staged_rows`. Rows are `stride` bytes apart in `into`; what is missing to a multiple of 16 rows
        and of 32 k's becomes zero, and nothing outside the named rows and k's is read.
        """

"""What the kernels of a projection have in common: what they are specialised on, and where their scratch is what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertile.codegen import isa as isas
from expertile.codegen.ir import L, Value, i64, ptr
from expertile.codegen.isa import TileIsa, Variant
from expertile.codegen.layouts import GROUP, groups_of
from expertile.templates.formats.base import Matrix, WeightFormat

if TYPE_CHECKING:
    from expertile.templates.loops import Emitter

LAUNCH_BLOCKS = 8
"""Token blocks of a call, at most."""

MATRIX = {"codes": 0, "scales": 8, "factor": 16, "bias": 24}
"""The record of a matrix: where the addresses of its parts are, in bytes."""
MATRIX_BYTES = 32

TILE = 4 * GROUP * GROUP
"""Bytes of a stored C tile, at most."""
EDGE = 64 * GROUP
"""Bytes of a tile of the last k's."""
LINE = 64


@dataclass(frozen=True)
class ExpertKernel(ABC):
    """What the two projections share: rows `outputs`, reduction `inputs`, tokens, format, bias."""

    isa: str
    inputs: int
    outputs: int
    tokens: int
    """Of a block."""
    blocks: int
    """Token blocks of a call, at least; more than one only if they are full."""
    format: WeightFormat
    bias: str | None
    """None, "bf16" or "f32"."""
    variant: Variant

    @property
    @abstractmethod
    def name(self) -> str:
        """The exported function's name."""

    @abstractmethod
    def ir(self) -> str:
        """The kernel as LLVM IR."""

    @property
    def machine(self) -> TileIsa:
        """The ISA."""
        return isas.by_name(self.isa)

    @property
    def block_tokens(self) -> int:
        """Tokens of a full block."""
        return self.machine.block_tokens

    @property
    def suffix(self) -> str:
        """The end of the kernel's name: what it is specialised on beside its shape."""
        return f"m{self.tokens}b{self.blocks}_{self.variant.name}"

    @property
    def panel_stride(self) -> int:
        """Bytes from row to row of a staged block; the odd cache line keeps rows out of each other's L1 sets."""
        return 64 * self.machine.chunks(self.inputs) + LINE

    @property
    def copy_stride(self) -> int:
        """Bytes from row to row of a copied k block."""
        return 64 * self.machine.chunks(self.variant.k_block) + LINE

    @property
    def row_unit(self) -> int:
        """Rows are divided among threads in multiples of this."""
        return max(2 * GROUP, self.format.staged_rows)

    @property
    def scratch_bytes(self) -> int:
        """Per-thread scratch."""
        return self.scratch.size

    @property
    def scratch(self) -> Scratch:
        """Where things lie in the per-thread scratch."""
        return Scratch.of(self)

    @property
    def matrices(self) -> int:
        """Matrices multiplied by the same tokens: 2 for gate and up."""
        return len(self.names)

    def takes(self, variant: Variant) -> bool:
        """Whether there is such a variant of the kernel."""
        return True

    @abstractmethod
    def parameters(self) -> dict[str, L.Type]: ...

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The matrices by their parameters; `next_…` are those that the thread will be given next."""

    def row_blocks(self, matrices: Sequence[Matrix], row: Value, count: int) -> list[Matrix]:
        """The A blocks for rows `row`…"""
        rows = [row + GROUP * i for i in range(count)]
        return [self.format.rows(matrix, first) for matrix in matrices for first in rows]

    def streams(self, matrices: Sequence[Matrix], row: Value, count: int) -> list[Matrix]:
        """Where the memory of those blocks begins, in as many parts of 16 rows."""
        return self.row_blocks(matrices, row, count)

    @property
    def rows_apart(self) -> int:
        """Rows of memory from a row of a matrix to its next one."""
        return 1

    @property
    def row_span(self) -> int:
        """Bytes of codes from a row to the next, of whatever matrix, where a format reads rows in place."""
        return self.format.row_bytes // self.rows_apart

    @abstractmethod
    def epilogue(self, e: Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        """Consume the C tiles of `rows` valid rows in each of `count` blocks, for token block `block`."""

    @abstractmethod
    def finish(self, e: Emitter) -> None:
        """What is left to do after the last row of the matrix."""


@dataclass(frozen=True)
class Scratch:
    """Offsets into the per-thread scratch of a kernel, and its size."""

    block_bytes: int
    """C tiles of a token block."""
    edges: int
    """Tiles of the last k's."""
    copy: int
    """A k block of the rows."""
    partials: int
    """Unfinished C tiles."""
    partial_bytes: int
    """Of a row block and a token block."""
    panels: int
    """Staged rows."""
    size: int

    @classmethod
    def of(cls, kernel: ExpertKernel) -> Scratch:
        """The scratch that a kernel needs."""
        isa, variant = kernel.machine, kernel.variant
        groups = len(groups_of(kernel.block_tokens))
        kept = LAUNCH_BLOCKS if variant.copied else 1  # token blocks whose C is kept
        sources = max(kernel.matrices, variant.neighbours)
        block_bytes = 2 * groups * TILE
        partial_bytes = GROUP * kernel.block_tokens * isa.sum_bytes if variant.k_block else 0
        copied = GROUP * kernel.copy_stride if variant.copied else 0
        # Every kernel stages the last rows of a matrix.
        staged = kernel.format.staged_rows * kernel.panel_stride
        offsets, end = [], 0
        # A layout may read 60 bytes past the last row of a C tile.
        sizes = (
            kept * block_bytes + LINE,
            2 * EDGE,
            sources * copied,
            kept * sources * partial_bytes,
            2 * staged * (2 if variant.carried else 1),
        )
        for size in sizes:
            offsets.append(end)
            end += size
        _, edges, copy, partials, panels = offsets
        return cls(block_bytes, edges, copy, partials, partial_bytes, panels, end)


def matrix_at(record: Value) -> Matrix:
    """A matrix from its record."""
    return Matrix(*(record.at(MATRIX[name]).load(ptr) for name in ("codes", "scales", "factor")))


def signature(pointers: tuple[str, ...], *integers: str) -> dict[str, L.Type]:
    parameters: dict[str, L.Type] = dict.fromkeys(pointers, ptr)
    parameters |= dict.fromkeys((*integers, "next_row", "first_row", "end_row", "blocks"), i64)
    return parameters | {"scratch": ptr}

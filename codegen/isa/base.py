"""The contract of a tile ISA: the verbs of a tile machine, and how it likes to be fed.

A template multiplies 16-row blocks of weights (A, row-major bf16) by groups of up to 16 tokens (B, laid out by
`layout`) into C, over chunks of 32 k:

    plan = isa.plan(groups, blocks)            which rows and tokens go together through one pass over k
    isa.configure(b, plan)
    c = isa.accumulators(b, plan, tokens)      zeroed C tiles, one for each (A tile, B tile)
    a = isa.load_a(…);  v = isa.load_b(…);  isa.dot(c, a, v)
    isa.store(c, …)                            as the layout's C
    isa.release(b)

Every C element must be the same function of its own row of A and column of B, whatever plan it is computed in:
that is what makes a token's result independent of the batch it comes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import OperandLayout


@dataclass(frozen=True)
class BTile:
    """`tokens` tokens from `first` on, in group number `group` of a token block."""

    group: int
    first: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """B tiles multiplied together over all k; then again, as many tokens further on in the group; then in the next."""

    tiles: tuple[BTile, ...]
    repeat: int = 1
    """Times in a group."""
    groups: int = 1
    """Consecutive groups of the same size."""


@dataclass(frozen=True)
class TilePlan:
    """How a block of 16-row A blocks by a block of tokens is cut up."""

    groups: tuple[int, ...]
    """Tokens in each group of the token block."""
    blocks: int
    """16-row blocks multiplied together (gate and up; or two neighbours)."""
    rows: int
    """Rows of an A tile: 16, or a divisor when a pass covers only part of a block."""
    passes: tuple[Pass, ...]
    """What covers all tokens."""

    @property
    def sweeps(self) -> int:
        """How often the rows of an A tile are read."""
        return sum(one.repeat * one.groups for one in self.passes)


class TileIsa(ABC):
    """One tile machine; its file ends with `ISA = TheClass()`."""

    name: ClassVar[str]
    layout: ClassVar[OperandLayout]
    summary: ClassVar[str]
    """One line for `expertile doctor`."""
    tuning: ClassVar[str | None] = None
    """The processor model that LLVM must schedule for, where the host's may not do."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this machine can't run it (for the user), or None if it can."""

    @abstractmethod
    def target(self) -> Target:
        """What LLVM compiles for."""

    @abstractmethod
    def plan(self, groups: Sequence[int], blocks: int) -> TilePlan:
        """The passes for token groups of the given sizes against `blocks` 16-row blocks (1 or 2)."""

    @abstractmethod
    def neighbours(self, groups: Sequence[int]) -> int:
        """How many neighbouring 16-row blocks of one matrix are best multiplied together: 1 or 2."""

    @abstractmethod
    def prefetch_lines(self, plan: TilePlan) -> int:
        """Cache lines of the next row block to ask for in each chunk step; 0 leaves it to the hardware."""

    @abstractmethod
    def configure(self, b: Builder, plan: TilePlan) -> None:
        """Prepare the machine for `plan`."""

    @abstractmethod
    def release(self, b: Builder) -> None:
        """Leave the machine as it was found."""

    @abstractmethod
    def accumulators(self, b: Builder, plan: TilePlan, tile: BTile, block: int, column: int) -> Any:
        """A zeroed C tile for A block `block` and the pass's B tile number `column`."""

    @abstractmethod
    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> Any:
        """Rows `address` + i·`stride`, 32 bf16 each; `streaming` if they will not be needed again soon."""

    @abstractmethod
    def load_b(self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value) -> Any:
        """The B tile `tile` of the chunk at address `chunk`."""

    @abstractmethod
    def dot(self, b: Builder, c: Any, a: Any, v: Any) -> None:
        """C += A · B over one chunk."""

    @abstractmethod
    def store(
        self, b: Builder, plan: TilePlan, c: Any, tile: BTile, into: Value, row: Value
    ) -> None:
        """Write a C tile as rows `row`… of the layout's C of group `tile.group`, which begins at `into`."""

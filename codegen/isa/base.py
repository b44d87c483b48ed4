"""The contract of a tile ISA: the verbs of a tile machine, and how it likes to be fed.

A template multiplies 16-row blocks of weights (A, row-major) by groups of up to 16 tokens (B, laid out by
`layout`) into C, over chunks of k:

    variant = one of isa.variants(tokens, …)   how the kernel is blocked
    plan = isa.plan(groups, blocks, variant)   which rows and tokens go together through one pass over k
    isa.configure(b, plan)
    c = isa.accumulators(b, plan, tokens)      zeroed C tiles, one for each (A tile, B tile)
    a = isa.load_a(…);  v = isa.load_b(…);  isa.dot(c, a, v)
    isa.save(c, …);  isa.restore(c, …)         unfinished sums, between two blocks of k
    isa.store(c, …)                            as the layout's C
    isa.release(b)

Every C element must be the same function of its own row of A and column of B, whatever variant it is computed in:
that is what makes a token's result independent of the batch it comes in, and of what a tuner prefers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import CHUNK, GROUP, OperandLayout
from expertile.codegen.vectors import PLAIN, Vectors


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
class Variant:
    """How a kernel is blocked, for registers, caches and memory: all that may differ without a result differing."""

    rows: int = GROUP
    """Rows of an A tile: 16, or a divisor when a pass covers only a part of a block."""
    tokens: int = GROUP
    """Tokens of a pass, at most."""
    neighbours: int = 1
    """Neighbouring 16-row blocks of one matrix in a pass: 1 or 2."""
    together: bool = True
    """Whether gate and up share their passes; otherwise they take turns, row block by row block."""
    k_block: int = 0
    """k's, whole chunks, that all rows of a panel are multiplied by before the next ones; 0: all."""
    panel: int = GROUP
    """Rows of each matrix that share a block of k while it is in L1: a divisor of 16, a multiple of `rows`."""
    staged: bool = False
    """Whether rows are first written to scratch as bf16, 16 at a time over all of K, and read from there."""
    carried: bool = False
    """Whether the next rows are staged while these are multiplied: decoding takes what multiplying leaves of a core."""
    copied: bool = False
    """Whether a k block of the rows is copied to L1 first and multiplied by all token blocks there."""
    streaming: bool = False
    """Whether rows are loaded with the hint that they will not be needed again soon."""
    ahead: tuple[int, ...] = ()
    """Ask for the next rows while these are multiplied: every line once for each entry, which is how many bytes before
    its turn in memory order. Empty: leave it to the hardware."""

    @property
    def name(self) -> str:
        """Short, for the kernel's name."""
        flags = "n" * (self.neighbours == 2) + "a" * (not self.together)
        flags += "w" * self.staged + "r" * self.carried + "c" * self.copied + "s" * self.streaming
        ahead = "".join(f"_{distance}" for distance in self.ahead)
        return f"{self.rows}x{self.tokens}k{self.k_block}p{self.panel}{flags}{ahead}"


@dataclass(frozen=True)
class TilePlan:
    """How a block of 16-row A blocks by a block of tokens is cut up."""

    groups: tuple[int, ...]
    """Tokens in each group of the token block."""
    blocks: int
    """16-row blocks in a pass (gate and up; or two neighbours)."""
    rows: int
    """Rows of an A tile: 16, or a divisor when a pass covers only part of a block."""
    passes: tuple[Pass, ...]
    """What covers all tokens."""

    @property
    def sweeps(self) -> int:
        """How often the rows of an A tile are read."""
        return self.sweeps_before(len(self.passes))

    def sweeps_before(self, index: int) -> int:
        """How often they were read before the pass with this index."""
        return sum(one.repeat * one.groups for one in self.passes[:index])


class TileIsa(ABC):
    """One tile machine; its file ends with `ISA = TheClass()`."""

    name: ClassVar[str]
    layout: ClassVar[OperandLayout]
    chunk: ClassVar[int] = CHUNK
    """k's in a chunk: in 64 bytes of a row or of a token. 32 of bf16, or 64 of int8, see `isa.bytes`."""
    summary: ClassVar[str]
    """One line for `expertile doctor`."""
    multiply_cycles: ClassVar[float]
    """Core cycles to multiply a chunk of a row by a token, when that is all there is to do."""
    latency_cycles: ClassVar[float]
    """Core cycles from a multiplication to the next one on the same C tile."""
    unasked: ClassVar[float] = 0.25
    """How much longer memory takes when no line is asked for ahead, as a part of the whole."""
    lost: ClassVar[float] = 0.25
    """How many requests for a line ahead are of no use, as they get lost or come late."""
    block_tokens: ClassVar[int] = 32
    """Tokens of a block, a power of two; an expert with more gets several blocks and a rest."""
    sum_bytes: ClassVar[int]
    """Bytes of a C element that is saved before it is finished."""
    registers: ClassVar[bool] = False
    """Whether an A tile is a vector register a row, so that it can be worked out there: `hold_a`."""
    tuning: ClassVar[str | None] = None
    """The processor model that LLVM must schedule for, where the host's may not do."""

    @property
    def vectors(self) -> Vectors:
        """What weights are decoded with."""
        return PLAIN

    def chunks(self, k: int) -> int:
        """Chunks that hold k elements."""
        return -(-k // self.chunk)

    def operand_bytes(self, k: int) -> int:
        """Bytes that a token takes in an operand of k k's."""
        return 64 * self.chunks(k)

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this machine can't run it (for the user), or None if it can."""

    @abstractmethod
    def target(self) -> Target:
        """What LLVM compiles for."""

    @abstractmethod
    def variants(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        """The variants worth choosing between for `tokens` (1…block_tokens) tokens and 1 or 2 matrices of bf16 rows."""

    @abstractmethod
    def decoding(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        """Likewise for rows that have to be decoded: staged, copied, or in registers."""

    @abstractmethod
    def plan(self, groups: Sequence[int], blocks: int, variant: Variant) -> TilePlan:
        """The passes of a variant for token groups of the given sizes against `blocks` 16-row blocks (1 or 2)."""

    @abstractmethod
    def load_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        """Core cycles to load the A and the B tiles of a pass and a chunk from L1, for the cost model."""

    @abstractmethod
    def store_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        """Core cycles to save and restore the C tiles of a pass, and to store the finished ones."""

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
        """Rows `address` + i·`stride`, a chunk each; `streaming` if they will not be needed again soon."""

    def hold_a(self, rows: list[Value]) -> Any:
        """An A tile of rows of 32 bf16 that are in registers already; where `registers` is true."""
        raise NotImplementedError(f"{self.name} loads its A tiles from memory")

    @abstractmethod
    def load_b(self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value) -> Any:
        """The B tile `tile` of the chunk at address `chunk`."""

    @abstractmethod
    def dot(self, b: Builder, c: Any, a: Any, v: Any) -> None:
        """C += A · B over one chunk."""

    @abstractmethod
    def save(self, b: Builder, plan: TilePlan, c: Any, tile: BTile, into: Value) -> None:
        """Write an unfinished C tile, rows · tokens · sum_bytes bytes, for `restore`."""

    @abstractmethod
    def restore(self, b: Builder, plan: TilePlan, c: Any, tile: BTile, source: Value) -> None:
        """Read what `save` wrote."""

    @abstractmethod
    def store(
        self, b: Builder, plan: TilePlan, c: Any, tile: BTile, into: Value, row: Value
    ) -> None:
        """Write a C tile as rows `row`… of the layout's C of group `tile.group`, which begins at `into`."""

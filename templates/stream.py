"""What the roofline is measured with: kernels that only read memory, and one that only multiplies.

All have one signature, `i64 kernel(address, amount)`, so that one runner can spread them over the threads. The result
depends on everything that was read, or LLVM would drop the loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, Module, Value, Var, i8, i64, ptr, vec
from expertile.codegen.isa import BTile, Pass, TileIsa, TilePlan
from expertile.codegen.layouts import GROUP, groups_of

LINE = 64
"""Bytes of a cache line, of a vector and of a tile row."""

_Line = vec(i64, LINE // 8)
_LineBytes = vec(i8, LINE)
_BLOCK = GROUP * LINE
_SUMS = 16
_TOKENS = 2 * GROUP
"""Of a multiplication out of registers."""
_TILE_SUMS = 4
"""Enough that no load waits for an xor, and few enough for the registers of any CPU: caches deliver quickly."""


@dataclass(frozen=True)
class VectorRead:
    """Read `amount` bytes in vectors of 64; the result is the xor of their 8-byte words (zeros pad the last one).

    The memory is read in blocks of `rows` rows of `row_bytes` bytes, all rows of a block side by side, as a matrix by
    vector product reads it; a single row is a plain linear read. What is left after the last whole block is read line
    by line.
    """

    rows: int
    row_bytes: int
    """A multiple of `unroll` lines."""
    unroll: int
    """Lines of a row read together."""
    prefetch: int = 0
    """How many bytes ahead of a load its line is asked for; 0 leaves it to the hardware."""

    isa = "portable"

    @property
    def name(self) -> str:
        return f"vector_read_{self.rows}x{self.row_bytes}_u{self.unroll}_p{self.prefetch}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of rows."""
        return self.rows * self.row_bytes

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        module = Module(self.name)
        with module.function(self.name, {"address": ptr, "bytes": i64}, returns=i64) as (b, arg):
            sums = [b.var(_Line, b.zero(_Line)) for _ in range(_SUMS)]
            whole = arg.bytes // self.block_bytes * self.block_bytes
            with (
                b.loop(0, whole, self.block_bytes) as block,
                b.loop(0, self.row_bytes, LINE * self.unroll) as column,
            ):
                self._lines(arg.address.at(block + column), sums)
            _rest(b, arg.address, whole, arg.bytes, sums[0])
            b.ret(_xor_lanes(sums))
        return str(module)

    def _lines(self, address: Value, sums: list[Var]) -> None:
        for number in range(self.rows * self.unroll):
            row, line = divmod(number, self.unroll)
            at = address.at(row * self.row_bytes + line * LINE)
            sum_ = sums[number % len(sums)]
            sum_.set(sum_.get() ^ at.load(_Line))
            if self.prefetch:
                at.at(self.prefetch).prefetch(3)


@dataclass(frozen=True)
class TileRead:
    """Read `amount` bytes `sweeps` times over in an ISA's own tiles: 16 rows of 64 bytes, `row_bytes` apart.

    What is left after the last whole block of 16 rows is read line by line. The result is the xor of all 8-byte words,
    as often as they were read; but a tile in a tile register (AMX) can't be added up, and adds nothing.
    """

    isa: str
    row_bytes: int
    """A multiple of 64; 64 itself: tiles packed one after another."""
    streaming: bool
    """Load with the hint that the tile will not be needed again soon, where the ISA has one."""
    sweeps: int = 1

    @property
    def name(self) -> str:
        hint = "_streaming" if self.streaming else ""
        return f"tile_read_{GROUP}x{self.row_bytes}{hint}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of rows."""
        return GROUP * self.row_bytes

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        isa = isas.by_name(self.isa)
        module = Module(self.name, isa.tuning)
        plan = TilePlan((1,), 1, GROUP, (Pass((BTile(0, 0, 1),)),))  # whole blocks, one at a time
        with module.function(self.name, {"address": ptr, "bytes": i64}, returns=i64) as (b, arg):
            sums = [b.var(_Line, b.zero(_Line)) for _ in range(_TILE_SUMS)]
            whole = arg.bytes // self.block_bytes * self.block_bytes
            isa.configure(b, plan)
            with b.loop(0, self.sweeps):
                with (
                    b.loop(0, whole, self.block_bytes) as block,
                    b.loop(0, self.row_bytes, LINE) as column,
                ):
                    at = arg.address.at(block + column)
                    tile = isa.load_a(b, plan, 0, at, self.row_bytes, self.streaming)
                    for number, row in enumerate(_rows(tile)):
                        sum_ = sums[number % len(sums)]
                        sum_.set(sum_.get() ^ row)
                _rest(b, arg.address, whole, arg.bytes, sums[0])
            isa.release(b)
            b.ret(_xor_lanes(sums))
        return str(module)


def _rows(tile: Any) -> list[Value]:
    """The rows of a loaded A tile as vectors, which have to be used; none if it is in a tile register."""
    match tile:
        case int():
            return []
        case (Value() as address, int() as stride):  # not loaded before it is multiplied
            return [address.at(row * stride).load(_Line) for row in range(GROUP)]
        case _:
            return [row.bitcast(_Line) for row in tile]


@dataclass(frozen=True)
class Multiply:
    """Multiply a tile or what an ISA holds at once `amount` times, without loading anything in between.

    `address` has two blocks of 16 weight rows, then two of 16 tokens, and gets up to four of products: 4 KiB.
    """

    isa: str

    OPERAND_BYTES = 4 * _BLOCK

    @property
    def name(self) -> str:
        return "multiply"

    @property
    def operations(self) -> int:
        """Additions and multiplications of one repetition."""
        isa, plan = self._plan()
        return sum(
            2 * isa.chunk * plan.rows * plan.blocks * tile.tokens for tile in plan.passes[0].tiles
        )

    def _plan(self) -> tuple[TileIsa, TilePlan]:
        isa = isas.by_name(self.isa)
        together = [variant for variant in isa.variants(_TOKENS, 2) if variant.together]
        most = max(together, key=lambda variant: variant.rows * variant.tokens)
        return isa, isa.plan(groups_of(_TOKENS), 2, most)

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        isa, plan = self._plan()
        module = Module(self.name, isa.tuning)
        tiles = plan.passes[0].tiles
        with module.function(self.name, {"address": ptr, "steps": i64}, returns=i64) as (b, arg):
            isa.configure(b, plan)
            at = arg.address
            blocks = range(plan.blocks)
            c = [
                [isa.accumulators(b, plan, tile, i, j) for j, tile in enumerate(tiles)]
                for i in blocks
            ]
            a = [isa.load_a(b, plan, i, at.at(_BLOCK * i), LINE, False) for i in blocks]
            v = [isa.load_b(b, plan, t, j, at.at(_BLOCK * (2 + j))) for j, t in enumerate(tiles)]
            with b.loop(0, arg.steps):
                for i in blocks:
                    for j in range(len(tiles)):
                        isa.dot(b, c[i][j], a[i], v[j])
            for i in blocks:
                for j, tile in enumerate(tiles):
                    into = at.at(_BLOCK * (i + 2 * j))
                    isa.store(b, plan, c[i][j], tile, into, b.const(i64, 0))
            isa.release(b)
            b.ret(0)
        return str(module)


def _rest(b: Builder, address: Value, first: Value, end: Value, sum_: Var) -> None:
    """Read bytes `first`…`end` line by line, the last one masked."""
    lines = end - (end - first) % LINE
    with b.loop(first, lines, LINE) as offset:
        sum_.set(sum_.get() ^ address.at(offset).load(_Line))
    with b.if_(lines < end):
        tail = address.at(lines).load_masked(_LineBytes, end - lines)
        sum_.set(sum_.get() ^ tail.bitcast(_Line))


def _xor_lanes(sums: list[Var]) -> Value:
    total = sums[0].get()
    for sum_ in sums[1:]:
        total = total ^ sum_.get()
    result = total.extract(0)
    for lane in range(1, total.lanes):
        result = result ^ total.extract(lane)
    return result

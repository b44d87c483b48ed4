"""What the roofline is measured with: kernels that only read memory, and one that only multiplies.

All have one signature, `i64 kernel(address, amount)`, so that one runner can spread them over the threads. The result
depends on everything that was read, or LLVM would drop the loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, Module, Value, Var, i8, i64, ptr, vec
from expertile.codegen.isa import TileIsa, TilePlan
from expertile.codegen.layouts import GROUP, groups_of
from expertile.templates.expert import MAX_TOKENS

LINE = 64
"""Bytes of a cache line, of a vector and of a tile row."""

_Line = vec(i64, LINE // 8)
_LineBytes = vec(i8, LINE)
_BLOCK = GROUP * LINE
_SUMS = 16


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
    """Read `amount` bytes in tiles of 16 rows, `row_bytes` apart. The result means nothing: a tile can't be added up.

    For ISAs whose tile load is an instruction that LLVM must keep (AMX).
    """

    isa: str
    row_bytes: int
    """A multiple of 64."""
    streaming: bool
    """Load with the hint that the tile will not be needed again soon."""

    @property
    def name(self) -> str:
        return f"tile_read_{GROUP}x{self.row_bytes}{'_streaming' if self.streaming else ''}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of rows."""
        return GROUP * self.row_bytes

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        isa = isas.by_name(self.isa)
        module = Module(self.name, isa.tuning)
        plan = isa.plan((1,), 1)
        with module.function(self.name, {"address": ptr, "bytes": i64}, returns=i64) as (b, arg):
            whole = arg.bytes // self.block_bytes * self.block_bytes
            isa.configure(b, plan)
            with (
                b.loop(0, whole, self.block_bytes) as block,
                b.loop(0, self.row_bytes, LINE) as column,
            ):
                isa.load_a(
                    b, plan, 0, arg.address.at(block + column), self.row_bytes, self.streaming
                )
            isa.release(b)
            sum_ = b.var(_Line, b.zero(_Line))
            _rest(b, arg.address, whole, arg.bytes, sum_)
            b.ret(_xor_lanes([sum_]))
        return str(module)


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
        _, plan = self._plan()
        return sum(2 * 32 * plan.rows * plan.blocks * tile.tokens for tile in plan.passes[0].tiles)

    def _plan(self) -> tuple[TileIsa, TilePlan]:
        isa = isas.by_name(self.isa)
        return isa, isa.plan(groups_of(MAX_TOKENS), 2)

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

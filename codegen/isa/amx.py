"""Intel AMX: tiles of 16 rows × 64 bytes, bf16 pairs multiplied into fp32 (SDM vol. 1 ch. 18, vol. 2 TDPBF16PS).

Tile numbers are immediates of the explicit intrinsics: C in 0–3, A in 4–5, B in 6–7.  The register-allocated
`.internal` forms are never used, and nothing is called between `configure` and `release`: tiles and their
configuration are caller-saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertile.codegen import cpu
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, L, Value, i8, i64, void
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan
from expertile.codegen.layouts import PairLayout

_C, _A, _B = 0, 4, 6


class Amx(TileIsa):
    name = "amx"
    layout = PairLayout()
    summary = "AMX tiles, TDPBF16PS"
    # Some processor models make LLVM break anti-dependencies after register allocation, by renaming registers: tiles
    # too, and then a tile has another tile's shape. A virtual machine may name such a processor on a CPU with AMX.
    tuning = "sapphirerapids"

    def unavailable(self) -> str | None:
        status = cpu.amx_status()
        return None if status.usable else status.reason

    def target(self) -> Target:
        return Target.host()

    def plan(self, groups: Sequence[int], blocks: int) -> TilePlan:
        tiles = tuple(BTile(group, 0, tokens) for group, tokens in enumerate(groups))
        if len(tiles) > 2 or blocks > 2:
            raise ValueError(
                f"AMX multiplies at most 2 row blocks by 2 groups, got {blocks} × {groups}"
            )
        return TilePlan(tuple(groups), blocks, rows=16, passes=(Pass(tiles),))

    def neighbours(self, groups: Sequence[int]) -> int:
        # Two B tiles: four accumulators hide the latency of TDP. One: memory is the limit, and 16 rows at a time
        # stream best (32 lose 10 % at K = 768).
        return 2 if len(groups) == 2 else 1

    def prefetch_lines(self, plan: TilePlan) -> int:
        # Up to 16 tokens the tile loads themselves keep memory busy; above, the multiplies get in between.
        return 16 * plan.blocks if len(plan.groups) == 2 else 0

    def configure(self, b: Builder, plan: TilePlan) -> None:
        columns = [64] * 8  # bytes a row
        for block in range(plan.blocks):
            for column, tokens in enumerate(plan.groups):
                columns[_C + 2 * block + column] = 4 * tokens
        for column, tokens in enumerate(plan.groups):
            columns[_B + column] = 4 * tokens
        data = bytearray(64)  # palette 1; 16-bit column bytes from byte 16, rows from byte 48
        data[0] = 1
        for tile, width in enumerate(columns):
            data[16 + 2 * tile : 18 + 2 * tile] = width.to_bytes(2, "little")
            data[48 + tile] = 16
        name = "tiles_" + "_".join(map(str, (plan.blocks, *plan.groups)))
        b.call("llvm.x86.ldtilecfg", void, [b.constant_bytes(name, bytes(data))])

    def release(self, b: Builder) -> None:
        b.call("llvm.x86.tilerelease", void, [])

    def accumulators(self, b: Builder, plan: TilePlan, tile: BTile, block: int, column: int) -> int:
        number = _C + 2 * block + column
        b.call("llvm.x86.tilezero", void, [_tile(number)])
        return number

    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> int:
        verb = "tileloaddt164" if streaming else "tileloadd64"
        b.call(f"llvm.x86.{verb}", void, [_tile(_A + block), address, b.const(i64, stride)])
        return _A + block

    def load_b(self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value) -> int:
        stride = b.const(i64, 4 * tile.tokens)
        b.call("llvm.x86.tileloadd64", void, [_tile(_B + column), chunk, stride])
        return _B + column

    def dot(self, b: Builder, c: int, a: int, v: int) -> None:
        b.call("llvm.x86.tdpbf16ps", void, [_tile(c), _tile(a), _tile(v)])

    def store(
        self, b: Builder, plan: TilePlan, c: int, tile: BTile, into: Value, row: Value
    ) -> None:
        b.call("llvm.x86.tilestored64", void, [_tile(c), into, b.const(i64, 4 * tile.tokens)])


def _tile(number: int) -> L.Constant:
    return L.Constant(i8, number)


ISA = Amx()

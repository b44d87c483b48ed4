"""Intel AMX: tiles of 16 rows × 64 bytes, bf16 pairs multiplied into fp32 (SDM vol. 1 ch. 18, vol. 2 TDPBF16PS).

Tile numbers are immediates of the explicit intrinsics.  Up to four C tiles hide the latency of a multiply, as 2 A × 2 B
or as 1 A × 4 B, and take tiles 0–3; then come the A tiles and the B tiles.  The register-allocated `.internal` forms
are never used, and nothing is called between `configure` and `release`: tiles and their configuration are caller-saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from expertile.codegen import cpu, vectors
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, L, Value, i8, i64, void
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan, Variant
from expertile.codegen.layouts import GROUP, PairLayout, groups_of
from expertile.codegen.vectors import Vectors

_ACCUMULATORS = 4
_AHEAD = ((), (0,), (0, 4096))
_K_BLOCKS = (192, 256, 512)


class Amx(TileIsa):
    name = "amx"
    layout = PairLayout()
    multiply_cycles = 1 / 16
    latency_cycles = 52.0
    unasked = 0.0  # a tile load fetches 16 lines at once
    lost = 0.1
    block_tokens = 64
    sum_bytes = 4
    summary = "AMX tiles, TDPBF16PS"
    product: ClassVar[str] = "tdpbf16ps"
    # Some processor models make LLVM break anti-dependencies after register allocation, by renaming registers: tiles
    # too, and then a tile has another tile's shape. A virtual machine may name such a processor on a CPU with AMX.
    tuning = "sapphirerapids"

    @property
    def vectors(self) -> Vectors:
        return vectors.host()

    def unavailable(self) -> str | None:
        status = cpu.amx_status()
        return None if status.usable else status.reason

    def target(self) -> Target:
        return Target.host()

    def variants(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        found: list[Variant] = []
        for wide, neighbours, together in self._shapes(tokens, matrices):
            base = Variant(GROUP, wide, neighbours, together)
            # The hint is slow for rows that were asked for ahead and are in L2.
            found += [replace(base, streaming=True), *(replace(base, ahead=a) for a in _AHEAD)]
            if wide == 2 * GROUP and tokens == self.block_tokens:
                found += [
                    replace(base, k_block=k_block, copied=True, ahead=a)
                    for k_block in _K_BLOCKS
                    for a in _AHEAD
                ]
        return tuple(found)

    def decoding(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        found: list[Variant] = []
        for wide, neighbours, together in self._shapes(tokens, matrices):
            base = Variant(GROUP, wide, neighbours, together)
            ways = [replace(base, copied=True, k_block=k_block) for k_block in _K_BLOCKS]
            if neighbours == 1:
                ways.append(replace(base, staged=True))
            found += [replace(way, ahead=ahead) for way in ways for ahead in _AHEAD]
        return tuple(found)

    def _shapes(self, tokens: int, matrices: int) -> list[tuple[int, int, bool]]:
        """Tokens of a pass, neighbours, and whether gate and up go together.

        A tile has one shape in a kernel, so that all passes must have the same groups: a block of 33–63 tokens is one
        pass, and only a whole block can be two.
        """
        wide = GROUP * len(groups_of(tokens))
        one_by_all = (wide, 1, matrices == 1)
        if wide > 2 * GROUP:
            whole = [(2 * GROUP, 3 - matrices, True)] if tokens == self.block_tokens else []
            return [one_by_all, *whole]
        apart = [one_by_all] if matrices == 2 else []
        return [(wide, 1, True), *([(wide, 2, True)] if matrices == 1 else []), *apart]

    def plan(self, groups: Sequence[int], blocks: int, variant: Variant) -> TilePlan:
        columns = variant.tokens // GROUP
        if blocks * columns > _ACCUMULATORS or (len(set(groups)) > 1 and columns < len(groups)):
            raise ValueError(
                f"AMX can't multiply {blocks} row blocks by {groups} in passes of {columns}"
            )
        columns = min(columns, len(groups))
        tiles = tuple(BTile(group, 0, groups[group]) for group in range(columns))
        return TilePlan(tuple(groups), blocks, GROUP, (Pass(tiles, groups=len(groups) // columns),))

    def load_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        return 8.0 * plan.blocks, 8.0 * len(one.tiles)

    def store_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        tiles = plan.blocks * len(one.tiles)
        return 24.0 * tiles, 16.0 * tiles

    def configure(self, b: Builder, plan: TilePlan) -> None:
        shapes = [64] * 8  # bytes a row
        tiles = plan.passes[0].tiles
        for column, tile in enumerate(tiles):
            shapes[_b(plan, column)] = 4 * tile.tokens
            for block in range(plan.blocks):
                shapes[_c(plan, block, column)] = 4 * tile.tokens
        data = bytearray(64)  # palette 1; 16-bit column bytes from byte 16, rows from byte 48
        data[0] = 1
        for number, width in enumerate(shapes):
            data[16 + 2 * number : 18 + 2 * number] = width.to_bytes(2, "little")
            data[48 + number] = GROUP
        b.call("llvm.x86.ldtilecfg", void, [b.constant_bytes(bytes(data))])

    def release(self, b: Builder) -> None:
        b.call("llvm.x86.tilerelease", void, [])

    def accumulators(self, b: Builder, plan: TilePlan, tile: BTile, block: int, column: int) -> int:
        number = _c(plan, block, column)
        b.call("llvm.x86.tilezero", void, [_tile(number)])
        return number

    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> int:
        verb = "tileloaddt164" if streaming else "tileloadd64"
        number = _ACCUMULATORS + block
        _load(b, verb, number, address, 64, stride)
        return number

    def load_b(self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value) -> int:
        number, row = _b(plan, column), 4 * tile.tokens
        _load(b, "tileloadd64", number, chunk, row, row)
        return number

    def dot(self, b: Builder, c: int, a: int, v: int) -> None:
        b.call(f"llvm.x86.{self.product}", void, [_tile(c), _tile(a), _tile(v)])

    def save(self, b: Builder, plan: TilePlan, c: int, tile: BTile, into: Value) -> None:
        b.call("llvm.x86.tilestored64", void, [_tile(c), into, b.const(i64, 4 * tile.tokens)])

    def restore(self, b: Builder, plan: TilePlan, c: int, tile: BTile, source: Value) -> None:
        row = 4 * tile.tokens
        _load(b, "tileloadd64", c, source, row, row)

    def store(
        self, b: Builder, plan: TilePlan, c: int, tile: BTile, into: Value, row: Value
    ) -> None:
        self.save(b, plan, c, tile, into)  # the whole block, as it is stored


def _load(b: Builder, verb: str, number: int, source: Value, row_bytes: int, stride: int) -> None:
    """Load a tile of 16 rows."""
    b.reads(source, row_bytes, rows=GROUP, stride=stride)
    b.call(f"llvm.x86.{verb}", void, [_tile(number), source, b.const(i64, stride)])


def _c(plan: TilePlan, block: int, column: int) -> int:
    """The number of a C tile."""
    return block * len(plan.passes[0].tiles) + column


def _b(plan: TilePlan, column: int) -> int:
    """The number of a B tile. The last one, which may be narrower, has a tile to itself; the others take turns."""
    first, last = _ACCUMULATORS + plan.blocks, len(plan.passes[0].tiles) - 1
    return first + (column % (7 - first) if column < last else 7 - first)


def _tile(number: int) -> L.Constant:
    return L.Constant(i8, number)


ISA = Amx()

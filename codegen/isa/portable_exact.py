"""The bit-for-bit reference of `amx`: TDPBF16PS step by step in plain vectors, for any CPU with a fused multiply-add.

For each C element, over the pairs p ascending: t0 = fma(a[2p], b[2p], t0), t1 = fma(a[2p+1], b[2p+1], t1); then
C += t0 + t1. Denormal inputs count as zero and denormal results become zero, signs kept (SDM vol. 2, TDPBF16PS).
Slow, and only used when asked for: EXPERTILE_ISA=portable_exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertile.codegen import cpu
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value, f32, i16, i32, vec
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan, Variant
from expertile.codegen.isa.portable import without_tiles
from expertile.codegen.layouts import GROUP, PairLayout

_Lanes = vec(f32, GROUP)
_Bits = vec(i32, GROUP)


class PortableExact(TileIsa):
    name = "portable_exact"
    layout = PairLayout()
    multiply_cycles = 20.0
    latency_cycles = 8.0
    unasked = 0.0  # nor would it help
    block_tokens = 64
    sum_bytes = 4
    summary = "AMX arithmetic to the bit, in plain vectors (slow)"

    def unavailable(self) -> str | None:
        host = cpu.host()
        if host.triple.startswith("x86_64") and not host.has("fma"):
            return "the CPU lacks a fused multiply-add (fma)"
        return None

    def target(self) -> Target:
        return without_tiles()

    def variants(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        return Variant(), Variant(k_block=64)

    def decoding(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        return Variant(staged=True), Variant(k_block=64, copied=True)

    def plan(self, groups: Sequence[int], blocks: int, variant: Variant) -> TilePlan:
        passes = tuple(Pass((BTile(group, 0, tokens),)) for group, tokens in enumerate(groups))
        return TilePlan(tuple(groups), blocks, rows=GROUP, passes=passes)

    def load_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        return 0.0, 0.0  # the tiles stay in memory

    def store_cycles(self, plan: TilePlan, one: Pass) -> tuple[float, float]:
        return 2.0 * GROUP, GROUP

    def configure(self, b: Builder, plan: TilePlan) -> None:
        """Vectors need no preparation."""

    def release(self, b: Builder) -> None:
        """Vectors leave nothing behind."""

    def accumulators(
        self, b: Builder, plan: TilePlan, tile: BTile, block: int, column: int
    ) -> Value:
        tile_memory = b.buffer(64 * GROUP)
        with b.loop(0, GROUP) as row:
            tile_memory.at(row * 64).store(b.zero(_Lanes))
        return tile_memory

    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> tuple[Value, int]:
        return address, stride

    def load_b(
        self, b: Builder, plan: TilePlan, tile: BTile, column: int, chunk: Value
    ) -> tuple[Value, int]:
        return chunk, 4 * tile.tokens

    def dot(self, b: Builder, c: Value, a: tuple[Value, int], v: tuple[Value, int]) -> None:
        (rows, row_stride), (pairs, pair_stride) = a, v
        with b.loop(0, GROUP) as row:
            sums = [b.var(_Lanes, b.zero(_Lanes)) for _ in range(2)]
            with b.loop(0, GROUP) as pair:
                words = pairs.at(pair * pair_stride).load(_Bits)
                weight = rows.at(row * row_stride + pair * 4)
                for half, sum_ in enumerate(sums):
                    bits = b.splat(weight.at(2 * half).load(i16).zext(i32), GROUP) << 16
                    token = (words << 16) if half == 0 else (words >> 16) << 16
                    sum_.set(_fma(b, _flush(b, bits), _flush(b, token), sum_.get()))
            into = c.at(row * 64)
            chunk_sum = _flush(b, (sums[0].get() + sums[1].get()).bitcast(_Bits))
            total = into.load(_Lanes) + chunk_sum
            into.store(_flush(b, total.bitcast(_Bits)))

    def save(self, b: Builder, plan: TilePlan, c: Value, tile: BTile, into: Value) -> None:
        with b.loop(0, GROUP) as feature:
            lanes = c.at(feature * 64).load(_Lanes)
            into.at(feature * (4 * tile.tokens)).store_masked(lanes, tile.tokens)

    def restore(self, b: Builder, plan: TilePlan, c: Value, tile: BTile, source: Value) -> None:
        with b.loop(0, GROUP) as feature:
            lanes = source.at(feature * (4 * tile.tokens)).load_masked(_Lanes, tile.tokens)
            c.at(feature * 64).store(lanes)

    def store(
        self, b: Builder, plan: TilePlan, c: Value, tile: BTile, into: Value, row: Value
    ) -> None:
        self.save(b, plan, c, tile, into)  # the whole block, as it is stored


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x·y + z rounded once, then flushed as x86 does: by what the result would be with an unbounded exponent.

    The two differ only where rounding to a denormal's precision gives the smallest normal number: there the sum is
    formed again 2^32 times larger. The factor goes to x or, if x is large, to y; neither can overflow where it matters,
    because a sum that small of terms that large would be exact.
    """
    result = b.fma(x, y, z)
    small = b.unary("fabs", x) < 1.0
    scale, smallest = 2.0**32, 2.0**-126
    larger = b.fma(b.select(small, x * scale, x), b.select(small, y, y * scale), z * scale)
    tiny = b.unary("fabs", larger) < smallest * scale
    on_edge = b.unary("fabs", result).eq(smallest)
    sign = result.bitcast(_Bits) & b.const(_Bits, -0x80000000)
    zero = sign.bitcast(_Lanes)
    return b.select(on_edge & tiny, zero, _flush(b, result.bitcast(_Bits)))


def _flush(b: Builder, bits: Value) -> Value:
    """fp32 given as bits, with a denormal replaced by the zero of its sign."""
    normal = (bits & 0x7F800000).ne(0)
    return b.select(normal, bits, bits & b.const(_Bits, -0x80000000)).bitcast(_Lanes)


ISA = PortableExact()

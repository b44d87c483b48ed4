"""Plain LLVM vectors for bytes: two products of bytes fit into 16 bits, whose lanes are then added up in 32."""

from __future__ import annotations

from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value, i16, i32, vec
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.isa.dot import DotIsa
from expertile.codegen.isa.portable import without_tiles

_Halves = vec(i16, 32)


class PortableInt8(ByteIsa, DotIsa):
    name = "portable_int8"
    summary = "plain vectors of bytes on any CPU"
    multiply_cycles = 8.0
    latency_cycles = 4.0
    shapes = ((2, 2), (4, 1))
    sums = vec(i32, 16)

    def unavailable(self) -> str | None:
        return None

    def target(self) -> Target:
        return without_tiles()

    def multiply(self, b: Builder, c: Value, a: Value, v: Value) -> Value:
        # A token's bytes are above -128: no two products leave the 16 bits.
        words = (_low(a) * _low(v) + _high(a) * _high(v)).bitcast(self.sums)
        return c + (words << 16).shift_signed(16) + words.shift_signed(16)


def _low(words: Value) -> Value:
    """The even bytes, in 16 bits each."""
    return (words.bitcast(_Halves) << 8).shift_signed(8)


def _high(words: Value) -> Value:
    """The odd bytes, in 16 bits each."""
    return words.bitcast(_Halves).shift_signed(8)


ISA = PortableInt8()

"""Plain LLVM vectors: runs on every target. bf16 becomes fp32 by a shift, then two multiply-adds a pair."""

from __future__ import annotations

from expertile.codegen import cpu
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value, i32, vec
from expertile.codegen.isa.dot import DotIsa, Sums


def without_tiles() -> Target:
    """This machine with AMX masked off: a kernel of this target can't contain a tile instruction."""
    tiles = [feature[1:] for feature in cpu.host().features if feature[1:].startswith("amx-")]
    return Target.host(without=tuple(tiles))


class Portable(DotIsa):
    name = "portable"
    summary = "plain vectors on any CPU"
    multiply_cycles = 8.0
    latency_cycles = 8.0
    shapes = ((2, 2), (4, 1))

    def unavailable(self) -> str | None:
        return None

    def target(self) -> Target:
        return without_tiles()

    def multiply(self, b: Builder, c: Value, a: Value, v: Value) -> Value:
        for half in (_even, _odd):
            c = b.fmuladd(half(a), half(v), c)
        return c


def _even(words: Value) -> Value:
    return (words << 16).bitcast(Sums)


def _odd(words: Value) -> Value:
    return (words & words.b.const(vec(i32, 16), -65536)).bitcast(Sums)


ISA = Portable()

"""AVX-512 VNNI: VPDPBUSD, which multiplies unsigned bytes by signed ones, four to a lane (SDM vol. 2).

Rows become unsigned by adding 128 to each byte, which is flipping its highest bit.  A sum is then too large by 128
times the sum of the token's bytes.
"""

from __future__ import annotations

from expertile.codegen import cpu, vectors
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value, i32, vec
from expertile.codegen.isa.base import TilePlan
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.isa.dot import DotIsa, Words
from expertile.codegen.vectors import Vectors

_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
_FLIP = -0x7F7F7F80  # the highest bit of each byte of a word


class Avx512Vnni(ByteIsa, DotIsa):
    name = "avx512_vnni"
    summary = "512-bit vectors, VPDPBUSD"
    multiply_cycles = 1.0
    latency_cycles = 5.0
    shapes = ((4, 6), (4, 4), (8, 2), (16, 1), (1, 4))
    sums = vec(i32, 16)
    offsets = True

    @property
    def vectors(self) -> Vectors:
        return vectors.host()

    def unavailable(self) -> str | None:
        missing = [feature for feature in _FEATURES if not cpu.host().has(feature)]
        return f"the CPU lacks {', '.join(missing)}" if missing else None

    def target(self) -> Target:
        return Target.host()

    def hold_a(self, rows: list[Value]) -> list[Value]:
        return [row ^ _FLIP for row in rows]

    def load_a(
        self, b: Builder, plan: TilePlan, block: int, address: Value, stride: int, streaming: bool
    ) -> list[Value]:
        return self.hold_a(super().load_a(b, plan, block, address, stride, streaming))

    def multiply(self, b: Builder, c: Value, a: Value, v: Value) -> Value:
        return b.call("llvm.x86.avx512.vpdpbusd.512", self.sums, [c, a, v])

    def row_of_zeros(self, b: Builder, sums: Value, words: Value) -> Value:
        return self.multiply(b, sums, b.const(Words, _FLIP), words)


ISA = Avx512Vnni()

"""AVX-512 BF16: VDPBF16PS on whole registers (Cooper Lake, Zen 4 and their successors)."""

from __future__ import annotations

from expertile.codegen import cpu, vectors
from expertile.codegen.compiler import Target
from expertile.codegen.ir import Builder, Value, bf16, vec
from expertile.codegen.isa.dot import DotIsa, Sums
from expertile.codegen.vectors import Vectors

_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")


class Avx512Bf16(DotIsa):
    name = "avx512_bf16"
    summary = "512-bit vectors, VDPBF16PS"
    multiply_cycles = 1.0
    latency_cycles = 6.0
    shapes = ((4, 6), (4, 4), (8, 2), (16, 1), (1, 4))

    @property
    def vectors(self) -> Vectors:
        return vectors.host()

    def unavailable(self) -> str | None:
        missing = [feature for feature in _FEATURES if not cpu.host().has(feature)]
        return f"the CPU lacks {', '.join(missing)}" if missing else None

    def target(self) -> Target:
        return Target.host()

    def multiply(self, b: Builder, c: Value, a: Value, v: Value) -> Value:
        pairs = vec(bf16, 32)
        operands = [c, a.bitcast(pairs), v.bitcast(pairs)]
        return b.call("llvm.x86.avx512bf16.dpbf16ps.512", Sums, operands)


ISA = Avx512Bf16()

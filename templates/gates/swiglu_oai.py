"""The clamped SwiGLU of gpt-oss and MiniMax-M3."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate
from expertile.templates.math import sigmoid


@dataclass(frozen=True)
class SwigluOai(Gate):
    """g' · σ(alpha·g') · (u' + 1) with g' = min(g, limit) and u' = clamp(u, ±limit)."""

    name = "swiglu_oai"

    alpha: float = 1.702
    limit: float = 7.0

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        assert gate is not None
        gate = b.min(gate, self.limit)
        up = b.max(b.min(up, self.limit), -self.limit)
        return gate * sigmoid(b, gate * self.alpha) * (up + 1.0)


GATE = SwigluOai()

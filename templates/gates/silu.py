"""silu(g) · u: SwiGLU as in Llama-like models (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate
from expertile.templates.math import exp


@dataclass(frozen=True)
class Silu(Gate):
    """g / (1 + e⁻ᵍ) · u"""

    name = "silu"

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        assert gate is not None
        return gate / (exp(b, -gate) + 1.0) * up


GATE = Silu()

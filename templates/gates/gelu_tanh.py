"""gelu(g) · u in the tanh approximation (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate
from expertile.templates.math import sigmoid

_SLOPE = 2 * math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class GeluTanh(Gate):
    """g · (1 + tanh y) / 2 · u with y = √(2/π)·(g + 0.044715·g³); (1 + tanh y) / 2 is the logistic function of 2y."""

    name = "gelu_tanh"

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        assert gate is not None
        cubic = b.fmuladd(
            gate * gate, b.const(gate.type, 0.044715 * _SLOPE), b.const(gate.type, _SLOPE)
        )
        return gate * sigmoid(b, gate * cubic) * up


GATE = GeluTanh()

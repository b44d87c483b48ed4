"""relu(u)², without a gate half, as in Nemotron-H (So et al. 2021, "Primer")."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate


@dataclass(frozen=True)
class Relu2(Gate):
    """max(u, 0)²"""

    name = "relu2"
    gated = False

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        positive = b.max(up, 0.0)
        return positive * positive


GATE = Relu2()

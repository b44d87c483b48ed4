"""gelu(g) · u with the exact normal distribution function (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate
from expertile.templates.math import normal_cdf


@dataclass(frozen=True)
class Gelu(Gate):
    """g · Φ(g) · u"""

    name = "gelu"

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        assert gate is not None
        return gate * normal_cdf(b, gate) * up


GATE = Gelu()

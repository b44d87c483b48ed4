"""What a gate is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from expertile.codegen.ir import Builder, Value


@dataclass(frozen=True)
class Gate(ABC):
    """h = f(g, u) of the gate and up projections, or f(u) of the only one there is."""

    name: ClassVar[str]
    gated: ClassVar[bool] = True
    """Whether the first projection has a gate half beside the up half."""

    @abstractmethod
    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        """h, from fp32 vectors; `gate` is None for a gate that is not `gated`."""

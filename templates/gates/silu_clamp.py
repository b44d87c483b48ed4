"""SwiGLU with both halves limited, as in DeepSeek-V4."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value
from expertile.templates.gates.base import Gate
from expertile.templates.gates.silu import GATE as SILU


@dataclass(frozen=True)
class SiluClamp(Gate):
    """silu(min(g, limit)) · clamp(u, ±limit)"""

    name = "silu_clamp"

    limit: float = 10.0

    def emit(self, b: Builder, gate: Value | None, up: Value) -> Value:
        assert gate is not None
        limited = b.max(b.min(up, self.limit), -self.limit)
        return SILU.emit(b, b.min(gate, self.limit), limited)


GATE = SiluClamp()

"""What codegen raises."""

from __future__ import annotations


class CodegenError(RuntimeError):
    """A kernel can't be built, compiled, cached or run here; the message says what to do."""

"""Weight formats, one file each; `base.py` says what one is, `quantized.py` what quantised ones have in common.

Adding a quantised format is adding a file that defines `SCHEMES`, its usual variants by name, and the file's name to
`_MODULES`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from expertile.templates.formats.quantized import Quantized

__all__ = ["Quantized", "names", "resolve", "schemes"]

_MODULES = (
    "int8",
    "int4",
    "fp8",
    "fp8_block",
    "mxfp8",
    "mxfp4",
    "ds_fp4",
    "nvfp4",
    "q8_0",
    "q4_0",
    "q4_k",
    "q6_k",
)


@cache
def schemes() -> dict[str, Quantized]:
    """All quantised formats in their usual variants, by name."""
    found: dict[str, Quantized] = {}
    for module in _MODULES:
        found |= import_module(f"expertile.templates.formats.{module}").SCHEMES
    return found


def names() -> tuple[str, ...]:
    """The names :func:`resolve` knows."""
    return tuple(schemes())


def resolve(scheme: str | Quantized) -> Quantized:
    """A scheme from its name or from itself. Raises ValueError or TypeError for anything else."""
    if isinstance(scheme, Quantized):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"weights: expected a name or a scheme, got {type(scheme).__name__}")
    if scheme not in schemes():
        raise ValueError(f"weights: expected one of bf16, {', '.join(schemes())}, got {scheme!r}")
    return schemes()[scheme]

"""Tile ISAs, best first. Adding one is adding a file that defines `ISA`, and its name to `_MODULES`."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

from expertile.codegen.errors import CodegenError
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan, Variant

__all__ = ["BTile", "Pass", "TileIsa", "TilePlan", "Variant", "by_name", "names", "select"]

_MODULES = ("amx", "avx512_bf16", "portable", "portable_exact")
"""In order of preference; `portable` runs everywhere, so what follows it is only used when asked for."""


def names() -> tuple[str, ...]:
    """All ISA names, best first."""
    return _MODULES


@cache
def by_name(name: str) -> TileIsa:
    """The ISA called `name`. Raises CodegenError for an unknown name."""
    if name not in _MODULES:
        raise CodegenError(f"ISA: expected one of {', '.join(_MODULES)}, got {name!r}")
    isa = import_module(f"expertile.codegen.isa.{name}").ISA
    assert isinstance(isa, TileIsa)
    return isa


@cache
def select() -> TileIsa:
    """The ISA of this process: the one that EXPERTILE_ISA names, else the best that works here.

    Raises CodegenError if EXPERTILE_ISA names one that is unknown or can't run here (no silent change of unit).
    """
    forced = os.environ.get("EXPERTILE_ISA", "")
    if forced:
        isa = by_name(forced)
        reason = isa.unavailable()
        if reason:
            raise CodegenError(f"EXPERTILE_ISA={forced}: this ISA can't run here: {reason}")
        return isa
    return next(isa for isa in map(by_name, _MODULES) if isa.unavailable() is None)

"""Tile ISAs, best first. Adding one is adding a file that defines `ISA`, and its name to `_MODULES`."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

from expertile.codegen.errors import CodegenError
from expertile.codegen.isa.base import BTile, Pass, TileIsa, TilePlan, Variant

__all__ = [
    "BTile",
    "Pass",
    "TileIsa",
    "TilePlan",
    "Variant",
    "by_name",
    "byte_names",
    "for_bytes",
    "names",
    "select",
]

_MODULES = ("amx", "avx512_bf16", "portable", "portable_exact")
"""In order of preference; `portable` runs everywhere, so what follows it is only used when asked for."""
_BYTES = ("amx_int8", "avx512_vnni", "portable_int8")
"""Those that multiply bytes, likewise."""
_BESIDE = dict(zip(_MODULES, (*_BYTES, _BYTES[-1]), strict=True))


def names() -> tuple[str, ...]:
    """All ISA names, best first."""
    return _MODULES


def byte_names() -> tuple[str, ...]:
    """The names of those that multiply bytes, best first."""
    return _BYTES


@cache
def by_name(name: str) -> TileIsa:
    """The ISA called `name`, one of those that multiply bytes included. Raises CodegenError for an unknown name."""
    if name not in _MODULES + _BYTES:
        raise CodegenError(f"ISA: expected one of {', '.join(_MODULES + _BYTES)}, got {name!r}")
    isa = import_module(f"expertile.codegen.isa.{name}").ISA
    assert isinstance(isa, TileIsa)
    return isa


@cache
def for_bytes(name: str) -> str:
    """The ISA that multiplies int8 rows by int8 tokens where `name` multiplies bf16; itself if it is one already.

    That is the one beside it; or the next best, if this machine has `name` but lacks that one. All give the same bits.
    """
    beside = _BESIDE.get(name, name)
    if by_name(name).unavailable():
        return beside
    following = _BYTES[_BYTES.index(beside) :]
    return next(each for each in following if by_name(each).unavailable() is None)


@cache
def select() -> TileIsa:
    """The ISA of this process: the one that EXPERTILE_ISA names, else the best that works here.

    Raises CodegenError if EXPERTILE_ISA names one that is unknown or can't run here (no silent change of unit).
    """
    forced = os.environ.get("EXPERTILE_ISA", "")
    if forced:
        if forced in _BYTES:
            expected = ", ".join(_MODULES)
            raise CodegenError(f"EXPERTILE_ISA: expected one of {expected}, got {forced!r}")
        isa = by_name(forced)
        reason = isa.unavailable()
        if reason:
            raise CodegenError(f"EXPERTILE_ISA={forced}: this ISA can't run here: {reason}")
        return isa
    return next(isa for isa in map(by_name, _MODULES) if isa.unavailable() is None)

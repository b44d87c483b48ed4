"""bf16 rows: read in place."""

from __future__ import annotations

from dataclasses import dataclass

from expertile.codegen.ir import i16
from expertile.templates.formats.in_place import InPlace


@dataclass(frozen=True)
class RowMajor(InPlace):
    """`W[N][K]`."""

    name = "bf16"
    element = i16

"""Kernels by their spec: compiled at first use, then an address."""

from __future__ import annotations

from typing import Protocol

from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.runtime.driver import driver_ir


class Spec(Protocol):
    """A frozen, hashable description of a kernel."""

    @property
    def isa(self) -> str: ...

    @property
    def name(self) -> str: ...

    def ir(self) -> str: ...


_addresses: dict[Spec, int] = {}
_drivers: dict[bool, int] = {}


def address(spec: Spec) -> int:
    """The machine code of a kernel. Two threads may compile the same one at once; either result serves."""
    found = _addresses.get(spec)
    if found is None:
        target = isas.by_name(spec.isa).target()
        found = _addresses[spec] = compile_ir(spec.name, spec.ir(), target).address
    return found


def driver(profiled: bool = False) -> int:
    """The machine code of the layer driver; or of the one that takes notes of what each thread does when."""
    found = _drivers.get(profiled)
    if found is None:
        target = isas.by_name("portable").target()  # it runs no tile instruction
        found = _drivers[profiled] = compile_ir("driver", driver_ir(profiled), target).address
    return found

"""Kernels by their spec: compiled at first use, then an address."""

from __future__ import annotations

from typing import Protocol

from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.codegen.ir import Tracer, tracer
from expertile.codegen.tracing import Unkept
from expertile.runtime.driver import driver_ir


class Spec(Protocol):
    """A frozen, hashable description of a kernel."""

    @property
    def isa(self) -> str: ...

    @property
    def name(self) -> str: ...

    def ir(self) -> str: ...


_addresses: dict[tuple[Spec, Tracer | None], int] = {}
_drivers: dict[str, int] = {}


def address(spec: Spec) -> int:
    """The machine code of a kernel. Two threads may compile the same one at once; either result serves.

    A kernel whose loads are traced is another one, and is not kept for other processes.
    """
    key = spec, tracer.get()
    found = _addresses.get(key)
    if found is None:
        found = _addresses[key] = _compile(spec)
    return found


def _compile(spec: Spec) -> int:
    store = None if tracer.get() is None else Unkept()
    return compile_ir(spec.name, spec.ir(), isas.by_name(spec.isa).target(), store=store).address


def driver(kind: str = "plain") -> int:
    """The machine code of a layer driver: "plain", "numa", or "profiled", which notes what each thread does when."""
    found = _drivers.get(kind)
    if found is None:
        target = isas.by_name("portable").target()  # it runs no tile instruction
        found = _drivers[kind] = compile_ir("driver", _driver_ir(kind), target).address
    return found


def _driver_ir(kind: str) -> str:
    if kind == "numa":
        from expertile.runtime.numa.driver import driver_ir as numa_driver_ir

        return numa_driver_ir()
    return driver_ir(profiled=kind == "profiled")

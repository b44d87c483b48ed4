"""Which machine layers are computed for: this one, or one that is only declared.

Every process imports this; on a machine of one memory node it is all of `numa` that is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import topology

if TYPE_CHECKING:
    from expertile.runtime.numa.plan import Machine, Places, Plan
    from expertile.runtime.spec import LayerKernels


def this_machine() -> Machine | None:
    """This machine, if CPUs of several nodes are ours and EXPERTILE_NUMA does not say "off"."""
    mode = os.environ.get("EXPERTILE_NUMA", "auto")
    if mode not in ("auto", "off"):
        raise ArgumentError(f'EXPERTILE_NUMA: expected "auto" or "off", got {mode!r}')
    if mode == "off":
        return None
    here = topology.read()
    if len(here.cpu_nodes) < 2:
        return None
    from expertile.runtime.numa.machine import ThisMachine

    return ThisMachine(here)


@contextmanager
def using(other: Machine | None) -> Iterator[None]:
    """Take the machine for another one, or for one of a single node, in all threads of the process."""
    global machine
    before, machine = machine, other
    try:
        yield
    finally:
        machine = before


def find(kernels: LayerKernels, places: Places, threads: int) -> Plan | None:
    """The plan for weights at such places; None if they are computed as on one node."""
    here = machine  # another thread may take it for something else meanwhile
    if here is None:
        return None
    from expertile.runtime.numa import plan

    return plan.find(kernels, places, threads, here)


machine: Machine | None = this_machine()
"""The machine; None: with one memory node, or taken for such a one."""

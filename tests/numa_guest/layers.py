"""A small layer whose weights lie in placed memory, and what it reads from which node."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Case

from expertile.runtime import openmp
from expertile.runtime.numa import plan, simulation
from expertile.runtime.numa.groups import Groups
from expertile.runtime.numa.machine import ThisMachine

from . import memory
from .memory import PAGE
from .placements import Placed

_EXPERTS, _HIDDEN, _INTERMEDIATE = 4, 3072, 64
BYTES = 3 * 2 * _EXPERTS * _HIDDEN * _INTERMEDIATE
"""Of the weights. A gate/up row is one and a half pages, so that it is cut in two or three; down rows are not cut."""


def use_threads() -> None:
    """Let layers in this fork have threads. They do not after a fork, as a team of threads would be lost in it."""
    openmp._home = os.getpid()  # where it forked, no team had been started


def case_on(placed: Placed) -> Case:
    """A layer with its weights in placed memory, from where the largest pages begin."""
    case = oracle.make_case(
        1, tokens=4, experts=_EXPERTS, top_k=2, hidden=_HIDDEN, intermediate=_INTERMEDIATE
    )
    ids = torch.arange(case.ids.numel()).view(case.ids.shape) % _EXPERTS  # one kernel serves all
    largest = max(placed.page_bytes)
    address = -(-placed.address // largest) * largest
    gate_up = _copy_to(address, case.gate_up)
    down = _copy_to(address + gate_up.nbytes, case.down)
    return replace(case, ids=ids, gate_up=gate_up, down=down)


def _copy_to(address: int, tensor: torch.Tensor) -> torch.Tensor:
    """The values at an address, in whatever memory is there."""
    buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


class RealMachine(ThisMachine):
    """This machine, which also says the node of each byte, as :class:`simulation.Reads` wants to know."""

    def nodes(self, address: int, size: int) -> np.ndarray:
        first = address // PAGE * PAGE
        pages = memory.nodes_of(first, address + size - first)
        return pages.repeat(PAGE)[address - first :][:size]


def loaded(machine: RealMachine, case: Case) -> tuple[torch.Tensor, int, int]:
    """The result, and the bytes of weights that kernels load: from a node that isn't the thread's, and in all."""
    y, reads = simulation.read(machine, case.weights, case.x, case.ids, case.router)
    counts = [reads.remote(w.data_ptr(), w.nbytes) for w in (case.gate_up, case.down)]
    remote, total = (sum(both) for both in zip(*counts, strict=True))
    return y, remote, total


def planned(machine: RealMachine, made: plan.Plan, groups: Groups) -> tuple[int, int, int]:
    """Bytes of weights that a plan has threads read: in all, from other nodes, and these of matrices in a pattern."""
    total = remote = avoidable = 0
    for role in (made.gate_up, made.down):
        for (address, rule), phase in zip(role.matrices, role.tables.phase, strict=True):
            nodes = machine.nodes(address, role.geometry.rows * role.geometry.row_bytes)
            owners = np.array([groups.owner.get(node, -1) for node in range(nodes.max() + 1)])[
                nodes
            ]
            pieces = [(group, part) for group, part in _pieces(role, phase)]
            far = sum(int((owners[part] != group).sum()) for group, part in pieces)
            remote += far
            avoidable += far if rule else 0
            total += sum(part.stop - part.start for _, part in pieces)
    return total, remote, avoidable


def _pieces(role: Any, phase: int) -> Iterator[tuple[int, slice]]:
    """The group that reads a piece of a row, and the bytes of the piece, counted from where the matrix begins."""
    geometry, tables = role.geometry, role.tables
    for group, blocks in enumerate(tables.cells[phase].tolist()):
        for number in (number for cell in blocks for number in range(*cell)):
            row, _, rows, first, end, _ = tables.entries[number].tolist()
            ranges = tables.ranges[first:end].tolist()
            for start in range(row, row + rows * tables.apart, tables.apart):
                for chunks in ranges:
                    begin, stop = (min(64 * chunk, geometry.code_bytes) for chunk in chunks)
                    yield group, slice(*(start * geometry.row_bytes + at for at in (begin, stop)))

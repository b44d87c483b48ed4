"""The ways in which memory gets onto nodes, each with the rule by which the kernel then chooses the node of a page.

The rules are what Linux 6.9 and later do; a placement that comes out otherwise fails here, before anything else is
asked about it. What a placement does to its process stays, as it would in a program that `numactl` started.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import expertile.numa

from . import memory
from .memory import HUGE_PAGE, PAGE

_NODES = Path("/sys/devices/system/node")
_WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Placed:
    """Memory that has its pages: `size` bytes from `address`.

    rule: the node of each page as the kernel's rule has it, int32.
    page_bytes: the sizes of what takes turns, from the start of the memory to its end.
    whole: whether all pages are where the rule has them.
    """

    address: int
    size: int
    rule: np.ndarray
    page_bytes: tuple[int, ...] = (PAGE,)
    whole: bool = True


Place = Callable[[int, Sequence[int]], Placed]
"""Places memory of at least some bytes on some nodes."""

PLACEMENTS: dict[str, Place] = {}


def placement(function: Place) -> Place:
    PLACEMENTS[function.__name__] = function
    return function


@placement
def task_policy(size: int, nodes: Sequence[int]) -> Placed:
    """`numactl --interleave=all python …`: page n of the address space is on node n modulo their number."""
    memory.set_policy(memory.MPOL_INTERLEAVE, nodes)
    return _touched(memory.allocate(size), size, nodes)


@placement
def mbind(size: int, nodes: Sequence[int]) -> Placed:
    """The same rule, for one range."""
    address = memory.allocate(size)
    memory.bind(address, size, memory.MPOL_INTERLEAVE, nodes)
    return _touched(address, size, nodes)


@placement
def huge_pages(size: int, nodes: Sequence[int]) -> Placed:
    """Nodes take turns at huge pages, counted from where the mapping starts rather than from address 0.

    A head and a tail that fill none are on small pages, by the first rule.
    """
    head, middle, tail = 5, -(-size // HUGE_PAGE), 11
    space = memory.allocate((middle + 2) * HUGE_PAGE, huge=True)
    address = -(-(space + head * PAGE) // HUGE_PAGE) * HUGE_PAGE - head * PAGE
    size = middle * HUGE_PAGE + (head + tail) * PAGE
    memory.bind(address, size, memory.MPOL_INTERLEAVE, nodes)
    memory.touch(address, size)
    small = _turns(address, size, nodes)
    huge = np.resize(np.roll(nodes, -(address // HUGE_PAGE)), middle).repeat(HUGE_PAGE // PAGE)
    rule = np.concatenate([small[:head], huge, small[-tail:]])
    return Placed(address, size, rule, (PAGE, HUGE_PAGE, PAGE))


@placement
def mremap(size: int, nodes: Sequence[int]) -> Placed:
    """Pages stay where they are when their addresses change, so that the rule is that of the old address."""
    old = mbind(size, nodes)
    turn = len(nodes) * PAGE
    space = memory.allocate(size + turn)
    new = space + (old.address - space + PAGE) % turn  # one page further, but for whole turns
    memory.move_mapping(old.address, size, new)
    return Placed(new, size, old.rule)


@placement
def interleave(size: int, nodes: Sequence[int]) -> Placed:
    """Memory that was on one node, in huge pages, until :func:`expertile.numa.interleave` spread it."""
    address = _on_node(size, nodes[-1], huge=True)
    buffer = (ctypes.c_ubyte * size).from_address(address)
    expertile.numa.interleave(torch.frombuffer(buffer, dtype=torch.uint8))
    return Placed(address, size, _turns(address, size, nodes))


@placement
def full_node(size: int, nodes: Sequence[int]) -> Placed:
    """Where the last node has room for some of its pages only, the others silently come to be on other nodes."""
    node, placed = nodes[-1], mbind(size, nodes)
    for huge in (True, False):  # fast, but some of it may come to be on other nodes; then the rest
        _on_node(max(_free(node) - 2 * size, PAGE), node, huge=huge)
    while True:
        before, placed = placed, mbind(size, nodes)
        there = memory.nodes_of(placed.address, size)[placed.rule == node] == node
        if there.any() and not there.all():
            return replace(placed, whole=False)
        if not there.any():  # it became full just between two
            memory.free(before.address, size // 2)


@placement
def cpuset(size: int, nodes: Sequence[int]) -> Placed:
    """In a container that may use all nodes but the first, "all nodes" means those."""
    allowed = nodes[1:]
    (_CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    group = _CGROUPS / "without-first-node"
    group.mkdir()
    (group / "cpuset.mems").write_text(",".join(map(str, allowed)))
    (group / "cpuset.cpus").write_text(",".join(_cpus(node) for node in allowed))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    memory.set_policy(memory.MPOL_INTERLEAVE, nodes)
    return _touched(memory.allocate(size), size, allowed)


@placement
def weighted(size: int, nodes: Sequence[int]) -> Placed:
    """Nodes take turns by their weights: here 2 pages on the first node, 3 on the second, and so on."""
    pattern: list[int] = []
    for weight, node in enumerate(nodes, start=2):
        (_WEIGHTS / f"node{node}").write_text(str(weight))
        pattern += [node] * weight
    memory.set_policy(memory.MPOL_WEIGHTED_INTERLEAVE, nodes)
    return _touched(memory.allocate(size), size, pattern)


def _touched(address: int, size: int, pattern: Sequence[int]) -> Placed:
    memory.touch(address, size)
    return Placed(address, size, _turns(address, size, pattern))


def _turns(address: int, size: int, pattern: Sequence[int]) -> np.ndarray:
    """The node of each page, where page n of the address space is on node `pattern[n % len(pattern)]`."""
    pages = np.arange(address // PAGE, (address + size) // PAGE)
    return np.array(pattern, np.int32)[pages % len(pattern)]


def _cpus(node: int) -> str:
    return (_NODES / f"node{node}" / "cpulist").read_text().strip()


def _on_node(size: int, node: int, *, huge: bool = False) -> int:
    """The address of memory that is on one node, as far as it has room."""
    address = memory.allocate(size, huge=huge)
    memory.bind(address, size, memory.MPOL_PREFERRED, [node])
    memory.touch(address, size)
    return address


def _free(node: int) -> int:
    for line in (_NODES / f"node{node}" / "meminfo").read_text().splitlines():
        if " MemFree:" in line:
            return int(line.split()[-2]) * 1024
    raise ValueError(f"node {node} says nothing of free memory")

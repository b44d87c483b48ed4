"""The memory nodes of this machine, as far as this process may use them.

From sysfs (nodes, CPUs, memory, distances, sockets), the calling thread's affinity mask (which lies within its cpuset),
the memory nodes of its cpuset, and the CPU quotas of its cgroup and those above, of either version.  Nodes may lack
CPUs or memory, have numbers with gaps between, and share a socket (sub-NUMA clustering); without
/sys/devices/system/node there is one, number 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

_LOCAL, _REMOTE = 10, 20  # distances, where the firmware says nothing
_NODE = re.compile(r"node(\d+)")
_MEMORY = re.compile(r"(Mem(?:Total|Free)): +(\d+) kB")


@dataclass(frozen=True)
class Node:
    """A memory node."""

    number: int
    cpus: tuple[int, ...]
    """Those that the thread may use, ascending; none on a memory-only node."""
    memory: int
    """Bytes in all; 0 on a CPU-only node."""
    free: int
    """Bytes that hold nothing yet."""
    sockets: tuple[int, ...]
    """The packages of all its CPUs, usable or not, ascending; several nodes of one: sub-NUMA clustering."""
    allowed: bool
    """Whether the process may allocate there. Pages may be there all the same."""


@dataclass(frozen=True)
class Topology:
    """Nodes with usable CPUs or memory, by ascending number."""

    nodes: tuple[Node, ...]
    distances: tuple[tuple[int, ...], ...]
    """From each of `nodes` to each, as the firmware says: 10 is local, 20 twice as far."""
    quota: float | None
    """CPU seconds a second that the cgroup grants; None: no limit."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs the thread may use, ascending."""
        return tuple(sorted(cpu for node in self.nodes for cpu in node.cpus))

    @property
    def threads(self) -> int:
        """How many threads can run all the time: the CPUs, capped by the quota."""
        quota = len(self.cpus) if self.quota is None else int(self.quota)
        return max(1, min(len(self.cpus), quota))

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Numbers of the nodes with memory, ascending."""
        return tuple(node.number for node in self.nodes if node.memory)

    @property
    def cpu_nodes(self) -> tuple[int, ...]:
        """Numbers of the nodes whose CPUs this process may use, ascending."""
        return tuple(node.number for node in self.nodes if node.cpus)

    def distance(self, node: int, other: int) -> int:
        """From one node to another, by their numbers."""
        numbers = [node.number for node in self.nodes]
        return self.distances[numbers.index(node)][numbers.index(other)]


def read(root: str | Path = "/", affinity: Collection[int] | None = None) -> Topology:
    """The topology now.

    root: where sys and proc are, another machine's say.  affinity: the numbers of the CPUs that may be used; by default
    those of the calling thread, under another root those that proc/self/status allows.
    """
    root = Path(root)
    status = _fields(root / "proc/self/status")
    if affinity is not None:
        usable = frozenset(affinity)
    elif root == Path("/"):
        usable = frozenset(os.sched_getaffinity(0))
    else:
        usable = _numbers(status.get("Cpus_allowed_list", ""))
    memory = status.get("Mems_allowed_list")
    allowed = None if memory is None else _numbers(memory)
    system = root / "sys/devices/system"
    folders = sorted(
        (int(m[1]), path) for path in system.glob("node/node*") if (m := _NODE.fullmatch(path.name))
    )
    nodes = [_node(root, number, folder, usable, allowed) for number, folder in folders]
    nodes = _with_all_cpus(nodes, usable) if nodes else [_only_node(root, usable)]
    distances = [_distances(folder, at, len(nodes)) for at, (_, folder) in enumerate(folders)] or [
        [_LOCAL]
    ]
    kept = [at for at, node in enumerate(nodes) if node.cpus or node.memory]
    return Topology(
        tuple(nodes[at] for at in kept),
        tuple(tuple(distances[at][other] for other in kept) for at in kept),
        _quota(root),
    )


# Nodes --------------------------------------------------------------------------------------------


def _node(
    root: Path, number: int, folder: Path, usable: frozenset[int], allowed: frozenset[int] | None
) -> Node:
    cpus = _numbers(_text(folder / "cpulist"))
    memory, free = _memory(folder / "meminfo")
    may = allowed is None or number in allowed
    return Node(number, tuple(sorted(cpus & usable)), memory, free, _sockets(root, cpus), may)


def _only_node(root: Path, usable: frozenset[int]) -> Node:
    """All there is, on a kernel that knows no nodes."""
    memory, free = _memory(root / "proc/meminfo")
    return Node(0, tuple(sorted(usable)), memory, free, _sockets(root, usable), True)


def _with_all_cpus(nodes: list[Node], usable: frozenset[int]) -> list[Node]:
    """The nodes, the first with the usable CPUs that sysfs (in some sandboxes) lists under none."""
    lost = usable.difference(*(node.cpus for node in nodes))
    first = nodes[0]
    return [replace(first, cpus=tuple(sorted(lost.union(first.cpus)))), *nodes[1:]]


def _memory(meminfo: Path) -> tuple[int, int]:
    """Total and free bytes."""
    found = {name: int(kilobytes) << 10 for name, kilobytes in _MEMORY.findall(_text(meminfo))}
    return found.get("MemTotal", 0), found.get("MemFree", 0)


def _sockets(root: Path, cpus: Collection[int]) -> tuple[int, ...]:
    folder = root / "sys/devices/system/cpu"
    ids = {_text(folder / f"cpu{cpu}/topology/physical_package_id").strip() for cpu in cpus}
    return tuple(sorted(int(socket) for socket in ids if socket))


def _distances(folder: Path, at: int, nodes: int) -> list[int]:
    """To every node; as if the machine were even where the firmware's row is missing."""
    row = [int(word) for word in _text(folder / "distance").split()]
    return (
        row if len(row) == nodes else [_LOCAL if other == at else _REMOTE for other in range(nodes)]
    )


# Quotas -------------------------------------------------------------------------------------------


def _quota(root: Path) -> float | None:
    """The least of the process's cgroups and those above, as far as they are mounted here."""
    limits = [_limit(folder) for folder in _cgroups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of the cgroups that limit the process's CPU time."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        name = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if name is None or name not in paths or (name and name not in options.split(",")):
            continue
        top, mount = fields.split(" ")[3:5]
        yield from _upwards(root / mount.lstrip("/"), top, paths[name])


def _upwards(mount: Path, top: str, path: str) -> Iterator[Path]:
    """From a cgroup up to the mounted one, `top`; where the path isn't within, a container's, which is that one."""
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(top):
        inside = PurePosixPath(top)
    folder = inside.relative_to(top)
    yield mount / folder
    yield from (mount / above for above in folder.parents)


def _limit(folder: Path) -> float | None:
    """CPUs' worth of time."""
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us").strip()
        period = _text(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


# Files --------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    """What is in it; nothing if it isn't there or can't be read, which containers do to any of these files."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, str]:
    """Of lines "name: value"."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _numbers(ranges: str) -> frozenset[int]:
    """Of the kernel's "0-3,8"."""
    parts = [part.partition("-") for part in ranges.strip().split(",") if part]
    return frozenset(
        number for first, _, last in parts for number in range(int(first), int(last or first) + 1)
    )

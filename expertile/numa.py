"""Memory nodes: where weights are, and spreading them over the nodes of this machine.

    import expertile.numa

    expertile.numa.interleave(gate_up)
    print(expertile.numa.report(gate_up, down))

On a machine with several nodes, each node's threads read those parts of the weights that are on it, wherever somebody
has put them (docs/numa.md). Best are weights that are spread over all nodes page by page, as `numactl --interleave=all`
does for a whole process and :func:`interleave` for a tensor. Nothing here changes what is in a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from expertile.codegen.layouts import CHUNK
from expertile.runtime import openmp, tensors
from expertile.runtime.errors import ArgumentError, DtypeError, ExpertileError
from expertile.runtime.numa import pages, plan
from expertile.runtime.numa import topology as _topology
from expertile.runtime.numa.groups import fixed
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.pages import Placement
from expertile.runtime.numa.report import Memory, Part
from expertile.runtime.numa.report import report as _report
from expertile.runtime.numa.segments import Geometry
from expertile.runtime.numa.topology import Node, Topology
from expertile.runtime.weights import ExpertWeights
from expertile.templates.formats.base import ByRows

__all__ = [
    "Interleaving",
    "Node",
    "Part",
    "Placement",
    "Report",
    "Topology",
    "interleave",
    "report",
    "topology",
]

_MAPS = Path("/proc/self/maps")
_SHARED_MEMORY = "/dev/shm/", "/dev/zero", "/memfd:", "/SYSV"
_HUGE_PAGES = "/anon_hugepage", "/dev/hugepages"
"""What mappings of such memory are called."""


def topology() -> Topology:
    """The memory nodes of this machine now, as far as this process may use their CPUs and memory."""
    return _topology.read()


# Placing --------------------------------------------------------------------------------------------------------------


def interleave(tensor: torch.Tensor, nodes: Collection[int] | None = None) -> Placement:
    """Spread the pages of a tensor over memory nodes: page number n = address // page size on nodes[n mod len(nodes)].

    tensor: of any shape and dtype, in the CPU's ordinary memory and dense: no gaps between its elements, in whatever
        order its dimensions are.
    nodes: numbers of nodes with memory that this process may use, in any order, which is that of the numbers; by
        default all of them.

    Moves the pages that are there (move_pages) and sets the policy for those that are not yet (mbind). The contents,
    the address and all aliases stay as they are, and other threads may use the tensor meanwhile. Huge pages are split.
    What else is on the first and the last page moves along. Layers over the tensor are planned anew at their next call.

    Returns what became of the pages: those that are busy or shared with other processes may stay where they are. On a
    machine with one node all are in place already.

    Raises DtypeError for what is no tensor; ArgumentError for a tensor that is not on the CPU, has gaps or no memory,
    or whose memory is a mapped file (read-only or not: its pages are the system's) or a pool of huge pages, and for
    nodes that can't be used; ExpertileError if the system refuses the calls.
    """
    address, size = _extent(tensor)
    _check_mapping(address, size)
    usable = [node.number for node in topology().nodes if node.memory and node.allowed]
    chosen = usable if nodes is None else sorted(nodes)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(usable):
        raise ArgumentError(f"nodes: expected some of {usable}, each once, got {nodes!r}")
    first, count = pages.span(address, size)
    found = pages.interleave(first * pages.PAGE_BYTES, count * pages.PAGE_BYTES, chosen)
    plan.forget()
    if found is None or (found.refused and not (found.placed or found.policy)):
        raise ExpertileError(
            "interleave: the system refuses to move this process's pages (move_pages, mbind); in a container, its "
            "seccomp profile and the capability SYS_NICE decide. Or start the process under numactl --interleave=all"
        )
    return found


def _extent(tensor: object) -> tuple[int, int]:
    """Address and bytes of a tensor's memory. Raises for what has none of its own."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    tensors.dense("tensor", tensor)
    if tensor.numel() == 0:
        raise ArgumentError(
            f"tensor: expected at least one element, got shape {tuple(tensor.shape)}"
        )
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if last + 1 != tensor.numel():
        raise ArgumentError(
            f"tensor: expected no gaps, got strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass the tensor "
            "that it is a view of"
        )
    tensors.memory("tensor", tensor)
    return tensor.data_ptr(), tensor.nbytes


def _check_mapping(address: int, size: int) -> None:
    """Raise if any of the bytes are pages of a file, or of a pool of huge pages."""
    for begin, end, path in _mappings():
        inside = begin < address + size and address < end
        if not inside or not path.startswith("/") or path.startswith(_SHARED_MEMORY):
            continue
        if path.startswith(_HUGE_PAGES):
            raise ArgumentError(
                f"tensor: expected ordinary memory, got a pool of huge pages ({path}), which can't be spread page by "
                "page; fill it under numactl --interleave=all"
            )
        raise ArgumentError(
            f"tensor: expected memory of this process, got a mapping of the file {path}, whose pages are the system's; "
            "use .clone(), or read the file into memory"
        )


def _mappings() -> Iterator[tuple[int, int, str]]:
    """Begin, end and file of each mapping of this process, as the kernel lists them."""
    for line in _MAPS.read_text().splitlines():
        ends, _, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in ends.split("-"))
        yield begin, end, path[0] if path else ""


# Reporting ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Where weights are: what :func:`report` returns. Printed, a line a part."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts))


def report(*weights: torch.Tensor | ExpertWeights) -> Report:
    """Ask the kernel where the pages of weights are now.

    weights: tensors `[E, N, K]` or `[N, K]` in the CPU's memory, with contiguous rows, and :class:`ExpertWeights`,
        whose scales are parts of their own. Pass quantised weights as the latter: elements are taken for weights.

    For each part: how many pages are on which node, the rule that they follow and the share that does, the period T,
    and how many of the bytes are read by threads of their own node under the schedule, counted page by page. Pages
    that nobody has touched are on no node yet.

    Raises ArgumentError or DtypeError, naming the argument, for anything else.
    """
    parts = [
        part for number, each in enumerate(weights) for part in _parts(f"weights[{number}]", each)
    ]
    here = topology()
    teams = fixed(here, openmp.threads())
    # Nodes without any CPUs are near to the group they go to. If they have some that are not ours, they are not.
    far = [node.number for node in here.nodes if node.sockets and not node.cpus]
    return Report(tuple(_report(*part, teams, far) for part in parts))


_Known = tuple[str, tuple[int, ...], Sequence[Memory], Geometry | None]


def _parts(name: str, weights: object) -> Iterator[_Known]:
    if isinstance(weights, ExpertWeights):
        yield from _expert_parts(name, weights)
        return
    if not isinstance(weights, torch.Tensor):
        raise DtypeError(
            f"{name}: expected a torch.Tensor or expertile.ExpertWeights, got {type(weights).__name__}"
        )
    tensors.dense(name, weights)
    if weights.dim() not in (2, 3) or weights.numel() == 0:
        raise ArgumentError(
            f"{name}: expected [E, N, K] or [N, K] with at least one element, got shape {tuple(weights.shape)}"
        )
    tensors.last_contiguous(name, weights)
    tensors.memory(name, weights)
    stack = weights if weights.dim() == 3 else weights[None]
    _, rows, columns = stack.shape
    size, step = stack.element_size(), stack.stride(1) * stack.element_size()
    chunks = -(-columns // CHUNK)
    geometry = Geometry(rows, step, columns * size, chunks, 1, CHUNK * size)
    yield name, tuple(weights.shape), [_memory(stack)], geometry


def _memory(stack: torch.Tensor) -> Memory:
    """Of a tensor with a first dimension of experts."""
    address, size = stack.data_ptr(), stack.element_size()
    last = sum((count - 1) * step for count, step in zip(stack.shape, stack.stride(), strict=True))
    experts = [address + number * stack.stride(0) * size for number in range(stack.shape[0])]
    return Memory(address, (last + 1) * size, experts)


def _expert_parts(name: str, weights: ExpertWeights) -> Iterator[_Known]:
    experts, rows, columns = weights.shape
    assert isinstance(weights.scheme, ByRows)
    for part, held in weights.parts.items():
        is_codes = part == "codes"
        geometry = Geometry.of(weights.scheme, rows, columns, CHUNK) if is_codes else None
        each = held.tensors if held.stacked else [tensor[None] for tensor in held.tensors]
        yield f"{name} {part}", (experts, *held.shape), list(map(_memory, each)), geometry

"""Machines of several memory nodes that are only declared: to try a schedule, and to see what it reads, anywhere.

A logical machine says which CPUs and pages are whose, by formula; threads and memory are this machine's.

    machine = LogicalMachine.even(4)                      # four nodes, pages of 4 KiB dealt out to them in turn
    with active.using(machine):
        y = expertile.fused_experts(…)                    # in segments, as four nodes would do it
    y, reads = read(machine, LayerWeights(gate_up, down), x, topk_ids, topk_weights)
    reads.remote(down.data_ptr(), down.nbytes)            # bytes read by threads of other nodes, bytes read in all

What is read is not what the schedule says but what its kernels do: they are compiled a second time, with a note of each
load they execute (`codegen.tracing`). That takes some times as long and has the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.codegen.ir import Module, i32, i64, ptr
from expertile.codegen.tracing import Log, recording
from expertile.runtime import layer, openmp
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.numa import active
from expertile.runtime.numa.groups import Groups, fixed, served
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.topology import Node, Topology
from expertile.runtime.spec import LayerKernels
from expertile.runtime.weights import ExpertWeights

_MEMORY = 1 << 40
"""Bytes of a declared node: more than anyone has."""
_PAGE = 4096

READ = np.dtype([("thread", np.int64), ("address", np.int64), ("bytes", np.int64)])
"""A read by thread number `thread` of the team."""


def declared(cpus: Sequence[Collection[int]], memory: Collection[int] | None = None) -> Topology:
    """Nodes 0, 1, … with these CPUs, any two as far from each other as any others.

    A node without CPUs has memory only. memory: the nodes that have memory; all of them by default.
    """
    with_memory = range(len(cpus)) if memory is None else memory
    nodes = tuple(
        Node(number, tuple(sorted(own)), size, size, (0,), True)
        for number, own in enumerate(cpus)
        for size in [_MEMORY if number in with_memory else 0]
    )
    distances = tuple(tuple(10 if a == b else 20 for b in nodes) for a in nodes)
    return Topology(nodes, distances, None)


@dataclass(frozen=True)
class Stretch:
    """Memory that is under a rule of its own, or under none."""

    address: int
    size: int
    interleaving: Interleaving | None


@dataclass(frozen=True, eq=False)
class LogicalMachine:
    """Nodes that are declared over this machine's cores, with pages by formula: a `plan.Machine`."""

    topology: Topology
    interleaving: Interleaving | None
    """Where pages are, in all of memory; None: in no pattern, on nodes nobody knows."""
    exceptions: Sequence[Stretch] = ()
    """Where it is otherwise. Of two that overlap, the first counts."""
    pins: bool = False
    """Whether threads move to the CPUs of their nodes for a call: these must be CPUs of this machine."""

    @classmethod
    def even(cls, nodes: int, page_bytes: int = _PAGE) -> LogicalMachine:
        """Nodes of one CPU each, with the pages dealt out to them in turn."""
        topology = declared([(cpu,) for cpu in range(nodes)])
        return cls(topology, Interleaving(page_bytes, tuple(range(nodes))))

    def groups(self, threads: int) -> Groups:
        """The teams of so many threads, always as many of them."""
        return fixed(self.topology, threads)

    def locate(self, ranges: Sequence[tuple[int, int]]) -> list[Interleaving | None]:
        """The rule of each range (address, bytes); None if it is under more than one."""
        return [self._rule(address, address + size) for address, size in ranges]

    def nodes(self, address: int, size: int) -> np.ndarray:
        """The node of each byte: int64 `[size]`, −1 where it is not known."""
        found = _nodes(self.interleaving, address, size)
        for part in reversed(self.exceptions):
            first = min(max(part.address - address, 0), size)
            end = min(max(part.address + part.size - address, first), size)
            found[first:end] = _nodes(part.interleaving, address + first, end - first)
        return found

    def _rule(self, address: int, end: int) -> Interleaving | None:
        for part in self.exceptions:
            if part.address < end and address < part.address + part.size:
                inside = part.address <= address and end <= part.address + part.size
                return part.interleaving if inside else None
        return self.interleaving


def _nodes(rule: Interleaving | None, address: int, size: int) -> np.ndarray:
    if rule is None or not size:
        return np.full(size, -1)
    page, end = rule.page_bytes, address + size
    numbers = np.arange(address // page, -(-end // page))
    bytes_ = np.minimum((numbers + 1) * page, end) - np.maximum(numbers * page, address)
    return np.repeat(np.array(rule.pattern)[numbers % len(rule.pattern)], bytes_)


# What is read ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reads:
    """What the kernels of a call loaded from the memory around its weights."""

    machine: LogicalMachine
    groups: Groups
    each: np.ndarray
    """`READ` `[n]`, about in the order in which it happened; without prefetches."""

    def counts(self, address: int, size: int, threads: Collection[int] | None = None) -> np.ndarray:
        """How often each byte was read: int32 `[size]`. threads: numbers of those that count; all by default."""
        each = self.each
        if threads is not None:
            each = each[np.isin(each["thread"], list(threads))]
        begin = each["address"] - address
        first, end = np.clip(begin, 0, size), np.clip(begin + each["bytes"], 0, size)
        steps = np.bincount(first, minlength=size + 1) - np.bincount(end, minlength=size + 1)
        return np.cumsum(steps[:-1], dtype=np.int32)

    def group_counts(self, address: int, size: int, group: int) -> np.ndarray:
        """The same for the threads of a group."""
        members = [n for n, other in enumerate(self.groups.thread_group) if other == group]
        return self.counts(address, size, members)

    def remote(self, address: int, size: int) -> tuple[int, int]:
        """Bytes that a group read which does not own their node, and bytes that a group read, each byte once a group.

        Bytes on nodes that nobody knows are not counted.
        """
        nodes = self.machine.nodes(address, size)
        remote = total = 0
        for group in range(len(self.groups.cpus)):
            read = (self.group_counts(address, size, group) > 0) & (nodes >= 0)
            own = [node for node, owner in self.groups.owner.items() if owner == group]
            remote += int((read & ~np.isin(nodes, own)).sum())
            total += int(read.sum())
        return remote, total


def read(
    machine: LogicalMachine,
    weights: LayerWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> tuple[torch.Tensor, Reads]:
    """The layer as a machine computes it, and what that read. Arguments as in :func:`expertile.fused_experts`.

    Kernels are compiled with notes for the first call of a shape, and kept no longer than the process. Raises what
    fused_experts raises, and CodegenError if there are more than about four million loads: the weights should be small.
    """
    prepared, log = layer.prepare(weights, topk_ids.shape[1]), _log()
    with active.using(machine), recording(log):
        kernels = LayerKernels(prepared.spec, prepared.stored, prepared.isa)
        log.watch(*_around(weights))
        y = layer.execute(kernels, x, weights, topk_ids, topk_weights)
    threads = openmp.threads()
    teams = _teams(machine.groups(threads), threads)
    return y, Reads(machine, teams, _numbered(log.loads(), threads))


def _teams(groups: Groups, threads: int) -> Groups:
    """The groups, or where there are fewer threads, those that a thread works for as one."""
    if threads >= len(groups.cpus):
        return groups
    parts = [range(*part) for part in served(groups, threads)]
    cpus = tuple(frozenset().union(*(groups.cpus[group] for group in part)) for part in parts)
    owner = {
        node: thread
        for node, group in groups.owner.items()
        for thread, part in enumerate(parts)
        if group in part
    }
    return Groups(owner, tuple(range(threads)), cpus)


@cache
def _log() -> Log:
    """One for all, as kernels have its address in them."""
    return Log()


def _around(weights: LayerWeights) -> tuple[int, int]:
    """Addresses from a page before the weights to one behind them."""
    first = weights.gate_up if isinstance(weights.gate_up, tuple) else (weights.gate_up,)
    tensors = [tensor for matrix in (*first, weights.down) for tensor in _tensors(matrix)]
    extents = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors]
    return min(first for first, _ in extents) - _PAGE, max(end for _, end in extents) + _PAGE


def _tensors(matrix: Matrix) -> Sequence[torch.Tensor]:
    return matrix.tensors if isinstance(matrix, ExpertWeights) else (matrix,)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def _numbered(loads: np.ndarray, threads: int) -> np.ndarray:
    """Loads of several rows as one read a row, with thread numbers."""
    pointers = thread_pointers(threads)
    order = np.argsort(pointers)
    which = np.repeat(np.arange(len(loads)), loads["rows"])
    row = np.arange(len(which)) - (np.cumsum(loads["rows"]) - loads["rows"])[which]
    found = np.empty(len(which), READ)
    thread = order[np.searchsorted(pointers[order], loads["thread"])]
    found["thread"], found["bytes"] = thread[which], loads["bytes"][which]
    found["address"] = loads["address"][which] + row * loads["stride"][which]
    return found


def thread_pointers(threads: int) -> np.ndarray:
    """The thread pointer of each thread of the team, int64 `[threads]`: OpenMP keeps numbers from region to region."""
    omp = openmp.runtime()
    table = np.zeros(threads + 1, np.int64)
    if omp is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_note_pointer())(table.ctypes.data)
        return table[1:]
    table[0] = omp.thread_number
    parallel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )
    parallel(omp.parallel)(_note_pointer(), table.ctypes.data, threads, 0)
    return table[1:]


@cache
def _note_pointer() -> int:
    """Machine code: note(table), which writes a thread's pointer behind the address of what says its number."""
    module = Module("note_pointer")
    with module.function("note_pointer", {"table": ptr}) as (b, arg):
        function, number = arg.table.load(i64), b.var(i64, 0)
        with b.if_(function.ne(0)):
            number.set(b.call_address(function, i32, []).to(i64))
        pointer = b.call("llvm.thread.pointer", ptr, [])
        arg.table.at(8).at(number.get() * 8).store(b.to_int(pointer))
    return compile_ir("note_pointer", str(module), isas.by_name("portable").target()).address

"""Which layers are computed in segments, and what the driver of several memory nodes reads: planned once, then found.

A plan goes with kernels, with addresses and with a number of threads.  It asks the machine where the pages of the
weights are.  If they move later, results stay right and reads become remote: see :func:`forget`.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from expertile.codegen import isa as isas
from expertile.codegen.isa import Variant
from expertile.codegen.layouts import GROUP
from expertile.runtime import call, choice, jit
from expertile.runtime.numa.driver import counters
from expertile.runtime.numa.groups import Groups, served
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.segments import Geometry, Tables, tables
from expertile.runtime.spec import DTYPES, KernelTable, LayerKernels, add_all
from expertile.templates.formats.base import ByRows, WeightFormat
from expertile.templates.kernel import ExpertKernel
from expertile.templates.segments import Activate, Combine, SegmentDown, SegmentGateUp
from expertile.templates.tokens import Gather

Places = tuple[tuple[int, ...], tuple[int, ...]]
"""Addresses and steps of `call.WEIGHTS`."""

_ITEM_ROWS = 128
"""Positions of a work item, about."""


class Machine(Protocol):
    """A machine of several memory nodes, or what is taken for one."""

    @property
    def pins(self) -> bool:
        """Whether its groups are CPUs that threads can be moved to."""

    def groups(self, threads: int) -> Groups:
        """The teams of so many threads. What teams there are, threads don't change: results depend on it."""

    def locate(self, ranges: Sequence[tuple[int, int]]) -> list[Interleaving | None]:
        """How the pages of each range (address, bytes) are spread over the nodes, if in a pattern."""


class Scratch(NamedTuple):
    """What the scratch of a call depends on beside its tokens."""

    groups: int
    threads: int
    mask_bytes: int
    kernel_bytes: int
    """The kernels' own, for each thread."""
    most_parts: int
    projections: int
    hidden: int
    intermediate: int

    @property
    def counters(self) -> int:
        """Counters of work items."""
        return counters(self.groups)

    def sizes(self, tokens: int, slots: int) -> dict[str, int]:
        """Bytes of `call.NUMA_SCRATCH`; layouts read up to a vector past the end."""
        sizes = (
            8 * slots,
            4 * self.most_parts * self.projections * self.intermediate * slots + 64,
            2 * self.intermediate * slots + 64,
            4 * self.groups * self.hidden * tokens + 64,
            self.mask_bytes * self.threads,
        )
        return dict(zip(call.NUMA_SCRATCH, sizes, strict=True))


class Plan:
    """A layer's weights in segments: kernels, tables and threads. Holds what the driver has addresses of."""

    def __init__(
        self,
        kernels: LayerKernels,
        places: Places,
        groups: Groups,
        threads: int,
        machine: Machine,
    ) -> None:
        self.gate_up, self.down = (
            _Role(kernels, format_, matrices, groups, machine)
            for format_, matrices in zip(kernels.formats, _matrices(kernels, places), strict=True)
        )
        apart = self.gate_up.tables.apart, self.down.tables.apart
        self.kernels = _segment_kernels(kernels, *apart)
        self._cpus = _masks(groups)
        # A thread that works for several groups has no place of its own.
        moves = machine.pins and threads >= len(groups.cpus)
        self._affinity = _affinity() if moves else (0, 0)
        spec = kernels.spec
        most_parts = self.gate_up.tables.most_parts
        self.scratch = Scratch(
            len(groups.cpus), threads, self._cpus[0].nbytes, self.kernels.scratch_bytes, most_parts,
            spec.projections, spec.hidden, spec.intermediate,
        )  # fmt: skip
        phases = self.gate_up.tables.phase.reshape(spec.projections, -1)
        self._arrays = (
            self.gate_up.tables.parts, phases[0], phases[-1], self.down.tables.phase,
            np.array(served(groups, threads), np.int64), self._cpus, np.arange(GROUP, dtype=np.int32),
        )  # fmt: skip
        self._fields: dict[str, tuple[int, ...]] = {}

    @property
    def share(self) -> float:
        """The share of the matrices that lie in a pattern, by number."""
        placed = [where for role in (self.gate_up, self.down) for _, where in role.matrices]
        return sum(where is not None for where in placed) / len(placed)

    def fields(self, dtype: str) -> tuple[int, ...]:
        """The fields `call.NUMA_PLAN` and `call.NUMA_INTEGERS` for hidden states of a dtype."""
        found = self._fields.get(dtype)
        if found is None:
            found = self._fields[dtype] = (
                *self.gate_up.addresses, *self.down.addresses,
                *(array.ctypes.data for array in self._arrays),
                self.scratch.groups, self.scratch.most_parts, self.scratch.projections,
                *self.gate_up.counts, *self.down.counts,
                self.scratch.mask_bytes, *self._affinity, *self.kernels.ends(dtype),
            )  # fmt: skip
        return found


class _Role:
    """The tables of a role, and its work items."""

    def __init__(
        self,
        kernels: LayerKernels,
        format_: WeightFormat,
        matrices: tuple[int, int, Sequence[int]],
        groups: Groups,
        machine: Machine,
    ) -> None:
        rows, columns, addresses = matrices
        assert isinstance(format_, ByRows)
        self.geometry = Geometry.of(format_, rows, columns, isas.by_name(kernels.isa).chunk)
        size = (rows - 1) * self.geometry.row_bytes + self.geometry.code_bytes
        placed = machine.locate([(address, size) for address in addresses])
        self.matrices = list(zip(addresses, placed, strict=True))
        self.tables: Tables = tables(self.geometry, self.matrices, groups.owner, len(groups.cpus))
        self._items = _items(self.tables.block_first)
        # What comes after a cell without entries is looked at, so that there must be something behind the last one.
        self._entries = np.vstack([self.tables.entries, np.zeros_like(self.tables.entries[:1])])

    @property
    def addresses(self) -> list[int]:
        """Of `call.NUMA_TABLES`."""
        t = self.tables
        arrays = [t.position, t.block_first, self._items, t.cells, self._entries, t.ranges]
        return [array.ctypes.data for array in arrays]

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks and work items."""
        return len(self.tables.block_first) - 1, len(self._items) - 1


def _items(block_first: np.ndarray) -> np.ndarray:
    """The first block of each work item, and how many blocks there are."""
    starts = [0]
    for block in range(1, len(block_first)):
        if block_first[block] - block_first[starts[-1]] >= _ITEM_ROWS:
            starts.append(block)
    if starts[-1] != len(block_first) - 1:
        starts.append(len(block_first) - 1)
    return np.array(starts, np.int64)


def _masks(groups: Groups) -> np.ndarray:
    """The CPUs of each group as the C library wants them."""
    most = max((cpu for cpus in groups.cpus for cpu in cpus), default=0)
    # Linux refuses to write a thread's CPUs where there is no room for all it was built for: 8192, at most.
    masks = np.zeros((len(groups.cpus), max(128, most // 64 + 1)), np.uint64)
    for mask, cpus in zip(masks, groups.cpus, strict=True):
        for cpu in cpus:
            mask[cpu // 64] |= np.uint64(1 << cpu % 64)
    return masks


@cache
def _affinity() -> tuple[int, int]:
    """The addresses of sched_getaffinity and sched_setaffinity; zeros where threads may not be moved."""
    if not hasattr(os, "sched_setaffinity"):
        return 0, 0
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError:
        return 0, 0
    library = ctypes.CDLL(None)
    functions = library.sched_getaffinity, library.sched_setaffinity
    get, set_ = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return get, set_


# Addresses ------------------------------------------------------------------------------------------------------------


def _matrices(
    kernels: LayerKernels, places: Places
) -> tuple[tuple[int, int, list[int]], tuple[int, int, list[int]]]:
    """Rows, columns and the address of each matrix of the roles: all gates, then all ups."""
    spec = kernels.spec
    addresses, steps = places
    found = {}
    for role in call.ROLES:
        part = call.WEIGHTS.index(f"{role}_codes")
        found[role] = _addresses(addresses[part], steps[part], spec.experts)
    both = found["up"] if spec.projections == 1 else found["gate"] + found["up"]
    return (
        (spec.intermediate, spec.hidden, both),
        (spec.hidden, spec.intermediate, found["down"]),
    )


def _addresses(base: int, step: int, experts: int) -> list[int]:
    """Of the matrices of all experts."""
    if step == call.TABLE:
        return list((ctypes.c_int64 * experts).from_address(base))
    return [base + step * expert for expert in range(experts)]


# Kernels --------------------------------------------------------------------------------------------------------------


class SegmentKernels:
    """The kernels of a layer shape in segments, for rows so far apart; see :class:`LayerKernels`."""

    def __init__(self, kernels: LayerKernels, gate_up_apart: int, down_apart: int) -> None:
        self._kernels, self._apart = kernels, (gate_up_apart, down_apart)
        self.gate_up_table = KernelTable(self.gate_up, kernels.block_tokens)
        self.down_table = KernelTable(self.down, kernels.block_tokens)
        both = self.gate_up(1), self.down(1)
        self.scratch_bytes = max(choice.most_scratch(choice.description(one)) for one in both)
        spec, (format_, _) = kernels.spec, kernels.formats
        activate = Activate(
            kernels.isa, spec.intermediate, format_, spec.gate_up_bias, kernels.gate,
            kernels.rows_between, gate_up_apart == 1,
        )  # fmt: skip
        pack = Gather(kernels.isa, spec.intermediate, "bf16")
        self._middle = jit.address(activate), jit.address(pack)
        self._ends: dict[str, int] = {}

    def gate_up(self, tokens: int, blocks: int = 1) -> ExpertKernel:
        """The spec of the gate/up kernel for `tokens` tokens, or for so many full blocks and more."""
        k, spec = self._kernels, self._kernels.spec
        sizes = k.isa, spec.hidden, spec.intermediate, tokens, blocks
        return choice.best(SegmentGateUp(*sizes, k.formats[0], None, Variant(), self._apart[0]))

    def down(self, tokens: int, blocks: int = 1) -> ExpertKernel:
        """The spec of the down kernel for `tokens` tokens, or for so many full blocks and more."""
        k, spec = self._kernels, self._kernels.spec
        sizes = k.isa, spec.intermediate, spec.hidden, tokens, blocks
        return choice.best(
            SegmentDown(*sizes, k.formats[1], spec.down_bias, Variant(), self._apart[1])
        )

    def ends(self, dtype: str) -> tuple[int, int, int]:
        """The addresses of what makes the operand of down, in two steps, and of what makes the output."""
        found = self._ends.get(dtype)
        if found is None:
            k = self._kernels
            combine = Combine(k.isa, k.spec.hidden, dtype, self._apart[1] == 1)
            found = self._ends[dtype] = jit.address(combine)
        return (*self._middle, found)

    def compile(self, rows: Iterable[int] | None) -> None:
        """Compile everything that experts with these numbers of tokens need, or with any number."""
        add_all((self.gate_up_table, self.down_table), rows)
        for dtype in DTYPES:
            self.ends(dtype)
        jit.driver("numa")

    def add_missing(self) -> None:
        """Compile the kernels that a call lacked."""
        for table in (self.gate_up_table, self.down_table):
            table.add_marked()


@cache
def _segment_kernels(kernels: LayerKernels, gate_up_apart: int, down_apart: int) -> SegmentKernels:
    return SegmentKernels(kernels, gate_up_apart, down_apart)


def possible(kernels: LayerKernels) -> bool:
    """Whether a layer can be computed in segments: not if it is transposed, or multiplied as bytes."""
    return kernels.spec.activations == "bf16" and all(
        isinstance(format_, ByRows) for format_ in kernels.formats
    )


# Plans ----------------------------------------------------------------------------------------------------------------

_plans: dict[Any, Plan | None] = {}
_MOST_PLANS = 4096


def find(kernels: LayerKernels, places: Places, threads: int, here: Machine) -> Plan | None:
    """The plan for weights at such places on a machine; None if they are computed as on one node."""
    key = kernels, places, threads, here
    with suppress(KeyError):  # rather than look twice: another thread may forget it in between
        return _plans[key]
    if len(_plans) >= _MOST_PLANS:  # of weights that are gone, most likely
        forget()
    plan = _plans[key] = _make(kernels, places, threads, here)
    return plan


def _make(kernels: LayerKernels, places: Places, threads: int, machine: Machine) -> Plan | None:
    if not possible(kernels):
        return None
    groups = machine.groups(threads)
    if len(groups.cpus) < 2:
        return None
    plan = Plan(kernels, places, groups, threads, machine)
    if plan.share < 1:
        _say_once(plan.share)
    return plan


_said = False


def _say_once(share: float) -> None:
    """That weights don't lie as they should, the first time in a process."""
    global _said
    if not _said:
        _said = True
        warnings.warn(
            f"{share:.0%} of a layer's expert matrices lie on the memory nodes in a pattern; the others are read from "
            "wherever they are. `numactl --interleave=all` or expertile.numa.interleave() lays them out, and "
            "expertile.numa.report() shows how they lie.",
            RuntimeWarning,
            stacklevel=2,
        )


def forget() -> None:
    """Plan anew at the next calls: for weights whose pages were moved."""
    _plans.clear()

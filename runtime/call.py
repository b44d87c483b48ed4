"""The record a native call reads: one 64-bit field a name, filled by Python, read by the driver's machine code."""

from __future__ import annotations

import struct
from types import SimpleNamespace

from expertile.codegen.ir import Builder, L, Value, i64, ptr
from expertile.templates.kernel import MATRIX

ROLES = ("gate", "up", "down")
WEIGHTS = tuple(f"{role}_{part}" for role in ROLES for part in MATRIX)
"""The parts of the matrices of all experts. Each has an address and, as `…_step`, the bytes from expert to expert;
or, if that is TABLE, the address of a table with an address for each expert."""
TABLE = -1

POINTERS = (
    # the caller's tensors
    "x", "out", "ids", "router", *WEIGHTS,
    # kernels
    "gather", "finish", "gate_up_kernels", "down_kernels",
    # the OpenMP runtime
    "parallel", "barrier", "thread_number",
    # scratch
    "counters", "counts", "experts", "groups", "items", "token", "sorted_router", "operand", "hidden_operand",
    "thread_scratch",
)  # fmt: skip
INTEGERS = (
    # shape
    "tokens", "top_k", "num_experts", "hidden", "intermediate",
    # bytes of a token in the operands of gate/up and down
    "operand_bytes", "hidden_bytes",
    # the address of what makes int8 of the hidden operand; 0: it stays as it is
    "requantize",
    # strides in bytes
    "x_row", "out_row", "out_element", "ids_row", "ids_step", "router_row", "router_step",
    *(f"{part}_step" for part in WEIGHTS),
    # bytes of codes from a row to the next, for what is fetched ahead
    "gate_up_row", "down_row",
    # kinds: ids are 4 or 8 bytes; the router's are 0 = fp32, 1 = bf16, 2 = fp16
    "ids_bytes", "router_kind",
    # token blocks have 2^block_shift tokens; from `corner` tokens on, multiplying a row takes longer than fetching it
    "block_shift", "corner",
    # threads and their scratch
    "threads", "thread_scratch_bytes", "kernel_scratch_bytes", "row_unit",
    # set by the driver
    "active", "group_count", "item_count", "down_rows", "bad_position",
)  # fmt: skip

FIELDS = POINTERS + INTEGERS
PROFILE = ("clock", "stamps")
"""Behind the fields, for the profiled driver: the addresses of clock_gettime and of its notes (slots of zeros)."""
NUMA_ROLES = ("gate_up", "down")
NUMA_TABLES = ("position", "block_first", "items", "cells", "entries", "ranges")
NUMA_PLAN = (
    # of each role: see `numa.segments.Tables`; items are the first blocks of work items, and where they end
    *(f"{role}_{table}" for role in NUMA_ROLES for table in NUMA_TABLES),
    # parts of each row i32[phase][I]; the phase of each expert's matrices
    "gate_up_parts", "gate_phase", "up_phase", "down_phase",
    # the first group of each thread and where they end, the CPUs of each group as bit masks, 16 numbers in order
    "thread_groups", "group_cpus", "identity",
)  # fmt: skip
NUMA_INTEGERS = (
    "node_groups",
    # parts of a row at most, and matrices of the gate/up pass
    "most_parts", "projections",
    # blocks and work items of each role
    *(f"{role}_{count}" for role in NUMA_ROLES for count in ("blocks", "item_count")),
    # bytes of a mask of CPUs
    "cpus_bytes",
    # addresses of the C library's functions, without which threads stay where they are, and of kernels
    "get_affinity", "set_affinity", "activate", "pack", "combine",
)  # fmt: skip
NUMA_SCRATCH = ("order", "partials", "hidden_rows", "node_sums", "saved_cpus")
NUMA = NUMA_PLAN + NUMA_INTEGERS + NUMA_SCRATCH
"""Behind these, for the driver of several memory nodes."""
RECORD = struct.Struct(f"={len(FIELDS + PROFILE)}q")
"""Up to what is for several memory nodes."""
CALLER = struct.Struct("=4q")
"""The caller's tensors, at its beginning."""
SCRATCH = slice(POINTERS.index("counters"), POINTERS.index("thread_scratch") + 1)
"""The fields that are addresses in the scratch."""
OFFSETS = {name: 8 * index for index, name in enumerate(FIELDS + PROFILE + NUMA)}

PASSES = ("gather", "gate_up", "down")
SLOT = ("begin", "end", "items", "rows")
"""What the profiled driver notes for each thread and pass, 64 bits each: the monotonic clock in nanoseconds when the
thread came for its first item and when it found no more, the items it took, and the weight rows of these."""
SLOT_BYTES = 64  # a cache line, so that threads don't share one

OK, BAD_ID, MISSING_KERNELS = 0, 1, 2
"""What the driver returns."""

COUNTER_STRIDE = 64
COUNTERS = 4
EXPERT_BYTES = 128  # expert, tokens, first sorted position, unused; from MATRICES on the records
MATRICES = 32
GROUP_BYTES = 24  # first sorted position, tokens, index among the active experts
ITEM_BYTES = 24  # index among the active experts, first row, end row

BUCKETS = (1, 2, 4, 8)
"""Kernels for full token blocks are made for at least so many of them in a call."""


def table_slots(block_tokens: int) -> int:
    """Kernels in a table: for 1…block_tokens-1 tokens, then for full blocks, a bucket each.

    A table in memory has as many addresses (0: not compiled yet), and behind them as many marks: what a call lacked.
    """
    return block_tokens - 1 + len(BUCKETS)


def read(b: Builder, record: Value, *names: str) -> SimpleNamespace:
    """Load fields of the record."""
    return SimpleNamespace(**{name: field(record, name).load(_type(name)) for name in names})


def field(record: Value, name: str) -> Value:
    """The address of a field."""
    return record.at(OFFSETS[name])


def _type(name: str) -> L.Type:
    return ptr if name in (*POINTERS, *NUMA_PLAN, *NUMA_SCRATCH) else i64

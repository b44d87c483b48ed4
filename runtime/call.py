"""The record a native call reads: one 64-bit field a name, filled by Python, read by the driver's machine code."""

from __future__ import annotations

from types import SimpleNamespace

from expertile.codegen.ir import Builder, L, Value, i64, ptr

POINTERS = (
    # the caller's tensors
    "x", "out", "ids", "router",
    "gate", "up", "down", "gate_bias", "up_bias", "down_bias",
    # kernels
    "gather", "finish", "gate_up_kernels", "down_kernels",
    # the OpenMP runtime
    "parallel", "barrier", "thread_number",
    # scratch
    "counters", "counts", "experts", "groups", "token", "sorted_router", "operand", "hidden_operand", "thread_scratch",
)  # fmt: skip
INTEGERS = (
    # shape
    "tokens", "top_k", "num_experts", "hidden", "intermediate",
    # strides in bytes
    "x_row", "out_row", "out_element", "ids_row", "ids_step", "router_row", "router_step",
    "gate_up_expert", "down_expert", "gate_up_bias_expert", "down_bias_expert",
    # kinds: ids are 4 or 8 bytes; the router's are 0 = fp32, 1 = bf16, 2 = fp16
    "ids_bytes", "router_kind",
    # kernels there are: bit m-1 for m tokens
    "have_gate_up", "have_down",
    # threads and their scratch
    "threads", "thread_scratch_bytes", "kernel_scratch_bytes", "row_unit",
    # set by the driver
    "active", "group_count", "gate_up_rows", "down_rows", "missing_gate_up", "missing_down", "bad_position",
)  # fmt: skip

FIELDS = POINTERS + INTEGERS
OFFSETS = {name: 8 * index for index, name in enumerate(FIELDS)}

OK, BAD_ID, MISSING_KERNELS = 0, 1, 2
"""What the driver returns."""

COUNTER_STRIDE = 64
COUNTERS = 3
EXPERT_BYTES = 24  # expert, tokens, first sorted position
GROUP_BYTES = 16  # first sorted position, tokens


def read(b: Builder, record: Value, *names: str) -> SimpleNamespace:
    """Load fields of the record."""
    return SimpleNamespace(**{name: field(record, name).load(_type(name)) for name in names})


def field(record: Value, name: str) -> Value:
    """The address of a field."""
    return record.at(OFFSETS[name])


def _type(name: str) -> L.Type:
    return ptr if name in POINTERS else i64

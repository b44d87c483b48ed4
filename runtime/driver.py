"""One layer call, as machine code: check the ids → route → plan → gather → gate/up → down and combine.

`driver(record)` runs the serial part on the calling thread and then one parallel region of OpenMP (or, for tiny work
and in a forked child, its body directly).  Threads take work items from shared counters, so a slow core takes fewer.
What an item is decides nothing about the result:

    gather   a group of up to 16 tokens of one expert
    gate/up  a range of rows of one expert
    down     a range of output columns, for **all** active experts in ascending order: the sums of a token are private
             to the thread, added up in the order of expert number (then slot), and written once

Routing is a counting sort by expert (as in FreeToken's batch executor): every active expert appears once, with the
sorted positions of its tokens, and its weights are read once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from expertile.codegen.ir import (
    Builder,
    Module,
    Value,
    Var,
    f16,
    f32,
    i16,
    i32,
    i64,
    ptr,
    vec,
    void,
)
from expertile.codegen.layouts import GROUP
from expertile.runtime import call
from expertile.runtime.call import field, read
from expertile.templates.expert import MAX_TOKENS

_PARALLEL_FROM = 1 << 16
"""Weight elements a pass from which waking the other threads pays."""

_MOST_GATE_UP_ROWS = 256
_MOST_DOWN_ROWS = 256
_SUMS_BYTES = 512 * 1024
"""The sums of a down item should stay in L2."""
_BLOCK_ROWS = 64
"""Rows that stay in L2 while an expert's token blocks take turns on them."""


def sums_bytes(tokens: int, row_unit: int) -> int:
    """Per-thread bytes for the sums of a down item: `tokens` rows of as many columns as the plan allows."""
    fitting = _SUMS_BYTES // 4 // tokens // row_unit * row_unit
    return 4 * tokens * max(row_unit, min(_MOST_DOWN_ROWS, fitting))


def driver_ir() -> str:
    """The driver as LLVM IR; it serves every shape, format and ISA."""
    module = Module("driver")
    with module.function("body", {"record": ptr}, private=True) as (b, arg):
        _body(b, arg.record)
    with module.function("driver", {"record": ptr}, returns=i64) as (b, arg):
        _Serial(b, arg.record).emit()
    return str(module)


class _Serial:
    """What happens on the calling thread before the threads start."""

    def __init__(self, b: Builder, record: Value) -> None:
        self.b, self.record = b, record
        self.f = read(b, record, *call.FIELDS)

    def emit(self) -> None:
        b, f = self.b, self.f
        bad = b.var(i64, -1)
        self._count(bad)
        with b.if_(bad.get() >= 0):
            field(self.record, "bad_position").store(bad.get())
            b.ret(call.BAD_ID)
        needed = self._list_experts()
        with b.if_(self._missing(needed)):
            b.ret(call.MISSING_KERNELS)
        self._sort()
        work = self._divide()
        for counter in range(call.COUNTERS):
            f.counters.at(call.COUNTER_STRIDE * counter).store(b.const(i64, 0))
        self._run(work)
        b.ret(call.OK)

    def _id(self, token: Value, slot: Value) -> Value:
        b, f = self.b, self.f
        address = f.ids.at(token * f.ids_row + slot * f.ids_step)
        expert = b.var(i64, 0)
        with b.if_else(f.ids_bytes.eq(8)) as (wide, narrow):
            with wide:
                expert.set(address.load(i64))
            with narrow:
                expert.set(address.load(i32).to(i64))
        return expert.get()

    def _router(self, token: Value, slot: Value) -> Value:
        b, f = self.b, self.f
        address = f.router.at(token * f.router_row + slot * f.router_step)
        weight = b.var(f32, 0.0)
        with b.if_else(f.router_kind.eq(0)) as (single, half):
            with single:
                weight.set(address.load(f32))
            with half, b.if_else(f.router_kind.eq(1)) as (brain, ieee):
                with brain:
                    weight.set((address.load(i16).zext(i32) << 16).bitcast(f32))
                with ieee:
                    weight.set(address.load(f16).to(f32))
        return weight.get()

    def _count(self, bad: Var) -> None:
        """Tokens of each expert; the position of an id out of range goes to `bad`."""
        b, f = self.b, self.f
        with b.loop(0, f.num_experts) as expert:
            f.counts.at(expert * 8).store(b.const(i64, 0))
        with b.loop(0, f.tokens) as token, b.loop(0, f.top_k) as slot:
            expert = self._id(token, slot)
            in_range = (expert < f.num_experts) & (expert >= -1)
            with b.if_else(in_range) as (good, wrong):
                with good, b.if_(expert >= 0):
                    count = f.counts.at(expert * 8)
                    count.store(count.load(i64) + 1)
                with wrong, b.if_(bad.get() < 0):
                    bad.set(token * f.top_k + slot)

    def _list_experts(self) -> Value:
        """The active experts with their places in sorted order, the groups of their tokens, the kernels they need."""
        b, f = self.b, self.f
        active, groups, position, needed = (b.var(i64, 0) for _ in range(4))
        with b.loop(0, f.num_experts) as expert:
            slot = f.counts.at(expert * 8)
            tokens = slot.load(i64)
            with b.if_(tokens > 0):
                entry = f.experts.at(active.get() * call.EXPERT_BYTES)
                for offset, value in enumerate((expert, tokens, position.get())):
                    entry.at(8 * offset).store(value)
                active.add(1)
                with b.loop(0, tokens, GROUP) as first:
                    group = f.groups.at(groups.get() * call.GROUP_BYTES)
                    group.store(position.get() + first)
                    group.at(8).store(b.min(tokens - first, GROUP))
                    groups.add(1)
                full, rest = tokens >> 5, tokens & (MAX_TOKENS - 1)
                one = b.const(i64, 1)
                needed.set(needed.get() | b.select(full > 0, one << (MAX_TOKENS - 1), 0))
                needed.set(needed.get() | b.select(rest > 0, one << b.max(rest - 1, 0), 0))
                slot.store(position.get())
                position.add(tokens)
        field(self.record, "active").store(active.get())
        field(self.record, "group_count").store(groups.get())
        return needed.get()

    def _missing(self, needed: Value) -> Value:
        """Whether a needed kernel is not there yet; the record says which."""
        f = self.f
        lacking = [needed & (have ^ -1) for have in (f.have_gate_up, f.have_down)]
        for name, bits in zip(("missing_gate_up", "missing_down"), lacking, strict=True):
            field(self.record, name).store(bits)
        return (lacking[0] | lacking[1]).ne(0)

    def _sort(self) -> None:
        """Place every token, with its router weight, among the tokens of its expert: in order of token, then slot."""
        b, f = self.b, self.f
        with b.loop(0, f.tokens) as token, b.loop(0, f.top_k) as slot:
            expert = self._id(token, slot)
            with b.if_(expert >= 0):
                cursor = f.counts.at(expert * 8)
                position = cursor.load(i64)
                cursor.store(position + 1)
                f.token.at(position * 4).store(token.to(i32))
                f.sorted_router.at(position * 4).store(self._router(token, slot))

    def _divide(self) -> Value:
        """Rows of a gate/up item and columns of a down item; the weight elements of a pass."""
        b, f = self.b, self.f
        active = field(self.record, "active").load(i64)
        share = f.threads * 8
        rows = _round_up(b, f.intermediate * active // share, f.row_unit)
        rows = b.min(rows, _MOST_GATE_UP_ROWS)
        field(self.record, "gate_up_rows").store(rows)
        columns = _round_up(b, f.hidden // (f.threads * 4), f.row_unit)
        fitting = b.const(i64, _SUMS_BYTES // 4) // f.tokens // f.row_unit * f.row_unit
        fitting = b.max(fitting, f.row_unit)
        columns = b.min(b.min(columns, fitting), _MOST_DOWN_ROWS)
        field(self.record, "down_rows").store(columns)
        return active * f.hidden * f.intermediate

    def _run(self, work: Value) -> None:
        b, f = self.b, self.f
        body = b.address_of("body")
        with b.if_else((f.threads > 1) & (work >= _PARALLEL_FROM)) as (team, alone):
            with team:
                arguments = [body, self.record, f.threads.to(i32), b.const(i32, 0)]
                b.call_address(f.parallel, void, arguments)
            with alone:
                field(self.record, "threads").store(b.const(i64, 1))
                b.call("body", void, [self.record])


def _round_up(b: Builder, value: Value, unit: Value) -> Value:
    return b.max((value + (unit - 1)) // unit * unit, unit)


def _body(b: Builder, record: Value) -> None:
    """What every thread of the team does."""
    f = read(b, record, *call.FIELDS)
    thread = b.var(i64, 0)
    with b.if_(f.threads > 1):
        thread.set(b.call_address(f.thread_number, i32, []).to(i64))
    f.scratch = f.thread_scratch.at(thread.get() * f.thread_scratch_bytes)
    f.operand_bytes = ((f.hidden + 31) >> 5) * 64  # of one token
    f.hidden_bytes = ((f.intermediate + 31) >> 5) * 64
    _gather(b, f)
    _barrier(b, f)
    _gate_up(b, f)
    _barrier(b, f)
    _down(b, f)


def _barrier(b: Builder, f: SimpleNamespace) -> None:
    with b.if_(f.threads > 1):
        b.call_address(f.barrier, void, [])


@contextmanager
def _items(b: Builder, f: SimpleNamespace, counter: int, count: Value) -> Iterator[Value]:
    """A loop over the work items this thread gets hold of."""
    shared = f.counters.at(call.COUNTER_STRIDE * counter)
    with b.while_true() as loop:
        item = b.atomic_add(shared, 1)
        loop.leave_if(item >= count)
        yield item


def _gather(b: Builder, f: SimpleNamespace) -> None:
    with _items(b, f, 0, f.group_count) as item:
        group = f.groups.at(item * call.GROUP_BYTES)
        first, tokens = group.load(i64), group.at(8).load(i64)
        into = f.operand.at(first * f.operand_bytes)
        b.call_address(f.gather, void, [f.x, f.token.at(first * 4), tokens, f.x_row, into])


def _expert(f: SimpleNamespace, index: Value) -> SimpleNamespace:
    entry = f.experts.at(index * call.EXPERT_BYTES)
    number, tokens, first = (entry.at(8 * i).load(i64) for i in range(3))
    return SimpleNamespace(number=number, tokens=tokens, first=first)


def _blocks(
    b: Builder,
    expert: SimpleNamespace,
    kernels: Value,
    first_row: Value,
    end_row: Value,
    launch: Callable[[Value, Value, Value, Value, Value], None],
) -> None:
    """Launch the kernels for an expert's tokens: full blocks, then the rest, on the same rows while they are in L2.

    `launch(kernel address, first row, end row, blocks, tokens before)` emits one call.
    """
    full, rest = expert.tokens >> 5, expert.tokens & (MAX_TOKENS - 1)
    both = (full > 0) & (rest > 0)
    step = b.select(both, _BLOCK_ROWS, end_row - first_row)
    with b.loop(first_row, end_row, step) as row:
        end = b.min(row + step, end_row)
        with b.if_(full > 0):
            kernel = kernels.at(8 * (MAX_TOKENS - 1)).load(i64)
            launch(kernel, row, end, full, b.const(i64, 0))
        with b.if_(rest > 0):
            kernel = kernels.at((rest - 1) * 8).load(i64)
            launch(kernel, row, end, b.const(i64, 1), full * MAX_TOKENS)


def _gate_up(b: Builder, f: SimpleNamespace) -> None:
    parts = (f.intermediate + f.gate_up_rows - 1) // f.gate_up_rows
    with _items(b, f, 1, f.active * parts) as item:
        index = item // parts
        first_row = (item - index * parts) * f.gate_up_rows
        expert = _expert(f, index)
        matrix, bias = expert.number * f.gate_up_expert, expert.number * f.gate_up_bias_expert
        pointers = [f.gate.at(matrix), f.up.at(matrix), f.gate_bias.at(bias), f.up_bias.at(bias)]

        def launch(kernel: Value, row: Value, end: Value, blocks: Value, before: Value) -> None:
            position = expert.first + before
            operand = f.operand.at(position * f.operand_bytes)
            out = f.hidden_operand.at(position * f.hidden_bytes)
            b.call_address(kernel, void, [*pointers, operand, out, row, end, blocks, f.scratch])

        end_row = b.min(first_row + f.gate_up_rows, f.intermediate)
        _blocks(b, expert, f.gate_up_kernels, first_row, end_row, launch)


def _down(b: Builder, f: SimpleNamespace) -> None:
    parts = (f.hidden + f.down_rows - 1) // f.down_rows
    sums = f.scratch.at(f.kernel_scratch_bytes)
    with _items(b, f, 2, parts) as item:
        first_row = item * f.down_rows
        end_row = b.min(first_row + f.down_rows, f.hidden)
        row_bytes = f.down_rows * 4
        with b.loop(0, f.tokens * row_bytes, 64) as offset:
            sums.at(offset).store(b.zero(vec(f32, GROUP)))
        origin = sums.at((0 - first_row) * 4)
        with b.loop(0, f.active) as index:
            expert = _expert(f, index)
            matrix = f.down.at(expert.number * f.down_expert)
            bias = f.down_bias.at(expert.number * f.down_bias_expert)

            def launch(
                kernel: Value, row: Value, end: Value, blocks: Value, before: Value,
                expert: SimpleNamespace = expert, matrix: Value = matrix, bias: Value = bias,
            ) -> None:  # fmt: skip
                position = expert.first + before
                operand = f.hidden_operand.at(position * f.hidden_bytes)
                lists = [f.token.at(position * 4), f.sorted_router.at(position * 4)]
                arguments = [matrix, bias, operand, *lists, origin, row_bytes, row, end, blocks]
                b.call_address(kernel, void, [*arguments, f.scratch])

            _blocks(b, expert, f.down_kernels, first_row, end_row, launch)
        columns = end_row - first_row
        out = f.out.at(first_row * f.out_element)
        b.call_address(f.finish, void, [sums, row_bytes, out, f.out_row, f.tokens, columns])

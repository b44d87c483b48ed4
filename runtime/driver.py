"""One layer call, as machine code: check the ids → route → plan → gather → gate/up → down and combine.

`driver(record)` runs the serial part on the calling thread and then one parallel region of OpenMP (or, for tiny work
and in a forked child, its body directly).  Threads take work items from shared counters, so a slow core takes fewer.
What an item is decides nothing about the result:

    gather   a group of up to 16 tokens of one expert
    gate/up  a range of rows of one expert, the busiest experts first
    int8     likewise a group, where activations are int8: gate/up left it in bf16
    down     a range of output columns, for **all** active experts in ascending order: the sums of a token are private
             to the thread, added up in the order of expert number (then slot), and written once; threads begin far
             apart and go on to neighbours

A thread takes an item while it still has one to do.  So a kernel knows which weights come next, in the next item or the
next pass, and asks for them before it ends.

Routing is a counting sort by expert (as in FreeToken's batch executor): every active expert appears once, with the
sorted positions of its tokens, and its weights are read once in each pass.
"""

from __future__ import annotations

import time
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
from expertile.templates.kernel import LAUNCH_BLOCKS, MATRIX, MATRIX_BYTES

_PARALLEL_FROM = 1 << 16
"""Weight elements a pass from which waking the other threads pays."""

_ITEMS = 16
"""Items of a pass for each thread, about: many, so that all threads end together; not more, as each has a start."""
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


def most_items(threads: int, active: int, intermediate: int) -> int:
    """Gate/up items of a call, at most."""
    return _ITEMS * threads + active * (2 + -(-intermediate // _MOST_GATE_UP_ROWS))


def driver_ir(profiled: bool = False) -> str:
    """The driver as LLVM IR; it serves every shape, format and ISA. A profiled one notes what each thread does when."""
    module = Module("driver")
    with module.function("body", {"record": ptr}, private=True) as (b, arg):
        _body(b, arg.record, profiled)
    with module.function("driver", {"record": ptr}, returns=i64) as (b, arg):
        Serial(b, arg.record).emit()
    return str(module)


class Serial:
    """What happens on the calling thread before the threads start."""

    def __init__(self, b: Builder, record: Value) -> None:
        self.b, self.record = b, record
        self.f = read(b, record, *call.FIELDS)
        self.f.block = b.const(i64, 1) << self.f.block_shift

    def emit(self) -> None:
        b, f = self.b, self.f
        bad = b.var(i64, -1)
        self._count(bad)
        with b.if_(bad.get() >= 0):
            field(self.record, "bad_position").store(bad.get())
            b.ret(call.BAD_ID)
        lacking = self._list_experts()
        with b.if_(lacking > 0):
            b.ret(call.MISSING_KERNELS)
        self._sort()
        work = self.divide()
        with b.loop(0, self.counters()) as counter:
            f.counters.at(counter * call.COUNTER_STRIDE).store(b.const(i64, 0))
        self._run(work)
        b.ret(call.OK)

    def counters(self) -> Value | int:
        """How many counters the passes have."""
        return call.COUNTERS

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
        """The active experts with their places in sorted order, and the groups of their tokens.

        Returns how many of the kernels they need are not there yet; those are marked in the tables.
        """
        b, f = self.b, self.f
        active, groups, position, lacking = (b.var(i64, 0) for _ in range(4))
        with b.loop(0, f.num_experts) as expert:
            slot = f.counts.at(expert * 8)
            tokens = slot.load(i64)
            with b.if_(tokens > 0):
                entry = f.experts.at(active.get() * call.EXPERT_BYTES)
                for offset, value in enumerate((expert, tokens, position.get())):
                    entry.at(8 * offset).store(value)
                self._list_matrices(entry.at(call.MATRICES), expert)
                active.add(1)
                with b.loop(0, tokens, GROUP) as first:
                    group = f.groups.at(groups.get() * call.GROUP_BYTES)
                    group.store(position.get() + first)
                    group.at(8).store(b.min(tokens - first, GROUP))
                    group.at(16).store(active.get() - 1)
                    groups.add(1)
                full, rest = split_blocks(b, f, tokens)
                with b.loop(0, full, LAUNCH_BLOCKS) as done:
                    self._need(full_slot(b, f, b.min(full - done, LAUNCH_BLOCKS)), lacking)
                with b.if_(rest > 0):
                    self._need(rest - 1, lacking)
                slot.store(position.get())
                position.add(tokens)
        field(self.record, "active").store(active.get())
        field(self.record, "group_count").store(groups.get())
        return lacking.get()

    def _list_matrices(self, records: Value, expert: Value) -> None:
        """Where the parts of an expert's matrices are."""
        b, f = self.b, self.f
        for number, part in enumerate(call.WEIGHTS):
            base, step, into = getattr(f, part), getattr(f, f"{part}_step"), records.at(8 * number)
            with b.if_else(step.eq(call.TABLE)) as (table, spaced):
                with table:
                    into.store(base.at(expert * 8).load(ptr))
                with spaced:
                    into.store(base.at(expert * step))

    def _need(self, slot: Value, lacking: Var) -> None:
        """Mark both kernels of a slot that are not there."""
        b, f = self.b, self.f
        marks = f.block + (len(call.BUCKETS) - 1)
        for table in (f.gate_up_kernels, f.down_kernels):
            with b.if_(table.at(slot * 8).load(i64).eq(0)):
                table.at((marks + slot) * 8).store(b.const(i64, 1))
                lacking.add(1)

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

    def divide(self) -> Value:
        """The gate/up items and the columns of a down item; returns the weight elements of a pass."""
        b, f = self.b, self.f
        active = field(self.record, "active").load(i64)
        self._list_items(active)
        share = f.threads * _ITEMS
        # The operand of all experts is read again for every item: the rows should be worth it.
        tokens = f.tokens * f.top_k // b.max(active, 1)
        columns = _round_up(b, b.max(f.hidden // share, tokens * 8), f.row_unit)
        fitting = b.const(i64, _SUMS_BYTES // 4) // f.tokens // f.row_unit * f.row_unit
        fitting = b.max(fitting, f.row_unit)
        columns = b.min(b.min(columns, fitting), _MOST_DOWN_ROWS)
        field(self.record, "down_rows").store(columns)
        return active * f.hidden * f.intermediate

    def _list_items(self, active: Value) -> None:
        """The gate/up items: about equal in time, the experts with the most tokens first."""
        b, f = self.b, self.f
        work, most, items = (b.var(i64, 0) for _ in range(3))
        with b.loop(0, active) as index:
            tokens = expert_at(f, index).tokens
            work.add(f.intermediate * (tokens + f.corner))
            most.set(b.max(most.get(), tokens))
        share = work.get() // (f.threads * _ITEMS)
        with b.loop(0, 32) as step:
            size = 31 - step  # experts with 2^size tokens or more, up to twice as many
            with b.if_(most.get() >> size > 0), b.loop(0, active) as index:
                tokens = expert_at(f, index).tokens
                with b.if_((tokens >> size).eq(1)):
                    rows = _round_up(b, share // (tokens + f.corner), f.row_unit)
                    rows = b.min(rows, _MOST_GATE_UP_ROWS)
                    with b.loop(0, f.intermediate, rows) as first:
                        item = f.items.at(items.get() * call.ITEM_BYTES)
                        end = b.min(first + rows, f.intermediate)
                        for offset, value in enumerate((index, first, end)):
                            item.at(8 * offset).store(value)
                        items.add(1)
        field(self.record, "item_count").store(items.get())

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


class Hooks:
    """Where the profiled driver takes notes of a thread's passes; in the plain driver they emit nothing."""

    def time(self, number: int, name: str) -> None:
        """Note the time under a name."""

    def item(self, number: int) -> None:
        """Count an item."""

    def rows(self, number: int, first: Value, end: Value, experts: Value | int) -> None:
        """Count the weight rows of an item: those from `first` to `end` of a number of experts."""


class _Notes(Hooks):
    """A thread's notes, in slots of its own: see call.SLOT."""

    def __init__(self, b: Builder, record: Value, thread: Value) -> None:
        self._b, self._moment = b, b.buffer(16)  # struct timespec
        self._clock, stamps = (field(record, name).load(ptr) for name in call.PROFILE)
        self._slots = stamps.at(thread * (len(call.PASSES) * call.SLOT_BYTES))

    def time(self, number: int, name: str) -> None:
        b, moment = self._b, self._moment
        # The C library's clock, not a cycle counter: it is in seconds, on every CPU, and Python has the same one.
        b.call_address(self._clock, i32, [b.const(i32, time.CLOCK_MONOTONIC), moment])
        nanoseconds = moment.load(i64) * 1_000_000_000 + moment.at(8).load(i64)
        self._note(number, name).store(nanoseconds)

    def item(self, number: int) -> None:
        self._add(number, "items", 1)

    def rows(self, number: int, first: Value, end: Value, experts: Value | int) -> None:
        self._add(number, "rows", (end - first) * experts)

    def _add(self, number: int, name: str, amount: Value | int) -> None:
        note = self._note(number, name)
        note.store(note.load(i64) + amount)

    def _note(self, number: int, name: str) -> Value:
        return self._slots.at(number * call.SLOT_BYTES + 8 * call.SLOT.index(name))


def split_blocks(b: Builder, f: SimpleNamespace, tokens: Value) -> tuple[Value, Value]:
    """Full token blocks, and the tokens left."""
    return tokens >> f.block_shift, tokens & (f.block - 1)


def full_slot(b: Builder, f: SimpleNamespace, blocks: Value) -> Value:
    """The place in a kernel table for a call of so many full blocks."""
    slot = f.block - 1
    for least in call.BUCKETS[1:]:
        slot = b.select(blocks >= least, slot + 1, slot)
    return slot


def _body(b: Builder, record: Value, profiled: bool) -> None:
    """What every thread of the team does."""
    f = read(b, record, *call.FIELDS)
    f.block = b.const(i64, 1) << f.block_shift
    thread = b.var(i64, 0)
    with b.if_(f.threads > 1):
        thread.set(b.call_address(f.thread_number, i32, []).to(i64))
    f.hooks = _Notes(b, record, thread.get()) if profiled else Hooks()
    f.scratch = f.thread_scratch.at(thread.get() * f.thread_scratch_bytes)
    gather(b, f)
    barrier(b, f)
    # So early that the end of gate/up can ask for its weights.
    f.first_down = take(b, f, 2)
    _gate_up(b, f)
    barrier(b, f)
    with b.if_(f.requantize.ne(0)):
        _requantize(b, f)
        barrier(b, f)
    _down(b, f)


def barrier(b: Builder, f: SimpleNamespace) -> None:
    with b.if_(f.threads > 1):
        b.call_address(f.barrier, void, [])


def take(b: Builder, f: SimpleNamespace, counter: int | Value) -> Value:
    """Get hold of an item."""
    return b.atomic_add(f.counters.at(counter * call.COUNTER_STRIDE), 1)


@contextmanager
def each_item(
    b: Builder, f: SimpleNamespace, counter: int | Value, count: Value, first: Value | None = None
) -> Iterator[tuple[Value, Value]]:
    """A loop over the work items this thread gets hold of, each with the next one (`count` or more: there is none)."""
    f.hooks.time(counter, "begin")
    item = b.var(i64, take(b, f, counter) if first is None else first)
    with b.while_true() as loop:
        loop.leave_if(item.get() >= count)
        following = take(b, f, counter)
        f.hooks.item(counter)
        yield item.get(), following
        item.set(following)
    f.hooks.time(counter, "end")


def gather(b: Builder, f: SimpleNamespace) -> None:
    with each_item(b, f, 0, f.group_count) as (item, _):
        first, tokens = group_at(f, item)
        into = f.operand.at(first * f.operand_bytes)
        b.call_address(f.gather, void, [f.x, f.token.at(first * 4), tokens, f.x_row, into])


def _requantize(b: Builder, f: SimpleNamespace) -> None:
    """No pass of its own in a profile: threads wait for it at the end of gate/up."""
    quiet = SimpleNamespace(**vars(f) | {"hooks": Hooks()})
    with each_item(b, quiet, 3, f.group_count) as (item, _):
        first, tokens = group_at(f, item)
        group = f.hidden_operand.at(first * f.hidden_bytes)
        b.call_address(f.requantize, void, [group, tokens])


def group_at(f: SimpleNamespace, number: Value) -> tuple[Value, Value]:
    """The first sorted position of a group, and its tokens."""
    group = f.groups.at(number * call.GROUP_BYTES)
    return group.load(i64), group.at(8).load(i64)


def expert_at(f: SimpleNamespace, index: Value) -> SimpleNamespace:
    entry = f.experts.at(index * call.EXPERT_BYTES)
    number, tokens, first = (entry.at(8 * i).load(i64) for i in range(3))
    records = [entry.at(call.MATRICES + MATRIX_BYTES * i) for i in range(len(call.ROLES))]
    return SimpleNamespace(
        number=number, tokens=tokens, first=first, **dict(zip(call.ROLES, records, strict=True))
    )


def _blocks(
    b: Builder,
    f: SimpleNamespace,
    expert: SimpleNamespace,
    kernels: Value,
    first_row: Value,
    end_row: Value,
    launch: Callable[[Value, Value, Value, Value, Value], None],
) -> None:
    """Launch the kernels for an expert's tokens: full blocks, then the rest, on the same rows while they are in L2.

    `launch(kernel address, first row, end row, blocks, tokens before)` emits one call.
    """
    full, rest = split_blocks(b, f, expert.tokens)
    several = (full > LAUNCH_BLOCKS) | ((full > 0) & (rest > 0))
    step = b.select(several, b.max(f.row_unit, _BLOCK_ROWS), end_row - first_row)
    with b.loop(first_row, end_row, step) as row:
        end = b.min(row + step, end_row)
        with b.loop(0, full, LAUNCH_BLOCKS) as done:
            blocks = b.min(full - done, LAUNCH_BLOCKS)
            kernel = kernels.at(full_slot(b, f, blocks) * 8).load(i64)
            launch(kernel, row, end, blocks, done << f.block_shift)
        with b.if_(rest > 0):
            kernel = kernels.at((rest - 1) * 8).load(i64)
            launch(kernel, row, end, b.const(i64, 1), full << f.block_shift)


def _next_rows(
    b: Builder, end: Value, last: Value, present: list[Value], following: list[Value], first: Value
) -> list[Value]:
    """What comes after a launch that ended at row `end`: more rows of the same matrices, or others from row `first`."""
    inside = end < last
    pointers = [b.select(inside, x, y) for x, y in zip(present, following, strict=True)]
    return [*pointers, b.select(inside, end, first)]


def _gate_up(b: Builder, f: SimpleNamespace) -> None:
    first_down = _first_down(b, f)
    with each_item(b, f, 1, f.item_count) as (number, following):
        expert, first_row, end_row = _item(f, number)
        matrices = [expert.gate, expert.up]
        coming, coming_row = _after_gate_up(b, f, following, first_down)

        def launch(kernel: Value, row: Value, end: Value, blocks: Value, before: Value) -> None:
            position = expert.first + before
            operand = f.operand.at(position * f.operand_bytes)
            out = f.hidden_operand.at(position * f.hidden_bytes)
            *next_, next_row = _next_rows(b, end, end_row, matrices, coming, coming_row)
            arguments = [*matrices, operand, out, *next_, next_row, row, end, blocks, f.scratch]
            b.call_address(kernel, void, arguments)

        f.hooks.rows(1, first_row, end_row, experts=1)
        _blocks(b, f, expert, f.gate_up_kernels, first_row, end_row, launch)


def _item(f: SimpleNamespace, number: Value) -> tuple[SimpleNamespace, Value, Value]:
    item = f.items.at(number * call.ITEM_BYTES)
    index, first, end = (item.at(8 * i).load(i64) for i in range(3))
    return expert_at(f, index), first, end


def _parts(f: SimpleNamespace) -> Value:
    """Down items of a call."""
    return (f.hidden + f.down_rows - 1) // f.down_rows


def _first_column(b: Builder, f: SimpleNamespace, item: Value) -> Value:
    """Of a down item.

    Items that are taken at the same time are far apart, those that a thread takes one after the other are neighbours:
    a core asks for some KB beyond the rows that it reads, and so much of the next rows should not be another core's.
    """
    parts, lane, turn = _parts(f), item % f.threads, item // f.threads
    first = lane * (parts // f.threads) + b.min(lane, parts % f.threads)
    return (first + turn) * f.down_rows


def _first_down(b: Builder, f: SimpleNamespace) -> list[Value]:
    """The first rows of the thread's first down item, as the records of a gate and an up matrix to be fetched."""
    matrix = expert_at(f, b.const(i64, 0)).down.at(MATRIX["codes"]).load(ptr)
    first = matrix.at(_first_column(b, f, f.first_down) * f.down_row)
    records = [b.buffer(MATRIX_BYTES) for _ in range(2)]
    # Two parts of what a row block of gate and up is long.
    for number, record in enumerate(records):
        record.at(MATRIX["codes"]).store(first.at(f.gate_up_row * (GROUP * number)))
    return records


def _after_gate_up(
    b: Builder, f: SimpleNamespace, number: Value, first_down: list[Value]
) -> tuple[list[Value], Value]:
    """The matrices and the row of gate/up item `number`; after the last one comes the thread's first down item."""
    another = number < f.item_count
    expert, first, _ = _item(f, b.min(number, f.item_count - 1))
    item = [expert.gate, expert.up]
    pointers = [b.select(another, x, y) for x, y in zip(item, first_down, strict=True)]
    return pointers, b.select(another, first, 0)


def _down(b: Builder, f: SimpleNamespace) -> None:
    parts = _parts(f)
    sums = f.scratch.at(f.kernel_scratch_bytes)
    with each_item(b, f, 2, parts, f.first_down) as (item, following):
        first_row = _first_column(b, f, item)
        end_row = b.min(first_row + f.down_rows, f.hidden)
        coming_row = b.select(following < parts, _first_column(b, f, following), first_row)
        f.hooks.rows(2, first_row, end_row, experts=f.active)
        row_bytes = f.down_rows * 4
        with b.loop(0, f.tokens * row_bytes, 64) as offset:
            sums.at(offset).store(b.zero(vec(f32, GROUP)))
        origin = sums.at((0 - first_row) * 4)
        with b.loop(0, f.active) as index:
            expert = expert_at(f, index)
            more = index + 1 < f.active
            coming = expert_at(f, b.select(more, index + 1, 0)).down
            next_first = b.select(more, first_row, coming_row)

            def launch(
                kernel: Value, row: Value, end: Value, blocks: Value, before: Value,
                expert: SimpleNamespace = expert, coming: Value = coming, next_first: Value = next_first,
            ) -> None:  # fmt: skip
                position = expert.first + before
                operand = f.hidden_operand.at(position * f.hidden_bytes)
                lists = [f.token.at(position * 4), f.sorted_router.at(position * 4)]
                next_, next_row = _next_rows(b, end, end_row, [expert.down], [coming], next_first)
                places = [expert.down, operand, *lists, origin, next_]
                numbers = [row_bytes, next_row, row, end, blocks]
                b.call_address(kernel, void, [*places, *numbers, f.scratch])

            _blocks(b, f, expert, f.down_kernels, first_row, end_row, launch)
        columns = end_row - first_row
        out = f.out.at(first_row * f.out_element)
        b.call_address(f.finish, void, [sums, row_bytes, out, f.out_row, f.tokens, columns])

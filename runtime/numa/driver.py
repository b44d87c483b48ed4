"""One layer call on several memory nodes, as machine code: what `runtime.driver` does, with segments in two passes.

    gather    as on one node
    gate/up   items of the thread's own group: blocks of positions of gate or of up, of one expert → partial sums
    activate  a group of tokens of one expert: the partial sums become the operand of down
    down      items of the thread's own group: blocks of positions, for all active experts in ascending order → the
              group's sums
    combine   tokens: the groups' sums become the output

A thread belongs to the group that owns the memory it reads, and runs on that group's CPUs for the time of the call.
What is added up in which order depends on where the pages lie, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from expertile.codegen.ir import Builder, Module, Value, f32, i32, i64, ptr, vec, void
from expertile.codegen.layouts import GROUP
from expertile.runtime import call
from expertile.runtime.call import field, read
from expertile.runtime.driver import (
    Hooks,
    Serial,
    barrier,
    each_item,
    expert_at,
    full_slot,
    gather,
    group_at,
    split_blocks,
)
from expertile.templates.kernel import LAUNCH_BLOCKS
from expertile.templates.segments import ENTRY_BYTES, Entry

_SHARED_COUNTERS = 3
"""Those of gather, activate and combine; then come those of gate/up, one a group, and those of down."""
_COMBINE_ITEMS = 8
"""Items of the last pass a thread."""


def driver_ir() -> str:
    """The driver as LLVM IR; it serves every shape, format, ISA and page map."""
    module = Module("driver")
    with module.function("body", {"record": ptr}, private=True) as (b, arg):
        _body(b, _fields(b, arg.record))
    with module.function("driver", {"record": ptr}, returns=i64) as (b, arg):
        _Serial(b, arg.record).emit()
    return str(module)


def counters(groups: int) -> int:
    """Counters of a call."""
    return _SHARED_COUNTERS + 2 * groups


def _fields(b: Builder, record: Value) -> SimpleNamespace:
    f = read(b, record, *call.FIELDS, *call.NUMA)
    f.block = b.const(i64, 1) << f.block_shift
    f.hooks = Hooks()
    f.partial_row = f.projections * f.intermediate * 4  # bytes of a token's partial sums
    f.part_bytes = f.tokens * f.top_k * f.partial_row
    f.sums_bytes = f.tokens * f.hidden * 4
    return f


class _Serial(Serial):
    """What happens on the calling thread before the threads start."""

    def counters(self) -> Value:
        groups = read(self.b, self.record, "node_groups").node_groups
        return groups * 2 + _SHARED_COUNTERS

    def divide(self) -> Value:
        """The order in which gate/up takes the experts: those with the most tokens first. Returns a pass's elements."""
        b, f = self.b, self.f
        order = read(b, self.record, "order").order
        active = field(self.record, "active").load(i64)
        placed = b.var(i64, 0)
        with b.loop(0, 32) as step:
            size = 31 - step  # experts with 2^size tokens or more, up to twice as many
            with b.loop(0, active) as index, b.if_((expert_at(f, index).tokens >> size).eq(1)):
                order.at(placed.get() * 8).store(index)
                placed.add(1)
        return active * f.hidden * f.intermediate


@dataclass(frozen=True)
class _Role:
    """The tables of a role: see `numa.segments.Tables`."""

    b: Builder
    f: SimpleNamespace
    name: str
    group: Value

    def __getattr__(self, name: str) -> Value:
        value = getattr(self.f, f"{self.name}_{name}")
        assert isinstance(value, Value)
        return value

    def blocks_of(self, item: Value) -> tuple[Value, Value]:
        """The first block of an item, and where they end."""
        place = self.items.at(item * 8)
        return place.load(i64), place.at(8).load(i64)

    def first_position(self, block: Value) -> Value:
        """Of a block; of the one behind the last, where positions end."""
        return self.block_first.at(block * 8).load(i64)

    def first_entry(self, phase: Value, block: Value) -> Value:
        """The address of the group's first entry in a block of a matrix, or of one that comes after it."""
        return self.entries.at(self._cell(phase, block).load(i64) * ENTRY_BYTES)

    def each_entry(
        self,
        phase: Value,
        blocks: tuple[Value, Value],
        matrix: Value,
        following: tuple[Value, Value],
        use: Callable[[Entry, list[Value]], None],
    ) -> None:
        """Call `use` for all that the group has to do of some blocks of a matrix, given by its record.

        It gets the entry, and what kernels want to know of it: its address, then the matrix and the entry that come
        next (`following` after the last one), and the ranges.
        """
        b = self.b
        first, end = blocks
        # The entries of neighbouring blocks are neighbours.
        begin = self._cell(phase, first).load(i64)
        last = self._cell(phase, end - 1).at(8).load(i64)
        with b.loop(begin, last) as number:
            here = self.entries.at(number * ENTRY_BYTES)
            inside = number + 1 < last
            coming = (
                b.select(inside, mine, other)
                for mine, other in zip((matrix, here.at(ENTRY_BYTES)), following, strict=True)
            )
            use(Entry(here), [here, *coming, self.ranges])

    def _cell(self, phase: Value, block: Value) -> Value:
        row = (phase * self.f.node_groups + self.group) * self.blocks
        return self.cells.at((row + block) * 16)


def _body(b: Builder, f: SimpleNamespace) -> None:
    """What every thread of the team does."""
    thread, first, end = b.var(i64, 0), b.var(i64, 0), b.var(i64, f.node_groups)
    with b.if_(f.threads > 1):
        thread.set(b.call_address(f.thread_number, i32, []).to(i64))
        served = f.thread_groups.at(thread.get() * 16)
        first.set(served.load(i64))
        end.set(served.at(8).load(i64))
    f.scratch = f.thread_scratch.at(thread.get() * f.thread_scratch_bytes)
    saved = f.saved_cpus.at(thread.get() * f.cpus_bytes)
    unknown = b.var(i32, -1)  # whether it is, where the thread was
    with b.if_(f.set_affinity.ne(0) & (f.threads > 1)):
        unknown.set(_affinity(b, f, f.get_affinity, saved))
    moves = unknown.get().eq(0)
    with b.if_(moves):
        _affinity(b, f, f.set_affinity, f.group_cpus.at(first.get() * f.cpus_bytes))
    gather(b, f)
    barrier(b, f)
    with b.loop(first.get(), end.get()) as group:
        _gate_up(b, f, _Role(b, f, "gate_up", group))
    barrier(b, f)
    _activate(b, f)
    barrier(b, f)
    with b.loop(first.get(), end.get()) as group:
        _down(b, f, _Role(b, f, "down", group))
    barrier(b, f)
    _combine(b, f)
    with b.if_(moves):
        _affinity(b, f, f.set_affinity, saved)


def _affinity(b: Builder, f: SimpleNamespace, function: Value, mask: Value) -> Value:
    """Of the calling thread; 0, or else it was refused, which costs locality only."""
    return b.call_address(function, i32, [b.const(i32, 0), f.cpus_bytes, mask])


def _gate_up(b: Builder, f: SimpleNamespace, role: _Role) -> None:
    each = f.projections * role.item_count  # items of an expert
    items = f.active * each
    with each_item(b, f, role.group + _SHARED_COUNTERS, items) as (number, following):
        here = _gate_up_item(b, f, role, number, each)
        # After the last item there is nothing to ask for: it comes again.
        next_ = _gate_up_item(b, f, role, b.min(following, items - 1), each)
        expert = here.expert
        out = f.partials.at(expert.first * f.partial_row).at(here.matrix * f.intermediate * 4)

        def multiply(entry: Entry, lists: list[Value]) -> None:
            place = out.at(entry.rank * f.part_bytes).at(entry.position * 4)

            def launch(kernel: Value, blocks: Value, before: Value) -> None:
                operand = f.operand.at((expert.first + before) * f.operand_bytes)
                into = place.at(before * f.partial_row)
                pointers = [here.record, operand, *lists, into]
                b.call_address(kernel, void, [*pointers, f.partial_row, blocks, f.scratch])

            _token_blocks(b, f, expert, f.gate_up_kernels, launch)

        after = next_.record, role.first_entry(next_.phase, next_.blocks[0])
        role.each_entry(here.phase, here.blocks, here.record, after, multiply)


def _gate_up_item(
    b: Builder, f: SimpleNamespace, role: _Role, number: Value, each: Value
) -> SimpleNamespace:
    """Expert, matrix (0: gate, if there is one), its record and phase, and the blocks of an item."""
    expert = expert_at(f, f.order.at(number // each * 8).load(i64))
    matrix = number % each // role.item_count
    up = (matrix + 1).eq(f.projections)
    return SimpleNamespace(
        expert=expert,
        matrix=matrix,
        record=b.select(up, expert.up, expert.gate),
        phase=_phase(b.select(up, f.up_phase, f.gate_phase), expert),
        blocks=role.blocks_of(number % role.item_count),
    )


def _phase(phases: Value, expert: SimpleNamespace) -> Value:
    """Which table the matrix of an expert uses."""
    return phases.at(expert.number * 8).load(i64)


def _token_blocks(
    b: Builder,
    f: SimpleNamespace,
    expert: SimpleNamespace,
    kernels: Value,
    launch: Callable[[Value, Value, Value], None],
) -> None:
    """`launch(kernel address, blocks, tokens before)` for an expert's tokens: full blocks, then the rest."""
    full, rest = split_blocks(b, f, expert.tokens)
    with b.loop(0, full, LAUNCH_BLOCKS) as done:
        blocks = b.min(full - done, LAUNCH_BLOCKS)
        kernel = kernels.at(full_slot(b, f, blocks) * 8).load(i64)
        launch(kernel, blocks, done << f.block_shift)
    with b.if_(rest > 0):
        launch(kernels.at((rest - 1) * 8).load(i64), b.const(i64, 1), full << f.block_shift)


def _activate(b: Builder, f: SimpleNamespace) -> None:
    hidden_row = f.intermediate * 2
    with each_item(b, f, 1, f.group_count) as (number, _):
        first, tokens = group_at(f, number)
        expert = expert_at(f, f.groups.at(number * call.GROUP_BYTES + 16).load(i64))
        phases = (_phase(table, expert) for table in (f.gate_phase, f.up_phase))
        parts = [f.gate_up_parts.at(phase * f.intermediate * 4) for phase in phases]
        rows = f.hidden_rows.at(first * hidden_row)
        sums = f.partials.at(first * f.partial_row)
        places = [sums, expert.gate, expert.up, *parts, f.gate_up_position, rows]
        numbers = [f.part_bytes, f.partial_row, f.most_parts, tokens]
        b.call_address(f.activate, void, [*places, *numbers])
        operand = f.hidden_operand.at(first * f.hidden_bytes)
        b.call_address(f.pack, void, [rows, f.identity, tokens, hidden_row, operand])


def _down(b: Builder, f: SimpleNamespace, role: _Role) -> None:
    row_bytes = f.hidden * 4
    sums = f.node_sums.at(role.group * f.sums_bytes)
    counter = role.group + f.node_groups + _SHARED_COUNTERS
    with each_item(b, f, counter, role.item_count) as (item, following):
        blocks = role.blocks_of(item)
        next_block, _ = role.blocks_of(b.min(following, role.item_count - 1))
        position = role.first_position(blocks[0])
        _clear(b, f, sums.at(position * 4), role.first_position(blocks[1]) - position)
        with b.loop(0, f.active) as index:
            expert = expert_at(f, index)
            more = index + 1 < f.active
            coming = expert_at(f, b.select(more, index + 1, 0))
            block = b.select(more, blocks[0], next_block)
            after = coming.down, role.first_entry(_phase(f.down_phase, coming), block)

            def multiply(
                entry: Entry, lists: list[Value], expert: SimpleNamespace = expert
            ) -> None:
                into = sums.at(entry.position * 4)

                def launch(kernel: Value, blocks: Value, before: Value) -> None:
                    place = expert.first + before
                    operand = f.hidden_operand.at(place * f.hidden_bytes)
                    tokens = [f.token.at(place * 4), f.sorted_router.at(place * 4)]
                    pointers = [expert.down, operand, *lists, into, *tokens]
                    b.call_address(kernel, void, [*pointers, row_bytes, blocks, f.scratch])

                _token_blocks(b, f, expert, f.down_kernels, launch)

            phase = _phase(f.down_phase, expert)
            role.each_entry(phase, blocks, expert.down, after, multiply)


def _clear(b: Builder, f: SimpleNamespace, sums: Value, columns: Value) -> None:
    """Zero some columns of the sums of all tokens."""
    zero = b.zero(vec(f32, GROUP))
    whole = (columns >> 4) << 4
    with b.loop(0, f.tokens) as token:
        row = sums.at(token * f.hidden * 4)
        with b.loop(0, whole, GROUP) as column:
            row.at(column * 4).store(zero)
        row.at(whole * 4).store_masked(zero, columns - whole)


def _combine(b: Builder, f: SimpleNamespace) -> None:
    each = b.max(f.tokens // (f.threads * _COMBINE_ITEMS), 1)
    with each_item(b, f, 2, (f.tokens + each - 1) // each) as (item, _):
        first = item * each
        tokens = b.min(f.tokens - first, each)
        out = f.out.at(first * f.out_row)
        pointers = [f.node_sums.at(first * f.hidden * 4), f.down_position, out]
        b.call_address(f.combine, void, [*pointers, f.sums_bytes, f.node_groups, f.out_row, tokens])

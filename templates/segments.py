"""The projections where each memory node's threads read only what is on their node: partial sums, and adding them up.

Weights that somebody else spread over the nodes page by page are read in **segments**: the k's of a row that are on one
node.  Rows `apart` from each other are cut alike, as the pattern of the pages repeats, so that 16 of them make a tile
at a stride of `apart` rows (the idea is HiNa-MoE's).  What a node has of a row gives a partial sum:

    SegmentGateUp   partial[token][position] = W[row, its k's] · x
    Activate        h = gate(Σ partials of gate + bias, Σ partials of up + bias), as plain rows of bf16
    SegmentDown     sum[token][position] += router weight · (W[row, its k's] · h [+ bias])
    Combine         the output: the nodes' sums, added up in their order

A position is a row's place in the order of the segments: neighbours in a tile are neighbours there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from expertile.codegen.ir import (
    Builder,
    L,
    Module,
    Value,
    element_bytes,
    f32,
    i16,
    i32,
    i64,
    ptr,
    vec,
)
from expertile.codegen.isa import TilePlan, Variant
from expertile.codegen.layouts import GROUP, round_to_bf16
from expertile.templates.formats.base import ByRows, Matrix, WeightFormat
from expertile.templates.formats.in_place import InPlace
from expertile.templates.gates import Gate
from expertile.templates.kernel import LINE, MATRIX, ExpertKernel, matrix_at
from expertile.templates.loops import Codes, Decoder, Emitter, KBlock, Memory, Rows, Source, Stream
from expertile.templates.sums import affine, bias_of
from expertile.templates.tokens import Finish

ENTRY = ("row", "position", "rows", "first_range", "end_range", "rank")
"""What a thread has to do of a matrix: its fields, 64 bits each. Rank counts the parts of a row by their first k's."""
ENTRY_BYTES = 8 * len(ENTRY)
RANGE_BYTES = 16

_Floats = vec(f32, GROUP)


@dataclass(frozen=True)
class SegmentKernel(ExpertKernel):
    """One matrix times up to `blocks` token blocks: some rows, over the k's of a list.

    void kernel(matrix, operand, present, next matrix, coming, ranges i64[][2], into, …, bytes of `into` a token, token
    blocks, scratch). Matrices are given by their records. `present` is the `ENTRY` to be multiplied, with its ranges in
    the table `ranges`: chunks from the first to the end, where the last chunk of a row may be no whole one. Row i is
    row first + i · `apart` of the matrix. `coming` is the entry that the thread is given next, of `next matrix`.
    """

    apart: int
    """Rows of the matrix from a row of a tile to its next one: the period of the segments."""

    @property
    @abstractmethod
    def role(self) -> str:
        """The projection."""

    @property
    def name(self) -> str:
        shape = f"{self.format.name}_k{self.inputs}_n{self.outputs}_a{self.apart}"
        return f"segments_{self.role}_{shape}_{self.suffix}"

    @property
    def names(self) -> tuple[str, ...]:
        return ("matrix",)

    def takes(self, variant: Variant) -> bool:
        """Lists of k's are not blocked again; rows so far apart have to be asked for, and are decoded by themselves."""
        blocked = variant.copied or variant.carried or variant.k_block or variant.neighbours > 1
        asks = variant.ahead == (0,) or not (variant.ahead or self.machine.unasked)
        return asks and not blocked

    def ir(self) -> str:
        return str(_SegmentEmitter(self).module)

    @abstractmethod
    def epilogue(self, e: Emitter, row: Value, rows: int | Value, count: int, block: Value) -> None:
        """As in :class:`ExpertKernel`; how many rows are valid may only be known when they are."""

    def finish(self, e: Emitter) -> None:
        """Nothing: every row is complete as soon as it was multiplied."""

    def each_token(self, e: Emitter, block: Value, use: Callable[[Value, Value], None]) -> None:
        """Call `use(token of the call, 16 rows' sums)` for the C tiles of a token block."""
        before = block * self.block_tokens
        for group, tokens in enumerate(e.groups):

            def one(token: Value, sums: Value, first: Value = before + GROUP * group) -> None:
                use(first + token, sums)

            e.isa.layout.each_token(e.b, e.c_tile(0, group), tokens, one)


@dataclass(frozen=True)
class SegmentGateUp(SegmentKernel):
    """Partial sums of gate or of up: `into` is where those of the first row and token go, in fp32."""

    role = "gate_up"

    def parameters(self) -> dict[str, L.Type]:
        return _signature("into")

    def epilogue(self, e: Emitter, row: Value, rows: int | Value, count: int, block: Value) -> None:
        into = e.arg.into.at(row * 4)

        def keep(token: Value, sums: Value) -> None:
            place = into.at(token * e.arg.into_bytes)
            if isinstance(rows, int):
                place.store(sums)
            else:
                place.store_masked(sums, rows)

        self.each_token(e, block, keep)


@dataclass(frozen=True)
class SegmentDown(SegmentKernel):
    """Partial sums of down, times router weights, added to those of other experts.

    `into` is where the sum of the first row and of token 0 is; token i32[] and router f32[] are those of the call's
    tokens. The bias is added to the first part of a row.
    """

    role = "down"

    def parameters(self) -> dict[str, L.Type]:
        return _signature("into", "token", "router")

    def epilogue(self, e: Emitter, row: Value, rows: int | Value, count: int, block: Value) -> None:
        assert isinstance(e, _SegmentEmitter)
        b, arg = e.b, e.arg
        scale, bias = e.row_scales(row, rows), e.row_biases(row, rows)
        into = arg.into.at(row * 4)

        def add(token: Value, sums: Value) -> None:
            router = b.splat(arg.router.at(token * 4).load(f32), GROUP)
            number = arg.token.at(token * 4).load(i32).to(i64)
            total = into.at(number * arg.into_bytes)
            y = affine(sums, scale, bias)
            if isinstance(rows, int):
                total.store(b.fmuladd(router, y, total.load(_Floats)))
            else:
                old = total.load_masked(_Floats, rows)
                total.store_masked(b.fmuladd(router, y, old), rows)

        self.each_token(e, block, add)


def _signature(*into: str) -> dict[str, L.Type]:
    pointers = ("matrix", "operand", "present", "next_matrix", "coming", "ranges", *into)
    integers = ("into_bytes", "blocks")
    return dict.fromkeys(pointers, ptr) | dict.fromkeys(integers, i64) | {"scratch": ptr}


class Entry:
    """The fields of an `ENTRY` in memory."""

    def __init__(self, address: Value) -> None:
        values = (address.at(8 * i).load(i64) for i in range(len(ENTRY)))
        self.row, self.position, self.rows, self.first_range, self.end_range, self.rank = values


class _Segments(KBlock):
    """The k's of a list of ranges, which ends with the last chunk of a row or before; `whole` chunks are whole ones."""

    goes_on = ends = None

    def __init__(self, ranges: Value, count: Value, whole: int) -> None:
        self._ranges, self._count, self._whole = ranges, count, whole

    @contextmanager
    def spans(self, b: Builder, unit: int) -> Iterator[tuple[Value, Value]]:
        with b.loop(0, self._count) as number:
            place = self._ranges.at(number * RANGE_BYTES)
            first, end = place.load(i64), b.min(place.at(8).load(i64), self._whole)
            # A range may begin or end within a unit.
            with b.loop(first // unit * unit, end, unit) as start:
                yield b.max(start, first), b.min(start + unit, end)

    def at_end(self, b: Builder) -> AbstractContextManager[None]:
        return b.if_(self._ranges.at(self._count * RANGE_BYTES - 8).load(i64) > self._whole)


@dataclass(frozen=True)
class _RowCodes(Codes):
    """Rows `top`… of a segment kernel's matrix, decoded each time they are multiplied."""

    top: Value

    def decoders(self, e: Emitter, block: int, rows: list[Value], first: Value) -> list[Decoder]:
        assert isinstance(e, _SegmentEmitter)
        return e.decoders(self.top, rows, first)


class _SegmentEmitter(Emitter):
    """Writes the loop nest of a segment kernel."""

    kernel: SegmentKernel
    entry: Entry
    next_entry: Entry

    def row(self, number: Value) -> Matrix:
        """The matrix from row `number` of the entry on."""
        codes, scales = self.kernel.format.offsets(self.entry.row + number * self.kernel.apart)
        [matrix] = self.matrices
        return Matrix(matrix.codes.at(codes), matrix.scales.at(scales), matrix.factor)

    def decoders(self, top: Value, rows: list[Value], first: Value) -> list[Decoder]:
        """What gives chunks, from one of the unit from `first` on, of each of some rows of the 16 from `top` on."""
        format_, vectors = self.kernel.format, self.isa.vectors
        assert isinstance(format_, ByRows)
        if format_.shared_rows == 1:
            apart = format_.every(self.kernel.apart)
            return apart.decoders(self.b, vectors, self.row(top), rows, first)
        # Rows so far apart may have their scales in different rows of these.
        return [format_.decoder(self.b, vectors, self.row(top + row), 0, first) for row in rows]

    def row_scales(self, first: Value, rows: int | Value) -> Value | None:
        """What the format wants the sums of rows `first`… multiplied by, in 16 lanes."""
        format_ = self.kernel.format
        return self._each_row(rows, lambda i: format_.row_scale(self.b, self.row(first + i), 1))

    def row_biases(self, first: Value, rows: int | Value) -> Value | None:
        """Their biases, or zeros where another part has them."""

        def bias(number: Value) -> Value | None:
            row = self.entry.row + (first + number) * self.kernel.apart
            return self.bias(0, row, 1, 1)

        biases = self._each_row(rows, bias)
        return None if biases is None else self.b.select(self.entry.rank.eq(0), biases, 0.0)

    def _each_row(self, rows: int | Value, value: Callable[[Value], Value | None]) -> Value | None:
        """The first lane of a value for each of 16 rows; for rows that are not there, that of the last one."""
        b, result = self.b, self.b.zero(_Floats)
        last = self.b.const(i64, GROUP - 1) if isinstance(rows, int) else rows - 1
        for lane in range(GROUP):
            one = value(b.min(b.const(i64, lane), last))
            if one is None:
                return None
            result = result.insert(lane, one.extract(0))
        return result

    # The loop nest -----------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        b = self.b
        self.entry, self.next_entry = Entry(self.arg.present), Entry(self.arg.coming)
        plan = self._plan(1)
        self.isa.configure(b, plan)
        whole = (self.entry.rows >> 4) << 4
        with b.loop(0, whole, GROUP) as row:
            self._block(plan, row)
        with b.if_(whole < self.entry.rows):
            self._staged_rows(plan, whole, self.entry.rows - whole)
        self.isa.release(b)

    def _block(self, plan: TilePlan, row: Value) -> None:
        """16 rows."""
        kernel, format_ = self.kernel, self.kernel.format
        assert isinstance(format_, ByRows)
        if format_.direct:
            self._direct(plan, row)
        elif kernel.variant.staged or not self.isa.registers:
            self._staged_rows(plan, row, GROUP)
        else:
            source = _RowCodes(self.matrices, format_, self.isa.chunks(kernel.inputs), row)
            self._product(plan, source, self._segments(source.chunks), [], row, GROUP)

    def _direct(self, plan: TilePlan, row: Value) -> None:
        """16 rows as they lie; the last k's, of no whole chunk, through scratch."""
        b, kernel, matrix = self.b, self.kernel, self.row(row)
        rows = kernel.format.every(kernel.apart)
        chunks = kernel.inputs // self.isa.chunk
        first = chunks * self.isa.chunk
        segments, tails = self._segments(chunks), []
        if first < kernel.inputs:
            tails = [self.arg.scratch.at(self.scratch.edges)]
            with segments.at_end(b):
                rows.stage(b, self.isa.vectors, [matrix], GROUP, first, kernel.inputs, tails, 64)
        source = Memory([matrix.codes], rows.row_bytes)
        self._product(plan, source, segments, tails, row, GROUP)

    def _staged_rows(self, plan: TilePlan, first: Value, rows: int | Value) -> None:
        """Up to 16 rows, written to scratch first; what is missing to 16 gives sums that nobody looks at."""
        b, kernel, format_ = self.b, self.kernel, self.kernel.format
        assert isinstance(format_, ByRows)
        stride, panel = kernel.panel_stride, self.arg.scratch.at(self.scratch.panels)
        chunks = self.isa.chunks(kernel.inputs)
        whole = kernel.inputs // self.isa.chunk
        unit = format_.unit_of(chunks)
        segments = self._segments(whole)
        with b.loop(0, rows) as number:
            matrix, into = self.row(first + number), panel.at(number * stride)
            with segments.spans(b, unit) as (start, end):
                decode = format_.decoder(b, self.isa.vectors, matrix, 0, start)
                with self._chunks(start, end, unit, format_.step) as chunk:
                    for place, words in enumerate(decode(chunk)):
                        into.at(chunk * 64).at(64 * place).store(words)
            if whole < chunks:
                with segments.at_end(b):
                    self._stage_tail(matrix, into.at(64 * whole), whole)
        source = Memory([panel], stride)
        self._product(plan, source, self._segments(chunks), [], first, rows)

    def _stage_tail(self, matrix: Matrix, into: Value, whole: int) -> None:
        """The k's of a row behind its whole chunks, padded with zeros."""
        format_ = self.kernel.format
        assert isinstance(format_, InPlace)  # others have blocks of whole chunks
        type_ = vec(format_.element, 64 // element_bytes(format_.element))
        left = self.kernel.inputs - whole * self.isa.chunk
        into.store(matrix.codes.at(64 * whole).load_masked(type_, left))

    def _segments(self, whole: int) -> _Segments:
        ranges = self.arg.ranges.at(self.entry.first_range * RANGE_BYTES)
        return _Segments(ranges, self.entry.end_range - self.entry.first_range, whole)

    def _product(
        self,
        plan: TilePlan,
        source: Source,
        segments: _Segments,
        tails: list[Value],
        row: Value,
        rows: int | Value,
    ) -> None:
        chunks = self.kernel.inputs // self.isa.chunk  # whole ones
        blocks = Rows(chunks, tails, plan, _SegmentStream(self, plan, row))
        with self.token_blocks() as block:
            self._sweep(blocks, source, segments, block, (0, GROUP))
            self.kernel.epilogue(self, row, rows, 1, block)


class _SegmentStream(Stream):
    """Asks for the rows to come, row by row and range by range, while the current ones are multiplied."""

    def __init__(self, e: _SegmentEmitter, plan: TilePlan, row: Value) -> None:
        self._on = bool(e.variant.ahead)
        if not self._on:
            return
        b, kernel, entry, next_ = e.b, e.kernel, e.entry, e.next_entry
        inside = row + GROUP < entry.rows
        first = b.select(inside, entry.row + (row + GROUP) * kernel.apart, next_.row)
        rows = b.min(b.select(inside, entry.rows - (row + GROUP), next_.rows), GROUP)
        self._b, self._e, self._rows = b, e, rows
        self._chunk_bytes = kernel.format.code_bytes(e.isa.chunk)
        self._row_bytes = kernel.format.row_bytes * kernel.apart
        self._first = b.select(inside, entry.first_range, next_.first_range)
        self._last = b.select(inside, entry.end_range, next_.end_range)
        steps = plan.sweeps * kernel.blocks * GROUP // plan.rows
        self._lines = max(1, -(-GROUP * self._chunk_bytes // (LINE * steps)))
        [matrix] = e.matrices
        next_codes = e.arg.next_matrix.at(MATRIX["codes"]).load(ptr)
        codes, _ = kernel.format.offsets(first)
        address = b.select(inside, matrix.codes, next_codes).at(codes)
        self._row, self._left = b.var(ptr, address), b.var(i64, rows)
        self._range = b.var(i64, self._first)
        self._offset, self._end = b.var(i64, 0), b.var(i64, 0)
        self._enter()

    def _enter(self) -> None:
        """Begin a range."""
        place = self._e.arg.ranges.at(self._range.get() * RANGE_BYTES)
        self._offset.set(place.load(i64) * self._chunk_bytes)
        self._end.set(place.at(8).load(i64) * self._chunk_bytes)

    def step(self) -> None:
        if not self._on:
            return
        b, offset, end = self._b, self._offset.get(), self._end.get()
        for line in range(self._lines):
            self._row.get().at(b.min(offset + LINE * line, end - 1)).prefetch(2)
        self._offset.set(offset + LINE * self._lines)
        with b.if_((self._offset.get() >= end) & (self._left.get() > 0)):
            self._range.add(1)
            with b.if_(self._range.get() >= self._last):
                self._range.set(self._first)
                self._row.add(self._row_bytes)
                self._left.add(-1)
            self._enter()


@dataclass(frozen=True)
class Activate:
    """h = gate(g, u) from partial sums, as rows of bf16.

    void activate(partials, gate, up, gate parts i32[], up parts i32[], position i32[], out, bytes from a part to the
    next, bytes a token, parts at most, tokens). Matrices are given by their records. A row's partial sums, as many as
    `gate parts` and `up parts` say, are added up in ascending order; up's lie behind gate's.
    """

    isa: str
    intermediate: int
    format: WeightFormat
    """Of gate, and of up, as the kernel sees them: see `ExpertKernel`."""
    bias: str | None
    gate: Gate
    bias_step: int
    """Elements between the biases of two rows."""
    in_order: bool
    """Whether positions are row numbers."""

    @property
    def name(self) -> str:
        return f"activate_{self.gate.name}_{self.format.name}_i{self.intermediate}"

    def parameters(self) -> dict[str, L.Type]:
        pointers = ("partials", "gate", "up", "gate_parts", "up_parts", "position", "out")
        integers = ("part_bytes", "row_bytes", "most_parts", "tokens")
        return dict.fromkeys(pointers, ptr) | dict.fromkeys(integers, i64)

    def ir(self) -> str:
        module = Module(self.name)
        with module.function(self.name, self.parameters()) as (b, arg):
            halves = ("gate", "up") if self.gate.gated else ("up",)
            parts = [
                _Half(self, b, arg, name, column * self.intermediate)
                for column, name in enumerate(halves)
            ]

            def some(token: Value, feature: Value, rows: int) -> None:
                values = [half.values(token, feature, rows) for half in parts]
                h = self.gate.emit(b, values[0] if self.gate.gated else None, values[-1])
                bits = round_to_bf16(b, h).to(vec(i16, GROUP))
                out = arg.out.at(token * (2 * self.intermediate)).at(feature * 2)
                if rows == GROUP:
                    out.store(bits)
                else:
                    out.store_masked(bits, rows)

            with b.loop(0, arg.tokens) as token:
                _by_sixteens(b, self.intermediate, partial(some, token))
        return str(module)


def _by_sixteens(b: Builder, count: int, use: Callable[[Value, int], None]) -> None:
    """Call `use` for all of `count` columns, 16 at a time: with the first, and how many there are."""
    whole, rest = count // GROUP * GROUP, count % GROUP
    with b.loop(0, whole, GROUP) as column:
        use(column, GROUP)
    if rest:
        use(b.const(i64, whole), rest)


class _Half:
    """Gate or up: its sums from its partial sums."""

    def __init__(self, kernel: Activate, b: Builder, arg: Any, name: str, column: int) -> None:
        self._kernel, self._b, self._arg, self._column = kernel, b, arg, column
        record = getattr(arg, name)
        self._matrix, self._bias = matrix_at(record), record.at(MATRIX["bias"]).load(ptr)
        self._parts = getattr(arg, f"{name}_parts")

    def values(self, token: Value, feature: Value, rows: int) -> Value:
        """Of features `feature`…, of which `rows` are there."""
        b, arg, format_ = self._b, self._arg, self._kernel.format
        first = arg.partials.at(token * arg.row_bytes).at(4 * self._column)
        count = self._parts.at(feature * 4).load_masked(vec(i32, GROUP), rows)
        places = _Places(b, arg.position, feature, rows, self._kernel.in_order)
        total = b.var(_Floats, places.load(first))
        with b.loop(1, arg.most_parts) as part:
            # What is not a part is not initialised.
            more = places.load(first.at(part * arg.part_bytes))
            present = count > b.splat(part.to(i32), GROUP)
            total.set(total.get() + b.select(present, more, 0.0))
        scale = format_.row_scale(b, format_.rows(self._matrix, feature), rows)
        bias = bias_of(b, self._kernel.bias, self._bias, feature, rows, self._kernel.bias_step)
        return affine(total.get(), scale, bias)


class _Places:
    """Where the sums of 16 rows are."""

    def __init__(self, b: Builder, position: Value, row: Value, rows: int, in_order: bool) -> None:
        self._b, self._rows, self._row = b, rows, row
        self._offsets = None
        if not in_order:
            places = [position.at((row + lane) * 4) for lane in range(rows)]
            self._offsets = [place.load(i32).to(i64) * 4 for place in places]

    def load(self, sums: Value) -> Value:
        """They, zero for those that are not there."""
        if self._offsets is None:
            return sums.at(self._row * 4).load_masked(_Floats, self._rows)
        result = self._b.zero(_Floats)
        for lane, offset in enumerate(self._offsets):
            result = result.insert(lane, sums.at(offset).load(f32))
        return result


@dataclass(frozen=True)
class Combine:
    """The output from the nodes' sums.

    void combine(sums, position i32[], out, bytes from a node's sums to the next, nodes, bytes of `out` a token, tokens)
    """

    isa: str
    hidden: int
    dtype: str
    """Of the output: "bf16", "f16" or "f32"."""
    in_order: bool
    """Whether positions are row numbers."""

    @property
    def name(self) -> str:
        return f"combine_{self.dtype}_h{self.hidden}"

    def ir(self) -> str:
        module = Module(self.name)
        integers = ("sums_bytes", "groups", "out_bytes", "tokens")
        parameters = dict.fromkeys(("sums", "position", "out"), ptr) | dict.fromkeys(integers, i64)
        size = 4 if self.dtype == "f32" else 2
        convert = Finish(self.isa, self.dtype).convert
        with module.function(self.name, parameters) as (b, arg):

            def some(token: Value, column: Value, columns: int) -> None:
                sums = arg.sums.at(token * (4 * self.hidden))
                places = _Places(b, arg.position, column, columns, self.in_order)
                total = b.var(_Floats, places.load(sums))
                with b.loop(1, arg.groups) as group:
                    total.set(total.get() + places.load(sums.at(group * arg.sums_bytes)))
                out = arg.out.at(token * arg.out_bytes).at(column * size)
                if columns == GROUP:
                    out.store(convert(b, total.get()))
                else:
                    out.store_masked(convert(b, total.get()), columns)

            with b.loop(0, arg.tokens) as token:
                _by_sixteens(b, self.hidden, partial(some, token))
        return str(module)

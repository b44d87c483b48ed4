"""The loop nest of a projection: blocks of 16 rows by blocks of tokens, over all of K, and what is fetched ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

from expertile.codegen.ir import Builder, Module, Value, i64, ptr
from expertile.codegen.isa import BTile, Pass, TilePlan
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.layouts import GROUP, groups_of
from expertile.templates.formats.base import ByRows, Matrix
from expertile.templates.kernel import EDGE, LINE, MATRIX, TILE, ExpertKernel, matrix_at
from expertile.templates.sums import ByteSums, bias_of


@dataclass(frozen=True)
class Rows:
    """Rows that are multiplied together: up to two blocks of 16."""

    chunks: int
    """Whole chunks of them."""
    tails: list[Value]
    """The last k's, or nothing."""
    plan: TilePlan
    stream: Stream
    carrying: Carrying | None = None
    """Those that come after them."""


class Source(ABC):
    """Where the A tiles of some blocks of 16 rows come from."""

    unit = 1
    """Chunks that something is worked out for together."""
    step = 1
    """Chunks that are asked for together."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """How many."""

    @abstractmethod
    def tiles(self, e: Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> Tiles:
        """A tiles of rows `top`… of some blocks, for `unit` chunks from `first` on."""


Tiles = Callable[[Value], Iterator[list[Any]]]
"""The A tiles of a pass, for one after another of `step` chunks from a chunk on."""
Decoder = Callable[[Value], Iterable[Value]]
"""The words of a row, likewise."""


@dataclass(frozen=True)
class Memory(Source):
    """Rows in memory as they are multiplied, `stride` bytes apart, from chunk `start` on."""

    addresses: list[Value]
    stride: int
    start: Value | int = 0

    @property
    def blocks(self) -> int:
        return len(self.addresses)

    def tiles(self, e: Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> Tiles:
        rows = [self.addresses[block].at(top * self.stride) for block in chosen]

        def load(chunk: Value) -> Iterator[list[Any]]:
            offset = (chunk - self.start) * 64
            yield [
                e.isa.load_a(e.b, plan, number, row.at(offset), self.stride, e.variant.streaming)
                for number, row in enumerate(rows)
            ]

        return load


@dataclass(frozen=True)
class Codes(Source):
    """Rows of a format that are decoded each time they are multiplied."""

    matrices: list[Matrix]
    format: ByRows
    chunks: int
    """Of a row."""

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.format.unit_of(self.chunks)

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.format.step

    @property
    def blocks(self) -> int:
        return len(self.matrices)

    def tiles(self, e: Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> Tiles:
        rows = [top + row for row in range(plan.rows)]
        decoders = [self.decoders(e, block, rows, first) for block in chosen]

        def decode(chunk: Value) -> Iterator[list[Any]]:
            blocks = [zip(*(row(chunk) for row in rows), strict=True) for rows in decoders]
            for tiles in zip(*blocks, strict=True):
                yield [e.isa.hold_a(list(rows)) for rows in tiles]

        return decode

    def decoders(self, e: Emitter, block: int, rows: list[Value], first: Value) -> list[Decoder]:
        """What gives chunks, from one of the unit from `first` on, of some rows of a block."""
        return self.format.decoders(e.b, e.isa.vectors, self.matrices[block], rows, first)


@dataclass(frozen=True)
class Carrying:
    """Rows that are decoded into scratch while those before them are multiplied, a part of them in each pass."""

    codes: Codes
    into: list[Value]
    stride: int
    passes: int
    """Over each row, at least."""
    more: Value
    """Whether there are such rows."""

    @property
    def units(self) -> int:
        """Of chunks, in a row."""
        return self.codes.chunks // self.codes.unit

    @property
    def share(self) -> int:
        """Units of a row that a pass decodes, at most."""
        return -(-self.units // self.passes)

    def decode(
        self, e: Emitter, plan: TilePlan, chosen: range, top: Value, first: Value
    ) -> Callable[[Value], None]:
        """What decodes `step` chunks of rows `top`… of some blocks, of the unit from `first` on."""
        rows = [top + row for row in range(plan.rows)]
        decoders = [self.codes.decoders(e, block, rows, first) for block in chosen]
        places = [self.into[block].at(row * self.stride) for block in chosen for row in rows]

        def store(chunk: Value) -> None:
            for place, decode in zip(places, chain(*decoders), strict=True):
                for number, words in enumerate(decode(chunk)):
                    place.at((chunk + number) * 64).store(words)

        return store


class Emitter:
    """Writes the loop nest of one expert kernel."""

    def __init__(self, kernel: ExpertKernel) -> None:
        self.kernel = kernel
        self.variant = kernel.variant
        self.isa = kernel.machine
        self.groups = groups_of(kernel.tokens)
        self.scratch = kernel.scratch
        self.module = Module(kernel.name, self.isa.tuning)
        with self.module.function(kernel.name, kernel.parameters()) as (self.b, self.arg):
            self.c = self.arg.scratch
            """The C tiles of the current token block."""
            records = [getattr(self.arg, name) for name in kernel.names]
            self.matrices = [matrix_at(record) for record in records]
            self.biases = [record.at(MATRIX["bias"]).load(ptr) for record in records]
            self._rows()

    # What epilogues use ------------------------------------------------------------------------------------------

    def c_tile(self, block: int, group: int) -> Value:
        """The stored C of A block `block` and token group `group`."""
        return self.c.at(self.scratch.block_bytes // 2 * block + TILE * group)

    def group(self, operand: Value, k: int, block: Value, group: int) -> Value:
        """Where a token group begins in an operand of `k` k's."""
        token_bytes = self.isa.operand_bytes(k)
        return operand.at(
            block * (self.kernel.block_tokens * token_bytes) + GROUP * group * token_bytes
        )

    def byte_sums(self, operand: Value, block: Value, group: int) -> ByteSums | None:
        """What the sums of a token group have to go through, if it was bytes that were multiplied."""
        if not isinstance(self.isa, ByteIsa):
            return None
        inputs, tokens = self.kernel.inputs, self.groups[group]
        last = self.group(operand, inputs, block, group).at(64 * tokens * self.isa.chunks(inputs))
        return ByteSums(self.b, self.isa, last, tokens)

    def bias(self, matrix: int, row: Value, rows: int, step: int) -> Value | None:
        """The biases of 16 rows of a matrix in fp32, zero from `rows` on."""
        return bias_of(self.b, self.kernel.bias, self.biases[matrix], row, rows, step)

    def row_scale(self, matrix: int, row: Value, rows: int) -> Value | None:
        """What the format wants the sums of 16 rows of a matrix multiplied by."""
        format_ = self.kernel.format
        return format_.row_scale(self.b, format_.rows(self.matrices[matrix], row), rows)

    def token_blocks(self) -> AbstractContextManager[Value]:
        """A loop over the token blocks: only full ones come several at a time."""
        full = self.kernel.tokens == self.kernel.block_tokens
        return self.b.loop(0, self.arg.blocks if full else 1)

    # The loop nest -----------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        kernel, b = self.kernel, self.b
        count = self.variant.neighbours
        step = max(GROUP * count, kernel.format.staged_rows)
        whole = kernel.outputs // step * step
        plan = self._plan(count)
        self.isa.configure(b, plan)
        end = b.min(self.arg.end_row, whole)
        if self.variant.carried:
            self._carried(plan, end)
        else:
            with b.loop(self.arg.first_row, end, step) as row:
                if self._staged_whole:
                    self._staged(plan, row, step)
                else:
                    self._blocks(plan, row, count)
        with b.if_(self.arg.end_row.eq(kernel.outputs)):
            self._last_rows(whole)
            kernel.finish(self)
        self.isa.release(b)

    @property
    def _staged_whole(self) -> bool:
        """Whether all rows go through scratch, over all of K."""
        return self.variant.staged or not isinstance(self.kernel.format, ByRows)

    def _plan(self, neighbours: int) -> TilePlan:
        blocks = self.kernel.matrices if self.variant.together else 1
        return self.isa.plan(self.groups, blocks * neighbours, self.variant)

    def _last_rows(self, whole: int) -> None:
        """The rows from `whole` on, which are fewer than a step."""
        kernel = self.kernel
        if whole == kernel.outputs:
            return
        plan = self._plan(1)
        if self.variant.neighbours > 1:
            self.isa.configure(self.b, plan)
        if self._staged_whole:
            self._staged(plan, self.b.const(i64, whole), kernel.outputs - whole)
            return
        for first in range(whole, kernel.outputs, GROUP):
            row = self.b.const(i64, first)
            if first + GROUP <= kernel.outputs:
                self._blocks(plan, row, 1)
            else:
                self._staged(plan, row, kernel.outputs - first)

    def _blocks(self, plan: TilePlan, row: Value, count: int) -> None:
        """`count` neighbouring blocks of 16 rows; only the last k's are staged."""
        kernel, format_ = self.kernel, self.kernel.format
        assert isinstance(format_, ByRows)
        matrices = kernel.row_blocks(self.matrices, row, count)
        edges = self.arg.scratch.at(self.scratch.edges)
        whole = kernel.inputs // self.isa.chunk * self.isa.chunk
        tails = []
        if whole < kernel.inputs:
            tails = [edges.at(EDGE * i) for i in range(len(matrices))]
            format_.stage(
                self.b, self.isa.vectors, matrices, GROUP, whole, kernel.inputs, tails, 64
            )
        chunks = whole // self.isa.chunk
        stream = Stream(self, plan, row, count, chunks)
        rows = Rows(chunks, tails, plan, stream)
        if self.variant.copied and chunks:
            self._copied(rows, matrices, row, count)
            return
        source: Source = Codes(matrices, format_, chunks)
        if format_.direct:
            source = Memory([matrix.codes for matrix in matrices], format_.row_bytes)
        with self.token_blocks() as block:
            self._multiply(rows, source, block)
            kernel.epilogue(self, row, GROUP, count, block)

    def _staged(self, plan: TilePlan, row: Value, rows: int) -> None:
        """Up to `staged_rows` rows, written to scratch as plain rows first."""
        kernel, b = self.kernel, self.b
        format_, stride, chunks = kernel.format, kernel.panel_stride, self.isa.chunks(kernel.inputs)
        panels = self.arg.scratch.at(self.scratch.panels)
        matrices = kernel.row_blocks(self.matrices, row, 1)
        bases = [panels.at(format_.staged_rows * stride * i) for i in range(len(matrices))]
        format_.stage(b, self.isa.vectors, matrices, rows, 0, kernel.inputs, bases, stride)
        # Whoever stages several blocks at a time has asked for the next ones.
        stream = Stream(self, plan, row, int(rows == GROUP), chunks)

        def compute(first: Value, valid: int) -> None:
            source = Memory([base.at(first * stride) for base in bases], stride)
            with self.token_blocks() as block:
                self._multiply(Rows(chunks, [], plan, stream), source, block)
                kernel.epilogue(self, row + first, valid, 1, block)

        whole, rest = rows // GROUP * GROUP, rows % GROUP
        with b.loop(0, whole, GROUP) as first:
            compute(first, GROUP)
        if rest:
            compute(b.const(i64, whole), rest)

    def _carried(self, plan: TilePlan, end: Value) -> None:
        """Blocks of 16 rows up to `end`, in scratch; those to come are written beside those that are multiplied."""
        kernel, b, first = self.kernel, self.b, self.arg.first_row
        format_, stride, chunks = kernel.format, kernel.panel_stride, self.isa.chunks(kernel.inputs)
        assert isinstance(format_, ByRows)
        panels = self.arg.scratch.at(self.scratch.panels)
        size = GROUP * stride
        even, odd = (
            [panels.at(size * (2 * i + turn)) for i in range(kernel.matrices)] for turn in (0, 1)
        )
        with b.if_(first < end):
            matrices = kernel.row_blocks(self.matrices, first, 1)
            format_.stage(b, self.isa.vectors, matrices, GROUP, 0, kernel.inputs, even, stride)
        with b.loop(first, end, GROUP) as row:
            swapped = ((row - first) & GROUP).ne(0)
            now = [b.select(swapped, y, x) for x, y in zip(even, odd, strict=True)]
            then = [b.select(swapped, x, y) for x, y in zip(even, odd, strict=True)]
            following = kernel.row_blocks(self.matrices, row + GROUP, 1)
            source = Memory(now, stride)
            codes = Codes(following, format_, chunks)
            passes = plan.sweeps * kernel.blocks
            carrying = Carrying(codes, then, stride, passes, row + GROUP < end)
            stream = Stream(self, plan, row + GROUP, 1, chunks)
            rows = Rows(chunks, [], plan, stream, carrying)
            with self.token_blocks() as block:
                self._multiply(rows, source, block)
                kernel.epilogue(self, row, GROUP, 1, block)

    def _multiply(self, rows: Rows, source: Source, block: Value) -> None:
        """All C tiles of the rows and a token block: panel by panel, each k block by k block."""
        b = self.b
        k_chunks = self.isa.chunks(self.variant.k_block)
        if not 0 < k_chunks < rows.chunks:
            everything = KBlock(b.const(i64, 0), b.const(i64, rows.chunks))
            self._sweep(rows, source, everything, block, (0, GROUP))
            return
        with (
            b.loop(0, GROUP, self.variant.panel) as top,
            b.loop(0, rows.chunks, k_chunks) as first,
        ):
            part = KBlock(first, b.min(first + k_chunks, rows.chunks), rows.chunks)
            self._sweep(rows, source, part, block, (top, top + self.variant.panel))

    def _copied(self, rows: Rows, matrices: list[Matrix], row: Value, count: int) -> None:
        """All C tiles of the rows and all token blocks: each k block of the rows is written to L1 first.

        Rows whose distance is a power of two share a few sets of L1, and all token blocks read them again.
        """
        b, kernel, scratch = self.b, self.kernel, self.scratch
        stride = kernel.copy_stride
        into = [
            self.arg.scratch.at(scratch.copy + GROUP * stride * i) for i in range(len(matrices))
        ]
        k_chunks = self.isa.chunks(self.variant.k_block)
        with b.loop(0, rows.chunks, k_chunks) as first:
            part = KBlock(first, b.min(first + k_chunks, rows.chunks), rows.chunks)
            for matrix, target in zip(matrices, into, strict=True):
                self._copy(matrix, part, target, stride)
            with self._kept_blocks() as block:
                self._sweep(rows, Memory(into, stride, first), part, block, (0, GROUP))
        with self._kept_blocks() as block:
            kernel.epilogue(self, row, GROUP, count, block)

    def _copy(self, matrix: Matrix, part: KBlock, into: Value, stride: int) -> None:
        """A k block of 16 rows, to rows `stride` bytes apart."""
        b, format_ = self.b, self.kernel.format
        assert isinstance(format_, ByRows)
        unit = format_.unit_of(self.isa.chunks(self.kernel.inputs))
        with b.loop(0, GROUP) as row, b.loop(part.first, part.end, unit) as first:
            decode = format_.decoder(b, self.isa.vectors, matrix, row, first)
            with self._chunks(first, first + unit, unit, format_.step) as chunk:
                at = into.at(row * stride + (chunk - part.first) * 64)
                for place, words in enumerate(decode(chunk)):
                    at.at(64 * place).store(words)

    @contextmanager
    def _kept_blocks(self) -> Iterator[Value]:
        """The token blocks, each with C tiles of its own."""
        with self.token_blocks() as block:
            self.c = self.arg.scratch.at(block * self.scratch.block_bytes)
            yield block
        self.c = self.arg.scratch

    def _sweep(
        self,
        rows: Rows,
        source: Source,
        part: KBlock,
        block: Value,
        panel: tuple[Value | int, Value | int],
    ) -> None:
        """Rows `panel` times a token block over a k block: every pass, part by part."""
        b, plan = self.b, rows.plan
        with b.loop(*panel, plan.rows) as top:
            for first in range(0, source.blocks, plan.blocks):
                chosen = range(first, first + plan.blocks)
                for index, one in enumerate(plan.passes):
                    before = plan.sweeps_before(index)
                    with b.loop(0, one.groups) as group, b.loop(0, one.repeat) as number:
                        tokens = PassTiles(self, plan, one, group, number, block, first, top)
                        if part.goes_on is not None:
                            with b.if_(part.goes_on):
                                tokens.restore()
                        if rows.carrying is None:
                            self._products(rows, source, part, tokens, chosen, top)
                        else:
                            turn = block * plan.sweeps + (group * one.repeat + number + before)
                            self._carry(rows, rows.carrying, source, tokens, chosen, top, turn)
                        if part.ends is None:
                            self._finish_pass(rows, part, tokens, chosen, top)
                            continue
                        with b.if_else(part.ends) as (last, more):
                            with last:
                                self._finish_pass(rows, part, tokens, chosen, top)
                            with more:
                                tokens.save()

    def _products(
        self,
        rows: Rows,
        source: Source,
        part: KBlock,
        tokens: PassTiles,
        chosen: range,
        top: Value,
    ) -> None:
        """All chunks of a part, for one pass."""
        with part.spans(self.b, source.unit) as (start, end):
            tiles = source.tiles(self, rows.plan, chosen, top, start)
            with self._chunks(start, end, source.unit, source.step) as chunk:
                for place, a in enumerate(tiles(chunk)):
                    rows.stream.step()
                    tokens.step(a, chunk + place)

    def _carry(
        self,
        rows: Rows,
        carrying: Carrying,
        source: Source,
        tokens: PassTiles,
        chosen: range,
        top: Value,
        turn: Value,
    ) -> None:
        """All chunks, for pass number `turn`, and evenly between them what it decodes of the rows to come."""
        b, codes = self.b, carrying.codes
        unit, step, share = codes.unit, codes.step, carrying.share * codes.unit
        tiles = source.tiles(self, rows.plan, chosen, top, b.const(i64, 0))
        pace = -(-rows.chunks // share)  # chunks that are multiplied for one that is decoded

        def multiply(begin: Value, end: Value) -> None:
            """What goes with chunks `begin`…`end` of the share."""
            with b.loop(begin * pace, b.min(end * pace, rows.chunks)) as chunk:
                for a in tiles(chunk):
                    rows.stream.step()
                    tokens.step(a, chunk)

        with b.loop(0, share, unit) as begin:
            first = turn * share + begin
            with b.if_else(carrying.more & (first < codes.chunks)) as (yes, no):
                with yes:
                    decode = carrying.decode(self, rows.plan, chosen, top, first)
                    with self._chunks(first, first + unit, unit, step) as chunk:
                        decode(chunk)
                        done = begin + (chunk - first)
                        multiply(done, done + step)
                with no:
                    multiply(begin, begin + unit)

    def _finish_pass(
        self, rows: Rows, part: KBlock, tokens: PassTiles, chosen: range, top: Value
    ) -> None:
        if rows.tails:
            with part.at_end(self.b):
                last = self.b.const(i64, rows.chunks)
                tails = Memory(rows.tails, 64, rows.chunks)
                [a] = tails.tiles(self, rows.plan, chosen, top, last)(last)
                tokens.step(a, last)
        tokens.store(top)

    @contextmanager
    def _chunks(self, first: Value, end: Value, unit: int, step: int) -> Iterator[Value]:
        """A loop over each `step`-th chunk of a unit, or of what there is of it: from `first` to `end`."""
        if unit == step:
            yield first
            return
        with self.b.loop(first, end, step) as chunk:
            yield chunk


class KBlock:
    """Chunks `first`…`end` of `chunks`; without that, they are all there are."""

    def __init__(self, first: Value, end: Value, chunks: int | None = None) -> None:
        self.first, self.end = first, end
        self.goes_on = None if chunks is None else first > 0
        self.ends = None if chunks is None else end.eq(chunks)

    @contextmanager
    def spans(self, b: Builder, unit: int) -> Iterator[tuple[Value, Value]]:
        """A loop over units of chunks: where one begins and ends."""
        with b.loop(self.first, self.end, unit) as start:
            yield start, start + unit

    def at_end(self, b: Builder) -> AbstractContextManager[None]:
        """What is to be done if the last k's, of no whole chunk, are among them."""
        return nullcontext()


class PassTiles:
    """The C tiles of one pass over k: zeroed or restored at the beginning, saved or stored at the end."""

    def __init__(
        self,
        e: Emitter,
        plan: TilePlan,
        one: Pass,
        group: Value,
        number: Value,
        block: Value,
        first: int,
        top: Value,
    ) -> None:
        self.e, self.plan, self.tiles, self.first = e, plan, one.tiles, first
        inputs = e.kernel.inputs
        shift = number * (e.isa.layout.token_bytes * one.tiles[0].tokens)
        # Passes of several tiles have a group each, and go on by as many groups.
        group = group * len(one.tiles)
        next_group = group * (GROUP * e.isa.operand_bytes(inputs)) + shift
        self.operands = [
            e.group(e.arg.operand, inputs, block, tile.group).at(next_group) for tile in one.tiles
        ]
        self.c_offset = group * TILE + shift
        self.c = [
            [e.isa.accumulators(e.b, plan, tile, i, j) for j, tile in enumerate(one.tiles)]
            for i in range(plan.blocks)
        ]
        token = group * GROUP + number * one.tiles[0].tokens
        kept = block if e.variant.copied else 0
        self._saved = e.b.const(i64, e.scratch.partials) + kept * (
            e.scratch.partial_bytes * max(e.kernel.matrices, e.variant.neighbours)
        )
        self._token, self._top = token, top

    def step(self, a: list[Any], chunk: Value) -> None:
        """One chunk: the A tiles times the operand's chunk number `chunk`."""
        e, isa, b, plan = self.e, self.e.isa, self.e.b, self.plan
        for j, tile in enumerate(self.tiles):
            at = self.operands[j].at(chunk * (64 * e.groups[tile.group]))
            v = isa.load_b(b, plan, tile, j, at)
            for i in range(plan.blocks):
                isa.dot(b, self.c[i][j], a[i], v)

    def store(self, top: Value) -> None:
        """To the scratch, as rows `top`… of their blocks."""
        e = self.e
        for i in range(self.plan.blocks):
            for j, tile in enumerate(self.tiles):
                into = e.c_tile(self.first + i, tile.group).at(self.c_offset)
                e.isa.store(e.b, self.plan, self.c[i][j], tile, into, top)

    def save(self) -> None:
        """Keep the unfinished tiles for the next block of k."""
        for c, tile, at in self._unfinished():
            self.e.isa.save(self.e.b, self.plan, c, tile, at)

    def restore(self) -> None:
        """Go on from the tiles of the last block of k."""
        for c, tile, at in self._unfinished():
            self.e.isa.restore(self.e.b, self.plan, c, tile, at)

    def _unfinished(self) -> Iterator[tuple[Any, BTile, Value]]:
        """The C tiles, and where they are kept: those of 16 rows and a tile's tokens have a place in common."""
        e = self.e
        for i in range(self.plan.blocks):
            for j, tile in enumerate(self.tiles):
                token = self._token + (GROUP * tile.group + tile.first)
                offset = self._saved + e.scratch.partial_bytes * (self.first + i)
                offset = offset + token * (GROUP * e.isa.sum_bytes)
                offset = offset + self._top * (tile.tokens * e.isa.sum_bytes)
                yield self.c[i][j], tile, e.arg.scratch.at(offset)


class Stream:
    """Asks for the rows to come, in memory order and evenly, while the current ones are multiplied.

    Memory order matters: cache lines along a row stream, one line a row does not. After the last rows of the call come
    those that the thread will be given next. A line may be asked for more than once, some time apart: a CPU drops
    prefetches when it is short of places for misses, or when it has to look up the page.
    """

    def __init__(self, e: Emitter, plan: TilePlan, row: Value, count: int, chunks: int) -> None:
        kernel, b = e.kernel, e.b
        rows = GROUP * count
        span = kernel.format.code_bytes(kernel.inputs)
        adjacent = kernel.row_span < span + LINE  # else most lines are somebody else's
        self._parts: list[_Ahead] = []
        if not (e.variant.ahead and count and chunks and adjacent):
            return
        following = [matrix_at(getattr(e.arg, f"next_{name}")) for name in kernel.names]
        here = kernel.streams(e.matrices, row + rows, count)
        beyond = row + rows - e.arg.end_row
        inside = beyond < 0
        # Whoever decodes rows beside others asks for those after them, which may be a block further on.
        next_ = kernel.streams(following, e.arg.next_row + (beyond & GROUP), count)
        steps = GROUP // plan.rows * plan.sweeps * chunks * kernel.blocks
        steps *= len(here) // plan.blocks
        for part, size in zip(("codes", "scales"), kernel.format.offsets(GROUP), strict=True):
            pairs = [(getattr(x, part), getattr(y, part)) for x, y in zip(here, next_, strict=True)]
            addresses = [b.select(inside, x, y) for x, y in pairs]
            distances = e.variant.ahead if part == "codes" else (0,)
            if size:
                self._parts.append(
                    _Ahead(b, addresses, size // kernel.rows_apart, steps, distances)
                )

    def step(self) -> None:
        """What goes with one chunk of one pass."""
        for part in self._parts:
            part.step()


class _Ahead:
    """Some bytes at each of some addresses, to be asked for in so many steps."""

    def __init__(
        self, b: Builder, addresses: list[Value], size: int, steps: int, distances: tuple[int, ...]
    ) -> None:
        self._addresses, self._distances = addresses, distances
        self._bytes = -(-size // steps)
        self._lines = -(-self._bytes // LINE)
        self._last = max(0, size - LINE * self._lines)
        self._b, self._offset = b, b.var(i64, 0)
        if not self._last:  # all in a step: once is enough
            self._ask(b.const(i64, 0))

    def step(self) -> None:
        """The next of them."""
        if not self._last:
            return
        offset = self._offset.get()
        self._ask(offset)
        self._offset.set(self._b.min(offset + self._bytes, self._last))

    def _ask(self, offset: Value) -> None:
        for address in self._addresses:
            for distance in self._distances:
                for line in range(self._lines):
                    address.at(offset + (distance + LINE * line)).prefetch(2)

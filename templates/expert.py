"""The two expert projections: gate/up with the gate function fused, and down with the weighted sum fused.

Both multiply 16-row blocks of weights by a block of up to 32 or 64 tokens (the operand, laid out by the ISA's layout),
over all of K: bf16 by bf16, or int8 by int8 on an ISA that multiplies bytes.  The C tiles go to per-thread scratch that
stays in L1, where the epilogue finds them:

    GateUp   h = gate(g + bias, u + bias), rounded to bf16 and written as the operand of the down projection
    Down     sum[token] += router weight · (y + bias), as rows of tokens again

They are specialised on the shape, the number of tokens, the weight format, the gate, and on a variant: how the loops
are blocked and what is prefetched.  Rows are cut among threads at multiples of `row_unit`.  Row and k tails go through
zero-padded scratch (see `formats.base`), so that a NaN in memory beside a row can't reach it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, L, Module, Value, f32, i1, i16, i32, i64, ptr, vec
from expertile.codegen.isa import BTile, Pass, TileIsa, TilePlan, Variant
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.layouts import GROUP, groups_of
from expertile.templates.formats.base import ByRows, Matrix, WeightFormat
from expertile.templates.gates import Gate

LAUNCH_BLOCKS = 8
"""Token blocks of a call, at most."""

MATRIX = {"codes": 0, "scales": 8, "factor": 16, "bias": 24}
"""The record of a matrix: where the addresses of its parts are, in bytes."""
MATRIX_BYTES = 32

_TILE = 4 * GROUP * GROUP
_EDGE = 64 * GROUP
_LINE = 64


@dataclass(frozen=True)
class ExpertKernel(ABC):
    """What the two projections share: rows `outputs`, reduction `inputs`, tokens, format, bias."""

    isa: str
    inputs: int
    outputs: int
    tokens: int
    """Of a block."""
    blocks: int
    """Token blocks of a call, at least; more than one only if they are full."""
    format: WeightFormat
    bias: str | None
    """None, "bf16" or "f32"."""
    variant: Variant

    @property
    @abstractmethod
    def name(self) -> str:
        """The exported function's name."""

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        return str(_Emitter(self).module)

    @property
    def machine(self) -> TileIsa:
        """The ISA."""
        return isas.by_name(self.isa)

    @property
    def block_tokens(self) -> int:
        """Tokens of a full block."""
        return self.machine.block_tokens

    @property
    def suffix(self) -> str:
        """The end of the kernel's name: what it is specialised on beside its shape."""
        return f"m{self.tokens}b{self.blocks}_{self.variant.name}"

    @property
    def panel_stride(self) -> int:
        """Bytes from row to row of a staged block; the odd cache line keeps rows out of each other's L1 sets."""
        return 64 * self.machine.chunks(self.inputs) + _LINE

    @property
    def copy_stride(self) -> int:
        """Bytes from row to row of a copied k block."""
        return 64 * self.machine.chunks(self.variant.k_block) + _LINE

    @property
    def row_unit(self) -> int:
        """Rows are divided among threads in multiples of this."""
        return max(2 * GROUP, self.format.staged_rows)

    @property
    def scratch_bytes(self) -> int:
        """Per-thread scratch."""
        return self.scratch.size

    @property
    def scratch(self) -> Scratch:
        """Where things lie in the per-thread scratch."""
        return Scratch.of(self)

    @property
    def matrices(self) -> int:
        """Matrices multiplied by the same tokens: 2 for gate and up."""
        return len(self.names)

    @abstractmethod
    def parameters(self) -> dict[str, L.Type]: ...

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The matrices by their parameters; `next_…` are those that the thread will be given next."""

    def row_blocks(self, matrices: Sequence[Matrix], row: Value, count: int) -> list[Matrix]:
        """The A blocks for rows `row`…"""
        rows = [row + GROUP * i for i in range(count)]
        return [self.format.rows(matrix, first) for matrix in matrices for first in rows]

    def streams(self, matrices: Sequence[Matrix], row: Value, count: int) -> list[Matrix]:
        """Where the memory of those blocks begins, in as many parts of 16 rows."""
        return self.row_blocks(matrices, row, count)

    @property
    def rows_apart(self) -> int:
        """Rows of memory from a row of a matrix to its next one."""
        return 1

    @property
    def row_span(self) -> int:
        """Bytes of codes from a row to the next, of whatever matrix, where a format reads rows in place."""
        return self.format.row_bytes // self.rows_apart

    @abstractmethod
    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        """Consume the C tiles of `rows` valid rows in each of `count` blocks, for token block `block`."""

    @abstractmethod
    def finish(self, e: _Emitter) -> None:
        """What is left to do after the last row of the matrix."""


@dataclass(frozen=True)
class GateUp(ExpertKernel):
    """h[I] = gate(W_gate · x, W_up · x): inputs = H, outputs = I.

    void gate_up(gate, up, operand, out, next gate, next up, next row, first row, end row, token blocks, scratch).
    Matrices are given by their records (`MATRIX`). `next …` say which rows the thread will most likely be given next.
    """

    gate: Gate
    bias_step: int
    """Elements between the biases of two rows: 2 when gate and up alternate."""

    @property
    def name(self) -> str:
        shape = f"{self.format.name}_h{self.inputs}_i{self.outputs}"
        return f"gate_up_{self.gate.name}_{shape}_{self.suffix}"

    def parameters(self) -> dict[str, L.Type]:
        return _signature(("gate", "up", "operand", "out", "next_gate", "next_up"))

    @property
    def names(self) -> tuple[str, ...]:
        return ("gate", "up") if self.gate.gated else ("up",)

    @property
    def rows_apart(self) -> int:
        return self.bias_step

    def streams(self, matrices: Sequence[Matrix], row: Value, count: int) -> list[Matrix]:
        parts = super().streams(matrices, row, count)
        if self.bias_step == 1:
            return parts
        gates = parts[0]  # up lies between them
        codes, scales = (span // 2 for span in self.format.offsets(GROUP))
        return [gates, Matrix(gates.codes.at(codes), gates.scales.at(scales), gates.factor)]

    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        for neighbour in range(count):
            self._activate(e, row + GROUP * neighbour, rows, neighbour, block)

    def _activate(self, e: _Emitter, row: Value, rows: int, first: int, block: Value) -> None:
        """The gate function of rows `row`…; their C tiles are those of A block `first` and, if gated, the next."""
        b, arg = e.b, e.arg
        halves_ = range(len(self.names))
        scales = [e.row_scale(half, row, rows) for half in halves_]
        biases = [e.bias(half, row, rows, self.bias_step) for half in halves_]
        for group, tokens in enumerate(e.groups):
            features = e.isa.layout.flat_features(tokens)
            tiles = [e.c_tile(first + half, group) for half in halves_]
            bytes_ = e.byte_sums(arg.operand, block, group)

            def activate(
                at: Value | int,
                lanes: list[int],
                tiles: list[Value] = tiles,
                bytes_: _ByteSums | None = bytes_,
            ) -> None:
                token = None
                if bytes_:
                    assert isinstance(at, int)  # rows have scales
                    token = bytes_.of_elements(at)
                halves = [
                    _affine(tile.at(at).load(vec(f32, GROUP)), scale, bias, lanes, token)
                    for tile, scale, bias in zip(tiles, scales, biases, strict=True)
                ]
                h = self.gate.emit(b, halves[0] if self.gate.gated else None, halves[-1])
                if rows < GROUP:  # what pads k in the next product must be zero
                    valid = b.const(vec(i1, GROUP), [int(lane < rows) for lane in lanes])
                    h = b.select(valid, h, 0.0)
                tiles[0].at(at).store(h)

            if rows == GROUP and not any((*scales, *biases)):
                with b.loop(0, tokens) as vector:
                    activate(vector * 64, features[:GROUP])
            else:
                for at in range(0, GROUP * tokens, GROUP):
                    activate(4 * at, features[at : at + GROUP])
            e.isa.layout.pack_features(
                b, tiles[0], tokens, e.group(arg.out, self.outputs, block, group), row
            )

    def finish(self, e: _Emitter) -> None:
        written = -(-self.outputs // GROUP) * GROUP
        missing = range(written, e.isa.chunk * e.isa.chunks(self.outputs), GROUP)
        if not missing:
            return
        with e.token_blocks() as block:  # the rest of the last chunk
            for group, tokens in enumerate(e.groups):
                tile = e.c_tile(0, group)
                for vector in range(tokens + 1):
                    tile.at(64 * vector).store(e.b.zero(vec(f32, GROUP)))
                into = e.group(e.arg.out, self.outputs, block, group)
                for feature in missing:
                    place = e.b.const(i64, feature)
                    e.isa.layout.pack_features(e.b, tile, tokens, into, place)


@dataclass(frozen=True)
class Down(ExpertKernel):
    """sum[token][H] += router · (W_down · h): inputs = I, outputs = H.

    void down(matrix, operand, tokens i32[], router f32[], sums, next matrix, bytes between two tokens' sums, next row,
    first row, end row, token blocks, scratch). `sums` is where row 0 of token 0 would be.
    """

    @property
    def name(self) -> str:
        return f"down_{self.format.name}_h{self.outputs}_i{self.inputs}_{self.suffix}"

    def parameters(self) -> dict[str, L.Type]:
        pointers = ("matrix", "operand", "token", "router", "sums", "next_matrix")
        return _signature(pointers, "sum_bytes")

    @property
    def names(self) -> tuple[str, ...]:
        return ("matrix",)

    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        b, arg = e.b, e.arg
        first = block * self.block_tokens
        for neighbour in range(count):
            top = row + GROUP * neighbour
            scale, bias = e.row_scale(0, top, rows), e.bias(0, top, rows, 1)
            for group, tokens in enumerate(e.groups):
                column = top * 4
                bytes_ = e.byte_sums(arg.operand, block, group)

                def add(
                    token: Value,
                    y: Value,
                    before: Value = first + GROUP * group,
                    column: Value = column,
                    scale: Value | None = scale,
                    bias: Value | None = bias,
                    bytes_: _ByteSums | None = bytes_,
                ) -> None:
                    slot = (before + token) * 4
                    router = b.splat(arg.router.at(slot).load(f32), GROUP)
                    number = arg.token.at(slot).load(i32).to(i64)
                    total = arg.sums.at(number * arg.sum_bytes + column)
                    y = _affine(y, scale, bias, None, bytes_.of_token(token) if bytes_ else None)
                    if rows == GROUP:
                        total.store(b.fmuladd(router, y, total.load(y.type)))
                    else:
                        old = total.load_masked(y.type, rows)
                        total.store_masked(b.fmuladd(router, y, old), rows)

                e.isa.layout.each_token(b, e.c_tile(neighbour, group), tokens, add)

    def finish(self, e: _Emitter) -> None:
        """Nothing: every row was added to its sums."""


@dataclass(frozen=True)
class Scratch:
    """Offsets into the per-thread scratch of a kernel, and its size."""

    block_bytes: int
    """C tiles of a token block."""
    edges: int
    """Tiles of the last k's."""
    copy: int
    """A k block of the rows."""
    partials: int
    """Unfinished C tiles."""
    partial_bytes: int
    """Of a row block and a token block."""
    panels: int
    """Staged rows."""
    size: int

    @classmethod
    def of(cls, kernel: ExpertKernel) -> Scratch:
        """The scratch that a kernel needs."""
        isa, variant = kernel.machine, kernel.variant
        groups = len(groups_of(kernel.block_tokens))
        kept = LAUNCH_BLOCKS if variant.copied else 1  # token blocks whose C is kept
        sources = max(kernel.matrices, variant.neighbours)
        block_bytes = 2 * groups * _TILE
        partial_bytes = GROUP * kernel.block_tokens * isa.sum_bytes if variant.k_block else 0
        copied = GROUP * kernel.copy_stride if variant.copied else 0
        # Every kernel stages the last rows of a matrix.
        staged = kernel.format.staged_rows * kernel.panel_stride
        offsets, end = [], 0
        # A layout may read 60 bytes past the last row of a C tile.
        sizes = (
            kept * block_bytes + _LINE,
            2 * _EDGE,
            sources * copied,
            kept * sources * partial_bytes,
            2 * staged,
        )
        for size in sizes:
            offsets.append(end)
            end += size
        _, edges, copy, partials, panels = offsets
        return cls(block_bytes, edges, copy, partials, partial_bytes, panels, end)


@dataclass(frozen=True)
class _Rows:
    """Rows that are multiplied together: up to two blocks of 16."""

    matrices: list[Matrix]
    chunks: int
    """Whole chunks of them."""
    tails: list[Value]
    """The last k's, or nothing."""
    plan: TilePlan
    stream: _Stream


class _Source(ABC):
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
    def tiles(self, e: _Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> _Tiles:
        """A tiles of rows `top`… of some blocks, for `unit` chunks from `first` on."""


_Tiles = Callable[[Value], Iterator[list[Any]]]
"""The A tiles of a pass, for one after another of `step` chunks from a chunk on."""


@dataclass(frozen=True)
class _Memory(_Source):
    """Rows in memory as they are multiplied, `stride` bytes apart, from chunk `start` on."""

    addresses: list[Value]
    stride: int
    start: Value | int = 0

    @property
    def blocks(self) -> int:
        return len(self.addresses)

    def tiles(self, e: _Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> _Tiles:
        rows = [self.addresses[block].at(top * self.stride) for block in chosen]

        def load(chunk: Value) -> Iterator[list[Any]]:
            offset = (chunk - self.start) * 64
            yield [
                e.isa.load_a(e.b, plan, number, row.at(offset), self.stride, e.variant.streaming)
                for number, row in enumerate(rows)
            ]

        return load


@dataclass(frozen=True)
class _Codes(_Source):
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

    def tiles(self, e: _Emitter, plan: TilePlan, chosen: range, top: Value, first: Value) -> _Tiles:
        rows = [top + row for row in range(plan.rows)]
        decoders = [
            self.format.decoders(e.b, e.isa.vectors, self.matrices[block], rows, first)
            for block in chosen
        ]

        def decode(chunk: Value) -> Iterator[list[Any]]:
            blocks = [zip(*(row(chunk) for row in rows), strict=True) for rows in decoders]
            for tiles in zip(*blocks, strict=True):
                yield [e.isa.hold_a(list(rows)) for rows in tiles]

        return decode


class _Emitter:
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
            self.matrices = [_matrix(record) for record in records]
            self.biases = [record.at(MATRIX["bias"]).load(ptr) for record in records]
            self._rows()

    # What epilogues use ------------------------------------------------------------------------------------------

    def c_tile(self, block: int, group: int) -> Value:
        """The stored C of A block `block` and token group `group`."""
        return self.c.at(self.scratch.block_bytes // 2 * block + _TILE * group)

    def group(self, operand: Value, k: int, block: Value, group: int) -> Value:
        """Where a token group begins in an operand of `k` k's."""
        token_bytes = self.isa.operand_bytes(k)
        return operand.at(
            block * (self.kernel.block_tokens * token_bytes) + GROUP * group * token_bytes
        )

    def byte_sums(self, operand: Value, block: Value, group: int) -> _ByteSums | None:
        """What the sums of a token group have to go through, if it was bytes that were multiplied."""
        if not isinstance(self.isa, ByteIsa):
            return None
        inputs, tokens = self.kernel.inputs, self.groups[group]
        last = self.group(operand, inputs, block, group).at(64 * tokens * self.isa.chunks(inputs))
        return _ByteSums(self.b, self.isa, last, tokens)

    def bias(self, matrix: int, row: Value, rows: int, step: int) -> Value | None:
        """The biases of 16 rows of a matrix in fp32, zero from `rows` on."""
        kind = self.kernel.bias
        if kind is None:
            return None
        lanes = step * (GROUP - 1) + 1
        type_ = vec(f32 if kind == "f32" else i16, lanes)
        size = 4 if kind == "f32" else 2
        address = self.biases[matrix].at(row * (step * size))
        values = address.load_masked(type_, step * (rows - 1) + 1).shuffle(range(0, lanes, step))
        return (
            values
            if kind == "f32"
            else (values.zext(vec(i32, GROUP)) << 16).bitcast(vec(f32, GROUP))
        )

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
        with b.loop(self.arg.first_row, b.min(self.arg.end_row, whole), step) as row:
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
            tails = [edges.at(_EDGE * i) for i in range(len(matrices))]
            format_.stage(
                self.b, self.isa.vectors, matrices, GROUP, whole, kernel.inputs, tails, 64
            )
        chunks = whole // self.isa.chunk
        stream = _Stream(self, plan, row, count, chunks)
        if self.variant.copied and chunks:
            self._copied(_Rows(matrices, chunks, tails, plan, stream), row, count)
            return
        source: _Source = _Codes(matrices, format_, chunks)
        if format_.direct:
            source = _Memory([matrix.codes for matrix in matrices], format_.row_bytes)
        rows = _Rows(matrices, chunks, tails, plan, stream)
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
        stream = _Stream(self, plan, row, int(rows == GROUP), chunks)

        def compute(first: Value, valid: int) -> None:
            source = _Memory([base.at(first * stride) for base in bases], stride)
            with self.token_blocks() as block:
                self._multiply(_Rows(matrices, chunks, [], plan, stream), source, block)
                kernel.epilogue(self, row + first, valid, 1, block)

        whole, rest = rows // GROUP * GROUP, rows % GROUP
        with b.loop(0, whole, GROUP) as first:
            compute(first, GROUP)
        if rest:
            compute(b.const(i64, whole), rest)

    def _multiply(self, rows: _Rows, source: _Source, block: Value) -> None:
        """All C tiles of the rows and a token block: panel by panel, each k block by k block."""
        b = self.b
        k_chunks = self.isa.chunks(self.variant.k_block)
        if not 0 < k_chunks < rows.chunks:
            everything = _KBlock(b.const(i64, 0), b.const(i64, rows.chunks))
            self._sweep(rows, source, everything, block, (0, GROUP))
            return
        with (
            b.loop(0, GROUP, self.variant.panel) as top,
            b.loop(0, rows.chunks, k_chunks) as first,
        ):
            part = _KBlock(first, b.min(first + k_chunks, rows.chunks), rows.chunks)
            self._sweep(rows, source, part, block, (top, top + self.variant.panel))

    def _copied(self, rows: _Rows, row: Value, count: int) -> None:
        """All C tiles of the rows and all token blocks: each k block of the rows is written to L1 first.

        Rows whose distance is a power of two share a few sets of L1, and all token blocks read them again.
        """
        b, kernel, scratch = self.b, self.kernel, self.scratch
        stride = kernel.copy_stride
        into = [
            self.arg.scratch.at(scratch.copy + GROUP * stride * i)
            for i in range(len(rows.matrices))
        ]
        k_chunks = self.isa.chunks(self.variant.k_block)
        with b.loop(0, rows.chunks, k_chunks) as first:
            part = _KBlock(first, b.min(first + k_chunks, rows.chunks), rows.chunks)
            for matrix, target in zip(rows.matrices, into, strict=True):
                self._copy(matrix, part, target, stride)
            with self._kept_blocks() as block:
                self._sweep(rows, _Memory(into, stride, first), part, block, (0, GROUP))
        with self._kept_blocks() as block:
            kernel.epilogue(self, row, GROUP, count, block)

    def _copy(self, matrix: Matrix, part: _KBlock, into: Value, stride: int) -> None:
        """A k block of 16 rows, to rows `stride` bytes apart."""
        b, format_ = self.b, self.kernel.format
        assert isinstance(format_, ByRows)
        unit = format_.unit_of(self.isa.chunks(self.kernel.inputs))
        with b.loop(0, GROUP) as row, b.loop(part.first, part.end, unit) as first:
            decode = format_.decoder(b, self.isa.vectors, matrix, row, first)
            with self._chunks(first, unit, format_.step) as chunk:
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
        rows: _Rows,
        source: _Source,
        part: _KBlock,
        block: Value,
        panel: tuple[Value | int, Value | int],
    ) -> None:
        """Rows `panel` times a token block over a k block: every pass, part by part."""
        b, plan = self.b, rows.plan
        with b.loop(*panel, plan.rows) as top:
            for first in range(0, source.blocks, plan.blocks):
                chosen = range(first, first + plan.blocks)
                for one in plan.passes:
                    with b.loop(0, one.groups) as group, b.loop(0, one.repeat) as number:
                        tokens = _Pass(self, plan, one, group, number, block, first, top)
                        if part.goes_on is not None:
                            with b.if_(part.goes_on):
                                tokens.restore()
                        with b.loop(part.first, part.end, source.unit) as start:
                            tiles = source.tiles(self, plan, chosen, top, start)
                            with self._chunks(start, source.unit, source.step) as chunk:
                                for place, a in enumerate(tiles(chunk)):
                                    rows.stream.step()
                                    tokens.step(a, chunk + place)
                        if part.ends is None:
                            self._finish_pass(rows, tokens, chosen, top)
                            continue
                        with b.if_else(part.ends) as (last, more):
                            with last:
                                self._finish_pass(rows, tokens, chosen, top)
                            with more:
                                tokens.save()

    def _finish_pass(self, rows: _Rows, tokens: _Pass, chosen: range, top: Value) -> None:
        if rows.tails:
            last = self.b.const(i64, rows.chunks)
            tails = _Memory(rows.tails, 64, rows.chunks)
            [a] = tails.tiles(self, rows.plan, chosen, top, last)(last)
            tokens.step(a, last)
        tokens.store(top)

    @contextmanager
    def _chunks(self, first: Value, count: int, step: int) -> Iterator[Value]:
        """A loop over each `step`-th of some chunks."""
        if count == step:
            yield first
            return
        with self.b.loop(first, first + count, step) as chunk:
            yield chunk


class _KBlock:
    """Chunks `first`…`end` of `chunks`; without that, they are all there are."""

    def __init__(self, first: Value, end: Value, chunks: int | None = None) -> None:
        self.first, self.end = first, end
        self.goes_on = None if chunks is None else first > 0
        self.ends = None if chunks is None else end.eq(chunks)


class _Pass:
    """The C tiles of one pass over k: zeroed or restored at the beginning, saved or stored at the end."""

    def __init__(
        self,
        e: _Emitter,
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
        self.c_offset = group * _TILE + shift
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


class _Stream:
    """Asks for the rows to come, in memory order and evenly, while the current ones are multiplied.

    Memory order matters: cache lines along a row stream, one line a row does not. After the last rows of the call come
    those that the thread will be given next. A line may be asked for more than once, some time apart: a CPU drops
    prefetches when it is short of places for misses, or when it has to look up the page.
    """

    def __init__(self, e: _Emitter, plan: TilePlan, row: Value, count: int, chunks: int) -> None:
        kernel, b = e.kernel, e.b
        rows = GROUP * count
        span = kernel.format.code_bytes(kernel.inputs)
        adjacent = kernel.row_span < span + _LINE  # else most lines are somebody else's
        self._parts: list[_Ahead] = []
        if not (e.variant.ahead and count and chunks and adjacent):
            return
        following = [_matrix(getattr(e.arg, f"next_{name}")) for name in kernel.names]
        here = kernel.streams(e.matrices, row + rows, count)
        next_ = kernel.streams(following, e.arg.next_row, count)
        inside = row + rows < e.arg.end_row
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
        self._lines = -(-self._bytes // _LINE)
        self._last = max(0, size - _LINE * self._lines)
        self._b, self._offset = b, b.var(i64, 0)

    def step(self) -> None:
        """The next of them."""
        offset = self._offset.get()
        for address in self._addresses:
            for distance in self._distances:
                for line in range(self._lines):
                    address.at(offset + (distance + _LINE * line)).prefetch(2)
        self._offset.set(self._b.min(offset + self._bytes, self._last))


def _matrix(record: Value) -> Matrix:
    """A matrix from its record."""
    return Matrix(*(record.at(MATRIX[name]).load(ptr) for name in ("codes", "scales", "factor")))


@dataclass(frozen=True)
class _ByteSums:
    """What a group of tokens has noted of itself behind its last chunk, see `isa.bytes`."""

    b: Builder
    isa: ByteIsa
    chunk: Value
    tokens: int

    def of_elements(self, offset: int) -> _Token:
        """Of the tokens of the 16 elements from byte `offset` of a stored C on."""
        layout = self.isa.layout
        return self._token(
            lambda number: layout.spread(self.b, self.chunk, self.tokens, number, offset // 4)
        )

    def of_token(self, token: Value) -> _Token:
        """Of a token, in 16 lanes."""
        word = self.isa.layout.word
        return self._token(
            lambda number: self.b.splat(
                word(self.chunk, self.tokens, token, number).load(i32), GROUP
            )
        )

    def _token(self, word: Callable[[int], Value]) -> _Token:
        return _Token(word(0).bitcast(vec(f32, GROUP)), word(1) if self.isa.offsets else None)


@dataclass(frozen=True)
class _Token:
    """The scale of a quantised token, and what its sums have too much; in 16 lanes."""

    scale: Value
    offset: Value | None

    def floats(self, sums: Value) -> Value:
        """int32 sums as fp32."""
        integers = sums.bitcast(vec(i32, GROUP))
        if self.offset is not None:
            integers = integers - self.offset
        return integers.to(vec(f32, GROUP))


def _affine(
    sums: Value,
    scale: Value | None,
    bias: Value | None,
    lanes: Sequence[int] | None = None,
    token: _Token | None = None,
) -> Value:
    """Finished sums of 16 rows, or of those in `lanes`: times their scale, times that of the token, plus their bias."""
    if token is not None:
        sums = token.floats(sums)
    if scale is not None:
        sums = sums * (scale if lanes is None else scale.shuffle(lanes))
    if token is not None:
        sums = sums * token.scale
    if bias is not None:
        sums = sums + (bias if lanes is None else bias.shuffle(lanes))
    return sums


def _signature(pointers: tuple[str, ...], *integers: str) -> dict[str, L.Type]:
    parameters: dict[str, L.Type] = dict.fromkeys(pointers, ptr)
    parameters |= dict.fromkeys((*integers, "next_row", "first_row", "end_row", "blocks"), i64)
    return parameters | {"scratch": ptr}

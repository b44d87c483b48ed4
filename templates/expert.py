"""The two expert projections: gate/up with the gate function fused, and down with the weighted sum fused.

Both multiply 16-row blocks of weights by a block of up to 32 tokens (the operand, laid out by the ISA's layout), over
all of K.  The C tiles go to per-thread scratch that stays in L1, where the epilogue finds them:

    GateUp   h = gate(g + bias, u + bias), rounded to bf16 and written as the operand of the down projection
    Down     sum[token] += router weight · (y + bias), as rows of tokens again

They are specialised on the shape, the number of tokens, the weight format and the gate.  Rows are cut among threads at
multiples of `row_unit`.  Row and k tails go through zero-padded scratch (see `formats.base`), so that a NaN in memory
beside a row can't reach it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace

from expertile.codegen import isa as isas
from expertile.codegen.ir import L, Module, Value, Var, f32, i1, i16, i32, i64, ptr, vec
from expertile.codegen.isa import Pass, TileIsa, TilePlan
from expertile.codegen.layouts import CHUNK, GROUP, chunks_of, groups_of
from expertile.templates.formats.base import WeightFormat
from expertile.templates.gates import Gate

MAX_TOKENS = 32
"""Tokens of a block; an expert with more gets several blocks."""

_TILE = 4 * GROUP * GROUP
_EDGE = 64 * GROUP
_C_BYTES = (
    4 * _TILE + 64
)  # two row blocks by two groups; a layout may read 60 bytes past the last row


@dataclass(frozen=True)
class ExpertKernel(ABC):
    """What the two projections share: rows `outputs`, reduction `inputs`, tokens, format, bias."""

    isa: str
    inputs: int
    outputs: int
    tokens: int
    format: WeightFormat
    bias: str | None
    """None, "bf16" or "f32"."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The exported function's name."""

    def ir(self) -> str:
        """The kernel as LLVM IR."""
        return str(_Emitter(self).module)

    @property
    def panel_stride(self) -> int:
        """Bytes from row to row of a staged block; the odd cache line keeps rows out of each other's L1 sets."""
        return 2 * CHUNK * chunks_of(self.inputs) + 64

    @property
    def row_unit(self) -> int:
        """Rows are divided among threads in multiples of this."""
        return max(2 * GROUP, self.format.staged_rows)

    @property
    def scratch_bytes(self) -> int:
        """Per-thread scratch: C tiles, k-tail tiles, staged blocks."""
        return _C_BYTES + 2 * _EDGE + 2 * self.format.staged_rows * self.panel_stride

    @abstractmethod
    def parameters(self) -> dict[str, L.Type]: ...

    @abstractmethod
    def neighbours(self, isa: TileIsa) -> int:
        """16-row blocks of the matrix multiplied together."""

    @abstractmethod
    def blocks(self, arg: SimpleNamespace, row: Value, count: int) -> list[Value]:
        """Addresses of the A blocks for rows `row`…"""

    @abstractmethod
    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        """Consume the C tiles of `rows` valid rows in each of `count` blocks, for token block `block`."""

    @abstractmethod
    def finish(self, e: _Emitter) -> None:
        """What is left to do after the last row of the matrix."""


@dataclass(frozen=True)
class GateUp(ExpertKernel):
    """h[I] = gate(W_gate · x, W_up · x): inputs = H, outputs = I.

    void gate_up(gate, up, gate_bias, up_bias, operand, out, first row, end row, token blocks, scratch)
    """

    gate: Gate
    bias_step: int
    """Elements between the biases of two rows: 2 when gate and up alternate."""

    @property
    def name(self) -> str:
        return f"gate_up_{self.gate.name}_{self.format.name}_h{self.inputs}_i{self.outputs}_m{self.tokens}"

    def parameters(self) -> dict[str, L.Type]:
        pointers = ("gate", "up", "gate_bias", "up_bias", "operand", "out")
        return _signature(pointers)

    def neighbours(self, isa: TileIsa) -> int:
        return 1

    def blocks(self, arg: SimpleNamespace, row: Value, count: int) -> list[Value]:
        matrices = [arg.gate, arg.up] if self.gate.gated else [arg.up]
        return [matrix.at(self.format.row_offset(row)) for matrix in matrices]

    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        b, arg = e.b, e.arg
        names = ["gate", "up"] if self.gate.gated else ["up"]
        biases = [e.bias(getattr(arg, f"{name}_bias"), row, rows, self.bias_step) for name in names]
        for group, tokens in enumerate(e.groups):
            features = e.isa.layout.flat_features(tokens)
            tiles = [e.c_tile(half, group) for half in range(len(names))]

            def activate(at: Value | int, lanes: list[int], tiles: list[Value] = tiles) -> None:
                halves = [tile.at(at).load(vec(f32, GROUP)) for tile in tiles]
                for i, bias in enumerate(biases):
                    if bias is not None:
                        halves[i] = halves[i] + bias.shuffle(lanes)
                h = self.gate.emit(b, halves[0] if self.gate.gated else None, halves[-1])
                if rows < GROUP:  # what pads k in the next product must be zero
                    valid = b.const(vec(i1, GROUP), [int(lane < rows) for lane in lanes])
                    h = b.select(valid, h, 0.0)
                tiles[0].at(at).store(h)

            if self.bias is None and rows == GROUP:
                with b.loop(0, tokens) as vector:
                    activate(vector * 64, features[:GROUP])
            else:
                for first in range(0, GROUP * tokens, GROUP):
                    activate(4 * first, features[first : first + GROUP])
            e.isa.layout.pack_features(
                b, tiles[0], tokens, e.group(arg.out, self.outputs, block, group), row
            )

    def finish(self, e: _Emitter) -> None:
        written = -(-self.outputs // GROUP) * GROUP
        if written % CHUNK == 0:
            return
        with e.token_blocks() as block:  # the second half of the last chunk
            for group, tokens in enumerate(e.groups):
                tile = e.c_tile(0, group)
                for vector in range(tokens + 1):
                    tile.at(64 * vector).store(e.b.zero(vec(f32, GROUP)))
                into = e.group(e.arg.out, self.outputs, block, group)
                e.isa.layout.pack_features(e.b, tile, tokens, into, e.b.const(i64, written))


@dataclass(frozen=True)
class Down(ExpertKernel):
    """sum[token][H] += router · (W_down · h): inputs = I, outputs = H.

    void down(matrix, bias, operand, tokens i32[], router f32[], sums, bytes between two tokens' sums, first row,
    end row, token blocks, scratch). `sums` is where row 0 of token 0 would be.
    """

    @property
    def name(self) -> str:
        return f"down_{self.format.name}_h{self.outputs}_i{self.inputs}_m{self.tokens}"

    def parameters(self) -> dict[str, L.Type]:
        pointers = ("matrix", "matrix_bias", "operand", "token", "router", "sums")
        return _signature(pointers, "sum_bytes")

    def neighbours(self, isa: TileIsa) -> int:
        return isa.neighbours(groups_of(self.tokens)) if self.format.direct else 1

    def blocks(self, arg: SimpleNamespace, row: Value, count: int) -> list[Value]:
        return [arg.matrix.at(self.format.row_offset(row + GROUP * i)) for i in range(count)]

    def epilogue(self, e: _Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        b, arg = e.b, e.arg
        first = block * MAX_TOKENS
        for neighbour in range(count):
            bias = e.bias(arg.matrix_bias, row + GROUP * neighbour, rows, 1)
            for group, tokens in enumerate(e.groups):
                column = (row + GROUP * neighbour) * 4

                def add(
                    token: Value,
                    y: Value,
                    before: Value = first + GROUP * group,
                    column: Value = column,
                    bias: Value | None = bias,
                ) -> None:
                    slot = (before + token) * 4
                    router = b.splat(arg.router.at(slot).load(f32), GROUP)
                    number = arg.token.at(slot).load(i32).to(i64)
                    total = arg.sums.at(number * arg.sum_bytes + column)
                    if bias is not None:
                        y = y + bias
                    if rows == GROUP:
                        total.store(b.fmuladd(router, y, total.load(y.type)))
                    else:
                        old = total.load_masked(y.type, rows)
                        total.store_masked(b.fmuladd(router, y, old), rows)

                e.isa.layout.each_token(b, e.c_tile(neighbour, group), tokens, add)

    def finish(self, e: _Emitter) -> None:
        """Nothing: every row was added to its sums."""


class _Emitter:
    """Writes the loop nest of one expert kernel."""

    def __init__(self, kernel: ExpertKernel) -> None:
        self.kernel = kernel
        self.isa = isas.by_name(kernel.isa)
        self.groups = groups_of(kernel.tokens)
        self.module = Module(kernel.name, self.isa.tuning)
        with self.module.function(kernel.name, kernel.parameters()) as (self.b, self.arg):
            self._rows()

    # What epilogues use ------------------------------------------------------------------------------------------

    def c_tile(self, block: int, group: int) -> Value:
        """The stored C of A block `block` and token group `group`."""
        return self.arg.scratch.at(_TILE * (2 * block + group))

    def group(self, operand: Value, k: int, block: Value, group: int) -> Value:
        """Where a token group begins in an operand of `k` k's."""
        chunk_bytes = 64 * chunks_of(k)
        return operand.at(block * (MAX_TOKENS * chunk_bytes) + GROUP * group * chunk_bytes)

    def bias(self, biases: Value, row: Value, rows: int, step: int) -> Value | None:
        """The biases of 16 rows in fp32, zero from `rows` on."""
        kind = self.kernel.bias
        if kind is None:
            return None
        lanes = step * (GROUP - 1) + 1
        type_ = vec(f32 if kind == "f32" else i16, lanes)
        size = 4 if kind == "f32" else 2
        values = biases.at(row * (step * size)).load_masked(type_, step * (rows - 1) + 1)
        values = values.shuffle(range(0, lanes, step))
        return (
            values
            if kind == "f32"
            else (values.zext(vec(i32, GROUP)) << 16).bitcast(vec(f32, GROUP))
        )

    def token_blocks(self) -> AbstractContextManager[Value]:
        """A loop over the token blocks: only full ones come several at a time."""
        return self.b.loop(0, self.arg.blocks if self.kernel.tokens == MAX_TOKENS else 1)

    # The loop nest -----------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        kernel, b = self.kernel, self.b
        count = kernel.neighbours(self.isa)
        step = GROUP * count if kernel.format.direct else kernel.format.staged_rows
        whole = kernel.outputs // step * step
        matrices = len(kernel.blocks(self.arg, b.const(i64, 0), count))
        plan = self.isa.plan(self.groups, matrices)
        self.isa.configure(b, plan)
        with b.loop(self.arg.first_row, b.min(self.arg.end_row, whole), step) as row:
            if kernel.format.direct:
                self._direct(plan, row, count)
            else:
                self._staged(plan, row, step)
        with b.if_(self.arg.end_row.eq(kernel.outputs)):
            self._last_rows(self.isa.plan(self.groups, matrices // count), whole)
            kernel.finish(self)
        self.isa.release(b)

    def _last_rows(self, plan: TilePlan, whole: int) -> None:
        """The rows from `whole` on, which are fewer than a step."""
        kernel = self.kernel
        if not kernel.format.direct:
            if whole < kernel.outputs:
                self._staged(plan, self.b.const(i64, whole), kernel.outputs - whole)
            return
        for first in range(whole, kernel.outputs, GROUP):
            row = self.b.const(i64, first)
            if first + GROUP <= kernel.outputs:
                self._direct(plan, row, 1)
            else:
                self._staged(plan, row, kernel.outputs - first)

    def _direct(self, plan: TilePlan, row: Value, count: int) -> None:
        """`count` neighbouring blocks of 16 rows, read where they are; only the last k's are staged."""
        kernel, format_ = self.kernel, self.kernel.format
        sources = kernel.blocks(self.arg, row, count)
        edges = self.arg.scratch.at(_C_BYTES)
        tails = [edges.at(_EDGE * i) for i in range(len(sources))]
        whole = kernel.inputs // CHUNK * CHUNK
        if whole < kernel.inputs:
            format_.stage(self.b, sources, GROUP, whole, kernel.inputs, tails, 64)
        ahead = [source.at(plan.rows * count * format_.row_bytes) for source in sources]
        with self.token_blocks() as block:
            prefetcher = _Prefetcher(self, plan, row, ahead)
            stride, chunks = format_.row_bytes, whole // CHUNK
            self._multiply(plan, block, sources, stride, chunks, tails, prefetcher)
            kernel.epilogue(self, row, GROUP, count, block)

    def _staged(self, plan: TilePlan, row: Value, rows: int) -> None:
        """Up to `staged_rows` rows, written to scratch as plain rows first."""
        kernel, b = self.kernel, self.b
        panels = self.arg.scratch.at(_C_BYTES + 2 * _EDGE)
        stride = kernel.panel_stride
        sources = kernel.blocks(self.arg, row, 1)
        bases = [panels.at(kernel.format.staged_rows * stride * i) for i in range(len(sources))]
        kernel.format.stage(b, sources, rows, 0, kernel.inputs, bases, stride)

        def compute(first: Value, valid: int) -> None:
            blocks = [base.at(first * stride) for base in bases]
            with self.token_blocks() as block:
                nothing = _Prefetcher(self, plan, row, [])
                chunks = chunks_of(kernel.inputs)
                self._multiply(plan, block, blocks, stride, chunks, [], nothing)
                kernel.epilogue(self, row + first, valid, 1, block)

        whole, rest = rows // GROUP * GROUP, rows % GROUP
        with b.loop(0, whole, GROUP) as first:
            compute(first, GROUP)
        if rest:
            compute(b.const(i64, whole), rest)

    def _multiply(
        self,
        plan: TilePlan,
        block: Value,
        sources: list[Value],
        stride: int,
        chunks: int,
        tails: list[Value],
        prefetcher: _Prefetcher,
    ) -> None:
        """All C tiles of a row block and a token block: every pass over k, for every part of the rows."""
        b, kernel = self.b, self.kernel
        streaming = bool(tails) and kernel.tokens < MAX_TOKENS
        with b.loop(0, GROUP, plan.rows) as part:
            for one in plan.passes:
                with b.loop(0, one.groups) as group, b.loop(0, one.repeat) as number:
                    tokens = _Pass(self, plan, one, group, number, block, streaming)
                    with b.loop(0, chunks) as chunk:
                        prefetcher.step()
                        rows = [source.at(part * stride + chunk * 64) for source in sources]
                        tokens.step(rows, stride, chunk)
                    if tails and kernel.inputs % CHUNK:
                        rows = [tail.at(part * 64) for tail in tails]
                        tokens.step(rows, 64, b.const(i64, chunks))
                    tokens.store(part)


class _Pass:
    """The C tiles of one pass over k: zeroed at the beginning, stored at the end."""

    def __init__(
        self,
        e: _Emitter,
        plan: TilePlan,
        one: Pass,
        group: Value,
        number: Value,
        block: Value,
        streaming: bool,
    ) -> None:
        self.e, self.plan, self.tiles, self.streaming = e, plan, one.tiles, streaming
        inputs = e.kernel.inputs
        shift = number * (e.isa.layout.token_bytes * one.tiles[0].tokens)
        next_group = group * (GROUP * 64 * chunks_of(inputs)) + shift
        self.operands = [
            e.group(e.arg.operand, inputs, block, tile.group).at(next_group) for tile in one.tiles
        ]
        self.c_offset = group * _TILE + shift
        self.c = [
            [e.isa.accumulators(e.b, plan, tile, i, j) for j, tile in enumerate(one.tiles)]
            for i in range(plan.blocks)
        ]

    def step(self, rows: list[Value], stride: int, chunk: Value) -> None:
        """One chunk: A tiles at `rows`, `stride` bytes from row to row, times the operand's chunk number `chunk`."""
        e, isa, b, plan = self.e, self.e.isa, self.e.b, self.plan
        a = [isa.load_a(b, plan, i, at, stride, self.streaming) for i, at in enumerate(rows)]
        for j, tile in enumerate(self.tiles):
            at = self.operands[j].at(chunk * (64 * e.groups[tile.group]))
            v = isa.load_b(b, plan, tile, j, at)
            for i in range(plan.blocks):
                isa.dot(b, self.c[i][j], a[i], v)

    def store(self, part: Value) -> None:
        """To the scratch, as rows `part`… of their blocks."""
        e = self.e
        for i in range(self.plan.blocks):
            for j, tile in enumerate(self.tiles):
                into = e.c_tile(i, tile.group).at(self.c_offset)
                e.isa.store(e.b, self.plan, self.c[i][j], tile, into, part)


class _Prefetcher:
    """Asks for the rows to come, in memory order, while the current ones are multiplied.

    The rows of an A tile are read side by side, so what is ahead of them begins one tile further. Memory order matters:
    cache lines along a row stream, one line a row does not. The position is clamped to the end of the rows, where
    asking again costs nothing.
    """

    def __init__(self, e: _Emitter, plan: TilePlan, row: Value, ahead: list[Value]) -> None:
        lines = e.isa.prefetch_lines(plan)
        self.b = e.b
        self.ahead = ahead if lines else []
        if not self.ahead:
            return
        self.lines = -(-lines // len(ahead))
        rows = plan.rows * (len(ahead) if isinstance(e.kernel, Down) else 1)
        left = (e.arg.end_row - row - rows) * e.kernel.format.row_bytes
        self.last = e.b.max(left - 64 * self.lines, 0)
        self.offset: Var = e.b.var(i64, 0)

    def step(self) -> None:
        """What goes with one chunk."""
        if not self.ahead:
            return
        offset = self.offset.get()
        for address in self.ahead:
            for line in range(self.lines):
                address.at(offset + 64 * line).prefetch(2)
        self.offset.set(self.b.min(offset + 64 * self.lines, self.last))


def _signature(pointers: tuple[str, ...], *integers: str) -> dict[str, L.Type]:
    parameters: dict[str, L.Type] = dict.fromkeys(pointers, ptr)
    parameters |= dict.fromkeys((*integers, "first_row", "end_row", "blocks"), i64)
    return parameters | {"scratch": ptr}

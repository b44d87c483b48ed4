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

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.codegen.ir import L, Value, f32, i1, i32, i64, vec
from expertile.codegen.layouts import GROUP
from expertile.templates.formats.base import Matrix
from expertile.templates.gates import Gate
from expertile.templates.kernel import ExpertKernel, signature
from expertile.templates.loops import Emitter
from expertile.templates.sums import ByteSums, affine


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

    def ir(self) -> str:
        return str(Emitter(self).module)

    def parameters(self) -> dict[str, L.Type]:
        return signature(("gate", "up", "operand", "out", "next_gate", "next_up"))

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

    def epilogue(self, e: Emitter, row: Value, rows: int, count: int, block: Value) -> None:
        for neighbour in range(count):
            self._activate(e, row + GROUP * neighbour, rows, neighbour, block)

    def _activate(self, e: Emitter, row: Value, rows: int, first: int, block: Value) -> None:
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
                bytes_: ByteSums | None = bytes_,
            ) -> None:
                token = None
                if bytes_:
                    assert isinstance(at, int)  # rows have scales
                    token = bytes_.of_elements(at)
                halves = [
                    affine(tile.at(at).load(vec(f32, GROUP)), scale, bias, lanes, token)
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

    def finish(self, e: Emitter) -> None:
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

    def ir(self) -> str:
        return str(Emitter(self).module)

    def parameters(self) -> dict[str, L.Type]:
        pointers = ("matrix", "operand", "token", "router", "sums", "next_matrix")
        return signature(pointers, "sum_bytes")

    @property
    def names(self) -> tuple[str, ...]:
        return ("matrix",)

    def epilogue(self, e: Emitter, row: Value, rows: int, count: int, block: Value) -> None:
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
                    bytes_: ByteSums | None = bytes_,
                ) -> None:
                    slot = (before + token) * 4
                    router = b.splat(arg.router.at(slot).load(f32), GROUP)
                    number = arg.token.at(slot).load(i32).to(i64)
                    total = arg.sums.at(number * arg.sum_bytes + column)
                    y = affine(y, scale, bias, None, bytes_.of_token(token) if bytes_ else None)
                    if rows == GROUP:
                        total.store(b.fmuladd(router, y, total.load(y.type)))
                    else:
                        old = total.load_masked(y.type, rows)
                        total.store_masked(b.fmuladd(router, y, old), rows)

                e.isa.layout.each_token(b, e.c_tile(neighbour, group), tokens, add)

    def finish(self, e: Emitter) -> None:
        """Nothing: every row was added to its sums."""

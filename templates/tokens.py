"""The two ends of a layer: tokens gathered into operands, and sums turned into the output's dtype."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, L, Module, Value, f16, f32, i16, i32, i64, ptr, vec
from expertile.codegen.layouts import CHUNK, GROUP, round_to_bf16

_Words = vec(i32, GROUP)
_Chunk = vec(i16, CHUNK)


@dataclass(frozen=True)
class Gather:
    """Copy up to 16 tokens into an operand group, rounding to bf16 and transposing in registers on the way.

    void gather(x, token i32[], count, bytes between two tokens of x, group)
    """

    isa: str
    hidden: int
    dtype: str
    """Of x: "bf16", "f16" or "f32"."""

    @property
    def name(self) -> str:
        return f"gather_{self.dtype}_h{self.hidden}"

    def parameters(self) -> dict[str, L.Type]:
        return {"x": ptr, "token": ptr, "count": i64, "row_bytes": i64, "group": ptr}

    def ir(self) -> str:
        module = Module(self.name)
        full, rest = divmod(self.hidden, CHUNK)
        parts = [(0, full)] + ([(full, full + 1)] if rest else [])
        with module.function(self.name, self.parameters()) as (b, arg):

            def row(token: Value) -> Value:
                return self.row(arg, token)

            def read(address: Value, chunk: Value, part: int) -> Value:
                return self.words(b, address, chunk, rest if part else CHUNK)

            isas.by_name(self.isa).layout.pack(b, arg.count, row, parts, read, arg.group)
        return str(module)

    def row(self, arg: SimpleNamespace, token: Value) -> Value:
        """The address of a token."""
        return arg.x.at(arg.token.at(token * 4).load(i32).to(i64) * arg.row_bytes)

    def words(self, b: Builder, address: Value, chunk: Value, valid: int) -> Value:
        """32 elements of a token as 16 words of bf16 pairs, zero from `valid` on."""
        element = {"bf16": i16, "f16": f16, "f32": f32}[self.dtype]
        size = 4 if self.dtype == "f32" else 2
        source, type_ = address.at(chunk * (CHUNK * size)), vec(element, CHUNK)
        values = source.load(type_) if valid == CHUNK else source.load_masked(type_, valid)
        if self.dtype != "bf16":
            values = round_to_bf16(b, values.to(vec(f32, CHUNK))).to(_Chunk)
        return values.bitcast(_Words)


@dataclass(frozen=True)
class Finish:
    """Write fp32 sums as the output: void finish(sums, bytes a token, out, bytes a token, tokens, columns)."""

    isa: str
    dtype: str
    """Of the output: "bf16", "f16" or "f32"."""

    @property
    def name(self) -> str:
        return f"finish_{self.dtype}"

    def ir(self) -> str:
        module = Module(self.name)
        parameters = {
            "sums": ptr,
            "sum_bytes": i64,
            "out": ptr,
            "out_bytes": i64,
            "tokens": i64,
            "columns": i64,
        }
        size = 4 if self.dtype == "f32" else 2
        with module.function(self.name, parameters) as (b, arg):
            whole = (arg.columns >> 4) << 4
            with b.loop(0, arg.tokens) as token:
                sums, out = arg.sums.at(token * arg.sum_bytes), arg.out.at(token * arg.out_bytes)
                with b.loop(0, whole, GROUP) as column:
                    values = sums.at(column * 4).load(vec(f32, GROUP))
                    out.at(column * size).store(self.convert(b, values))
                with b.if_(whole < arg.columns):
                    values = sums.at(whole * 4).load(
                        vec(f32, GROUP)
                    )  # the sums' rows are padded to 16
                    out.at(whole * size).store_masked(self.convert(b, values), arg.columns - whole)
        return str(module)

    def convert(self, b: Builder, values: Value) -> Value:
        """16 sums as the output's dtype."""
        if self.dtype == "bf16":
            return round_to_bf16(b, values).to(vec(i16, GROUP))
        return values.to(vec(f16, GROUP)) if self.dtype == "f16" else values

"""What becomes of the finished sums of 16 rows: scales of rows and of tokens, and biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expertile.codegen.ir import Builder, Value, f32, i16, i32, vec
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.layouts import GROUP


@dataclass(frozen=True)
class ByteSums:
    """What a group of tokens has noted of itself behind its last chunk, see `isa.bytes`."""

    b: Builder
    isa: ByteIsa
    chunk: Value
    tokens: int

    def of_elements(self, offset: int) -> TokenSums:
        """Of the tokens of the 16 elements from byte `offset` of a stored C on."""
        layout = self.isa.layout
        return self._token(
            lambda number: layout.spread(self.b, self.chunk, self.tokens, number, offset // 4)
        )

    def of_token(self, token: Value) -> TokenSums:
        """Of a token, in 16 lanes."""
        word = self.isa.layout.word
        return self._token(
            lambda number: self.b.splat(
                word(self.chunk, self.tokens, token, number).load(i32), GROUP
            )
        )

    def _token(self, word: Callable[[int], Value]) -> TokenSums:
        return TokenSums(word(0).bitcast(vec(f32, GROUP)), word(1) if self.isa.offsets else None)


@dataclass(frozen=True)
class TokenSums:
    """The scale of a quantised token, and what its sums have too much; in 16 lanes."""

    scale: Value
    offset: Value | None

    def floats(self, sums: Value) -> Value:
        """int32 sums as fp32."""
        integers = sums.bitcast(vec(i32, GROUP))
        if self.offset is not None:
            integers = integers - self.offset
        return integers.to(vec(f32, GROUP))


def bias_of(
    b: Builder, kind: str | None, biases: Value, row: Value, rows: int, step: int
) -> Value | None:
    """The biases of 16 rows, `step` apart, in fp32: zero from `rows` on; None if there are no biases."""
    if kind is None:
        return None
    lanes = step * (GROUP - 1) + 1
    type_ = vec(f32 if kind == "f32" else i16, lanes)
    address = biases.at(row * (step * (4 if kind == "f32" else 2)))
    values = address.load_masked(type_, step * (rows - 1) + 1).shuffle(range(0, lanes, step))
    if kind == "f32":
        return values
    return (values.zext(vec(i32, GROUP)) << 16).bitcast(vec(f32, GROUP))


def affine(
    sums: Value,
    scale: Value | None,
    bias: Value | None,
    lanes: Sequence[int] | None = None,
    token: TokenSums | None = None,
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

"""Activations quantised to int8, each token with a scale of its own: for kernels that multiply bytes (`isa.bytes`).

From the numbers x of a token, which are bf16, in fp32:

    amax = max |x|     scale = amax / 127     inverse = 127 / amax     q = x · inverse, to the nearest (even) integer

A token whose amax is below 2⁻¹¹⁹ counts as zero: its scale and its q are 0 (so that no scale is denormal). If there is
a NaN or an infinity in it, the scale is NaN, and so will be all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, L, Module, Value, f32, i32, i64, ptr, vec
from expertile.codegen.isa.bytes import ByteIsa
from expertile.codegen.layouts import CHUNK, GROUP, Column
from expertile.templates.tokens import Gather

LARGEST = 127
SMALLEST = 2.0**-119
"""Of the largest number of a token that is not taken for zero."""

_Words = vec(i32, GROUP)
_Floats = vec(f32, GROUP)
_ROUND = 12582912.0  # 1.5 · 2^23: added to x, the low mantissa bits are the integer nearest to x
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class QuantizingGather(Gather):
    """Gather up to 16 tokens into an operand group as int8: once to see how large they are, once to quantise them.

    The signature is that of :class:`Gather`. The chunk behind the last one of the group gets what `isa.bytes` says.
    """

    @property
    def name(self) -> str:
        return f"quantize_{super().name}"

    def ir(self) -> str:
        isa = _machine(self.isa)
        layout, chunks = isa.layout, isa.chunks(self.hidden)
        full, rest = divmod(self.hidden, isa.chunk)
        parts = [(0, full)] + ([(full, full + 1)] if rest else [])
        module = Module(self.name)
        places = {"row": ptr, "scale": ptr}
        with module.function("measure", places, returns=f32, private=True) as (b, arg):
            b.ret(self._measure(b, arg.row, arg.scale))
        with module.function(self.name, self.parameters()) as (b, arg):
            last = arg.group.at(arg.count * (64 * chunks))

            def row(token: Value) -> tuple[Value, Value]:
                address = self.row(arg, token)
                into = layout.word(last, arg.count, token, 0)
                return address, b.splat(b.call("measure", f32, [address, into]), GROUP)

            def read(row: tuple[Value, Value], chunk: Value, part: int) -> Value:
                address, inverse = row
                words = self._words_of(b, address, chunk * 2, rest if part else isa.chunk)
                return quantize(b, *pairs(words), inverse)

            layout.pack(b, arg.count, row, parts, read, arg.group)
            if isa.offsets:

                def use(column: Column) -> None:
                    _keep_offsets(b, isa, column, chunks)

                layout.each_column(b, arg.count, arg.group, use)
        return str(module)

    def _measure(self, b: Builder, row: Value, into: Value) -> Value:
        """Write the scale of a token; its inverse."""
        whole, rest = divmod(self.hidden, CHUNK)
        largest = b.var(_Words, 0)
        with b.loop(0, whole) as chunk:
            largest.set(b.max(largest.get(), magnitude(b, self.words(b, row, chunk, CHUNK))))
        if rest:
            tail = self.words(b, row, b.const(i64, whole), rest)
            largest.set(b.max(largest.get(), magnitude(b, tail)))
        most = b.call("llvm.vector.reduce.smax.v16i32", i32, [largest.get()])
        scale, inverse = scales(b, most)
        into.store(scale)
        return inverse

    def _words_of(self, b: Builder, row: Value, chunk: Value, valid: int) -> list[Value]:
        """Two chunks of bf16, zero from `valid` on."""
        parts = [min(CHUNK, valid), max(0, valid - CHUNK)]
        return [
            self.words(b, row, chunk + i, part) if part else b.zero(_Words)
            for i, part in enumerate(parts)
        ]


@dataclass(frozen=True)
class Requantize:
    """Turn a group of an operand of bf16 into one of int8, in place: void requantize(group, count)."""

    isa: str
    columns: int

    @property
    def name(self) -> str:
        return f"requantize_i{self.columns}"

    def ir(self) -> str:
        isa = _machine(self.isa)
        chunks = isa.chunks(self.columns)
        module = Module(self.name)
        with module.function(self.name, {"group": ptr, "count": i64}) as (b, arg):

            def use(column: Column) -> None:
                _requantize(b, column, chunks)
                if isa.offsets:
                    _keep_offsets(b, isa, column, chunks)

            isa.layout.each_column(b, arg.count, arg.group, use)
        return str(module)


def _requantize(b: Builder, column: Column, chunks: int) -> None:
    largest = b.var(_Words, 0)
    with b.loop(0, column.steps(chunks)) as step:
        for words in column.read(step):
            largest.set(b.max(largest.get(), magnitude(b, words)))
    scale, inverse = scales(b, column.over_lanes("smax", largest.get()))
    with b.loop(0, column.steps(chunks)) as step:
        column.write(step, quantize(b, *column.read(step), inverse))
    column.keep(chunks, 0, scale)  # now: there were numbers in its place


def _keep_offsets(b: Builder, isa: ByteIsa, column: Column, chunks: int) -> None:
    """Write what a row of zeros gives, behind the scales."""
    sums = b.var(_Words, 0)
    with b.loop(0, column.steps(chunks)) as step:
        sums.set(isa.row_of_zeros(b, sums.get(), column.written(step)))
    column.keep(chunks, 1, column.over_lanes("add", sums.get()))


def _machine(name: str) -> ByteIsa:
    isa = isas.by_name(name)
    assert isinstance(isa, ByteIsa)
    return isa


# Numbers --------------------------------------------------------------------------------------------------------------


def magnitude(b: Builder, words: Value) -> Value:
    """The larger one of the absolute values of each bf16 pair, as the bits of fp32: they compare like integers."""
    low, high = ((each.bitcast(_Words) & 0x7FFFFFFF) for each in _floats(words))
    return b.max(low, high)


def scales(b: Builder, largest: Value) -> tuple[Value, Value]:
    """The scale and its inverse from the bits of the largest magnitude: a number, or one in each lane."""
    lanes = isinstance(largest.type, L.VectorType)
    amax = largest.bitcast(_Floats if lanes else f32)
    small = amax < SMALLEST
    scale = b.select(small, 0.0, amax / float(LARGEST))
    inverse = b.select(small, 0.0, float(LARGEST) / amax)
    return b.select(largest >= _INFINITY, float("nan"), scale), inverse


def pairs(words: Sequence[Value]) -> tuple[Value, Value]:
    """The even and the odd words of two vectors."""
    even, odd = (words[0].shuffle(range(i, 2 * GROUP, 2), words[1]) for i in range(2))
    return even, odd


def quantize(b: Builder, even: Value, odd: Value, inverse: Value) -> Value:
    """Words of four int8 from the bf16 pairs of the first and the last two."""
    numbers = [each for words in (even, odd) for each in _floats(words)]
    bits = [(each * inverse + _ROUND).bitcast(_Words) for each in numbers]
    result = bits[3] << 24
    for place, each in enumerate(bits[:3]):
        result = result | (each & 255) << 8 * place
    return result


def _floats(words: Value) -> tuple[Value, Value]:
    """The first and the second number of bf16 pairs."""
    return (words << 16).bitcast(_Floats), (words & -65536).bitcast(_Floats)

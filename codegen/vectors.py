"""What weight formats need of a vector unit beyond plain arithmetic: table lookups, and rounding to bf16.

All implementations give the same bits; `Avx512` does with one or two instructions what `Plain` does lane by lane.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

from expertile.codegen import cpu
from expertile.codegen.ir import Builder, Value, bf16, element_bytes, f32, i8, i16, i32, i64, vec
from expertile.codegen.layouts import GROUP, round_to_bf16

Halves = vec(i16, 32)
Words = vec(i32, 16)
Floats = vec(f32, 16)

_SIGN = 1 << 15
_MAGNITUDES = [
    struct.unpack("<I", struct.pack("<f", float(magnitude or 128)))[0] >> 16
    for magnitude in range(128)
]
"""What |q| is as bf16, modulo 128: 0 stands for 128."""


class Vectors(ABC):
    """A vector unit."""

    @abstractmethod
    def lookup(self, b: Builder, table: Value, index: Value) -> Value:
        """table[index mod n] in each of n = 16 or 32 lanes: i16 vectors."""

    @abstractmethod
    def lookup_halves(self, b: Builder, low: Value, high: Value, index: Value) -> Value:
        """low[index mod 16] in 16 lanes, high[index mod 16] in 16 more: both tables have their 16 entries twice."""

    @abstractmethod
    def pack_bf16(self, b: Builder, low: Value, high: Value) -> Value:
        """Two fp32 vectors as 16 words of bf16 pairs, those of `low` first.

        To nearest even; denormals become a zero of their sign, as VCVTNE2PS2BF16 has it; NaN stays NaN.
        """

    def broadcast(self, b: Builder, address: Value) -> Value:
        """The fp32 number at an address in 16 lanes."""
        return b.splat(address.load(f32), GROUP)

    def spread(self, b: Builder, number: Value) -> Value:
        """An fp32 number in 16 lanes."""
        return b.splat(number, GROUP)

    def affine(self, b: Builder, x: Value, factor: Value, less: Value) -> Value:
        """x · f − l in 16 lanes of fp32, where the products are exact; the numbers f and l are at addresses."""
        return x * self.broadcast(b, factor) - self.broadcast(b, less)

    @abstractmethod
    def decode_bytes(self, b: Builder, table: Sequence[int], codes: Value) -> Value:
        """table[code] in each of 32 lanes: 256 numbers of 16 bits, codes an i8 vector."""

    @abstractmethod
    def decode_signed(self, b: Builder, table: Value, codes: Value) -> Value:
        """The same for codes whose highest bit flips the highest bit of the number: a table of the 128 others.

        It is at an address, a multiple of 64, in two halves as `halves` makes them.
        """

    def decode_signed_twice(
        self, b: Builder, table: Value, first: Value, second: Value
    ) -> tuple[Value, Value]:
        """The same for two vectors of codes, which may take less than twice the work."""
        return self.decode_signed(b, table, first), self.decode_signed(b, table, second)

    def integers_twice(self, b: Builder, first: Value, second: Value) -> tuple[Value, Value]:
        """32 int8 and 32 more as bf16 bits."""
        low, high = (
            [
                codes.shuffle(range(start, start + GROUP)).to(Words).to(Floats)
                for start in (0, GROUP)
            ]
            for codes in (first, second)
        )
        return self.pack_bf16(b, *low).bitcast(Halves), self.pack_bf16(b, *high).bitcast(Halves)


def opaque(x: Value) -> Value:
    """The same vector, of which LLVM does not know how it came about, and so makes nothing else of it."""
    lanes = x.lanes * element_bytes(x.type) // element_bytes(f32)
    type_ = vec(f32, lanes)
    fenced = x.b.call(f"llvm.arithmetic.fence.v{lanes}f32", type_, [x.bitcast(type_)])
    return fenced.bitcast(x.type)


def halves(table: Sequence[int]) -> bytes:
    """The low bytes of numbers of 16 bits, then their high bytes."""
    return bytes(entry >> shift & 255 for shift in (0, 8) for entry in table)


class Plain(Vectors):
    """Any target: tables are in memory, and lanes are looked up one by one."""

    def lookup(self, b: Builder, table: Value, index: Value) -> Value:
        memory = b.buffer(2 * index.lanes)
        memory.store(table)
        return _gather(b, memory, index & index.lanes - 1)

    def lookup_halves(self, b: Builder, low: Value, high: Value, index: Value) -> Value:
        table = low.shuffle([*range(16), *range(32, 48)], high)
        upper = b.const(Halves, [lane & 16 for lane in range(32)])
        return self.lookup(b, table, index & 15 | upper)

    def pack_bf16(self, b: Builder, low: Value, high: Value) -> Value:
        both = [_flushed(b, x).to(vec(i16, 16)) for x in (low, high)]
        return both[0].shuffle(range(32), both[1]).bitcast(Words)

    def decode_bytes(self, b: Builder, table: Sequence[int], codes: Value) -> Value:
        return _gather(b, _constant(b, table), codes.zext(Halves))

    def decode_signed(self, b: Builder, table: Value, codes: Value) -> Value:
        low, high = (
            _gather(b, table.at(offset), (codes & 127).zext(Halves), i8) for offset in (0, 128)
        )
        numbers = low.zext(Halves) | high.zext(Halves) << 8
        return numbers ^ (codes & -128).zext(Halves) << 8


class Avx512(Vectors):
    """AVX-512 with its bf16 conversion: VPERMW, VCVTNE2PS2BF16, and VPERMI2B if the CPU has VBMI."""

    def __init__(self, bytes_: bool) -> None:
        self._bytes = bytes_

    def lookup(self, b: Builder, table: Value, index: Value) -> Value:
        name = f"llvm.x86.avx512.permvar.hi.{16 * index.lanes}"
        return b.call(name, index.type, [table, index])

    def lookup_halves(self, b: Builder, low: Value, high: Value, index: Value) -> Value:
        # 16 lanes are looked up in half the time of 32; the others are written over them by a mask.
        parts = (x.shuffle(range(16)) for x in (low, index))
        first = self.lookup(b, *parts).shuffle(range(32))
        # Of a mask that LLVM sees through it would make a shuffle instead.
        mask = opaque(b.const(vec(i8, 32), [0] * 16 + [-1] * 16)) < 0
        return b.select(mask, self.lookup(b, high, index), first)

    def pack_bf16(self, b: Builder, low: Value, high: Value) -> Value:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return b.call(name, vec(bf16, 32), [high, low]).bitcast(Words)

    def broadcast(self, b: Builder, address: Value) -> Value:
        # LLVM has VBROADCASTSS for floats, which takes a shuffle; this takes none.
        return b.load_by("vpbroadcastd", Words, address).bitcast(Floats)

    def spread(self, b: Builder, number: Value) -> Value:
        # By way of memory, for the same reason. What is read back as it was written is there at once.
        memory = b.buffer(4, align=4)
        memory.store(number)
        return self.broadcast(b, memory)

    def affine(self, b: Builder, x: Value, factor: Value, less: Value) -> Value:
        # One of the numbers is broadcast by the instruction itself.
        return b.fma(x, self.broadcast(b, factor), -b.splat(less.load(f32), GROUP))

    def decode_bytes(self, b: Builder, table: Sequence[int], codes: Value) -> Value:
        if not self._bytes:
            return PLAIN.decode_bytes(b, table, codes)
        first, second = (b.constant_bytes(halves(half)) for half in (table[:128], table[128:]))
        if all(low ^ _SIGN == high for low, high in zip(table[:128], table[128:], strict=True)):
            return self.decode_signed(b, first, codes)
        twice = _twice(codes)
        entries = (self._entries(b, table_, twice) for table_ in (second, first))
        return b.select(twice < 0, *entries).bitcast(Halves)

    def decode_signed(self, b: Builder, table: Value, codes: Value) -> Value:
        if not self._bytes:
            return PLAIN.decode_signed(b, table, codes)
        twice = _twice(codes)
        sign = b.const(vec(i8, 64), [0, -128] * 32)
        return (self._entries(b, table, twice) ^ (twice & sign)).bitcast(Halves)

    def decode_signed_twice(
        self, b: Builder, table: Value, first: Value, second: Value
    ) -> tuple[Value, Value]:
        if not self._bytes:
            return super().decode_signed_twice(b, table, first, second)
        codes = _interleaved(first, second)
        low, high = (self._permute(b, table.at(offset), codes) for offset in (0, 128))
        return _zipped(low, high ^ (codes & -128))

    def integers_twice(self, b: Builder, first: Value, second: Value) -> tuple[Value, Value]:
        if not self._bytes:
            return super().integers_twice(b, first, second)
        codes = _interleaved(first, second)
        magnitudes = b.select(codes < 0, -codes, codes)
        table = b.constant_bytes(halves(_MAGNITUDES))
        low, high = (self._permute(b, table.at(offset), magnitudes) for offset in (0, 128))
        high = b.select(codes.ne(0), high ^ (codes & -128), b.zero(high.type))
        return _zipped(low, high)

    def _entries(self, b: Builder, table: Value, twice: Value) -> Value:
        """The low bytes of 128 entries in even lanes and the high bytes in odd ones, by the low 7 bits of `twice`."""
        low, high = (self._permute(b, table.at(offset), twice) for offset in (0, 128))
        return low.shuffle([lane + 64 * (lane & 1) for lane in range(64)], high)

    def _permute(self, b: Builder, table: Value, index: Value) -> Value:
        parts = [table.at(offset).load(vec(i8, 64), align=64) for offset in (0, 64)]
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return b.call(name, vec(i8, 64), [parts[0], index, parts[1]])


PLAIN: Vectors = Plain()


@cache
def host() -> Vectors:
    """The vector unit of this machine."""
    found = cpu.host()
    if all(found.has(feature) for feature in ("avx512bw", "avx512bf16")):
        return Avx512(bytes_=found.has("avx512vbmi"))
    return PLAIN


def _gather(b: Builder, memory: Value, index: Value, element: Any = i16) -> Value:
    """The elements at `index` (an i16 vector) in memory."""
    result = b.zero(vec(element, index.lanes))
    for lane in range(index.lanes):
        address = memory.at(index.extract(lane).zext(i64) * element_bytes(element))
        result = result.insert(lane, address.load(element))
    return result


def _interleaved(first: Value, second: Value) -> Value:
    """32 bytes each as 64: 8 of the first, 8 of the second and so on."""
    # Of loads it would make broadcasts, as if they cost nothing: they take the time of a shuffle.
    parts = [opaque(x).bitcast(vec(i64, 4)) for x in (first, second)]
    return parts[0].shuffle([0, 4, 1, 5, 2, 6, 3, 7], parts[1]).bitcast(vec(i8, 64))


def _zipped(low: Value, high: Value) -> tuple[Value, Value]:
    """What the low and high bytes of 64 interleaved numbers make: within 128 bits, as VPUNPCKLBW does it."""
    places = [lane // 16 * 16 + lane % 16 // 2 + lane % 2 * 64 for lane in range(64)]
    even, odd = (low.shuffle([place + shift for place in places], high) for shift in (0, 8))
    return even.bitcast(Halves), odd.bitcast(Halves)


def _twice(codes: Value) -> Value:
    """Each code in two lanes: one for each byte of what it stands for."""
    return codes.shuffle([lane // 2 for lane in range(64)])


def _constant(b: Builder, table: Sequence[int]) -> Value:
    return b.constant_bytes(struct.pack(f"<{len(table)}H", *table))


def _flushed(b: Builder, x: Value) -> Value:
    """fp32 → bf16 bits in i32 lanes, denormals as zeros of their sign."""
    bits = x.bitcast(vec(i32, x.lanes))
    normal = (bits & 0x7F800000).ne(0)
    return b.select(normal, round_to_bf16(b, x), (bits >> 16) & 0x8000)

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
from expertile.codegen.layouts import round_to_bf16

Halves = vec(i16, 32)
Words = vec(i32, 16)
Floats = vec(f32, 16)

_SIGN = 1 << 15


class Vectors(ABC):
    """A vector unit."""

    @abstractmethod
    def lookup(self, b: Builder, table: Value, index: Value) -> Value:
        """table[index mod 32] in each of 32 lanes: i16 vectors."""

    @abstractmethod
    def pack_bf16(self, b: Builder, low: Value, high: Value) -> Value:
        """Two fp32 vectors as 16 words of bf16 pairs, those of `low` first.

        To nearest even; denormals become a zero of their sign, as VCVTNE2PS2BF16 has it; NaN stays NaN.
        """

    @abstractmethod
    def decode_bytes(self, b: Builder, table: Sequence[int], codes: Value) -> Value:
        """table[code] in each of 32 lanes: 256 numbers of 16 bits, codes an i8 vector."""

    @abstractmethod
    def decode_signed(self, b: Builder, table: Value, codes: Value) -> Value:
        """The same for codes whose highest bit flips the highest bit of the number: a table of the 128 others.

        It is at an address, a multiple of 64, in two halves as `halves` makes them.
        """


def halves(table: Sequence[int]) -> bytes:
    """The low bytes of numbers of 16 bits, then their high bytes."""
    return bytes(entry >> shift & 255 for shift in (0, 8) for entry in table)


class Plain(Vectors):
    """Any target: tables are in memory, and lanes are looked up one by one."""

    def lookup(self, b: Builder, table: Value, index: Value) -> Value:
        memory = b.buffer(64)
        memory.store(table)
        return _gather(b, memory, index & 31)

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
        return b.call("llvm.x86.avx512.permvar.hi.512", Halves, [table, index])

    def pack_bf16(self, b: Builder, low: Value, high: Value) -> Value:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return b.call(name, vec(bf16, 32), [high, low]).bitcast(Words)

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
    result = b.zero(vec(element, 32))
    for lane in range(32):
        address = memory.at(index.extract(lane).zext(i64) * element_bytes(element))
        result = result.insert(lane, address.load(element))
    return result


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

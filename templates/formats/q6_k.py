"""q6_K, of GGUF files (llama.cpp, `block_q6_K`): codes of 6 bits in blocks of 256, a scale for each 16.

A row is K/256 blocks of 210 bytes; each of the two halves of a block, which are four runs of 32 elements, has

    0    64 bytes of the low four bits of the codes q (the second half at 64): the low halves of the bytes are runs 0
         and 1, their high halves runs 2 and 3
    128  32 bytes of the high two bits (the second half at 160): run r has bits 2r and 2r + 1
    192  8 int8 scales sc (the second half at 200), two a run
    208  fp16 d, of the whole block

An element is d·sc·(q − 32), exact in fp32 (11 + 7 + 5 bits at most); it is rounded to bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, f32, i8, i16, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Halves, Vectors
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.blocks import Blocks
from expertile.templates.formats.quantized import Floats, load_number

_BLOCK, _BYTES = 256, 210
_HIGH, _SCALES, _FACTOR = 128, 192, 208
"""Where they are in a block."""


@dataclass(frozen=True)
class Q6K(Blocks):
    """Blocks of 256, scales in them."""

    name = "q6_K"
    halves = (208,)
    block_bytes = _BYTES
    block = _BLOCK
    unit = _BLOCK // CHUNK
    decode_cycles = 7.0
    stage_cycles = 7.0
    carry_cycles = 6.5

    def block_values(self, blocks: np.ndarray) -> np.ndarray:
        halves = (*blocks.shape[:2], 2)
        low = blocks[..., :_HIGH].reshape(*halves, 2, CHUNK)
        low = np.concatenate([low & 15, low >> 4], axis=-2)
        high = blocks[..., _HIGH:_SCALES].reshape(*halves, 1, CHUNK)
        high = high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        q = (low | high << 4).reshape(*blocks.shape[:2], 16, GROUP).astype(np.int64) - 32
        sc = blocks[..., _SCALES:_FACTOR].view(np.int8)
        d = blocks[..., _FACTOR:].view(np.float16).astype(np.float64)
        return (d * sc)[..., None] * q

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        (words,) = self.decoder(b, vectors, matrix, row, chunk)(chunk)
        return words

    def decoder(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, first: Value
    ) -> Callable[[Value], Iterable[Value]]:
        codes, factors = b.buffer(_BLOCK), b.buffer(4 * GROUP)
        _unpack(b, matrix.codes.at(row * self.row_bytes).at((first >> 3) * _BYTES), codes, factors)
        return lambda chunk: [_words(b, vectors, codes, factors, chunk & 7)]

    def stage_row(
        self,
        b: Builder,
        vectors: Vectors,
        matrix: Matrix,
        row: Value | int,
        first: int,
        end: int,
        into: Value,
    ) -> None:
        # All blocks first, so that nothing is read back as soon as it was written.
        first_block, count = first // _BLOCK, (end - first) // _BLOCK
        blocks = matrix.codes.at(row * self.row_bytes).at(first_block * _BYTES)
        codes, factors = b.buffer(_BLOCK * count), b.buffer(4 * GROUP * count)
        with b.loop(0, count) as number:
            places = codes.at(number * _BLOCK), factors.at(number * (4 * GROUP))
            _unpack(b, blocks.at(number * _BYTES), *places)
        with b.loop(0, (end - first) // CHUNK) as chunk:
            into.at(chunk * (2 * CHUNK)).store(_words(b, vectors, codes, factors, chunk))


def _unpack(b: Builder, block: Value, codes: Value, factors: Value) -> None:
    """Write q − 32 of a block as 256 bytes, and d · sc as 16 fp32 numbers.

    From memory a broadcast costs no shuffle, and widening only one.
    """
    scales = _floats(block.at(_SCALES).load(vec(i8, GROUP)))
    factors.store(scales * b.splat(load_number(b, block.at(_FACTOR), "float16"), GROUP))
    for pair in range(4):
        codes.at(pair * (2 * CHUNK)).store(_two_runs(b, block, pair))


def _words(b: Builder, vectors: Vectors, codes: Value, factors: Value, run: Value) -> Value:
    """A run of what `_unpack` wrote."""
    low, high = (
        _floats(codes.at(run * CHUNK + GROUP * i).load(vec(i8, GROUP)))
        * b.splat(factors.at(run * 8 + 4 * i).load(f32), GROUP)
        for i in (0, 1)
    )
    return vectors.pack_bf16(b, low, high)


def _two_runs(b: Builder, block: Value, pair: int) -> Value:
    """q − 32 of runs 2 · pair and 2 · pair + 1: an i8 vector."""
    half, upper = divmod(pair, 2)
    low = block.at(half * 64).load(Halves, align=1)
    high = block.at(half * CHUNK + _HIGH).load(vec(i16, GROUP), align=1)
    high = high.shuffle([*range(GROUP), *range(GROUP)])
    if upper:
        low, high = low >> 4, high >> b.const(Halves, [0] * GROUP + [2] * GROUP)
    else:
        high = high << b.const(Halves, [4] * GROUP + [2] * GROUP)
    return (low & 0x0F0F | high & 0x3030).bitcast(vec(i8, 2 * CHUNK)) - 32


def _floats(numbers: Value) -> Value:
    """16 numbers of 8 bits as fp32."""
    return numbers.to(vec(i32, GROUP)).to(Floats)


SCHEMES = {"q6_K": Q6K()}

"""q4_K, of GGUF files (llama.cpp, `block_q4_K`): codes of 4 bits in blocks of 256, a scale and a minimum for each 32.

A row is K/256 blocks of 144 bytes:

    0    fp16 d, fp16 dmin
    4    8 scales sc and 8 minima m of 6 bits in 12 bytes: byte j < 4 has sc[j], byte 4 + j has m[j], and byte 8 + j the
         low four bits of sc[4 + j] and of m[4 + j], whose two high bits are those of bytes j and 4 + j
    16   128 bytes of codes q: the low halves of 32 bytes are a run of 32 elements, their high halves the next one

An element is d·sc·q − dmin·m.  Both products are exact in fp32 (11 + 6 + 4 bits at most); the difference is rounded to
fp32, and that to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, f16, f32, i8, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Halves, Vectors, Words, opaque
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.blocks import Blocks
from expertile.templates.formats.quantized import Floats

_BLOCK, _BYTES = 256, 144
_RUNS = _BLOCK // CHUNK
_SCALES, _CODES = 4, 16
"""Where they are in a block."""


@dataclass(frozen=True)
class Q4K(Blocks):
    """Blocks of 256, scales and minima in them."""

    name = "q4_K"
    halves = (0, 2)
    block_bytes = _BYTES
    block = _BLOCK
    unit = _RUNS
    step = 2
    decode_cycles = 4.1
    stage_cycles = 3.6
    carry_cycles = 3.4

    def block_values(self, blocks: np.ndarray) -> np.ndarray:
        d, dmin = np.moveaxis(blocks[..., :_SCALES].view(np.float16).astype(np.float64), -1, 0)
        low, high, last = np.split(blocks[..., _SCALES:_CODES], 3, axis=-1)
        sc = np.concatenate([low & 63, last & 15 | low >> 6 << 4], axis=-1)
        m = np.concatenate([high & 63, last >> 4 | high >> 6 << 4], axis=-1)
        pairs = blocks[..., _CODES:].reshape(*blocks.shape[:2], 4, 1, CHUNK)
        q = np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:2], 8, CHUNK)
        scale, minimum = d[..., None] * sc, dmin[..., None] * m
        return scale[..., None] * q - minimum[..., None]

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        low, high = self.decoder(b, vectors, matrix, row, chunk)(chunk & -2)
        return b.select((chunk & 1).eq(0), low, high)

    def decoder(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, first: Value
    ) -> Callable[[Value], Iterable[Value]]:
        block = matrix.codes.at(row * self.row_bytes).at((first >> 3) * _BYTES)
        factors = b.buffer(4 * GROUP)
        factors.store(_factors(b, block))
        return lambda chunk: _two_runs(b, vectors, block, factors, (chunk & 7) >> 1)

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
        # The factors of all blocks first, so that none is read back as soon as it was written.
        first_block, count = first // _BLOCK, (end - first) // _BLOCK
        blocks = matrix.codes.at(row * self.row_bytes).at(first_block * _BYTES)
        all_factors = b.buffer(4 * GROUP * count)
        with b.loop(0, count) as number:
            all_factors.at(number * (4 * GROUP)).store(_factors(b, blocks.at(number * _BYTES)))
        with b.loop(0, count) as number:
            block, factors = blocks.at(number * _BYTES), all_factors.at(number * (4 * GROUP))
            for pair in range(4):
                for i, words in enumerate(_two_runs(b, vectors, block, factors, pair)):
                    into.at(number * (2 * _BLOCK) + 2 * CHUNK * (2 * pair + i)).store(words)


def _factors(b: Builder, block: Value) -> Value:
    """d · sc of the 8 runs of a block and then dmin · m: 16 fp32 lanes."""
    header = block.load(vec(i32, 4), align=1)  # d and dmin, bytes 0…3, 4…7 and 8…11
    low = header.shuffle([1, 3, 2, 3]) >> b.const(vec(i32, 4), [0, 0, 0, 4])
    low = low & b.const(vec(i32, 4), [0x3F3F3F3F, 0x0F0F0F0F] * 2)
    high = header.shuffle([1, 1, 2, 2]) >> 2 & b.const(vec(i32, 4), [0, 0x30303030] * 2)
    numbers = (low | high).bitcast(vec(i8, 16)).zext(vec(i32, GROUP)).to(Floats)
    # With the bytes behind them: to convert four numbers takes less than to convert sixteen.
    factors = opaque(block.load(vec(f16, 4), align=1).to(vec(f32, 4)))
    return numbers * factors.shuffle([0] * _RUNS + [1] * _RUNS)


def _two_runs(
    b: Builder, vectors: Vectors, block: Value, factors: Value, pair: Value | int
) -> Iterator[Value]:
    """The words of runs 2 · pair and 2 · pair + 1, from the address of a block's factors.

    There a broadcast costs no shuffle.  The tables of both runs are rounded at once; the second one comes first, as its
    codes are what a shift leaves.
    """
    q = b.const(Floats, list(range(GROUP)))
    places = (factors.at(pair * 8 + 4 * i) for i in (0, 1))
    low, high = (vectors.affine(b, q, place, place.at(4 * _RUNS)) for place in places)
    table = vectors.pack_bf16(b, high, low).bitcast(Halves)
    codes = block.at(pair * CHUNK + _CODES).load(vec(i8, CHUNK)).zext(Halves)
    yield vectors.lookup(b, table, codes & 15 | 16).bitcast(Words)
    yield vectors.lookup(b, table, codes >> 4).bitcast(Words)


SCHEMES = {"q4_K": Q4K()}

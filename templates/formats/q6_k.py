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

from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, f32, i8, i16, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Halves, Vectors
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.quantized import Floats, Part, Quantized, load_number

_BLOCK, _BYTES = 256, 210
_HIGH, _SCALES, _FACTOR = 128, 192, 208
"""Where they are in a block."""


@dataclass(frozen=True)
class Q6K(Quantized):
    """Blocks of 256, scales in them."""

    name = "q6_K"
    halves = (208,)
    block = _BLOCK
    decode_cycles = 7.5

    def code_bytes(self, columns: int) -> int:
        return columns // _BLOCK * _BYTES

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"codes": Part((rows, self.code_bytes(columns)), ("uint8",))}

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        blocks = np.ascontiguousarray(codes).reshape(len(codes), columns // _BLOCK, _BYTES)
        halves = (*blocks.shape[:2], 2)
        low = blocks[..., :_HIGH].reshape(*halves, 2, CHUNK)
        low = np.concatenate([low & 15, low >> 4], axis=-2)
        high = blocks[..., _HIGH:_SCALES].reshape(*halves, 1, CHUNK)
        high = high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        q = (low | high << 4).reshape(*blocks.shape[:2], 16, GROUP).astype(np.int64) - 32
        sc = blocks[..., _SCALES:_FACTOR].view(np.int8)
        d = blocks[..., _FACTOR:].view(np.float16).astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 · ∞ is NaN, as in a kernel
            return ((d * sc)[..., None] * q).reshape(len(codes), columns)

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        block = matrix.codes.at(row * self.row_bytes).at((chunk >> 3) * _BYTES)
        run = chunk & 7
        codes = _run(b, block, run)
        factors = block.at(run * 2 + _SCALES).load(vec(i8, 2)).to(vec(i32, 2)).to(vec(f32, 2))
        factors = factors * b.splat(load_number(b, block.at(_FACTOR), "float16"), 2)
        low, high = (
            _floats(codes.shuffle(range(GROUP * i, GROUP * (i + 1)))) * factors.shuffle([i] * GROUP)
            for i in (0, 1)
        )
        return vectors.pack_bf16(b, low, high)

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
        # All codes and factors first, to memory: from there a broadcast costs no shuffle, and widening only one.
        first_block, count = first // _BLOCK, (end - first) // _BLOCK
        blocks = matrix.codes.at(row * self.row_bytes).at(first_block * _BYTES)
        codes, factors = b.buffer(_BLOCK * count), b.buffer(4 * GROUP * count)
        with b.loop(0, count) as number:
            block = blocks.at(number * _BYTES)
            scales = _floats(block.at(_SCALES).load(vec(i8, GROUP)))
            factor = b.splat(load_number(b, block.at(_FACTOR), "float16"), GROUP)
            factors.at(number * (4 * GROUP)).store(scales * factor)
            for pair in range(4):
                codes.at(number * _BLOCK + pair * (2 * CHUNK)).store(_two_runs(b, block, pair))
        with b.loop(0, (end - first) // CHUNK) as chunk:
            low, high = (
                _floats(codes.at(chunk * CHUNK + GROUP * i).load(vec(i8, GROUP)))
                * b.splat(factors.at(chunk * 8 + 4 * i).load(f32), GROUP)
                for i in (0, 1)
            )
            into.at(chunk * (2 * CHUNK)).store(vectors.pack_bf16(b, low, high))


def _run(b: Builder, block: Value, run: Value) -> Value:
    """q − 32 of one of a block's 8 runs: an i8 vector."""
    half, run = run >> 2, run & 3
    pairs = vec(i16, CHUNK // 2)  # of bytes, shifted together: what crosses over is masked
    low = block.at(half * 64 + (run & 1) * CHUNK).load(pairs, align=1)
    high = block.at(half * CHUNK + _HIGH).load(pairs, align=1)
    low = low >> b.splat(((run & 2) << 1).to(i16), CHUNK // 2) & 0x0F0F
    high = (high >> b.splat((run << 1).to(i16), CHUNK // 2) & 0x0303) << 4
    return (low | high).bitcast(vec(i8, CHUNK)) - 32


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

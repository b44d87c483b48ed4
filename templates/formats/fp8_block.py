"""fp8 in blocks: float8_e4m3fn with a scale for each 128 rows by 128 columns.

    codes    float8_e4m3fn [N, K]
    scales   float32, bfloat16 or float16 [ceil(N/128), ceil(K/128)], "weight_scale_inv" in checkpoints

The value is e4m3 · s: the scale **multiplies**, whatever its name says.  DeepSeek-V3, Qwen3 FP8 and others hold this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i16, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, Words
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.fp8 import scaled, scaled_words
from expertile.templates.formats.quantized import (
    E4M3,
    SCALE_BYTES,
    Floats,
    Part,
    Quantized,
    by_twos,
    numbers,
    splat_number,
)

_SIDE = 128
"""Rows and columns of a block."""
_SIDE_CHUNKS = _SIDE // CHUNK


@dataclass(frozen=True)
class Fp8Block(Quantized):
    """A scale for each block of 128 by 128; N and K need not be multiples of 128.

    A weight is e4m3 · s, formed in fp32 and rounded to bf16: it is off by up to 2⁻⁸ of itself (products in a layer by
    less than 4e-3).
    """

    scale: str = "float32"
    """The dtype of the scales: float32, bfloat16 or float16, or float8_e8m0fnu, exact powers of two."""

    name = "fp8_block"
    shared_rows = _SIDE
    unit = _SIDE_CHUNKS
    decode_cycles = 4.1
    crowded_cycles = 1.5
    stage_cycles = 3.7
    carry_cycles = 3.9

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, columns), ("float8_e4m3fn",)),
            "scales": Part((-(-rows // _SIDE), -(-columns // _SIDE)), (self.scale,)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns

    def scale_bytes(self, columns: int) -> int:
        return -(-columns // _SIDE) * SCALE_BYTES[self.scale]

    def offsets(self, row: Any) -> tuple[Any, Any]:
        return row * self.row_bytes, row // _SIDE * self.scale_row_bytes

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        assert scales is not None
        rows, columns = codes.shape
        blocks = numbers(scales, self.scale).repeat(_SIDE, 0).repeat(_SIDE, 1)
        return scaled(codes, blocks[:rows, :columns])

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK)
        return scaled_words(
            b, vectors, codes, self._scale(b, vectors, matrix, chunk // _SIDE_CHUNKS)
        )

    def decoders(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], first: Value
    ) -> list[Callable[[Value], Iterable[Value]]]:
        """With a table of what the codes are worth in a block, which all rows share."""
        table = b.buffer(256)
        _write_table(b, vectors, self._scale(b, vectors, matrix, first // _SIDE_CHUNKS), table)
        places = [matrix.codes.at(row * self.row_bytes) for row in rows]
        return by_twos(
            places,
            lambda two, chunk: _both(b, vectors, table, [place.at(chunk * CHUNK) for place in two]),
            lambda place, chunk: _decode(b, vectors, table, place.at(chunk * CHUNK)),
        )

    def stage_rows(
        self,
        b: Builder,
        vectors: Vectors,
        matrix: Matrix,
        rows: int,
        first: int,
        end: int,
        into: Value,
        stride: int,
    ) -> None:
        """Block by block, with a table of what the codes are worth in it."""
        table = b.buffer(256)
        start, stop = first // CHUNK, end // CHUNK
        with b.loop(first // _SIDE, -(-end // _SIDE)) as block:
            _write_table(b, vectors, self._scale(b, vectors, matrix, block), table)
            chunks = (
                b.max(block * _SIDE_CHUNKS, start),
                b.min((block + 1) * _SIDE_CHUNKS, stop),
            )
            even = rows // 2 * 2
            with b.loop(0, even, 2) as row, b.loop(*chunks) as chunk:
                codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK)
                target = into.at(row * stride + (chunk - start) * (2 * CHUNK))
                both = _both(b, vectors, table, (codes, codes.at(self.row_bytes)))
                for place, words in zip((target, target.at(stride)), both, strict=True):
                    place.store(words)
            with b.loop(even, rows) as row, b.loop(*chunks) as chunk:
                codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK)
                words = _decode(b, vectors, table, codes)
                into.at(row * stride + (chunk - start) * (2 * CHUNK)).store(words)

    def _scale(self, b: Builder, vectors: Vectors, matrix: Matrix, block: Value) -> Value:
        """In 16 lanes. The 16 rows from where `matrix` begins are all in one row of blocks."""
        return splat_number(
            b, vectors, matrix.scales.at(block * SCALE_BYTES[self.scale]), self.scale
        )


def _decode(b: Builder, vectors: Vectors, table: Value, codes: Value) -> Value:
    """The chunk at an address, by its block's table."""
    return vectors.decode_signed(b, table, codes.load(vec(i8, CHUNK))).bitcast(Words)


def _both(b: Builder, vectors: Vectors, table: Value, codes: Sequence[Value]) -> list[Value]:
    """The same of two rows in the same block."""
    both = (place.load(vec(i8, CHUNK)) for place in codes)
    return [words.bitcast(Words) for words in vectors.decode_signed_twice(b, table, *both)]


def _write_table(b: Builder, vectors: Vectors, scale: Value, into: Value) -> None:
    """The values of codes 0…127 times a number in 16 lanes, for `decode_signed`."""
    values = [b.const(Floats, E4M3[i : i + GROUP]) * scale for i in range(0, 128, GROUP)]
    pairs = zip(values[::2], values[1::2], strict=True)
    words = [vectors.pack_bf16(b, *pair).bitcast(vec(i16, CHUNK)) for pair in pairs]
    for i in (0, 2):  # whole vectors, as they will be loaded
        for shift in (0, 8):
            low, high = ((part >> shift).to(vec(i8, CHUNK)) for part in words[i : i + 2])
            into.at(i * CHUNK + 16 * shift).store(low.shuffle(range(2 * CHUNK), high))


SCHEMES = {"fp8_block": Fp8Block()}

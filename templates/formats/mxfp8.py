"""mxfp8 (OCP microscaling): float8_e4m3fn with a power of two for each 32 elements of a row.

    codes    float8_e4m3fn [N, K]
    scales   e8m0 [N, K/32], as uint8 or float8_e8m0fnu

The value is e4m3 · 2^(s − 127); scale 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i16, i32, i64, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Halves, Vectors, Words, halves
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.fp8 import scaled
from expertile.templates.formats.quantized import (
    E4M3,
    E8M0,
    ByTwos,
    Part,
    bf16_table,
    numbers,
    round_values,
)

_SCALE = "float8_e8m0fnu"
_TABLE_BYTES = 256


@dataclass(frozen=True)
class MxFp8(ByTwos):
    """A power of two for each chunk: exact in bf16, but for what is below 2⁻¹²⁶ (zero) or from 2¹²⁸ on (infinity)."""

    name = "mxfp8"
    decode_cycles = 4.5
    stage_cycles = 4.4
    carry_cycles = 4.0

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, columns), ("float8_e4m3fn",)),
            "scales": Part((rows, columns // CHUNK), ("uint8", _SCALE)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns

    def scale_bytes(self, columns: int) -> int:
        return columns // CHUNK

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        assert scales is not None
        return scaled(codes, numbers(scales, _SCALE).repeat(CHUNK, 1))

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK).load(vec(i8, CHUNK))
        scale = matrix.scales.at(row * self.scale_row_bytes).at(chunk).load(i8)
        table = b.constant_bytes(_tables()).at(scale.zext(i64) * _TABLE_BYTES)
        return vectors.decode_signed(b, table, codes).bitcast(vec(i32, GROUP))

    def both(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], chunk: Value
    ) -> tuple[Value, Value]:
        """By adding to the exponents of what the codes are worth, unless a scale is so extreme that this won't do."""
        places = (matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK) for row in rows)
        codes = [place.load(vec(i8, CHUNK)) for place in places]
        scales = [matrix.scales.at(row * self.scale_row_bytes).at(chunk).load(i8) for row in rows]
        flags = [b.constant_bytes(_EXTREME).at(scale.zext(i64)).load(i8) for scale in scales]
        found = [b.var(Halves, 0) for _ in rows]
        with b.if_else((flags[0] | flags[1]).ne(0)) as (extreme, usual):
            with extreme:
                for result, code, scale in zip(found, codes, scales, strict=True):
                    table = b.constant_bytes(_tables()).at(scale.zext(i64) * _TABLE_BYTES)
                    result.set(vectors.decode_signed(b, table, code))
            with usual:
                table = b.constant_bytes(halves(_MOVABLE))
                both = vectors.decode_signed_twice(b, table, *codes)
                for result, numbers_, scale in zip(found, both, scales, strict=True):
                    move = b.constant_bytes(_MOVES).at(scale.zext(i64) * 2).load(i16)
                    movable = (numbers_ & 1).ne(0)
                    moved = numbers_ + b.splat(move, CHUNK)
                    result.set(b.select(movable, moved, numbers_))
        low, high = (result.get().bitcast(Words) for result in found)
        return low, high


_EXTREME = bytes(not 10 <= scale <= 246 for scale in range(256))
"""Whether a scale makes some e4m3, other than zero and NaN, no normal number."""
_MOVABLE = tuple(word | int(code % 127 != 0) for code, word in enumerate(bf16_table(E4M3[:128])))
"""What codes 0…127 are worth, with a mark in a bit that none of them needs: its exponent may be added to."""
_MOVES = np.array([((scale - 127) * 128 - 1) & 0xFFFF for scale in range(256)], np.uint16).tobytes()
"""What a scale adds to a number, and the mark taken away."""


@cache
def _tables() -> bytes:
    """For each scale, what codes 0…127 are worth: loading a table takes less than multiplying and rounding.

    The scales that occur are few, so their tables stay in L1.
    """
    with np.errstate(over="ignore"):  # to infinity, as in a kernel
        products = np.outer(E8M0, E4M3[:128]).astype(np.float32)
    return b"".join(halves(row) for row in round_values(products).tolist())


SCHEMES = {"mxfp8": MxFp8()}

"""fp8: float8_e4m3fn with a scale for each row (output channel).

    codes    float8_e4m3fn [N, K]
    scales   float32, bfloat16 or float16 [N, 1] (or [N], the same bytes)

The value is e4m3 · s.  compressed-tensors' "float-quantized" checkpoints with strategy "channel" hold this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, Words, halves
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.quantized import (
    E4M3,
    SCALE_BYTES,
    ByTwos,
    Floats,
    Part,
    bf16_table,
    numbers,
    row_numbers,
)

_POSITIVE = bf16_table(E4M3[:128])
_TABLE = (*_POSITIVE, *(word | 0x8000 for word in _POSITIVE))
"""What a code is worth, as bf16 bits: all are exact. The halves differ in the sign only, NaN included."""


@dataclass(frozen=True)
class Fp8(ByTwos):
    """A scale for each row.

    Chunks are the codes' values, exact in bf16, and the scale multiplies the fp32 sums: no weight is rounded.
    """

    scale: str = "float32"
    """The dtype of the scales: float32, bfloat16 or float16."""

    name = "fp8"
    decode_cycles = 1.8
    stage_cycles = 3.0
    carry_cycles = 2.7

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, columns), ("float8_e4m3fn",)),
            "scales": Part((rows, 1), (self.scale,)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns

    def scale_bytes(self, columns: int) -> int:
        return SCALE_BYTES[self.scale]

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        assert scales is not None
        return scaled(codes, numbers(scales, self.scale))

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK).load(vec(i8, CHUNK))
        return vectors.decode_bytes(b, _TABLE, codes).bitcast(vec(i32, GROUP))

    def both(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], chunk: Value
    ) -> tuple[Value, Value]:
        places = (matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK) for row in rows)
        codes = (place.load(vec(i8, CHUNK)) for place in places)
        low, high = vectors.decode_signed_twice(b, b.constant_bytes(halves(_POSITIVE)), *codes)
        return low.bitcast(Words), high.bitcast(Words)

    def row_scale(self, b: Builder, matrix: Matrix, rows: int) -> Value | None:
        return row_numbers(b, matrix.scales, self.scale_row_bytes, self.scale, rows)


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e4m3 codes times numbers of the same shape, or of one that broadcasts: float64."""
    with np.errstate(invalid="ignore"):  # 0 · ∞ is NaN, as in a kernel
        return np.array(E4M3)[codes] * scales


def scaled_words(b: Builder, vectors: Vectors, codes: Value, scale: Value) -> Value:
    """The 32 e4m3 at an address times a number, in all lanes of an fp32 vector, as bf16 pairs.

    The codes are put such that the words come out as pairs of elements i and i + 16: a shift gives the first 16
    as fp32, a mask the others.
    """
    bytes_ = codes.load(vec(i8, CHUNK))
    apart = bytes_.shuffle([lane // 2 + GROUP * (lane % 2) for lane in range(CHUNK)])
    pairs = vectors.decode_bytes(b, _TABLE, apart).bitcast(vec(i32, GROUP))
    halves = ((pairs << 16), pairs & -0x10000)
    return vectors.pack_bf16(b, *(half.bitcast(Floats) * scale for half in halves))


SCHEMES = {"fp8": Fp8()}

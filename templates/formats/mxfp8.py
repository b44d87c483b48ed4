"""mxfp8 (OCP microscaling): float8_e4m3fn with a power of two for each 32 elements of a row.

    codes    float8_e4m3fn [N, K]
    scales   e8m0 [N, K/32], as uint8 or float8_e8m0fnu

The value is e4m3 · 2^(s − 127); scale 255 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i32, i64, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, halves
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.fp8 import scaled
from expertile.templates.formats.quantized import (
    E4M3,
    E8M0,
    Part,
    Quantized,
    numbers,
    round_values,
)

_SCALE = "float8_e8m0fnu"
_TABLE_BYTES = 256


@dataclass(frozen=True)
class MxFp8(Quantized):
    """A power of two for each chunk: exact in bf16, but for what is below 2⁻¹²⁶ (zero) or from 2¹²⁸ on (infinity)."""

    name = "mxfp8"
    decode_cycles = 6.0
    stage_cycles = 5.2

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


@cache
def _tables() -> bytes:
    """For each scale, what codes 0…127 are worth: loading a table takes less than multiplying and rounding.

    The scales that occur are few, so their tables stay in L1.
    """
    with np.errstate(over="ignore"):  # to infinity, as in a kernel
        products = np.outer(E8M0, E4M3[:128]).astype(np.float32)
    return b"".join(halves(row) for row in round_values(products).tolist())


SCHEMES = {"mxfp8": MxFp8()}

"""mxfp4, as gpt-oss checkpoints keep it: e2m1 in groups of 32 with a power of two (OCP microscaling formats, 1.0).

    codes    uint8 [N, K/32, 16], element 2i in the low half of byte i, element 2i + 1 in the high half
    scales   uint8 [N, K/32], e8m0

The value is e2m1 · 2^(s − 127), exact in bf16 as long as it is a normal number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.quantized import (
    E2M1,
    Part,
    Quantized,
    low_first,
    nibbles,
    numbers,
    split_nibbles,
)
from expertile.templates.formats.tables import scaled_table


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """Groups of 32."""

    name = "mxfp4"
    decode_cycles = 1.5
    stage_cycles = 3.0
    carry_cycles = 2.5

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        groups = columns // CHUNK
        return {
            "codes": Part((rows, groups, CHUNK // 2), ("uint8",)),
            "scales": Part((rows, groups), ("uint8",)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns // 2

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
        groups = np.array(E2M1)[split_nibbles(codes)].reshape(*scales.shape, CHUNK)
        return (groups * numbers(scales, "uint8")[..., None]).reshape(-1, columns)

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * (CHUNK // 2))
        scale = matrix.scales.at(row * self.scale_row_bytes).at(chunk)
        table = scaled_table(b, E2M1, "uint8", scale, CHUNK)
        return vectors.lookup(b, table, nibbles(b, codes, low_first)).bitcast(vec(i32, GROUP))


SCHEMES = {"mxfp4": Mxfp4()}

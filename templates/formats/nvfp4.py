"""nvfp4: e2m1 in groups of 16 with an e4m3 scale each, and one fp32 factor for the whole matrix.

    codes    uint8 [N, K/2], element 2i in the low half of byte i, element 2i + 1 in the high half
    scales   float8_e4m3fn [N, K/16]
    factor   float32, one number g

The value is e2m1 · s · g where g is ModelOpt's `weight_scale_2`, and e2m1 · s / g where it is the `weight_global_scale`
of compressed-tensors.  Chunks are e2m1 · s, exact in bf16; g is left to the fp32 sums: no weight is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, f32, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.quantized import (
    E2M1,
    Floats,
    Part,
    Quantized,
    low_first,
    nibbles,
    numbers,
    split_nibbles,
)
from expertile.templates.formats.tables import scaled_table

_GROUP = 16
"""Elements that share a scale: half a chunk."""


@dataclass(frozen=True)
class Nvfp4(Quantized):
    """Groups of 16."""

    divides: bool = False
    """Whether values are divided by the factor. The sums are then multiplied by 1 / g, rounded to fp32."""

    name = "nvfp4"
    decode_cycles = 2.2
    stage_cycles = 3.0
    carry_cycles = 2.6

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, self.code_bytes(columns)), ("uint8",)),
            "scales": Part((rows, self.scale_bytes(columns)), ("float8_e4m3fn",)),
            "factor": Part((), ("float32",)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns // 2

    def scale_bytes(self, columns: int) -> int:
        return columns // _GROUP

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        assert scales is not None
        assert factor is not None
        groups = np.array(E2M1)[split_nibbles(codes)].reshape(*scales.shape, _GROUP)
        products = (groups * numbers(scales, "float8_e4m3fn")[..., None]).reshape(-1, columns)
        whole = numbers(factor, "float32")
        with np.errstate(divide="ignore", invalid="ignore"):  # g may be anything
            return products / whole if self.divides else products * whole

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * (CHUNK // 2))
        scales = matrix.scales.at(row * self.scale_row_bytes).at(chunk * 2)
        low, high = (
            scaled_table(b, E2M1, "float8_e4m3fn", scales.at(half), CHUNK) for half in (0, 1)
        )
        index = nibbles(b, codes, low_first)
        return vectors.lookup_halves(b, low, high, index).bitcast(vec(i32, GROUP))

    def row_scale(self, b: Builder, matrix: Matrix, rows: int) -> Value | None:
        factor = matrix.factor.load(f32)
        whole = b.splat(1.0 / factor if self.divides else factor, GROUP)
        return b.select(b.mask(rows, GROUP), whole, b.zero(Floats))


SCHEMES = {"nvfp4": Nvfp4()}

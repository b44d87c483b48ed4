"""int4: symmetric integers in groups, as compressed-tensors keeps them ("pack-quantized").

    codes    int32 [N, K/8], element k in bits 4 · (k mod 8)… as q + 8; in bytes, low half first
    scales   bfloat16, float16 or float32, [N, K/g], g = 32 or 128, say

The value is q · s, formed in fp32 and rounded to bf16: a weight is off by up to 2⁻⁸ of itself (products in a layer by
less than 4e-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import CHUNK
from expertile.codegen.vectors import Vectors, Words
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.quantized import (
    INT4,
    SCALE_BYTES,
    Part,
    Quantized,
    low_first,
    nibbles,
    numbers,
    split_nibbles,
)
from expertile.templates.formats.tables import once, products, twice


@dataclass(frozen=True)
class Int4(Quantized):
    """A scale for each `group` elements of a row."""

    group: int = 32
    """A multiple of 32."""
    scale: str = "bfloat16"
    """The dtype of the scales: bfloat16, float16 or float32."""

    name = "int4"
    decode_cycles = 2.2
    stage_cycles = 3.5
    carry_cycles = 3.2

    def __post_init__(self) -> None:
        if self.group <= 0 or self.group % CHUNK:
            raise ValueError(f"group: expected a multiple of {CHUNK}, got {self.group}")

    @property
    def block(self) -> int:  # type: ignore[override]
        """K must be a multiple of it."""
        return self.group

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, columns // 8), ("int32",)),
            "scales": Part((rows, columns // self.group), (self.scale,)),
        }

    def code_bytes(self, columns: int) -> int:
        return columns // 2

    def scale_bytes(self, columns: int) -> int:
        return columns // self.group * SCALE_BYTES[self.scale]

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        assert scales is not None
        factors = numbers(scales, self.scale)
        groups = np.array(INT4)[split_nibbles(codes)].reshape(*factors.shape, self.group)
        with np.errstate(invalid="ignore"):  # 0 · ∞ is NaN, as in a kernel
            return (groups * factors[..., None]).reshape(-1, columns)

    @property
    def unit(self) -> int:  # type: ignore[override]
        """Chunks of a group."""
        return self.group // CHUNK

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        (words,) = self.decoder(b, vectors, matrix, row, chunk)(chunk)
        return words

    def decoder(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, first: Value
    ) -> Callable[[Value], Iterable[Value]]:
        codes = matrix.codes.at(row * self.row_bytes)
        scales = matrix.scales.at(row * self.scale_row_bytes)
        place = scales.at(first // self.unit * SCALE_BYTES[self.scale])
        table = products(b, vectors, INT4, self.scale, place)
        shared = self.unit > 1
        table = twice(table) if shared else once(table)

        def decode(chunk: Value) -> Iterable[Value]:
            index = nibbles(b, codes.at(chunk * (CHUNK // 2)), low_first)
            yield vectors.lookup(b, table, index if shared else index & 15).bitcast(Words)

        return decode


SCHEMES = {"int4_g32": Int4(group=32), "int4_g128": Int4(group=128)}

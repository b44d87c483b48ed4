"""int8: symmetric integers with a scale for each row, or for each group of a row.

    codes    int8 [N, K]
    scales   float32, bfloat16 or float16: [N, 1] (or [N], the same bytes), or [N, K/g], g = 32, 64 or 128, say

The value is q · s, as compressed-tensors' "int-quantized" has it with strategies "channel" and "group".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i32, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, Words
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.in_place import InPlace
from expertile.templates.formats.quantized import (
    SCALE_BYTES,
    ByTwos,
    Floats,
    Part,
    Quantized,
    numbers,
    row_numbers,
    splat_number,
)

_MANY = 8
"""Rows that are decoded two by two: a pass of fewer rows has more tokens, whose sums take the tables' registers."""


@dataclass(frozen=True)
class Integers(Quantized):
    """A scale for each row, which multiplies the fp32 sums."""

    scale: str = "float32"
    """The dtype of the scales: float32, bfloat16 or float16."""

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        scales = self.scale_bytes(columns) // SCALE_BYTES[self.scale]
        return {
            "codes": Part((rows, columns), ("int8",)),
            "scales": Part((rows, scales), (self.scale,)),
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
        factors = numbers(scales, self.scale)
        groups = codes.view(np.int8).reshape(*factors.shape, -1)
        with np.errstate(invalid="ignore"):  # 0 · ∞ is NaN, as in a kernel
            return (groups * factors[..., None]).reshape(codes.shape)

    def row_scale(self, b: Builder, matrix: Matrix, rows: int) -> Value | None:
        return row_numbers(b, matrix.scales, self.scale_row_bytes, self.scale, rows)


@dataclass(frozen=True)
class Int8(ByTwos, Integers):
    """A scale for each row.

    Chunks are the integers themselves, exact in bf16, and the scale multiplies the fp32 sums: no weight is rounded.
    """

    name = "int8"
    decode_cycles = 3.7
    stage_cycles = 3.2
    carry_cycles = 3.0

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        codes = matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK)
        return vectors.pack_bf16(b, *load_integers(b, codes))

    def both(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], chunk: Value
    ) -> tuple[Value, Value]:
        places = (matrix.codes.at(row * self.row_bytes).at(chunk * CHUNK) for row in rows)
        low, high = vectors.integers_twice(b, *(place.load(vec(i8, CHUNK)) for place in places))
        return low.bitcast(Words), high.bitcast(Words)

    def decoders(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], first: Value
    ) -> list[Callable[[Value], Iterable[Value]]]:
        if len(rows) >= _MANY:
            return super().decoders(b, vectors, matrix, rows, first)
        return [self.decoder(b, vectors, matrix, row, first) for row in rows]

    def in_place(self) -> Int8InPlace:
        """The format of the same matrix where bytes are multiplied."""
        return Int8InPlace(self.row_bytes, self.scale_row_bytes, self.scale)


@dataclass(frozen=True)
class Int8InPlace(InPlace, Integers):
    """The same for a machine that multiplies bytes (W8A8): its rows are tiles as they lie."""

    row_bytes: int = 0
    name = "int8_in_place"
    element = i8


@dataclass(frozen=True)
class GroupedInt8(Integers):
    """A scale for each `group` elements of a row.

    A weight is q · s, formed in fp32 and rounded to bf16: it is off by up to 2⁻⁸ of itself (products in a layer by less
    than 4e-3).
    """

    group: int = 128
    """A multiple of 32."""

    name = "int8_grouped"
    decode_cycles = 5.0
    stage_cycles = 5.3
    carry_cycles = 4.6

    def __post_init__(self) -> None:
        if self.group <= 0 or self.group % CHUNK:
            raise ValueError(f"group: expected a multiple of {CHUNK}, got {self.group}")

    @property
    def block(self) -> int:  # type: ignore[override]
        """K must be a multiple of it."""
        return self.group

    def scale_bytes(self, columns: int) -> int:
        return columns // self.group * SCALE_BYTES[self.scale]

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
        scale = splat_number(b, vectors, place, self.scale)
        return lambda chunk: [scaled_integers(b, vectors, codes.at(chunk * CHUNK), scale)]

    def row_scale(self, b: Builder, matrix: Matrix, rows: int) -> Value | None:
        return None


def load_integers(b: Builder, codes: Value) -> list[Value]:
    """The 32 int8 at an address as two fp32 vectors."""
    parts = [codes.at(offset).load(vec(i8, GROUP)) for offset in (0, GROUP)]
    return [part.to(vec(i32, GROUP)).to(Floats) for part in parts]


def scaled_integers(b: Builder, vectors: Vectors, codes: Value, scale: Value) -> Value:
    """The 32 int8 at an address times a number, in all lanes of an fp32 vector, as bf16 pairs."""
    return vectors.pack_bf16(b, *(part * scale for part in load_integers(b, codes)))


SCHEMES = {
    "int8": Int8(),
    "int8_g128": GroupedInt8(group=128),
    "int8_g64": GroupedInt8(group=64),
    "int8_g32": GroupedInt8(group=32),
}

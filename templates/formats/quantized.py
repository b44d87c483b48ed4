"""What quantised formats have in common: codes with scales, and a chunk of bf16 worked out from them in registers.

A format has three faces.  **Check**: the tensors it consists of (`parts`).  **Reference**: the exact value of every
element (`values`, NumPy).  **A tile**: a kernel's way to 32 k's of a row (`words`).  Kernel and reference share the
table that says what a code is worth.

All kernels give the same bits: a value is formed in fp32 and rounded to bf16 once; what is below 2⁻¹²⁶ becomes a zero
of its sign, what is too large becomes infinity, and a NaN scale gives NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from expertile.codegen.ir import Builder, Value, f16, f32, i8, i16, i32, i64, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, Words, opaque
from expertile.templates.formats.base import ByRows, Matrix

Floats = vec(f32, GROUP)


@dataclass(frozen=True)
class Part:
    """A tensor of a format, as one expert's matrix of N rows by K columns has it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """The dtypes it may have, by PyTorch's names."""


@dataclass(frozen=True)
class Quantized(ByRows):
    """A scheme, and where rows lie: without strides it stands for any matrix, see `laid_out`."""

    row_bytes: int = 0
    scale_row_bytes: int = 0
    """Bytes of scales from a row to the next (of scales, where several rows share them)."""

    block: ClassVar[int] = CHUNK
    """K must be a multiple of it."""
    halves: ClassVar[tuple[int, ...]] = ()
    """Where among the codes of a block there are fp16 scales, in bytes."""

    # Check -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors of a matrix, by what they are: "codes", and "scales" and "factor" where there are such."""

    def scale_bytes(self, columns: int) -> int:
        """Bytes of a row of scales."""
        return 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        scales = -(-rows // self.shared_rows) * self.scale_bytes(columns)
        return super().matrix_bytes(rows, columns) + scales

    def laid_out(self, columns: int) -> Self:
        """The scheme with the strides of contiguous tensors."""
        return replace(
            self, row_bytes=self.code_bytes(columns), scale_row_bytes=self.scale_bytes(columns)
        )

    def scheme(self) -> Self:
        """Without strides."""
        return replace(self, row_bytes=0, scale_row_bytes=0)

    def every(self, step: int) -> Self:
        return replace(
            self,
            row_bytes=step * self.row_bytes,
            scale_row_bytes=step * self.scale_row_bytes,
        )

    # Reference -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        """The exact values of a matrix, float64 `[N, K]`, from the bytes of its parts (uint8, a row each)."""

    # A tile ----------------------------------------------------------------------------------------------------------

    def offsets(self, row: Any) -> tuple[Any, Any]:
        return row * self.row_bytes, row * self.scale_row_bytes

    def stage(
        self,
        b: Builder,
        vectors: Vectors,
        sources: Sequence[Matrix],
        rows: int,
        first: int,
        end: int,
        into: Sequence[Value],
        stride: int,
    ) -> None:
        for matrix, panel in zip(sources, into, strict=True):
            self.stage_rows(b, vectors, matrix, rows, first, end, panel, stride)
            with b.loop(rows, GROUP) as row, b.loop(0, (end - first) // CHUNK) as chunk:
                panel.at(row * stride + chunk * (2 * CHUNK)).store(b.zero(Words))

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
        """Write k = `first`…`end` of `rows` rows to `into`, `stride` bytes apart.

        For a format that several rows together are less work for than each alone, see `fp8_block`.
        """
        with b.loop(0, rows) as row:
            self.stage_row(b, vectors, matrix, row, first, end, into.at(row * stride))

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
        """Write k = `first`…`end` of a row, multiples of `block`, to `into`.

        For a format that several chunks together are less work for than each alone, see `q4_k`.
        """
        with b.loop(first // CHUNK, end // CHUNK) as chunk:
            words = self.words(b, vectors, matrix, row, chunk)
            into.at((chunk - first // CHUNK) * (2 * CHUNK)).store(words)


@dataclass(frozen=True)
class ByTwos(Quantized):
    """A format for which a chunk of two rows is less work than twice that of one."""

    @abstractmethod
    def both(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], chunk: Value
    ) -> tuple[Value, Value]:
        """What `words` gives for each of two rows."""

    def decoders(
        self, b: Builder, vectors: Vectors, matrix: Matrix, rows: Sequence[Value], first: Value
    ) -> list[Callable[[Value], Iterable[Value]]]:
        return by_twos(
            rows,
            lambda two, chunk: self.both(b, vectors, matrix, two, chunk),
            lambda row, chunk: self.words(b, vectors, matrix, row, chunk),
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
        start, stop = first // CHUNK, end // CHUNK
        even = rows // 2 * 2
        with b.loop(0, even, 2) as row, b.loop(start, stop) as chunk:
            place = into.at(row * stride + (chunk - start) * (2 * CHUNK))
            low, high = self.both(b, vectors, matrix, (row, row + 1), chunk)
            place.store(low)
            place.at(stride).store(high)
        if even < rows:
            last = b.const(i64, even)
            self.stage_row(b, vectors, matrix, last, first, end, into.at(even * stride))


def by_twos(
    rows: Sequence[Value],
    both: Callable[[Sequence[Value], Value], Sequence[Value]],
    one: Callable[[Value, Value], Value],
) -> list[Callable[[Value], Iterable[Value]]]:
    """Decoders of rows, of which neighbours are decoded together: `both(two rows, chunk)`, or `one(row, chunk)`."""
    found: list[Callable[[Value], Iterable[Value]]] = []
    for first in range(0, len(rows) - 1, 2):
        shared = _Shared(rows[first : first + 2], both)
        found += [shared.decoder(0), shared.decoder(1)]
    if len(rows) % 2:
        found.append(lambda chunk: [one(rows[-1], chunk)])
    return found


class _Shared:
    """Two rows: whichever is asked for a chunk first has it decoded for both."""

    def __init__(
        self, rows: Sequence[Value], both: Callable[[Sequence[Value], Value], Sequence[Value]]
    ) -> None:
        self._rows, self._both = rows, both
        self._chunk: Value | None = None
        self._words: Sequence[Value] = ()

    def decoder(self, number: int) -> Callable[[Value], Iterable[Value]]:
        """Of the first or the second."""

        def decode(chunk: Value) -> Iterable[Value]:
            if self._chunk is not chunk:
                self._chunk, self._words = chunk, self._both(self._rows, chunk)
            return [self._words[number]]

        return decode


# Numbers in memory ----------------------------------------------------------------------------------------------------

E4M3 = tuple(
    float("nan")
    if code & 127 == 127
    else (-1.0 if code & 128 else 1.0)
    * (
        (code & 7) * 2.0**-9
        if code & 120 == 0
        else (8 + (code & 7)) * 2.0 ** ((code >> 3 & 15) - 10)
    )
    for code in range(256)
)
"""float8_e4m3fn (OCP 8-bit floating point specification, revision 1.0, table 1): no infinity, 127 and 255 are NaN."""

E8M0 = tuple(float("nan") if code == 255 else 2.0 ** (code - 127) for code in range(256))
"""float8_e8m0fnu (OCP microscaling formats specification, version 1.0, section 5.4.1)."""

E2M1 = tuple(
    sign * magnitude
    for sign in (1.0, -1.0)
    for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
"""float4_e2m1fn (the same, section 5.3.3)."""

INT4 = tuple(float(code - 8) for code in range(16))
"""Integers of 4 bits, stored with 8 added."""

BYTE_SCALES = {"float8_e4m3fn": E4M3, "float8_e8m0fnu": E8M0, "uint8": E8M0}
"""What the bytes of a scale mean; microscaling checkpoints keep e8m0 as uint8."""

SCALE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "uint8": 1,
}
"""Bytes of the dtypes that scales have."""


def numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Scales from their bytes: uint8 `[…, n · bytes]` to float64 `[…, n]`."""
    raw = np.ascontiguousarray(raw)
    if dtype in BYTE_SCALES:
        return np.array(BYTE_SCALES[dtype])[raw]
    if dtype == "bfloat16":
        raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    found = raw.view(np.float16 if dtype == "float16" else np.float32)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        return found.astype(np.float64)


def load_number(b: Builder, address: Value, dtype: str) -> Value:
    """The scale at an address, as an fp32 number. One of 16 bits may lie anywhere, as in blocks of bytes."""
    if dtype == "float32":
        return address.load(f32)
    if dtype == "float16":
        return address.load(f16, align=1).to(f32)
    if dtype == "bfloat16":
        return (address.load(i16, align=1).zext(i32) << 16).bitcast(f32)
    table = b.constant_bytes(np.array(BYTE_SCALES[dtype], np.float32).tobytes())
    return table.at(address.load(i8).zext(i64) * 4).load(f32)


def splat_number(b: Builder, vectors: Vectors, address: Value, dtype: str) -> Value:
    """The same in 16 fp32 lanes."""
    if SCALE_BYTES[dtype] == 1:
        return vectors.spread(b, load_number(b, address, dtype))
    if dtype == "bfloat16":  # straight from memory: by way of a scalar it would take longer
        words = b.splat(address.load(i16, align=1), CHUNK).bitcast(vec(i32, GROUP))
        return (words << 16).bitcast(Floats)
    if dtype == "float16":  # the same four times: a vector takes one instruction less than a scalar
        words = b.splat(address.load(i16, align=1), 4)
        return vectors.spread(b, opaque(words.bitcast(vec(f16, 4)).to(vec(f32, 4))).extract(0))
    return vectors.broadcast(b, address)


# Chunks ---------------------------------------------------------------------------------------------------------------


def bf16_table(values: Sequence[float]) -> tuple[int, ...]:
    """bf16 bits of numbers that are exact in bf16."""
    return tuple(int(x) >> 16 for x in np.array(values, np.float32).view(np.uint32))


def round_values(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of float32 numbers, as kernels round them: denormals become a zero of their sign."""
    bits = values.view(np.uint32)
    rounded = np.where(
        np.isnan(values), bits >> 16 | 0x40, (bits + (bits >> 16 & 1) + 0x7FFF) >> 16
    )
    return np.where(bits & 0x7F800000, rounded, bits >> 16 & 0x8000).astype(np.uint16)


def nibbles(b: Builder, address: Value, order: Callable[[int], tuple[int, bool]]) -> Value:
    """32 codes of 4 bits from the 16 bytes at `address`: an i16 vector with **more than the code** in its high bits.

    `order(k)` says which byte the code of element k is in, and whether in its high half.  Bits above the fourth may be
    those of a neighbour: mask them, or look up in a table whose upper half repeats the lower.
    """
    pairs = address.load(vec(i16, 8), align=1)  # of bytes: spreading them takes one instruction
    places = [order(k) for k in range(CHUNK)]
    spread = pairs.shuffle([byte // 2 for byte, _ in places])
    return spread >> b.const(vec(i16, CHUNK), [byte % 2 * 8 + high * 4 for byte, high in places])


def split_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, low half first: uint8 `[…, n]` to `[…, 2n]`."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def low_first(k: int) -> tuple[int, bool]:
    """Element 2i is in the low half of byte i, element 2i + 1 in its high half."""
    return k // 2, bool(k % 2)


def row_numbers(b: Builder, address: Value, stride: int, dtype: str, rows: int) -> Value:
    """`rows` scales, `stride` bytes apart, as the first of 16 fp32 lanes; the others are zero."""
    result = b.zero(Floats)
    for row in range(rows):
        result = result.insert(row, load_number(b, address.at(row * stride), dtype))
    return result

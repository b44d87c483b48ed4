"""Tables of 16 code values times a scale, in bf16, for formats of 4 bits: a lookup instead of multiplying and rounding.

All products of a table are worked out beforehand: with every scale there is, if it has 8 bits, or with every mantissa
and every exponent, if it has 16.  Only fp32 scales are multiplied by in kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i16, i64, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Halves, Vectors
from expertile.templates.formats.quantized import (
    BYTE_SCALES,
    SCALE_BYTES,
    Floats,
    numbers,
    round_values,
    splat_number,
)


def products(
    b: Builder, vectors: Vectors, values: tuple[float, ...], dtype: str, address: Value
) -> Value:
    """The bf16 bits of 16 code values times the scale at an address: an i16 vector."""
    if SCALE_BYTES[dtype] == 1:
        return scaled_table(b, values, dtype, address)
    if SCALE_BYTES[dtype] == 2:
        return _scale_tables(values, dtype).load(b, address)
    table = b.const(Floats, list(values)) * splat_number(b, vectors, address, dtype)
    return vectors.pack_bf16(b, table, table).bitcast(Halves).shuffle(range(GROUP))


def twice(table: Value) -> Value:
    """A table of 16, for `lookup` of an index of 4 bits below whatever others."""
    return table.shuffle([*range(GROUP)] * 2)


def once(table: Value) -> Value:
    """The same for an index of 4 bits and nothing else: to mask the index takes less than to repeat a table."""
    return table.shuffle(range(CHUNK))


def scaled_table(
    b: Builder, values: Sequence[float], dtype: str, address: Value, lanes: int = GROUP
) -> Value:
    """The bf16 bits of 16 code values times the scale of one byte at an address: an i16 vector, read from memory.

    In 32 `lanes` they are there twice.  The tables of all 256 scales are constants, 512 · lanes bytes, of which the
    scales that occur take up a few lines of cache: a load instead of multiplying and rounding.
    """
    with np.errstate(over="ignore"):  # to infinity, as in a kernel
        products = np.outer(BYTE_SCALES[dtype], values).astype(np.float32)
    repeated = np.tile(round_values(products), lanes // len(values))
    tables = b.constant_bytes(repeated.tobytes())
    at = address.load(i8).zext(i64) * (2 * lanes)
    return tables.at(at).load(vec(i16, lanes), align=2 * lanes)


_SIGN = 1 << 15


@dataclass(frozen=True)
class _ScaleTables:
    """Code values times any scale of 16 bits, as the sum of two rows of 16 bf16: one found by the scale's mantissa, and
    one, which moves the exponents, by its sign and exponent.

    Where that sum is not what multiplying and rounding gives (a scale that is zero, denormal, not finite or too large),
    the first row is one of a block of its own and is all but the sign.
    """

    mantissa_bits: int
    rows: np.ndarray
    """uint16 `[blocks · 2^mantissa_bits, 16]`."""
    origins: np.ndarray
    """int64 `[signs and exponents]`: what leads from a scale as a number to its row: the block instead of these."""
    moves: np.ndarray
    """uint16 `[signs and exponents, 16]`."""

    @classmethod
    def of(cls, values: Sequence[float], dtype: str) -> _ScaleTables:
        """The tables for code values that are no more than 8 significant bits long."""
        bits = {"bfloat16": 7, "float16": 10}[dtype]
        codes = np.array(values, np.float32)
        scales = numbers(np.arange(1 << 15, dtype=np.uint16).view(np.uint8), dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            products = round_values(scales.astype(np.float32)[:, None] * codes)
        products = products.reshape(-1, 1 << bits, len(codes))
        one = int(np.flatnonzero(scales == 1.0)[0]) >> bits
        exponents = (np.arange(len(products)) - one) * 128
        moves = np.where(codes != 0, exponents[:, None], 0).astype(np.uint16)
        regular = (products == products[one] + moves[:, None]).all((1, 2))
        others = np.flatnonzero(~regular)
        blocks = np.zeros(len(products), np.int64)
        blocks[others] = 1 + np.arange(len(others))
        moves[others] = 0
        rows = np.concatenate([products[one], products[others].reshape(-1, len(codes))])
        blocks = np.tile(blocks, 2)
        origins = (blocks - np.arange(len(blocks))) << bits
        return cls(bits, rows, origins, np.concatenate([moves, moves ^ _SIGN]))

    def load(self, b: Builder, address: Value) -> Value:
        """The products with the scale at an address: an i16 vector of 16 lanes."""
        scale = address.load(i16).zext(i64)
        upper = scale >> self.mantissa_bits
        # In bytes, and 64 bits wide: there is nothing else to be done with what is loaded.
        origins = b.constant_bytes((32 * self.origins).tobytes())
        row = scale * 32 + origins.at(upper * 8).load(i64)
        product, move = (
            b.constant_bytes(table.tobytes()).at(place).load(vec(i16, GROUP), align=32)
            for table, place in ((self.rows, row), (self.moves, upper * 32))
        )
        return product + move


@cache
def _scale_tables(values: Sequence[float], dtype: str) -> _ScaleTables:
    return _ScaleTables.of(values, dtype)

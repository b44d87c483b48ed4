"""What the machines that multiply bytes have in common: int8 rows by int8 tokens, summed up exactly in int32.

Each is a second machine beside one that multiplies bf16: the same registers and layouts, four bytes in a 32-bit word
instead of a pair, and so 64 k's in a chunk.  As the sums are exact, all of them give the same bits.

An operand has room for the bf16 numbers that its bytes may have been made from, in the same place.  The chunk behind
the last one says what the sums have yet to go through; in words of the layout:

    word 0   fp32: the scale of the token
    word 1   int32, where `offsets` is true: what a row of zeros gives, and so every C element has too much
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from expertile.codegen.ir import Builder, Value
from expertile.codegen.isa.base import TileIsa, Variant

MOST_K = 1 << 17
"""k's of which any product fits in int32."""


class ByteIsa(TileIsa):
    """Goes before the machine that it is like among the bases."""

    chunk = 64
    offsets: ClassVar[bool] = False
    """Whether a C element has too much, see above."""

    def operand_bytes(self, k: int) -> int:
        return 2 * super().operand_bytes(k)

    def variants(self, tokens: int, matrices: int) -> tuple[Variant, ...]:
        found = super().variants(tokens, matrices)  # type: ignore[safe-super]
        return tuple(replace(each, k_block=2 * each.k_block) for each in found)  # as many bytes

    def row_of_zeros(self, b: Builder, sums: Value, words: Value) -> Value:
        """`sums` and what a chunk of a token, in 16 words, adds to those of a row of zeros; where `offsets` is true."""
        raise NotImplementedError(f"{self.name} has nothing too much")

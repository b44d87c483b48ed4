"""q4_0, of GGUF files (llama.cpp, `block_q4_0`): symmetric 4 bits in blocks of 32 with an fp16 scale.

A row is K/32 blocks of 18 bytes: fp16 d, then 16 bytes of codes q.  Byte j has element j in its low half and element
j + 16 in its high half.  The value is (q − 8) · d, exact in fp32 and rounded to bf16: a weight is off by up to 2⁻⁸ of
itself (products in a layer by less than 4e-3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value, i8, i16, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors, Words
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.blocks import Blocks
from expertile.templates.formats.quantized import INT4, numbers
from expertile.templates.formats.tables import products

_BYTES, _CODES = 18, 2
"""Of a block; where the codes are in it."""


@dataclass(frozen=True)
class Q40(Blocks):
    """Blocks of 32, the scale in them."""

    name = "q4_0"
    halves = (0,)
    block_bytes = _BYTES
    decode_cycles = 2.3
    stage_cycles = 3.9
    carry_cycles = 3.5

    def block_values(self, blocks: np.ndarray) -> np.ndarray:
        d, packed = numbers(blocks[..., :_CODES], "float16"), blocks[..., _CODES:]
        q = np.concatenate([packed & 15, packed >> 4], axis=-1)
        return np.array(INT4)[q] * d

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        block = matrix.codes.at(row * self.row_bytes).at(chunk * _BYTES)
        codes = block.at(_CODES).load(vec(i8, GROUP)).zext(vec(i16, GROUP))
        table = products(b, vectors, INT4, "float16", block)
        # In instructions of 256 bits, which take half the time. The lowest four bits of an index count.
        low, high = (vectors.lookup(b, table, index) for index in (codes, codes >> 4))
        return low.shuffle(range(CHUNK), high).bitcast(Words)


SCHEMES = {"q4_0": Q40()}

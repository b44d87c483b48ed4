"""q8_0 (GGUF): blocks of 32 elements, 34 bytes each.

     0   fp16 d
     2   32 int8 q

The value is q · d.  A row is K/32 blocks, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertile.codegen.ir import Builder, Value
from expertile.codegen.layouts import CHUNK
from expertile.codegen.vectors import Vectors
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.blocks import Blocks
from expertile.templates.formats.int8 import scaled_integers
from expertile.templates.formats.quantized import numbers, splat_number

_CODES = 2
"""Where the codes are in a block."""
_BYTES = _CODES + CHUNK


@dataclass(frozen=True)
class Q8Zero(Blocks):
    """Blocks of 32, scales in them.

    A weight is q · d, exact in fp32 and rounded to bf16: it is off by up to 2⁻⁸ of itself (products in a layer by less
    than 4e-3).
    """

    name = "q8_0"
    halves = (0,)
    block_bytes = _BYTES
    decode_cycles = 4.6
    stage_cycles = 5.5
    carry_cycles = 3.9

    def block_values(self, blocks: np.ndarray) -> np.ndarray:
        return numbers(blocks[..., :_CODES], "float16") * blocks[..., _CODES:].view(np.int8)

    def words(
        self, b: Builder, vectors: Vectors, matrix: Matrix, row: Value | int, chunk: Value
    ) -> Value:
        block = matrix.codes.at(row * self.row_bytes).at(chunk * _BYTES)
        scale = splat_number(b, vectors, block, "float16")
        return scaled_integers(b, vectors, block.at(_CODES), scale)


SCHEMES = {"q8_0": Q8Zero()}

"""What the formats of GGUF files have in common: a row is blocks of bytes that have everything in them, scales too."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from expertile.codegen.layouts import CHUNK
from expertile.templates.formats.quantized import Part, Quantized


@dataclass(frozen=True)
class Blocks(Quantized):
    """K/block blocks a row."""

    block_bytes: ClassVar[int]

    @property
    def grain(self) -> int:
        """Chunks of a block, which has bytes that all of them need."""
        return self.block // CHUNK

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"codes": Part((rows, self.code_bytes(columns)), ("uint8",))}

    def code_bytes(self, columns: int) -> int:
        return columns // self.block * self.block_bytes

    def values(
        self,
        columns: int,
        codes: np.ndarray,
        scales: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> np.ndarray:
        size = len(codes), columns // self.block, self.block_bytes
        with np.errstate(invalid="ignore"):  # 0 · ∞ and ∞ − ∞ are NaN, as in a kernel
            values = self.block_values(np.ascontiguousarray(codes).reshape(size))
        return values.reshape(len(codes), columns)

    @abstractmethod
    def block_values(self, blocks: np.ndarray) -> np.ndarray:
        """The exact values, float64, in order of k, of blocks as bytes: uint8 `[N, K/block, block_bytes]`."""

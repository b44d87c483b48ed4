"""ds_fp4: the experts of DeepSeek-V4 checkpoints, which are mxfp4 under other tensor types.

    codes    int8 [N, K/2], element 2i in the low half of byte i, element 2i + 1 in the high half
    scales   float8_e8m0fnu, or the same as uint8, [N, K/32]

The value is e2m1 · 2^(s − 127).
"""

from __future__ import annotations

from dataclasses import dataclass

from expertile.templates.formats.mxfp4 import Mxfp4
from expertile.templates.formats.quantized import Part


@dataclass(frozen=True)
class DsFp4(Mxfp4):
    """Groups of 32."""

    name = "ds_fp4"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {
            "codes": Part((rows, self.code_bytes(columns)), ("int8",)),
            "scales": Part((rows, self.scale_bytes(columns)), ("float8_e8m0fnu", "uint8")),
        }


SCHEMES = {"ds_fp4": DsFp4()}

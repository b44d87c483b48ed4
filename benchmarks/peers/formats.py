"""Quantised weights as checkpoints have them: random ones, and what they are worth.

Written from the formats' public descriptions, with nothing of Expertile's: the layer computed from these values is what
all implementations are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0 = 120
"""Powers of two around 2^(120 − 127) are drawn."""
_SUPER_BLOCK = 256
_MOST_DRAWN = (1 << 22) + 8 * 4 * 17
"""Bytes of codes, which are repeated: no multiple of a page, so that no two pages are alike."""

Draw = Callable[[int], Tensor]
"""So many random numbers: int64 from 0 to 255."""


@dataclass(frozen=True)
class Format:
    """How a matrix of N rows by K columns is stored."""

    block: tuple[int, int]
    """Elements of a row, and the bytes of their codes."""
    dtype: torch.dtype
    """Of the codes."""
    values: Callable[[Tensor, int], Tensor]
    """From the codes' bytes, uint8 `[N, …]`, and K: fp32 `[N, K]`, but for scales that are apart."""
    scale: torch.dtype | None = None
    """Of scales apart from the codes; uint8 is a power of two."""
    shared: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale; 0 columns is a whole row."""
    magnitude: float = 1.0
    """Of the scales, such that weights have a standard deviation of about 0.02."""
    inner: tuple[tuple[int, float], ...] = ()
    """fp16 scales among the codes: where in a block, and their magnitude."""

    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of a row. Raises ValueError for a number of columns that it can't have."""
        elements, size = self.block
        unit = max(elements, self.shared[1] if self.shared[0] == 1 else 1)
        if columns % unit:
            raise ValueError(f"expected a multiple of {unit} columns, got {columns}")
        return columns // elements * size

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales apart."""
        height, width = self.shared
        return -(-rows // height), -(-columns // (width or columns))

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Codes and scales."""
        height, width = self.scales(rows, columns)
        apart = height * width * self.scale.itemsize if self.scale else 0
        return rows * self.code_bytes(columns) + apart


@dataclass(frozen=True)
class Quantised:
    """The matrices `[experts, rows, columns]` of a projection."""

    format: Format
    shape: tuple[int, int, int]
    codes: Tensor
    """`[experts, rows, …]`; of mxfp4 `[experts, rows, columns / 32, 16]`."""
    scales: Tensor | None
    """`[experts, …]`"""

    def of(self, expert: int) -> list[Tensor]:
        """The tensors of an expert."""
        return [part[expert] for part in (self.codes, self.scales) if part is not None]

    def dense(self, expert: int) -> Tensor:
        """fp32 `[rows, columns]`"""
        _, rows, columns = self.shape
        raw = self.codes[expert].contiguous().view(-1).view(torch.uint8).view(rows, -1)
        values = self.format.values(raw, columns)
        if self.scales is None:
            return values
        scales = self.scales[expert]
        factors = scales.float() if scales.is_floating_point() else torch.exp2(scales - 127.0)
        height, width = self.format.shared
        each = factors.repeat_interleave(height, 0).repeat_interleave(width or columns, 1)
        return values * each[:rows, :columns]


def random(
    format_: Format,
    shape: tuple[int, int, int],
    draw: Draw,
    repeat: Callable[[Tensor, Sequence[int]], Tensor],
) -> Quantised:
    """Any codes but NaN. `repeat(block, shape)`: bytes of that shape, the block over and over."""
    experts, rows, columns = shape
    _, size = format_.block
    row = format_.code_bytes(columns)
    drawn = draw(min(experts * rows * row, _MOST_DRAWN) // size * size).to(torch.uint8)
    if format_.dtype == torch.float8_e4m3fn:
        drawn[drawn & 127 == 127] = 0
    for offset, magnitude in format_.inner:
        scales = (magnitude * _around_one(draw(len(drawn) // size))).half()
        drawn.view(-1, size)[:, offset : offset + 2] = scales.view(torch.uint8).view(-1, 2)
    codes = repeat(drawn, (experts, rows, row)).view(format_.dtype)
    if format_.dtype == torch.uint8 and format_.scale is not None:
        codes = codes.unflatten(-1, (-1, size))
    if format_.scale is None:
        return Quantised(format_, shape, codes, None)
    size_ = (experts, *format_.scales(rows, columns))
    numbers = draw(size_[0] * size_[1] * size_[2]).view(size_)
    if format_.scale == torch.uint8:
        return Quantised(format_, shape, codes, (_E8M0 - 1 + numbers % 3).to(torch.uint8))
    return Quantised(
        format_, shape, codes, (format_.magnitude * _around_one(numbers)).to(format_.scale)
    )


def _around_one(drawn: Tensor) -> Tensor:
    """0.5 to 1.5, exactly."""
    return drawn.float() / 256 + 0.5


# Codes ------------------------------------------------------------------------------------------------------------


def _int8(raw: Tensor, columns: int) -> Tensor:
    return raw.view(torch.int8).float()


def _e4m3(raw: Tensor, columns: int) -> Tensor:
    return raw.view(torch.float8_e4m3fn).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Low half first."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(1)


def _int4(raw: Tensor, columns: int) -> Tensor:
    return _nibbles(raw).float() - 8


def _e2m1(raw: Tensor, columns: int) -> Tensor:
    table = torch.tensor([sign * value for sign in (1, -1) for value in _E2M1])
    return table[_nibbles(raw).int()]


def _half(blocks: Tensor, offset: int) -> Tensor:
    """fp16 `[…, bytes]` to fp32 `[…, 1]`."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _q4_0(raw: Tensor, columns: int) -> Tensor:
    blocks = raw.view(len(raw), -1, 18)
    codes = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), -1)
    return (_half(blocks, 0) * (codes.float() - 8)).flatten(1)


def _q8_0(raw: Tensor, columns: int) -> Tensor:
    blocks = raw.view(len(raw), -1, 34)
    return (_half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()).flatten(1)


def _q4_k(raw: Tensor, columns: int) -> Tensor:
    blocks = raw.view(len(raw), -1, 144)
    first, middle, last = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((middle & 63, last >> 4 | middle >> 6 << 4), -1)
    packed = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((packed & 15, packed >> 4), -2).flatten(-3, -2).float()
    high = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    low = (_half(blocks, 2) * offsets.float()).unsqueeze(-1)
    return (high * codes - low).flatten(1)


def _q6_k(raw: Tensor, columns: int) -> Tensor:
    blocks = raw.view(len(raw), -1, 210)
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (low | high << 4).flatten(-3).unflatten(-1, (16, 16)).float() - 32
    scales = blocks[..., 192:208].view(torch.int8).float().unsqueeze(-1)
    return (_half(blocks, 208).unsqueeze(-1) * scales * codes).flatten(1)


# Formats ----------------------------------------------------------------------------------------------------------


def _grouped_int4(group: int) -> Format:
    return Format((8, 4), torch.int32, _int4, torch.bfloat16, (1, group), 4e-3)


FORMATS = {
    "int8": Format((1, 1), torch.int8, _int8, torch.float32, (1, 0), 2.5e-4),
    "fp8_block": Format((1, 1), torch.float8_e4m3fn, _e4m3, torch.float32, (128, 128), 2e-4),
    "mxfp4": Format((32, 16), torch.uint8, _e2m1, torch.uint8, (1, 32)),
    "int4_g32": _grouped_int4(32),
    "int4_g128": _grouped_int4(128),
    "q8_0": Format((32, 34), torch.uint8, _q8_0, inner=((0, 2.5e-4),)),
    "q4_0": Format((32, 18), torch.uint8, _q4_0, inner=((0, 4e-3),)),
    "q4_K": Format((_SUPER_BLOCK, 144), torch.uint8, _q4_k, inner=((0, 1e-4), (2, 7.5e-4))),
    "q6_K": Format((_SUPER_BLOCK, 210), torch.uint8, _q6_k, inner=((208, 1.5e-5),)),
}
"""Those that a peer has, by Expertile's names: compressed-tensors' int8 by row and int4 in groups, DeepSeek-V3's fp8,
gpt-oss's mxfp4, and GGUF's."""

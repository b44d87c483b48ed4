"""Random weights of any format, to measure with: tuning and benchmarks."""

from __future__ import annotations

import math

import numpy as np
import torch

from expertile.runtime.parts import collect
from expertile.runtime.weights import ExpertWeights
from expertile.templates.formats.quantized import Part, Quantized

_BLOCK_NUMBERS = (1 << 22) + 33
_BLOCK_BYTES = (1 << 23) + 64 * 257
"""What is drawn at random, and then repeated: bf16 numbers, or bytes of codes. No multiple of a page, so that no two
pages are alike for a host that merges those."""


def random_bf16(*size: int, scale: float = 0.02, seed: int = 0) -> torch.Tensor:
    """A tensor of bf16 numbers with that standard deviation, every page written."""
    tensor = torch.empty(size, dtype=torch.bfloat16, device="cpu")
    flat = tensor.view(-1)
    length = min(flat.numel(), _BLOCK_NUMBERS)
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(length, generator=generator, device="cpu").mul_(scale).bfloat16()
    _repeat(block, flat)
    return tensor


def _repeat(block: torch.Tensor, into: torch.Tensor) -> None:
    for first in range(0, len(into), len(block)):
        into[first : first + len(block)] = block[: len(into) - first]


def random_weights(scheme: Quantized, shape: tuple[int, int, int], seed: int = 0) -> ExpertWeights:
    """Matrices `[E, N, K]` in a format, every page written: any codes but NaN, and scales around 0.01.

    Raises ArgumentError where N and K don't fit the format.
    """
    experts, rows, columns = shape
    scheme = scheme.scheme()
    laid_out = scheme.laid_out(columns)
    generator = np.random.default_rng(seed)
    parts = {}
    for name, part in laid_out.parts(rows, columns).items():
        tensor = _part(generator, scheme, name, part, experts)
        parts[name] = collect(name, tensor, part.dtypes)
    return ExpertWeights(laid_out, shape, parts)


def _part(
    generator: np.random.Generator, scheme: Quantized, name: str, part: Part, experts: int
) -> torch.Tensor:
    dtype = getattr(torch, part.dtypes[0])
    size = (experts, *part.shape)
    if name != "codes":
        scales = generator.uniform(0.005, 0.02, math.prod(size))
        if name == "factor":
            scales = np.ones_like(scales)
        if dtype == torch.uint8:  # a power of two
            return torch.from_numpy(generator.integers(117, 122, size, dtype=np.uint8))
        return torch.from_numpy(scales).to(torch.float32).to(dtype).reshape(size)
    return _codes(generator, scheme, math.prod(size) * dtype.itemsize).view(dtype).reshape(size)


def _codes(generator: np.random.Generator, scheme: Quantized, size: int) -> torch.Tensor:
    """Bytes of codes; a scale that lies among them is a scale."""
    block = scheme.code_bytes(scheme.block)
    length = min(size, _BLOCK_BYTES // block * block)
    drawn = generator.integers(0, 256, length, dtype=np.uint8)
    drawn[drawn & 127 == 127] = 0  # NaN, for e4m3
    for offset in scheme.halves:
        scales = generator.uniform(0.005, 0.02, length // block).astype(np.float16)
        drawn.reshape(-1, block)[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    _repeat(torch.from_numpy(drawn), tensor)
    return tensor

"""Quantisers for formats whose own libraries only read them, or quantise on a GPU: q4_K, q6_K (GGUF) and nvfp4.

They take float weights `[N, K]` and give the bytes of a checkpoint. Each group's scale comes from its extremes,
without the search for a better one that llama.cpp makes, so the error is a little larger than that of its files.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The non-negative numbers of float4_e2m1fn by code; bit 3 is the sign."""

E4M3 = np.concatenate(
    [np.arange(8) * 2.0**-9]
    + [np.arange(8, 16) * 2.0 ** (exponent - 10) for exponent in range(1, 16)]
)[:127]
"""The non-negative numbers of float8_e4m3fn by code."""


def q4_K(values: np.ndarray) -> np.ndarray:
    """Blocks of 256 as d·sc·q − dmin·m, with sc and m for each 32: uint8 `[N, K/256 · 144]`. K: a multiple of 256."""
    rows, columns = values.shape
    parts = values.astype(np.float32).reshape(rows, columns // 256, 8, 32)
    minimum = np.maximum(-parts.min(-1), 0)  # what is subtracted
    scale = (parts.max(-1) + minimum) / 15
    factors = np.stack([scale.max(-1), minimum.max(-1)], -1) / 63
    factors = factors.astype(np.float16)
    d, dmin = (factors[..., None, i].astype(np.float32) for i in (0, 1))
    sc, m = _code(scale, d, 0, 63), _code(minimum, dmin, 0, 63)
    q = _code(parts + (dmin * m)[..., None], (d * sc)[..., None], 0, 15)

    sc, m = sc.astype(np.uint8), m.astype(np.uint8)
    first, last = slice(0, 4), slice(4, 8)
    packed = [
        sc[..., first] | sc[..., last] >> 4 << 6,
        m[..., first] | m[..., last] >> 4 << 6,
        sc[..., last] & 15 | m[..., last] << 4,
    ]
    codes = q.astype(np.uint8)
    codes = codes[..., 0::2, :] | codes[..., 1::2, :] << 4
    return _rows(factors.view(np.uint8), *packed, codes)


def q6_K(values: np.ndarray) -> np.ndarray:
    """Blocks of 256 as d·sc·(q − 32), with sc for each 16: uint8 `[N, K/256 · 210]`. K: a multiple of 256."""
    rows, columns = values.shape
    parts = values.astype(np.float32).reshape(rows, columns // 256, 16, 16)
    scale = (
        _extreme(parts) / -32
    )  # the range of both codes reaches one further on the negative side
    factor = (_extreme(scale) / -128).astype(np.float16)[..., None]
    d = factor.astype(np.float32)
    sc = _code(scale, d, -128, 127)
    q = _code(parts, (d * sc)[..., None], -32, 31)

    runs = (q + 32).astype(np.uint8).reshape(rows, columns // 256, 2, 4, 32)
    low = runs[..., :2, :] & 15 | runs[..., 2:, :] << 4
    high = np.bitwise_or.reduce(runs >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=-2)
    return _rows(low, high, sc.astype(np.int8).view(np.uint8), factor.view(np.uint8))


def nvfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """e2m1 with an e4m3 scale for each 16 and a factor: codes uint8 `[N, K/2]`, scales uint8 `[N, K/16]`, fp32.

    A weight is code · scale · factor. K: a multiple of 16.
    """
    rows, columns = values.shape
    groups = values.astype(np.float32).reshape(rows, columns // 16, 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    factor = np.float32(largest.max() / (E2M1[-1] * E4M3[-1]))
    scales = _nearest(_divide(largest, factor * E2M1[-1]), E4M3)
    codes = _nearest(_divide(np.abs(groups), E4M3[scales] * factor), E2M1)
    codes = (codes | (groups < 0) << 3).reshape(rows, columns).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed, scales.reshape(rows, columns // 16).astype(np.uint8), factor


def _divide(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The quotient; zero where the scale is."""
    return np.divide(values, scale, out=np.zeros(values.shape), where=scale != 0)


def _code(values: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    """Values as multiples of a scale: integers low…high, as floats."""
    return np.clip(np.rint(_divide(values, scale)), low, high)


def _extreme(values: np.ndarray) -> np.ndarray:
    """Along the last axis, the value of the largest magnitude with its sign."""
    index = np.abs(values).argmax(-1, keepdims=True)
    return np.take_along_axis(values, index, -1)[..., 0]


def _nearest(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Indices of the nearest of ascending numbers; the even one of two equally near."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    lower, upper = (np.searchsorted(middles, values, side) for side in ("left", "right"))
    return np.where(lower % 2 == 0, lower, upper)


def _rows(*fields: np.ndarray) -> np.ndarray:
    """The fields of blocks, each `[N, blocks, …]`, one after another: `[N, bytes]`."""
    rows, blocks = fields[0].shape[:2]
    return np.concatenate([x.reshape(rows, blocks, -1) for x in fields], -1).reshape(rows, -1)

"""q4_K and q6_K against gguf's dequantiser, and the quantisers of the examples against those of gguf and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from formats_kit import _guarded, assert_same, decode, rounded, units
from gguf import GGMLQuantizationType as Type
from gguf import quants

from expertile.codegen.compiler import Target, compile_ir
from expertile.codegen.ir import Module, ptr
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import Vectors
from expertile.templates.formats import Quantized
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.q4_k import Q4K
from expertile.templates.formats.q6_k import Q6K

BLOCK = 256
GAP = 0xAAAA
QUANTISERS = SimpleNamespace(
    **run_path(str(Path(__file__).parents[1] / "examples" / "quantisers.py"))
)
NUMBERS = np.array([0x7E00, 0xFC01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0, 0x8000])
"""fp16 bits: NaN (quiet, signalling), infinities, denormals, the smallest normal and the largest, zeros."""
FACTORS = {Q4K(): slice(0, 4), Q6K(): slice(208, 210)}
"""Where the fp16 numbers of a block are."""


def any_blocks(format_: Quantized, rows: int, blocks: int, edges: bool = False) -> np.ndarray:
    """Random bytes in all fields: uint8 `[rows, blocks · bytes]`; with `edges`, pairs of NUMBERS as fp16 fields."""
    rng = np.random.default_rng(rows + 100 * blocks)
    data = rng.integers(0, 256, (rows * blocks, format_.code_bytes(BLOCK)), np.uint8)
    if edges:
        number = np.arange(len(data))
        pairs = NUMBERS[np.stack([number, number // len(NUMBERS)], -1) % len(NUMBERS)]
        fields = data[:, FACTORS[format_]]
        fields[:] = pairs.astype(np.uint16).view(np.uint8)[:, : fields.shape[1]]
    return data.reshape(rows, -1)


ORACLES: dict[Quantized, Callable[[np.ndarray], np.ndarray]] = {
    Q4K(): lambda codes: quants.dequantize(codes, Type.Q4_K),
    Q6K(): lambda codes: quants.dequantize(codes, Type.Q6_K),
}

formats = pytest.mark.parametrize("format_", [Q4K(), Q6K()], ids=lambda format_: format_.name)
vectors = pytest.mark.parametrize("unit", units().values(), ids=units())


# Reference ----------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("edges", [False, True])
def test_values_are_those_of_gguf(format_, edges):
    codes = any_blocks(format_, 50, 8, edges)
    with np.errstate(all="ignore"):
        expected = ORACLES[format_](codes)
        assert_same(format_.values(8 * BLOCK, codes).astype(np.float32), expected)
    assert np.isnan(expected).any() or not edges


@formats
def test_a_checkpoint_has_one_tensor_of_whole_blocks(format_):
    part = format_.parts(3, 2 * BLOCK)["codes"]
    assert part.shape == quants.quant_shape_to_byte_shape(
        (3, 2 * BLOCK), Type[format_.name.upper()]
    )
    assert part.dtypes == ("uint8",)
    assert format_.laid_out(2 * BLOCK).row_bytes == part.shape[1]
    assert format_.block == BLOCK


# Kernels ------------------------------------------------------------------------------------------


@formats
@vectors
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 8), (16, 1), (17, 3)])
def test_kernels_round_the_values(format_, unit, rows, blocks):
    codes = any_blocks(format_, rows, blocks)
    result = decode(format_, unit, codes, None, None, rows, blocks * BLOCK)
    assert_same(result, rounded(format_.values(blocks * BLOCK, codes)))


@formats
@vectors
def test_kernels_pass_on_nan_and_infinity_and_small_numbers(format_, unit):
    codes = any_blocks(format_, 17, 6, edges=True)
    result = decode(format_, unit, codes, None, None, 17, 6 * BLOCK)
    assert np.isnan(result).any()
    assert np.isinf(result).any()
    assert_same(result, rounded(format_.values(6 * BLOCK, codes)))


@formats
@vectors
def test_rows_may_lie_apart(format_, unit):
    codes = any_blocks(format_, 17, 2)
    columns = 2 * BLOCK
    apart = np.full((17, codes.shape[1] + 6), 255, np.uint8)
    apart[:, :-6] = codes
    strided = replace(format_, row_bytes=apart.shape[1])
    result = decode(strided, unit, apart, None, None, 17, columns)
    assert_same(result, rounded(format_.values(columns, codes)))


def staged(
    format_: Quantized, unit: Vectors, codes: np.ndarray, first: int, end: int
) -> np.ndarray:
    """k = first…end of up to 16 rows as `stage` writes them, 32 further apart: bf16 bits `[16, end − first + 32]`."""
    rows, columns = len(codes), codes.shape[1] // format_.code_bytes(BLOCK) * BLOCK
    stride = 2 * (end - first + CHUNK)
    module = Module("stage")
    with module.function("stage", {"codes": ptr, "into": ptr}) as (b, arg):
        source = Matrix(arg.codes, arg.codes, arg.codes)
        format_.laid_out(columns).stage(b, unit, [source], rows, first, end, [arg.into], stride)
    address = compile_ir("stage", str(module), Target.host()).address
    run = CFUNCTYPE(None, c_void_p, c_void_p)(address)
    for at_end in (True, False):
        into = np.full((GROUP, stride // 2), GAP, np.uint16)
        with _guarded(codes, at_end) as source:
            run(source, into.ctypes.data)
    return into


@formats
@vectors
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(
    ("rows", "first", "end"), [(1, 0, BLOCK), (16, 0, 5 * BLOCK), (7, BLOCK, 3 * BLOCK)]
)
def test_rows_are_staged_as_they_decode(format_, unit, rows, first, end, edges):
    codes = any_blocks(format_, rows, 5, edges)
    result = staged(format_, unit, codes, first, end)
    values = format_.values(5 * BLOCK, codes)[:, first:end]
    bits = result[:rows, : end - first].astype(np.uint32) << 16
    assert_same(bits.view(np.float32), rounded(values))
    assert not result[rows:, : end - first].any(), "missing rows must be zero"
    assert (result[:, end - first :] == GAP).all(), "nothing behind a row may be written"


def every_q4_K() -> np.ndarray:
    """All pairs of a 6-bit scale and minimum in each of the 8 places, over random codes: uint8 `[16, 256 · 144]`."""
    codes = any_blocks(Q4K(), 16, 256).reshape(4096, -1)
    pair = (np.arange(4096)[:, None] + 555 * np.arange(8)) % 4096
    sc, m = (pair & 63).astype(np.uint8), (pair >> 6).astype(np.uint8)
    codes[:, :4] = np.array([1, -0.75], np.float16).view(np.uint8)
    codes[:, 4:8] = sc[:, :4] | sc[:, 4:] >> 4 << 6
    codes[:, 8:12] = m[:, :4] | m[:, 4:] >> 4 << 6
    codes[:, 12:16] = sc[:, 4:] & 15 | m[:, 4:] << 4
    return codes.reshape(16, -1)


def every_q6_K() -> np.ndarray:
    """All 64 codes with all 256 scales: block i has scale i everywhere, its codes count up: uint8 `[4, 64 · 210]`."""
    codes = np.empty((256, 210), np.uint8)
    q = (np.arange(256).reshape(2, 4, 32) % 64).astype(np.uint8)
    codes[:, :128] = (q[:, :2] & 15 | q[:, 2:] << 4).reshape(-1)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes[:, 128:192] = np.bitwise_or.reduce(q >> 4 << shifts, axis=1).reshape(-1)
    codes[:, 192:208] = np.arange(256)[:, None]
    codes[:, 208:] = np.array([1.5], np.float16).view(np.uint8)
    return codes.reshape(4, -1)


@vectors
@pytest.mark.parametrize(
    ("format_", "codes"), [(Q4K(), every_q4_K()), (Q6K(), every_q6_K())], ids=["q4_K", "q6_K"]
)
def test_every_scale(format_, unit, codes):
    rows, columns = len(codes), codes.shape[1] // format_.code_bytes(BLOCK) * BLOCK
    expected = ORACLES[format_](codes)
    assert_same(format_.values(columns, codes).astype(np.float32), expected)
    assert_same(decode(format_, unit, codes, None, None, rows, columns), rounded(expected))
    bits = staged(format_, unit, codes, 0, columns)[:rows, :columns].astype(np.uint32) << 16
    assert_same(bits.view(np.float32), rounded(expected))


def test_all_codes_and_scales_of_q6_K_are_there():
    products = np.arange(-128, 128)[:, None] * np.arange(-32, 32) * 1.5
    assert np.array_equal(np.unique(Q6K().values(64 * BLOCK, every_q6_K())), np.unique(products))


# Quantisers ---------------------------------------------------------------------------------------


def weights() -> np.ndarray:
    """Normally distributed, of different spread from block to block: float32 `[16, 768]`."""
    rng = np.random.default_rng(4)
    spread = np.exp(rng.normal(size=(16, 48)))
    return (rng.normal(size=(16, 48, 16)) * spread[..., None]).reshape(16, 768).astype(np.float32)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def from_nvfp4(codes: np.ndarray, scales: np.ndarray, factor: np.float32) -> np.ndarray:
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1, 16)
    values = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (values * scales[..., None] * float(factor)).reshape(len(codes), -1)


@pytest.mark.parametrize(("format_", "bound"), [(Q4K(), 0.1), (Q6K(), 0.022)])
def test_gguf_reads_what_the_quantisers_write(format_, bound):
    quantise = getattr(QUANTISERS, format_.name)
    for sign in (1, -1):
        codes = quantise(sign * weights())
        assert codes.dtype == np.uint8
        assert codes.shape == format_.parts(16, 768)["codes"].shape
        assert error(ORACLES[format_](codes), sign * weights()) < bound


@formats
def test_zeros_stay_zeros(format_):
    codes = getattr(QUANTISERS, format_.name)(np.zeros((2, 512), np.float32))
    assert not ORACLES[format_](codes).any()


def test_q4_K_of_what_it_can_hold_is_exact():
    """Every block with a 63 among its scales and minima, every sub-block with the codes 0 and 15."""
    rng = np.random.default_rng(0)
    sc, m = rng.integers(1, 64, (2, 5, 3, 8, 1))
    sc[:, :, 0], m[:, :, 5] = 63, 63
    q = rng.integers(0, 16, (5, 3, 8, 32))
    q[..., 0], q[..., 9] = 0, 15
    values = (0.5 * sc * q - 7.5 * m).reshape(5, 768).astype(np.float32)
    assert_same(quants.dequantize(QUANTISERS.q4_K(values), Type.Q4_K), values)


def test_q6_K_of_what_it_can_hold_is_exact():
    rng = np.random.default_rng(0)
    sc = rng.integers(1, 128, (5, 3, 16, 1)) * rng.choice([-1, 1], (5, 3, 16, 1))
    sc[:, :, 0] = -128
    q = rng.integers(-31, 32, (5, 3, 16, 16))
    q[..., 3] = -32
    values = (0.25 * sc * q).reshape(5, 768).astype(np.float32)
    assert np.array_equal(quants.dequantize(QUANTISERS.q6_K(values), Type.Q6_K), values)


def test_nvfp4_rounds_to_the_nearest():
    codes, scales, factor = QUANTISERS.nvfp4(weights())
    assert (codes.shape, scales.shape) == ((16, 384), (16, 48))
    assert codes.dtype == scales.dtype == np.uint8
    assert factor.dtype == np.float32
    assert error(from_nvfp4(codes, scales, factor), weights()) < 0.11
    grid = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
    quotients = (weights().reshape(16, 48, 16) / grid[..., None]).reshape(16, 768)
    expected = quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codes, expected[:, 0::2] | expected[:, 1::2] << 4)


def test_nvfp4_of_what_it_can_hold_is_exact():
    rng = np.random.default_rng(0)
    scale = rng.integers(8, 16, (4, 8, 1)) * 2.0 ** rng.integers(0, 6, (4, 8, 1))
    scale[0, 0] = 448
    codes = rng.choice(QUANTISERS.E2M1, (4, 8, 16)) * rng.choice([-1, 1], (4, 8, 16))
    codes[..., 5] = -6
    values = (scale * codes / 64).reshape(4, 128).astype(np.float32)
    assert np.array_equal(from_nvfp4(*QUANTISERS.nvfp4(values)), values)


def test_numbers_of_the_quantisers_are_those_of_ml_dtypes():
    codes = np.arange(127, dtype=np.uint8)
    assert np.array_equal(codes.view(ml_dtypes.float8_e4m3fn).astype(float), QUANTISERS.E4M3)
    assert np.array_equal(codes[:8].view(ml_dtypes.float4_e2m1fn).astype(float), QUANTISERS.E2M1)

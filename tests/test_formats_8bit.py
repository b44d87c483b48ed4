"""Formats with 8-bit codes: int8, fp8, fp8_block, mxfp8, q8_0. Oracles: ml_dtypes, compressed-tensors, gguf."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from formats_kit import assert_same, decode, rounded, staged, units

from expertile.codegen.compiler import Target, compile_ir
from expertile.codegen.ir import Module, i64, ptr
from expertile.codegen.vectors import Vectors
from expertile.templates.formats import Quantized, resolve
from expertile.templates.formats.base import Matrix
from expertile.templates.formats.fp8 import Fp8
from expertile.templates.formats.fp8_block import Fp8Block
from expertile.templates.formats.int8 import GroupedInt8, Int8

NAMES = ["int8", "int8_g128", "int8_g64", "int8_g32", "fp8", "fp8_block", "mxfp8", "q8_0"]
SCALES = ["float32", "bfloat16", "float16"]
SIZES = [(1, 32), (17, 160), (16, 288), (130, 64)]


@pytest.fixture(params=units())
def unit(request: pytest.FixtureRequest) -> Vectors:
    return units()[request.param]


def _codes(rows: int, columns: int) -> np.ndarray:
    """Bytes, among them every value in turn."""
    codes = np.arange(rows * columns, dtype=np.uint8) * 77
    return codes.reshape(rows, columns)


def _scales(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Numbers of a dtype between 2⁻¹² and 1, of either sign."""
    rng = np.random.default_rng(seed)
    scales = rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.uniform(-12, 0, shape)
    return scales.astype(_numpy(dtype))


def _numpy(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


def _torch(x: np.ndarray, dtype: str) -> torch.Tensor:
    """The array as a tensor of a dtype of the same width."""
    return torch.from_numpy(_bytes(x)).view(getattr(torch, dtype)).reshape(x.shape)


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, **args: Any) -> np.ndarray:
    """What compressed-tensors makes of 8-bit codes."""
    arguments = QuantizationArgs(num_bits=8, **args)
    return dequantize(codes, scales, args=arguments).float().numpy()


# A scale for each row: nothing is rounded -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", ["int", "float"])
def test_row_scales(unit: Vectors, kind: str, rows: int, columns: int, dtype: str) -> None:
    scheme: Quantized = Int8(scale=dtype) if kind == "int" else Fp8(scale=dtype)
    codes, scales = _codes(rows, columns), _scales((rows, 1), dtype)
    values = scheme.values(columns, codes, _bytes(scales))
    numbers = _torch(codes, "int8" if kind == "int" else "float8_e4m3fn")
    # In fp32, whatever the scales are: compressed-tensors computes in their dtype.
    oracle = _dequantized(numbers, _torch(scales, dtype).float(), type=kind, strategy="channel")
    assert_same(values, oracle)
    assert_same(decode(scheme, unit, codes, _bytes(scales), None, rows, columns), oracle)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_row_scales_at_the_edges(unit: Vectors, name: str) -> None:
    edges = np.array(
        [0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32
    )[:, None]
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(edges), 1))
    oracle = codes.view(np.int8 if name == "int8" else ml_dtypes.float8_e4m3fn)
    with np.errstate(all="ignore"):
        expected = oracle.astype(np.float32) * edges
    got = decode(resolve(name), unit, codes, _bytes(edges), None, len(edges), 256)
    assert_same(got, expected)
    with np.errstate(all="ignore"):
        assert_same(resolve(name).values(256, codes, _bytes(edges)), expected)


# A scale for each group ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize(
    ("group", "rows", "groups"),
    [(32, 17, 3), (64, 33, 2), (96, 2, 2), (128, 1, 1), (128, 17, 3), (256, 3, 2)],
)
def test_int8_groups(unit: Vectors, group: int, rows: int, groups: int, dtype: str) -> None:
    scheme = GroupedInt8(group=group, scale=dtype)
    columns = group * groups
    codes, scales = _codes(rows, columns), _scales((rows, groups), dtype)
    values = scheme.values(columns, codes, _bytes(scales))
    oracle = _dequantized(
        _torch(codes, "int8"),
        _torch(scales, dtype).float(),
        type="int",
        strategy="group",
        group_size=group,
    )
    assert_same(values, oracle)
    got = decode(scheme, unit, codes, _bytes(scales), None, rows, columns)
    assert_same(got, rounded(values))
    assert np.abs(got - values).max() > 0  # scales aren't so simple that there was nothing to round
    assert (np.abs(got - values) <= 2.0**-8 * np.abs(values)).all()


def test_int8_groups_at_the_edges(unit: Vectors) -> None:
    edges = np.array(
        [0.0, -0.0, 1e-45, 2e-38, 2.0**-126, 2.6e36, 2.7e36, 3.4e38, np.inf, np.nan], np.float32
    )
    scales = np.repeat(edges[:, None], 8, axis=1)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(edges), 1))
    with np.errstate(all="ignore"):
        expected = rounded(codes.view(np.int8).astype(np.float32) * edges[:, None])
    scheme = resolve("int8_g32")
    assert_same(decode(scheme, unit, codes, _bytes(scales), None, len(edges), 256), expected)


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize(("rows", "columns"), [*SIZES, (257, 416), (128, 256)])
def test_fp8_block(unit: Vectors, rows: int, columns: int, dtype: str) -> None:
    scheme = Fp8Block(scale=dtype)
    blocks = (-(-rows // 128), -(-columns // 128))
    codes, scales = _codes(rows, columns), _scales(blocks, dtype)
    values = scheme.values(columns, codes, _bytes(scales))
    oracle = _dequantized(
        _torch(codes, "float8_e4m3fn"),
        _torch(scales, dtype).float(),
        type="float",
        strategy="block",
        block_structure=[128, 128],
    )
    assert_same(values, oracle)
    got = decode(scheme, unit, codes, _bytes(scales), None, rows, columns)
    assert_same(got, rounded(values))


@pytest.mark.parametrize(
    "scale", [0.0, -0.0, 1e-45, 2.0**-126, -7e35, 8e35, np.inf, -np.inf, np.nan]
)
def test_fp8_block_at_the_edges(unit: Vectors, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    scales = np.full((1, 2), scale, np.float32)
    with np.errstate(all="ignore"):
        expected = rounded(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[0, 0])
    assert_same(decode(Fp8Block(), unit, codes, _bytes(scales), None, 1, 256), expected)


def test_mxfp8_every_code_with_every_scale(unit: Vectors) -> None:
    scheme = resolve("mxfp8")
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    values = scheme.values(256, codes, scales)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, axis=1)
    oracle = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers
    np.testing.assert_array_equal(values, oracle)
    zeros = oracle == 0
    np.testing.assert_array_equal(np.signbit(values[zeros]), np.signbit(oracle[zeros]))
    got = decode(scheme, unit, codes, scales, None, 256, 256)
    assert_same(got, rounded(oracle))
    assert np.isnan(got[255]).all()
    kept = (np.abs(oracle) >= 2.0**-126) & (np.abs(oracle) < 2.0**128)
    np.testing.assert_array_equal(got[kept], oracle[kept])  # exact wherever bf16 reaches


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_mxfp8_sizes(unit: Vectors, rows: int, columns: int) -> None:
    scheme = resolve("mxfp8")
    codes = _codes(rows, columns)
    scales = np.random.default_rng(4).integers(90, 160, (rows, columns // 32), dtype=np.uint8)
    got = decode(scheme, unit, codes, scales, None, rows, columns)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, axis=1)
    assert_same(got, rounded(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers))


def _q8_0_blocks(scales: np.ndarray, columns: int) -> np.ndarray:
    """Blocks with these fp16 scales and all codes in turn, as rows: uint8 `[N, bytes of a row]`."""
    blocks = np.empty((scales.size, 34), np.uint8)
    blocks[:, :2] = _bytes(scales.reshape(-1, 1).astype(np.float16))
    blocks[:, 2:] = _codes(scales.size, 32)
    return blocks.reshape(-1, columns // 32 * 34)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_q8_0_sizes(unit: Vectors, rows: int, columns: int) -> None:
    scheme = resolve("q8_0")
    weights = np.random.default_rng(5).normal(size=(rows, columns)).astype(np.float32)
    codes = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    assert codes.shape == (rows, scheme.code_bytes(columns))
    oracle = gguf.dequantize(codes, gguf.GGMLQuantizationType.Q8_0)
    assert_same(scheme.values(columns, codes), oracle)
    assert_same(decode(scheme, unit, codes, None, None, rows, columns), rounded(oracle))


def test_q8_0_every_scale(unit: Vectors) -> None:
    scheme = resolve("q8_0")
    columns = 32 * 256
    codes = _q8_0_blocks(np.arange(1 << 16, dtype=np.uint16).view(np.float16), columns)
    with np.errstate(all="ignore"):
        oracle = gguf.dequantize(codes, gguf.GGMLQuantizationType.Q8_0)
        assert_same(scheme.values(columns, codes), oracle)
    got = decode(scheme, unit, codes, None, None, len(codes), columns)
    assert_same(got, rounded(oracle))


# Staging -----------------------------------------------------------------------------------------------------------


def _example(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes and scales."""
    if name == "q8_0":
        return _q8_0_blocks(_scales((rows, columns // 32), "float32"), columns), None
    part = resolve(name).parts(rows, columns)["scales"]
    if name == "mxfp8":
        scales = np.random.default_rng(6).integers(90, 160, part.shape, dtype=np.uint8)
    else:
        scales = _scales(part.shape, part.dtypes[0])
    return _codes(rows, columns), _bytes(scales)


@pytest.mark.parametrize(
    ("rows", "first", "end"), [(16, 0, 512), (16, 128, 256), (3, 0, 128), (1, 384, 512)]
)
@pytest.mark.parametrize("name", NAMES)
def test_staged_rows_are_the_decoded_ones(
    unit: Vectors, name: str, rows: int, first: int, end: int
) -> None:
    scheme = resolve(name).laid_out(512)
    codes, scales = _example(name, rows, 512)
    expected = np.zeros((16, end - first), np.float32)
    if name in ("int8", "fp8"):  # whose scales are not applied to the rows
        scales = _bytes(np.ones((rows, 1), np.float32))
    whole = decode(scheme, unit, codes, scales, None, rows, 512)
    expected[:rows] = whole[:, first:end]
    assert_same(staged(scheme, unit, codes, scales, None, rows, first, end), expected)


def test_mxfp8_staged_with_every_scale(unit: Vectors) -> None:
    scheme = resolve("mxfp8").laid_out(512)
    scales = np.random.default_rng(7).permutation(256).astype(np.uint8).reshape(16, 16)
    codes = np.random.default_rng(8).permutation(np.arange(16 * 512, dtype=np.uint16) % 256)
    codes = codes.astype(np.uint8).reshape(16, 512)
    expected = rounded(scheme.values(512, codes, scales))
    assert_same(staged(scheme, unit, codes, scales, None, 16, 0, 512), expected)


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_block", "mxfp8"])
def test_rows_decoded_together(unit: Vectors, name: str, count: int) -> None:
    columns = 128
    scheme = resolve(name).laid_out(columns)
    codes, scales = _example(name, count, columns)
    assert scales is not None
    if name in ("int8", "fp8"):  # whose scales are not applied to the rows
        scales = _bytes(np.ones((count, 1), np.float32))
    module = Module("together")
    with module.function("together", dict.fromkeys(("codes", "scales", "into"), ptr)) as (b, arg):
        matrix = Matrix(arg.codes, arg.scales, arg.codes)
        rows = [b.const(i64, row) for row in range(count)]
        decoders = scheme.decoders(b, unit, matrix, rows, b.const(i64, 0))
        with b.loop(0, columns // 32) as chunk:
            for row, decoder in enumerate(decoders):
                for words in decoder(chunk):
                    arg.into.at(2 * columns * row + chunk * 64).store(words)
    got = np.empty((count, columns), np.uint16)
    address = compile_ir("together", str(module), Target.host()).address
    codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(address)
    run(codes.ctypes.data, scales.ctypes.data, got.ctypes.data)
    expected = rounded(scheme.values(columns, codes, scales))
    assert_same((got.astype(np.uint32) << 16).view(np.float32), expected)


@pytest.mark.parametrize(("first", "end"), [(0, 32), (96, 160), (0, 416), (256, 416)])
@pytest.mark.parametrize("dtype", SCALES)
def test_fp8_block_staged_from_the_middle_of_a_block(
    unit: Vectors, dtype: str, first: int, end: int
) -> None:
    scheme = Fp8Block(scale=dtype).laid_out(416)
    codes, scales = _codes(16, 416), _bytes(_scales((1, 4), dtype))
    whole = decode(scheme, unit, codes, scales, None, 16, 416)
    got = staged(scheme, unit, codes, scales, None, 16, first, end)
    assert_same(got, whole[:, first:end])


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fn"])
def test_fp8_block_with_scales_of_a_byte(unit: Vectors, dtype: str) -> None:
    """As checkpoints of DeepSeek-V3.1 have them; with neighbours that a wider read would take for a part of them."""
    scheme = Fp8Block(scale=dtype)
    codes = _codes(16, 16384)
    scales = np.arange(2 * 128, dtype=np.uint8).reshape(2, 128)[:1] + np.uint8(64)
    got = decode(scheme, unit, codes, scales, None, 16, 16384)
    assert_same(got, rounded(scheme.values(16384, codes, scales)))


# Layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_lie_apart(unit: Vectors, name: str) -> None:
    rows, columns = 19, 256
    laid_out = resolve(name).laid_out(columns)
    codes, scales = _example(name, rows, columns)
    together = decode(laid_out, unit, codes, scales, None, rows, columns)

    def spread(part: np.ndarray, gap: int) -> np.ndarray:
        return np.pad(part, ((0, 0), (0, gap)), constant_values=0xFF)

    apart = replace(
        laid_out,
        row_bytes=laid_out.row_bytes + 36,
        scale_row_bytes=laid_out.scale_row_bytes + 8,
    )
    wide = None if scales is None else spread(scales, 8)
    assert_same(decode(apart, unit, spread(codes, 36), wide, None, rows, columns), together)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8", {"codes": (130, 384), "scales": (130, 1)}),
        ("int8_g128", {"codes": (130, 384), "scales": (130, 3)}),
        ("int8_g64", {"codes": (130, 384), "scales": (130, 6)}),
        ("int8_g32", {"codes": (130, 384), "scales": (130, 12)}),
        ("fp8", {"codes": (130, 384), "scales": (130, 1)}),
        ("fp8_block", {"codes": (130, 384), "scales": (2, 3)}),
        ("mxfp8", {"codes": (130, 384), "scales": (130, 12)}),
        ("q8_0", {"codes": (130, 408)}),
    ],
)
def test_parts(name: str, expected: dict[str, tuple[int, ...]]) -> None:
    scheme = resolve(name)
    parts = scheme.parts(130, 384)
    assert {key: part.shape for key, part in parts.items()} == expected
    assert scheme.code_bytes(384) == expected["codes"][1]
    assert scheme.block == {"int8_g128": 128, "int8_g64": 64}.get(name, 32)


@pytest.mark.parametrize("group", [0, -32, 48])
def test_groups_are_whole_chunks(group: int) -> None:
    with pytest.raises(ValueError, match=f"group: expected a multiple of 32, got {group}"):
        GroupedInt8(group=group)

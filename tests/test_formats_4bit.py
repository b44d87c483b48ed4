"""int4, mxfp4, ds_fp4, nvfp4, q4_0: the reference against other libraries, kernels against it bit for bit."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from formats_kit import assert_same, decode, rounded, units
from gguf import GGMLQuantizationType, quants
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertile.codegen.vectors import Vectors
from expertile.templates import formats
from expertile.templates.formats import Quantized
from expertile.templates.formats.ds_fp4 import DsFp4
from expertile.templates.formats.int4 import Int4
from expertile.templates.formats.mxfp4 import Mxfp4
from expertile.templates.formats.nvfp4 import Nvfp4
from expertile.templates.formats.q4_0 import Q40

vectors = pytest.mark.parametrize("unit", units().values(), ids=units())
mx_formats = pytest.mark.parametrize("format_", [Mxfp4(), DsFp4()], ids=lambda each: each.name)


def any_codes(rows: int, columns: int) -> np.ndarray:
    """Codes, uint8 `[rows, columns]`: in even rows all 16 in both halves of bytes of 32 columns, in odd ones random."""
    k = np.arange(columns)
    codes = np.random.default_rng(columns).integers(0, 16, (rows, columns), np.uint8)
    codes[::2] = (k // 2 + k % 2 * 7) % 16
    return codes


def low_first(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def any_bytes(rows: int, groups: int) -> np.ndarray:
    """Bytes of scales, uint8 `[rows, groups]`: each at least once in even rows if those have room for it."""
    scales = np.random.default_rng(groups).integers(0, 256, (rows, groups), np.uint8)
    scales[::2] = np.arange(scales[::2].size).reshape(-1, groups) % 256
    return scales


def torch_numbers(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a tensor."""
    return torch.from_numpy(raw).view(dtype)


def scheme_of(**weights: object) -> QuantizationScheme:
    """What compressed-tensors wants to know of a quantised model."""
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, **weights))


def assert_same_doubles(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal float64 numbers, zeros by their sign."""
    assert actual.dtype == expected.dtype == np.float64
    np.testing.assert_array_equal(actual, expected)
    signs = [np.signbit(x) & ~np.isnan(x) for x in (actual, expected)]
    np.testing.assert_array_equal(*signs)


# mxfp4 and ds_fp4 ---------------------------------------------------------------------------------

MX_ROWS, MX_COLUMNS = 34, 32 * 16


@mx_formats
def test_mx_values_are_those_of_ml_dtypes(format_: Quantized) -> None:
    codes, scales = any_codes(MX_ROWS, MX_COLUMNS), any_bytes(MX_ROWS, MX_COLUMNS // 32)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, 1)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factors
    assert_same_doubles(format_.values(MX_COLUMNS, low_first(codes), scales), expected)
    assert len(np.unique(scales[::2])) == 256


def test_mxfp4_values_are_those_of_transformers() -> None:
    codes = low_first(any_codes(MX_ROWS, MX_COLUMNS))
    scales = np.minimum(any_bytes(MX_ROWS, MX_COLUMNS // 32), 254)  # it has no NaN
    blocks = torch.from_numpy(codes).view(1, MX_ROWS, -1, 16)
    expected = convert_moe_packed_tensors(blocks, torch.from_numpy(scales)[None])
    with np.errstate(over="ignore"):
        actual = Mxfp4().values(MX_COLUMNS, codes, scales).astype(np.float32)
    assert_same(actual, expected[0].T.float().numpy())
    assert np.isinf(actual).any()


@mx_formats
@vectors
@pytest.mark.parametrize("rows", [1, 17, MX_ROWS])
def test_mx_kernels(format_: Quantized, unit: Vectors, rows: int) -> None:
    codes = low_first(any_codes(rows, MX_COLUMNS))
    scales = any_bytes(rows, MX_COLUMNS // 32)
    actual = decode(format_, unit, codes, scales, None, rows, MX_COLUMNS)
    assert_same(actual, rounded(format_.values(MX_COLUMNS, codes, scales)))


@vectors
def test_mx_edges(unit: Vectors) -> None:
    """By hand: what the other tests could have wrong on both sides."""
    scales = np.array([[0, 1, 2, 127, 254, 255]], np.uint8)
    codes = np.zeros((1, 6 * 16), np.uint8)
    codes[:] = 0x19  # −0.5, 0.5
    codes[0, ::16] = 0xF8  # −0, −6
    actual = decode(Mxfp4(), unit, codes, scales, None, 1, 6 * 32).reshape(6, 32)
    nan = float("nan")
    expected = [
        [-0.0, -6 * 2.0**-127, -0.0, 0.0],
        [-0.0, -6 * 2.0**-126, -0.0, 0.0],
        [-0.0, -6 * 2.0**-125, -(2.0**-126), 2.0**-126],
        [-0.0, -6.0, -0.5, 0.5],
        [-0.0, -float("inf"), -(2.0**126), 2.0**126],
        [nan, nan, nan, nan],
    ]
    assert_same(actual[:, :4], np.array(expected))


def test_mx_parts() -> None:
    assert {name: (part.shape, part.dtypes) for name, part in Mxfp4().parts(6, 96).items()} == {
        "codes": ((6, 3, 16), ("uint8",)),
        "scales": ((6, 3), ("uint8",)),
    }
    assert {name: (part.shape, part.dtypes) for name, part in DsFp4().parts(6, 96).items()} == {
        "codes": ((6, 48), ("int8",)),
        "scales": ((6, 3), ("float8_e8m0fnu", "uint8")),
    }


# nvfp4 --------------------------------------------------------------------------------------------

NV_ROWS, NV_COLUMNS = 34, 16 * 16
FACTORS = [1.0, 0.003, -7.5, 2.0**-149, 3e38, float("inf"), float("nan"), 0.0]


def any_nvfp4(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales."""
    return low_first(any_codes(rows, NV_COLUMNS)), any_bytes(rows, NV_COLUMNS // 16)


def factor_bytes(factor: float) -> np.ndarray:
    return np.array([factor], np.float32).view(np.uint8)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_nvfp4_values_are_those_of_ml_dtypes(divides: bool, factor: float) -> None:
    codes, scales = any_codes(NV_ROWS, NV_COLUMNS), any_bytes(NV_ROWS, NV_COLUMNS // 16)
    factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, 1)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factors
    with np.errstate(all="ignore"):
        whole = np.float64(np.float32(factor))
        expected = expected / whole if divides else expected * whole
    actual = Nvfp4(divides=divides).values(
        NV_COLUMNS, low_first(codes), scales, factor_bytes(factor)
    )
    assert_same_doubles(actual, expected)
    assert len(np.unique(scales[::2])) == 256


@pytest.mark.parametrize("factor", [1.0, 512.0, 2.0**-9])  # all is exact
def test_nvfp4_divides_in_compressed_tensors(factor: float) -> None:
    codes, scales = any_nvfp4(NV_ROWS)
    tensors = {
        "weight_packed": torch.from_numpy(codes),
        "weight_scale": torch_numbers(scales, torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([factor]),
    }
    scheme = scheme_of(type="float", strategy="tensor_group", group_size=16)
    expected = NVFP4PackedCompressor.decompress(tensors, scheme)["weight"]
    actual = Nvfp4(divides=True).values(NV_COLUMNS, codes, scales, factor_bytes(factor))
    assert_same(actual, expected.float().numpy())


@vectors
@pytest.mark.parametrize("rows", [1, 17, NV_ROWS])
@pytest.mark.parametrize("factor", FACTORS)
def test_nvfp4_kernels(unit: Vectors, rows: int, factor: float) -> None:
    """The weights are exact in bf16, and a product with the factor is rounded once."""
    codes, scales = any_nvfp4(rows)
    whole = factor_bytes(factor)
    actual = decode(Nvfp4(), unit, codes, scales, whole, rows, NV_COLUMNS)
    with np.errstate(all="ignore"):
        expected = Nvfp4().values(NV_COLUMNS, codes, scales, whole).astype(np.float32)
    assert_same(actual, expected)


@vectors
@pytest.mark.parametrize("factor", [*FACTORS, 2688.0])
def test_nvfp4_kernels_multiply_by_the_reciprocal(unit: Vectors, factor: float) -> None:
    codes, scales = any_nvfp4(17)
    whole = factor_bytes(factor)
    actual = decode(Nvfp4(divides=True), unit, codes, scales, whole, 17, NV_COLUMNS)
    values = Nvfp4().values(NV_COLUMNS, codes, scales, factor_bytes(1.0)).astype(np.float32)
    with np.errstate(all="ignore"):
        assert_same(actual, values * (np.float32(1) / np.float32(factor)))
        exact = Nvfp4(divides=True).values(NV_COLUMNS, codes, scales, whole)
    if 1e-30 < abs(factor) < 1e30:
        np.testing.assert_allclose(actual, exact, rtol=2**-23, atol=0)


def test_nvfp4_parts() -> None:
    assert {name: (part.shape, part.dtypes) for name, part in Nvfp4().parts(6, 96).items()} == {
        "codes": ((6, 48), ("uint8",)),
        "scales": ((6, 6), ("float8_e4m3fn",)),
        "factor": ((), ("float32",)),
    }


# int4 ---------------------------------------------------------------------------------------------

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
groups = pytest.mark.parametrize("group", [32, 64, 96, 128])


def any_numbers(rows: int, groups_: int, dtype: str) -> np.ndarray:
    """Random bits, so that all kinds of numbers are among them, in bytes: uint8 `[rows, groups · bytes]`.

    The first row begins with a NaN, infinities, denormals, the smallest normal number, the largest ones, and zeros.
    """
    info = torch.finfo(DTYPES[dtype])
    edges = [float("nan"), float("inf"), -float("inf"), info.tiny, -info.tiny, info.max, info.min]
    edges += [info.smallest_normal / 2, -info.smallest_normal / 4, 0.0, -0.0, 1.0]
    random = np.random.default_rng(rows).integers(
        0, 256, (rows, groups_ * info.bits // 8), np.uint8
    )
    first = torch.tensor(edges[:groups_], dtype=DTYPES[dtype]).view(torch.uint8).numpy()
    random[0, : len(first)] = first
    return random


@dtypes
@pytest.mark.parametrize("group", [32, 128])
def test_int4_values_are_those_of_compressed_tensors(group: int, dtype: str) -> None:
    rows, columns = 20, 12 * group
    codes = low_first(any_codes(rows, columns))
    raw = any_numbers(rows, 12, dtype)
    scales = torch_numbers(raw, DTYPES[dtype])
    tensors = {
        "weight_packed": torch_numbers(codes, torch.int32),
        "weight_scale": scales.float(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    scheme = scheme_of(type="int", strategy="group", group_size=group)
    expected = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert expected.dtype == torch.float32
    with np.errstate(over="ignore"):
        actual = Int4(group=group, scale=dtype).values(columns, codes, raw).astype(np.float32)
    assert_same(actual, expected.numpy())


def test_int4_tensors_are_those_of_compressed_tensors() -> None:
    scale = torch.full((6, 4), 0.5, dtype=torch.bfloat16)
    tensors = {"weight": torch.ones(6, 128, dtype=torch.bfloat16), "weight_scale": scale}
    scheme = scheme_of(type="int", strategy="group", group_size=32)
    packed = PackedQuantizationCompressor.compress(tensors, scheme)
    parts = Int4(group=32).parts(6, 128)
    for name, tensor in (("codes", packed["weight_packed"]), ("scales", packed["weight_scale"])):
        assert parts[name].shape == tensor.shape
        assert parts[name].dtypes == (str(tensor.dtype).removeprefix("torch."),)
    raw = [packed[f"weight_{name}"].view(torch.uint8).numpy() for name in ("packed", "scale")]
    np.testing.assert_array_equal(Int4(group=32).values(128, *raw), 1.0)


@dtypes
@groups
@vectors
@pytest.mark.parametrize("rows", [1, 17])
def test_int4_kernels(unit: Vectors, group: int, dtype: str, rows: int) -> None:
    columns = 12 * group
    codes, scales = low_first(any_codes(rows, columns)), any_numbers(rows, 12, dtype)
    format_ = Int4(group=group, scale=dtype)
    actual = decode(format_, unit, codes, scales, None, rows, columns)
    assert_same(actual, rounded(format_.values(columns, codes, scales)))
    assert np.isnan(actual[0, :group]).all()
    assert np.isinf(actual[0, group : 2 * group]).sum() == (codes_of(codes, group) != 8).sum()


def codes_of(packed: np.ndarray, group: int) -> np.ndarray:
    """The codes of the second group of the first row."""
    return np.stack([packed & 15, packed >> 4], -1)[0].ravel()[group : 2 * group]


@vectors
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int4_kernels_with_every_scale(unit: Vectors, dtype: str) -> None:
    rows, count = 128, 512
    scales = np.arange(1 << 16, dtype=np.uint16).reshape(rows, count).view(np.uint8)
    codes = low_first(any_codes(1, 32 * count)).repeat(rows, 0)
    format_ = Int4(group=32, scale=dtype)
    actual = decode(format_, unit, codes, scales, None, rows, 32 * count)
    expected = format_.values(32 * count, codes, scales)
    assert_same(actual, rounded(expected))
    finite = np.isfinite(expected) & (abs(expected) >= 2.0**-126) & np.isfinite(actual)
    error = abs(actual[finite] / expected[finite] - 1).max()
    assert 2**-9 < error <= 2**-8  # as its documentation says


@pytest.mark.parametrize("group", [0, -32, 16, 48])
def test_int4_groups_are_whole_chunks(group: int) -> None:
    with pytest.raises(ValueError, match=f"group: expected a multiple of 32, got {group}"):
        Int4(group=group)


# q4_0 ---------------------------------------------------------------------------------------------


def q4_0_blocks(rows: int, blocks: int, scales: np.ndarray) -> np.ndarray:
    """Rows of blocks from fp16 bits `[rows, blocks]`: uint8 `[rows, blocks · 18]`."""
    codes = low_first(any_codes(rows, 32 * blocks)).reshape(rows, blocks, 16)
    raw = scales.astype(np.uint16).view(np.uint8).reshape(rows, blocks, 2)
    return np.concatenate([raw, codes], -1).reshape(rows, -1)


EVERY_HALF = np.arange(1 << 16).reshape(128, 512)


def test_q4_0_values_are_those_of_gguf() -> None:
    codes = q4_0_blocks(128, 512, EVERY_HALF)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(codes, GGMLQuantizationType.Q4_0)
        assert_same(Q40().values(512 * 32, codes).astype(np.float32), expected)
    part = Q40().parts(128, 512 * 32)["codes"]
    assert part.shape == codes.shape
    assert part.dtypes == ("uint8",)


@vectors
def test_q4_0_kernels_with_every_scale(unit: Vectors) -> None:
    codes = q4_0_blocks(128, 512, EVERY_HALF)
    actual = decode(Q40(), unit, codes, None, None, 128, 512 * 32)
    expected = Q40().values(512 * 32, codes)
    assert_same(actual, rounded(expected))
    assert np.isnan(actual[EVERY_HALF.repeat(32, 1) & 0x7FFF > 0x7C00]).all()


@vectors
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("blocks", [1, 5])
def test_q4_0_kernels(unit: Vectors, rows: int, blocks: int) -> None:
    scales = np.random.default_rng(blocks).integers(0, 1 << 16, (rows, blocks))
    codes = q4_0_blocks(rows, blocks, scales)
    actual = decode(Q40(), unit, codes, None, None, rows, 32 * blocks)
    assert_same(actual, rounded(Q40().values(32 * blocks, codes)))


# All ----------------------------------------------------------------------------------------------


@vectors
@pytest.mark.parametrize(
    "format_",
    [Int4(group=64, scale="float16"), Mxfp4(), Nvfp4(), Q40()],
    ids=lambda each: each.name,
)
def test_rows_any_distance_apart(unit: Vectors, format_: Quantized) -> None:
    rows, columns = 17, 192
    tight = format_.laid_out(columns)
    apart = replace(
        tight,
        row_bytes=tight.row_bytes + 12,
        scale_row_bytes=tight.scale_row_bytes and tight.scale_row_bytes + 6,
    )
    random = np.random.default_rng(rows)
    codes, scales = (
        random.integers(0, 256, (rows, size), np.uint8)
        for size in (apart.row_bytes, apart.scale_row_bytes)
    )
    parts = codes[:, : tight.row_bytes], scales[:, : tight.scale_row_bytes]
    factor = factor_bytes(1.0)
    actual = decode(apart, unit, codes, scales, factor, rows, columns)
    assert_same(actual, rounded(format_.values(columns, *map(np.ascontiguousarray, parts), factor)))


def test_names() -> None:
    named = {
        "int4_g32": Int4(group=32), "int4_g128": Int4(group=128), "mxfp4": Mxfp4(), "ds_fp4": DsFp4(),
        "nvfp4": Nvfp4(), "q4_0": Q40(),
    }  # fmt: skip
    assert {name: formats.resolve(name) for name in named} == named
    assert Int4(group=128).block == 128

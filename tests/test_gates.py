"""Error bounds of exp, the logistic function, the normal distribution function and tanh, over all 65,536 bf16 numbers.

Each function is compiled by itself and compared with float64. A relative error only means something where the true
result is a normal number; below, the absolute error is bounded by the smallest normal number, 2⁻¹²⁶.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch

import expertile
from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.codegen.ir import Builder, Module, Value, f32, i64, ptr, vec
from expertile.templates import gates
from expertile.templates import math as kernel_math

Emit = Callable[[Builder, Value, Value], Value]
LANES = 16
SMALLEST = 2.0**-126


@pytest.fixture(scope="module", params=("avx512_bf16", "portable"))
def target_of(request: pytest.FixtureRequest) -> str:
    """An ISA for whose target the functions are compiled: with and without tiles or AVX-512 that is the same IR."""
    name: str = request.param
    if reason := isas.by_name(name).unavailable():
        pytest.skip(f"{name}: {reason}")
    return name


def every_bf16() -> np.ndarray:
    """All 65,536 bf16 numbers as float32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def evaluate(name: str, emit: Emit, g: np.ndarray, u: np.ndarray, isa: str) -> np.ndarray:
    """`emit` compiled and applied to float32 arrays, of a length that is a multiple of 16."""
    module = Module(name)
    parameters = {"n": i64, "g": ptr, "u": ptr, "out": ptr}
    with module.function(name, parameters) as (b, arg), b.loop(0, arg.n, LANES) as i:
        values = [each.at(i * 4).load(vec(f32, LANES)) for each in (arg.g, arg.u)]
        arg.out.at(i * 4).store(emit(b, *values))
    compiled = compile_ir(name, str(module), isas.by_name(isa).target())
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, *[ctypes.c_void_p] * 3)(compiled.address)
    assert g.size % LANES == 0
    g, u, out = np.ascontiguousarray(g), np.ascontiguousarray(u), np.empty_like(g)
    function(g.size, g.ctypes.data, u.ctypes.data, out.ctypes.data)
    return out


def numbers() -> np.ndarray:
    """All bf16 numbers as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return every_bf16().astype(np.float64)


def one_operand(name: str, emit: Callable[[Builder, Value], Value], isa: str) -> np.ndarray:
    """A function of one operand on every bf16 number, as float64."""
    x = every_bf16()
    return evaluate(name, lambda b, g, _u: emit(b, g), x, x, isa).astype(np.float64)


def worst(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative error where the true result is normal and representable; elsewhere it must be close."""
    with np.errstate(all="ignore"):
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(actual), nan)
        huge = np.abs(expected) >= 2.0**128 * (1 - 2.0**-25)
        assert np.array_equal(actual[huge & ~nan], np.sign(expected[huge & ~nan]) * np.inf)
        small = np.abs(expected) < SMALLEST
        assert np.all(np.abs(actual[small] - expected[small]) <= SMALLEST)
        normal = ~(nan | huge | small)
        return float(np.max(np.abs(actual[normal] / expected[normal] - 1)))


def each(function: Callable[[float], float]) -> np.ndarray:
    """A function of Python's math module on every bf16 number; what overflows is infinity."""

    def value(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf

    return np.array([value(float(x)) for x in every_bf16()])


def logistic(x: float) -> float:
    """1 / (1 + e⁻ˣ) without overflow."""
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def test_exp(target_of: str) -> None:
    actual = one_operand("exp", kernel_math.exp, target_of)
    x = numbers()
    expected = each(math.exp)
    # The docstring's limits: below -86.6 the result is zero although it is still normal down to -87.33.
    expected[x < -86.6] = 0
    assert worst(actual, expected) < 5e-7
    assert np.all(actual[x < -86.6] == 0)


def test_logistic(target_of: str) -> None:
    actual = one_operand("sigmoid", kernel_math.sigmoid, target_of)
    assert worst(actual, each(logistic)) < 1e-6


def test_normal_distribution(target_of: str) -> None:
    """Φ is what gelu has of erf."""
    actual = one_operand("normal_cdf", kernel_math.normal_cdf, target_of)
    x = numbers()
    expected = each(lambda x: math.erfc(-x / math.sqrt(2)) / 2)
    inside = ~(x < -13.1)
    assert np.all(actual[~inside] >= 0)
    assert np.all(actual[~inside] <= 2.0**-125)
    assert worst(actual[inside], expected[inside]) < 2e-5


def test_erf(target_of: str) -> None:
    actual = (
        2 * one_operand("erf", lambda b, x: kernel_math.normal_cdf(b, x * math.sqrt(2)), target_of)
        - 1
    )
    expected = each(math.erf)
    finite = ~np.isnan(expected)
    assert np.array_equal(np.isnan(actual), ~finite)
    assert np.max(np.abs(actual - expected)[finite]) < 2e-5


def test_tanh(target_of: str) -> None:
    actual = 2 * one_operand("tanh", lambda b, x: kernel_math.sigmoid(b, x * 2.0), target_of) - 1
    expected = each(math.tanh)
    finite = ~np.isnan(expected)
    assert np.array_equal(np.isnan(actual), ~finite)
    assert np.max(np.abs(actual - expected)[finite]) < 1e-6


# The gates themselves -----------------------------------------------------------------------------------------------

BOUNDS = {
    "silu": 5e-7,
    "gelu": 1e-6,
    "gelu_tanh": 2e-5,
    "relu2": 1e-7,
    "swiglu_oai": 1e-5,
    "silu_clamp": 5e-7,
}
"""Relative errors; the exponents of gelu_tanh and swiglu_oai are rounded to fp32 before exp magnifies that."""


@pytest.mark.parametrize("name", gates.names())
def test_gate(target_of: str, name: str) -> None:
    """Over all finite bf16 gates (ups, for relu2), with an up of 1."""
    gate = gates.by_name(name)
    g = every_bf16()
    g = np.where(np.isfinite(g), g, np.float32(0))
    u = np.ones_like(g) if gate.gated else g
    actual = evaluate(f"gate_{name}", gate.emit, g, u, target_of).astype(np.float64)
    function = oracle.gate_function(name)
    expected = function(torch.from_numpy(g).double(), torch.from_numpy(u).double()).numpy()
    # Where a factor e^… leaves the range of normal fp32 numbers, the product is tiny, and zero is close enough.
    tiny = np.abs(expected) < 1e-35
    assert np.all(np.abs(actual[tiny]) <= 1e-34)
    assert worst(actual[~tiny], expected[~tiny]) < BOUNDS[name]


@pytest.mark.parametrize("name", gates.names())
def test_nan_stays(target_of: str, name: str) -> None:
    gate = gates.by_name(name)
    nan, one = np.full(LANES, np.nan, np.float32), np.ones(LANES, np.float32)
    for g, u in ((nan, one), (one, nan)) if gate.gated else ((nan, nan),):
        assert np.isnan(evaluate(f"gate_{name}", gate.emit, g, u, target_of)).all()


def test_clamps_at_infinity(target_of: str) -> None:
    """Infinite ups are clamped like any large one."""
    g = np.array([np.inf, 1, 1, 1] * 4, np.float32)
    u = np.array([1, np.inf, -np.inf, 0] * 4, np.float32)
    finite_g, finite_u = (np.clip(each, -100, 100) for each in (g, u))
    for gate in (expertile.swiglu_oai(limit=7.0), expertile.silu_clamp(limit=7.0)):
        actual = evaluate(f"gate_{gate.name}", gate.emit, g, u, target_of)
        expected = evaluate(f"gate_{gate.name}", gate.emit, finite_g, finite_u, target_of)
        assert np.array_equal(actual, expected)

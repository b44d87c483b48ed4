"""exp, the logistic function and the normal distribution function on fp32 vectors, in instructions every target has.

Polynomials were fitted (Chebyshev nodes, relative error) for this project; the bounds are checked in
`tests/test_gates.py` over all bf16 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertile.codegen.ir import Builder, Value, i32, vec

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # few enough bits that n · _LN2_HIGH is exact
_LN2_LOW = -2.12194440054690583e-4
_ROUND = (
    12582912.0  # 1.5 · 2^23: adding it leaves the integer nearest to x in the low mantissa bits
)
_EXP_SMALLEST = -86.6  # below, the result would be denormal: it counts as zero
_EXP_LARGEST = 88.72  # above, it overflows to infinity

_EXP = (5.000000014e-01, 1.666657336e-01, 4.166645678e-02, 8.363776467e-03, 1.393454452e-03)

_TAIL_SCALE = 0.21
_TAIL = (
    8.370548862e-02,
    8.516442131e-02,
    6.855450241e-02,
    1.272358039e-01,
    -9.924843197e-02,
    3.568725310e-01,
    -3.366416354e-01,
    2.866345411e-01,
    -7.227722612e-02,
)


def polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """Σ cᵢ·xⁱ by Horner's rule."""
    result = b.const(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = b.fmuladd(result, x, b.const(x.type, coefficient))
    return result


def exp(b: Builder, x: Value) -> Value:
    """eˣ, relative error below 5e-7; 0 below -86.6; infinity above 88.72; NaN stays."""
    integers = vec(i32, x.lanes)
    clamped = b.max(b.min(x, _EXP_LARGEST), _EXP_SMALLEST)
    shifted = b.fmuladd(clamped, b.const(x.type, _LOG2E), b.const(x.type, _ROUND))
    n = shifted - _ROUND
    r = b.fmuladd(n, b.const(x.type, -_LN2_HIGH), clamped)
    r = b.fmuladd(n, b.const(x.type, -_LN2_LOW), r)
    q = polynomial(b, r, _EXP)
    mantissa = b.fmuladd(r * r, q, r) + 1.0
    # 2^(n-1), doubled afterwards, so that n = 128 stays inside the exponent's range.
    half_power = ((shifted.bitcast(integers) << 23) + (126 << 23)).bitcast(x.type)
    result = mantissa * half_power * 2.0
    result = b.select(x > _EXP_LARGEST, float("inf"), result)
    return b.select(x < _EXP_SMALLEST, 0.0, result)


def sigmoid(b: Builder, x: Value) -> Value:
    """1 / (1 + e⁻ˣ), relative error below 1e-6 where it is a normal number."""
    return 1.0 / (exp(b, -x) + 1.0)


def normal_cdf(b: Builder, x: Value) -> Value:
    """Φ(x) = (1 + erf(x/√2)) / 2, relative error below 5e-7, in the lower tail too; zero below -13.17.

    For x < 0 it is e^(-x²/2) · P(t) with t = 1 / (1 + 0.21·|x|), where P·e^… fits erfc(|x|/√2) / 2; above, 1 - Φ(-x).
    """
    magnitude = b.unary("fabs", x)
    t = 1.0 / b.fmuladd(magnitude, b.const(x.type, _TAIL_SCALE), b.const(x.type, 1.0))
    tail = exp(b, x * x * -0.5) * (t * polynomial(b, t, _TAIL))
    return b.select(x > 0.0, 1.0 - tail, tail)

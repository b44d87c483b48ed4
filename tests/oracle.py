"""The layer in float64: what every kernel must give, and how far from it a result may be.

The product is taken over bf16-rounded operands, the intermediate is rounded to bf16 once, and everything else is
float64.  A result is right if its relative Frobenius error is at most 3e-3 (H, I ≥ 256), and for any size if every
element is within 2⁻⁸·Σ|h||w||p| plus one ulp of the output, where h is the intermediate, w the down weights and p the
router weights.  Where fp32 can't tell to which of two bf16 numbers an h belongs, both are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import expertile
from expertile.codegen import isa as isas
from expertile.runtime import layer, repeat
from expertile.runtime.matrices import LayerWeights
from expertile.runtime.weights import ExpertWeights

FROBENIUS = 3e-3
ROW_SCALED = ("int8", "fp8", "nvfp4")
"""Formats whose scale of a row (of the matrix) multiplies the sums, so that no weight is rounded."""

# Running a layer ----------------------------------------------------------------------------------------------------


@contextmanager
def running(name: str) -> Iterator[None]:
    """Layers run on the ISA called `name`, whatever this process would choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isas, "select", lambda: isas.by_name(name))
        patch.setattr(layer, "_prepared", {})
        patch.setattr(repeat, "_known", {})
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch, and so a layer, uses `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """The arguments of one call; gate_up and down are tensors unless a test is about other weights."""

    x: Tensor
    gate_up: Any
    down: Any
    ids: Tensor
    router: Tensor
    gate: Any = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False
    transposed: bool = False

    def run(self, **changes: Any) -> Tensor:
        """The result, with some arguments replaced."""
        case = replace(self, **changes)
        return expertile.fused_experts(
            case.x,
            case.gate_up,
            case.down,
            case.ids,
            case.router,
            gate=case.gate,
            gate_up_bias=case.gate_up_bias,
            down_bias=case.down_bias,
            interleaved=case.interleaved,
            transposed=case.transposed,
        )

    @property
    def weights(self) -> LayerWeights:
        """What the runtime makes of the arguments that stay the same from call to call."""
        return LayerWeights(
            self.gate_up, self.down, self.gate_up_bias, self.down_bias,
            self.gate, self.interleaved, self.transposed,
        )  # fmt: skip

    def tokens(self, order: Sequence[int] | Tensor) -> dict[str, Any]:
        """The arguments for some of the tokens, in an order: changes for `run`."""
        index = torch.as_tensor(order, dtype=torch.int64)
        return {"x": self.x[index], "ids": self.ids[index], "router": self.router[index]}


def bits(tensor: Tensor) -> Tensor:
    """A floating-point tensor as integers, for comparisons to the bit."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the bit, except that one NaN is as good as another."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    same = (bits(actual) == bits(expected)) | (actual.isnan() & expected.isnan())
    if not same.all():
        at = tuple(int(i) for i in (~same).nonzero()[0])
        wrong = int((~same).sum())
        raise AssertionError(
            f"{wrong} of {same.numel()} elements differ, first at {at}: {actual[at]!r} instead of {expected[at]!r}"
        )


# Making one ---------------------------------------------------------------------------------------------------------


def make_case(
    seed: int,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    gate: Any = "silu",
    bias: torch.dtype | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    ids_dtype: torch.dtype = torch.int64,
    router_dtype: torch.dtype = torch.float32,
    nowhere: float = 0.1,
    scale: float = 2.0,
) -> Case:
    """Random arguments: projections of about `scale`, and a share `nowhere` of the ids is -1."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    columns = intermediate if gate == "relu2" else 2 * intermediate
    gate_up = normal(experts, columns, hidden) * (scale / hidden**0.5)
    down = normal(experts, hidden, intermediate) / intermediate**0.5
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    ids = torch.randint(experts, (tokens, top_k), generator=random)
    ids[torch.rand(tokens, top_k, generator=random) < nowhere] = -1
    return Case(
        x=normal(tokens, hidden).to(dtype),
        gate_up=gate_up.bfloat16(),
        down=down.bfloat16(),
        ids=ids.to(ids_dtype),
        router=normal(tokens, top_k).to(router_dtype),
        gate=gate,
        gate_up_bias=None if bias is None else normal(experts, columns).to(bias),
        down_bias=None if bias is None else normal(experts, hidden).to(bias),
        interleaved=interleaved,
        transposed=transposed,
    )


def scattered(
    tensor: Tensor,
    *,
    gaps: Sequence[int],
    offset: int = 1,
    last: int = 1,
    filler: float | None = None,
) -> Tensor:
    """The same values as a view into memory that is otherwise NaN (for integers: a number that is no id).

    gaps: foreign elements after each index of the dimensions but the last, from the first on. offset: those before
    the view. last: the stride of the last dimension.
    """
    if filler is None:
        filler = float("nan") if tensor.is_floating_point() else 1 << 20
    strides = [last]
    for size, gap in zip(reversed(tensor.shape[1:]), reversed(gaps), strict=True):
        strides.insert(0, size * strides[0] + gap)
    size = offset + max(1, tensor.shape[0]) * strides[0] + offset + 1
    memory = torch.full((size,), filler, dtype=tensor.dtype)
    view = memory.as_strided(tensor.shape, strides, offset)
    view.copy_(tensor)
    return view


# The reference ------------------------------------------------------------------------------------------------------


def _silu(g: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _phi(x: Tensor) -> Tensor:
    return torch.special.erfc(-x / 2**0.5) / 2


def gate_function(gate: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A gate's definition, on float64."""
    if isinstance(gate, str):
        gate = {"swiglu_oai": expertile.swiglu_oai(), "silu_clamp": expertile.silu_clamp()}.get(
            gate, gate
        )
    if isinstance(gate, expertile.swiglu_oai):
        alpha, limit = gate.alpha, gate.limit

        def swiglu_oai(g: Tensor, u: Tensor) -> Tensor:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            return g * _sigmoid(alpha * g) * (u + 1)

        return swiglu_oai
    if isinstance(gate, expertile.silu_clamp):
        bound = gate.limit
        return lambda g, u: _silu(g.clamp(max=bound)) * u.clamp(-bound, bound)
    return {
        "silu": lambda g, u: _silu(g) * u,
        "gelu": lambda g, u: g * _phi(g) * u,
        # (1 + tanh y) / 2 as σ(2y), which doesn't cancel
        "gelu_tanh": lambda g, u: g * _sigmoid((8 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)) * u,
        "relu2": lambda g, u: u.clamp(min=0) ** 2,
    }[gate]


def to_bf16(values: Tensor) -> Tensor:
    """float64 rounded to the nearest bf16 (once: not by way of fp32), as float64."""
    mantissa, exponent = torch.frexp(values)
    spare = (-125 - exponent).clamp(min=0)  # digits a denormal lacks
    digits = torch.ldexp(torch.ones_like(values), 8 - spare)
    rounded = torch.ldexp(torch.round(mantissa * digits) / digits, exponent)
    finite = values.isfinite()
    rounded = torch.where(rounded.abs() >= 2.0**128, torch.sign(rounded) * torch.inf, rounded)
    return torch.where(finite, rounded, values)


@dataclass(frozen=True)
class Reference:
    """The result and the allowed distance from it, both float64 `[T, H]`."""

    output: Tensor
    bound: Tensor


Values = Callable[[Any, int], Tensor]
"""What an expert's matrix is taken to be, float64 `[N, K]`: of a tensor, ExpertWeights or a pair (gate, up)."""


def exact(weights: Any, expert: int) -> Tensor:
    """The values as the format defines them."""
    if isinstance(weights, tuple):
        return torch.cat([exact(half, expert) for half in weights])
    if isinstance(weights, Tensor):
        return weights[expert].double()
    parts = {name: part.of(expert) for name, part in weights.parts.items()}
    if weights.scheme.name == "bf16":
        return parts["codes"].double()
    raw = {
        name: part.contiguous().view(-1).view(torch.uint8).view(*part.shape[:1], -1).numpy()
        for name, part in parts.items()
    }
    return torch.from_numpy(weights.scheme.values(weights.shape[2], **raw))


def multiplied(weights: Any, expert: int) -> Tensor:
    """The values as kernels multiply them: rounded to bf16, unless their scale is left to the sums."""
    if isinstance(weights, tuple):
        return torch.cat([multiplied(half, expert) for half in weights])
    values = exact(weights, expert)
    if isinstance(weights, ExpertWeights) and weights.scheme.name not in ROW_SCALED:
        return values.float().bfloat16().double()
    return values


def _halves(case: Case, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up along the last dimension; the same twice where there is no gate half."""
    if case.gate == "relu2":
        return rows, rows
    if case.interleaved:
        return rows[..., 0::2], rows[..., 1::2]
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def _hidden(case: Case, x: Tensor, expert: int, values: Values) -> tuple[Tensor, Tensor]:
    """The intermediate in bf16, and how far away what fp32 makes of it may be: `[tokens, I]` each."""
    function = gate_function(case.gate)
    weights = values(case.gate_up, expert)
    weights = weights if case.transposed else weights.mT
    product, size = x @ weights, x.abs() @ weights.abs()
    if case.gate_up_bias is not None:
        bias = case.gate_up_bias[expert].double()
        product, size = product + bias, size + bias.abs()
    g, u = _halves(case, product)
    g_size, u_size = _halves(case, size)
    error = (x.shape[1] + 8) * 2.0**-24
    h = function(g, u)
    rounded = to_bf16(h)
    away = torch.zeros_like(h)
    for g_sign in (-1, 1):
        for u_sign in (-1, 1):
            other = function(g + g_sign * error * g_size, u + u_sign * error * u_size)
            for factor in (1 - 2.0**-15, 1 + 2.0**-15):  # the gate's own error
                away = torch.maximum(away, (to_bf16(other * factor) - rounded).abs())
    return rounded, away


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of `dtype` around float64 values."""
    digits, least = {
        torch.bfloat16: (8, -126),
        torch.float16: (11, -14),
        torch.float32: (24, -126),
    }[dtype]
    exponent = torch.frexp(values)[1] - 1
    return torch.ldexp(torch.ones_like(values), exponent.clamp(min=least) - digits + 1)


def reference(case: Case, values: Values = multiplied) -> Reference:
    """The layer in float64, and the elementwise bound."""
    output = torch.zeros(case.x.shape, dtype=torch.float64)
    bound = torch.zeros_like(output)
    x = to_bf16(case.x.double())
    for expert in case.ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = (case.ids == expert).nonzero(as_tuple=True)
        h, away = _hidden(case, x[token], expert, values)
        weights = values(case.down, expert)
        weights = weights if case.transposed else weights.mT
        y = h @ weights
        if case.down_bias is not None:
            y = y + case.down_bias[expert].double()
        router = case.router[token, slot].double()[:, None]
        output.index_add_(0, token, router * y)
        distance = (2.0**-8 * h.abs() + away) @ weights.abs()
        if case.down_bias is not None:
            distance = distance + 2.0**-22 * case.down_bias[expert].double().abs()
        bound.index_add_(0, token, router.abs() * distance)
    return Reference(output, bound + ulp(output, case.x.dtype))


def check(case: Case, actual: Tensor) -> None:
    """Raise AssertionError unless `actual` is right for a case with finite arguments."""
    assert actual.shape == case.x.shape
    assert actual.dtype == case.x.dtype
    expected = reference(case)
    difference = (actual.double() - expected.output).abs()
    within = difference <= expected.bound
    if not within.all():
        at = tuple(int(i) for i in (~within).nonzero()[0])
        raise AssertionError(
            f"{int((~within).sum())} of {within.numel()} elements are out of bounds, first {at}: {actual[at].item()} "
            f"instead of {expected.output[at].item()} ± {expected.bound[at].item()}"
        )
    intermediate = case.down.shape[1 if case.transposed else 2]
    if min(case.x.shape[1], intermediate) >= 256 and actual.numel():
        error = float(difference.norm() / expected.output.norm())
        assert error <= FROBENIUS, f"relative Frobenius error {error:.2e} > {FROBENIUS}"


# TDPBF16PS in NumPy -------------------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any, *, flush: bool) -> Any:
    """a·b + c on float32 arrays, rounded once; `flush` turns denormal results into zeros, as the hardware does.

    In float64 the product is exact (a and b have 24 bits). Rounding the sum to odd keeps what the final rounding to
    float32 needs to know. Whether a result is denormal is decided by its value before it has a denormal's precision
    (tininess after rounding, as x86 does it).
    """
    with np.errstate(all="ignore"):
        product, addend = np.float64(a) * np.float64(b), np.float64(c)
        total = product + addend
        virtual = total - product
        rest = (product - (total - virtual)) + (addend - virtual)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (rest != 0) & even
        towards = np.where(rest > 0, np.inf, -np.inf)
        odd = np.where(inexact, np.nextafter(total, towards), total)
        result = odd.astype(np.float32)
        if flush:
            tiny = np.abs(odd) < 2.0**-126 - 2.0**-151
            result = np.where(tiny, np.copysign(np.float32(0), odd), result).astype(np.float32)
    return result


def _flush(values: Any) -> Any:
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values).astype(np.float32)


def _add(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return _flush(np.add(a, b, dtype=np.float32))  # a sum that is denormal is exact


def tile_product(weights: Tensor, tokens: Tensor) -> Any:
    """`[n, k]` bf16 weights times `[t, k]` bf16 tokens as AMX multiplies them, in chunks of 32 k: `[t, n]` float32."""
    k = weights.shape[1]
    padding = (0, -k % 32)
    a, b = (_flush(torch.nn.functional.pad(t, padding).float().numpy()) for t in (weights, tokens))
    c = np.zeros((tokens.shape[0], weights.shape[0]), np.float32)
    for chunk in range(0, a.shape[1], 32):
        sums = [np.zeros_like(c), np.zeros_like(c)]
        for i in range(chunk, chunk + 32):
            sums[i % 2] = fma(b[:, None, i], a[None, :, i], sums[i % 2], flush=True)
        c = _add(c, _add(sums[0], sums[1]))
    return c


def exact_layer(case: Case) -> Tensor:
    """A relu2 layer to the bit, on float32 in NumPy, from plain row-major weights and bf16 hidden states."""
    assert case.gate == "relu2"
    assert not case.transposed
    sums = np.zeros(case.x.shape, np.float32)
    for expert in range(case.down.shape[0]):
        token, slot = (case.ids == expert).nonzero(as_tuple=True)
        u = tile_product(case.gate_up[expert], case.x[token])
        with np.errstate(all="ignore"):
            if case.gate_up_bias is not None:
                u = u + case.gate_up_bias[expert].float().numpy()
            h = np.maximum(u, np.float32(0)) ** 2
        y = tile_product(case.down[expert], torch.from_numpy(h).bfloat16())
        if case.down_bias is not None:
            with np.errstate(all="ignore"):
                y = y + case.down_bias[expert].float().numpy()
        for i in range(token.numel()):
            router = case.router[token[i], slot[i]].float().numpy()
            sums[token[i]] = fma(router, y[i], sums[token[i]], flush=False)
    return torch.from_numpy(sums).to(case.x.dtype)

"""Expertile: mixture-of-experts feed-forward layers on CPUs, from plain row-major weights.

    y = expertile.fused_experts(x, gate_up, down, topk_ids, topk_weights)

Kernels are generated for the machine and the shape at first call, and cached on disk. The specialisation interface is
:class:`ExpertSpec`, :func:`compile` and :meth:`Kernels.bind`; for Transformers, `import expertile.transformers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version as _version

import torch

from expertile.codegen.errors import CodegenError
from expertile.runtime import layer as _layer
from expertile.runtime import operator as _operator
from expertile.runtime import spec as _spec
from expertile.runtime.bound import Layer
from expertile.runtime.errors import ArgumentError, DtypeError, ExpertileError
from expertile.runtime.layer import calls
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.spec import ExpertSpec
from expertile.runtime.weights import ExpertWeights
from expertile.templates import formats as _formats
from expertile.templates.gates import Gate
from expertile.templates.gates.silu_clamp import SiluClamp as silu_clamp
from expertile.templates.gates.swiglu_oai import SwigluOai as swiglu_oai

__all__ = [
    "ArgumentError",
    "CodegenError",
    "DtypeError",
    "ExpertSpec",
    "ExpertWeights",
    "ExpertileError",
    "Gate",
    "Kernels",
    "Layer",
    "calls",
    "compile",
    "formats",
    "fused_experts",
    "silu_clamp",
    "swiglu_oai",
]
__version__ = _version("expertile")


def fused_experts(
    x: torch.Tensor,
    gate_up: Matrix | tuple[Matrix, Matrix],
    down: Matrix,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    gate: str | Gate = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    activations: str = "bf16",
) -> torch.Tensor:
    """The expert feed-forward layer: Σ over a token's experts of router weight · down(gate(gate_up(x))).

    x: `[T, H]` bf16, fp16 or fp32, rounded to bf16 for the product; any row stride.
    gate_up: `[E, 2I, H]` bf16, gate rows then up rows, or alternating if `interleaved`; `[E, H, 2I]` if `transposed`;
        `[E, I, H]` for a gate without a gate half ("relu2"). Any expert and row stride; read in place. Or
        :class:`ExpertWeights`, for quantised formats and for one tensor an expert; or a pair (gate, up) of either.
    down: `[E, H, I]` bf16; `[E, I, H]` if `transposed`; or :class:`ExpertWeights`, of the same format or another.
    topk_ids: `[T, k]` int32 or int64, any strides. -1 means "not here" and contributes exactly zero.
    topk_weights: `[T, k]` bf16, fp16 or fp32, any strides.
    gate: "silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai", "silu_clamp", or a :class:`Gate` such as
        `swiglu_oai(alpha=1.702, limit=7.0)`.
    gate_up_bias, down_bias: `[E, 2I]` and `[E, H]`, bf16 or fp32, in the order of the weights' rows.
    activations: "bf16", or "int8" to quantise hidden states and intermediate to 8 bits, each token with its own scale,
        and multiply bytes: for int8 weights with a scale for each row. Faster, and about 2.6e-2 off.

    Returns `[T, H]` of x's dtype. Products are accumulated in fp32, the intermediate is rounded to bf16 once, and the
    experts of a token are summed in fp32 in ascending order: the result of a token depends neither on the number of
    threads nor on the other tokens. Inference only.

    Raises ArgumentError (a ValueError) or DtypeError (a TypeError) naming the argument; an id outside -1…E-1 is an
    ArgumentError too. At most 70 expert kernels are compiled for a layer shape (35 for each projection), with AMX 134.
    """
    weights = LayerWeights(
        gate_up, down, gate_up_bias, down_bias, gate, interleaved, transposed, activations
    )
    return _operator.fused_experts(x, weights, topk_ids, topk_weights)


def formats() -> tuple[str, ...]:
    """The names of the weight formats that a spec can have, beside "bf16"."""
    return _formats.names()


class Kernels:
    """The kernels of a spec: made by :func:`compile`."""

    def __init__(self, spec: ExpertSpec, rows: tuple[int, ...] | None = ()) -> None:
        self.spec = spec
        self._rows = rows

    def bind(
        self,
        gate_up: Matrix | tuple[Matrix, Matrix],
        down: Matrix,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Layer:
        """A callable `layer(x, topk_ids, topk_weights)` over these weights, which are checked now.

        On a machine of several memory nodes this also finds out where their pages are, and compiles for that.
        The tensors are held, not their addresses: in-place changes and a replaced `.data` are seen by the next call.
        Raises ArgumentError or DtypeError where they don't fit the spec.
        """
        spec = self.spec
        weights = LayerWeights(
            gate_up, down, gate_up_bias, down_bias,
            spec.gate, spec.interleaved, spec.transposed, spec.activations,
        )  # fmt: skip
        kernels = _layer.prepare(weights, spec.top_k)
        found = kernels.spec
        for name in (
            "hidden", "intermediate", "experts", "weights", "down_weights", "gate_up_bias", "down_bias",
        ):  # fmt: skip
            expected, got = spec.resolved(name), found.resolved(name)
            if expected != got:
                raise ArgumentError(f"{name}: the spec says {expected!r}, the tensors say {got!r}")
        _layer.plan_ahead(kernels, weights, self._rows)
        return Layer(weights)


def compile(spec: ExpertSpec, rows: Iterable[int] | None = None) -> Kernels:
    """Compile the kernels for experts that get `rows` tokens each, for contiguous weights, now instead of at first use.

    With the default, nothing compiles afterwards, however many tokens an expert gets.

    Raises ArgumentError for numbers of tokens below 1.
    """
    rows = rows if rows is None else tuple(rows)
    _spec.contiguous(spec).compile(rows)
    return Kernels(spec, rows)

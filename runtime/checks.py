"""The checks of a call: everything about the arguments that would make machine code read the wrong memory.

Values of ids are checked by the driver, which reads them anyway; everything else is in the tensors' metadata.
"""

from __future__ import annotations

import torch

from expertile.runtime.errors import ArgumentError
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.spec import ExpertSpec
from expertile.runtime.tensors import last_contiguous, tensor
from expertile.runtime.weights import ExpertWeights
from expertile.templates.formats import Quantized
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.bf16 import RowMajor
from expertile.templates.gates import Gate

HIDDEN_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
ROUTER_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ID_BYTES = {torch.int32: 4, torch.int64: 8}
BIAS_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def layer(
    weights: LayerWeights, top_k: int
) -> tuple[ExpertSpec, tuple[WeightFormat, WeightFormat]]:
    """Check the weights of a layer against each other; its spec, and the formats as the tensors lie.

    The gate is resolved already.
    """
    gate = weights.gate
    assert isinstance(gate, Gate)
    first, transposed = weights.gate_up, weights.transposed
    if isinstance(first, tuple):
        gate_up_rows, gate_up_shape, gate_up_format = _pair(first, weights, gate)
    else:
        gate_up_shape, gate_up_format = _matrix("gate_up", first, weights)
        gate_up_rows = gate_up_shape[2 if transposed else 1]
    down_shape, down_format = _matrix("down", weights.down, weights)
    experts, hidden = gate_up_shape[0], gate_up_shape[1 if transposed else 2]
    halves = 2 if gate.gated else 1
    if gate_up_rows % halves:
        raise ArgumentError(
            f"gate_up: expected an even number of gate and up rows, got {gate_up_rows} in shape {gate_up_shape}"
        )
    intermediate = gate_up_rows // halves
    expected = (experts, intermediate, hidden) if transposed else (experts, hidden, intermediate)
    if down_shape != expected:
        raise ArgumentError(
            f"down: expected shape {expected} to go with gate_up of shape {gate_up_shape}"
            f"{' (transposed)' if transposed else ''}, got {down_shape}"
        )
    spec = ExpertSpec(
        hidden,
        intermediate,
        experts,
        top_k,
        _scheme(gate_up_format),
        gate,
        _bias("gate_up_bias", weights.gate_up_bias, experts, gate_up_rows),
        _bias("down_bias", weights.down_bias, experts, hidden),
        weights.interleaved,
        transposed,
        _scheme(down_format),
        weights.activations,
    )
    _splits(spec, gate_up_format, pair=isinstance(first, tuple))
    return spec, (gate_up_format, down_format)


Shape = tuple[int, ...]


def _matrix(name: str, value: Matrix, weights: LayerWeights) -> tuple[Shape, WeightFormat]:
    """Check one tensor [E, N, K], or [E, K, N]; its shape, and its format as it lies."""
    if isinstance(value, ExpertWeights):
        if weights.transposed:
            raise ArgumentError(f"transposed: expected False where {name} is {value!r}")
        return value.shape, value.scheme
    convert = "; convert once with .to(torch.bfloat16), or make expertile.ExpertWeights of it"
    tensor(name, value, 3, [torch.bfloat16], convert)
    last_contiguous(name, value)
    if min(value.stride()) < 0 or value.numel() == 0:
        raise ArgumentError(
            f"{name}: expected at least one expert, row and column, got shape {tuple(value.shape)}"
        )
    row = value.stride(1) if value.shape[1] > 1 else value.shape[2]
    return tuple(value.shape), RowMajor(2 * row)


def _pair(
    pair: tuple[Matrix, ...], weights: LayerWeights, gate: Gate
) -> tuple[int, Shape, WeightFormat]:
    """Check separate gate and up matrices; rows of both, the shape of one, and their format."""
    if len(pair) != 2:
        raise ArgumentError(f"gate_up: expected a pair (gate, up), got {len(pair)} values")
    if not gate.gated or weights.interleaved or weights.transposed:
        raise ArgumentError(
            "gate_up: expected one tensor, not a pair, for a gate without a gate half and with interleaved or "
            "transposed"
        )
    (shape, format_), (up_shape, up_format) = (
        _matrix(f"gate_up[{number}]", half, weights) for number, half in enumerate(pair)
    )
    if shape != up_shape or format_ != up_format:
        raise ArgumentError(
            f"gate_up: expected gate and up alike, got {shape} {format_} and {up_shape} {up_format}"
        )
    return 2 * shape[1], shape, format_


def _scheme(format_: WeightFormat) -> str | Quantized:
    """What an ExpertSpec calls a format: without the strides of these tensors."""
    return format_.scheme() if isinstance(format_, Quantized) else "bf16"


def _splits(spec: ExpertSpec, format_: WeightFormat, pair: bool) -> None:
    """Raise unless gate and up are rows of their own in the scales as well."""
    if spec.projections == 1 or pair or not isinstance(format_, Quantized):
        return
    up_row = 1 if spec.interleaved else spec.intermediate
    if up_row % format_.shared_rows:
        raise ArgumentError(
            f"gate_up: {format_.name} has a scale for {format_.shared_rows} rows, and the up half begins at row "
            f"{up_row}; pass gate and up apart, as a pair"
        )


def _bias(name: str, bias: torch.Tensor | None, experts: int, width: int) -> str | None:
    """Check a bias; its kind."""
    if bias is None:
        return None
    tensor(name, bias, 2, BIAS_DTYPES)
    last_contiguous(name, bias)
    if tuple(bias.shape) != (experts, width):
        raise ArgumentError(f"{name}: expected shape {(experts, width)}, got {tuple(bias.shape)}")
    return BIAS_DTYPES[bias.dtype]


def routing(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, hidden: int
) -> None:
    """Check the hidden states and the router's choice against the layer."""
    tensor("x", x, 2, HIDDEN_DTYPES)
    tensor("topk_ids", topk_ids, 2, ID_BYTES)
    tensor("topk_weights", topk_weights, 2, ROUTER_KINDS)
    last_contiguous("x", x)
    if x.shape[1] != hidden:
        raise ArgumentError(
            f"x: expected shape [T, {hidden}] to go with gate_up, got {tuple(x.shape)}"
        )
    if topk_ids.shape[0] != x.shape[0]:
        raise ArgumentError(
            f"topk_ids: expected {x.shape[0]} rows, one for each token of x, got shape {tuple(topk_ids.shape)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ArgumentError(
            f"topk_weights: expected the shape of topk_ids, {tuple(topk_ids.shape)}, got {tuple(topk_weights.shape)}"
        )

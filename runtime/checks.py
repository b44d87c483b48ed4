"""The checks of a call: everything about the arguments that would make machine code read the wrong memory.

Values of ids are checked by the driver, which reads them anyway; everything else is in the tensors' metadata.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from expertile.runtime.errors import ArgumentError, DtypeError
from expertile.runtime.spec import ExpertSpec
from expertile.templates.gates import Gate

HIDDEN_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
ROUTER_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ID_BYTES = {torch.int32: 4, torch.int64: 8}
BIAS_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def _names(dtypes: Mapping[torch.dtype, object]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(
    name: str, value: object, rank: int, dtypes: Mapping[torch.dtype, object], how: str = ""
) -> None:
    """Raise unless `value` is a dense CPU tensor of the rank and one of the dtypes."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ArgumentError(
            f"{name}: expected a dense (strided) tensor, got layout {value.layout}; use .to_dense()"
        )
    if value.device.type != "cpu":
        raise ArgumentError(
            f"{name}: expected a tensor on the CPU, got device {value.device}; use .cpu()"
        )
    if value.dim() != rank:
        raise ArgumentError(f"{name}: expected {rank} dimensions, got shape {tuple(value.shape)}")
    if value.dtype not in dtypes:
        got = str(value.dtype).removeprefix("torch.")
        raise DtypeError(f"{name}: expected {_names(dtypes)}, got {got}{how}")
    if value.is_neg():
        raise ArgumentError(
            f"{name}: is a lazily negated view, whose memory holds other numbers; use .resolve_neg()"
        )
    no_grad(name, value)


def no_grad(name: str, value: torch.Tensor) -> None:
    """Raise if autograd would record what happens to `value`."""
    if torch.is_grad_enabled() and value.requires_grad:
        raise ArgumentError(
            f"{name}: requires grad, but Expertile computes inference only; call it under torch.no_grad() or "
            "torch.inference_mode(), or use .detach()"
        )


def last_contiguous(name: str, value: torch.Tensor) -> None:
    """Raise unless neighbours in the last dimension are neighbours in memory."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides {tuple(value.stride())}; "
            "use .contiguous()"
        )


def layer(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    top_k: int,
    gate: Gate,
    interleaved: bool,
    transposed: bool,
) -> ExpertSpec:
    """Check the tensors of a layer against each other; its spec."""
    convert = "; convert once with .to(torch.bfloat16)"
    for name, weight in (("gate_up", gate_up), ("down", down)):
        tensor(name, weight, 3, {torch.bfloat16: None}, convert)
        last_contiguous(name, weight)
        if min(weight.stride()) < 0 or weight.numel() == 0:
            raise ArgumentError(
                f"{name}: expected at least one expert, row and column, got shape {tuple(weight.shape)}"
            )
    experts = gate_up.shape[0]
    columns, hidden = (gate_up.shape[2], gate_up.shape[1]) if transposed else gate_up.shape[1:]
    halves = 2 if gate.gated else 1
    if columns % halves:
        raise ArgumentError(
            f"gate_up: expected an even number of gate and up rows, got {columns} in shape {tuple(gate_up.shape)}"
        )
    intermediate = columns // halves
    expected = (experts, intermediate, hidden) if transposed else (experts, hidden, intermediate)
    if tuple(down.shape) != expected:
        raise ArgumentError(
            f"down: expected shape {expected} to go with gate_up of shape {tuple(gate_up.shape)}"
            f"{' (transposed)' if transposed else ''}, got {tuple(down.shape)}"
        )
    kinds = []
    for name, bias, width in (
        ("gate_up_bias", gate_up_bias, columns),
        ("down_bias", down_bias, hidden),
    ):
        if bias is not None:
            tensor(name, bias, 2, BIAS_DTYPES)
            last_contiguous(name, bias)
            if tuple(bias.shape) != (experts, width):
                raise ArgumentError(
                    f"{name}: expected shape {(experts, width)}, got {tuple(bias.shape)}"
                )
        kinds.append(None if bias is None else BIAS_DTYPES[bias.dtype])
    return ExpertSpec(
        hidden,
        intermediate,
        experts,
        top_k,
        "bf16",
        gate,
        kinds[0],
        kinds[1],
        interleaved,
        transposed,
    )


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

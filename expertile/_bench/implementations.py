"""Who computes a layer: Expertile and the implementations that come with PyTorch and Transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

import expertile
from expertile._bench.shapes import Shape
from expertile._bench.workload import Weights

Run = Callable[[Weights, Tensor, Tensor, Tensor], Tensor]
"""An implementation of a layer: weights, x, ids, router weights."""


def ours(shape: Shape) -> Run:
    """Expertile."""
    options = shape.options

    def run(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        return expertile.fused_experts(x, w.gate_up, w.down, ids, router, **options, **w.biases)

    return run


def _linear(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """F.linear, expert by expert."""
    assert isinstance(w.gate_up, Tensor)
    assert isinstance(w.down, Tensor)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w.gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w.down[expert])
        out.index_add_(0, token, (y * router[token, slot, None]).to(x.dtype))
    return out


def _grouped_mm(forward: Callable[..., Tensor]) -> Run:
    """Transformers' implementation, on what it looks at of a module."""

    def gate(halves: Tensor) -> Tensor:
        gate, up = halves.chunk(2, -1)
        return F.silu(gate) * up

    def run(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        module = SimpleNamespace(
            gate_up_proj=w.gate_up, down_proj=w.down, num_experts=w.down.shape[0], _apply_gate=gate,
            has_gate=True, has_bias=False, is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
        )  # fmt: skip
        return forward(module, x, ids, router)

    return run


def peers() -> dict[str, Run | str]:
    """The other implementations by name, or why one is absent."""
    found: dict[str, Run | str] = {"F.linear": _linear}
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError as error:
        found["grouped_mm"] = f"absent: {error}"
    else:
        found["grouped_mm"] = _grouped_mm(grouped_mm_experts_forward)
    return found

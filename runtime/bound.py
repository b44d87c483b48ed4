"""A layer bound to its weights."""

from __future__ import annotations

import torch

from expertile.runtime import operator
from expertile.templates.gates import Gate


class Layer:
    """Expert weights with their kernels: call it with hidden states and the router's choice.

    It holds the tensors, not their addresses: an in-place change and a replaced `.data` are seen by the next call.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate: str | Gate,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        interleaved: bool,
        transposed: bool,
    ) -> None:
        self._tensors = (gate_up, down, gate_up_bias, down_bias)
        self._options = (gate, interleaved, transposed)

    def __call__(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]` of x's dtype; see :func:`expertile.fused_experts`."""
        gate_up, down, gate_up_bias, down_bias = self._tensors
        gate, interleaved, transposed = self._options
        return operator.fused_experts(
            x,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            gate,
            gate_up_bias,
            down_bias,
            interleaved,
            transposed,
        )

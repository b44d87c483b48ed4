"""A layer bound to its weights."""

from __future__ import annotations

import torch

from expertile.runtime import operator
from expertile.runtime.matrices import LayerWeights


class Layer:
    """Expert weights with their kernels: call it with hidden states and the router's choice.

    It holds the tensors, not their addresses: an in-place change and a replaced `.data` are seen by the next call.
    :class:`ExpertWeights` hold the memory they were made from: only in-place changes are seen.
    """

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights

    def __call__(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, H]` of x's dtype; see :func:`expertile.fused_experts`."""
        return operator.fused_experts(x, self._weights, topk_ids, topk_weights)

"""The weights of a layer as a call is given them: tensors or :class:`ExpertWeights`, and what goes with them.

Everything between the door and the kernels passes one `LayerWeights` on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from expertile.runtime.weights import ExpertWeights
from expertile.templates.gates import Gate

Matrix = torch.Tensor | ExpertWeights
"""The matrices of all experts, `[E, N, K]`."""


class LayerWeights(NamedTuple):
    """Arguments of :func:`expertile.fused_experts` that stay the same from call to call."""

    gate_up: Matrix | tuple[Matrix, Matrix]
    down: Matrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: str | Gate = "silu"
    interleaved: bool = False
    transposed: bool = False
    activations: str = "bf16"

    def key(self) -> tuple[Any, ...]:
        """All that the checks look at and kernels are specialised on, hashable."""
        first = self.gate_up if isinstance(self.gate_up, tuple) else (self.gate_up,)
        return (
            *map(_signature, first), _signature(self.down), _signature(self.gate_up_bias),
            _signature(self.down_bias), self.gate, self.interleaved, self.transposed, self.activations,
        )  # fmt: skip


def _signature(value: Matrix | None) -> tuple[Any, ...] | None:
    """All metadata of a weight that the checks look at."""
    if value is None:
        return None
    if isinstance(value, ExpertWeights):  # was checked when it was made, and does not change
        return value.shape, value.scheme
    return (
        value.shape, value.stride(), value.dtype, value.device, value.layout, value.requires_grad, value.is_neg(),
    )  # fmt: skip

"""What runs plain PyTorch tensors today: F.linear expert by expert, and the implementations of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peers.adapters import Peer, Run, Setup, register

_MOST_COPIED_BYTES = 1.5 * 2**30


@register
class Transformers(Peer):
    """The experts module of Qwen3-MoE; its other implementations (deepgemm, sonicmoe) are for GPUs."""

    name = "transformers"
    implementations = ("F.linear", "eager", "batched_mm", "grouped_mm")
    requirements = ("torch==2.13.0 numpy", "transformers==5.24.0")

    def start(self, setup: Setup) -> str:
        import transformers

        size = setup.size
        self.size = size
        self.config = transformers.Qwen3MoeConfig(
            hidden_size=size.hidden,
            moe_intermediate_size=size.intermediate,
            num_experts=size.experts,
            num_experts_per_tok=size.top_k,
        )
        return f"Qwen3MoeExperts of {transformers.__version__}"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        with torch.device("meta"):
            experts = Qwen3MoeExperts(self.config)
        experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        runs = {name: self._module(experts, name) for name in self.implementations[1:]}
        return {"F.linear": _linear(gate_up, down)} | runs

    def _module(self, experts: Any, implementation: str) -> Run:
        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            self.config._experts_implementation = implementation
            return experts(x, ids, router)

        return run

    def refusal(self, implementation: str, tokens: int) -> str | None:
        copied = tokens * self.size.top_k * self.size.expert_bytes
        if implementation == "batched_mm" and copied > _MOST_COPIED_BYTES:
            return f"would copy {copied / 2**30:.1f} GiB of weights, an expert for each token"
        return None


def _linear(gate_up: Tensor, down: Tensor) -> Run:
    def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, token, (y * router[token, slot, None]).to(x.dtype))
        return out

    return run

"""Intel Extension for PyTorch: the operator its models' expert layers run on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register


@register
class Ipex(Peer):
    """`fused_experts`, on weights of `convert_weight_packed_moe_bf16`."""

    name = "ipex"
    implementations = ("ipex",)
    requirements = ("torch==2.8.0 numpy", "intel-extension-for-pytorch==2.8.0")
    weights = "repacked"
    ids_dtype = torch.int32

    def start(self, setup: Setup) -> str:
        import intel_extension_for_pytorch as ipex  # type: ignore[import-not-found]

        return f"fused_experts {ipex._C._get_current_isa_level().lower()}"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
        operators = torch.ops.torch_ipex
        packed = operators.convert_weight_packed_moe_bf16(gate_up, down)
        unquantised = (False, 0, 0, 0, *(None,) * 6)

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            return operators.fused_experts(
                x, *packed, router, ids, False, True, False, *unquantised
            )

        return {"ipex": run}

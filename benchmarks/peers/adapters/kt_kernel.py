"""KTransformers' CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register
from peers.inputs import Matrix, dense

_KERNELS = {
    "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
    "int8": ("AMXInt8_MOE",),
    "fp8_block": ("AMXFP8_MOE", "AVX2FP8_MOE"),
    "int4_g32": ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"),
    "mxfp4": ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"),
}
"""By format; the second where the package's build lacks the first. Those called AMX have code for AVX-512 too."""
_GROUPS = {"fp8_block": 128, "int4_g32": 32, "mxfp4": 32}


@register
class KtKernel(Peer):
    """Its kernels called AMX, which have code for AVX-512 too, or for AVX2 where the package's build lacks them."""

    name = "kt-kernel"
    implementations = ("kt-kernel",)
    requirements = (
        "torch==2.13.0 numpy",
        "--no-deps kt-kernel==0.7.2",
        "safetensors gguf typer rich pyyaml httpx packaging",
    )
    weights = "repacked"
    formats = tuple(_KERNELS)
    scratch = 12

    def start(self, setup: Setup) -> str:
        import kt_kernel  # type: ignore[import-not-found]
        from kt_kernel import kt_kernel_ext as extension

        workers = extension.WorkerPoolConfig()
        workers.subpool_count = 1
        workers.subpool_numa_map = [0]
        workers.subpool_thread_count = [setup.threads]
        self.engine = extension.CPUInfer(workers)
        self.extension, self.setup, self.layers = extension, setup, 0
        self.on_gpu = torch.zeros(setup.size.experts, dtype=torch.bool)  # read at every call
        names = _KERNELS[setup.size.weights]
        found = (getattr(extension.moe, name, None) for name in names)
        self.kernel: Any = next((kernel for kernel in found if kernel is not None), None)
        if self.kernel is None:
            raise ImportError(f"this build has none of {', '.join(names)}")
        return f"{self.kernel.__name__} ({kt_kernel.__cpu_variant__})"

    def layer(self, gate_up: Matrix, down: Matrix) -> Mapping[str, Run]:
        size = self.setup.size
        experts = self._load(gate_up, down)

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            out = torch.empty_like(x)
            count = torch.tensor([len(x)], dtype=torch.int32)
            task = experts.forward_task(
                count.data_ptr(), size.top_k, ids.data_ptr(), router.data_ptr(), x.data_ptr(),
                out.data_ptr(), False,
            )  # fmt: skip
            self.engine.submit(task)
            self.engine.sync()
            return out

        return {"kt-kernel": run}

    def _load(self, gate_up: Matrix, down: Matrix) -> Any:
        """The package's own object, with a copy of the weights."""
        size = self.setup.size
        config = self.extension.moe.MOEConfig(
            size.experts, size.top_k, size.hidden, size.intermediate, self.on_gpu.data_ptr()
        )
        config.layer_idx, self.layers = self.layers, self.layers + 1
        config.pool = self.engine.backend_
        config.max_len = max(self.setup.tokens)
        if size.weights in _GROUPS:
            config.quant_config.bits = 8 if size.weights == "fp8_block" else 4
            config.quant_config.group_size = _GROUPS[size.weights]
            config.quant_config.zero_point = False
        if size.weights == "int8":  # it quantises by row itself
            dense = [_dense(matrix) for matrix in (gate_up, down)]
            gates, ups = (half.contiguous() for half in dense[0].chunk(2, 1))
            pointers = [matrix.data_ptr() for matrix in (gates, ups, dense[1])]
            config.gate_proj, config.up_proj, config.down_proj = pointers
        else:
            codes, scales = zip(*(_parts(matrix) for matrix in (gate_up, down)), strict=True)
            config.gate_projs, config.up_projs, config.down_projs = _addresses(size.experts, *codes)
            config.gate_scales, config.up_scales, config.down_scales = _addresses(
                size.experts, *scales
            )
        experts = self.kernel(config)
        same_order = torch.arange(size.experts)
        self.engine.submit(experts.load_weights_task(same_order.data_ptr()))
        self.engine.sync()
        return experts


def _parts(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """Codes and scales as it takes them: powers of two in bf16."""
    if isinstance(matrix, Tensor):
        return matrix, None
    scales = matrix.scales
    if scales is not None and scales.dtype == torch.uint8:
        scales = torch.exp2(scales - 127.0).bfloat16()
    return matrix.codes, scales


def _addresses(experts: int, gate_up: Tensor | None, down: Tensor | None) -> list[list[list[int]]]:
    """Of each expert's gate, up and down."""
    if gate_up is None or down is None:
        return [[[0] * experts]] * 3
    gates, ups = gate_up.chunk(2, 1)
    return [[[expert.data_ptr() for expert in matrix]] for matrix in (gates, ups, down)]


def _dense(matrix: Matrix) -> Tensor:
    """bf16 `[experts, rows, columns]`"""
    return torch.stack([dense(matrix, n).bfloat16() for n in range(matrix.shape[0])])

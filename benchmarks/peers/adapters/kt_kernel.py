"""KTransformers' CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register


@register
class KtKernel(Peer):
    """`AMXBF16_MOE`, which has code for AMX and for avx512_bf16; `AVX2BF16_MOE` where the package's build lacks it."""

    name = "kt-kernel"
    implementations = ("kt-kernel",)
    requirements = (
        "torch==2.13.0 numpy",
        "--no-deps kt-kernel==0.7.2",
        "safetensors gguf typer rich pyyaml httpx packaging",
    )
    weights = "repacked"
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
        self.kernel = getattr(extension.moe, "AMXBF16_MOE", None) or extension.moe.AVX2BF16_MOE
        return f"{self.kernel.__name__} ({kt_kernel.__cpu_variant__})"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
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

    def _load(self, gate_up: Tensor, down: Tensor) -> Any:
        """The package's own object, with a copy of the weights."""
        size = self.setup.size
        config = self.extension.moe.MOEConfig(
            size.experts, size.top_k, size.hidden, size.intermediate, self.on_gpu.data_ptr()
        )
        config.layer_idx, self.layers = self.layers, self.layers + 1
        config.pool = self.engine.backend_
        config.max_len = max(self.setup.tokens)
        gates, ups = gate_up.split(size.intermediate, 1)
        config.gate_projs, config.up_projs, config.down_projs = (
            [[expert.data_ptr() for expert in matrices]] for matrices in (gates, ups, down)
        )
        absent = [[0] * size.experts]
        config.gate_scales = config.up_scales = config.down_scales = absent
        experts = self.kernel(config)
        same_order = torch.arange(size.experts)
        self.engine.submit(experts.load_weights_task(same_order.data_ptr()))
        self.engine.sync()
        return experts

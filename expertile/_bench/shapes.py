"""The expert layers that commands know by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import typer

import expertile

Json = dict[str, Any]

W8A8 = "w8a8"
"""What stands for int8 weights with int8 activations where a weight format is named."""


@dataclass(frozen=True)
class Shape:
    """An expert layer to measure, or to say something about."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gate: str = "silu"
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False
    weights: str = "bf16"
    native: str = "bf16"
    """The weight format of the public checkpoint."""

    @property
    def scheme(self) -> str:
        """The weight format."""
        return "int8" if self.weights == W8A8 else self.weights

    @property
    def activations(self) -> str:
        """What is multiplied by it."""
        return "int8" if self.weights == W8A8 else "bf16"

    def in_format(self, weights: str) -> Shape:
        """The layer with other weights, or "w8a8". Quantised ones aren't transposed: no checkpoint has such."""
        transposed = self.transposed and weights == "bf16"
        return replace(self, weights=weights, transposed=transposed)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights, codes and scales."""
        gate_up, down = self.spec().formats()
        return gate_up.matrix_bytes(2 * self.intermediate, self.hidden) + down.matrix_bytes(
            self.hidden, self.intermediate
        )

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of a call."""
        return 2 * 3 * self.hidden * self.intermediate * tokens * self.top_k

    def spec(self) -> expertile.ExpertSpec:
        """The layer to compile kernels for."""
        bias = "bf16" if self.bias else None
        sizes = (self.hidden, self.intermediate, self.experts, self.top_k)
        return expertile.ExpertSpec(
            *sizes, self.scheme, self.gate, bias, bias, self.interleaved, self.transposed,
            activations=self.activations,
        )  # fmt: skip

    @property
    def options(self) -> Json:
        """What :func:`expertile.fused_experts` must be told beside the tensors."""
        return {
            "gate": self.gate,
            "interleaved": self.interleaved,
            "transposed": self.transposed,
            "activations": self.activations,
        }


def _named(shapes: Iterable[Shape]) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


_GPT_OSS: Json = {"gate": "swiglu_oai", "bias": True, "interleaved": True, "native": "mxfp4"}

MODELS = _named(
    [
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("mixtral-8x22b", 6144, 16384, 8, 2),
        Shape("deepseek-v2-lite", 2048, 1408, 64, 6),
        Shape("deepseek-v3", 7168, 2048, 256, 8, native="fp8_block"),
        Shape("deepseek-v4-flash", 4096, 2048, 256, 6, "silu_clamp", native="ds_fp4"),
        Shape("qwen1.5-moe", 2048, 1408, 60, 4),
        Shape("qwen2-57b-a14b", 3584, 2560, 64, 8),
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("qwen3-235b-a22b", 4096, 1536, 128, 8),
        Shape("qwen3-next-80b-a3b", 2048, 512, 512, 10),
        Shape("qwen3.5-397b-a17b", 4096, 1024, 512, 10),  # as described, configuration not seen
        Shape("kimi-k2-thinking", 7168, 2048, 384, 8, native="int4_g32"),
        Shape("glm-4.5", 5120, 1536, 160, 8),
        Shape("glm-4.5-air", 4096, 1408, 128, 8),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4, **_GPT_OSS),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, **_GPT_OSS),
        Shape("olmoe-1b-7b", 2048, 1024, 64, 8),
        Shape("phi-3.5-moe", 4096, 6400, 16, 2),
        Shape("minimax-m2", 3072, 1536, 256, 8, native="fp8_block"),
        Shape("granite-moe-3b", 1536, 512, 40, 8),
        Shape("gemma-4-26b-a4b", 2816, 704, 128, 8, "gelu_tanh"),  # likewise
        Shape("ernie-4.5-21b", 2560, 1536, 64, 6),
        Shape("hunyuan-large", 6400, 18304, 16, 1),
    ]
)
"""Public models, from their configurations: hidden and expert intermediate size, experts, experts a token."""

SHAPES = MODELS | _named(
    [
        replace(MODELS["deepseek-v3"], name="deepseek-v3-16e", experts=16),
        replace(MODELS["qwen3-235b-a22b"], name="qwen3-235b-32e", experts=32),
        replace(MODELS["gpt-oss-20b"], name="gpt-oss", transposed=True),
    ]
)
"""Beside them two with fewer experts, which fit into 4 GiB, and gpt-oss as bf16 checkpoints have it."""

DEFAULT_SHAPES = (
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "deepseek-v3-16e",
    "qwen3-235b-32e",
    "gpt-oss",
)
"""What is measured unless a shape is named."""


def shape_from(text: str) -> Shape:
    """A shape by its name, or from "HxIxExk". Raises typer.BadParameter for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        hidden, intermediate, experts, top_k = map(int, text.split("x"))
    except ValueError:
        known = ", ".join(SHAPES)
        raise typer.BadParameter(
            f"expected hidden x intermediate x experts x top-k, such as 2048x768x128x8, or one of {known}; got {text!r}"
        ) from None
    if min(hidden, intermediate) < 1 or not 1 <= top_k <= experts:
        raise typer.BadParameter(
            f"expected sizes of at least 1 and no more of top-k than experts; got {text!r}"
        )
    return Shape(text, hidden, intermediate, experts, top_k)

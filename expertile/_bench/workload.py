"""What is computed: the shapes of layers, their weights, and which experts a call uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import typer
from torch import Tensor

import expertile
from expertile.runtime.matrices import Matrix
from expertile.runtime.samples import random_bf16, random_weights
from expertile.runtime.weights import ExpertWeights
from expertile.templates import formats

Json = dict[str, Any]

_ROUTINGS = 16  # for each layer
_HOT_TOKENS, _COLD_EXPERTS = 500, 60


# Shapes -------------------------------------------------------------------------------------------


W8A8 = "w8a8"
"""What stands for int8 weights with int8 activations where a weight format is named."""


@dataclass(frozen=True)
class Shape:
    """An expert layer to measure."""

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


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-v3-16e", 7168, 2048, 16, 8),
        Shape("qwen3-235b-32e", 4096, 1536, 32, 8),
        Shape(
            "gpt-oss", 2880, 2880, 32, 4, "swiglu_oai", bias=True, interleaved=True, transposed=True
        ),
    )
}


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


def numbers_from(text: str) -> list[int]:
    """The different numbers in "1,2,4", ascending. Raises typer.BadParameter for anything else."""
    numbers = {int(part) if part.strip().isdecimal() else 0 for part in text.split(",")}
    if 0 in numbers:
        raise typer.BadParameter(
            f"expected numbers from 1 with commas between, such as 1,2,4; got {text!r}"
        )
    return sorted(numbers)


# Weights ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """One layer."""

    gate_up: Matrix
    down: Matrix
    biases: Json

    @classmethod
    def random(cls, shape: Shape, seed: int = 0) -> Weights:
        """Every page written. bf16 weights are ordinary tensors."""
        e, h, i = shape.experts, shape.hidden, shape.intermediate
        sizes = ((e, h, 2 * i), (e, i, h)) if shape.transposed else ((e, 2 * i, h), (e, h, i))
        widths = {"gate_up_bias": 2 * i, "down_bias": h} if shape.bias else {}
        biases = {name: random_bf16(e, width) for name, width in widths.items()}
        gate_up, down = (
            _matrices(shape.scheme, size, 2 * seed + number) for number, size in enumerate(sizes)
        )
        return cls(gate_up, down, biases)


def _matrices(weights: str, size: tuple[int, int, int], seed: int) -> Matrix:
    if weights == "bf16":
        return random_bf16(*size, seed=seed)
    return random_weights(formats.resolve(weights), size, seed)


# Calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Which experts of which layer a call uses."""

    layer: int
    ids: Tensor
    router: Tensor
    bytes: int
    """Of the distinct experts' weights."""


Routing = tuple[Tensor, Tensor]
"""ids and router weights, `[T, k]`."""


def _uniform(shape: Shape, tokens: int, random: torch.Generator) -> Routing:
    """Each token chooses its experts independently of the others, all alike."""
    router, ids = torch.rand(tokens, shape.experts, generator=random).topk(shape.top_k)
    return ids, router.softmax(-1)


def schedule(shape: Shape, layers: int, tokens: int) -> list[Call]:
    """Calls with independent random routings, 16 for each layer, which take turns."""
    return _schedule(shape, layers, tokens, lambda random: _uniform(shape, tokens, random))


def skewed(shape: Shape, layers: int) -> list[Call]:
    """Calls of the same kind in which one expert gets 500 tokens and 60 others one each (as many as there are).

    A token has one expert here; the others it chose are elsewhere (-1).
    """
    cold = min(_COLD_EXPERTS, shape.experts - 1)
    tokens = _HOT_TOKENS + cold
    ids = torch.full((tokens, shape.top_k), -1)
    ids[:, 0] = (torch.arange(tokens) - _HOT_TOKENS + 1).clamp(min=0)
    router = torch.full(ids.shape, 1 / shape.top_k)
    return _schedule(shape, layers, tokens, lambda random: (ids, router))


def _schedule(
    shape: Shape, layers: int, seed: int, route: Callable[[torch.Generator], Routing]
) -> list[Call]:
    """16 calls for each layer, which take turns.

    Experts are renamed so that a call uses those that were used longest ago: the routing stays random, and nothing is
    read again before everything else was, however few experts a call has.
    """
    random = torch.Generator().manual_seed(seed)
    last_use = torch.zeros(layers, shape.experts)
    calls = []
    for number in range(_ROUTINGS * layers):
        ids, router = route(random)
        here = ids >= 0
        used, places = ids[here].unique(return_inverse=True)
        age = last_use[number % layers]
        oldest = (age + torch.rand(shape.experts, generator=random)).argsort()[: len(used)]
        age[oldest] = number + 1
        renamed = torch.full_like(ids, -1)
        renamed[here] = oldest[places]
        calls.append(Call(number % layers, renamed, router, len(used) * shape.expert_bytes))
    return calls


# Together -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A shape with as many layers of weights as calls shall cycle over."""

    shape: Shape
    layers: list[Weights]

    @classmethod
    def of(cls, shape: Shape, gib: float) -> Subject:
        """At least `gib` GiB of weights, in whole layers."""
        count = max(1, -(-int(gib * 2**30) // (shape.experts * shape.expert_bytes)))
        return cls(shape, [Weights.random(shape, number) for number in range(count)])

    @property
    def matrices(self) -> list[Tensor]:
        """All weights but biases, scales and factors: contiguous tensors `[E, N, …]`, a row in the last dimension."""
        matrices = (matrix for w in self.layers for matrix in (w.gate_up, w.down))
        return [_codes(m) if isinstance(m, ExpertWeights) else m for m in matrices]

    def compile(self, calls: Iterable[Call]) -> None:
        """Compile what these calls need, for contiguous weights."""
        rows: set[int] = set()
        for call in calls:
            rows.update(call.ids[call.ids >= 0].unique(return_counts=True)[1].tolist())
        expertile.compile(self.shape.spec(), sorted(rows))

    def facts(self) -> Json:
        """The shape and its weights, for a report."""
        count = len(self.layers)
        size = count * self.shape.experts * self.shape.expert_bytes
        return {**asdict(self.shape), "layers": count, "weight_bytes": size}


def _codes(weights: ExpertWeights) -> Tensor:
    codes = weights.parts["codes"].tensors[0]
    return codes.flatten(2)

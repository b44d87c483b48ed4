"""What is computed: layers of weights, and which experts a call uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch import Tensor

import expertile
from expertile._bench.shapes import Shape
from expertile.runtime.matrices import Matrix
from expertile.runtime.samples import random_bf16, random_weights
from expertile.runtime.weights import ExpertWeights
from expertile.templates import formats

Json = dict[str, Any]

_ROUTINGS = 16  # for each layer
_HOT_TOKENS, _COLD_EXPERTS = 500, 60


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

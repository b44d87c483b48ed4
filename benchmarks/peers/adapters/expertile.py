"""Expertile itself, measured like the others; it also measures what the machine can do at most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from peers.adapters import Peer, Run, Setup, register
from peers.formats import FORMATS
from peers.inputs import Matrix

_CALIBRATIONS, _CANDIDATES = 5, 4


@register
class Expertile(Peer):
    """`expertile.fused_experts`."""

    name = "expertile"
    implementations = ("expertile",)
    requirements = ()
    formats = ("bf16", *FORMATS)

    def start(self, setup: Setup) -> str:
        import expertile
        from expertile.codegen import isa

        size = setup.size
        spec = expertile.ExpertSpec(
            size.hidden, size.intermediate, size.experts, size.top_k, size.weights, "silu",
            activations=_activations(size.weights),
        )  # fmt: skip
        expertile.compile(spec, list(setup.rows))
        self.threads, self.format = setup.threads, size.weights
        self.regions: list[Tensor] = []
        return f"fused_experts {isa.select().name}"

    def layer(self, gate_up: Matrix, down: Matrix) -> Mapping[str, Run]:
        import expertile

        first, second = self._in_place(gate_up), self._in_place(down)

        activations = _activations(self.format)

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            return expertile.fused_experts(x, first, second, ids, router, activations=activations)

        return {"expertile": run}

    def _in_place(self, matrix: Matrix) -> Any:
        """What `fused_experts` takes. The codes are what is read to find out how fast that can be done."""
        from expertile.runtime.parts import collect
        from expertile.runtime.weights import ExpertWeights
        from expertile.templates import formats

        if isinstance(matrix, Tensor):
            self.regions.append(matrix)
            return matrix
        self.regions.append(matrix.codes.flatten(2))
        _, rows, columns = matrix.shape
        scheme = formats.resolve(self.format).laid_out(columns)
        tensors = {"codes": matrix.codes, "scales": matrix.scales}
        parts = {
            name: collect(name, tensors[name], part.dtypes)
            for name, part in scheme.parts(rows, columns).items()
        }
        return ExpertWeights(scheme, matrix.shape, parts)

    def calibrate(self) -> list[str]:
        """Find the fastest ways to read these weights; returns their names."""
        from expertile.runtime import roofline

        reads = roofline.reads(self.regions, self.threads)
        for number in range(-1, _CALIBRATIONS):  # the first one warms up
            for probe in reads.values():
                probe.sample(number)
        by_rate = sorted(reads, key=lambda name: statistics.median(reads[name].rates.values()))
        self.reads = {name: reads[name] for name in by_rate[-_CANDIDATES:]}
        self.peak = roofline.peak(self.threads, _activations(self.format))
        return list(self.reads)

    def ceilings(self) -> tuple[dict[str, float], float]:
        """Bytes a second that can be read, by the way of reading, and operations a second out of registers, now."""
        for probe in (*self.reads.values(), self.peak):
            probe.sample(0)
        return {name: probe.rates[0] for name, probe in self.reads.items()}, self.peak.rates[0]


def _activations(weights: str) -> str:
    """What weights are multiplied by: with int8 ones, what all other implementations have."""
    return "int8" if weights == "int8" else "bf16"

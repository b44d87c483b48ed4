"""Expertile itself, measured like the others; it also measures what the machine can do at most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from torch import Tensor

from peers.adapters import Peer, Run, Setup, register

_CALIBRATIONS, _CANDIDATES = 5, 4


@register
class Expertile(Peer):
    """`expertile.fused_experts`."""

    name = "expertile"
    implementations = ("expertile",)
    requirements = ()

    def start(self, setup: Setup) -> str:
        import expertile
        from expertile.codegen import isa

        size = setup.size
        spec = expertile.ExpertSpec(
            size.hidden, size.intermediate, size.experts, size.top_k, "bf16", "silu"
        )
        expertile.compile(spec, list(setup.rows))
        self.threads = setup.threads
        self.regions: list[Tensor] = []
        return f"fused_experts {isa.select().name}"

    def layer(self, gate_up: Tensor, down: Tensor) -> Mapping[str, Run]:
        import expertile

        self.regions += [gate_up, down]

        def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            return expertile.fused_experts(x, gate_up, down, ids, router)

        return {"expertile": run}

    def calibrate(self) -> list[str]:
        """Find the fastest ways to read these weights; returns their names."""
        from expertile.runtime import roofline

        reads = roofline.reads(self.regions, self.threads)
        for number in range(-1, _CALIBRATIONS):  # the first one warms up
            for probe in reads.values():
                probe.sample(number)
        by_rate = sorted(reads, key=lambda name: statistics.median(reads[name].rates.values()))
        self.reads = {name: reads[name] for name in by_rate[-_CANDIDATES:]}
        self.peak = roofline.peak(self.threads)
        return list(self.reads)

    def ceilings(self) -> tuple[dict[str, float], float]:
        """Bytes a second that can be read, by the way of reading, and operations a second out of registers, now."""
        for probe in (*self.reads.values(), self.peak):
            probe.sample(0)
        return {name: probe.rates[0] for name, probe in self.reads.items()}, self.peak.rates[0]

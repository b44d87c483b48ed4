"""`bench --weights`: layers of other weight formats, and the same layer in bf16 beside each in the same rounds.

A share is that of the roofline over the format's own bytes, codes and scales; for "w8a8", int8 with int8 activations,
also over the peak of multiplying bytes. A speed-up is of experts a second over bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from expertile._bench.implementations import ours
from expertile._bench.protocol import (
    bandwidths,
    best,
    inputs,
    result,
    sample,
    speedup,
    spread,
    steps,
)
from expertile._bench.shapes import W8A8, Shape
from expertile._bench.workload import Subject, schedule
from expertile.runtime import roofline
from expertile.runtime.errors import ArgumentError
from expertile.runtime.roofline import Probe
from expertile.templates import formats

Json = dict[str, Any]

FORMAT_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)


def formats_from(text: str) -> list[str]:
    """The formats in "mxfp4,int4_g32", or all of them. Raises typer.BadParameter for a name that is none."""
    known = ("bf16", *formats.names(), W8A8)
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"expected weights of all or some of {', '.join(known)}; got {name!r}"
            )
    return list(dict.fromkeys(names))


def measure(
    shape: Shape,
    tokens: Sequence[int],
    *,
    weights: Sequence[str],
    gib: float,
    seconds: float,
    threads: int,
) -> Json:
    """A shape in each of the formats, one after another, so that never more than one is in memory beside bf16."""
    fitting: list[Shape] = []
    absent: dict[str, str] = {}
    for name in weights:
        try:
            shape.in_format(name).spec()
        except ArgumentError as error:
            absent[name] = str(error)
        else:
            fitting.append(shape.in_format(name))
    base = Subject.of(shape, gib)
    found = [
        _format(each, base, tokens, gib=gib, seconds=seconds / len(fitting), threads=threads)
        for each in fitting
    ]
    return {**base.facts(), "formats": found, "absent_formats": absent}


def _format(
    shape: Shape, base: Subject, tokens: Sequence[int], *, gib: float, seconds: float, threads: int
) -> Json:
    subject = Subject.of(shape, gib)
    streams, peak = roofline.reads(subject.matrices, threads), roofline.peak(threads)
    own = roofline.peak(threads, shape.activations) if shape.activations != "bf16" else peak
    quantised, bf16 = (_probes(each, tokens) for each in (subject, base))
    references = list(dict.fromkeys([*streams.values(), peak, own]))
    disturbance = sample(references, [*quantised.values(), *bf16.values()], seconds)
    read = streams[best(streams)]
    experts = base.shape.expert_bytes / shape.expert_bytes
    calls = [
        result(shape, t, quantised[t], read, own)
        | {
            "speedup": speedup(quantised[t], bf16[t], experts),
            "bf16": result(base.shape, t, bf16[t], read, peak),
        }
        for t in tokens
    ]
    return {
        **subject.facts(),
        "expert_bytes": shape.expert_bytes,
        "read": bandwidths(streams),
        "peak_tflops": spread(own.rates.values(), 1e12),
        "cores_used_by_others": disturbance,
        "calls": calls,
    }


def _probes(subject: Subject, tokens: Sequence[int]) -> dict[int, Probe]:
    """Calls of each number of tokens; everything is compiled."""
    shape = subject.shape
    calls = {t: schedule(shape, len(subject.layers), t) for t in tokens}
    subject.compile(call for some in calls.values() for call in some)
    run = ours(shape)
    return {t: Probe(steps(run, subject.layers, calls[t], inputs(t, shape))) for t in tokens}

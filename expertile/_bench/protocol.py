"""How it is measured: probes of reads, peak and calls, sampled in the same rounds.

A share is that of the roofline, max(bytes / read bandwidth, operations / peak) ÷ time; medians over rounds, with the
quartiles.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from expertile._bench.implementations import Run, ours
from expertile._bench.shapes import Shape
from expertile._bench.workload import Call, Subject, Weights, schedule
from expertile.runtime import roofline
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

PEER_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)


# Samples ------------------------------------------------------------------------------------------


def steps(run: Run, layers: list[Weights], calls: list[Call], x: Tensor) -> Callable[[], int]:
    """What a probe does: calls in their order, over and over. The amount is in bytes of distinct experts' weights."""
    position = 0

    def step() -> int:
        nonlocal position
        call = calls[position % len(calls)]
        position += 1
        run(layers[call.layer], x, call.ids, call.router)
        return call.bytes

    return step


def inputs(tokens: int, shape: Shape) -> Tensor:
    """Random hidden states `[tokens, hidden]`, bf16."""
    return torch.randn(tokens, shape.hidden).bfloat16()


def sample(references: Sequence[Probe], probes: Sequence[Probe], seconds: float) -> float | None:
    """Warm everything up, then sample it in rounds.

    Returns how many cores other processes kept busy meanwhile; None where Linux's /proc/stat is missing.
    """
    for each in (*references, *probes):
        each.sample(-1)
        each.forget()
    before, start = _others_seconds(), time.perf_counter()
    roofline.interleave(references, probes, seconds)
    after = _others_seconds()
    if before is None or after is None:
        return None
    return max(0.0, after - before) / (time.perf_counter() - start)


def _others_seconds() -> float | None:
    """CPU seconds that were spent outside this process, stolen ones included."""
    try:
        user, nice, system, _, _, interrupt, soft, steal, *_ = map(int, _cpu_line().split()[1:])
    except OSError:
        return None
    everything = (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
    return everything - time.process_time()


def _cpu_line() -> str:
    with open("/proc/stat", encoding="ascii") as file:
        return file.readline()


# Results ------------------------------------------------------------------------------------------


def spread(values: Iterable[float], unit: float = 1.0) -> Json:
    """Median and quartiles."""
    values = [value / unit for value in values]
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "low": low, "high": high, "rounds": len(values)}


def best(streams: dict[str, Probe]) -> str:
    """The name of the read with the highest median rate: the read bandwidth."""
    return max(streams, key=lambda name: statistics.median(streams[name].rates.values()))


def bandwidths(streams: dict[str, Probe]) -> Json:
    """All ways to read, for a report."""
    rates = {name: spread(each.rates.values(), 1e9) for name, each in streams.items()}
    return {"best": best(streams), "gb_per_s": rates}


def speedup(ours: Probe, other: Probe, worth: float = 1.0) -> Json:
    """How many times the bytes a second of another probe ours reaches, within a round.

    worth: how many of the other's bytes are as much work as one of ours.
    """
    return spread(
        worth * ours.rates[number] / rate
        for number, rate in other.rates.items()
        if number in ours.rates
    )


def measure(
    shape: Shape,
    tokens: Sequence[int],
    *,
    gib: float,
    seconds: float,
    threads: int,
    others: dict[str, Run | str],
) -> Json:
    """Everything about a shape: read bandwidth, peak, calls of each number of tokens, and `others` beside them."""
    subject = Subject.of(shape, gib)
    calls = {t: schedule(shape, len(subject.layers), t) for t in tokens}
    subject.compile(call for some in calls.values() for call in some)
    xs = {t: inputs(t, shape) for t in tokens}
    streams = roofline.reads(subject.matrices, threads)
    peak = roofline.peak(threads, shape.activations)
    probes = {t: Probe(steps(ours(shape), subject.layers, calls[t], xs[t])) for t in tokens}
    runs = {name: run for name, run in others.items() if not isinstance(run, str)}
    theirs = {
        (t, name): Probe(steps(run, subject.layers, calls[t], xs[t]))
        for t in tokens if t in PEER_TOKENS for name, run in runs.items()
    }  # fmt: skip
    disturbance = sample([*streams.values(), peak], [*probes.values(), *theirs.values()], seconds)
    read = streams[best(streams)]
    compared = []
    for (t, name), each in theirs.items():
        call = calls[t][0]
        arguments = (subject.layers[call.layer], xs[t], call.ids, call.router)
        difference = _difference(ours(shape)(*arguments), runs[name](*arguments))
        compared.append(_comparison(t, name, probes[t], each) | {"difference": difference})
    return {
        **subject.facts(),
        "read": bandwidths(streams),
        "peak_tflops": spread(peak.rates.values(), 1e12),
        "cores_used_by_others": disturbance,
        "calls": [result(shape, t, each, read, peak) for t, each in probes.items()],
        "peers": compared,
        "absent_peers": {name: why for name, why in others.items() if isinstance(why, str)},
    }


def result(shape: Shape, tokens: int, probe: Probe, read: Probe, peak: Probe) -> Json:
    """The calls of a number of tokens, against the ceilings of the same rounds."""
    operations = shape.operations(tokens)
    shares, of_memory = [], []
    for number, rate in probe.rates.items():
        seconds = probe.step_seconds[number]
        memory = rate / read.rates[number]
        compute = operations / peak.rates[number] / seconds
        shares.append(max(memory, compute))
        of_memory.append(memory >= compute)
    return {
        "tokens": tokens,
        "ms": spread(probe.step_seconds.values(), 1e-3),
        "gb_per_s": spread(probe.rates.values(), 1e9),
        "tflops": spread((operations / seconds for seconds in probe.step_seconds.values()), 1e12),
        "share": spread(shares),
        "bound": "memory" if 2 * sum(of_memory) > len(of_memory) else "compute",
    }


def _comparison(tokens: int, name: str, ours: Probe, other: Probe) -> Json:
    milliseconds = spread(other.step_seconds.values(), 1e-3)
    return {"tokens": tokens, "name": name, "ms": milliseconds, "speedup": speedup(ours, other)}


def _difference(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm())

"""`bench --profile`: what each thread does in each pass of a call, and how long it waits for the others.

Calls run the profiled driver, which differs from the plain one in two looks at the clock a thread and pass. Beside the
time a thread was busy stands its *fetch* time: what its weight bytes would take if the threads shared the streaming
read bandwidth of the same round evenly. A thread that is busy for much longer than that is not limited by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from torch import Tensor

from expertile._bench.protocol import bandwidths, best, inputs, sample, spread, steps
from expertile._bench.shapes import Shape
from expertile._bench.workload import Call, Subject, Weights, schedule, skewed
from expertile.runtime import call, roofline
from expertile.runtime.matrices import LayerWeights
from expertile.runtime.profile import Part, Profile, profiled
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

SKEWED = "skewed"


class ProfiledCalls(Probe):
    """Profiled calls of one batch size."""

    def __init__(self, subject: Subject, calls: list[Call], x: Tensor) -> None:
        options = subject.shape.options

        def run(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            y, profile = profiled(
                x, LayerWeights(w.gate_up, w.down, **options, **w.biases), ids, router
            )
            self._taken.append(profile)
            return y

        super().__init__(steps(run, subject.layers, calls, x))

    def forget(self) -> None:
        """Drop all samples."""
        super().forget()
        self.profiles: dict[int, list[Profile]] = {}
        """Of the calls, by round."""

    def sample(self, number: int) -> None:
        """Take the sample of a round."""
        self._taken: list[Profile] = []
        super().sample(number)
        self.profiles[number] = self._taken


def measure(
    shape: Shape, tokens: Sequence[int], *, gib: float, seconds: float, threads: int
) -> Json:
    """Where the time of a shape's calls goes, for each number of tokens and a skewed batch."""
    subject = Subject.of(shape, gib)
    count = len(subject.layers)
    batches = {str(t): schedule(shape, count, t) for t in tokens} | {SKEWED: skewed(shape, count)}
    subject.compile(each for calls in batches.values() for each in calls)
    streams = roofline.reads(subject.matrices, threads)
    probes = {
        name: ProfiledCalls(subject, calls, inputs(len(calls[0].ids), shape))
        for name, calls in batches.items()
    }
    disturbance = sample([*streams.values()], [*probes.values()], seconds)
    read = streams[best(streams)]
    return {
        **subject.facts(),
        "read": bandwidths(streams),
        "cores_used_by_others": disturbance,
        "batches": [
            {"batch": name, "tokens": len(batches[name][0].ids), **_batch(each, read)}
            for name, each in probes.items()
        ],
    }


def _batch(probe: ProfiledCalls, read: Probe) -> Json:
    profiles = [each for some in probe.profiles.values() for each in some]
    return {
        "ms": spread(probe.step_seconds.values(), 1e-3),
        "route_ms": median(each.serial for each in profiles) * 1e3,
        "idle": spread(fmean(map(_idle, some)) for some in probe.profiles.values()),
        "passes": [_pass(name, probe.profiles, read) for name in call.PASSES],
    }


def _idle(profile: Profile) -> float:
    """The share of the threads' time in a call's native code that they did not work on items."""
    busy = [part.busy for parts in profile.passes.values() for part in parts]
    threads = len(profile.passes["down"])
    return 1 - sum(busy) / (threads * profile.seconds)


def _pass(name: str, profiles: dict[int, list[Profile]], read: Probe) -> Json:
    rounds = profiles.values()
    return {
        "pass": name,
        "imbalance": spread(fmean(each.imbalance(name) for each in some) for some in rounds),
        "idle": spread(fmean(each.idle(name) for each in some) for some in rounds),
        "threads": _threads(
            {number: [each.passes[name] for each in some] for number, some in profiles.items()},
            read,
        ),
    }


def _threads(calls: dict[int, list[tuple[Part, ...]]], read: Probe) -> list[Json]:
    """Of each thread, the median over the rounds of what it does in a call. calls: parts by round, call and thread."""
    count = max(len(parts) for some in calls.values() for parts in some)
    found = []
    for thread in range(count):
        rounds: list[Json] = []
        for number, some in calls.items():
            mine = [parts[thread] for parts in some if thread < len(parts)] or [Part()]
            weight_bytes = fmean(part.weight_bytes for part in mine)
            rounds.append(
                {
                    "busy_ms": fmean(part.busy for part in mine) * 1e3,
                    "barrier_ms": fmean(part.wait for part in mine) * 1e3,
                    "fetch_ms": weight_bytes * count / read.rates[number] * 1e3,
                    "items": fmean(part.items for part in mine),
                    "weight_bytes": weight_bytes,
                }
            )
        found.append({name: median(each[name] for each in rounds) for name in rounds[0]})
    return found

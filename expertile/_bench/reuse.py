"""`bench --reuse`: what it is worth that a call reads each distinct expert once, however many of its tokens chose it.

The traffic model: a call takes as long as the weights of its distinct experts do, and reading them for every token
anew takes reuse = tokens · top-k / distinct experts times as long. Beside the calls run the same kernels with reuse
switched off: token by token, each a call of its own, as an engine reads weights that does not gather the tokens of an
expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from expertile._bench.implementations import Run, ours
from expertile._bench.protocol import bandwidths, best, inputs, sample, speedup, spread, steps
from expertile._bench.shapes import Shape
from expertile._bench.workload import Call, Subject, Weights, schedule
from expertile.runtime import roofline
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

REUSE_SHAPES = ("2048x768x128x8", "2048x768x256x8")
REUSE_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def token_major(run: Run) -> Run:
    """An implementation called for each token by itself."""

    def each(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        tokens = zip(x.split(1), ids.split(1), router.split(1), strict=True)
        return torch.cat([run(w, *token) for token in tokens])

    return each


def measure(
    shape: Shape, tokens: Sequence[int], *, gib: float, seconds: float, threads: int
) -> Json:
    """Calls of each number of tokens, with reuse and without."""
    subject = Subject.of(shape, gib)
    calls = {t: schedule(shape, len(subject.layers), t) for t in (1, *tokens)}
    subject.compile(call for some in calls.values() for call in some)
    xs = {t: inputs(t, shape) for t in tokens}
    streams = roofline.reads(subject.matrices, threads)
    run = ours(shape)
    on, off = (
        {t: Probe(steps(each, subject.layers, calls[t], xs[t])) for t in tokens}
        for each in (run, token_major(run))
    )
    disturbance = sample([*streams.values()], [*on.values(), *off.values()], seconds)
    read = streams[best(streams)]
    return {
        **subject.facts(),
        "read": bandwidths(streams),
        "cores_used_by_others": disturbance,
        "calls": [_result(shape, t, calls[t], on[t], off[t], read) for t in tokens],
    }


def _result(
    shape: Shape, tokens: int, calls: list[Call], on: Probe, off: Probe, read: Probe
) -> Json:
    distinct = fmean(call.bytes for call in calls) / shape.expert_bytes
    return {
        "tokens": tokens,
        "distinct_experts": distinct,
        "reuse": tokens * shape.top_k / distinct,
        "ms": spread(on.step_seconds.values(), 1e-3),
        "model_ms": spread(
            (distinct * shape.expert_bytes / read.rates[number] for number in on.rates), 1e-3
        ),
        "share_of_read": spread(rate / read.rates[number] for number, rate in on.rates.items()),
        "token_major_ms": spread(off.step_seconds.values(), 1e-3),
        "speedup": speedup(on, off),
    }

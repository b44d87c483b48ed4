"""Where the time of a layer call goes: the notes of the profiled driver, for each pass and thread.

    y, profile = profiled(x, LayerWeights(gate_up, down), topk_ids, topk_weights)
    profile.passes["down"][0].wait          # seconds that thread 0 waited for the others

The profiled driver is compiled apart: it does the same work, and reads the clock twice a pass in each thread.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from functools import cache

import torch

from expertile.runtime import call, layer
from expertile.runtime.matrices import LayerWeights
from expertile.runtime.spec import LayerKernels

_NANOSECOND = 1e-9


@dataclass(frozen=True)
class Part:
    """A thread's part in a pass."""

    busy: float = 0.0
    """Seconds it worked on items."""
    wait: float = 0.0
    """Seconds it waited: to be woken, before it gathers; else at the pass's end, until all others were done."""
    items: int = 0
    weight_bytes: int = 0
    """Of the weights it read, each once, however many blocks of tokens they serve."""

    def __add__(self, other: Part) -> Part:
        return Part(
            self.busy + other.busy,
            self.wait + other.wait,
            self.items + other.items,
            self.weight_bytes + other.weight_bytes,
        )


@dataclass(frozen=True)
class Profile:
    """A layer call's time. A call in chunks has the sums of them."""

    seconds: float
    """Of the native code."""
    serial: float
    """Seconds of it before any thread began its first pass: check, route, plan."""
    passes: dict[str, tuple[Part, ...]]
    """By pass (gather, gate_up, down) and number of the thread."""

    def imbalance(self, name: str) -> float:
        """The busiest thread's time in a pass over the mean of all; 1 if the pass took no time the clock can tell."""
        busy = [part.busy for part in self.passes[name]]
        total = sum(busy)
        return max(busy) * len(busy) / total if total else 1.0

    def idle(self, name: str) -> float:
        """The share of the threads' time in a pass that they waited."""
        parts = self.passes[name]
        wait = sum(part.wait for part in parts)
        total = wait + sum(part.busy for part in parts)
        return wait / total if total else 0.0


def profiled(
    x: torch.Tensor, weights: LayerWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, Profile]:
    """The layer's result and where the time went. Arguments and errors as in :func:`expertile.fused_experts`."""
    recorder = Recorder()
    y = layer.run(x, weights, topk_ids, topk_weights, recorder)
    return y, recorder.profile()


class Recorder:
    """Adds up the notes of native calls; a recorder for :func:`layer.execute`."""

    def __init__(self) -> None:
        self._seconds = self._serial = 0.0
        self._parts: dict[str, list[Part]] = {name: [] for name in call.PASSES}

    def start(self, kernels: LayerKernels, threads: int) -> tuple[int, int]:
        """A native call begins; the values of `call.PROFILE`."""
        spec, (gate_up, down) = kernels.spec, kernels.stored
        self._row_bytes = (
            0,
            spec.projections * gate_up.matrix_bytes(1, spec.hidden),
            down.matrix_bytes(1, spec.intermediate),
        )
        size = (threads, len(call.PASSES), call.SLOT_BYTES // 8)
        self._slots = torch.zeros(size, dtype=torch.int64, device="cpu")  # begins a cache line
        self._start = _now()
        return _clock(), self._slots.data_ptr()

    def stop(self) -> None:
        """The native call is done."""
        end = _now()
        notes = [thread for thread in self._slots.tolist() if thread[0][0]]  # those that were there
        self._seconds += (end - self._start) * _NANOSECOND
        self._serial += (_first(notes) - self._start) * _NANOSECOND
        for number, name in enumerate(call.PASSES):
            parts = self._parts[name]
            parts += [Part()] * (len(notes) - len(parts))
            for thread, note in enumerate(notes):
                parts[thread] += self._part(number, note, notes)

    def _part(self, number: int, note: list[list[int]], notes: list[list[list[int]]]) -> Part:
        begin, end, items, rows, *_ = note[number]
        last = number + 1 == len(note)
        following = max(other[number][1] for other in notes) if last else note[number + 1][0]
        late = begin - _first(notes) if number == 0 else 0
        return Part(
            (end - begin) * _NANOSECOND,
            (late + following - end) * _NANOSECOND,
            items,
            rows * self._row_bytes[number],
        )

    def profile(self) -> Profile:
        """All calls so far."""
        passes = {name: tuple(parts) for name, parts in self._parts.items()}
        return Profile(self._seconds, self._serial, passes)


def _first(notes: list[list[list[int]]]) -> int:
    """When the first thread began."""
    return min(thread[0][0] for thread in notes)


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@cache
def _clock() -> int:
    """The address of clock_gettime."""
    return ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0

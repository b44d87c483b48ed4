"""A peer's process: reads a command a line, answers each with a line of JSON, and does nothing in between.

    python -m peers.worker adapter.py

It runs in the peer's environment, with torch, NumPy and the adapter's library. Commands are JSON objects with `command`
and the arguments of the function that serves it; an answer has what that function returns, or `error`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers import inputs
from peers.adapters import Peer, Run, Setup, read
from peers.inputs import Call, Matrix, Size

Json = dict[str, Any]

SAMPLE_SECONDS = 0.02
_WARM_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass
class _Batch:
    """Calls of one size, in the peer's dtypes."""

    x: Tensor
    calls: list[Call]
    rows: Tensor
    """Which tokens of the first call are checked."""
    expected: Tensor
    """fp32 `[len(rows), hidden]`"""


class Worker:
    """Serves the commands."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.layers: list[Mapping[str, Run]] = []
        self.batches: dict[int, _Batch] = {}
        self.position: dict[tuple[str, int], int] = {}

    def load(self, size: Json, layers: int, tokens: list[int], threads: int) -> Json:
        """Make the inputs and the layers."""
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        shape = Size(**size)
        schedules = {count: inputs.calls(shape, layers, count) for count in tokens}
        x = {count: inputs.tokens(shape, count) for count in tokens}
        rows = inputs.rows(list(schedules.values()))
        setup = Setup(shape, layers, tuple(tokens), tuple(rows), threads)
        kernel = self.peer.start(setup)
        digests = [
            inputs.digest(x[count], *(t for call in calls for t in (call.ids, call.router)))
            for count, calls in schedules.items()
        ]
        for number in range(layers):
            gate_up, down = inputs.weights(shape, number)
            digests.append(inputs.digest(*inputs.sample(gate_up, down)))
            if number == 0:
                self._expect(gate_up, down, x, schedules)
            self.layers.append(self.peer.layer(gate_up, down))
            del gate_up, down  # before the next layer's are made
        return {"kernel": kernel, "torch": torch.__version__, "inputs": digests}

    def _expect(
        self, gate_up: Matrix, down: Matrix, x: Mapping[int, Tensor], schedules: Mapping[int, list[Call]]
    ) -> None:  # fmt: skip
        """What the first calls of all sizes have to return, in one go over the first layer's experts."""
        rows = {count: inputs.checked(count) for count in x}
        together = [
            torch.cat([each[rows[count]] for count, each in tensors.items()])
            for tensors in (
                x,
                {count: calls[0].ids for count, calls in schedules.items()},
                {count: calls[0].router for count, calls in schedules.items()},
            )
        ]
        expected = inputs.reference(gate_up, down, *together)
        parts = expected.split([len(each) for each in rows.values()])
        for (count, calls), part in zip(schedules.items(), parts, strict=True):
            calls = [Call(c.layer, c.ids.to(self.peer.ids_dtype), c.router, c.bytes) for c in calls]
            self.batches[count] = _Batch(
                x[count].to(self.peer.x_dtype), calls, rows[count], part.clone()
            )

    def warm(self, implementation: str, tokens: int) -> Json:
        """Call once, and compare; then on through the schedule for a second in all."""
        reason = self.peer.refusal(implementation, tokens)
        if reason is not None:
            return {"refused": reason}
        batch = self.batches[tokens]
        start = time.perf_counter()
        out = self._call(implementation, batch, batch.calls[0])
        seconds = time.perf_counter() - start
        difference = out[batch.rows].float() - batch.expected
        error = float(difference.norm() / batch.expected.norm())
        del out
        for call in batch.calls[1:]:
            if time.perf_counter() - start > _WARM_SECONDS:
                break
            self._call(implementation, batch, call)
        self.position[implementation, tokens] = 0
        return {"seconds": seconds, "error_norm": error}

    def sample(self, implementation: str, tokens: int, warm: bool) -> Json:
        """Whole calls for 20 ms, at least one; `warm`: after one that does not count."""
        batch = self.batches[tokens]
        position = self.position[implementation, tokens]
        if warm:
            self._call(implementation, batch, batch.calls[position % len(batch.calls)])
            position += 1
        count = amount = 0
        seconds, start = 0.0, time.perf_counter()
        while seconds < SAMPLE_SECONDS:
            call = batch.calls[(position + count) % len(batch.calls)]
            self._call(implementation, batch, call)
            amount += call.bytes
            count += 1
            seconds = time.perf_counter() - start
        self.position[implementation, tokens] = position + count
        return {"calls": count, "seconds": seconds, "bytes": amount}

    def _call(self, implementation: str, batch: _Batch, call: Call) -> Tensor:
        return self.layers[call.layer][implementation](batch.x, call.ids, call.router)

    def calibrate(self) -> Json:
        """Only Expertile's: find how to read fastest."""
        return {"reads": self.peer.calibrate()}  # type: ignore[attr-defined]

    def ceilings(self) -> Json:
        """Only Expertile's: bytes and operations a second that the machine reaches now."""
        reads, peak = self.peer.ceilings()  # type: ignore[attr-defined]
        return {"reads": reads, "peak": peak}

    def memory(self) -> Json:
        """Bytes that the process had in memory at most."""
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def serve(peer: Peer) -> None:
    """Until the controller closes the pipe."""
    if sys.platform == "linux":
        # Ends with the controller, however that ends: a stopped process does not see its pipe close.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    worker = Worker(peer)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = getattr(worker, arguments.pop("command"))(**arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(read(Path(sys.argv[1]))())

"""All peers on one shape: groups that fit into memory, rounds that everything takes part in."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.adapters import Peer
from peers.environments import Adapter
from peers.inputs import Size
from peers.processes import PeerError, Process

Json = dict[str, Any]

OURS = "expertile"
FEWEST_ROUNDS, MOST_ROUNDS = 3, 40
_SHORT_SECONDS = 0.02
"""A call below that is preceded by one that does not count: the process was just woken."""
_PROCESS_BYTES = 0.3 * 2**30
_LOAD_TIMEOUT = 900.0


@dataclass(frozen=True)
class Plan:
    """What to run, and how long."""

    size: Size
    layers: int
    tokens: tuple[int, ...]
    threads: int
    seconds: float
    """For the samples, about; each pair of implementation and size has an equal part, and 3 samples in any case."""
    longest: float
    """Seconds of a call from which on a size is left out."""
    memory: float
    """Bytes for all processes together."""

    @property
    def timeout(self) -> float:
        """Seconds after which a call is not waited for any more."""
        return 60 + 4 * self.longest


@dataclass
class Series:
    """An implementation at one size of calls."""

    name: str
    tokens: int
    process: Process
    call_seconds: float
    """Of the first one."""
    error: float
    """Relative Frobenius norm of the difference from fp32."""
    samples: dict[int, Json] = field(default_factory=dict)
    """By round."""
    spent: float = 0.0

    def sample(self, number: int, timeout: float) -> None:
        """Take the sample of a round."""
        start = time.perf_counter()
        short = self.call_seconds < _SHORT_SECONDS
        self.samples[number] = self.process.ask(
            "sample", implementation=self.name, tokens=self.tokens, warm=short, timeout=timeout
        )
        self.spent += time.perf_counter() - start


@dataclass
class Group:
    """Peers that were measured at the same time, beside Expertile."""

    series: list[Series] = field(default_factory=list)
    ceilings: dict[tuple[int, int], Json] = field(default_factory=dict)
    """Bytes (by the way of reading) and operations a second, by size of calls and round."""

    @property
    def read(self) -> str:
        """The way of reading that was fastest, by its median."""
        ways = next(iter(self.ceilings.values()))["reads"]
        samples = self.ceilings.values()
        return max(ways, key=lambda way: statistics.median(each["reads"][way] for each in samples))


@dataclass
class Result:
    """Of one shape."""

    groups: list[Group] = field(default_factory=list)
    kernels: dict[str, Json] = field(default_factory=dict)
    """What each peer runs on, by peer."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a peer is missing, by peer."""
    skipped: list[Json] = field(default_factory=list)
    """Sizes that an implementation was not measured at."""
    others: float | None = None
    """Cores that processes outside of this kept busy meanwhile; None where Linux's /proc/stat is missing."""


def measure(
    plan: Plan, adapters: Sequence[Adapter], directory: Path, say: Callable[[str], None]
) -> Result:
    """Run the peers. `adapters`: installed ones, Expertile among them. Raises PeerError if Expertile itself fails."""
    result, weights = Result(), plan.size.weights
    before, start = _others_seconds(), time.perf_counter()
    ours = next(adapter for adapter in adapters if adapter.name == OURS)
    able = [adapter for adapter in adapters if weights in adapter.peer.formats]
    for adapter in adapters:
        if adapter not in able:
            result.failed[adapter.name] = f"no {weights}; it has {', '.join(adapter.peer.formats)}"
    groups = partition(plan, [adapter for adapter in able if adapter is not ours])
    for peers in groups:
        result.groups.append(Group())
        processes: dict[str, Process] = {}
        try:
            for adapter in (ours, *peers):
                say(f"loading {adapter.name}")
                _start(plan, adapter, directory, processes, result)
            _rounds(plan, processes, result, say, plan.seconds / len(groups))
            for name, process in processes.items():
                memory = process.ask("memory", timeout=plan.timeout)["bytes"]
                result.kernels[name]["peak_memory_bytes"] = memory
        finally:
            for process in processes.values():
                process.close()
    after = _others_seconds()
    if before is not None and after is not None:
        result.others = max(0.0, after - before) / (time.perf_counter() - start)
    return result


def _others_seconds() -> float | None:
    """CPU seconds that were spent outside this process and its ended children, stolen ones included."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, *rest = map(int, file.readline().split()[1:])
    except OSError:
        return None
    interrupt, soft, steal, *_ = rest
    busy = (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def partition(plan: Plan, peers: Sequence[Adapter]) -> list[list[Adapter]]:
    """The peers in groups that fit into memory beside Expertile, those that need most first; one group at least.

    A peer that does not fit has a group of its own.
    """
    repacked = plan.size.layer_bytes  # one layer at a time is there twice
    free = plan.memory - repacked - _need(plan, Peer)
    groups: list[list[Adapter]] = []
    for adapter in sorted(peers, key=lambda adapter: -_need(plan, adapter.peer)):
        need = _need(plan, adapter.peer)
        room = (g for g in groups if need + sum(_need(plan, a.peer) for a in g) <= free)
        group = next(room, None)
        if group is None:
            groups.append([adapter])
        else:
            group.append(adapter)
    return groups or [[]]


def _need(plan: Plan, peer: type[Peer]) -> float:
    """Bytes of memory that a process keeps, about."""
    size = plan.size
    columns = max(plan.tokens) * size.top_k * (size.hidden + size.intermediate)
    return plan.layers * size.layer_bytes + peer.scratch * columns + _PROCESS_BYTES


def _start(
    plan: Plan, adapter: Adapter, directory: Path, processes: dict[str, Process], result: Result
) -> None:
    try:
        process = Process(adapter.python(directory), adapter.file, plan.threads)
        processes[adapter.name] = process
        kernel = process.ask(
            "load", size=asdict(plan.size), layers=plan.layers, tokens=plan.tokens,
            threads=plan.threads, timeout=_LOAD_TIMEOUT,
        )  # fmt: skip
        if kernel["inputs"] != result.kernels.setdefault(OURS, kernel)["inputs"]:
            raise PeerError("its inputs differ from Expertile's: another NumPy stream?")
        result.kernels[adapter.name] = kernel
        for name in adapter.peer.implementations:
            _warm(plan, name, process, result)
    except PeerError as error:
        _drop(adapter.name, error, processes, result)


def _warm(plan: Plan, name: str, process: Process, result: Result) -> None:
    """First calls, from few tokens to many; sizes that would take too long are left out."""
    last: Series | None = None
    for tokens in plan.tokens:
        seconds = last.call_seconds * tokens / last.tokens if last else 0.0
        reason: str | None = f"a call would take about {seconds:.0f} s"
        if seconds <= 2 * plan.longest:  # it takes that many times longer at most
            answer = process.ask("warm", implementation=name, tokens=tokens, timeout=plan.timeout)
            reason = answer.get("refused")
            if reason is None:
                last = Series(name, tokens, process, answer["seconds"], answer["error_norm"])
                if last.call_seconds <= plan.longest:
                    result.groups[-1].series.append(last)
                    continue
                reason = f"a call takes {last.call_seconds:.0f} s"
        result.skipped.append({"implementation": name, "tokens": tokens, "reason": reason})


def _drop(name: str, error: PeerError, processes: dict[str, Process], result: Result) -> None:
    if name == OURS:
        raise error
    result.failed[name] = str(error)
    group = result.groups[-1]
    process = processes.pop(name, None)
    if process is not None:
        process.close()
        group.series = [series for series in group.series if series.process is not process]


def _rounds(
    plan: Plan,
    processes: dict[str, Process],
    result: Result,
    say: Callable[[str], None],
    seconds: float,
) -> None:
    """In each round and size, in random order: what the machine can do now, Expertile, the peers that are due."""
    group, order, number = result.groups[-1], random.Random(0), 0
    processes[OURS].ask("calibrate", timeout=plan.timeout)
    part, end = seconds / max(1, len(group.series)), time.perf_counter() + seconds
    due = list(group.series)
    while due:
        say(f"round {number + 1}, {len(due)} of {len(group.series)} series due")
        for tokens in order.sample(plan.tokens, len(plan.tokens)):
            if any(series.tokens == tokens for series in due):
                _round(plan, processes, result, due, tokens, number, order)
        number += 1
        due = [series for series in due if series in group.series]
        if number >= FEWEST_ROUNDS:
            over = number == MOST_ROUNDS or time.perf_counter() > end
            due = [] if over else [series for series in due if series.spent < part]


def _round(
    plan: Plan, processes: dict[str, Process], result: Result, due: Sequence[Series], tokens: int,
    number: int, order: random.Random,
) -> None:  # fmt: skip
    group, ours = result.groups[-1], processes[OURS]
    together = [
        series for series in group.series
        if series.tokens == tokens and (series in due or series.process is ours)
    ]  # fmt: skip
    for series in order.sample([None, *together], 1 + len(together)):
        if series is None:
            group.ceilings[tokens, number] = ours.ask("ceilings", timeout=plan.timeout)
            continue
        try:
            if series in group.series:  # its process may have died in this round
                series.sample(number, plan.timeout)
        except PeerError as error:
            name = next(name for name, p in processes.items() if p is series.process)
            _drop(name, error, processes, result)

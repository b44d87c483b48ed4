"""How long the weights of a call take to read where memory has several nodes, with the schedule and without.

A model, of reading and nothing else; what it takes for granted:

- Memory is the limit. Routing, multiplying and adding partial sums take no time, so calls with many tokens an expert,
  which multiplication limits, gain less than it says.
- Pages are spread evenly over N nodes, and the threads of each node read 1/N of all bytes, at the same time as the
  others. Gate/up and down are passes one after the other.
- The threads of a node read `local` GB/s from its own memory and `remote` GB/s from all other nodes together, however
  many of them read at once.
- Without the schedule, what a thread reads lies on all nodes alike: (N - 1)/N of it is remote. With the schedule, codes
  are remote only where a page ends within what kernels read as a whole (`Role.remote`). Scales are read from wherever
  they are in both cases: (N - 1)/N of them are remote.

How local and remote reads get on with each other differs from machine to machine, so a time is a range.  At best they
don't disturb each other: the slower of the two sets the time, and so does each node's memory, which has to deliver all
that lies in it, whoever asks.  At worst they take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.runtime.errors import ArgumentError

_GIGA = 1e9


@dataclass(frozen=True)
class Machine:
    """What one node's threads can read while those of the others do likewise."""

    name: str
    nodes: int
    local: float
    """GB/s from the node's own memory."""
    remote: float
    """GB/s from the memory of all others together."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ArgumentError(f"nodes: expected at least 1, got {self.nodes}")
        if not 0 < self.remote <= self.local < float("inf"):
            raise ArgumentError(
                "local, remote: expected GB/s above 0, and no more from other nodes than from the own one, got "
                f"{self.local} and {self.remote}"
            )


PUBLIC = (
    Machine("2 nodes", 2, 234.0, 95.0),
    Machine("4 nodes", 4, 158.0, 32.0),
    Machine("2 nodes, HBM", 2, 425.0, 89.0),
)
"""Measured by others on Intel Xeons and published; of the one with HBM the number of nodes is assumed."""


@dataclass(frozen=True)
class Role:
    """What one expert's matrices of a pass (gate and up, or down) take to read."""

    codes: float
    """Bytes."""
    scales: float = 0
    """Bytes, of scales that lie in tensors of their own."""
    remote: float = 0
    """Bytes of codes that threads of another node read under the schedule."""

    def remote_share(self, nodes: int, scheduled: bool) -> float:
        """The part of its bytes that lies on another node than the thread that reads it."""
        elsewhere = (nodes - 1) / nodes
        if not scheduled:
            return elsewhere
        return (self.remote + self.scales * elsewhere) / (self.codes + self.scales)


@dataclass(frozen=True)
class Prediction:
    """The least and the longest time to read the weights of a call, in seconds, and how much of them is remote."""

    least: float
    most: float
    remote_share: float


def predict(machine: Machine, roles: Sequence[Role], experts: float, scheduled: bool) -> Prediction:
    """The time to read all roles of so many distinct experts."""
    times = [_seconds(machine, role, experts, scheduled) for role in roles]
    sizes = [role.codes + role.scales for role in roles]
    remote = [role.remote_share(machine.nodes, scheduled) for role in roles]
    share = sum(size * part for size, part in zip(sizes, remote, strict=True)) / sum(sizes)
    return Prediction(sum(least for least, _ in times), sum(most for _, most in times), share)


def _seconds(machine: Machine, role: Role, experts: float, scheduled: bool) -> tuple[float, float]:
    """If local and remote reads don't disturb each other, and if they take turns."""
    size = experts * (role.codes + role.scales) / machine.nodes / _GIGA
    share = role.remote_share(machine.nodes, scheduled)
    remote = share * size / machine.remote
    return max(size / machine.local, remote), (1 - share) * size / machine.local + remote


def gain(machine: Machine, roles: Sequence[Role]) -> tuple[float, float]:
    """How many times as fast the schedule makes a call, at least and at most; the number of experts cancels out."""
    before, after = (predict(machine, roles, 1.0, scheduled) for scheduled in (False, True))
    first, second = before.least / after.least, before.most / after.most
    return min(first, second), max(first, second)

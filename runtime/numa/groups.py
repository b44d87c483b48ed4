"""Who reads which node: groups of threads, each with nodes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Teams of threads, numbered from 0 in the order of their lowest nodes."""

    owner: Mapping[int, int]
    """The group that reads each node with memory."""
    thread_group: tuple[int, ...]
    """The group of each thread of the OpenMP team; ascending, every group has a thread."""
    cpus: tuple[frozenset[int], ...]
    """Where each group's threads run."""


def groups(topology: Topology, threads: int) -> Groups:
    """Divides nodes and `threads` threads into groups.

    A node with memory belongs to the nearest node with CPUs, itself if it has any; of equally near ones to that with
    the fewest.  CPUs of a node that no memory belongs to join the nearest that has some.  While there are fewer threads
    than groups, the two nearest join (of equally near ones, those with the fewest CPUs).  Threads are divided in
    proportion to CPUs.  Raises ArgumentError for less than one thread, or a topology without CPUs.
    """
    if threads < 1 or not topology.cpus:
        raise ArgumentError(
            "threads, topology: expected at least one thread and one CPU, "
            f"got {threads} threads and {len(topology.cpus)} CPUs"
        )
    teams = _joined(_teams(topology), threads)
    shares = _proportional(threads, [len(team.cpus) for team in teams])
    return Groups(
        {node: group for group, team in enumerate(teams) for node in sorted(team.memory)},
        tuple(group for group, share in enumerate(shares) for _ in range(share)),
        tuple(team.cpus for team in teams),
    )


@dataclass(frozen=True)
class _Team:
    """Nodes that are read together."""

    topology: Topology
    memory: frozenset[int]
    """Its nodes with memory."""
    nodes: frozenset[int]
    """Those and its nodes with CPUs."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(
            cpu for node in self.topology.nodes if node.number in self.nodes for cpu in node.cpus
        )

    def joined(self, other: _Team) -> _Team:
        return _Team(self.topology, self.memory | other.memory, self.nodes | other.nodes)

    def distance(self, other: _Team) -> float:
        """The mean, both ways."""
        pairs = [(a, b) for a in self.nodes for b in other.nodes]
        both = (self.topology.distance(a, b) + self.topology.distance(b, a) for a, b in pairs)
        return sum(both) / (2 * len(pairs))


def _teams(topology: Topology) -> list[_Team]:
    """As many as there can be."""
    with_cpus = topology.cpu_nodes
    memory: dict[int, list[int]] = {}
    # Own memory first: what is equally near to several nodes then goes where there is least.
    for number in sorted(topology.memory_nodes, key=lambda number: number not in with_cpus):
        home = min(
            with_cpus,
            key=lambda cpus: (
                cpus != number,
                topology.distance(cpus, number),
                len(memory.get(cpus, ())),
                cpus,
            ),
        )
        memory.setdefault(home, []).append(number)
    nodes = {home: {home, *memory.get(home, ())} for home in sorted(memory) or with_cpus[:1]}
    for number in set(with_cpus).difference(nodes):
        nodes[min(nodes, key=lambda home: (topology.distance(number, home), home))].add(number)
    return [
        _Team(topology, frozenset(memory.get(home, ())), frozenset(numbers))
        for home, numbers in nodes.items()
    ]


def _joined(teams: list[_Team], count: int) -> list[_Team]:
    """At most `count` teams, in order."""
    teams = sorted(teams, key=lambda team: min(team.nodes))
    while len(teams) > count:
        one, other = min(
            combinations(teams, 2),
            key=lambda pair: (pair[0].distance(pair[1]), len(pair[0].cpus) + len(pair[1].cpus)),
        )
        rest = [team for team in teams if team not in (one, other)]
        teams = sorted([*rest, one.joined(other)], key=lambda team: min(team.nodes))
    return teams


def _proportional(threads: int, cpus: list[int]) -> list[int]:
    """Threads of each group, at least one: each next one goes where most CPUs a thread are left (D'Hondt's method)."""
    shares = [1] * len(cpus)
    for _ in range(threads - len(cpus)):
        shares[max(range(len(cpus)), key=lambda group: cpus[group] / (shares[group] + 1))] += 1
    return shares


def fixed(topology: Topology, threads: int) -> Groups:
    """As :func:`groups`, but always as many, so that results don't depend on the number of threads.

    With fewer threads than groups there is a thread for each group in the list, and `served` says who does its work.
    """
    return groups(topology, max(threads, len(topology.cpu_nodes)))


def served(groups: Groups, threads: int) -> tuple[tuple[int, int], ...]:
    """The first of the groups that each of so many threads works for, and where they end."""
    count = len(groups.cpus)
    if threads >= count:
        return tuple((group, group + 1) for group in groups.thread_group)
    return tuple((t * count // threads, (t + 1) * count // threads) for t in range(threads))

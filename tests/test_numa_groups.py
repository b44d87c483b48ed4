"""Who reads which node, on machines of every kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa.groups import Groups, groups
from expertile.runtime.numa.topology import Node, Topology

GIB = 1 << 30


def _topology(
    nodes: Sequence[tuple[int, Collection[int], int]],
    distances: Sequence[Sequence[int]] | None = None,
) -> Topology:
    """Of nodes (number, CPUs, bytes); 20 from each to each other by default."""
    count = len(nodes)
    even = [[10 if one == other else 20 for other in range(count)] for one in range(count)]
    return Topology(
        tuple(
            Node(number, tuple(sorted(cpus)), size, size, (), True) for number, cpus, size in nodes
        ),
        tuple(tuple(row) for row in distances or even),
        None,
    )


def _even(count: int, cpus: int = 4) -> Topology:
    return _topology([(i, range(i * cpus, (i + 1) * cpus), GIB) for i in range(count)])


def test_a_group_for_each_node() -> None:
    found = groups(_even(2), 8)
    assert found == Groups(
        owner={0: 0, 1: 1},
        thread_group=(0,) * 4 + (1,) * 4,
        cpus=(frozenset(range(4)), frozenset(range(4, 8))),
    )


def test_one_node() -> None:
    found = groups(_even(1), 3)
    assert found == Groups({0: 0}, (0, 0, 0), (frozenset(range(4)),))


def test_threads_in_proportion_to_cpus() -> None:
    """As an affinity mask may cut nodes; numbers with gaps."""
    topology = _topology([(1, range(6), GIB), (5, {8, 9}, GIB), (9, {12}, GIB)])
    assert groups(topology, 9).thread_group == (0,) * 6 + (1,) * 2 + (2,)
    assert groups(topology, 18).thread_group == (0,) * 12 + (1,) * 4 + (2,) * 2
    assert groups(topology, 3).thread_group == (0, 1, 2)
    assert groups(topology, 9).owner == {1: 0, 5: 1, 9: 2}


def test_memory_only_nodes_belong_to_the_nearest() -> None:
    """As high-bandwidth memory in flat mode: 0 and 2 are one socket's, 1 and 3 the other's."""
    topology = _topology(
        [(0, {0, 1}, GIB), (1, {2, 3}, GIB), (2, (), GIB), (3, (), GIB)],
        [[10, 21, 13, 23], [21, 10, 23, 13], [13, 23, 10, 23], [23, 13, 23, 10]],
    )
    found = groups(topology, 4)
    assert found.owner == {0: 0, 1: 1, 2: 0, 3: 1}
    assert found.cpus == (frozenset({0, 1}), frozenset({2, 3}))


def test_equally_near_memory_is_spread() -> None:
    """As expansion memory behind a switch."""
    topology = _topology([(0, {0}, GIB), (1, {1}, GIB), (2, (), GIB), (3, (), GIB)])
    assert groups(topology, 2).owner == {0: 0, 1: 1, 2: 0, 3: 1}


def test_cpu_only_nodes_help_the_nearest() -> None:
    topology = _topology(
        [(0, {0}, GIB), (1, {1}, 0), (2, {2}, GIB)],
        [[10, 30, 20], [30, 10, 15], [20, 15, 10]],
    )
    found = groups(topology, 3)
    assert found == Groups({0: 0, 2: 1}, (0, 1, 1), (frozenset({0}), frozenset({1, 2})))


def test_a_cpu_only_node_with_memory_of_its_own_nearby() -> None:
    """Where CPUs and memory are all nodes of their own, they make pairs."""
    topology = _topology(
        [(0, {0}, 0), (1, {1}, 0), (2, (), GIB), (3, (), GIB)],
        [[10, 20, 30, 12], [20, 10, 12, 30], [30, 12, 10, 40], [12, 30, 40, 10]],
    )
    found = groups(topology, 2)
    assert found == Groups({2: 1, 3: 0}, (0, 1), (frozenset({0}), frozenset({1})))


def test_cpus_without_any_memory_nearer_than_the_other() -> None:
    topology = _topology([(0, {0}, 0), (1, {1}, 0), (2, (), GIB)])
    assert groups(topology, 2) == Groups({2: 0}, (0, 0), (frozenset({0, 1}),))


def test_fewer_threads_than_nodes() -> None:
    """Two sockets of two nodes each: those of a socket share a group; then all do."""
    near = [[10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]]
    topology = _topology([(i, {2 * i, 2 * i + 1}, GIB) for i in range(4)], near)
    two = groups(topology, 2)
    assert two.owner == {0: 0, 1: 0, 2: 1, 3: 1}
    assert two.thread_group == (0, 1)
    assert two.cpus == (frozenset(range(4)), frozenset(range(4, 8)))
    assert sorted(groups(topology, 3).owner.values()) == [0, 0, 1, 2]
    assert groups(topology, 1) == Groups(dict.fromkeys(range(4), 0), (0,), (frozenset(range(8)),))


def test_even_machines_are_divided_evenly() -> None:
    found = groups(_even(8), 4)
    assert sorted(found.owner.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="0 threads"):
        groups(_even(2), 0)
    with pytest.raises(ArgumentError, match="0 CPUs"):
        groups(_topology([(0, (), GIB)]), 1)


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1)).filter(any), min_size=1, max_size=8
    ).filter(lambda sizes: any(cpus for cpus, _ in sizes)),
    threads=st.integers(1, 40),
    data=st.data(),
)
def test_any_machine(sizes: list[tuple[int, int]], threads: int, data: st.DataObject) -> None:
    starts = [sum(cpus for cpus, _ in sizes[:i]) for i in range(len(sizes))]
    nodes = [
        (3 * i + 1, range(start, start + cpus), GIB * memory)
        for i, (start, (cpus, memory)) in enumerate(zip(starts, sizes, strict=True))
    ]
    far = st.integers(11, 40)
    distances = [
        [10 if i == j else data.draw(far) for j in range(len(nodes))] for i in range(len(nodes))
    ]
    topology = _topology(nodes, distances)
    found = groups(topology, threads)
    count = len(found.cpus)

    # Every thread and every CPU is in exactly one group, and none is empty of either.
    assert len(found.thread_group) == threads
    assert list(found.thread_group) == sorted(found.thread_group)
    assert set(found.thread_group) == set(range(count))
    assert all(found.cpus)
    assert sorted(cpu for cpus in found.cpus for cpu in cpus) == list(topology.cpus)

    # So is all memory, with a group's own CPUs if its node has any; a group without memory would have no work.
    assert set(found.owner) == set(topology.memory_nodes)
    assert set(found.owner.values()) == set(range(count)) or not topology.memory_nodes
    for node in topology.nodes:
        homes = {group for group, cpus in enumerate(found.cpus) if cpus.intersection(node.cpus)}
        assert len(homes) <= 1
        if node.memory and node.cpus:
            assert homes == {found.owner[node.number]}

    # No node shares a group while there are threads for more.
    whole = sum(1 for node in topology.nodes if node.memory and node.cpus)
    assert count >= min(threads, max(whole, 1))

    # No group has a thread too many while another could use it.
    shares = [found.thread_group.count(group) for group in range(count)]
    for one, mine in zip(found.cpus, shares, strict=True):
        for other, theirs in zip(found.cpus, shares, strict=True):
            assert mine == 1 or len(one) / mine >= len(other) / (theirs + 1)

"""Nodes, CPUs, memory, distances and quotas: of machines made of files, and of this one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.runtime.numa import topology
from expertile.runtime.numa.topology import Node

GIB = 1 << 30


def _ranges(numbers: Collection[int]) -> str:
    """As the kernel writes them: "0-3,8"."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _machine(
    root: Path,
    nodes: Mapping[int, tuple[Collection[int], int]],
    cpus: Collection[int] | None = None,
    memory: Collection[int] | None = None,
    sockets: Mapping[int, int] | None = None,
    distances: Mapping[int, str] | None = None,
) -> Path:
    """A root with nodes of (CPUs, bytes); the process may use `cpus` and `memory`."""
    everywhere = [cpu for own, _ in nodes.values() for cpu in own]
    _write(
        root / "proc/self/status",
        f"Name:\tpython\nCpus_allowed_list:\t{_ranges(everywhere if cpus is None else cpus)}\n"
        f"Mems_allowed_list:\t{_ranges(nodes if memory is None else memory)}",
    )
    for number, (own, size) in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        _write(folder / "cpulist", _ranges(own))
        _write(
            folder / "meminfo",
            f"Node {number} MemTotal:       {size >> 10} kB\n"
            f"Node {number} MemFree:        {size >> 11} kB\n"
            f"Node {number} MemUsed:        {size >> 11} kB",
        )
        row = " ".join("10" if number == other else "21" for other in nodes)
        _write(folder / "distance", (distances or {}).get(number, row))
        for cpu in own:
            socket = (sockets or {}).get(number, number)
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            _write(folder / "physical_package_id", str(socket))
    _write(root / "sys/devices/system/node/online", _ranges(nodes))
    return root


# Nodes --------------------------------------------------------------------------------------------


def test_two_nodes(tmp_path: Path) -> None:
    root = _machine(tmp_path, {0: (range(4), 8 * GIB), 1: (range(4, 8), 16 * GIB)})
    found = topology.read(root)
    assert found.nodes == (
        Node(0, (0, 1, 2, 3), 8 * GIB, 4 * GIB, (0,), True),
        Node(1, (4, 5, 6, 7), 16 * GIB, 8 * GIB, (1,), True),
    )
    assert found.distances == ((10, 21), (21, 10))
    assert (found.cpus, found.memory_nodes, found.quota) == (tuple(range(8)), (0, 1), None)
    assert found.threads == 8


def test_only_what_the_process_may_use(tmp_path: Path) -> None:
    """CPU numbers stay absolute; where the cpuset has no memory, pages may be all the same."""
    nodes = {0: (range(4), GIB), 1: (range(4, 8), GIB)}
    found = topology.read(_machine(tmp_path, nodes, cpus={3, 5, 6}, memory={1}))
    assert [node.cpus for node in found.nodes] == [(3,), (5, 6)]
    assert [node.allowed for node in found.nodes] == [False, True]
    assert found.memory_nodes == (0, 1)
    assert topology.read(tmp_path, affinity={6}).cpus == (6,)


def test_memory_only_and_cpu_only_nodes_and_gaps(tmp_path: Path) -> None:
    nodes = {0: (range(2), GIB), 3: (range(2, 4), 0), 4: ((), 4 * GIB), 12: ((), 0)}
    distances = {
        0: "10 21 13 40",
        3: "21 10 14 40",
        4: "13 14 10 40",
        12: "40 40 40 10",
    }
    found = topology.read(_machine(tmp_path, nodes, distances=distances))
    assert [node.number for node in found.nodes] == [0, 3, 4]  # node 12 has nothing
    assert found.memory_nodes == (0, 4)
    assert found.nodes[2] == Node(4, (), 4 * GIB, 2 * GIB, (), True)
    assert found.distances == ((10, 21, 13), (21, 10, 14), (13, 14, 10))
    assert (found.distance(3, 4), found.distance(4, 0)) == (14, 13)


def test_numbers_of_several_digits_are_in_order(tmp_path: Path) -> None:
    found = topology.read(_machine(tmp_path, {number: ({number}, GIB) for number in range(12)}))
    assert [node.number for node in found.nodes] == list(range(12))


def test_sub_numa_clustering(tmp_path: Path) -> None:
    nodes = {number: ({2 * number, 2 * number + 1}, GIB) for number in range(4)}
    sockets = {0: 0, 1: 0, 2: 1, 3: 1}
    found = topology.read(_machine(tmp_path, nodes, sockets=sockets))
    assert [node.sockets for node in found.nodes] == [(0,), (0,), (1,), (1,)]


def test_a_kernel_without_nodes(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/status", "Cpus_allowed_list:\t0-1,4")
    _write(tmp_path / "proc/meminfo", "MemTotal:        2048 kB\nMemFree:         1024 kB")
    found = topology.read(tmp_path)
    assert found.nodes == (Node(0, (0, 1, 4), 2 << 20, 1 << 20, (), True),)
    assert found.distances == ((10,),)


def test_cpus_that_sysfs_forgets(tmp_path: Path) -> None:
    """Some sandboxes show fewer than the process may use."""
    root = _machine(tmp_path, {0: (range(2), GIB), 1: (range(2, 4), GIB)}, cpus=range(6))
    assert [node.cpus for node in topology.read(root).nodes] == [(0, 1, 4, 5), (2, 3)]


def test_a_missing_row_of_distances(tmp_path: Path) -> None:
    nodes = {0: ({0}, GIB), 1: ({1}, GIB)}
    found = topology.read(_machine(tmp_path, nodes, distances={0: ""}))
    assert found.distances == ((10, 20), (21, 10))


@given(
    numbers=st.sets(st.integers(0, 63), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_machine(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], data: st.DataObject
) -> None:
    homes = {cpu: data.draw(st.sampled_from(sorted(numbers))) for cpu in range(8)}
    sizes = {number: GIB * data.draw(st.integers(0, 3)) for number in numbers}
    usable = data.draw(st.sets(st.integers(0, 7), min_size=1))
    nodes = {
        number: ([cpu for cpu in homes if homes[cpu] == number], sizes[number])
        for number in sorted(numbers)
    }
    found = topology.read(_machine(tmp_path_factory.mktemp("root"), nodes, cpus=usable))
    assert {cpu: node.number for node in found.nodes for cpu in node.cpus} == {
        cpu: homes[cpu] for cpu in usable
    }
    assert {node.number: node.memory for node in found.nodes} == {
        number: sizes[number]
        for number in sorted(numbers)
        if sizes[number] or any(homes[cpu] == number for cpu in usable)
    }
    for node in found.nodes:
        for other in found.nodes:
            far = node.number != other.number
            assert found.distance(node.number, other.number) == (21 if far else 10)


# Quotas -------------------------------------------------------------------------------------------

V2 = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def _quota(root: Path, mounts: str, groups: str, files: Mapping[str, str]) -> topology.Topology:
    _machine(root, {0: (range(8), GIB)})
    _write(root / "proc/self/mountinfo", "20 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n" + mounts)
    _write(root / "proc/self/cgroup", groups)
    for name, text in files.items():
        _write(root / "sys/fs/cgroup" / name, text)
    return topology.read(root)


def test_a_quota(tmp_path: Path) -> None:
    """The least on the way up counts."""
    files = {
        "cpu.max": "max 100000",
        "a/cpu.max": "250000 100000",
        "a/b/cpu.max": "600000 100000",
        "other/cpu.max": "1000 100000",
    }
    found = _quota(tmp_path, V2, "0::/a/b", files)
    assert found.quota == 2.5
    assert found.threads == 2
    assert len(found.cpus) == 8


def test_no_quota(tmp_path: Path) -> None:
    found = _quota(tmp_path, V2, "0::/a", {"a/cpu.max": "max 100000"})
    assert found.quota is None
    assert found.threads == 8


def test_less_than_a_cpu(tmp_path: Path) -> None:
    found = _quota(tmp_path, V2, "0::/", {"cpu.max": "20000 100000"})
    assert found.quota == 0.2
    assert found.threads == 1


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    folder = "cpu,cpuacct/job"
    files = {f"{folder}/cpu.cfs_quota_us": "300000", f"{folder}/cpu.cfs_period_us": "100000"}
    groups = "4:memory:/other\n3:cpu,cpuacct:/job\n0::/"
    assert _quota(tmp_path, V1.format(top="/"), groups, files).quota == 3
    files[f"{folder}/cpu.cfs_quota_us"] = "-1"
    assert _quota(tmp_path, V1.format(top="/"), groups, files).quota is None


@pytest.mark.parametrize(
    ("top", "path"),
    [("/docker/1", "/docker/1"), ("/docker/1", "/elsewhere"), ("/", "/../../job")],
)
def test_a_quota_in_a_container(tmp_path: Path, top: str, path: str) -> None:
    """Only its own cgroup is mounted, wherever the host says it is."""
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert _quota(tmp_path, V1.format(top=top), f"3:cpu,cpuacct:{path}", files).quota == 1.5


# This machine -------------------------------------------------------------------------------------


def test_this_machine() -> None:
    found = topology.read()
    assert found.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= found.threads <= len(found.cpus)
    assert found.memory_nodes
    assert all(node.free <= node.memory for node in found.nodes)
    assert all(found.distance(node.number, node.number) > 0 for node in found.nodes)


def test_the_calling_thread_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
    except OSError as error:
        pytest.skip(f"sched_setaffinity: {error}")
    try:
        assert topology.read().cpus == (max(before),)
    finally:
        os.sched_setaffinity(0, before)

"""What must hold of placed memory, in the guest: a check raises AssertionError, or returns what is worth telling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch

from expertile.runtime.numa import active, interleaving, plan, topology

from . import layers, memory
from .placements import Placed

Facts = dict[str, Any]

_NODES = Path("/sys/devices/system/node")


def page_map(placed: Placed) -> Facts:
    """The map says of each page where it is, and has the rule for all those, and only those, that follow one."""
    actual = memory.nodes_of(placed.address, placed.size)
    found = interleaving.page_map(placed.address, placed.size)
    assert found is not None, "the guest's kernel says where pages are"
    assert (found.nodes == actual).all()
    assert (placed.rule == actual).all() == placed.whole, "the kernel has another rule"
    fitting = np.concatenate([_fitting(region) for region in found.regions]) == actual
    assert found.share == fitting.mean()
    whole = found.interleaving(placed.address, placed.size)
    if placed.whole:
        assert found.share == 1, found.regions
        sizes = tuple(region.interleaving.page_bytes for region in found.regions)
        assert sizes == placed.page_bytes
    assert (whole is not None) == (placed.whole and len(placed.page_bytes) == 1), found.regions
    return {"share": found.share, "regions": len(found.regions), "rule": whole and whole.pattern}


def _fitting(region: interleaving.Region) -> np.ndarray:
    """The node of each page of a region, by its rule."""
    pages = region.size // memory.PAGE
    if region.interleaving is None:
        return np.full(pages, -1)
    return region.interleaving.nodes(region.address, pages, memory.PAGE)


def process_topology(placed: Placed) -> Facts:
    """The topology has the machine's nodes, and of CPUs and memory what the kernel lets this process use."""
    found = topology.read()
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    assert [node.number for node in found.nodes] == online_nodes()
    assert [node.number for node in found.nodes if node.allowed] == _numbers(
        status["Mems_allowed_list"]
    )
    assert list(found.cpus) == _numbers(status["Cpus_allowed_list"])
    for node in found.nodes:
        cpus = _numbers((_NODES / f"node{node.number}" / "cpulist").read_text())
        assert node.cpus == tuple(cpu for cpu in cpus if cpu in found.cpus)
        assert 0 < node.free < node.memory
    return {"cpus": [node.cpus for node in found.nodes], "distances": found.distances}


def online_nodes() -> list[int]:
    """The numbers of the machine's nodes, as the kernel says."""
    return _numbers((_NODES / "online").read_text())


def _numbers(text: str) -> list[int]:
    """The numbers of a list such as "0-2,5"."""
    ends = [tuple(map(int, part.split("-"))) for part in text.strip().split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def layer(placed: Placed) -> Facts:
    """A layer over the memory is right, whatever its threads, and what lies in a pattern is read on its own node."""
    machine = layers.RealMachine(topology.read())
    case = layers.case_on(placed)
    as_imported = case.run()  # with what was known before there was a cpuset
    oracle.check(case, as_imported)
    plan.forget()
    with active.using(machine):
        result = case.run()
        [made] = plan._plans.values()
        oracle.check(case, result)
        with oracle.threads(2 * torch.get_num_threads()):
            oracle.assert_same_bits(case.run(), result)
    with active.using(None):
        oracle.check(case, case.run())
    assert _cpus_of_threads() == {machine.topology.cpus}, "threads may run where they could before"
    if made is None:
        assert len([node for node in machine.topology.nodes if node.cpus]) == 1
        return {"groups": 1}
    groups = machine.groups(torch.get_num_threads())
    total, remote, avoidable = layers.planned(machine, made, groups)
    assert total == layers.BYTES, "each byte is read by the threads of one node"
    assert avoidable == 0, f"{avoidable} of {total} bytes are read from afar"
    # The system may have moved a page since it was placed: then its matrix is in no pattern.
    elsewhere = int((memory.nodes_of(placed.address, placed.size) != placed.rule).sum())
    assert remote == 0 or elsewhere or len(placed.page_bytes) > 1
    facts = {"remote": round(remote / total, 4), "pages_elsewhere": elsewhere}
    return {"groups": list(map(sorted, groups.cpus)), **facts}


def loads(placed: Placed) -> Facts:
    """The same of what the kernels really load, thread by thread."""
    machine = layers.RealMachine(topology.read())
    case = layers.case_on(placed)
    result, remote, total = layers.loaded(machine, case)
    oracle.check(case, result)
    assert (remote, total) == (0, layers.BYTES)
    return {"bytes": total}


def _cpus_of_threads() -> set[tuple[int, ...]]:
    """The CPUs that the threads of this process may run on."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    return {tuple(sorted(os.sched_getaffinity(thread))) for thread in threads}

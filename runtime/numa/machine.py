"""This machine's memory nodes, as plans ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from expertile.runtime.numa.groups import Groups, fixed
from expertile.runtime.numa.interleaving import Interleaving, page_map
from expertile.runtime.numa.topology import Topology


class ThisMachine:
    """The real thing: topology from sysfs, pages from the kernel."""

    pins = True

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def groups(self, threads: int) -> Groups:
        """The teams of so many threads, always as many of them."""
        return fixed(self.topology, threads)

    def locate(self, ranges: Sequence[tuple[int, int]]) -> list[Interleaving | None]:
        """How the pages of each range (address, bytes) are spread. Ranges that are neighbours are asked for at once."""
        found: list[Interleaving | None] = [None] * len(ranges)
        for members in _runs(ranges):
            first = ranges[members[0]][0]
            end = max(address + size for address, size in (ranges[i] for i in members))
            pages = page_map(first, end - first)
            for number in members:
                found[number] = pages.interleaving(*ranges[number]) if pages else None
        return found


def _runs(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranges by number, in runs with less than a page between them."""
    runs: list[list[int]] = []
    end = None
    for number in sorted(range(len(ranges)), key=lambda i: ranges[i][0]):
        address, size = ranges[number]
        if end is not None and address <= end + 4096:
            runs[-1].append(number)
            end = max(end, address + size)
        else:
            runs.append([number])
            end = address + size
    return runs

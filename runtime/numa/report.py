"""Where the pages of weights are, by what rule, and how much of them the threads of their own node would read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from expertile.runtime.numa import interleaving
from expertile.runtime.numa.groups import Groups
from expertile.runtime.numa.interleaving import Interleaving, PageMap
from expertile.runtime.numa.segments import Geometry, Placed, Tables, period, tables


class Memory(NamedTuple):
    """A tensor."""

    address: int
    size: int
    matrices: Sequence[int]
    """The addresses of those in it; none of a tensor of scales."""


@dataclass(frozen=True)
class Part:
    """What there is to say of a tensor, or of several that are a part of some weights."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    pages: Mapping[int, int] | None
    """How many are on each node, and under -1 how many are on none yet; None if the kernel doesn't say."""
    interleaving: Interleaving | None
    """The rule that most pages follow, if any."""
    share: float
    """Of the pages: those that follow a rule."""
    period: int | None
    """T: rows after which it repeats which part of a row is on which node, under that rule; None without one."""
    local: float | None
    """Of the bytes: those that threads of their own node read under the schedule; None of scales, and if not known."""

    def __str__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        head = f"{self.name}: {shape}, {self.nbytes / 2**20:.1f} MiB"
        return f"{head}; {'; '.join(self._found())}"

    def _found(self) -> Iterator[str]:
        if self.pages is None:
            yield "the kernel does not say where its pages are"
            return
        names = (
            (f"node {n}" if n >= 0 else "no node yet", count) for n, count in self.pages.items()
        )
        yield f"pages on {', '.join(f'{name}: {count}' for name, count in names)}"
        rule = self.interleaving
        if rule is None:
            yield "in no pattern"
        elif len(rule.pattern) == 1:
            yield f"{self.share:.1%} on one node"
        else:
            nodes = ", ".join(map(str, rule.pattern))
            yield f"{self.share:.1%} in turn on {nodes}, {rule.page_bytes >> 10} KiB each"
        if self.period is not None:
            yield f"T = {self.period}"
        if self.local is not None:
            yield f"{self.local:.1%} read locally"


def report(
    name: str,
    shape: tuple[int, ...],
    memory: Sequence[Memory],
    geometry: Geometry | None,
    groups: Groups,
    far: Collection[int] = (),
) -> Part:
    """Ask the kernel where tensors are, now.

    geometry: of their matrices, if they have any.  far: nodes that are remote to the group too that reads them.
    """
    size = sum(each.size for each in memory)
    maps = [interleaving.page_map(each.address, each.size) for each in memory]
    found = [each for each in maps if each is not None]
    if len(found) < len(maps):
        return Part(name, shape, size, None, None, 0.0, None, None)
    rule = _most_common(found)
    pages = sum(len(each.nodes) for each in found)
    return Part(
        name, shape, size, _counts(found), rule,
        sum(each.share * len(each.nodes) for each in found) / pages,
        period(geometry.row_bytes, rule) if geometry and rule else None,
        _local(geometry, memory, found, groups, far) if geometry else None,
    )  # fmt: skip


def _most_common(maps: Sequence[PageMap]) -> Interleaving | None:
    sizes: Counter[Interleaving] = Counter()
    for each in maps:
        for region in each.regions:
            if region.interleaving is not None:
                sizes[region.interleaving] += region.size
    return max(sizes, key=lambda rule: sizes[rule], default=None)


def _counts(maps: Sequence[PageMap]) -> dict[int, int]:
    """Pages by node."""
    nodes = np.maximum(np.concatenate([each.nodes for each in maps]), -1)
    numbers, counts = np.unique(nodes, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


# What would be read by whom -------------------------------------------------------------------------------------------


def _local(
    geometry: Geometry,
    memory: Sequence[Memory],
    maps: Sequence[PageMap],
    groups: Groups,
    far: Collection[int],
) -> float:
    """The share of the matrices' bytes that a group reads which owns the node they are on, page by page."""
    span = (geometry.rows - 1) * geometry.row_bytes + geometry.code_bytes
    placed: list[Placed] = []
    pages: list[PageMap] = []
    for each, where in zip(memory, maps, strict=True):
        for address in each.matrices:
            placed.append((address, where.interleaving(address, span)))
            pages.append(where)
    divided = tables(geometry, placed, groups.owner, len(groups.cpus))
    reads = [_Reads.of(geometry, divided, phase) for phase in range(len(divided.cells))]
    near = {node: group for node, group in groups.owner.items() if node not in far}
    local = sum(
        reads[phase].local(address, where, near)
        for (address, _), where, phase in zip(placed, pages, divided.phase.tolist(), strict=True)
    )
    return local / (len(placed) * geometry.rows * geometry.code_bytes)


class _Reads(NamedTuple):
    """What is read of a matrix: int64 arrays, a number for each piece of a row."""

    group: np.ndarray
    first: np.ndarray
    """The first byte, from where the matrix begins."""
    end: np.ndarray

    @classmethod
    def of(cls, geometry: Geometry, divided: Tables, phase: int) -> _Reads:
        """By all groups, from the tables that they work from."""
        groups, firsts, ends = [], [], []
        for group, cells in enumerate(divided.cells[phase]):
            entries = divided.entries[cells[0, 0] : cells[-1, 1]]
            for row, _, rows, first, end, _ in entries.tolist():
                places = (row + divided.apart * np.arange(rows)) * geometry.row_bytes
                for begin, stop in divided.ranges[first:end].tolist():
                    firsts.append(places + _byte(geometry, begin))
                    ends.append(places + _byte(geometry, stop))
                    groups.append(np.full(rows, group))
        return cls(*map(np.concatenate, (groups, firsts, ends)))

    def local(self, address: int, where: PageMap, near: Mapping[int, int]) -> int:
        """Bytes of the matrix at an address that are on a node near to the group that reads them."""
        owners = np.array([-1] + [near.get(n, -1) for n in range(int(where.nodes.max()) + 1)])
        group = owners[np.maximum(where.nodes, -1) + 1]  # of each page
        total = 0
        for number in np.unique(self.group):
            own = np.append(group == number, False).astype(np.int64)
            before = np.cumsum(own) - own  # pages of the group before each page

            def bytes_before(
                place: np.ndarray, own: np.ndarray = own, before: np.ndarray = before
            ) -> np.ndarray:
                page, inside = np.divmod(address + place - where.address, where.page_bytes)
                return before[page] * where.page_bytes + own[page] * inside

            mine = self.group == number
            total += int((bytes_before(self.end[mine]) - bytes_before(self.first[mine])).sum())
        return total


def _byte(geometry: Geometry, chunk: int) -> int:
    """Where a chunk at which rows can be divided begins in a row."""
    whole = chunk // geometry.grain_chunks * geometry.grain_bytes
    return geometry.code_bytes if chunk == geometry.chunks else whole

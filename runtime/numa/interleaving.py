"""Which node a page is on, as a rule: found from where all the pages of a range really are, never assumed.

Linux interleaves by absolute page number: 4 KiB pages by theirs, transparent huge pages by that of the huge page, and
one array may have both.  Memory that moved keeps the phase of its old address, a full node passes pages on to others,
files follow no rule at all.  So the phase, the period and the page size are all fitted:

1. Aligned huge-page blocks that lie on one node each are one unit of the sequence, other pages are units themselves.
2. In a run of units, the first few hundred give a rule: the smallest period that they fit exactly, else the one that
   most of them fit.  It reaches as far as the sum over units (+1 for one that fits, -3 for one that doesn't) is
   greatest; adding up ends once the sum is far below that, as the X-drop rule of BLAST ends an alignment.
3. The next run begins there.

Source of X-drop: Altschul et al., "Basic local alignment search tool", J. Mol. Biol. 215 (1990).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import pages

Nodes = NDArray[np.int16]

MOST_PERIOD = 64  # pages in the longest pattern looked for

_SEEDS = (512, 128, 32, 8)  # units that give a rule; fewer where more lie across two rules
_AGREEMENT = 0.7  # share of units that must equal those a period later; 1/2 by chance on two nodes
_MISFIT = -3  # so three of four units fit, in any stretch that is worth having
_DROP = 256  # misfits in a row that end a region: 85
_PART = 1 << 14  # units that are looked at at once
_PERIOD_COST = 0.1  # units that a period must gain for each unit it is longer
_NOWHERE = -1  # for pages that aren't there: equals no page, not even others that aren't there


@dataclass(frozen=True)
class Interleaving:
    """Page number n = address // page_bytes is on node pattern[n % len(pattern)]; weighted nodes repeat."""

    page_bytes: int
    pattern: tuple[int, ...]

    @property
    def period_bytes(self) -> int:
        """Addresses this far apart are on the same node."""
        return self.page_bytes * len(self.pattern)

    def node(self, address: int) -> int:
        """The node of the byte at `address`."""
        return self.pattern[address // self.page_bytes % len(self.pattern)]

    def nodes(self, address: int, count: int, page_bytes: int) -> Nodes:
        """The nodes, int16 [count], of the base pages of `page_bytes` from that of `address` on; not to be written."""
        several = _periods(self, page_bytes)
        period = len(self.pattern) * (self.page_bytes // page_bytes)
        start = address // page_bytes % period
        if start + count <= len(several):
            return several[start : start + count]
        return np.resize(several[start : start + len(several) - period], count)


@lru_cache(64)
def _periods(rule: Interleaving, page_bytes: int) -> Nodes:
    """The nodes of base pages from number 0 on: at least two periods, and enough for most questions."""
    period = np.repeat(np.array(rule.pattern, np.int16), rule.page_bytes // page_bytes)
    several = np.tile(period, 2 + 4096 // len(period))
    several.flags.writeable = False
    return several


@dataclass(frozen=True)
class Region:
    """A stretch of whole base pages, `size` bytes, under one rule, or under none."""

    address: int
    size: int
    interleaving: Interleaving | None
    share: float  # of its pages that fit; 0 under no rule


@dataclass(frozen=True, eq=False)
class PageMap:
    """Where the pages of a range were when it was asked for.

    `nodes`: int16 [pages], of each base page; below 0 where there is none.  `regions`: ascending, without gaps.
    """

    address: int  # of the first page
    page_bytes: int  # of a base page
    nodes: Nodes
    regions: tuple[Region, ...]

    def interleaving(self, address: int, size: int) -> Interleaving | None:
        """The rule that every page of these `size` bytes fits, else None.

        Pages that are all on one node fit a rule, whatever is around them.  Raises ArgumentError for bytes that aren't
        all in the map.
        """
        first, count = pages.span(address, size, self.page_bytes)
        start = first - self.address // self.page_bytes
        if size < 1 or start < 0 or start + count > len(self.nodes):
            end = self.address + len(self.nodes) * self.page_bytes
            raise ArgumentError(
                f"address, size: expected at least one byte, within {self.address:#x} to {end:#x}, "
                f"got {size} at {address:#x}; map the range that holds them"
            )
        nodes = self.nodes[start : start + count]
        region = self.regions[bisect_right(self.regions, address, key=_address) - 1]
        rule = region.interleaving
        within = address + size <= region.address + region.size
        if rule and within and _all_fit(rule, nodes, address, self.page_bytes):
            return rule
        rule = Interleaving(self.page_bytes, (int(nodes[0]),))
        fits = nodes[0] >= 0 and _all_fit(rule, nodes, address, self.page_bytes)
        return rule if fits else None

    @property
    def share(self) -> float:
        """The share of the pages that fit their region's rule."""
        fits = sum(region.share * region.size for region in self.regions)
        return fits / (len(self.nodes) * self.page_bytes)


def page_map(address: int, size: int) -> PageMap | None:
    """The map of `size` (at least 1) bytes of this process; None where the kernel doesn't say (see `pages.where`)."""
    nodes = pages.where(address, size)
    return None if nodes is None else fitted(nodes, address, pages.PAGE_BYTES)


def fitted(nodes: Nodes, address: int, page_bytes: int = 4096) -> PageMap:
    """The map of base pages of which `nodes` says where they are; the first is that of `address`."""
    first = address // page_bytes
    return PageMap(first * page_bytes, page_bytes, nodes, fit(nodes, first, page_bytes))


def fit(nodes: Nodes, first_page: int, page_bytes: int = 4096) -> tuple[Region, ...]:
    """The regions of base pages number first_page, first_page + 1, …, of which `nodes` (int16 [pages]) tells the nodes.

    Some milliseconds for a gigabyte.  A rule that fits a region exactly has the smallest period that does.
    """
    spans = _spans(np.maximum(nodes, _NOWHERE), first_page, page_bytes)
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, rule = span.start, span.rule
        if rule and len(rule.pattern) == 1:
            rule = Interleaving(page_bytes, rule.pattern)  # one node: by any page size
        if merged and merged[-1].rule == rule:
            start = merged.pop().start
        merged.append(_Span(start, span.stop, rule))
    return tuple(_region(span, nodes, first_page, page_bytes) for span in merged)


# Units --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """Base pages (or, on the way, units) start to stop of the array, and their rule."""

    start: int
    stop: int
    rule: Interleaving | None


def _spans(nodes: Nodes, first_page: int, page_bytes: int) -> list[_Span]:
    """Spans that cover all pages, in any order."""
    blocks = _Blocks(nodes, first_page, page_bytes)
    finder, spans = _Finder(blocks.bytes), []
    for start, stop in _longest_first(blocks.whole):
        for span in finder.cover(blocks.nodes[start:stop], blocks.number + start):
            spans.append(blocks.pages(_shifted(span, start)))
    covered = np.zeros(len(nodes), bool)
    for span in spans:
        covered[span.start : span.stop] = True
    finder = _Finder(page_bytes)
    for start, stop in _longest_first(~covered):
        cover = finder.cover(nodes[start:stop], first_page + start)
        spans.extend(_shifted(span, start) for span in cover)
    return spans


def _shifted(span: _Span, by: int) -> _Span:
    return _Span(span.start + by, span.stop + by, span.rule)


def _longest_first(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The runs of True. The longest has most to say about the rule, which the others may just follow."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return sorted(((int(a), int(b)) for a, b in edges), key=lambda run: run[0] - run[1])


class _Blocks:
    """The aligned blocks of the size of a huge page: a page table full of base pages.

    `edges` [blocks + 1], in pages; `nodes` [blocks]; `whole` [blocks]: all of it is there, on one node.
    """

    def __init__(self, nodes: Nodes, first_page: int, page_bytes: int) -> None:
        size = page_bytes // 8  # entries of 8 bytes
        self.bytes = size * page_bytes
        self.number = first_page // size
        inner = np.arange(-first_page % size, len(nodes), size)
        self.edges = np.unique(np.concatenate([[0], inner, [len(nodes)]]))
        starts = self.edges[:-1]
        self.nodes: Nodes = np.minimum.reduceat(nodes, starts)
        uniform = (self.nodes == np.maximum.reduceat(nodes, starts)) & (self.nodes >= 0)
        full = np.diff(self.edges) == size
        self.whole, self._cut = uniform & full, uniform & ~full

    def pages(self, span: _Span) -> _Span:
        """A span of blocks in pages, with a cut block before or after it that fits its rule too."""
        start, stop, rule = span.start, span.stop, span.rule
        if rule and start == 1 and self._fits(rule, 0):
            start = 0
        if rule and stop == len(self.nodes) - 1 and self._fits(rule, stop):
            stop += 1
        return _Span(int(self.edges[start]), int(self.edges[stop]), rule)

    def _fits(self, rule: Interleaving, block: int) -> bool:
        node = rule.node((self.number + block) * self.bytes)
        return bool(self._cut[block]) and node == self.nodes[block]


# Rules --------------------------------------------------------------------------------------------


class _Finder:
    """Finds the rules of sequences of units of one size, which are likely to share them."""

    def __init__(self, unit_bytes: int) -> None:
        self._bytes = unit_bytes
        self._known: list[tuple[int, ...]] = []

    def cover(self, units: Nodes, number: int) -> Iterator[_Span]:
        """Spans that cover the units; the first unit has this number."""
        start = unknown = 0
        while start < len(units):
            pattern, count = self._first(units[start:], number + start)
            start += count
            if pattern:
                begin = start - _reach_back(pattern, units[unknown:start], number + unknown)
                if begin > unknown:
                    yield _Span(unknown, begin, None)
                yield _Span(begin, start, Interleaving(self._bytes, pattern))
                unknown = start
        if unknown < start:
            yield _Span(unknown, start, None)

    def _first(self, units: Nodes, number: int) -> tuple[tuple[int, ...], int]:
        """A pattern and how many units it holds for; an empty one, and units of which nothing is known."""
        for pattern in self._known:
            if _all_fit(Interleaving(1, pattern), units, number, 1):
                return pattern, len(units)
        for seed in _SEEDS:
            # A rest that is shorter than any period has one of its own, but part of a sequence must show it twice.
            pattern = _pattern(
                units[:seed], number, len(units) if len(units) <= seed else seed // 2
            )
            if not pattern:
                break
            count = _reach(pattern, units, number)
            if count > seed:  # more of them can say what the pattern is
                pattern = _vote(units[: min(count, _PART)], number, len(pattern))[1]
                count = _reach(pattern, units, number)
            if 2 * count >= min(seed, len(units)):
                self._known.append(pattern)
                return pattern, count
        return (), min(len(units), _SEEDS[0])


def _pattern(units: Nodes, number: int, most: int) -> tuple[int, ...]:
    """The best pattern, of a period up to `most`, for some hundred units from this number on; empty if none is good."""
    agreement = _agreement(units, min(most, MOST_PERIOD))
    exact = np.flatnonzero(agreement == 1)
    if len(exact):
        return _vote(units, number, int(exact[0]) + 1)[1]
    near = np.flatnonzero(agreement >= max(_AGREEMENT, agreement.max(initial=0) - 0.1))
    votes = [_vote(units, number, int(index) + 1) for index in near]
    return max(votes, key=lambda vote: vote[0] - _PERIOD_COST * len(vote[1]), default=(0, ()))[1]


def _agreement(units: Nodes, periods: int) -> NDArray[np.float64]:
    """For periods 1, 2, …: the share of units that equal the one a period later; 1 only if all units are somewhere.

    A period as long as the sequence agrees with all there is.
    """
    count = len(units)
    later = np.full(count + periods, _NOWHERE - 1, np.int16)
    later[:count] = units
    step = later.itemsize
    equal = as_strided(later[1:], (periods, count), (step, step)) == units
    equal[:, units == _NOWHERE] = False
    there = count - np.arange(1, periods + 1)
    agreement = np.count_nonzero(equal, axis=1) / np.maximum(there, 1)
    present = bool((units != _NOWHERE).all())
    if periods == count:
        agreement[-1] = present
    return agreement if present else np.minimum(agreement, np.nextafter(1, 0))


def _vote(units: Nodes, number: int, period: int) -> tuple[int, tuple[int, ...]]:
    """How many units fit the best pattern of this period, and the pattern."""
    present = units != _NOWHERE
    residues = (number + np.flatnonzero(present)) % period
    most = int(units.max()) + 1
    votes = np.bincount(residues * most + units[present], minlength=period * most)
    table = votes.reshape(period, most)
    return int(table.max(axis=1).sum()), tuple(table.argmax(axis=1).tolist())


def _reach(pattern: tuple[int, ...], units: Nodes, number: int) -> int:
    """How many of the units the pattern is worth having for."""
    rule = Interleaving(1, pattern)
    score = best = reach = 0
    for start, stop in _parts(len(units)):
        fits = units[start:stop] == rule.nodes(number + start, stop - start, 1)
        if score == best and fits.all():  # as nearly always
            score += stop - start
            best, reach = score, stop
            continue
        scores = score + np.cumsum(np.where(fits, 1, _MISFIT), dtype=np.int64)
        dropped = np.flatnonzero(np.maximum.accumulate(scores).clip(best) - scores > _DROP)
        scores = scores[: dropped[0]] if len(dropped) else scores
        top = int(scores.max(initial=best - 1))
        if top >= best:
            best, reach = top, start + int(np.flatnonzero(scores == top)[-1]) + 1
        if len(dropped):
            break
        score = int(scores[-1])
    return reach


def _reach_back(pattern: tuple[int, ...], units: Nodes, number: int) -> int:
    """The same from the last unit towards the first."""
    last = number + len(units) - 1
    mirrored = tuple(pattern[(last - back) % len(pattern)] for back in range(len(pattern)))
    return _reach(mirrored, units[::-1], 0)


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """Cuts a sequence: small parts first, for rules that don't reach far, later as large as the caches like."""
    start, size = 0, 1024
    while start < count:
        yield start, min(start + size, count)
        start, size = start + size, min(2 * size, _PART)


# Regions ------------------------------------------------------------------------------------------


def _region(span: _Span, nodes: Nodes, first_page: int, page_bytes: int) -> Region:
    rule, address = span.rule, (first_page + span.start) * page_bytes
    share = 0.0
    if rule:
        count = span.stop - span.start
        there = rule.nodes(address, count, page_bytes) == nodes[span.start : span.stop]
        share = int(np.count_nonzero(there)) / count
    return Region(address, (span.stop - span.start) * page_bytes, rule, share)


def _all_fit(rule: Interleaving, nodes: Nodes, address: int, page_bytes: int) -> bool:
    return bool((nodes == rule.nodes(address, len(nodes), page_bytes)).all())


def _address(region: Region) -> int:
    return region.address

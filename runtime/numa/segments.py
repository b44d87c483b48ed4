"""Which pieces of which rows each group of threads reads, from where the pages of the matrices are.

Pages are spread over nodes in a pattern and rows are laid over pages, so that rows which begin at the same place of the
pattern are cut in the same places.  They are `period` rows apart, and 16 rows that far from each other make a tile of
which each column is on one node (after HiNa-MoE).  What threads are given are tables of

    entry     some rows of one pattern, and the ranges of chunks in them that one group reads
    cell      the entries of a group in a block of rows: what work is divided into
    rank      the place of a group among those that share a row, by its first chunk: the order of adding partial sums

Every chunk of every row is in exactly one entry, wherever the pages are: a page map that is wrong costs time, no more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa.interleaving import Interleaving

if TYPE_CHECKING:  # nothing here needs a compiler to be loaded
    from expertile.templates.formats.base import ByRows

BLOCK_ROWS = 128
"""Rows of a block, at most."""
_TILE_ROWS = 16

Placed = tuple[int, Interleaving | None]
"""A matrix: the address of its first row, and where its pages are, if they are in a pattern."""


@dataclass(frozen=True)
class Geometry:
    """A matrix of some role, as memory has it: `rows` rows of `chunks` chunks."""

    rows: int
    row_bytes: int
    """From a row to the next."""
    code_bytes: int
    """Of a row; the rest is a gap, or the row of another matrix."""
    chunks: int
    """Of a row; the last one may be of fewer k's."""
    grain_chunks: int
    """Rows are divided at multiples of it: what can be read apart."""
    grain_bytes: int
    """Of so many chunks."""

    @classmethod
    def of(cls, format_: ByRows, rows: int, columns: int, chunk: int) -> Geometry:
        """A matrix in a weight format that knows its strides, for a machine with `chunk` k's in a chunk."""
        grain, chunks = format_.grain, -(-columns // chunk)
        return cls(
            rows,
            format_.row_bytes,
            format_.code_bytes(columns),
            chunks,
            grain,
            format_.code_bytes(grain * chunk),
        )


@dataclass(frozen=True)
class Tables:
    """What each group reads of the matrices of a role: contiguous arrays, which machine code reads by their addresses.

    A **position** is the place of a row in the order in which rows are worked on: by class, the rows `apart` from each
    other, and within a class as in memory.  Sums are kept in this order.
    """

    apart: int
    """Rows of memory from a row of a tile to the next."""
    position: np.ndarray
    """int32 `[rows]`: the position of each row."""
    block_first: np.ndarray
    """int64 `[blocks + 1]`: the first position of each block. A block has rows of one class, at most `BLOCK_ROWS`."""
    phase: np.ndarray
    """int64 `[matrices]`: which of the phases below a matrix has; those that lie alike on their pages share one."""
    cells: np.ndarray
    """int64 `[phases, groups, blocks, 2]`: first and end of a cell's entries, one cell after another."""
    entries: np.ndarray
    """int64 `[entries, 6]`: the first row, its position, rows, first and end of its ranges, rank.

    Row i of an entry is row first + i · apart, at position first + i, and all of them are in the cell's block.
    """
    ranges: np.ndarray
    """int64 `[ranges, 2]`: first and end, in chunks. Those of an entry ascend, and neither overlap nor touch."""
    parts: np.ndarray
    """int32 `[phases, rows]`: how many groups share each row: ranks are 0…parts − 1."""

    @property
    def most_parts(self) -> int:
        """Partial sums of a row, at most."""
        return int(self.parts.max())


def period(row_bytes: int, interleaving: Interleaving) -> int:
    """Rows from a row to the next one that begins at the same place of the pattern; 1 if all pages are on one node."""
    if len(set(interleaving.pattern)) == 1:
        return 1
    whole = interleaving.period_bytes
    return whole // math.gcd(row_bytes, whole)


def tables(
    geometry: Geometry, matrices: Sequence[Placed], owner: Mapping[int, int], groups: int
) -> Tables:
    """The tables for the matrices of a role, of which `owner[node]` of `groups` groups reads what is on a node.

    Where a page ends within a row, the row is divided at the nearest grain: what is read from another node is at most
    half a grain a page.  A matrix without a pattern is divided by rows, evenly: all groups have work and no row is
    shared.  Raises ArgumentError for pages on a node that no group owns.
    """
    lying = [_owned(placed, owner, groups) for placed in matrices]
    phases = list(dict.fromkeys(lying))
    number = {placed: index for index, placed in enumerate(phases)}
    blocks = _blocks(geometry.rows, _rows_apart(geometry, lying, groups))
    kinds, division = _kinds(geometry, phases, blocks, groups)
    cells, entries = _cells(kinds, division, blocks)
    parts = (division.first < division.end).sum(axis=1, dtype=np.int32)
    return Tables(
        blocks.apart,
        blocks.position,
        blocks.first,
        np.array([number[placed] for placed in lying], np.int64),
        cells,
        entries,
        division.ranges,
        parts[kinds],
    )


def remote_bytes(
    geometry: Geometry, tables: Tables, matrices: Sequence[Placed], owner: Mapping[int, int]
) -> tuple[int, int]:
    """Bytes that `tables` let groups read from nodes of other groups, and bytes they read.

    Counted from the entries and the pages, without what the tables were made with.  Matrices without a pattern are left
    out: where their pages are is not known.
    """
    remote = total = 0
    counted: dict[tuple[int, int, Interleaving], tuple[int, int]] = {}
    for (address, interleaving), phase in zip(matrices, tables.phase.tolist(), strict=True):
        if interleaving is None:
            continue
        key = phase, address % interleaving.period_bytes, interleaving
        if key not in counted:
            counted[key] = _count(geometry, tables, *key, owner)
        far, all_ = counted[key]
        remote, total = remote + far, total + all_
    return remote, total


class Segment(NamedTuple):
    """A part of a row that is on one node: bytes `first`…`end`, counted from the beginning of the row."""

    row: int
    first: int
    end: int
    node: int


def segments(geometry: Geometry, address: int, interleaving: Interleaving) -> list[Segment]:
    """The rows of one period, or all there are, cut where they go over to a page of another node."""
    found: list[Segment] = []
    for row in range(min(period(geometry.row_bytes, interleaving), geometry.rows)):
        begin, first = address + row * geometry.row_bytes, 0
        while first < geometry.code_bytes:
            node = interleaving.node(begin + first)
            page_end = ((begin + first) // interleaving.page_bytes + 1) * interleaving.page_bytes
            end = min(page_end - begin, geometry.code_bytes)
            if first and found[-1].node == node:
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(Segment(row, first, end, node))
            first = end
    return found


# Where matrices lie ---------------------------------------------------------------------------------------------------


def _owned(placed: Placed, owner: Mapping[int, int], groups: int) -> Placed:
    """The same with groups in place of nodes, in the shortest pattern, and at the lowest address that lies so.

    Matrices that this makes equal are read in the same way.
    """
    address, interleaving = placed
    if groups == 1:
        return 0, _all_of(0)
    if interleaving is None:
        return 0, None
    missing = set(interleaving.pattern) - owner.keys()
    if missing:
        raise ArgumentError(
            f"owner: expected a group for each node that has pages, got none for node {min(missing)}; every node with "
            "memory must be owned by a group"
        )
    pattern = tuple(owner[node] for node in interleaving.pattern)
    length = next(n for n in range(1, len(pattern) + 1) if pattern == pattern[n:] + pattern[:n])
    if length == 1:
        return 0, _all_of(pattern[0])
    short = Interleaving(interleaving.page_bytes, pattern[:length])
    return address % short.period_bytes, short


def _all_of(group: int) -> Interleaving:
    """Everything is one group's, as if on one page."""
    return Interleaving(1 << 62, (group,))


def _rows_apart(geometry: Geometry, lying: Sequence[Placed], groups: int) -> int:
    """1, or the period of the pattern that most matrices have: whichever takes fewer tiles of 16 rows by a chunk.

    Pages of 2 MiB hold hundreds of rows, so that neighbours make good tiles and rows a period apart don't exist.
    """
    patterns = Counter(interleaving for _, interleaving in lying if interleaving is not None)
    if not patterns:
        return 1
    [(common, _)] = patterns.most_common(1)
    example = next(placed for placed in lying if placed[1] == common)

    def tiles(apart: int) -> int:
        blocks = _blocks(geometry.rows, apart)
        kinds, division = _kinds(geometry, [example], blocks, groups)
        _, entries = _cells(kinds, division, blocks)
        chunks = np.append(0, np.cumsum(division.ranges[:, 1] - division.ranges[:, 0]))
        _, _, rows, first, end, _ = entries.T
        return int((-(-rows // _TILE_ROWS) * (chunks[end] - chunks[first])).sum())

    whole = period(geometry.row_bytes, common)
    return min((1, whole), key=tiles) if whole > 1 else 1


class _Blocks(NamedTuple):
    """The order of rows and how it is cut."""

    apart: int
    position: np.ndarray
    """int32 `[rows]`: of each row."""
    row: np.ndarray
    """int64 `[rows]`: at each position."""
    first: np.ndarray
    """int64 `[blocks + 1]`: the first position of a block."""


def _blocks(rows: int, apart: int) -> _Blocks:
    """Blocks of up to `BLOCK_ROWS` rows, none of two classes."""
    natural = np.arange(rows)
    row = np.argsort(natural % apart, kind="stable")
    position = np.empty(rows, np.int32)
    position[row] = natural
    begins = np.flatnonzero(row // apart % BLOCK_ROWS == 0)
    return _Blocks(apart, position, row, np.append(begins, rows))


# How rows are divided -------------------------------------------------------------------------------------------------


class _Division(NamedTuple):
    """How kinds of rows are divided among groups. Rows of kind g < groups are whole, and group g's."""

    first: np.ndarray
    """int64 `[kinds, groups]`: where the ranges of a group begin."""
    end: np.ndarray
    """int64 `[kinds, groups]`"""
    ranges: np.ndarray
    rank: np.ndarray
    """int64 `[kinds, groups]`: of the groups that have ranges."""


def _kinds(
    geometry: Geometry, phases: Sequence[Placed], blocks: _Blocks, groups: int
) -> tuple[np.ndarray, _Division]:
    """What kind each row is of, int32 `[phases, rows]`, and how the kinds are divided.

    A row that reaches over the end of a page is of one kind with those that begin at the same place of the pattern.
    """
    rows = geometry.rows
    kinds = np.empty((len(phases), rows), np.int32)
    number = np.arange(groups)
    pieces = [np.stack([number, 0 * number, 0 * number + geometry.chunks, number], axis=1)]
    count = groups
    for interleaving in dict.fromkeys(interleaving for _, interleaving in phases):
        chosen = [i for i, placed in enumerate(phases) if placed[1] == interleaving]
        if interleaving is None:
            kinds[chosen] = _shares(blocks, groups)[blocks.position]
            continue
        repeat = min(period(geometry.row_bytes, interleaving), rows)
        begin = np.array([[phases[i][0]] for i in chosen])
        begin = begin + np.arange(repeat) * geometry.row_bytes
        _, place = _divide(begin, interleaving.period_bytes)
        page, inside = _divide(place, interleaving.page_bytes)
        kind = np.array(interleaving.pattern, np.int32)[page]
        over = inside + geometry.code_bytes > interleaving.page_bytes
        places, kind_over = np.unique(place[over], return_inverse=True)
        kind[over] = count + kind_over
        kinds[chosen] = kind[:, np.arange(rows) % repeat]
        cut = _pieces(geometry, interleaving, places)
        cut[:, 0] += count
        pieces.append(cut)
        count += len(places)
    return kinds, _division(np.concatenate(pieces), count, groups)


def _divide(numbers: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Quotients and remainders. NumPy's own function for it takes several times as long."""
    quotients = numbers // by
    return quotients, numbers - quotients * by


def _shares(blocks: _Blocks, groups: int) -> np.ndarray:
    """The group that reads each position where rows are whole: as many tiles of 16 rows for each, more or less one."""
    within = np.arange(blocks.first[-1]) - np.repeat(blocks.first[:-1], np.diff(blocks.first))
    tile = np.cumsum(within % _TILE_ROWS == 0) - 1
    return tile * groups // (tile[-1] + 1)


def _pieces(geometry: Geometry, interleaving: Interleaving, places: np.ndarray) -> np.ndarray:
    """Rows that begin at `places` of the pattern, cut at the grains that are nearest to where pages end.

    int64 `[pieces, 4]`: the row, first and end of the chunks, the group; by row, ascending.
    """
    page, inside = np.divmod(places[:, None], interleaving.page_bytes)
    following = np.arange((geometry.code_bytes - 2) // interleaving.page_bytes + 2)
    group = np.array(interleaving.pattern)[(page + following) % len(interleaving.pattern)]
    byte = (following + 1) * interleaving.page_bytes - inside
    byte = np.minimum(byte, geometry.code_bytes)
    grain, past = np.divmod(byte, geometry.grain_bytes)
    missing = np.minimum(geometry.grain_bytes, geometry.code_bytes - byte + past) - past
    end = np.minimum((grain + (past > missing)) * geometry.grain_chunks, geometry.chunks)
    first = np.roll(end, 1, axis=1)
    first[:, 0] = 0
    there = first < end
    row = np.broadcast_to(np.arange(len(places))[:, None], there.shape)
    found = np.stack([row[there], first[there], end[there], group[there]], axis=1)
    again = np.zeros(len(found), bool)  # the row and group of the piece before
    again[1:] = (found[1:, [0, 3]] == found[:-1, [0, 3]]).all(axis=1)
    merged = found[~again]
    merged[:, 2] = found[~np.roll(again, -1), 2]
    return merged


def _division(pieces: np.ndarray, kinds: int, groups: int) -> _Division:
    """From the pieces of rows of all kinds, as `_pieces` returns them."""
    part = pieces[:, 0] * groups + pieces[:, 3]
    counts = np.bincount(part, minlength=kinds * groups)
    end = np.cumsum(counts)
    order = np.argsort(part, kind="stable")
    parts, begins = np.unique(part, return_index=True)
    in_order = parts[np.argsort(begins)]  # by kind, and in it by the first chunk
    rank = np.zeros(kinds * groups, np.int64)
    before = np.searchsorted(in_order // groups, in_order // groups)
    rank[in_order] = np.arange(len(in_order)) - before
    size = kinds, groups
    return _Division(
        (end - counts).reshape(size),
        end.reshape(size),
        np.ascontiguousarray(pieces[order, 1:3]),
        rank.reshape(size),
    )


def _cells(
    kinds: np.ndarray, division: _Division, blocks: _Blocks
) -> tuple[np.ndarray, np.ndarray]:
    """Cells and their entries: the runs of rows of a kind in each block, for each group that has a share in them."""
    size = len(kinds), division.rank.shape[1], len(blocks.first) - 1
    kind = kinds[:, blocks.row]
    begins = np.ones(kind.shape, bool)
    begins[:, 1:] = kind[:, 1:] != kind[:, :-1]
    begins[:, blocks.first[:-1]] = True
    start = np.flatnonzero(begins)
    rows = np.diff(start, append=kind.size)
    phase, position = _divide(start, kind.shape[1])
    block = np.searchsorted(blocks.first, position, side="right") - 1
    kind = kind.ravel()[start]

    run, group = np.nonzero(division.first[kind] < division.end[kind])
    cell = np.ravel_multi_index((phase[run], group, block[run]), size)
    counts = np.bincount(cell, minlength=math.prod(size))
    end = np.cumsum(counts)
    order = np.argsort(cell, kind="stable")
    run, group = run[order], group[order]
    first, kind = position[run], kind[run]
    bounds = division.first[kind, group], division.end[kind, group]
    columns = blocks.row[first], first, rows[run], *bounds, division.rank[kind, group]
    return np.stack([end - counts, end], axis=1).reshape(*size, 2), np.stack(columns, axis=1)


# Counting -------------------------------------------------------------------------------------------------------------


def _count(
    geometry: Geometry,
    tables: Tables,
    phase: int,
    address: int,
    interleaving: Interleaving,
    owner: Mapping[int, int],
) -> tuple[int, int]:
    """Remote bytes and bytes of one matrix."""
    remote = total = 0
    for group, cells in enumerate(tables.cells[phase]):
        own = np.array([owner[node] == group for node in interleaving.pattern], np.int64)
        _, entry = _spread(cells[:, 0], cells[:, 1])
        first_row, _, rows, first_range, end_range, _ = tables.entries[entry].T
        piece, range_ = _spread(first_range, end_range)
        read, number = _spread(np.zeros_like(piece), rows[piece])
        row = first_row[piece[read]] + number * tables.apart
        first, end = _bytes_at(geometry, tables.ranges[range_[read]]).T
        begin = address + row * geometry.row_bytes
        near = [_on_pages(own, interleaving.page_bytes, begin + place) for place in (first, end)]
        total += int((end - first).sum())
        remote += int((end - first - (near[1] - near[0])).sum())
    return remote, total


def _bytes_at(geometry: Geometry, chunks: np.ndarray) -> np.ndarray:
    """Where chunks begin in a row, in bytes; the one behind the last is where the row ends."""
    whole = chunks // geometry.grain_chunks * geometry.grain_bytes
    return np.where(chunks == geometry.chunks, geometry.code_bytes, whole)


def _on_pages(own: np.ndarray, page_bytes: int, end: np.ndarray) -> np.ndarray:
    """How many of the bytes 0…end − 1 are on pages that are marked 1 in the pattern `own`."""
    page, inside = np.divmod(end, page_bytes)
    turns, place = np.divmod(page, len(own))
    before = np.cumsum(own) - own
    return (turns * own.sum() + before[place]) * page_bytes + own[place] * inside


def _spread(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers first[i]…end[i] − 1, for one i after another: the i's and the numbers."""
    counts = end - first
    index = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
    return index, first[index] + within

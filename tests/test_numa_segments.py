"""Which pieces of rows each group reads: every chunk once, by the group whose node has it, whatever lies where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import segments
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.segments import BLOCK_ROWS, Geometry, Segment, Tables
from expertile.templates import formats
from expertile.templates.formats.base import ByRows
from expertile.templates.formats.bf16 import RowMajor
from expertile.templates.formats.int8 import Int8

PAGE, HUGE = 4096, 2 << 20
SOMEWHERE = 0x7F00_0000_0000
"""A multiple of every period here."""

MODELS = {
    "mixtral-8x7b": (4096, 14336),
    "mixtral-8x22b": (6144, 16384),
    "deepseek-v2-lite": (2048, 1408),
    "deepseek-v3": (7168, 2048),
    "deepseek-v4-flash": (4096, 2048),
    "qwen1.5-moe": (2048, 1408),
    "qwen2-57b-a14b": (3584, 2560),
    "qwen3-30b-a3b": (2048, 768),
    "qwen3-235b-a22b": (4096, 1536),
    "qwen3-next-80b-a3b": (2048, 512),
    "qwen3.5-397b-a17b": (4096, 1024),
    "kimi-k2-thinking": (7168, 2048),
    "glm-4.5": (5120, 1536),
    "glm-4.5-air": (4096, 1408),
    "gpt-oss": (2880, 2880),
    "olmoe-1b-7b": (2048, 1024),
    "phi-3.5-moe": (4096, 6400),
    "minimax-m2": (3072, 1536),
    "granite-moe-3b": (1536, 512),
    "gemma-4-26b-a4b": (2816, 704),
    "ernie-4.5-21b": (2560, 1536),
    "hunyuan-large": (6400, 18304),
}
"""Hidden and intermediate size."""


def evenly(nodes: int, page_bytes: int = PAGE) -> Interleaving:
    """Pages dealt out to nodes 0, 1, … in turn."""
    return Interleaving(page_bytes, tuple(range(nodes)))


def identity(nodes: int) -> dict[int, int]:
    """Each node is a group's own."""
    return {node: node for node in range(nodes)}


def bf16(rows: int, columns: int) -> Geometry:
    """A contiguous matrix."""
    return Geometry.of(RowMajor(2 * columns), rows, columns, 32)


# Right values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "two_nodes", "four_nodes"),
    [
        ("mixtral-8x7b", (1, 2), (2, 4)),
        ("qwen3-30b-a3b", (2, 16), (4, 32)),
        ("deepseek-v3", (4, 2), (8, 4)),
        ("qwen2-57b-a14b", (8, 8), (16, 16)),
        ("gpt-oss", (64, 64), (128, 128)),
        ("deepseek-v2-lite", (2, 32), (4, 64)),
    ],
)
def test_periods(model: str, two_nodes: tuple[int, int], four_nodes: tuple[int, int]) -> None:
    for nodes, expected in ((2, two_nodes), (4, four_nodes)):
        found = tuple(segments.period(2 * columns, evenly(nodes)) for columns in MODELS[model])
        assert found == expected


def test_the_period_of_other_pages() -> None:
    assert segments.period(4096, evenly(2, HUGE)) == 1024
    assert segments.period(1536, Interleaving(PAGE, (0, 0, 1))) == 8
    assert segments.period(5760, Interleaving(PAGE, (3,))) == 1


def test_whole_rows_where_a_row_is_a_page() -> None:
    geometry = bf16(6, 2048)
    found = segments.tables(geometry, [(SOMEWHERE, evenly(2))], identity(2), 2)
    assert found.apart == 2
    assert found.position.tolist() == [0, 3, 1, 4, 2, 5]
    assert found.block_first.tolist() == [0, 3, 6]
    assert found.cells.tolist() == [[[[0, 1], [1, 1]], [[1, 1], [1, 2]]]]
    assert found.entries[:, :3].tolist() == [[0, 0, 3], [1, 3, 3]]
    assert ranges_of(found) == [[(0, 64)], [(0, 64)]]
    assert found.most_parts == 1


def test_halves_where_a_row_is_a_page_of_each_node() -> None:
    rows = BLOCK_ROWS + 36
    geometry = bf16(rows, 4096)
    matrices = [(SOMEWHERE, evenly(2)), (SOMEWHERE + PAGE, evenly(2))]
    found = segments.tables(geometry, matrices, identity(2), 2)
    assert found.apart == 1
    assert found.block_first.tolist() == [0, BLOCK_ROWS, rows]
    assert found.phase.tolist() == [0, 1]
    halves = [[(0, 64)]] * 2, [[(64, 128)]] * 2
    assert ranges_of(found) == [*halves[0], *halves[1], *halves[1], *halves[0]]
    assert found.entries[:, 5].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]  # the first half comes first
    assert found.parts.tolist() == [[2] * rows] * 2


def test_several_pieces_of_a_row_are_one_entry() -> None:
    found = segments.tables(bf16(16, 8192), [(SOMEWHERE + PAGE, evenly(2))], identity(2), 2)
    assert found.entries[:, [0, 1, 2, 5]].tolist() == [[0, 0, 16, 1], [0, 0, 16, 0]]
    assert ranges_of(found) == [[(64, 128), (192, 256)], [(0, 64), (128, 192)]]


def test_neighbours_where_a_page_has_hundreds_of_rows() -> None:
    """Rows a period of 1024 apart don't exist."""
    geometry = bf16(768, 2048)
    found = segments.tables(geometry, [(SOMEWHERE + HUGE // 2, evenly(2, HUGE))], identity(2), 2)
    assert found.apart == 1
    assert found.entries[:, 2].tolist() == [BLOCK_ROWS] * (768 // BLOCK_ROWS)
    assert found.most_parts == 1


def test_a_group_of_several_nodes_reads_the_pages_of_all() -> None:
    geometry, owner = bf16(64, 2048), {0: 0, 2: 1, 5: 0, 7: 1}
    in_turn = Interleaving(PAGE, (0, 2, 5, 7)), Interleaving(PAGE, (0, 5, 2, 7))
    matrices = [(SOMEWHERE + page * PAGE, in_turn[0]) for page in range(4)]
    found = segments.tables(geometry, matrices, owner, 2)
    assert found.apart == 2  # the groups take turns after two pages
    assert found.phase.tolist() == [0, 1, 0, 1]
    assert segments.tables(geometry, [(SOMEWHERE, in_turn[1])], owner, 2).apart == 4


def test_one_group_reads_blocks_of_whole_rows() -> None:
    matrices = [(SOMEWHERE + 6, evenly(4)), (SOMEWHERE, None)]
    found = segments.tables(bf16(2 * BLOCK_ROWS + 2, 1000), matrices, dict.fromkeys(range(4), 0), 1)
    assert found.phase.tolist() == [0, 0]
    assert found.entries.tolist() == [
        [first, first, rows, 0, 1, 0]
        for first, rows in ((0, BLOCK_ROWS), (BLOCK_ROWS, BLOCK_ROWS), (2 * BLOCK_ROWS, 2))
    ]


def test_rows_are_shared_out_where_no_pattern_is_known() -> None:
    """Evenly and whole, so that every group has work and the bits are those of one node."""
    found = segments.tables(bf16(16 * 22, 512), [(SOMEWHERE, None)], identity(4), 4)
    rows = [sum(entry[2] for _, entry in entries) for entries in entries_of(found, 0, 4)]
    assert rows == [96, 80, 96, 80]
    assert found.most_parts == 1


def test_the_pattern_of_most_decides_and_the_others_stay_local() -> None:
    geometry = bf16(64, 2048)
    matrices = [(SOMEWHERE, evenly(3)), (SOMEWHERE, evenly(2)), (SOMEWHERE + 64, evenly(2))]
    found = segments.tables(geometry, matrices, identity(3), 3)
    assert found.apart == 2
    assert segments.remote_bytes(geometry, found, matrices, identity(3)) == (0, 3 * 64 * 4096)


def test_a_node_that_nobody_owns() -> None:
    with pytest.raises(ArgumentError, match=r"owner: expected a group for each node .* node 2"):
        segments.tables(bf16(4, 64), [(SOMEWHERE, evenly(3))], identity(2), 2)


@pytest.mark.parametrize(
    ("name", "grain"),
    [("bf16", (1, 64)), ("int8_in_place", (1, 64)), ("int8_g64", (1, 32)), ("fp8_block", (1, 32)),
     ("mxfp4", (1, 16)), ("int4_g128", (1, 16)), ("q8_0", (1, 34)), ("q4_0", (1, 18)),
     ("q4_K", (8, 144)), ("q6_K", (8, 210))],
)  # fmt: skip
def test_grains(name: str, grain: tuple[int, int]) -> None:
    format_, chunk = format_of(name, 1024)
    found = Geometry.of(format_, 3, 1024, chunk)
    assert (found.grain_chunks, found.grain_bytes) == grain
    assert found.chunks // found.grain_chunks * found.grain_bytes == found.code_bytes
    assert found.row_bytes == found.code_bytes


def test_the_picture_of_a_period() -> None:
    found = segments.segments(bf16(100, 1536), SOMEWHERE + 1024, evenly(2))
    assert found[:4] == [
        Segment(0, 0, 3072, 0),
        Segment(1, 0, 3072, 1),
        Segment(2, 0, 1024, 1),
        Segment(2, 1024, 3072, 0),
    ]
    assert found[-1].row == 7


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_models_read_nothing_remote(model: str, nodes: int) -> None:
    """And what they read are whole blocks. Experts lie one after another, from 64 bytes into a page on."""
    hidden, intermediate = MODELS[model]
    interleaving = evenly(nodes)
    for rows, columns in ((intermediate, hidden), (hidden, intermediate)):
        geometry = bf16(rows, columns)
        size = rows * geometry.row_bytes
        matrices = [(SOMEWHERE + 64 + expert * size, interleaving) for expert in range(3)]
        found = segments.tables(geometry, matrices, identity(nodes), nodes)
        counted = segments.remote_bytes(geometry, found, matrices, identity(nodes))
        assert counted == (0, 3 * size)
        assert found.apart == segments.period(geometry.row_bytes, interleaving)
        assert np.diff(found.cells).max() == 1


# Any geometry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Some matrices of a role, somewhere."""

    geometry: Geometry
    matrices: tuple[tuple[int, Interleaving | None], ...]
    owner: Mapping[int, int]
    groups: int

    def tables(self) -> Tables:
        return segments.tables(self.geometry, self.matrices, self.owner, self.groups)


NAMES = ("bf16", "int8_in_place", *formats.names())


def format_of(name: str, columns: int) -> tuple[ByRows, int]:
    """A contiguous matrix's format, and the chunk of machines that it is for."""
    if name == "bf16":
        return RowMajor(2 * columns), 32
    if name == "int8_in_place":
        return Int8().laid_out(columns).in_place(), 64
    return formats.resolve(name).laid_out(columns), 32


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Matrices of all formats, with rows that alternate with those of another matrix or have gaps between them."""
    name = draw(st.sampled_from(NAMES))
    unit = {"bf16": 1, "int8_in_place": 1}.get(name) or formats.resolve(name).block
    some = (32, 768, 1408, 2048, 2880, 4096, 16384)
    columns = draw(st.sampled_from(some) | st.integers(32, 16384))
    columns = max(unit, columns // unit * unit)
    format_, chunk = format_of(name, columns)
    most = max(4, min(300, (1 << 19) // format_.code_bytes(columns)))
    geometry = Geometry.of(format_, draw(st.integers(1, most)), columns, chunk)
    gap = draw(st.sampled_from((0, 0, geometry.row_bytes)) | st.integers(0, 300))
    return replace(geometry, row_bytes=geometry.row_bytes + gap)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.integers(1, 8))
    nodes = draw(st.integers(groups, 8))
    numbers = draw(st.permutations(range(10)))[:nodes]
    owner = {node: draw(st.integers(0, groups - 1)) for node in numbers[groups:]}
    owner |= {node: group for group, node in enumerate(numbers[:groups])}
    geometry = draw(geometries())

    def interleaving() -> Interleaving:
        page_bytes = draw(st.sampled_from((PAGE, PAGE, 1 << 16, HUGE)))
        weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=nodes))
        if draw(st.booleans()):
            weights = [1] * nodes
        pattern = [
            node for node, times in zip(numbers, weights, strict=False) for _ in range(times)
        ]
        return Interleaving(page_bytes, tuple(pattern))

    offered: list[Interleaving | None] = [interleaving() for _ in range(draw(st.integers(1, 2)))]
    aligned = draw(st.sampled_from((1, 2, 64, 64, PAGE)))
    matrices = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.sampled_from(offered) | st.none())
        edge = SOMEWHERE + draw(st.integers(0, 9)) * (chosen.page_bytes if chosen else PAGE)
        size = geometry.rows * geometry.row_bytes  # what is cut is what an edge is in
        matrices.append((edge - draw(st.integers(0, size)) // aligned * aligned, chosen))
    return Case(geometry, tuple(matrices), owner, groups)


def ranges_of(found: Tables) -> list[list[tuple[int, int]]]:
    """The ranges of each entry."""
    return [
        [(int(first), int(end)) for first, end in found.ranges[begin:stop]]
        for begin, stop in found.entries[:, 3:5]
    ]


def entries_of(found: Tables, phase: int, groups: int) -> list[list[tuple[int, list[int]]]]:
    """For each group: the entries of a phase, with the numbers of their blocks."""
    return [
        [
            (block, found.entries[index].tolist())
            for block, (first, end) in enumerate(found.cells[phase, group].tolist())
            for index in range(first, end)
        ]
        for group in range(groups)
    ]


def readers(case: Case, found: Tables, phase: int) -> np.ndarray:
    """int `[rows, chunks]`: who reads a chunk; fails if nobody or several do."""
    rows, chunks = case.geometry.rows, case.geometry.chunks
    times = np.zeros((rows, chunks), np.int64)
    reader = np.full((rows, chunks), -1)
    for group, entries in enumerate(entries_of(found, phase, case.groups)):
        for _, (row, _, count, first, end, _) in entries:
            own = slice(row, row + (count - 1) * found.apart + 1, found.apart)
            for begin, stop in found.ranges[first:end].tolist():
                times[own, begin:stop] += 1
                reader[own, begin:stop] = group
    assert (times == 1).all()
    return reader


def owners(case: Case, address: int, interleaving: Interleaving) -> Iterator[np.ndarray]:
    """For each row, whose node each byte is on."""
    group = np.array([case.owner[node] for node in interleaving.pattern])
    for row in range(case.geometry.rows):
        begin = address + row * case.geometry.row_bytes
        pages = (begin + np.arange(case.geometry.code_bytes)) // interleaving.page_bytes
        yield group[pages % len(group)]


def grain_ends(geometry: Geometry) -> np.ndarray:
    """For each chunk of a row, where it ends, in bytes: only the end of a grain is to be told from what is in it."""
    ends = np.arange(1, geometry.chunks + 1) * geometry.grain_bytes // geometry.grain_chunks
    return np.minimum(ends, geometry.code_bytes)


def remote_of_rows(case: Case, reader: np.ndarray, placed: tuple[int, Interleaving]) -> list[int]:
    """For each row, the bytes that are read from another group's node, byte by byte."""
    bytes_of = np.diff(grain_ends(case.geometry), prepend=0)
    rows = zip(reader, owners(case, *placed), strict=True)
    return [int((np.repeat(who, bytes_of) != whose).sum()) for who, whose in rows]


many = settings(max_examples=8 * settings().max_examples)
"""They are quick."""


@many
@given(cases())
def test_every_chunk_has_one_reader_and_every_byte_is_near(case: Case) -> None:
    found = case.tables()
    geometry = case.geometry
    far = 0
    for (address, interleaving), phase in zip(case.matrices, found.phase.tolist(), strict=True):
        reader = readers(case, found, phase)
        if interleaving is None:
            continue
        remote = remote_of_rows(case, reader, (address, interleaving))
        far += sum(remote)
        begins = address + np.arange(geometry.rows) * geometry.row_bytes
        ends = begins + geometry.code_bytes - 1
        edges = ends // interleaving.page_bytes - begins // interleaving.page_bytes
        assert (2 * np.array(remote) <= edges * geometry.grain_bytes).all()
        if address % 64 == geometry.row_bytes % 64 == 64 % geometry.grain_bytes == 0:
            assert not any(remote)
    known = sum(interleaving is not None for _, interleaving in case.matrices)
    total = known * geometry.rows * geometry.code_bytes
    counted = segments.remote_bytes(geometry, found, case.matrices, case.owner)
    assert counted == (far, total)


@many
@given(cases())
def test_ranks_number_the_groups_of_a_row_by_their_first_chunk(case: Case) -> None:
    found = case.tables()
    assert found.parts.shape == (found.phase.max() + 1, case.geometry.rows)
    for phase in range(len(found.parts)):
        by_row: list[list[tuple[int, int]]] = [[] for _ in range(case.geometry.rows)]
        for entries in entries_of(found, phase, case.groups):
            for _, (row, _, count, first, _, rank) in entries:
                for i in range(count):
                    by_row[row + i * found.apart].append((int(found.ranges[first, 0]), rank))
        for row, parts in enumerate(by_row):
            assert [rank for _, rank in sorted(parts)] == list(range(found.parts[phase, row]))
    assert found.most_parts == found.parts.max()


@many
@given(cases())
def test_blocks_are_rows_of_one_class(case: Case) -> None:
    found = case.tables()
    rows = np.arange(case.geometry.rows)
    assert sorted(found.position.tolist()) == rows.tolist()
    row_at = np.argsort(found.position)
    assert found.block_first[0] == 0
    assert found.block_first[-1] == len(rows)
    for begin, end in pairwise(found.block_first.tolist()):
        assert 0 < end - begin <= BLOCK_ROWS
        assert (np.diff(row_at[begin:end]) == found.apart).all()
    classes = row_at % found.apart
    assert (np.diff(classes) >= 0).all()


@many
@given(cases())
def test_entries_are_well_formed(case: Case) -> None:
    """Rows of their cell's block; ranges ascend, apart from each other, of whole grains."""
    found = case.tables()
    geometry = case.geometry
    assert found.cells.shape[1:3] == (case.groups, len(found.block_first) - 1)
    assert (found.cells.reshape(-1, 2)[1:, 0] == found.cells.reshape(-1, 2)[:-1, 1]).all()
    for phase in range(len(found.cells)):
        for entries in entries_of(found, phase, case.groups):
            for block, (row, position, count, first, end, _) in entries:
                own = row + np.arange(count) * found.apart
                assert (found.position[own] == position + np.arange(count)).all()
                assert found.block_first[block] <= position
                assert position + count <= found.block_first[block + 1]
                bounds = found.ranges[first:end].ravel()
                assert (np.diff(bounds) > 0).all()
                assert len(bounds) > 0
                inner = bounds[bounds != geometry.chunks]
                assert (inner % geometry.grain_chunks == 0).all()
    for array in (found.block_first, found.phase, found.cells, found.entries, found.ranges):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    for array in (found.position, found.parts):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


@many
@given(cases())
def test_matrices_that_lie_alike_share_a_phase(case: Case) -> None:
    moved = [
        (address + (3 * interleaving.period_bytes if interleaving else 5), interleaving)
        for address, interleaving in case.matrices
    ]
    both = replace(case, matrices=(*case.matrices, *moved)).tables()
    first, second = np.split(both.phase, 2)
    assert (first == second).all()
    assert len(both.cells) == len(set(first.tolist()))


@many
@given(geometries(), st.integers(0, 1 << 16), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_picture_shows_every_byte_where_it_is(
    geometry: Geometry, address: int, pattern: Sequence[int]
) -> None:
    interleaving = Interleaving(PAGE, tuple(pattern))
    found = segments.segments(geometry, address, interleaving)
    rows = min(geometry.rows, segments.period(geometry.row_bytes, interleaving))
    for row in range(rows):
        own = [each for each in found if each.row == row]
        assert [each.first for each in own] == [0, *(each.end for each in own[:-1])]
        assert own[-1].end == geometry.code_bytes
        assert all(a.node != b.node for a, b in pairwise(own))
        begin = address + row * geometry.row_bytes
        nodes = [interleaving.node(begin + byte) for byte in range(0, geometry.code_bytes, 7)]
        shown = np.repeat([each.node for each in own], [each.end - each.first for each in own])
        assert shown[::7].tolist() == nodes
    assert found[-1].row == rows - 1

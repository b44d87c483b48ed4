"""Rules of page placement, found in what a kernel that follows them would report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import interleaving, pages
from expertile.runtime.numa.interleaving import Interleaving, Nodes, PageMap, Region, fit, fitted

BASE, HUGE = 4096, 2 << 20

firsts = st.integers(1, 1 << 35)  # numbers of pages, as addresses have them
node_sets = st.sets(st.integers(0, 20), min_size=2, max_size=8).map(sorted)
seeds = st.integers(0, 1 << 32)


def _placed(first: int, count: int, node: Callable[[int], int]) -> Nodes:
    """Where pages are if `node` says so of each address."""
    return np.array([node((first + page) * BASE) for page in range(count)], np.int16)


def _by_page(nodes: Sequence[int]) -> Callable[[int], int]:
    """The kernel's rule for pages of 4 KiB."""
    return lambda address: nodes[(address >> 12) % len(nodes)]


def _by_huge_page(nodes: Sequence[int]) -> Callable[[int], int]:
    return lambda address: nodes[(address >> 21) % len(nodes)]


def _region(first: int, count: int, rule: Interleaving | None, share: float = 1.0) -> Region:
    return Region(first * BASE, count * BASE, rule, share)


def _check(nodes: Nodes, first: int) -> PageMap:
    """What holds of any map: its regions cover it, their shares are of the pages that their rules tell right."""
    found = fitted(nodes, first * BASE + 64, BASE)
    assert (found.address, found.page_bytes) == (first * BASE, BASE)
    page = fits = 0
    for region in found.regions:
        assert region.address == (first + page) * BASE
        count = region.size // BASE
        rule, own = region.interleaving, nodes[page : page + count].tolist()
        right = sum(
            rule is not None and node == rule.node(region.address + BASE * at)
            for at, node in enumerate(own)
        )
        assert region.share == right / count
        assert rule is None or rule.pattern
        page, fits = page + count, fits + right
    assert page == len(nodes)
    assert found.share == pytest.approx(fits / len(nodes))
    return found


# Rules that hold everywhere -----------------------------------------------------------------------


@given(nodes=node_sets, first=firsts, count=st.integers(1, 3000))
def test_interleaved(nodes: list[int], first: int, count: int) -> None:
    """From one page on, at any phase; what is shorter than a period has the shortest rule that tells it right."""
    placed = _placed(first, count, _by_page(nodes))
    found = _check(placed, first)
    (region,) = found.regions
    assert region.share == 1
    assert region.interleaving is not None
    if count >= len(nodes):
        assert region.interleaving == Interleaving(BASE, tuple(nodes))
    else:
        assert len(region.interleaving.pattern) == count
    assert found.interleaving(first * BASE + 1, count * BASE - 2) == region.interleaving


def _smallest(pattern: Sequence[int]) -> tuple[int, ...]:
    """Without repetition of the whole."""
    size = len(pattern)
    return next(
        tuple(pattern[:period])
        for period in range(1, size + 1)
        if size % period == 0 and list(pattern) == list(pattern[:period]) * (size // period)
    )


@given(
    pattern=st.lists(st.integers(0, 7), min_size=1, max_size=64),
    first=firsts,
    periods=st.integers(2, 40),
    data=st.data(),
)
def test_weighted(pattern: list[int], first: int, periods: int, data: st.DataObject) -> None:
    count = len(pattern) * periods + data.draw(st.integers(0, 63))
    found = _check(_placed(first, count, _by_page(pattern)), first)
    assert found.regions == (_region(first, count, Interleaving(BASE, _smallest(pattern))),)


@given(heavy=st.integers(1, 63), first=firsts)
def test_as_the_kernel_weighs(heavy: int, first: int) -> None:
    """Each node as often in a row as its weight says."""
    pattern = (0,) * heavy + (3,)
    found = _check(_placed(first, 4000, _by_page(pattern)), first)
    assert found.regions == (_region(first, 4000, Interleaving(BASE, pattern)),)


@given(node=st.integers(0, 1000), first=firsts, count=st.integers(1, 4000))
def test_a_single_node(node: int, first: int, count: int) -> None:
    """By whatever page size."""
    found = _check(np.full(count, node, np.int16), first)
    assert found.regions == (_region(first, count, Interleaving(BASE, (node,))),)
    assert found.interleaving(first * BASE, BASE) == Interleaving(BASE, (node,))


# Huge pages ---------------------------------------------------------------------------------------


@given(
    nodes=node_sets,
    first=firsts.map(lambda number: number * 512),
    head=st.integers(0, 511),
    blocks=st.integers(8, 16),
    tail=st.integers(0, 511),
)
def test_huge_pages_between_small_ones(
    nodes: list[int], first: int, head: int, blocks: int, tail: int
) -> None:
    start = first - head
    small, huge = _by_page(nodes), _by_huge_page(nodes)
    body = blocks * 512
    placed = np.concatenate(
        [
            _placed(start, head, small),
            _placed(first, body, huge),
            _placed(first + body, tail, small),
        ]
    )
    found = _check(placed, start)
    assert found.share == 1
    rule = Interleaving(HUGE, tuple(nodes))
    assert found.interleaving(first * BASE, body * BASE) == rule
    assert found.interleaving(first * BASE + 12345, 3 * HUGE) == rule
    for address, count in ((start, head), (first + body, tail)):
        if count >= 2 * len(nodes):
            own = found.interleaving(address * BASE, count * BASE)
            assert own == Interleaving(BASE, tuple(nodes))


@given(nodes=node_sets, first=firsts, count=st.integers(6000, 9000))
def test_an_array_within_huge_pages(nodes: list[int], first: int, count: int) -> None:
    """It may begin and end in the middle of one."""
    found = _check(_placed(first, count, _by_huge_page(nodes)), first)
    assert [region.interleaving for region in found.regions] == [Interleaving(HUGE, tuple(nodes))]
    assert found.share == 1


def test_within_a_huge_page() -> None:
    """The rule of its neighbours, not one node's."""
    found = fitted(_placed(512, 5120, _by_huge_page((0, 1))), 512 * BASE)
    assert found.interleaving(HUGE + 70, 100) == Interleaving(HUGE, (0, 1))


@given(
    nodes=st.sampled_from([(0, 1), (0, 1, 2, 3)]), lacking=st.sets(st.integers(0, 39), max_size=8)
)
def test_where_huge_pages_were_lacking(nodes: tuple[int, ...], lacking: set[int]) -> None:
    """Blocks of small pages between huge ones: there are two rules, however often they alternate."""
    first, small, huge = 512 * 1001, _by_page(nodes), _by_huge_page(nodes)
    placed = np.concatenate(
        [_placed(first + 512 * at, 512, small if at in lacking else huge) for at in range(40)]
    )
    found = _check(placed, first)
    assert found.share == 1
    for at in range(40):
        size = BASE if at in lacking else HUGE
        assert found.interleaving((first + 512 * at) * BASE, HUGE) == Interleaving(size, nodes)


def test_larger_base_pages() -> None:
    """arm64 with 64 KiB: huge pages are of 512 MiB."""
    first, size = 3 * 8192, 65536
    huge = np.repeat(np.array([1, 0, 1, 0, 1], np.int16), 8192)
    assert fit(huge, first, size) == (
        Region(first * size, len(huge) * size, Interleaving(8192 * size, (0, 1)), 1.0),
    )
    small = np.arange(5000, dtype=np.int16) % 3
    assert fit(small, 0, size) == (Region(0, 5000 * size, Interleaving(size, (0, 1, 2)), 1.0),)


# What doesn't fit ---------------------------------------------------------------------------------


@given(
    nodes=node_sets,
    first=firsts,
    count=st.integers(2000, 6000),
    share=st.floats(0.92, 0.96),
    seed=seeds,
)
def test_a_node_nearly_full(
    nodes: list[int], first: int, count: int, share: float, seed: int
) -> None:
    """Pages it had no room for are anywhere else."""
    random = np.random.default_rng(seed)
    placed = _placed(first, count, _by_page(nodes))
    right = placed.copy()
    moved = random.random(count) < 1 - share
    placed[moved] = random.choice(nodes, np.count_nonzero(moved))
    found = _check(placed, first)
    rule = Interleaving(BASE, tuple(nodes))
    main = max(found.regions, key=lambda region: region.size)
    assert main.interleaving == rule
    assert (
        main.size >= (count - 32) * BASE
    )  # a page at the end that doesn't fit may be a region of its own
    assert abs(found.share - np.mean(placed == right)) <= 32 / count
    for page in range(0, count - 20, 7):
        address = (first + page) * BASE
        own = found.interleaving(address, 20 * BASE)
        inside = main.address <= address and address + 20 * BASE <= main.address + main.size
        if inside:
            fits = (placed[page : page + 20] == right[page : page + 20]).all()
            assert own == (rule if fits else None)


@given(first=firsts, seed=seeds, heavy=st.integers(3, 56))
def test_weighted_and_nearly_full(first: int, seed: int, heavy: int) -> None:
    random = np.random.default_rng(seed)
    pattern = (0,) * heavy + (1,) * 4 + (2,) * 4
    placed = _placed(first, 20_000, _by_page(pattern))
    placed[random.random(len(placed)) < 0.05] = 0
    main = max(_check(placed, first).regions, key=lambda region: region.size)
    assert main.interleaving == Interleaving(BASE, pattern)
    assert main.size >= 19_900 * BASE


@given(nodes=node_sets, first=firsts, seed=seeds, code=st.sampled_from([-2, -14]))
def test_untouched_pages_do_not_fit(nodes: list[int], first: int, seed: int, code: int) -> None:
    random = np.random.default_rng(seed)
    placed = _placed(first, 3000, _by_page(nodes))
    absent = random.choice(np.arange(10, 2990), 90, replace=False)
    placed[absent] = code
    found = _check(placed, first)
    assert found.regions == (_region(first, 3000, Interleaving(BASE, tuple(nodes)), 0.97),)
    assert found.share == pytest.approx(0.97)
    for page in absent.tolist():
        assert found.interleaving((first + page) * BASE, 1) is None
        assert found.interleaving((first + page - 3) * BASE, 5 * BASE) is None


@pytest.mark.parametrize("count", [1, 100, 1000, 2000])
def test_nothing_touched(count: int) -> None:
    found = _check(np.full(count, -2, np.int16), 1000)
    assert found.regions == (_region(1000, count, None, 0.0),)
    assert found.share == 0
    assert found.interleaving(1000 * BASE, BASE) is None


@given(nodes=node_sets, first=firsts, before=st.integers(1, 1500), after=st.integers(600, 1500))
def test_the_rest_untouched(nodes: list[int], first: int, before: int, after: int) -> None:
    """From either side the rule reaches as far as the pages do."""
    absent = np.full(before, -2, np.int16)
    rule = Interleaving(BASE, tuple(nodes))
    there = _placed(first + before, after, _by_page(nodes))
    assert _check(np.concatenate([absent, there]), first).regions == (
        _region(first, before, None, 0.0),
        _region(first + before, after, rule),
    )
    there = _placed(first, after, _by_page(nodes))
    assert _check(np.concatenate([there, absent]), first).regions == (
        _region(first, after, rule),
        _region(first + after, before, None, 0.0),
    )


@given(
    nodes=node_sets,
    first=firsts,
    counts=st.lists(st.integers(600, 1500), min_size=2, max_size=4),
)
def test_grown_by_moving(nodes: list[int], first: int, counts: list[int]) -> None:
    """mremap: each part has the phase of the address it was touched at."""
    parts, regions, page = [], [], first
    for moves, count in enumerate(counts):
        turned = tuple(nodes[(at + moves) % len(nodes)] for at in range(len(nodes)))
        parts.append(_placed(page, count, _by_page(turned)))
        regions.append(_region(page, count, Interleaving(BASE, turned)))
        page += count
    assert _check(np.concatenate(parts), first).regions == tuple(regions)


@given(seed=seeds, nodes=st.integers(2, 8), first=firsts, count=st.integers(200, 3000))
def test_no_rule(seed: int, nodes: int, first: int, count: int) -> None:
    """Nothing is made up: a rule that holds by chance holds for next to nothing."""
    placed = np.random.default_rng(seed).integers(0, nodes, count).astype(np.int16)
    found = _check(placed, first)
    ruled = sum(region.size for region in found.regions if region.interleaving)
    assert ruled <= 0.2 * count * BASE


pieces = st.one_of(
    st.tuples(st.just("same"), st.integers(-2, 3), st.integers(1, 1500)),
    st.tuples(st.just("pages"), st.integers(2, 5), st.integers(1, 1500)),
    st.tuples(st.just("huge"), st.integers(2, 5), st.integers(1, 2500)),
    st.tuples(st.just("random"), st.integers(2, 5), st.integers(1, 700)),
)


def _piece(
    kind: str, value: int, page: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.int64]:
    if kind == "pages":
        return page % value
    if kind == "huge":
        return page // 512 % value
    if kind == "random":
        return random.integers(-1, value, len(page))
    return np.full(len(page), value)


@given(parts=st.lists(pieces, min_size=1, max_size=5), first=firsts, seed=seeds, data=st.data())
def test_any_map(
    parts: list[tuple[str, int, int]], first: int, seed: int, data: st.DataObject
) -> None:
    """Whatever is said of a range is true of each of its pages."""
    random = np.random.default_rng(seed)
    placed: list[int] = []
    for kind, value, count in parts:
        placed += _piece(kind, value, first + len(placed) + np.arange(count), random).tolist()
    nodes = np.array(placed, np.int16)
    found = _check(nodes, first)
    for _ in range(20):
        start = data.draw(st.integers(0, len(placed) * BASE - 1))
        size = data.draw(st.integers(1, min(len(placed) * BASE - start, 300 * BASE)))
        rule = found.interleaving(first * BASE + start, size)
        own = range(start // BASE, (start + size - 1) // BASE + 1)
        if rule is not None:
            assert all(placed[page] == rule.node((first + page) * BASE) for page in own)
        else:
            assert len({placed[page] for page in own}) > 1 or placed[own[0]] < 0


# Maps ---------------------------------------------------------------------------------------------


def test_nodes_of_pages_of_several_sizes() -> None:
    rule = Interleaving(4 * BASE, (5, 6, 7))
    assert rule.period_bytes == 12 * BASE
    address = 6 * BASE
    expected = [rule.node(address + BASE * page) for page in range(30)]
    assert expected[:6] == [6, 6, 7, 7, 7, 7]
    assert rule.nodes(address + 99, 30, BASE).tolist() == expected


def test_bytes_outside() -> None:
    found = fitted(np.zeros(3, np.int16), 10 * BASE)
    assert found.interleaving(10 * BASE, 3 * BASE) == Interleaving(BASE, (0,))
    for address, size in ((10 * BASE - 1, 2), (12 * BASE, BASE + 1), (10 * BASE, 0), (0, 1)):
        with pytest.raises(
            ArgumentError, match="address, size: expected at least one byte, within 0xa000"
        ):
            found.interleaving(address, size)


def test_memory_of_this_process() -> None:
    """On whatever nodes it is, every page that was touched fits or counts as one that doesn't."""
    values = np.ones(1 << 22, np.uint8)
    found = interleaving.page_map(values.ctypes.data, values.nbytes)
    if found is None:
        pytest.skip("the kernel doesn't say where pages are")
    assert (found.nodes >= 0).all()
    assert found.page_bytes == pages.PAGE_BYTES
    assert found.address <= values.ctypes.data < found.address + found.page_bytes
    if len(set(found.nodes.tolist())) == 1:
        assert found.share == 1
        rule = found.interleaving(values.ctypes.data, values.nbytes)
        assert rule == Interleaving(pages.PAGE_BYTES, (int(found.nodes[0]),))


def test_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "where", lambda address, size: None)
    assert interleaving.page_map(1 << 30, 1 << 20) is None

"""System calls about pages: real ones on this machine, and a kernel of several nodes that is played."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import warnings
from collections.abc import Collection, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import pages
from expertile.runtime.numa.pages import PAGE_BYTES, Policy

BLOCK = PAGE_BYTES // 8  # base pages in a huge page


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No refusal was warned of yet."""
    monkeypatch.setattr(pages, "_refused", set())


class Memory:
    """Private memory of its own mapping, of small pages, untouched."""

    def __init__(self, count: int) -> None:
        self._map = mmap.mmap(-1, count * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address, self.size = self.bytes.ctypes.data, count * PAGE_BYTES
        pages._advise(self.address, self.size, mmap.MADV_NOHUGEPAGE)


def _where(address: int, size: int) -> NDArray[np.int16]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pages.where(address, size)
    if found is None:
        pytest.skip("move_pages is refused here")
    return found


# Where pages are ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (0, 1, (0, 1)),
        (10, 4096, (0, 2)),
        (4096, 4096, (1, 1)),
        (8191, 2, (1, 2)),
        (4096, 0, (1, 0)),
    ],
)
def test_span(address: int, size: int, expected: tuple[int, int]) -> None:
    assert pages.span(address, size, 4096) == expected


def test_where_pages_are() -> None:
    """Touched ones are on some node, the others nowhere, in the right places."""
    memory = Memory(1000)
    touched = np.arange(0, 1000, 7)
    memory.bytes[touched * PAGE_BYTES] = 1
    found = _where(memory.address, memory.size)
    assert found.dtype == np.int16
    assert np.flatnonzero(found >= 0).tolist() == touched.tolist()
    assert set(found[found < 0].tolist()) <= {-errno.ENOENT, -errno.EFAULT}


def test_of_any_bytes() -> None:
    memory = Memory(4)
    memory.bytes[2 * PAGE_BYTES] = 1
    assert len(_where(memory.address + PAGE_BYTES - 1, 2)) == 2
    assert _where(memory.address + 2 * PAGE_BYTES + 5, 1)[0] >= 0


def test_more_pages_than_go_into_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_BATCH", 64)
    memory = Memory(1000)
    touched = np.flatnonzero(np.random.default_rng(0).random(1000) < 0.5)
    memory.bytes[touched * PAGE_BYTES] = 1
    found = _where(memory.address, memory.size)
    assert np.flatnonzero(found >= 0).tolist() == touched.tolist()


# Refusals -----------------------------------------------------------------------------------------


class Refusing:
    """A libc whose system calls fail."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, 0

    def syscall(self, *arguments: object) -> int:
        self.calls += 1
        ctypes.set_errno(self.code)
        return -1

    def madvise(self, *arguments: object) -> int:
        return self.syscall()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EACCES])
def test_a_refused_call_is_said_once(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    libc = Refusing(code)
    monkeypatch.setattr(pages, "_libc", libc)
    with pytest.warns(RuntimeWarning, match=rf"can't use move_pages here.*{os.strerror(code)}"):
        assert pages.where(1 << 20, 1) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pages.where(1 << 20, 1 << 30) is None
        one = np.array([1 << 20], np.int64)
        assert pages.move(one, np.zeros(1, np.int32)) is None
    assert libc.calls == 3


@pytest.mark.filterwarnings("ignore:Expertile can't use:RuntimeWarning")
def test_refused_calls_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", Refusing(errno.EPERM))
    assert not pages.bind(1 << 20, PAGE_BYTES, Policy(pages.INTERLEAVE, frozenset({0})))
    assert not pages.set_policy(Policy(pages.DEFAULT))
    assert pages.policy() is None
    assert pages.allowed_nodes() is None
    assert pages.interleave(1 << 20, 1 << 20, (0,)) is None
    assert pages._refused == {"mbind", "set_mempolicy", "get_mempolicy", "move_pages"}


def test_any_other_failure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", Refusing(errno.EINVAL))
    with pytest.raises(OSError, match="move_pages") as raised:
        pages.where(1 << 20, 1)
    assert raised.value.errno == errno.EINVAL


def test_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.platform, "machine", lambda: "s390x")
    with pytest.warns(RuntimeWarning, match=r"move_pages.*not implemented"):
        assert pages.where(1 << 20, 1) is None


# Policies and affinity ----------------------------------------------------------------------------


def _quiet(call: object) -> object:
    if call is None or call is False:
        pytest.skip("refused here")
    return call


@pytest.mark.filterwarnings("ignore:Expertile can't use:RuntimeWarning")
def test_a_threads_policy() -> None:
    """It is the calling thread's own."""
    nodes = pages.allowed_nodes()
    before = pages.policy()
    _quiet(nodes)
    _quiet(before)
    assert nodes
    assert before
    wanted = Policy(pages.INTERLEAVE, nodes)
    found: list[Policy | None] = []

    def other() -> None:
        if pages.set_policy(wanted):
            found.append(pages.policy())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    _quiet(found or None)
    assert found == [wanted]
    assert pages.policy() == before


@pytest.mark.filterwarnings("ignore:Expertile can't use:RuntimeWarning")
def test_bind() -> None:
    """Where pages go that are touched later."""
    nodes = pages.allowed_nodes()
    _quiet(nodes)
    assert nodes
    memory = Memory(64)
    _quiet(pages.bind(memory.address, memory.size, Policy(pages.BIND, frozenset({max(nodes)}))))
    memory.bytes[:] = 1
    assert set(_where(memory.address, memory.size).tolist()) == {max(nodes)}


def test_affinity() -> None:
    before = pages.affinity()
    assert before == os.sched_getaffinity(0)
    try:
        _quiet(pages.set_affinity({max(before)}))
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        pages.set_affinity(before)
    assert pages.affinity() == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
def test_affinity_refused(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As by a cpuset that has lost the CPUs."""

    def refuse(thread: int, cpus: Collection[int]) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.warns(RuntimeWarning, match="sched_setaffinity"):
        assert not pages.set_affinity({0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pages.set_affinity({0})


# Interleaving -------------------------------------------------------------------------------------


class Kernel:
    """Plays the calls for pages from `first` on: several nodes, pages that won't move, huge ones."""

    def __init__(self, first: int, nodes: NDArray[np.int16]) -> None:
        self.first, self.nodes = first, nodes
        self.stuck: dict[int, int] = {}
        """Errors of pages that can't move."""
        self.busy: dict[int, int] = {}
        """How often pages are busy yet."""
        self.huge: set[int] = set()
        """Their numbers, of aligned blocks."""
        self.splits = True
        self.bound: list[tuple[int, int, Policy]] = []
        self.copied = 0

    def where(self, address: int, size: int) -> NDArray[np.int16]:
        first, count = pages.span(address, size)
        return self.nodes[first - self.first : first - self.first + count].copy()

    def move(self, addresses: NDArray[np.int64], targets: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.array(
            [self._move(*each) for each in zip(addresses, targets, strict=True)], np.int32
        )

    def _move(self, address: int, target: int) -> int:
        page = int(address) // PAGE_BYTES - self.first
        assert address % PAGE_BYTES == 0
        assert self.nodes[page] >= 0
        assert self.nodes[page] != target, "moves what is in place"
        if page in self.stuck:
            return self.stuck[page]
        if self.busy.get(page, 0):
            self.busy[page] -= 1
            return -errno.EBUSY
        block = (self.first + page) // BLOCK
        start = block * BLOCK - self.first if block in self.huge else page
        stop = start + BLOCK if block in self.huge else page + 1
        self.nodes[max(start, 0) : stop] = target
        self.copied += stop - start
        return int(target)

    def bind(self, address: int, size: int, policy: Policy) -> bool:
        self.bound.append((address, size, policy))
        return True

    def advise(self, address: int, size: int, advice: int) -> bool:
        if advice == pages._COLD and self.splits:
            self.huge.discard(address // PAGE_BYTES // BLOCK)
        return self.splits


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Put a kernel in."""
    playing: list[Kernel] = []
    monkeypatch.setattr(pages, "where", lambda *call: playing[-1].where(*call))
    monkeypatch.setattr(pages, "move", lambda *call: playing[-1].move(*call))
    monkeypatch.setattr(pages, "bind", lambda *call: playing[-1].bind(*call))
    monkeypatch.setattr(pages, "_advise", lambda *call: playing[-1].advise(*call))
    monkeypatch.setattr(pages, "allowed_nodes", lambda: frozenset(range(8)))
    return playing


def _right(first: int, count: int, nodes: Collection[int]) -> list[int]:
    order = sorted(nodes)
    return [order[(first + page) % len(order)] for page in range(count)]


@given(
    nodes=st.sets(st.integers(0, 7), min_size=1),
    first=st.integers(1, 1 << 30),
    count=st.integers(1, 300),
    before=st.integers(0, PAGE_BYTES - 1),
    after=st.integers(0, PAGE_BYTES - 1),
    seed=st.integers(0, 1000),
)
def test_pages_go_where_the_rule_says(
    nodes: set[int], first: int, count: int, before: int, after: int, seed: int
) -> None:
    """From anywhere, but for the pages at the edges that hold other things, and those that aren't there."""
    random = np.random.default_rng(seed)
    edges = (before > 0) + (after > 0)
    kernel = Kernel(first, random.integers(0, 8, count + edges).astype(np.int16))
    absent = random.random(count + edges) < 0.1
    kernel.nodes[absent] = -2
    start = first + (before > 0)  # the first whole page
    inner = slice(start - first, start - first + count)
    old = kernel.nodes.copy()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("where", "move", "bind"):
            patch.setattr(pages, name, getattr(kernel, name))
        patch.setattr(pages, "_advise", kernel.advise)
        patch.setattr(pages, "allowed_nodes", lambda: frozenset(range(8)))
        address = start * PAGE_BYTES - before
        found = pages.interleave(address, before + count * PAGE_BYTES + after, nodes)
    assert found is not None
    untouched = int(np.count_nonzero(absent[inner]))
    assert (found.pages, found.placed, found.untouched) == (count, count - untouched, untouched)
    assert (found.refused, found.policy, found.reasons) == (0, True, ())
    expected = np.where(absent[inner], -2, _right(start, count, nodes))
    assert kernel.nodes[inner].tolist() == expected.tolist()
    assert kernel.nodes[: inner.start].tolist() == old[: inner.start].tolist()
    assert kernel.nodes[inner.stop :].tolist() == old[inner.stop :].tolist()
    policy = Policy(pages.INTERLEAVE, frozenset(nodes))
    assert kernel.bound == [(start * PAGE_BYTES, count * PAGE_BYTES, policy)]


def test_pages_that_do_not_move_are_counted(played: list[Kernel]) -> None:
    kernel = Kernel(1000, np.zeros(100, np.int16))
    kernel.nodes[50] = 1  # so that they are no huge page
    kernel.stuck = {1: -errno.EACCES, 3: -errno.EACCES, 5: -errno.EBUSY}
    kernel.busy = {7: 1, 9: 2, 11: 100}
    played.append(kernel)
    found = pages.interleave(1000 * PAGE_BYTES, 100 * PAGE_BYTES, (0, 1))
    assert found is not None
    assert (found.pages, found.placed, found.refused) == (100, 96, 4)
    assert sorted(found.reasons) == sorted(
        f"2 pages: {os.strerror(code)}" for code in (errno.EACCES, errno.EBUSY)
    )
    wrong = [p for p, node in enumerate(_right(1000, 100, (0, 1))) if kernel.nodes[p] != node]
    assert wrong == [1, 3, 5, 11]


def test_huge_pages_are_split_before(played: list[Kernel]) -> None:
    """Each page is copied at most once, not all of a huge page for each."""
    first = 7 * BLOCK - 5
    kernel = Kernel(first, np.zeros(3 * BLOCK, np.int16))
    kernel.huge = {7, 8}
    played.append(kernel)
    found = pages.interleave(first * PAGE_BYTES, 3 * BLOCK * PAGE_BYTES, (0, 1))
    assert found is not None
    assert (found.placed, found.refused) == (3 * BLOCK, 0)
    assert kernel.copied <= 3 * BLOCK
    assert kernel.nodes.tolist() == _right(first, 3 * BLOCK, (0, 1))


def test_what_may_be_a_huge_page_stays_whole(played: list[Kernel]) -> None:
    """Where the kernel doesn't split: blocks on one node stay, others have no huge page and are placed."""
    kernel = Kernel(7 * BLOCK, np.zeros(2 * BLOCK, np.int16))
    kernel.nodes[BLOCK + 3] = 1
    kernel.huge, kernel.splits = {7}, False
    played.append(kernel)
    found = pages.interleave(7 * BLOCK * PAGE_BYTES, 2 * BLOCK * PAGE_BYTES, (0, 1))
    assert found is not None
    assert found.refused == BLOCK // 2
    assert found.reasons == (f"{BLOCK // 2} pages: {os.strerror(errno.EBUSY)}",)
    assert not kernel.nodes[:BLOCK].any()
    assert kernel.nodes[BLOCK:].tolist() == _right(8 * BLOCK, BLOCK, (0, 1))


def test_a_kernel_that_says_where_pages_are_but_moves_none(
    played: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    played.append(Kernel(8, np.array([0, 0, 1], np.int16)))
    monkeypatch.setattr(pages, "move", lambda *call: None)
    monkeypatch.setattr(pages, "bind", lambda *call: False)
    found = pages.interleave(8 * PAGE_BYTES, 3 * PAGE_BYTES, (0, 1))
    assert found is not None
    assert (found.placed, found.refused, found.policy) == (1, 2, False)
    assert found.reasons == (f"2 pages: {os.strerror(errno.EPERM)}",)


def test_less_than_a_page() -> None:
    nodes = pages.allowed_nodes() or {0}
    found = pages.interleave(5 * PAGE_BYTES + 1, 2 * PAGE_BYTES - 2, nodes)
    assert found is not None
    assert found.pages == 0


@pytest.mark.parametrize("nodes", [(), (0, 8), (-1,), (5000,)])
def test_nodes_that_cannot_be(played: list[Kernel], nodes: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"nodes: expected nodes out of \[0, 1, .*, 7\]"):
        pages.interleave(8 * PAGE_BYTES, PAGE_BYTES, nodes)


@pytest.mark.filterwarnings("ignore:Expertile can't use:RuntimeWarning")
def test_interleaving_this_process() -> None:
    """Contents stay, pages that are touched later follow the rule, and one node's huge pages are left whole."""
    nodes = pages.allowed_nodes()
    _quiet(nodes)
    assert nodes
    size = 8 << 20
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(block, np.uint8)
    address = values.ctypes.data
    pages._advise(address, size, mmap.MADV_HUGEPAGE)
    values[: size // 2] = np.arange(size // 2) % 251
    huge = _huge_bytes(address)
    found = pages.interleave(address, size, nodes)
    _quiet(found)
    assert found
    assert found.placed + found.refused == size // 2 // PAGE_BYTES
    assert found.untouched == size // 2 // PAGE_BYTES
    assert (values[: size // 2] == np.arange(size // 2) % 251).all()
    if not found.policy or found.refused:
        pytest.skip(f"not all was moved: {found}")
    values[size // 2 :] = 1
    assert _where(address, size).tolist() == _right(
        address // PAGE_BYTES, size // PAGE_BYTES, nodes
    )
    assert len(nodes) > 1 or _huge_bytes(address) >= huge


def test_splitting_huge_pages() -> None:
    """Real ones: the kernel takes the advice, and none is left."""
    size = 4 * BLOCK * PAGE_BYTES
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(block, np.uint8)
    address = values.ctypes.data
    pages._advise(address, size, mmap.MADV_HUGEPAGE)
    values[:] = 7
    if not _huge_bytes(address):
        pytest.skip("no huge pages to be had")
    pages._advise(address, size, pages._NO_HUGE_PAGES)
    found = _where(address, size)
    fixed = pages._huge(found, address)
    if fixed.any():
        pytest.skip("this kernel doesn't split them")
    assert _huge_bytes(address) == 0
    assert (values == 7).all()


def _huge_bytes(address: int) -> int:
    """In huge pages, of the mapping at `address`."""
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            first = line.split()[0]
            if "-" in first and ":" not in first:
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "AnonHugePages:":
                return int(line.split()[1]) << 10
    return 0


def test_a_page_on_the_move_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says of it that it isn't there."""
    asked: list[int] = []

    def answer(addresses: np.ndarray, targets: object, status: np.ndarray) -> int:
        asked.append(len(addresses))
        status[:] = addresses // pages.PAGE_BYTES % 2
        if len(asked) == 1:
            status[7] = -2
        return 0

    monkeypatch.setattr(pages, "_move_pages", answer)
    found = pages.where(32 * pages.PAGE_BYTES, 40 * pages.PAGE_BYTES)
    assert found is not None
    assert found.tolist() == [0, 1] * 20
    assert asked == [40, 1]


def test_pages_that_nobody_touched_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(addresses: np.ndarray, targets: object, status: np.ndarray) -> int:
        asked.append(len(addresses))
        status[:] = -2
        return 0

    monkeypatch.setattr(pages, "_move_pages", answer)
    found = pages.where(0x10000, 40 * pages.PAGE_BYTES)
    assert found is not None
    assert (found < 0).all()
    assert asked == [40]

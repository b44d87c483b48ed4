"""System calls about pages: where they are, where they shall be, and on which CPUs this thread may run.

Containers may refuse each of them while others work.  A refused call answers None or False, and one warning per process
and call says so; any other failure is an OSError.

Calls and their rules: man pages move_pages(2), mbind(2), set_mempolicy(2), get_mempolicy(2), madvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertile.runtime.errors import ArgumentError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Modes of a memory policy.
DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL, PREFERRED_MANY, WEIGHTED_INTERLEAVE = range(7)

_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
_REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)

_NODES = 1024  # bits in a mask of nodes: as many as any kernel has
_MOVE = 2  # MPOL_MF_MOVE
_ALLOWED = 4  # MPOL_F_MEMS_ALLOWED
_NO_HUGE_PAGES, _COLD = 15, 20  # MADV_…

_BATCH = 1 << 14  # pages a call
_FEW = 16  # pages, or one in so many, that may be on the move
_MOMENT = 0.002  # seconds that this takes, about
_WORKERS = 8  # that ask at once
_ATTEMPTS = 3  # at moving pages that are busy

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_refused: set[str] = set()


def span(address: int, size: int, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """The number of the first page that holds any of the bytes, and how many do."""
    first = address // page_bytes
    return first, -(-(address + size) // page_bytes) - first


# Calls --------------------------------------------------------------------------------------------


def _call(name: str, *arguments: int) -> int | None:
    """The result of a system call, None where it is refused. Raises OSError if it fails for any other reason."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    code = errno.ENOSYS
    if number is not None:
        result: int = _libc.syscall(*map(ctypes.c_long, (number, *arguments)))
        if result >= 0:
            return result
        code = ctypes.get_errno()
    if code not in _REFUSALS:
        raise OSError(code, f"{name}: {os.strerror(code)}")
    _refuse(name, code)
    return None


def _refuse(name: str, code: int) -> None:
    if name not in _refused:
        _refused.add(name)
        warnings.warn(
            f"Expertile can't use {name} here, so memory nodes are served as far as the other calls allow: "
            f"{os.strerror(code)}. In a container, the seccomp profile or the capability SYS_NICE decides",
            RuntimeWarning,
            stacklevel=4,
        )


# Where pages are ----------------------------------------------------------------------------------


def where(address: int, size: int) -> NDArray[np.int16] | None:
    """The node of each page that holds any of `size` bytes, int16 [pages]; None if the kernel refuses to say.

    Below 0: no page there (-ENOENT or -EFAULT: not touched yet, or the zero page).
    """
    first, count = span(address, size)
    found = np.empty(count, np.int16)

    def ask(start: int) -> bool:
        part = found[start : start + _BATCH]
        addresses = (first + start + np.arange(len(part))) * PAGE_BYTES
        status = np.empty(len(part), np.int32)
        answered = _move_pages(addresses, None, status) is not None
        part[:] = status
        return answered

    if not ask(0):
        return None
    # The kernel takes up to 0.2 us a page, and serves several threads at once.
    if count > _BATCH:
        with ThreadPoolExecutor(min(_WORKERS, len(affinity()))) as pool:
            if not all(pool.map(ask, range(_BATCH, count, _BATCH))):
                return None
    _ask_again(first, found)
    return found


def _ask_again(first: int, found: NDArray[np.int16]) -> None:
    """A page that the kernel is moving at the moment looks as if it weren't there: ask for a few of those once more."""
    gone = np.flatnonzero(found < 0)
    if not 0 < len(gone) <= max(_FEW, len(found) // _FEW):
        return
    time.sleep(_MOMENT)
    status = np.empty(len(gone), np.int32)
    if _move_pages((first + gone) * PAGE_BYTES, None, status) is not None:
        found[gone] = status


def move(addresses: NDArray[np.int64], targets: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Moves the pages at `addresses` (int64 [pages]) to the nodes `targets` (int32 [pages]).

    The node of each page then, int32 [pages], or below 0 the error that kept it, as it does pages that other processes
    share; None if the kernel refuses all.
    """
    status = np.empty(len(addresses), np.int32)
    for start in range(0, len(addresses), _BATCH):
        part = slice(start, start + _BATCH)
        if _move_pages(addresses[part], targets[part], status[part]) is None:
            return None
    return status


def _move_pages(
    addresses: NDArray[np.int64], targets: NDArray[np.int32] | None, status: NDArray[np.int32]
) -> int | None:
    target = 0 if targets is None else targets.ctypes.data
    data, flags = addresses.ctypes.data, 0 if targets is None else _MOVE
    return _call("move_pages", 0, len(addresses), data, target, status.ctypes.data, flags)


# Policies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """A memory policy: `mode`, flags included, and the nodes it names."""

    mode: int
    nodes: frozenset[int] = frozenset()


def bind(address: int, size: int, policy: Policy) -> bool:
    """Whether whole pages, from a page's address on, now have this policy. It moves none that is there."""
    mask = _mask(policy.nodes)
    done = _call("mbind", address, size, policy.mode, mask.ctypes.data, _NODES + 1, 0)
    return done is not None


def set_policy(policy: Policy) -> bool:
    """Whether the calling thread now has this policy, for pages it touches where none is bound."""
    mask = _mask(policy.nodes)
    return _call("set_mempolicy", policy.mode, mask.ctypes.data, _NODES + 1) is not None


def policy() -> Policy | None:
    """The calling thread's policy."""
    mode, mask = ctypes.c_int(), _mask(())
    reference = ctypes.addressof(mode)
    if _call("get_mempolicy", reference, mask.ctypes.data, _NODES + 1, 0, 0) is None:
        return None
    return Policy(mode.value, _numbers(mask))


def allowed_nodes() -> frozenset[int] | None:
    """The nodes where this process may allocate memory: those of its cpuset that have any."""
    mask = _mask(())
    if _call("get_mempolicy", 0, mask.ctypes.data, _NODES + 1, 0, _ALLOWED) is None:
        return None
    return _numbers(mask)


def _mask(numbers: Collection[int]) -> NDArray[np.uint8]:
    bits = np.zeros(_NODES, np.uint8)
    bits[list(numbers)] = 1
    return np.packbits(bits, bitorder="little")


def _numbers(mask: NDArray[np.uint8]) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


# Interleaving what is there -----------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """What became of a range's whole pages: pages = placed + untouched + refused."""

    pages: int
    placed: int
    """On the node that the rule says."""
    untouched: int
    """Not there yet; they follow the rule from the first touch on, if `policy`."""
    refused: int
    """There, but elsewhere."""
    policy: bool
    """Whether the range now has the policy."""
    reasons: tuple[str, ...]
    """Why pages were refused: a count and the kernel's words."""


def interleave(address: int, size: int, nodes: Collection[int]) -> Placement | None:
    """Places the whole pages within a range: page number n on nodes[n % len(nodes)], nodes ascending.

    This is what the kernel does under an interleaving policy, and the range gets that policy for pages yet to be
    touched; those that are there are moved, which the policy alone wouldn't do to a page on any of the nodes.  Their
    contents stay.  Pages that reach beyond the range stay where they are; so do pages shared with other processes.
    If there are several nodes, huge pages are split, and the range is advised against them: the kernel would gather
    pages of all nodes into one.

    None if the kernel refuses to say where pages are.  Raises ArgumentError for nodes where this process may not
    allocate.
    """
    order = _checked(nodes)
    first = -(-address // PAGE_BYTES)
    count = max((address + size) // PAGE_BYTES - first, 0)
    if count == 0:
        return Placement(0, 0, 0, 0, False, ())
    start, length = first * PAGE_BYTES, count * PAGE_BYTES
    if len(order) > 1:
        _advise(start, length, _NO_HUGE_PAGES)
    bound = bind(start, length, Policy(INTERLEAVE, frozenset(order)))
    targets = np.resize(np.roll(np.array(order, np.int32), -(first % len(order))), count)
    errors = _move_all(start, targets)
    found = where(start, length)
    if errors is None or found is None:
        return None
    untouched, elsewhere = found < 0, (found >= 0) & (found != targets)
    refused, absent = int(np.count_nonzero(elsewhere)), int(np.count_nonzero(untouched))
    reasons = _reasons(errors[elsewhere])
    return Placement(count, count - absent - refused, absent, refused, bound, reasons)


def _checked(nodes: Collection[int]) -> list[int]:
    allowed = allowed_nodes()
    order = sorted(set(nodes))
    if (
        not order
        or order[0] < 0
        or order[-1] >= _NODES
        or (allowed and not allowed.issuperset(order))
    ):
        here = f"nodes out of {sorted(allowed)}" if allowed else "numbers of nodes"
        raise ArgumentError(
            f"nodes: expected {here}, at least one, got {sorted(nodes)}; "
            "`expertile numa` shows what this process may use"
        )
    return order


def _move_all(start: int, targets: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Moves the pages that are there from `start` on; what the kernel last said of each, below 0 an error."""
    said = np.zeros(len(targets), np.int32)
    fixed = np.zeros(len(targets), np.bool_) if (targets == targets[0]).all() else None
    for _ in range(_ATTEMPTS):
        found = where(start, len(targets) * PAGE_BYTES)
        if found is None:
            return None
        fixed = _huge(found, start) if fixed is None else fixed
        said[fixed] = -errno.EBUSY
        wrong = np.flatnonzero((found >= 0) & (found != targets) & ~fixed)
        if len(wrong) == 0:
            break
        status = move(start + wrong * PAGE_BYTES, targets[wrong])
        said[wrong] = -errno.EPERM if status is None else status
        if status is None:
            break
    return said


def _huge(found: NDArray[np.int16], start: int) -> NDArray[np.bool_]:
    """Splits the huge pages among the pages from `start` on, `found` on these nodes; marks those that can't be split.

    Moving one page of a huge page would move all of it.  To give advice on one of them splits it; the advice itself,
    that the page is cold, is the least that does.  Pages that lie on several nodes are no huge page.
    """
    size = PAGE_BYTES // 8  # a page table full of pages
    whole = np.zeros(len(found), np.bool_)
    edges = [0, *range(-(start // PAGE_BYTES) % size or size, len(found), size), len(found)]
    for first, end in pairwise(edges):
        block = found[first:end]
        if block[0] >= 0 and (block == block[0]).all():
            whole[first:end] = not _advise(start + first * PAGE_BYTES, PAGE_BYTES, _COLD)
    return whole


def _advise(address: int, size: int, advice: int) -> bool:
    """Whether the kernel took advice on whole pages."""
    done: int = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return done == 0


def _reasons(errors: NDArray[np.int32]) -> tuple[str, ...]:
    counts = Counter(np.minimum(errors, 0).tolist()).most_common()
    words = {0: "the kernel put them elsewhere"}
    return tuple(
        f"{count} pages: {words.get(code) or os.strerror(-code)}" for code, count in counts
    )


# Threads ------------------------------------------------------------------------------------------


def affinity() -> frozenset[int]:
    """The CPUs, by their absolute numbers, that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def set_affinity(cpus: Collection[int]) -> bool:
    """Whether the calling thread now keeps to these CPUs; not if none of them is in its cpuset (any more)."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        code = error.errno or errno.EPERM
        if code not in (*_REFUSALS, errno.EINVAL):
            raise
        _refuse("sched_setaffinity", code)
        return False
    return True

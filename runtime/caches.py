"""The data caches of this machine, and how much of each a measurement may use to stay in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu/cpu0")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BEYOND = 4
"""A working set is as many times the next smaller cache, so that little of it is found there."""


@dataclass(frozen=True)
class Cache:
    """A data cache as one core sees it."""

    level: int
    bytes: int
    cores: int
    """That share it."""

    @property
    def name(self) -> str:
        return f"L{self.level}"

    def part(self, threads: int) -> int:
        """Bytes for each of `threads` threads on cores of their own."""
        return self.bytes // min(threads, self.cores)


ASSUMED = (Cache(1, 32 << 10, 1), Cache(2, 1 << 20, 1), Cache(3, 16 << 20, 4))
"""Where the system reports nothing: small for a server, so that a working set is in the cache it is meant for."""


def caches(cpu: Path = _CPU) -> tuple[tuple[Cache, ...], str | None]:
    """The data caches of a processor by level, from Linux's sysfs; or ASSUMED, and why."""
    try:
        found = [_read(index) for index in sorted((cpu / "cache").glob("index[0-9]*"))]
    except (OSError, ValueError) as error:
        return ASSUMED, f"{cpu / 'cache'} is incomplete ({error})"
    data = sorted(each for each in found if each is not None)
    if not data:
        return ASSUMED, f"{cpu / 'cache'} lists no data cache"
    core = data[0][2]  # hardware threads of a core: those that share its first cache
    return tuple(Cache(level, size, max(1, cpus // core)) for level, size, cpus in data), None


def _read(index: Path) -> tuple[int, int, int] | None:
    """Level, bytes and the number of processors that share it; None for a cache of instructions."""
    kind, level, size, cpus = (
        (index / name).read_text().strip() for name in ("type", "level", "size", "shared_cpu_list")
    )
    if kind == "Instruction":
        return None
    unit = _UNITS.get(size[-1:], 1)
    return int(level), int(size.rstrip("KMG")) * unit, _count(cpus)


def _count(ranges: str) -> int:
    """How many numbers a list such as 0-3,8 has."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(pair[-1]) - int(pair[0]) + 1 for pair in ends)


def working_sets(caches: Sequence[Cache], threads: int) -> dict[str, int | str]:
    """For each cache, by name: bytes a thread can read over and over from it and not from a smaller one; or why not.

    Half of what a thread has of it, but no more than 4 times the next smaller cache: what a virtual machine is told of
    a large shared cache may not be there.
    """
    sets: dict[str, int | str] = {}
    below = 0
    for cache in caches:
        part = cache.part(threads)
        size = min(part // 2, _BEYOND * below) if below else part // 2
        if size < 2 * below:
            sets[cache.name] = (
                f"{cache.name} has {part >> 10} KiB a thread, less than 4 times the {below >> 10} "
                "KiB of the next smaller cache: reads from it can't be told apart"
            )
        else:
            sets[cache.name] = size // 1024 * 1024  # whole tiles
        below = part
    return sets

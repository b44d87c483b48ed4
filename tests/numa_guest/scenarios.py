"""Each placement of memory with what must hold of it: `python -m numa_guest.scenarios NODES [NAME…]` runs in the guest.

It prints a line of JSON for each check:

    {"name": "mremap/page_map", "error": null, "seconds": 0.8, "facts": {"share": 1.0}}

Imports take most of a boot, so they happen once, and processes fork from there: what a placement does to its process
ends with it, be it a cpuset or a crash. PyTorch starts its threads in the forks, as they would not survive one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SECONDS = 400
"""For a process."""

PROCESSES: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "mbind": ("page_map", "layer", "loads"),
        "huge_pages": ("page_map", "layer"),
        "mremap": ("page_map", "layer"),
        "interleave": ("page_map", "layer"),
        "task_policy": ("page_map", "process_topology", "layer"),
        "weighted": ("page_map", "layer"),
        "full_node": ("page_map", "layer"),
    },
    {"cpuset": ("page_map", "process_topology", "layer")},
)
"""The checks of each placement, by their names in `checks` and `placements`, which only the guest imports.

Those that can share a process do, with the kernels that it has: a policy is followed by another one, and what fills a
node comes last.
"""

NAMES = tuple(
    f"{placement}/{check}"
    for process in PROCESSES
    for placement, checks in process.items()
    for check in checks
)


def main(nodes: int, names: Collection[str]) -> None:
    """Run the checks of these names, on a machine with memory nodes 0 to `nodes` - 1."""
    faulthandler.enable()
    start = time.monotonic()
    from . import checks

    found = checks.online_nodes()
    assert found == list(range(nodes)), f"the guest has the nodes {found}"
    print(f"up {start:.1f} s, imported in {time.monotonic() - start:.1f} s", flush=True)
    for process in PROCESSES:
        chosen = {
            placement: [check for check in all_checks if f"{placement}/{check}" in names]
            for placement, all_checks in process.items()
        }
        for result in _forked(chosen, found) if any(chosen.values()) else ():
            print(json.dumps(result), flush=True)


def _forked(process: Mapping[str, Sequence[str]], nodes: Sequence[int]) -> Iterator[Result]:
    """The results of a process, also of the checks that one which died leaves out."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        with open(writing, "w", buffering=1) as results:
            for placement, checks in process.items():
                for result in _run(placement, checks, nodes) if checks else ():
                    print(json.dumps(result), file=results)
        os._exit(0)
    os.close(writing)
    missing = [f"{placement}/{check}" for placement, checks in process.items() for check in checks]
    with open(reading) as results:
        for line in results:
            result = json.loads(line)
            missing.remove(result["name"])
            yield result
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for name in missing:
        yield _result(name, f"its process ended with status {status}")


def _run(placement: str, checks: Sequence[str], nodes: Sequence[int]) -> Iterator[Result]:
    """Place memory, then check it."""
    from . import checks as functions
    from . import layers
    from .placements import PLACEMENTS

    layers.use_threads()
    _DROP_CACHES.write_text("1")  # files that were read fill nodes as well
    try:
        placed = PLACEMENTS[placement](layers.BYTES, nodes)
    except Exception:
        error = traceback.format_exc()
        yield from (_result(f"{placement}/{check}", error) for check in checks)
        return
    for check in checks:
        start = time.monotonic()
        error, facts = None, {}
        try:
            facts = getattr(functions, check)(placed)
        except Exception:
            error = traceback.format_exc()
        yield _result(f"{placement}/{check}", error, time.monotonic() - start, facts)


def _result(name: str, error: str | None, seconds: float = 0, facts: Any = None) -> Result:
    return {"name": name, "error": error, "seconds": round(seconds, 2), "facts": facts or {}}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

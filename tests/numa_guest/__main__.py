"""`python -m tests.numa_guest [NODES…] [--only WORD]`: boot guests and run their checks, with a line for each."""

from __future__ import annotations

import argparse
import sys
import time

from .harness import Result, results
from .packages import Unavailable
from .scenarios import NAMES


def main() -> int:
    """The number of checks that failed, or 77 if there is no guest here (as automake's tests say that they skipped)."""
    parser = argparse.ArgumentParser(prog="python -m tests.numa_guest", description=__doc__)
    parser.add_argument(
        "nodes", nargs="*", type=int, help="of the guests, one boot each (default: 2 3 4)"
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="checks that have this in their name"
    )
    options = parser.parse_args()
    names = [name for name in NAMES if options.only in name]
    failed = 0
    for nodes in options.nodes or (2, 3, 4):
        start = time.monotonic()
        print(f"{nodes} nodes")
        try:
            found = results(nodes, names, _show)
        except Unavailable as reason:
            print(f"skipped: {reason}")
            return 77
        failed += sum(result.error is not None for result in found.values())
        print(f"{len(found)} checks in {time.monotonic() - start:.0f} s")
    return failed


def _show(said: Result | str) -> None:
    if isinstance(said, str):
        print(f"    {said}")
        return
    facts = ", ".join(f"{name} {value}" for name, value in said.facts.items())
    print(f"  {'FAILED' if said.error else 'passed'}  {said.name}  {said.seconds:.1f} s  {facts}")
    if said.error:
        print(said.error)


sys.exit(main())

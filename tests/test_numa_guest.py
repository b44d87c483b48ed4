"""Placement, schedule and results on real memory nodes, those of an emulated guest: see `numa_guest`.

Here with 2 nodes; NUMA_GUEST_NODES="2 3 4" names others, and so does `python -m tests.numa_guest`.
"""

from __future__ import annotations

import os

import pytest
from numa_guest import harness, packages, scenarios

_NODES = [int(number) for number in os.environ.get("NUMA_GUEST_NODES", "2").split()]


@pytest.mark.timeout(2 * harness.SECONDS)
@pytest.mark.parametrize("nodes", _NODES)
def test_guest(nodes: int) -> None:
    """All checks of a boot, which takes longer than any of them."""
    try:
        results = harness.results(nodes, scenarios.NAMES)
    except packages.Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"no guest here, and it is a part of CI: {reason}")
        pytest.skip(f"no guest here: {reason}")
    failed = [f"{name}: {result.error}" for name, result in results.items() if result.error]
    if failed:
        pytest.fail("\n\n".join(failed), pytrace=False)

"""What the tests share: kernels cached between runs, the ISAs, hypothesis profiles.

Profiles, for --hypothesis-profile: `dev` (a quick look, the default), `ci` (the same examples every time, the default
where CI is set) and `long` (an hour or so).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import oracle
import pytest
from hypothesis import settings

from expertile.codegen import isa as isas

settings.register_profile("dev", deadline=None, max_examples=8)
settings.register_profile("ci", deadline=None, max_examples=15, derandomize=True, database=None)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    """Set what this process, and the workers of pytest-xdist that it starts, have in their environment.

    Kernels are kept between test runs and for all workers, in pytest's cache rather than the user's. Where several
    workers share the cores, their OpenMP threads sleep at barriers: spinning would take the time of another's work.
    """
    if "EXPERTILE_CACHE_DIR" not in os.environ and config.cache is not None:
        os.environ["EXPERTILE_CACHE_DIR"] = str(config.cache.mkdir("kernels"))
    if config.getoption("numprocesses", default=None):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a property a minute for each example, as there may be many: the usual limit is for tests that have none."""
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.timeout(60 * settings().max_examples))


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections: while IR is written there are many."""
    gc.freeze()


@pytest.fixture(scope="module", params=isas.names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each ISA that this machine has, by name; layers run on it."""
    name: str = request.param
    reason = isas.by_name(name).unavailable()
    if reason:
        pytest.skip(f"{name}: {reason}")
    with oracle.running(name):
        yield name

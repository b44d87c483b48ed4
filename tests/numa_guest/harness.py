"""The checks of one boot, as results on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .guest import Guest, GuestFailed

SECONDS = 600
"""For a boot and all its checks; a machine that does little else needs a tenth."""


@dataclass(frozen=True)
class Result:
    """What became of a check: `error` is the guest's traceback, or None."""

    name: str
    error: str | None
    seconds: float
    facts: dict[str, Any]


def results(
    nodes: int, names: Sequence[str], report: Callable[[Result | str], None] = lambda said: None
) -> dict[str, Result]:
    """Boot a guest of so many nodes and run the checks of these names in it: their results by name.

    `report` is called with each result and each other line as it comes. A check that the guest did not get to has the
    guest's last words for an error. Raises packages.Unavailable if there is no guest here.
    """
    found: dict[str, Result] = {}
    last_words: list[str] = []
    try:
        for line in Guest(nodes).run("numa_guest.scenarios", [str(nodes), *names], SECONDS):
            said = Result(**json.loads(line)) if line.startswith('{"name"') else line
            report(said)
            if isinstance(said, Result):
                found[said.name] = said
            else:
                last_words.append(said)
    except GuestFailed as failure:
        last_words.append(str(failure))
        report(str(failure))
    missing = "\n".join(["the guest did not get to it:", *last_words[-40:]])
    return {name: found.get(name, Result(name, missing, 0, {})) for name in names}

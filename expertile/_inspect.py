"""`expertile inspect`: a kernel's IR and assembly on the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from expertile.runtime.inspection import TILE_INSTRUCTION, Inspection

LISTINGS = {"ir": "llvm", "optimised_ir": "llvm", "assembly": "gas"}
"""The listings of an Inspection, with the name of their language for the highlighter."""


def as_json(kernel: Inspection, listings: list[str]) -> dict[str, Any]:
    """The inspection with the named listings, as JSON takes it."""
    statistics = kernel.statistics
    return {
        "kernel": kernel.kernel,
        "isa": kernel.isa,
        "unavailable": kernel.unavailable,
        "target": {"cpu": kernel.target.cpu, "triple": kernel.target.triple},
        "instructions": statistics.instructions,
        "classes": statistics.classes,
        "hot_loops": statistics.hot_loops,
        "hot_classes": statistics.hot_classes,
        "spills": statistics.spills,
        "object_bytes": kernel.object_bytes,
        "scratch_bytes": kernel.scratch_bytes,
        "variant": kernel.variant,
        "choice": kernel.choice,
        **{name: getattr(kernel, name) for name in listings},
    }


def show(console: Console, kernel: Inspection, listings: list[str]) -> None:
    """Print the named listings, tile instructions highlighted, and a summary."""
    for name in listings:
        text = Syntax("", LISTINGS[name]).highlight(getattr(kernel, name).strip("\n"))
        text.highlight_regex(TILE_INSTRUCTION, "bold black on yellow")
        console.print(text, soft_wrap=True)
        console.rule(style="dim")
    console.print(_summary(kernel), soft_wrap=True)


def _summary(kernel: Inspection) -> Text:
    statistics = kernel.statistics
    text = Text.assemble((kernel.kernel, "bold"), f" · {kernel.isa} · for {kernel.target.cpu}")
    if kernel.unavailable:
        text.append(f" (not this machine: {kernel.unavailable})", "yellow")
    text.append(f"\n{statistics.instructions} instructions: {_counts(statistics.classes)}")
    loops = f"{statistics.hot_loops} hot loop{'s' if statistics.hot_loops != 1 else ''}"
    text.append(f"\n{loops}: {_counts(statistics.hot_classes)} · ")
    text.append(f"{statistics.spills} spills", "red" if statistics.spills else "green")
    text.append(
        f"\nobject {kernel.object_bytes:,} bytes · scratch {kernel.scratch_bytes:,} bytes a thread"
    )
    if kernel.variant:
        best = f", the {kernel.choice} best" if kernel.choice else ""
        text.append(f"\nvariant {kernel.variant}{best}")
    return text


def _counts(classes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in classes.items()) or "nothing"

"""The JSON as a picture: time, share of the roofline and speed-up by tokens, a column for each shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from peers.measure import OURS

Json = dict[str, Any]


def plot(report: Json, picture: Path) -> None:
    """Write the picture."""
    shapes = report["shapes"]
    figure, grid = pyplot.subplots(
        3, len(shapes), figsize=(5 * len(shapes), 11), layout="constrained", squeeze=False
    )
    names = [row["implementation"] for shape in shapes for row in shape["results"]]
    colours = {
        name: "black" if name == OURS else f"C{number}"
        for number, name in enumerate(sorted(dict.fromkeys(names), key=lambda n: n != OURS))
    }
    for shape, (times, shares, speedups) in zip(shapes, grid.T, strict=True):
        times.set_title(f"{shape['name']}, {shape.get('weights', 'bf16')}")
        for name, colour in colours.items():
            _line(times, shape, name, "ms", colour)
            _line(shares, shape, name, "share", colour)
        _speedups(speedups, shape, colours)
        times.set(yscale="log", ylabel="ms a call")
        shares.set(ylabel="share of the roofline", ylim=(0, None))
        speedups.set(ylabel="speed-up over the best peer", ylim=(0, None))
        for axes in (times, shares, speedups):
            _tokens(axes, [row["tokens"] for row in shape["results"]])
        for axes in (shares, speedups):
            axes.axhline(1.0, color="grey", linewidth=0.8)
    handles = {h.get_label(): h for axes in grid[0] for h in axes.get_lines()}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=3 * len(shapes)
    )
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _line(axes: Axes, shape: Json, name: str, value: str, colour: str) -> None:
    rows = [row for row in shape["results"] if row["implementation"] == name]
    if rows:
        axes.plot(
            [row["tokens"] for row in rows], [row[value]["median"] for row in rows], marker=".",
            label=name, color=colour, linewidth=2.0 if name == OURS else 1.0,
        )  # fmt: skip


def _speedups(axes: Axes, shape: Json, colours: dict[str, str]) -> None:
    """Coloured by which peer is the best one; bars are quartiles."""
    best = shape["best"]
    medians = [row["speedup"]["median"] for row in best]
    axes.plot([row["tokens"] for row in best], medians, color="lightgrey", zorder=1)
    for row in best:
        speedup = row["speedup"]
        below, above = speedup["median"] - speedup["low"], speedup["high"] - speedup["median"]
        axes.errorbar(
            row["tokens"], speedup["median"], yerr=[[below], [above]], marker="o", capsize=2,
            color=colours[row["implementation"]],
        )  # fmt: skip


def _tokens(axes: Axes, tokens: list[int]) -> None:
    ticks = sorted(set(tokens))
    axes.set(xscale="log", xlabel="tokens a call")
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()

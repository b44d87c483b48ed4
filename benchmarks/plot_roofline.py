"""Draw the JSON of `expertile roofline --output roofline.json`: operations a second by operations a byte, log-log.

A panel for each shape. Slopes are what memory and the caches deliver, the flat line is the peak, dashed is one thread;
circles are the bounds of calls, labelled with their number of tokens. With the JSON of `expertile bench`, crosses are
what calls of the same shapes reached there: trust their distance from the roof only if both ran in the same hour.

python benchmarks/plot_roofline.py roofline.json [--bench bench.json] [--output picture.png]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot
from matplotlib.axes import Axes

Json = dict[str, Any]


def plot(report: Json, bench: Json, picture: Path) -> None:
    """Write the picture."""
    shapes = report["shapes"]
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns, 4.5 * rows), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    achieved = {shape["name"]: shape["calls"] for shape in bench.get("shapes", [])}
    for axes, shape in zip(panels.flat, shapes, strict=False):
        _panel(axes, shape, achieved.get(shape["name"], []))
    for axes in panels.flat[len(shapes) :]:
        axes.remove()
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    machine = report["machine"]
    fewer = "; dashed: 1 thread" if machine["threads"] > 1 else ""
    figure.suptitle(f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads{fewer}")
    figure.savefig(picture, dpi=150)


def _panel(axes: Axes, shape: Json, calls: list[Json]) -> None:
    bounds = shape["bounds"]
    right = 2 * max(row["operations"] / row["bytes"] for row in bounds)
    left = 0.25
    *fewer, top = shape["ceilings"]
    for ceilings in (top, *fewer[:1]):
        _roofs(axes, ceilings, left, right, label=ceilings is top)
    for row in bounds:
        x, y = row["operations"] / row["bytes"], row["operations"] / row["bound_ms"] / 1e9
        axes.plot(x, y, "o", color="black", markersize=4)
        axes.annotate(
            str(row["tokens"]), (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    if calls:
        rates = [call["tflops"]["median"] for call in calls]
        bandwidths = [call["gb_per_s"]["median"] / 1e3 for call in calls]
        x_values = [rate / bandwidth for rate, bandwidth in zip(rates, bandwidths, strict=True)]
        axes.plot(x_values, rates, "x", color="crimson", label="measured calls")
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), xlabel="operations a byte of weights",
        title=shape["name"],
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)


def _roofs(axes: Axes, ceilings: Json, left: float, right: float, label: bool) -> None:
    """A slope for each place, up to the peak, and the peak."""
    peak = ceilings["peak_tflops"]["median"]
    style: Json = {} if label else {"linestyle": "--", "linewidth": 0.8, "alpha": 0.6}
    for number, read in enumerate(ceilings["reads"]):
        rate = read["gb_per_s"][read["best"]]["median"] / 1e3
        end = max(left, min(right, peak / rate))
        name = f"{read['place']}, {rate * 1e3:.0f} GB/s" if label else None
        axes.plot([left, end], [left * rate, end * rate], color=f"C{number}", label=name, **style)
    name = f"peak, {peak:.2f} TFLOP/s" if label else None
    axes.plot([left, right], [peak, peak], color="black", label=name, **style)


def main(
    roofline: Path,
    bench: Annotated[Path | None, typer.Option(help="JSON of `expertile bench`.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: beside the JSON, as PNG.")] = None,
) -> None:
    """Draw the roofline of a machine."""
    plot(
        json.loads(roofline.read_text()),
        json.loads(bench.read_text()) if bench else {},
        output or roofline.with_suffix(".png"),
    )


if __name__ == "__main__":
    typer.run(main)

"""One period of a matrix over memory nodes as coloured cells: which node each part of each row is on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.text import Text

from expertile.runtime.errors import ArgumentError, ExpertileError
from expertile.runtime.numa.segments import Segment

_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
)  # fmt: skip
"""Okabe and Ito's palette, which the colour-blind can tell apart: one for each node, in turn."""
_TERMINAL_CELLS = 64
_TERMINAL_ROWS = 32
_PNG_CELLS = 1024
_ROW_INCHES, _MOST_INCHES = 0.03, 40.0


class Period(NamedTuple):
    """What there is to see of a matrix."""

    title: str
    columns: int
    row_bytes: int
    """Of a row's codes."""
    segments: Sequence[Segment]
    """Of each row of the period."""

    @property
    def rows(self) -> int:
        return self.segments[-1].row + 1

    def cells(self, most: int) -> np.ndarray:
        """int64 `[rows, at most that many]`: the node of the greater part of a row that a cell stands for."""
        width = min(most, self.row_bytes)
        found = np.empty((self.rows, width), np.int64)
        for row, first, end, node in self.segments:
            begin, stop = (round(place * width / self.row_bytes) for place in (first, end))
            found[row, begin:stop] = node
        return found


def lines(period: Period) -> Iterator[Text]:
    """A line for each row, of cells in its nodes' digits and colours; a last one if there is no room for all."""
    label = len(str(period.rows))
    for number, cells in enumerate(period.cells(_TERMINAL_CELLS)[:_TERMINAL_ROWS]):
        line = Text(f"{number:{label}} ", no_wrap=True)
        for node in cells.tolist():
            line.append(f"{node % 10}", f"black on {_colour(node)}")
        yield line
    if period.rows > _TERMINAL_ROWS:
        yield Text(f"… and {period.rows - _TERMINAL_ROWS} more rows, all of them in --png")


def save(periods: Sequence[Period], path: Path) -> None:
    """Write a PNG with a panel for each matrix.

    Raises ExpertileError without Matplotlib, ArgumentError for a path that can't be written.
    """
    if not path.parent.is_dir():
        raise ArgumentError(
            f"--png: expected a file in a folder that is there, got {path}; make {path.parent} first"
        )
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ExpertileError(
            "--png: needs Matplotlib, which is not installed; it comes with the extra expertile[plots]"
        ) from error
    rows = max(period.rows for period in periods)
    height = min(max(4.5, rows * _ROW_INCHES), _MOST_INCHES)
    figure = Figure(figsize=(5.5 * len(periods), height), layout="constrained")
    panels = figure.subplots(1, len(periods), squeeze=False)[0]
    nodes = sorted({segment.node for period in periods for segment in period.segments})
    for axes, period in zip(panels, periods, strict=True):
        axes.imshow(
            np.searchsorted(nodes, period.cells(_PNG_CELLS)), ListedColormap([_colour(node) for node in nodes]),
            aspect="auto", interpolation="nearest", vmin=-0.5, vmax=len(nodes) - 0.5,
            extent=(0, period.columns, period.rows, 0),
        )  # fmt: skip
        axes.set(title=period.title, xlabel="k", ylabel="row")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    patches = [Patch(color=_colour(node), label=f"node {node}") for node in nodes]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(nodes))
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ArgumentError(
            f"--png: expected a file that can be written, got {path}: {error.strerror}"
        ) from error


def _colour(node: int) -> str:
    return _COLOURS[node % len(_COLOURS)]

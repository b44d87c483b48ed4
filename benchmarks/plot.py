"""Draw the JSON of `expertile bench --output bench.json`: share of the roofline by tokens, a line a shape or format.

python benchmarks/plot.py bench.json [picture.png]
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib import pyplot


def _lines(report: dict) -> Iterator[tuple[str, list[dict]]]:
    """A name for each line, and its calls."""
    for shape in report.get("shapes", ()):
        yield shape["name"], shape["calls"]
    for shape in report.get("formats", ()):
        for each in shape["formats"]:
            yield f"{shape['name']} {each['weights']}", each["calls"]


def plot(report: dict, picture: Path) -> None:
    """Write the picture; bars are quartiles."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, calls in _lines(report):
        shares = [call["share"] for call in calls]
        median = [share["median"] for share in shares]
        low = [share["median"] - share["low"] for share in shares]
        high = [share["high"] - share["median"] for share in shares]
        tokens = [call["tokens"] for call in calls]
        axes.errorbar(tokens, median, yerr=(low, high), marker="o", capsize=2, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens a call", ylabel="share of the roofline", ylim=(0, None))
    axes.set_xticks(tokens, map(str, tokens), minor=False)
    axes.minorticks_off()
    machine = report["machine"]
    axes.set_title(f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}")
    axes.legend()
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot(
        json.loads(source.read_text()),
        Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png"),
    )

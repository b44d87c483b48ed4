"""No cliff: the time of a call for every number of tokens, where each takes the tokens before and one more.

python benchmarks/monotone.py [--shape qwen3-30b-a3b] [--tokens 1:256:1] [--rounds 7] [--output monotone.json]

One routing is drawn for the largest batch; T tokens are its first T. Every round samples all T in a new random order,
a sample being at least 20 ms of calls; the time of a T is the median of its rounds. The worst drop is how much longer
than a call some smaller call takes: max over T of (max over T' < T of time(T')) / time(T) - 1. On machines whose speed
changes between rounds medians say as much about that: the same is given for the fastest round of each T as well. The
JSON and a picture are written; the picture needs `expertile[plots]`.

The same T uses the same experts every time, so calls take the layers of at least 2 GiB of weights in turn and rename
the experts each time round, to read what was used longest ago: nothing is found in a cache.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import expertile
from expertile._bench import Call, Shape, machine, shape_from, torch_threads
from expertile._bench.implementations import ours
from expertile._bench.protocol import inputs, steps
from expertile._bench.workload import Subject
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-16e", "qwen3-235b-32e")
FEWEST_ROUNDS = 7
JUMPS = 5
"""Reported of each shape."""


# Routing ------------------------------------------------------------------------------------------


def routing(shape: Shape, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids and router weights, `[tokens, k]`: independent uniform choices; experts are numbered as they first appear."""
    generator = torch.Generator().manual_seed(seed)
    router, ids = torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k)
    order = torch.tensor(list(dict.fromkeys(ids.flatten().tolist())))
    names = torch.zeros(shape.experts, dtype=torch.int64)
    names[order] = torch.arange(len(order))
    return names[ids], router.softmax(-1)


def calls(shape: Shape, layers: int, ids: Tensor, router: Tensor) -> list[Call]:
    """Calls with this routing: the layers in turn and, each time round, the experts that are next in number."""
    distinct = int(ids.max()) + 1  # they are numbered as they appear
    rounds = -(-shape.experts // distinct)
    return [
        Call(layer, (ids + turn * distinct) % shape.experts, router, distinct * shape.expert_bytes)
        for turn in range(rounds)
        for layer in range(layers)
    ]


# Measuring ----------------------------------------------------------------------------------------


def measure(
    shape: Shape,
    tokens: Sequence[int],
    *,
    rounds: int,
    gib: float,
    seed: int,
    progress: Callable[[float, float], None],
) -> Json:
    """The time of each number of tokens. `progress` is called with the seconds passed and those there will be."""
    subject = Subject.of(shape, gib)
    ids, router = routing(shape, max(tokens), seed)
    most = int(ids.flatten().bincount().max())
    expertile.compile(shape.spec(), range(1, most + 1))  # an expert's tokens come one by one
    x, run, layers = inputs(max(tokens), shape), ours(shape), subject.layers
    some = {t: calls(shape, len(layers), ids[:t], router[:t]) for t in tokens}
    probes = {t: Probe(steps(run, layers, some[t], x[:t])) for t in tokens}
    sample(probes, rounds, progress)
    times = {t: list(probe.step_seconds.values()) for t, probe in probes.items()}
    experts = {t: some[t][0].bytes // shape.expert_bytes for t in tokens}
    return {**subject.facts(), "seed": seed, "rounds": rounds, **summary(times, experts)}


def sample(probes: dict[int, Probe], rounds: int, progress: Callable[[float, float], None]) -> None:
    """All probes once to warm up, which tells how long the rest will take, then in rounds."""
    order, start = list(probes.values()), time.perf_counter()
    shuffle = random.Random(0)
    for number in range(-1, rounds):
        shuffle.shuffle(order)
        for done, probe in enumerate(order, 1):
            probe.sample(number)
            passed = time.perf_counter() - start
            part = (number + 1 + done / len(order)) / (rounds + 1)
            progress(passed, passed / part)
    for probe in order:
        del probe.rates[-1], probe.step_seconds[-1]


def summary(times: dict[int, list[float]], experts: dict[int, int]) -> Json:
    """Medians, quartiles, least in ms; worst drops and steepest steps. times: seconds by tokens, then round."""
    ms = {t: median(values) * 1e3 for t, values in times.items()}
    fastest = {t: min(values) * 1e3 for t, values in times.items()}
    low, high = {}, {}
    for t, values in times.items():
        low[t], _, high[t] = (1e3 * q for q in quantiles(values, n=4, method="inclusive"))
    return {
        "tokens": list(ms),
        "experts": [experts[t] for t in ms],
        "ms": list(ms.values()),
        "low": list(low.values()),
        "high": list(high.values()),
        "fastest": list(fastest.values()),
        "worst_drop": worst_drop(ms),
        "worst_drop_of_fastest": worst_drop(fastest),
        "jumps": jumps(ms, experts)[:JUMPS],
    }


def worst_drop(ms: dict[int, float]) -> Json:
    """Where a smaller call takes longest beside a larger one; the drop is below 0 if none takes as long."""
    slowest, worst = min(ms), {"drop": float("-inf"), "from": 0, "to": 0}
    for t in sorted(ms)[1:]:
        drop = ms[slowest] / ms[t] - 1
        if drop > worst["drop"]:
            worst = {"drop": drop, "from": slowest, "to": t}
        if ms[t] > ms[slowest]:
            slowest = t
    return worst


def jumps(ms: dict[int, float], experts: dict[int, int]) -> list[Json]:
    """Steps from one number of tokens to the next, steepest first: growth of the time beyond that of the experts."""
    sizes = sorted(ms)
    found = [
        {"from": t, "to": u, "jump": ms[u] / ms[t] / (experts[u] / experts[t]) - 1}
        for t, u in pairwise(sizes)
    ]
    return sorted(found, key=lambda step: step["jump"], reverse=True)


# Report -------------------------------------------------------------------------------------------


def table(shapes: Sequence[Json]) -> Table:
    """A line for each shape."""
    result = Table(title="no cliff", title_justify="left")
    for column in ("shape", "tokens", "rounds", "worst drop", "of the fastest", "steepest step"):
        result.add_column(column, justify="left" if column == "shape" else "right")
    for found in shapes:
        drop, fastest, step = found["worst_drop"], found["worst_drop_of_fastest"], found["jumps"][0]
        sizes = (drop["drop"], drop), (fastest["drop"], fastest), (step["jump"], step)
        result.add_row(
            found["name"], f"{found['tokens'][0]}–{found['tokens'][-1]}", str(found["rounds"]),
            *(f"{size:+.1%}\n{ends['from']} → {ends['to']}" for size, ends in sizes),
        )  # fmt: skip
    return result


def plot(report: Json, picture: Path) -> None:
    """Write the picture: a panel a shape, quartiles as a band, the fastest in black, the ends of the worst drop."""
    from matplotlib import pyplot

    shapes = report["shapes"]
    figure, panels = pyplot.subplots(
        len(shapes), figsize=(9, 3 * len(shapes)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, found in zip(panels.flat, shapes, strict=True):
        tokens, drop = found["tokens"], found["worst_drop"]
        axes.fill_between(tokens, found["low"], found["high"], alpha=0.3, linewidth=0)
        axes.plot(tokens, found["ms"], linewidth=1)
        axes.plot(tokens, found["fastest"], linewidth=1, color="black")
        ends = [drop["from"], drop["to"]]
        heights = [found["ms"][tokens.index(t)] for t in ends]
        axes.plot(ends, heights, "o", color="crimson", markersize=4)
        axes.set(ylabel="ms a call", ylim=(0, None))
        axes.set_title(f"{found['name']}: worst drop {drop['drop']:+.1%}", fontsize=10)
    panels[-1, 0].set_xlabel("tokens a call")
    machine = report["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}")
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


# The command --------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """first:last or first:last:step. Raises typer.BadParameter for anything else."""
    try:
        first, last, step = (*map(int, text.split(":")), 1)[:3]
    except ValueError:
        first = last = step = 0
    if not (1 <= first < last and step >= 1 and first + step <= last):
        raise typer.BadParameter(
            f"expected first:last or first:last:step, at least two numbers from 1; got {text!r}"
        )
    return list(range(first, last + 1, step))


def main(
    shape: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(SHAPES)}.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="first:last[:step], all included.")] = "1:256",
    rounds: Annotated[int, typer.Option(min=FEWEST_ROUNDS)] = FEWEST_ROUNDS,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: as PyTorch would use.")
    ] = None,
    gib: Annotated[float, typer.Option(help="GiB of weights to cycle over, at least.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the routing.")] = 0,
    output: Annotated[
        Path, typer.Option(help="The JSON; the picture goes beside it, as PNG.")
    ] = Path("monotone.json"),
) -> None:
    """Measure whether more tokens ever take less time."""
    console, sizes = Console(), numbers(tokens)
    shapes = [shape_from(text) for text in shape or SHAPES]
    count = threads or torch.get_num_threads()
    report: Json = {"machine": machine(count), "shapes": []}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with torch_threads(count), Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        for each in shapes:
            bar = bars.add_task(each.name, total=None)

            def show(passed: float, expected: float, bar: Any = bar) -> None:
                bars.update(bar, completed=passed, total=expected)

            found = measure(each, sizes, rounds=rounds, gib=gib, seed=seed, progress=show)
            report["shapes"].append(found)
            output.write_text(json.dumps(report, indent=1) + "\n")  # each shape takes minutes
    console.print(table(report["shapes"]))
    plot(report, output.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

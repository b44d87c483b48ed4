"""From samples to numbers: shares of the roofline, speed-ups within rounds, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from peers.measure import OURS, Group, Plan, Result, Series

Json = dict[str, Any]

_DISTURBED_CORES = 0.1


def summary(name: str, plan: Plan, result: Result) -> Json:
    """Everything about a shape, as JSON."""
    size = plan.size
    rows = [
        _row(plan, tokens, implementation, result)
        for tokens in plan.tokens
        for implementation in _implementations(result, tokens)
    ]
    ceilings = [
        (each["reads"][group.read], each["peak"])
        for group in result.groups for each in group.ceilings.values()
    ]  # fmt: skip
    return {
        "name": name,
        "hidden": size.hidden,
        "intermediate": size.intermediate,
        "experts": size.experts,
        "top_k": size.top_k,
        "weights": size.weights,
        "layers": plan.layers,
        "weight_bytes": plan.layers * size.layer_bytes,
        "groups": [sorted({series.name for series in group.series}) for group in result.groups],
        "read": [group.read for group in result.groups],
        "read_gb_per_s": _spread(read / 1e9 for read, _ in ceilings),
        "peak_tflops": _spread(peak / 1e12 for _, peak in ceilings),
        "kernels": {
            peer: {name: kernel.get(name) for name in ("kernel", "torch", "peak_memory_bytes")}
            for peer, kernel in result.kernels.items()
        },
        "cores_used_by_others": result.others,
        "failed": result.failed,
        "skipped": result.skipped,
        "results": rows,
        "best": list(_best(plan.tokens, rows)),
    }


def _implementations(result: Result, tokens: int) -> list[str]:
    """Expertile first."""
    found = [s.name for group in result.groups for s in group.series if s.tokens == tokens]
    return sorted(dict.fromkeys(found), key=lambda name: name != OURS)


@dataclass(frozen=True)
class _Sample:
    """A sample of an implementation and what else its round says."""

    seconds: float
    """A call."""
    rate: float
    """Bytes of experts a second."""
    memory: float
    """Share of what can be read."""
    compute: float
    """Share of the operations that can be done."""
    ratio: float | None
    """How many times the bytes a second Expertile reached."""


def _row(plan: Plan, tokens: int, implementation: str, result: Result) -> Json:
    """One implementation at one size; Expertile was measured in every group."""
    operations = plan.size.operations(tokens)
    samples: list[_Sample] = []
    errors: list[float] = []
    for group in result.groups:
        series = _series(group, implementation, tokens)
        if series is not None:
            errors.append(series.error)
            samples += _samples(group, series, operations)
    ratios = [each.ratio for each in samples if each.ratio is not None]
    memory_bound = sum(each.memory >= each.compute for each in samples)
    return {
        "tokens": tokens,
        "implementation": implementation,
        "ms": _spread(1e3 * each.seconds for each in samples),
        "gb_per_s": _spread(each.rate / 1e9 for each in samples),
        "tflops": _spread(operations / each.seconds / 1e12 for each in samples),
        "bound": "memory" if 2 * memory_bound > len(samples) else "compute",
        "share": _spread(max(each.memory, each.compute) for each in samples),
        "speedup": _spread(ratios) if ratios else None,
        "error": max(errors),
    }


def _samples(group: Group, series: Series, operations: int) -> Iterator[_Sample]:
    ours, read = _series(group, OURS, series.tokens), group.read
    for number, sample in series.samples.items():
        ceilings = group.ceilings[series.tokens, number]
        seconds, rate = sample["seconds"] / sample["calls"], sample["bytes"] / sample["seconds"]
        own = ours.samples[number] if ours else None
        yield _Sample(
            seconds=seconds,
            rate=rate,
            memory=rate / ceilings["reads"][read],
            compute=operations / seconds / ceilings["peak"],
            ratio=own["bytes"] / own["seconds"] / rate if own else None,
        )


def _series(group: Group, name: str, tokens: int) -> Series | None:
    return next((s for s in group.series if (s.name, s.tokens) == (name, tokens)), None)


def _best(tokens: Iterable[int], rows: list[Json]) -> Iterator[Json]:
    """By size, the peer that Expertile is the least ahead of."""
    for count in tokens:
        peers = [
            row for row in rows
            if row["tokens"] == count and row["implementation"] != OURS and row["speedup"]
        ]  # fmt: skip
        if peers:
            best = min(peers, key=lambda row: row["speedup"]["median"])
            name, speedup = best["implementation"], best["speedup"]
            yield {"tokens": count, "implementation": name, "speedup": speedup}


def _spread(values: Iterable[float]) -> Json:
    """Median and quartiles."""
    found = list(values)
    low, median, high = (
        statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    )
    return {"median": median, "low": low, "high": high, "rounds": len(found)}


def tables(shape: Json) -> Iterator[Table | str]:
    """A shape's results to print: all of them, then Expertile against the best of the others."""
    sizes = " × ".join(str(shape[name]) for name in ("hidden", "intermediate", "experts"))
    read, peak = shape["read_gb_per_s"]["median"], shape["peak_tflops"]["median"]
    yield _everything(
        f"{shape['name']}: {sizes}, top-{shape['top_k']}, {shape['weights']}, {shape['layers']} layers\n"
        f"roofline {read:.1f} GB/s ({', '.join(dict.fromkeys(shape['read']))}), {peak:.3f} TFLOP/s",
        shape["results"],
    )
    if shape["best"]:
        title = f"{shape['name']}, {shape['weights']}: expertile against the best peer"
        yield _against_best(title, shape)
    others = shape["cores_used_by_others"]
    if others is not None and others > _DISTURBED_CORES:
        yield f"disturbed: other processes kept {others:.2f} cores busy"
    for peer, kernel in shape["kernels"].items():
        yield f"{peer}: {kernel['kernel']}, torch {kernel['torch']}"
    for peer, reason in shape["failed"].items():
        yield f"{peer} is missing: {reason}"
    for skip in shape["skipped"]:
        yield f"{skip['implementation']}, {skip['tokens']} tokens: {skip['reason']}"


def _everything(title: str, rows: list[Json]) -> Table:
    """As wide as a terminal; the JSON has the rest. The speed-up is Expertile's over that row."""
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "implementation", "ms", "bound", "share", "speed-up", "error"):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before["tokens"] != row["tokens"]:
            table.add_section()
        ours = row["implementation"] == OURS
        table.add_row(
            str(row["tokens"]),
            row["implementation"],
            f"{row['ms']['median']:.2f}",
            row["bound"],
            f"{row['share']['median']:.1%}",
            "" if ours or row["speedup"] is None else _times(row["speedup"]),
            f"{row['error']:.1e}",
            style="bold" if ours else None,
        )
    return table


def _against_best(title: str, shape: Json) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "best peer", "speed-up (quartiles)"):
        table.add_column(column, justify="left" if column == "best peer" else "right")
    for row in shape["best"]:
        speedup = row["speedup"]
        quartiles = f"{_times(speedup)} ({speedup['low']:.2f}–{speedup['high']:.2f})"
        table.add_row(str(row["tokens"]), row["implementation"], quartiles)
    return table


def _times(speedup: Json) -> str:
    return f"{speedup['median']:.2f}×"

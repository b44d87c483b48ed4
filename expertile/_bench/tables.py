"""Reports as tables."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from rich.table import Table

Json = dict[str, Any]

_DISTURBED_CORES = 0.1
_MOST_THREADS = 8
"""Listed one by one."""


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _title(found: Json, *more: str) -> str:
    """The shape, the ceilings it was measured against, and whether anybody else was at work meanwhile."""
    read = f"read {_bandwidth(found):.1f} GB/s ({found['read']['best']})"
    ceilings = ", ".join((read, *more))
    return "\n".join(
        (f"{_layer(found)}, {found['layers']} layers", ceilings, *filter(None, [_disturbed(found)]))
    )


def _layer(found: Json) -> str:
    sizes = " × ".join(str(found[name]) for name in ("hidden", "intermediate", "experts"))
    weights = "" if found["weights"] == "bf16" else f", {found['weights']}"
    return f"{found['name']}: {sizes}, top-{found['top_k']}{weights}"


def _bandwidth(found: Json) -> float:
    read = found["read"]
    bandwidth: float = read["gb_per_s"][read["best"]]["median"]
    return bandwidth


def _disturbed(found: Json) -> str | None:
    busy = found["cores_used_by_others"]
    if busy is None or busy <= _DISTURBED_CORES:
        return None
    return f"disturbed: other processes kept {busy:.2f} cores busy"


def _percent(share: Json) -> str:
    return f"{share['median']:.1%} ({share['low']:.0%}–{share['high']:.0%})"


def _times(ratio: Json) -> str:
    return f"{ratio['median']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def machine_table(found: Json) -> Table:
    """What the numbers were taken on."""
    table = _table("machine", "", "")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return table


def shape_tables(found: Json) -> Iterator[Table | str]:
    """`protocol.measure`."""
    title = _title(found, f"peak {found['peak_tflops']['median']:.3f} TFLOP/s")
    table = _table(
        title, "tokens", "ms", "GB/s", "TFLOP/s", "bound", "share of roofline (quartiles)"
    )
    for row in found["calls"]:
        numbers = [
            f"{row[name]['median']:.{digits}f}"
            for name, digits in (("ms", 2), ("gb_per_s", 1), ("tflops", 3))
        ]
        table.add_row(str(row["tokens"]), *numbers, row["bound"], _percent(row["share"]))
    yield table
    if found["peers"]:
        columns = ("tokens", "implementation", "ms", "speed-up (quartiles)")
        table = _table(f"{found['name']} beside others", *columns)
        for row in found["peers"]:
            time = f"{row['ms']['median']:.2f}"
            table.add_row(str(row["tokens"]), row["name"], time, _times(row["speedup"]))
        yield table
    for name, why in found["absent_peers"].items():
        yield f"{name} {why}"


def format_tables(found: Json) -> Iterator[Table | str]:
    """`formats.measure`."""
    caption = (
        "For each number of tokens the share of the roofline over the format's own bytes (c: operations set it, not "
        "memory) and the speed-up over bf16 in the same rounds; bf16 itself: the median of all of those. bits: of a "
        "weight, scales included."
    )
    every = found["formats"]
    if every:
        tokens = [str(call["tokens"]) for call in every[0]["calls"]]
        table = _table(_layer(found), "weights", "bits", "GB/s", *tokens, caption=caption)
        table.add_row("bf16", "16.00", "", *map(_bf16, *(each["calls"] for each in every)))
        for each in every:
            bits = 8 * each["expert_bytes"] / (3 * found["hidden"] * found["intermediate"])
            cells = (f"{_share(call)}\n{call['speedup']['median']:.2f}×" for call in each["calls"])
            table.add_row(each["weights"], f"{bits:.2f}", f"{_bandwidth(each):.1f}", *cells)
        yield table
    for each in every:
        if note := _disturbed(each):
            yield f"{each['weights']} {note}"
    for name, why in found["absent_formats"].items():
        yield f"{name}: {why}"


def _share(call: Json) -> str:
    return f"{call['share']['median']:.1%}" + ("c" if call["bound"] == "compute" else "")


def _bf16(*calls: Json) -> str:
    return f"{median(call['bf16']['share']['median'] for call in calls):.1%}"


def profile_tables(found: Json) -> Iterator[Table]:
    """`profiles.measure`."""
    caption = (
        "Times in ms, of each thread. barrier: waiting for the others, or to be woken before it gathers. fetch: what "
        "its weight bytes take at its share of the read bandwidth; a thread busy for much longer is not limited by "
        "memory. max/avg: of busy. idle: share of the threads' time; beside route, of the whole call."
    )
    columns = ("tokens", "call", "pass", "busy", "barrier", "fetch", "max/avg", "idle")
    table = _table(_title(found), *columns, caption=caption)
    for batch in found["batches"]:
        name = batch["batch"]
        label = name if name == str(batch["tokens"]) else f"{batch['tokens']} {name}"
        time, idle = f"{batch['ms']['median']:.2f}", f"{batch['idle']['median']:.1%}"
        table.add_row(label, time, "route", f"{batch['route_ms']:.2f}", "", "", "", idle)
        for number, row in enumerate(batch["passes"]):
            times = [_by_thread(row, name) for name in ("busy_ms", "barrier_ms", "fetch_ms")]
            shares = f"{row['imbalance']['median']:.2f}", f"{row['idle']['median']:.1%}"
            last = number + 1 == len(batch["passes"])
            table.add_row("", "", row["pass"], *times, *shares, end_section=last)
    yield table


def _by_thread(row: Json, name: str) -> str:
    values = [thread[name] for thread in row["threads"]]
    if len(values) <= _MOST_THREADS:
        return " ".join(f"{value:.2f}" for value in values)
    return f"{min(values):.2f}–{max(values):.2f}"


def reuse_tables(found: Json) -> Iterator[Table]:
    """`reuse.measure`."""
    caption = (
        "model: the weights of the distinct experts at the read bandwidth; share: model over measured. "
        "off: token-major, every token a call of its own, which reads its experts anew. reuse: tokens · top-k / "
        "experts, the speed-up if memory were all."
    )
    columns = ("tokens", "experts", "ms", "model ms", "share", "off ms", "speed-up", "reuse")
    table = _table(_title(found), *columns, caption=caption)
    for row in found["calls"]:
        on, model, off = (
            f"{row[name]['median']:.2f}" for name in ("ms", "model_ms", "token_major_ms")
        )
        experts, share = f"{row['distinct_experts']:.1f}", f"{row['share_of_read']['median']:.1%}"
        gain = _times(row["speedup"]), f"{row['reuse']:.2f}×"
        table.add_row(str(row["tokens"]), experts, on, model, share, off, *gain)
    yield table


def host_table(found: Json) -> Table:
    """`fresh.host`."""
    table = _table("fresh processes", "", "measured")
    stall = max(found["new_rows_cold_s"].values())
    for name, value in (
        ("import, beyond torch's", f"{found['import_s']:.3f} s"),
        ("first call, cold cache", f"{found['first_call_cold_s']:.3f} s"),
        ("first call, warm cache", f"{found['first_call_warm_s']:.3f} s"),
        ("a new row count, cold, at most", f"{stall:.3f} s"),
        ("overhead of a call", f"{found['overhead_us']:.1f} µs"),
        ("compiled by the first process", str(found["compiled_cold"])),
        ("compiled by the next", str(found["compiled_warm"])),
    ):
        table.add_row(name, value)
    return table

"""`expertile numa`: the memory nodes of this machine, and what the schedule makes of a model on several nodes.

docs/numa.md says what the words mean.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table

from expertile import _numa_picture
from expertile._bench import MODELS, SHAPES, numbers_from, shape_from
from expertile._numa_models import PAGE_BYTES, Stack, overview, stacks, study
from expertile._numa_picture import Period
from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import pages, traffic
from expertile.runtime.numa import topology as topologies
from expertile.runtime.numa.pages import Policy
from expertile.runtime.numa.topology import Topology
from expertile.templates import formats

Json = dict[str, Any]

NODES = (2, 4, 8)
_MOST_NODES = 1024  # as many as Linux knows
_LISTED_ROWS = 8


def command(
    model: Annotated[
        str | None,
        typer.Option(help=f"A layer: HxIxExk, or one of {', '.join(SHAPES)}."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A table of all public models.")] = False,
    nodes: Annotated[
        str | None,
        typer.Option(help=f"Memory nodes. Default: 2; with --all {','.join(map(str, NODES))}."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weight format. Default: the public checkpoint's; with --all, all."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens a call, for the expected times.")] = "1,16,64",
    local: Annotated[
        float | None, typer.Option(help="GB/s a node's threads read from its own memory.")
    ] = None,
    remote: Annotated[
        float | None, typer.Option(help="GB/s they read from the others': both as measured.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a picture of one period.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show this machine's memory nodes; with --model or --all, what is read from which node and how fast.

    A model's weights are taken to be spread over the nodes page by page. T is the number of rows after which it repeats
    which part of a row is on which node. Remote bytes are those that threads of another node read.
    """
    out = Console(quiet=as_json)
    if model is None and (png is not None or local is not None or remote is not None):
        raise ArgumentError("--png, --local, --remote: expected --model as well")
    if model is not None and every:
        raise ArgumentError("--model, --all: expected one of them, got both")
    report: Any
    if model is not None:
        report = _model(out, model, weights, _one(nodes), numbers_from(tokens), local, remote, png)
    elif every or nodes is not None:
        counts = [_checked(count) for count in numbers_from(nodes)] if nodes else NODES
        report = overview(MODELS.values(), _formats(weights), counts)
        _show(out, _overview_tables(report))
    else:
        found, calls = topologies.read(), _calls()
        derived = {"memory_nodes": found.memory_nodes, "threads": found.threads, "calls": calls}
        report = asdict(found) | derived
        _show(out, _topology_tables(found, calls))
    if as_json:
        print(json.dumps(report, indent=1))


def _show(out: Console, parts: Iterable[RenderableType]) -> None:
    for part in parts:
        out.print(part, highlight=False)


def _table(*columns: str, left: int = 1) -> Table:
    """Columns of numbers, after some of names."""
    table = Table()
    for number, name in enumerate(columns):
        side: JustifyMethod = "left" if number < left else "right"
        table.add_column(name, justify=side, overflow="fold", no_wrap=number == 0)
    return table


def _one(nodes: str | None) -> int:
    counts = numbers_from(nodes or "2")
    if len(counts) != 1:
        raise ArgumentError(f"--nodes: expected one number with --model, got {nodes}")
    return _checked(counts[0])


def _checked(count: int) -> int:
    if count > _MOST_NODES:
        raise ArgumentError(f"--nodes: expected at most {_MOST_NODES}, got {count}")
    return count


def _formats(weights: str | None) -> list[str]:
    known = ["bf16", *formats.names()]
    names = known if weights is None else [name.strip() for name in weights.split(",")]
    for name in names:
        if name not in known:
            raise ArgumentError(f"--weights: expected one of {', '.join(known)}, got {name!r}")
    return names


# This machine ---------------------------------------------------------------------------------------------------------


def _calls() -> dict[str, bool]:
    """Whether this process may use the system calls that memory nodes take, which a container can forbid one by one."""
    with warnings.catch_warnings(), mmap(-1, pages.PAGE_BYTES) as memory:
        warnings.simplefilter("ignore")  # that one is refused is the answer
        view = ctypes.c_char.from_buffer(memory)
        page = ctypes.addressof(view), pages.PAGE_BYTES
        found = {
            "move_pages": pages.where(*page) is not None,
            "mbind": pages.bind(*page, Policy(pages.DEFAULT)),
            "sched_setaffinity": pages.set_affinity(pages.affinity()),
        }
        del view  # or the mapping could not be closed
    return found


def _topology_tables(found: Topology, calls: dict[str, bool]) -> Iterator[RenderableType]:
    table = _table("node", "CPUs", "socket", "memory", "free", "distances", left=3)
    for node, distances in zip(found.nodes, found.distances, strict=True):
        table.add_row(
            str(node.number),
            _ranges(node.cpus) or "none",
            _ranges(node.sockets) or "none",
            _size(node.memory) + ("" if node.allowed else "\nnot for this process"),
            _size(node.free),
            " ".join(map(str, distances)),
        )
    yield table
    notes = Table.grid(padding=(0, 2))
    notes.add_row("threads", _threads(found))
    notes.add_row("schedule", schedule(found))
    usable = (f"{name} {'✓' if works else '✗ refused'}" for name, works in calls.items())
    notes.add_row("system calls", ", ".join(usable))
    yield notes


def _threads(found: Topology) -> str:
    count = f"{found.threads} at once; CPUs that this process may use: {len(found.cpus)}"
    return count if found.quota is None else f"{count}, for {found.quota:g} CPUs' time"


def schedule(found: Topology) -> str:
    """Whether weights are read node by node on such a machine, and why not."""
    if os.environ.get("EXPERTILE_NUMA") == "off":
        return "off: EXPERTILE_NUMA says so"
    if len(found.memory_nodes) < 2:
        return "not needed: one memory node, nothing is remote"
    if len(found.cpu_nodes) < 2:
        return "not possible: this process may use CPUs of one node only"
    return "used: each node's threads read the weights that are on it"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as in 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# One model ------------------------------------------------------------------------------------------------------------


def _model(
    out: Console,
    name: str,
    weights: str | None,
    nodes: int,
    tokens: Sequence[int],
    local: float | None,
    remote: float | None,
    png: Path | None,
) -> Json:
    """Study a model, show it and draw it."""
    shape = shape_from(name)
    named = _formats(weights or shape.native)
    if len(named) > 1:
        raise ArgumentError(f"--weights: expected one format with --model, got {weights}")
    shape = shape.in_format(named[0])
    machines = [*traffic.PUBLIC, *_measured(nodes, local, remote)]
    report = study(shape, nodes, tokens, machines)
    periods = [_period(stack, nodes) for stack in stacks(shape)]
    if png is not None:
        _numa_picture.save(periods, png)
    _show(out, _model_parts(report, periods))
    if png is not None:
        out.print(f"\n{png} written", soft_wrap=True)
    return report


def _measured(nodes: int, local: float | None, remote: float | None) -> list[traffic.Machine]:
    if local is None and remote is None:
        return []
    if local is None or remote is None:
        raise ArgumentError("--local, --remote: expected both")
    return [traffic.Machine("as measured", nodes, local, remote)]


def _period(stack: Stack, nodes: int) -> Period:
    title = (
        f"{_label(stack.role)}: {stack.rows} rows × {stack.columns}, {stack.memory.code_bytes} bytes a row: "
        f"T = {stack.period(nodes)}"
    )
    return Period(title, stack.columns, stack.memory.code_bytes, stack.segments(nodes))


def _label(role: str) -> str:
    return role.replace("_", "/")


def _model_parts(report: Json, periods: Iterable[Period]) -> Iterator[RenderableType]:
    sizes = " × ".join(str(report[key]) for key in ("hidden", "intermediate", "experts"))
    yield (
        f"[bold]{report['name']}[/], {report['weights']}, {sizes}; pages of {PAGE_BYTES} bytes in turn on "
        f"{report['nodes']} node{'s' if report['nodes'] > 1 else ''}"
    )
    for role, period in zip(report["roles"], periods, strict=True):
        yield f"\n[bold]{period.title}[/]"
        yield _segments_table(role)
        yield from _numa_picture.lines(period)
    yield "\n[bold]Bytes of a layer, all experts[/]; remote: read by threads of another node"
    yield _bytes_table(report)
    yield "\n[bold]Expected ms to read the weights of a call[/], without the schedule and with it"
    yield _expected_table(report["machines"])
    yield (
        "GB/s: what a node's threads read from its memory, and from the others'. Ranges: local and remote reads at the "
        "same time, or in turns. Uniformly random routing; reading alone."
    )


def _segments_table(role: Json) -> Table:
    """Which k's of the first rows are on which node."""
    rows: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in role["segments"]:
        rows[each["row"]][each["node"]].append(f"{each['first']}–{each['end'] - 1}")
    table = _table("row mod T", "k", left=2)
    for row in list(rows)[:_LISTED_ROWS]:
        lines = (f"node {node}: {', '.join(ks)}" for node, ks in rows[row].items())
        table.add_row(str(row), "\n".join(lines))
    if len(rows) > _LISTED_ROWS:
        table.add_row("…", f"{len(rows) - _LISTED_ROWS} more, all of them in --json")
    return table


def _bytes_table(report: Json) -> Table:
    """What is remote of a layer."""
    elsewhere = (report["nodes"] - 1) / report["nodes"]
    table = _table("", "bytes", "remote without", "remote with the schedule")
    for role in report["roles"]:
        codes, scales = role["code_bytes"], role["scale_bytes"]
        name, without = _label(role["role"]), f"{codes * elsewhere:,.0f}"
        table.add_row(f"{name} codes", f"{codes:,}", without, f"{role['remote_code_bytes']:,}")
        if scales:  # in tensors of their own
            far = f"{scales * elsewhere:,.0f}"
            table.add_row(f"{name} scales", f"{scales:,}", far, far)
    return table


def _expected_table(machines: Sequence[Json]) -> Table:
    """What the traffic model expects of each machine."""
    table = _table("machine, GB/s", "tokens", "ms without", "ms with", "remote", "gain")
    table.box, table.pad_edge, table.collapse_padding = SIMPLE_HEAD, False, True
    for machine in machines:
        name = f"{machine['name']}\n{machine['local']:g}, {machine['remote']:g}"
        gain = f"{_span(machine['gain'], '.2f')}×"
        for call in machine["calls"]:
            times = (_span(call[key], ".3g") for key in ("without_ms", "with_ms"))
            before, after = call["without_remote_share"], call["with_remote_share"]
            table.add_row(name, str(call["tokens"]), *times, f"{before:.0%} → {after:.1%}", gain)
            name = gain = ""
    return table


def _span(ends: Sequence[float], digits: str) -> str:
    low, high = (format(end, digits) for end in ends)
    return low if low == high else f"{low}–{high}"


# All models -----------------------------------------------------------------------------------------------------------


def _overview_tables(report: Sequence[Json]) -> Iterator[RenderableType]:
    """A table for each number of nodes, with a column for formats whose codes lie alike, and one of scales."""
    present = [row for row in report if "absent" not in row]
    names = list(dict.fromkeys(row["weights"] for row in report))
    columns: dict[str, list[str]] = defaultdict(list)
    for name in names:
        columns[_layout(name)].append(name)
    for nodes in dict.fromkeys(row["nodes"] for row in present):
        yield (
            f"[bold]{nodes} nodes[/]: T of gate/up and of down; remote bytes of the codes with the schedule: "
            "0, or their share"
        )
        table = _table("model", *columns)
        for model in dict.fromkeys(row["model"] for row in report):
            here = {
                row["weights"]: row
                for row in present
                if (row["model"], row["nodes"]) == (model, nodes)
            }
            table.add_row(model, *(_cell(here, group) for group in columns.values()))
        yield table
        for title, group in columns.items():
            if group != [title]:
                yield f"{title}: {', '.join(group)}"
        yield ""
    yield (
        "[bold]Scales[/] in tensors of their own: share of the weights' bytes. They are read from wherever they are, "
        "so that (N - 1)/N of them are remote."
    )
    yield _scales_table(present, names)


def _layout(name: str) -> str:
    """What formats have in common whose codes lie alike: the bits of an element, or blocks of their own."""
    if name == "bf16":
        return name
    scheme = formats.resolve(name)
    bits = 8 * scheme.code_bytes(scheme.block) / scheme.block
    return f"{bits:g} bits" if bits in (4, 8) else name


def _cell(rows: Json, group: Iterable[str]) -> str:
    row = next((rows[name] for name in group if name in rows), None)
    if row is None:
        return "–"
    periods = ", ".join(str(role["period"]) for role in row["roles"])
    codes, remote = _sums(row, "code_bytes", "remote_code_bytes")
    return f"{periods}\n{f'{remote / codes:.2%}' if remote else 0}"


def _sums(row: Json, *names: str) -> Iterator[int]:
    """Over both projections."""
    return (sum(role[name] for role in row["roles"]) for name in names)


def _scales_table(present: Sequence[Json], names: Sequence[str]) -> Table:
    """How much of the weights are scales, from the model that has least of them to the one that has most."""
    shares: dict[str, list[float]] = defaultdict(list)
    for row in present:
        codes, scales = _sums(row, "code_bytes", "scale_bytes")
        shares[row["weights"]].append(scales / (codes + scales))
    table = _table("format", "share")
    for name in names:
        if any(shares[name]):
            table.add_row(name, _span((min(shares[name]), max(shares[name])), ".2%"))
    return table


def _size(count: int) -> str:
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << size:
            return f"{count / (1 << size):.4g} {unit}"
    return str(count)

"""The command `expertile bench`."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType

import expertile
from expertile._bench import formats, fresh, profiles, protocol, reuse, tables
from expertile._bench.implementations import peers
from expertile._bench.shapes import DEFAULT_SHAPES, Shape, shape_from
from expertile._bench.workload import numbers_from
from expertile.codegen import cpu
from expertile.codegen import isa as isas

Json = dict[str, Any]

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
PEER_SHAPE = "qwen3-30b-a3b"


def machine(threads: int) -> Json:
    """What the numbers were taken on."""
    return {
        "cpu": cpu.model_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
        "threads": threads,
        "isa": isas.select().name,
        "torch": torch.__version__,
        "expertile": expertile.__version__,
    }


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch's number of threads, which is Expertile's, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A known shape, or HxIxExk. Repeatable; default: {', '.join(DEFAULT_SHAPES)}."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens a call. Default: {_listed(TOKENS)}; with --reuse {_listed(reuse.REUSE_TOKENS)}."
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Weight formats: one or several, or all; bf16 runs beside each.")
    ] = "bf16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: as PyTorch would use.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on sampling, about.")] = 100.0,
    gib: Annotated[float, typer.Option(help="GiB of weights to cycle over, at least.")] = 2.0,
    with_profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Measure where the time goes instead: busy, barrier, fetch a thread."
        ),
    ] = False,
    with_reuse: Annotated[
        bool,
        typer.Option(
            "--reuse",
            help="Measure instead what reading each expert once gains "
            f"(default shapes: {' and '.join(reuse.REUSE_SHAPES)}).",
        ),
    ] = False,
    with_peers: Annotated[
        bool,
        typer.Option(
            "--peers/--no-peers", help=f"Run other implementations beside ours on {PEER_SHAPE}."
        ),
    ] = True,
    with_host: Annotated[
        bool, typer.Option("--host/--no-host", help="Measure import, first call, overhead.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
) -> None:
    """Measure layer calls against the machine's own roofline."""
    console = Console(stderr=as_json, quiet=as_json and not sys.stderr.isatty())
    given = numbers_from(tokens) if tokens else None
    names = formats.formats_from(weights)
    quantised = [name for name in names if name != "bf16"]
    shapes = [shape_from(text) for text in shape or DEFAULT_SHAPES]
    count = threads or torch.get_num_threads()
    report: Json = {"machine": machine(count)}
    console.print(tables.machine_table(report["machine"]))
    part: Json = {"gib": gib, "threads": count}
    with torch_threads(count):
        if with_profile:
            measure = partial(profiles.measure, tokens=given or TOKENS, **part)
            chosen = _in_formats(shapes, names)
            report["profiles"] = _each(console, chosen, measure, tables.profile_tables, seconds)
        if with_reuse:
            measure = partial(reuse.measure, tokens=given or reuse.REUSE_TOKENS, **part)
            chosen = shapes if shape else [shape_from(text) for text in reuse.REUSE_SHAPES]
            chosen = _in_formats(chosen, names)
            report["reuse"] = _each(console, chosen, measure, tables.reuse_tables, seconds)
        question = with_profile or with_reuse
        if quantised and not question:
            sizes = given or formats.FORMAT_TOKENS
            measure = partial(formats.measure, tokens=sizes, weights=quantised, **part)
            report["formats"] = _each(console, shapes, measure, tables.format_tables, seconds)
        elif not question:
            others = peers() if with_peers else {}

            def beside(each: Shape, seconds: float) -> Json:
                present = others if each.name == PEER_SHAPE else {}
                return protocol.measure(
                    each, given or TOKENS, others=present, seconds=seconds, **part
                )

            report["shapes"] = _each(console, shapes, beside, tables.shape_tables, seconds)
    if with_host and not (question or quantised):
        with console.status("measuring fresh processes"):
            report["host"] = fresh.host()
        console.print(tables.host_table(report["host"]))
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        print(text)


def _in_formats(shapes: Sequence[Shape], weights: Sequence[str]) -> list[Shape]:
    return [shape.in_format(name) for shape in shapes for name in weights]


def _each(
    console: Console,
    shapes: Sequence[Shape],
    measure: Callable[..., Json],
    show: Callable[[Json], Iterable[RenderableType]],
    seconds: float,
) -> list[Json]:
    """Measure the shapes one after another, for equal parts of `seconds`, and show what was found."""
    found = []
    for shape in shapes:
        with console.status(f"measuring {shape.name}"):
            found.append(measure(shape, seconds=seconds / len(shapes)))
        for table in show(found[-1]):
            console.print(table)
    return found

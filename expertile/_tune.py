"""`expertile tune`: measure which kernel variants are fastest on this machine, and keep what was found.

docs/tuning.md says what is measured and how.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from expertile._bench import SHAPES, W8A8, Shape, machine, numbers_from, shape_from, torch_threads
from expertile.codegen import isa as isas
from expertile.codegen.cache import default_cache
from expertile.runtime import openmp, tuning
from expertile.runtime.choice import Size
from expertile.runtime.errors import ArgumentError
from expertile.runtime.tuning import Result
from expertile.templates import formats
from expertile.templates.kernel import ExpertKernel

Json = dict[str, Any]


def command(
    shape: Annotated[
        list[str], typer.Option(help=f"HxIxExk, or one of {', '.join(SHAPES)}. Repeatable.")
    ],
    rows: Annotated[
        str | None,
        typer.Option(help="Tokens an expert. Default: a dozen sizes, from 1 to 8 full blocks."),
    ] = None,
    gate: Annotated[str | None, typer.Option(help="Default: the shape's.")] = None,
    weights: Annotated[
        str, typer.Option(help=f"Weight format: bf16, {', '.join(formats.names())}, {W8A8}.")
    ] = "bf16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: as a layer would use.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time to measure for, about; compiling comes on top.")
    ] = 120.0,
    candidates: Annotated[
        int, typer.Option(help="Of a projection and a size, at most; at least 2.")
    ] = 10,
    gib: Annotated[float, typer.Option(help="GiB of weights to cycle over, at least.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the JSON to a file as well.", dir_okay=False)
    ] = None,
) -> None:
    """Measure which kernel variants are fastest for a layer shape, and keep them for later processes.

    Results hold for this machine, and for all layers of these widths with the same gate, biases and weight format. They
    change how fast a layer is, never what it computes.
    """
    shapes = [_with_gate(shape_from(text), gate).in_format(weights) for text in shape]
    specs = [each.spec() for each in shapes]
    sizes = (
        None if rows is None else tuning.sizes_of(numbers_from(rows), isas.select().block_tokens)
    )
    count = threads or openmp.threads()
    if count > 1 and openmp.runtime() is None:
        raise ArgumentError(f"--threads: expected 1, as no OpenMP runtime is loaded, got {count}")
    if output is not None and not output.parent.is_dir():
        raise ArgumentError(f"--output: expected a directory that exists, got {output.parent}")
    out, err = Console(quiet=as_json), Console(stderr=True)
    report: Json = {"machine": machine(count), "shapes": []}
    for each, spec in zip(shapes, specs, strict=True):
        with torch_threads(count), _bar(each, err) as advance:
            results = tuning.tune(
                spec, sizes, seconds=seconds / len(shapes), candidates=candidates, gib=gib,
                progress=advance,
            )  # fmt: skip
        report["shapes"].append({**asdict(each), "results": [_as_json(r) for r in results]})
        out.print(_table(each, results))
    report["cache"] = _cache()
    out.print(_note(report["cache"]), soft_wrap=True)
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        sys.stdout.write(text + "\n")


def _with_gate(shape: Shape, gate: str | None) -> Shape:
    return shape if gate is None else replace(shape, gate=gate)


@contextmanager
def _bar(shape: Shape, console: Console) -> Iterator[Callable[[Size, float], None]]:
    """A progress bar; yields what to tell it."""
    # Drawn between rounds only: a thread that draws would take time from what is measured.
    with Progress(
        console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"tuning {shape.name}", total=1.0)

        def advance(size: Size, done: float) -> None:
            text = f"tuning {shape.name}: {_amount(size)} an expert"
            bar.update(task, description=text, completed=done, refresh=True)

        yield advance


def _amount(size: Size) -> str:
    tokens, blocks = size
    if blocks > 1:
        return f"{blocks} × {tokens} tokens"
    return f"{tokens} token{'s' if tokens > 1 else ''}"


def _as_json(result: Result) -> Json:
    tokens, blocks = result.size
    return {
        "tokens": tokens,
        "blocks": blocks,
        "projection": result.projection,
        "predicted": result.predicted.variant.name,
        "rival": result.rival and result.rival.variant.name,
        "gain": {"median": result.gain, "low": result.low, "high": result.high},
        "best": result.best.variant.name,
        "candidates": result.candidates,
        "rounds": result.rounds,
    }


def _table(shape: Shape, results: Iterable[Result]) -> Table:
    table = Table(
        title=f"{shape.name}, {shape.weights}: the predicted best variant and the fastest other (kept ones are bold)\n"
        "gain: time of the one over that of the other, median (quartiles)",
        title_justify="left",
    )
    for name in ("an expert", "projection", "predicted", "fastest other"):
        table.add_column(name, overflow="fold")
    for name in ("gain", "candidates", "rounds"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            _amount(result.size),
            result.projection,
            _variant(result.predicted, result),
            _variant(result.rival, result),
            f"{result.gain:.3f}\n({result.low:.3f}–{result.high:.3f})",
            str(result.candidates),
            str(result.rounds),
        )
    return table


def _variant(kernel: ExpertKernel | None, result: Result) -> Text:
    """The name of a kernel's variant, bold if it was kept."""
    name = "none" if kernel is None else kernel.variant.name
    return Text(name, style="bold" if kernel == result.best else "")


def _cache() -> Json:
    """Where the results are, and why they are not if they aren't."""
    found = default_cache().info()
    return {"directory": str(found.directory), "kept": found.enabled, "reason": found.reason}


def _note(cache: Json) -> str:
    if not cache["kept"]:
        return f"[bold red]not kept[/]: {cache['reason']}"
    return f"kept in {cache['directory']}: processes that start from now on use these variants"

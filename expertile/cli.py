"""The command line: `expertile doctor`, `demo`, `bench`, `roofline`, `tune`, `numa`, `inspect` and `cache`.

Results go to stdout, progress and errors to stderr; with --json, stdout is one JSON document.  Exit code 1 is a failure
and 2 a wrong argument.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from expertile import _numa, _roofline, _tune
from expertile._bench import bench
from expertile.codegen.cache import default_cache
from expertile.codegen.errors import CodegenError
from expertile.runtime.errors import ArgumentError, ExpertileError

_out = Console()
_err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class _Commands(TyperGroup):
    """Turns the errors that Expertile raises into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ExpertileError, CodegenError) as error:
            _err.print("[bold red]error:[/] ", end="")
            _err.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from error


app = typer.Typer(
    cls=_Commands,
    help="Mixture-of-experts layers on CPUs, through kernels generated for the machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.command("bench")(bench)
app.command("roofline")(_roofline.command)
app.command("tune")(_tune.command)
app.command("numa")(_numa.command)


def main() -> None:
    """The `expertile` command."""
    app()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what works on this machine, what does not and why, and test a small layer."""
    from expertile import _doctor

    report = _doctor.examine()
    if as_json:
        _print_json(report)
    else:
        _doctor.show(_out, report)
    if not report["self_test"]["passed"]:
        raise typer.Exit(1)


@app.command()
def demo(
    layers: Annotated[
        int, typer.Option(min=1, help="Of the 48 layers; 1.2 GB each, with all experts.")
    ] = 2,
    experts: Annotated[int, typer.Option(min=8, help="Experts in a layer.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each implementation.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Generate text with a Qwen3-30B-A3B-shaped model in Transformers: speed and agreement.

    The model has random weights and layers of the full width. It runs with the experts implementations eager and
    grouped_mm of Transformers and with Expertile's. Exit code 1 if their logits differ too much.
    """
    from expertile import _demo

    report = _demo.run(_demo.Settings(layers, experts, prompt, tokens, rounds), _err)
    if as_json:
        _print_json(report)
    else:
        _demo.show(_out, report)
    if not report["agrees"]:
        raise typer.Exit(1)


@app.command()
def inspect(
    spec: Annotated[str, typer.Argument(help="The kernel, as in gate_up:h=2048,i=768,m=4.")],
    isa: Annotated[
        str | None, typer.Option(help="A tile ISA, even one that can't run here.")
    ] = None,
    ir: Annotated[bool, typer.Option("--ir", help="Print the IR as generated.")] = False,
    optimised_ir: Annotated[
        bool, typer.Option("--optimised-ir", help="Print the IR after optimisation.")
    ] = False,
    asm: Annotated[bool, typer.Option("--asm", help="Print the assembly: the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the IR or the assembly of a kernel, and what it consists of.

    A SPEC is a kind (gate_up, down, gather, finish or driver) and its keys; a wrong one lists them all.
    """
    from expertile import _inspect
    from expertile.codegen.isa import select
    from expertile.runtime.inspection import inspect

    chosen = {"ir": ir, "optimised_ir": optimised_ir, "assembly": asm or not (ir or optimised_ir)}
    listings = [name for name, wanted in chosen.items() if wanted]
    kernel = inspect(spec, isa or select().name)
    if as_json:
        _print_json(_inspect.as_json(kernel, listings))
    else:
        _inspect.show(_out, kernel, listings)


@cache_app.command()
def info(as_json: AsJson = False) -> None:
    """Show where compiled kernels are kept, how many, and whether they are used."""
    found = default_cache().info()
    values = {**asdict(found), "directory": str(found.directory)}
    if as_json:
        _print_json(values)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if type(value) is int else str(value))
    _out.print(table)


@cache_app.command()
def clear(as_json: AsJson = False) -> None:
    """Remove all compiled kernels, and what `expertile tune` measured."""
    cache = default_cache()
    removed = cache.clear()
    if as_json:
        _print_json({"directory": str(cache.directory), "removed": removed})
    else:
        _out.print(f"{removed} objects removed from {cache.directory}", soft_wrap=True)

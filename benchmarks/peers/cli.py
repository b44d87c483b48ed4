"""The commands: `setup`, `list`, `run`, `plot`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from peers import environments, report
from peers.environments import Adapter
from peers.formats import FORMATS
from peers.inputs import Size
from peers.measure import OURS, Plan, Result, measure
from peers.processes import PeerError

if TYPE_CHECKING:
    from expertile._bench import Shape

Json = dict[str, Any]

SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-16e", "qwen3-235b-32e")
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "LD_PRELOAD")

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Directory = Annotated[
    Path, typer.Option(help="Where the environments are.", show_default="the user's cache")
]
Further = Annotated[
    list[Path] | None, typer.Option("--adapter", help="An adapter file of yours. Repeatable.")
]


@app.command()
def setup(
    peers: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
    directory: Directory = environments.DIRECTORY,
    adapter: Further = None,
) -> None:
    """Make the peers' environments, with pip."""
    known = environments.known(adapter or ())
    failed = False
    done: set[Path] = set()
    for each in _chosen(known, peers or known):
        folder = each.environment(directory)
        if not each.peer.requirements or folder in done:
            continue
        done.add(folder)
        try:
            environments.install(each, directory, Console(stderr=True).print)
        except subprocess.CalledProcessError as error:
            failed = True
            typer.echo(f"{each.name}: pip ended with exit code {error.returncode}", err=True)
    raise typer.Exit(1 if failed else 0)


@app.command("list")
def list_peers(directory: Directory = environments.DIRECTORY, adapter: Further = None) -> None:
    """Show the peers, what pip installs for each, and whether that has happened."""
    table = Table("peer", "implementations", "weights", "formats", "pip install", "installed")
    for each in environments.known(adapter or ()).values():
        table.add_row(
            each.name,
            ", ".join(each.peer.implementations),
            each.peer.weights,
            ", ".join(each.peer.formats),
            "\n".join(each.peer.requirements) or "(this environment)",
            "yes" if each.installed(directory) else environments.command(each.name, directory),
        )
    Console().print(table)


@app.command()
def run(
    shape: Annotated[
        list[str] | None, typer.Option(help="A known shape, or HxIxExk. Repeatable.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens a call.")] = ",".join(map(str, TOKENS)),
    weights: Annotated[
        str, typer.Option(help=f"Weight formats with commas between: bf16, {', '.join(FORMATS)}.")
    ] = "bf16",
    peers: Annotated[str, typer.Option(help="With commas between.", show_default="all")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: as PyTorch would use.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time to spend on sampling a shape, about.")
    ] = 300.0,
    longest: Annotated[
        float, typer.Option(help="Seconds a call may take; sizes beyond are left out.")
    ] = 20.0,
    gib: Annotated[float, typer.Option(help="GiB of weights to cycle over, at least.")] = 2.0,
    memory: Annotated[float, typer.Option(help="GiB that all processes together may use.")] = 20.0,
    directory: Directory = environments.DIRECTORY,
    adapter: Further = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
) -> None:
    """Measure Expertile and its peers in the same rounds."""
    import torch

    from expertile._bench import machine, shape_from

    known = environments.known(adapter or ())
    names = [name for name in peers.split(",") if name] or list(known)
    chosen = _chosen(known, dict.fromkeys([OURS, *names]))
    shapes, counts = [shape_from(text) for text in shape or SHAPES], _numbers(tokens)
    sizes = [(each.name, _size(each, name)) for each in shapes for name in _formats(weights)]
    threads = threads or torch.get_num_threads()
    console = Console(stderr=as_json, quiet=as_json and not sys.stderr.isatty())
    found: Json = {"machine": machine(threads) | {"variables": _variables()}}
    found |= _peers(chosen, directory) | {"shapes": []}
    installed = [each for each in chosen if each.name not in found["absent"]]
    for name, size in sizes:
        layers = max(1, -(-int(gib * 2**30) // size.layer_bytes))
        plan = Plan(size, layers, counts, threads, seconds, longest, memory * 2**30)
        title = f"{name}, {size.weights}"
        with console.status(title) as status:
            result = _measured(title, plan, installed, directory, status)
        found["shapes"].append(report.summary(name, plan, result))
        for part in report.tables(found["shapes"][-1]):
            console.print(part)
        if output is not None:  # after every shape: what is interrupted is not lost
            output.write_text(json.dumps(found, indent=1) + "\n")
    for name, command in found["absent"].items():
        console.print(f"{name} is not installed: {command}")
    if as_json:
        print(json.dumps(found, indent=1))


def _formats(text: str) -> list[str]:
    """Raises typer.BadParameter for a format that no peer has."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ("bf16", *FORMATS):
            raise typer.BadParameter(
                f"expected weights of bf16, {', '.join(FORMATS)}; got {name!r}"
            )
    return names


def _size(shape: Shape, weights: str) -> Size:
    """Raises typer.BadParameter for a shape that the format can't have."""
    size = Size(shape.hidden, shape.intermediate, shape.experts, shape.top_k, weights)
    try:
        size.expert_bytes  # noqa: B018
    except ValueError as error:
        raise typer.BadParameter(f"{shape.name}, {weights}: {error}") from None
    return size


def _variables() -> Json:
    """What the peers' processes inherit of the settings that matter to threads."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _peers(chosen: Sequence[Adapter], directory: Path) -> Json:
    """What was asked for, and how to install what is absent."""
    described = {
        each.name: {
            "implementations": each.peer.implementations,
            "requirements": each.peer.requirements,
            "weights": each.peer.weights,
            "formats": each.peer.formats,
        }
        for each in chosen
    }
    absent = [each.name for each in chosen if not each.installed(directory)]
    commands = {name: environments.command(name, directory) for name in absent}
    return {"peers": described, "absent": commands}


def _measured(
    name: str, plan: Plan, adapters: Sequence[Adapter], directory: Path, status: Status
) -> Result:
    """Raises typer.Exit if Expertile itself fails."""
    try:
        return measure(plan, adapters, directory, lambda text: status.update(f"{name}: {text}"))
    except PeerError as error:
        typer.echo(f"expertile failed on {name}: {error}", err=True)
        raise typer.Exit(1) from None


@app.command("plot")
def draw(
    source: Annotated[Path, typer.Argument(help="What `run --output` wrote.")],
    picture: Annotated[Path | None, typer.Argument(help="Default: beside it, .png.")] = None,
) -> None:
    """Draw time, share of the roofline and speed-up by tokens (needs matplotlib)."""
    from peers.plot import plot

    plot(json.loads(source.read_text()), picture or source.with_suffix(".png"))


def _chosen(known: dict[str, Adapter], names: Sequence[str] | dict[str, Any]) -> list[Adapter]:
    """Raises typer.BadParameter for a name that is none."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"expected peers of {', '.join(known)}; got {name!r}")
    return [known[name] for name in names]


def _numbers(text: str) -> tuple[int, ...]:
    numbers = {int(part) if part.strip().isdecimal() else 0 for part in text.split(",")}
    if 0 in numbers:
        raise typer.BadParameter(
            f"expected numbers from 1 with commas between, such as 1,2,4; got {text!r}"
        )
    return tuple(sorted(numbers))

"""`expertile roofline`: what this machine can do at most, and what that makes of a layer's calls.

docs/roofline.md says what each ceiling is and how it is measured. All ceilings of a shape are sampled in the same
rounds; medians, with the quartiles.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from expertile._bench import DEFAULT_SHAPES, Shape, machine, numbers_from, shape_from
from expertile._bench.protocol import spread
from expertile.runtime import openmp, roofline
from expertile.runtime.caches import caches, working_sets
from expertile.runtime.errors import ArgumentError
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
MEMORY = "memory"


# What a call needs --------------------------------------------------------------------------------


def expected_experts(shape: Shape, tokens: int) -> float:
    """Distinct experts of a call, on average, when each token picks its top-k uniformly at random.

    Exact: a token leaves an expert out with probability 1 - k/E, independently of the others.
    """
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)


def intensity(shape: Shape, tokens: int) -> float:
    """Operations a byte of weights, which for bf16 is the average number of tokens an expert."""
    return shape.operations(tokens) / (expected_experts(shape, tokens) * shape.expert_bytes)


def corner_tokens(shape: Shape, operations_per_byte: float) -> int:
    """The fewest tokens a call whose intensity reaches that of the corner."""
    # The intensity is at least tokens · k / E, and grows with the tokens.
    enough = int(operations_per_byte * shape.experts / shape.top_k) + 1
    sizes = range(1, enough + 1)
    return sizes[bisect_left(sizes, operations_per_byte, key=lambda size: intensity(shape, size))]


def bound(shape: Shape, tokens: int, bandwidth: float, peak: float) -> Json:
    """The least time of a call, from bytes and operations a second, and which of the two sets it."""
    experts, operations = expected_experts(shape, tokens), shape.operations(tokens)
    moved = experts * shape.expert_bytes
    memory, compute = moved / bandwidth, operations / peak
    return {
        "tokens": tokens,
        "experts": experts,
        "tokens_per_expert": tokens * shape.top_k / experts,
        "bytes": moved,
        "operations": operations,
        "memory_ms": memory * 1e3,
        "compute_ms": compute * 1e3,
        "bound_ms": max(memory, compute) * 1e3,
        "bound": "memory" if memory > compute else "compute",
    }


# What the machine can do --------------------------------------------------------------------------


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4 … and `threads`."""
    return sorted({threads, *(1 << power for power in range(threads.bit_length()))})


def weights(shape: Shape, gib: float) -> list[Tensor]:
    """The matrices of as many layers as it takes to have `gib`, with every page written and no two pages alike."""
    e, h, i = shape.experts, shape.hidden, shape.intermediate
    sizes = [(e, h, 2 * i), (e, i, h)] if shape.transposed else [(e, 2 * i, h), (e, h, i)]
    layers = max(1, -(-int(gib * 2**30) // (e * shape.expert_bytes)))
    found: list[Tensor] = []
    first = 0
    for size in sizes * layers:
        count = size[0] * size[1] * size[2]
        words = torch.arange(first, first + -(-count // 4))  # 8 bytes: four bf16
        first += len(words)
        found.append(words.view(torch.bfloat16)[:count].view(size))
    return found


@dataclass(frozen=True)
class Ceilings:
    """Probes of everything on one number of threads."""

    threads: int
    reads: dict[str, dict[str, Probe]]
    """By place (memory, L3, L2, L1) and kernel."""
    peak: Probe

    @classmethod
    def of(cls, matrices: list[Tensor], sets: Mapping[str, int], threads: int) -> Ceilings:
        """matrices: what is read from memory. sets: bytes a thread to read from each cache, smallest first."""
        reads = {MEMORY: roofline.reads(matrices, threads)}
        for name in reversed(tuple(sets)):
            reads[name] = roofline.cache_reads(sets[name], threads)
        return cls(threads, reads, roofline.peak(threads))

    def probes(self) -> Iterator[Probe]:
        for kernels in self.reads.values():
            yield from kernels.values()
        yield self.peak

    def best(self, place: str) -> str:
        """The kernel that reads fastest."""
        kernels = self.reads[place]
        return max(kernels, key=lambda name: median(kernels[name].rates.values()))

    def as_json(self) -> Json:
        reads = [
            {
                "place": place,
                "best": self.best(place),
                "gb_per_s": {name: spread(p.rates.values(), 1e9) for name, p in kernels.items()},
            }
            for place, kernels in self.reads.items()
        ]
        peak = spread(self.peak.rates.values(), 1e12)
        return {"threads": self.threads, "peak_tflops": peak, "reads": reads}


def measure(
    shape: Shape,
    tokens: Iterable[int],
    sets: Mapping[str, int],
    *,
    threads: int,
    gib: float,
    seconds: float,
    progress: Callable[[float], None] | None = None,
) -> Json:
    """The ceilings on 1, 2, 4 … `threads` threads, on weights of the shape, and the bounds of calls on `threads`.

    sets: bytes that a thread is to read from each cache, smallest first. progress: see `roofline.interleave`.
    Raises ArgumentError without an OpenMP runtime for more than one thread.
    """
    matrices = weights(shape, gib)
    ceilings = [Ceilings.of(matrices, sets, count) for count in thread_counts(threads)]
    _sample(ceilings, seconds, progress)
    top = ceilings[-1]
    bandwidth = median(top.reads[MEMORY][top.best(MEMORY)].rates.values())
    peak = median(top.peak.rates.values())
    corner = peak / bandwidth
    return {
        **asdict(shape),
        "weight_bytes": sum(matrix.nbytes for matrix in matrices),
        "ceilings": [each.as_json() for each in ceilings],
        "corner": {"tokens_per_expert": corner, "tokens": corner_tokens(shape, corner)},
        "bounds": [bound(shape, count, bandwidth, peak) for count in tokens],
    }


def _sample(
    ceilings: list[Ceilings], seconds: float, progress: Callable[[float], None] | None
) -> None:
    """Fill all probes, every one in every round: all but one are the references of that one."""
    *references, last = [probe for each in ceilings for probe in each.probes()]
    for probe in (*references, last):
        probe.sample(-1)  # warms up
        probe.forget()
    roofline.interleave(references, [last], seconds, progress)


def _sets(threads: int) -> tuple[dict[str, int], Json]:
    """Bytes a thread to read from each cache, and how they came about."""
    found, assumed = caches()
    # The same on fewer threads: a larger part of a shared cache must not look like a faster one.
    sets = working_sets(found, threads)
    measured = {name: size for name, size in sets.items() if isinstance(size, int)}
    return measured, {
        "levels": [asdict(cache) for cache in found],
        "assumed": assumed,
        "bytes_per_thread": measured,
        "not_measured": {name: why for name, why in sets.items() if isinstance(why, str)},
    }


# The command --------------------------------------------------------------------------------------


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"expected a number above 0, got {value}")
    return value


def _writable(path: Path | None) -> Path | None:
    """Refuse now what could not be written after the measurement."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(
            f"expected a file in a directory that exists; {path.parent} is no directory"
        )
    return path


def command(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A known shape, or HxIxExk. Repeatable; default: {', '.join(DEFAULT_SHAPES)}."
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens a call.")] = ",".join(map(str, TOKENS)),
    threads: Annotated[
        int | None, typer.Option(min=1, help="At most. Default: as a layer would use.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time to spend on sampling, about.", callback=_positive)
    ] = 60.0,
    gib: Annotated[
        float, typer.Option(help="GiB of weights to read, at least.", callback=_positive)
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the JSON to a file as well.", dir_okay=False, callback=_writable),
    ] = None,
) -> None:
    """Measure what this machine can do at most, and print which limit holds for a layer's calls.

    Ceilings: reads of the weights from memory and of tiles from each cache, bf16 multiplication, on 1, 2, 4 … threads.
    Bounds: the least time of a call for uniformly random routing, with E·(1-(1-k/E)^T) distinct experts.
    """
    from rich.console import Console
    from rich.progress import Progress

    shapes, sizes = [shape_from(text) for text in shape or DEFAULT_SHAPES], numbers_from(tokens)
    count = threads or openmp.threads()
    if count > 1 and openmp.runtime() is None:
        raise ArgumentError(f"--threads: expected 1, as no OpenMP runtime is loaded, got {count}")
    sets, cache_report = _sets(count)
    report: Json = {"machine": machine(count), "caches": cache_report, "shapes": []}
    out, err = Console(quiet=as_json), Console(stderr=True)
    out.print(_machine_table(report["machine"]))
    for line in _cache_notes(cache_report):
        out.print(line)
    for each in shapes:
        # Drawn between samples only: a thread that draws would take time from what is measured.
        with Progress(
            console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
        ) as bar:
            task = bar.add_task(f"measuring {each.name}", total=1.0)
            bar.refresh()

            def advance(done: float, bar: Progress = bar, task: Any = task) -> None:
                bar.update(task, completed=min(done, 1.0), refresh=True)

            report["shapes"].append(
                measure(
                    each, sizes, sets, threads=count, gib=gib, seconds=seconds / len(shapes),
                    progress=advance,
                )
            )  # fmt: skip
        out.print(_ceilings_table(report["shapes"][-1], sets))
        out.print(_bounds_table(report["shapes"][-1]))
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        sys.stdout.write(text + "\n")


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _machine_table(found: Json) -> Any:
    table = _table("machine", "", "")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return table


def _cache_notes(found: Json) -> Iterator[str]:
    if found["assumed"]:
        yield f"cache sizes are assumed: {found['assumed']}"
    for why in found["not_measured"].values():
        yield f"not measured: {why}"


def _ceilings_table(found: Json, sets: Mapping[str, int]) -> Any:
    """A row for each kernel that reads a cache, for the best that reads memory, and for the peak."""
    columns = [_threads(each["threads"]) for each in found["ceilings"]]
    table = _table(
        f"{found['name']}: ceilings, medians (quartiles)\n"
        "corner: operations a byte where multiplication is the limit",
        "GB/s",
        *columns,
        "corner",
    )
    *_, top = found["ceilings"]
    for number, read in enumerate(top["reads"]):
        place = read["place"]
        size = found["weight_bytes"] if place == MEMORY else sets[place]
        for kernel in [read["best"]] if place == MEMORY else read["gb_per_s"]:
            reads = [each["reads"][number] for each in found["ceilings"]]
            # On fewer threads, another kernel may read memory best.
            rates = [r["gb_per_s"][r["best"] if place == MEMORY else kernel] for r in reads]
            corner = top["peak_tflops"]["median"] * 1e3 / rates[-1]["median"]
            name = f"{place}, {_size(size)}\n{kernel}"
            table.add_row(name, *map(_range, rates), f"{corner:.1f}")
    table.add_section()
    peaks = (_range(each["peak_tflops"], 3) for each in found["ceilings"])
    table.add_row("bf16 TFLOP/s", *peaks, "")
    return table


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _bounds_table(found: Json) -> Any:
    corner, (*_, top) = found["corner"], found["ceilings"]
    sizes = " × ".join(str(found[name]) for name in ("hidden", "intermediate", "experts"))
    table = _table(
        f"{found['name']}: {sizes}, top-{found['top_k']}, uniformly random routing, "
        f"{_threads(top['threads'])}\n"
        f"both limits meet at {corner['tokens_per_expert']:.1f} tokens an expert: "
        f"{corner['tokens']} tokens a call",
        "tokens",
        "experts",
        "tokens an expert",
        "MB",
        "GFLOP",
        "memory ms",
        "compute ms",
        "bound",
    )
    for row in found["bounds"]:
        table.add_row(
            str(row["tokens"]),
            f"{row['experts']:.1f}",
            f"{row['tokens_per_expert']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['operations'] / 1e9:.2f}",
            f"{row['memory_ms']:.4g}",
            f"{row['compute_ms']:.4g}",
            row["bound"],
        )
    return table


def _range(spread: Json, digits: int = 1) -> str:
    low, middle, high = (f"{spread[name]:.{digits}f}" for name in ("low", "median", "high"))
    return f"{middle}\n({low}–{high})"


def _size(count: int) -> str:
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << size:
            return f"{count / (1 << size):.4g} {unit}"
    return f"{count} bytes"

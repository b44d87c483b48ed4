"""`expertile bench`: whole layer calls against what the machine can do at most, in the same rounds.

The protocol is described in benchmarks/README.md. A share is that of the roofline, max(bytes / read bandwidth,
operations / peak) ÷ time; medians over rounds, with the interquartile range.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

import expertile
from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import counters
from expertile.runtime import roofline
from expertile.runtime.roofline import Probe

Json = dict[str, Any]

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
PEER_TOKENS = (1, 2, 4, 8, 16, 64)
_ROUTINGS = 16  # for each layer
_DISTURBED_CORES = 0.1
_STALLS = (2, 3, 8, 17, 32)  # row counts; each has kernels of its own


# Shapes and their weights -------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """An expert layer to measure."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gate: str = "silu"
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        return 2 * 3 * self.hidden * self.intermediate

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of a call."""
        return 2 * 3 * self.hidden * self.intermediate * tokens * self.top_k

    def spec(self) -> expertile.ExpertSpec:
        """The layer to compile kernels for."""
        bias = "bf16" if self.bias else None
        sizes = (self.hidden, self.intermediate, self.experts, self.top_k)
        return expertile.ExpertSpec(
            *sizes, "bf16", self.gate, bias, bias, self.interleaved, self.transposed
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-v3-16e", 7168, 2048, 16, 8),
        Shape("qwen3-235b-32e", 4096, 1536, 32, 8),
        Shape(
            "gpt-oss", 2880, 2880, 32, 4, "swiglu_oai", bias=True, interleaved=True, transposed=True
        ),
    )
}
PEER_SHAPE = "qwen3-30b-a3b"


def shape_from(text: str) -> Shape:
    """A shape by its name, or from "HxIxExk". Raises typer.BadParameter for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        hidden, intermediate, experts, top_k = map(int, text.split("x"))
    except ValueError:
        known = ", ".join(SHAPES)
        raise typer.BadParameter(
            f"expected hidden x intermediate x experts x top-k, such as 2048x768x128x8, or one of {known}; got {text!r}"
        ) from None
    if min(hidden, intermediate) < 1 or not 1 <= top_k <= experts:
        raise typer.BadParameter(
            f"expected sizes of at least 1 and no more of top-k than experts; got {text!r}"
        )
    return Shape(text, hidden, intermediate, experts, top_k)


@dataclass(frozen=True)
class Weights:
    """One layer."""

    gate_up: Tensor
    down: Tensor
    biases: Json

    @classmethod
    def random(cls, shape: Shape) -> Weights:
        """Ordinary tensors, every page written."""
        e, h, i = shape.experts, shape.hidden, shape.intermediate
        sizes = ((e, h, 2 * i), (e, i, h)) if shape.transposed else ((e, 2 * i, h), (e, h, i))
        names, widths = ("gate_up_bias", "down_bias"), (2 * i, h)
        biases = (
            {n: _filled(e, w) for n, w in zip(names, widths, strict=True)} if shape.bias else {}
        )
        return cls(_filled(*sizes[0]), _filled(*sizes[1]), biases)


def _filled(*size: int) -> Tensor:
    """bf16 numbers around 0.02: a random block, repeated.

    Its length is no multiple of a page, so no two pages are alike for a host that merges those.
    """
    tensor = torch.empty(size, dtype=torch.bfloat16)
    flat = tensor.view(-1)
    block = torch.randn(min(flat.numel(), (1 << 22) + 33)).mul_(0.02).bfloat16()
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


@dataclass(frozen=True)
class Call:
    """Which experts of which layer a call uses."""

    layer: int
    ids: Tensor
    router: Tensor
    bytes: int
    """Of the distinct experts' weights."""


def schedule(shape: Shape, layers: int, tokens: int) -> list[Call]:
    """Calls with independent random routings, 16 for each layer, which take turns.

    Experts are renamed so that a call uses those that were used longest ago: the routing stays random, and nothing is
    read again before everything else was, however few experts a call has.
    """
    random = torch.Generator().manual_seed(tokens)
    last_use = torch.zeros(layers, shape.experts)
    calls = []
    for number in range(_ROUTINGS * layers):
        scores = torch.rand(tokens, shape.experts, generator=random)
        router, ids = scores.topk(shape.top_k)
        used, ids = ids.unique(return_inverse=True)
        age = last_use[number % layers]
        oldest = (age + torch.rand(shape.experts, generator=random)).argsort()[: len(used)]
        age[oldest] = number + 1
        router = router.softmax(-1)
        calls.append(Call(number % layers, oldest[ids], router, len(used) * shape.expert_bytes))
    return calls


# What is measured ---------------------------------------------------------------------------------

Run = Callable[[Weights, Tensor, Tensor, Tensor], Tensor]
"""An implementation of a layer: weights, x, ids, router weights."""


def _expertile(shape: Shape) -> Run:
    options: Json = {
        "gate": shape.gate,
        "interleaved": shape.interleaved,
        "transposed": shape.transposed,
    }

    def run(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        return expertile.fused_experts(x, w.gate_up, w.down, ids, router, **options, **w.biases)

    return run


def _linear(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """F.linear, expert by expert."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w.gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w.down[expert])
        out.index_add_(0, token, (y * router[token, slot, None]).to(x.dtype))
    return out


def _grouped_mm(forward: Callable[..., Tensor]) -> Run:
    """Transformers' implementation, on what it looks at of a module."""

    def gate(halves: Tensor) -> Tensor:
        gate, up = halves.chunk(2, -1)
        return F.silu(gate) * up

    def run(w: Weights, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        module = SimpleNamespace(
            gate_up_proj=w.gate_up, down_proj=w.down, num_experts=w.down.shape[0], _apply_gate=gate,
            has_gate=True, has_bias=False, is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
        )  # fmt: skip
        return forward(module, x, ids, router)

    return run


def peers() -> dict[str, Run | str]:
    """The other implementations by name, or why one is absent."""
    found: dict[str, Run | str] = {"F.linear": _linear}
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError as error:
        found["grouped_mm"] = f"absent: {error}"
    else:
        found["grouped_mm"] = _grouped_mm(grouped_mm_experts_forward)
    return found


def _probe(run: Run, layers: list[Weights], calls: list[Call], x: Tensor) -> Probe:
    position = 0

    def step() -> int:
        nonlocal position
        call = calls[position % len(calls)]
        position += 1
        run(layers[call.layer], x, call.ids, call.router)
        return call.bytes

    return Probe(step)


def measure(
    shape: Shape,
    tokens: Sequence[int],
    *,
    gib: float,
    seconds: float,
    threads: int,
    others: dict[str, Run | str],
) -> Json:
    """Everything about a shape: read bandwidth, peak, calls of each number of tokens, and `others` beside them."""
    count = max(1, -(-int(gib * 2**30) // (shape.experts * shape.expert_bytes)))
    layers = [Weights.random(shape) for _ in range(count)]
    calls = {t: schedule(shape, count, t) for t in tokens}
    rows = {
        int(n) for c in calls.values() for call in c for n in call.ids.unique(return_counts=True)[1]
    }
    expertile.compile(shape.spec(), sorted(rows))
    inputs = {t: torch.randn(t, shape.hidden).bfloat16() for t in tokens}
    streams = roofline.reads([m for w in layers for m in (w.gate_up, w.down)], threads)
    peak = roofline.peak(threads)
    ours = {t: _probe(_expertile(shape), layers, calls[t], inputs[t]) for t in tokens}
    runs = {name: run for name, run in others.items() if not isinstance(run, str)}
    theirs = {
        (t, name): _probe(run, layers, calls[t], inputs[t])
        for t in tokens if t in PEER_TOKENS for name, run in runs.items()
    }  # fmt: skip
    for probe in (*streams.values(), peak, *ours.values(), *theirs.values()):
        probe.sample(-1)  # warms up
        probe.forget()
    with _watch_others() as disturbance:
        roofline.interleave([*streams.values(), peak], [*ours.values(), *theirs.values()], seconds)
    best = max(streams, key=lambda name: statistics.median(streams[name].rates.values()))
    results = [_result(shape, t, probe, streams[best], peak) for t, probe in ours.items()]
    compared = [_comparison(t, name, probe, ours[t]) for (t, name), probe in theirs.items()]
    for row in compared:
        call = calls[row["tokens"]][0]
        arguments = (layers[call.layer], inputs[row["tokens"]], call.ids, call.router)
        row["difference"] = _difference(
            _expertile(shape)(*arguments), runs[row["name"]](*arguments)
        )
    return {
        **asdict(shape),
        "layers": count,
        "weight_bytes": count * shape.experts * shape.expert_bytes,
        "read": {
            "best": best,
            "gb_per_s": {name: _spread(p.rates.values(), 1e9) for name, p in streams.items()},
        },
        "peak_tflops": _spread(peak.rates.values(), 1e12),
        "cores_used_by_others": disturbance["cores"],
        "calls": results,
        "peers": compared,
        "absent_peers": {name: why for name, why in others.items() if isinstance(why, str)},
    }


@contextmanager
def _watch_others() -> Iterator[Json]:
    """How many cores other processes kept busy meanwhile, as `cores`; None where Linux's /proc/stat is missing."""
    found: Json = {"cores": None}
    before, start = _others_seconds(), time.perf_counter()
    yield found
    after = _others_seconds()
    if before is not None and after is not None:
        found["cores"] = max(0.0, after - before) / (time.perf_counter() - start)


def _others_seconds() -> float | None:
    """CPU seconds that were spent outside this process, stolen ones included."""
    try:
        user, nice, system, _, _, interrupt, soft, steal, *_ = map(int, _cpu_line().split()[1:])
    except OSError:
        return None
    everything = (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")
    return everything - time.process_time()


def _cpu_line() -> str:
    with open("/proc/stat", encoding="ascii") as file:
        return file.readline()


def _spread(values: Any, unit: float = 1.0) -> Json:
    """Median and quartiles."""
    values = [value / unit for value in values]
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "low": low, "high": high, "rounds": len(values)}


def _result(shape: Shape, tokens: int, probe: Probe, read: Probe, peak: Probe) -> Json:
    operations = shape.operations(tokens)
    shares, of_memory = [], []
    for number, rate in probe.rates.items():
        seconds = probe.step_seconds[number]
        memory = rate / read.rates[number]
        compute = operations / peak.rates[number] / seconds
        shares.append(max(memory, compute))
        of_memory.append(memory >= compute)
    return {
        "tokens": tokens,
        "ms": _spread(probe.step_seconds.values(), 1e-3),
        "gb_per_s": _spread(probe.rates.values(), 1e9),
        "tflops": _spread((operations / seconds for seconds in probe.step_seconds.values()), 1e12),
        "share": _spread(shares),
        "bound": "memory" if 2 * sum(of_memory) > len(of_memory) else "compute",
    }


def _comparison(tokens: int, name: str, probe: Probe, ours: Probe) -> Json:
    """How many times the bytes a second of a peer we reach."""
    ratios = [
        ours.rates[number] / rate for number, rate in probe.rates.items() if number in ours.rates
    ]
    milliseconds = _spread(probe.step_seconds.values(), 1e-3)
    return {"tokens": tokens, "name": name, "ms": milliseconds, "speedup": _spread(ratios)}


def _difference(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).norm() / other.double().norm())


# The host's side ----------------------------------------------------------------------------------

_CHILD = """
import json, time, torch
start = time.perf_counter()
import expertile
seconds = time.perf_counter() - start
from expertile._bench import first_calls
print(json.dumps({"import_s": seconds} | first_calls()))
"""


def first_calls() -> Json:
    """In a fresh process: seconds of the first call, of new row counts and of a tiny call."""
    shape = Shape("first calls", 2048, 768, 8, 8)
    weights, run = Weights.random(shape), _expertile(shape)

    def call(tokens: int) -> float:
        x = torch.randn(tokens, shape.hidden).bfloat16()
        ids = torch.arange(shape.experts).repeat(tokens, 1)
        router = torch.full(ids.shape, 0.125)
        start = time.perf_counter()
        run(weights, x, ids, router)
        return time.perf_counter() - start

    first = call(1)
    stalls = {str(rows): call(rows) for rows in _STALLS}
    return {
        "first_call_s": first,
        "new_rows_s": stalls,
        "compiled": counters().llvm,
        "numba_loaded": "numba" in sys.modules,
        "overhead_us": _overhead(),
    }


def _overhead(batches: int = 50, size: int = 200) -> float:
    """Microseconds of a call that has next to nothing to compute."""
    shape = Shape("tiny", 32, 32, 4, 2)
    weights, run = Weights.random(shape), _expertile(shape)
    x, ids, router = (
        torch.randn(1, 32).bfloat16(),
        torch.tensor([[1, 3]]),
        torch.tensor([[0.5, 0.5]]),
    )
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(size):
            run(weights, x, ids, router)
        times.append((time.perf_counter() - start) / size * 1e6)
    return statistics.median(times)


def host() -> Json:
    """What a process pays before its first token: one with an empty cache, then three that find it filled."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"EXPERTILE_CACHE_DIR": directory}
        command = [sys.executable, "-c", _CHILD]
        cold, *warm = (
            json.loads(
                subprocess.run(command, env=environment, check=True, capture_output=True).stdout
            )
            for _ in range(4)
        )
    return {
        "import_s": statistics.median(child["import_s"] for child in (cold, *warm)),
        "first_call_cold_s": cold["first_call_s"],
        "first_call_warm_s": statistics.median(child["first_call_s"] for child in warm),
        "new_rows_cold_s": cold["new_rows_s"],
        "overhead_us": statistics.median(child["overhead_us"] for child in (cold, *warm)),
        "compiled_cold": cold["compiled"],
        "compiled_warm": max(child["compiled"] for child in warm),
        "numba_loaded": cold["numba_loaded"],
    }


# The command --------------------------------------------------------------------------------------


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


def _numbers(text: str) -> list[int]:
    numbers = {int(part) if part.strip().isdecimal() else 0 for part in text.split(",")}
    if 0 in numbers:
        raise typer.BadParameter(
            f"expected numbers from 1 with commas between, such as 1,2,4; got {text!r}"
        )
    return sorted(numbers)


def bench(
    shape: Annotated[
        list[str] | None, typer.Option(help="A known shape, or HxIxExk. Repeatable; default: all.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens a call.")] = ",".join(map(str, TOKENS)),
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: as PyTorch would use.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on sampling, about.")] = 100.0,
    gib: Annotated[float, typer.Option(help="GiB of weights to cycle over, at least.")] = 2.0,
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
    from rich.console import Console

    console = Console(stderr=as_json, quiet=as_json and not sys.stderr.isatty())
    shapes, sizes = [shape_from(text) for text in shape or SHAPES], _numbers(tokens)
    count = threads or torch.get_num_threads()
    report: Json = {"machine": machine(count), "shapes": []}
    console.print(_machine_table(report["machine"]))
    with torch_threads(count):
        others = peers() if with_peers else {}
        for each in shapes:
            with console.status(f"measuring {each.name}"):
                report["shapes"].append(
                    measure(
                        each, sizes, gib=gib, seconds=seconds / len(shapes), threads=count,
                        others=others if each.name == PEER_SHAPE else {},
                    )
                )  # fmt: skip
            for table in _shape_tables(report["shapes"][-1]):
                console.print(table)
    if with_host:
        with console.status("measuring fresh processes"):
            report["host"] = host()
        console.print(_host_table(report["host"]))
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        print(text)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _machine_table(found: Json) -> Any:
    table = _table("machine", "", "")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return table


def _percent(share: Json) -> str:
    return f"{share['median']:.1%} ({share['low']:.0%}–{share['high']:.0%})"


def _shape_tables(found: Json) -> Iterator[Any]:
    read = found["read"]
    bandwidth, peak = read["gb_per_s"][read["best"]]["median"], found["peak_tflops"]["median"]
    sizes = " × ".join(str(found[name]) for name in ("hidden", "intermediate", "experts"))
    title = f"{found['name']}: {sizes}, top-{found['top_k']}, {found['layers']} layers\n"
    title += f"roofline {bandwidth:.1f} GB/s ({read['best']}), {peak:.3f} TFLOP/s"
    busy = found["cores_used_by_others"]
    if busy is not None and busy > _DISTURBED_CORES:
        title += f"\ndisturbed: other processes kept {busy:.2f} cores busy"
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
        table = _table(
            f"{found['name']} beside others",
            "tokens",
            "implementation",
            "ms",
            "speed-up (quartiles)",
        )
        for row in found["peers"]:
            speedup = row["speedup"]
            ratio = f"{speedup['median']:.2f}× ({speedup['low']:.2f}–{speedup['high']:.2f})"
            table.add_row(str(row["tokens"]), row["name"], f"{row['ms']['median']:.2f}", ratio)
        yield table
    for name, why in found["absent_peers"].items():
        yield f"{name} {why}"


def _host_table(found: Json) -> Any:
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

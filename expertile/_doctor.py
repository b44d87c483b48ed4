"""`expertile doctor`: what runs here, what does not and why, and whether the results are right."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import expertile
from expertile._numa import schedule
from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.cache import default_cache
from expertile.codegen.errors import CodegenError
from expertile.runtime import openmp
from expertile.runtime.numa import topology

Section = dict[str, Any]

LARGEST_ERROR = 1e-3
"""Relative Frobenius error that the self-test lets pass: few of the intermediate's elements are so near the middle of
two bf16 numbers that fp32 sums round them otherwise than float64 sums do."""

_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512bf16",
    "amx-tile",
    "amx-bf16",
    "amx-int8",
)


def examine() -> dict[str, Section]:
    """All findings, as JSON takes them.

    Raises CodegenError if EXPERTILE_MASK_FEATURES names features there are not.
    """
    return {
        "machine": _machine(),
        "isas": _isas(),
        "amx": asdict(cpu.amx_status()),
        "selected": _selected(),
        "openmp": _openmp(),
        "memory_nodes": _memory_nodes(),
        "versions": _versions(),
        "self_test": _self_test(),
        "cache": _cache(),  # after the self-test, which notices if it can't be used
    }


def _machine() -> Section:
    host = cpu.host()
    known = [
        name for name in _FEATURES if f"+{name}" in host.features or f"-{name}" in host.features
    ]
    return {
        "cpu": cpu.model_name(),
        "cores": os.cpu_count(),
        "cores_for_this_process": len(os.sched_getaffinity(0)),
        "llvm_cpu": host.cpu,
        "triple": host.triple,
        "features": {name: host.has(name) for name in known},
        "masked": os.environ.get(cpu.MASK_VARIABLE) or None,
    }


def _isas() -> Section:
    found = {name: isas.by_name(name) for name in (*isas.names(), *isas.byte_names())}
    return {
        name: {"summary": isa.summary, "unavailable": isa.unavailable()}
        for name, isa in found.items()
    }


def _selected() -> Section:
    forced = os.environ.get("EXPERTILE_ISA") or None
    try:
        return {"isa": isas.select().name, "forced": forced, "error": None}
    except CodegenError as error:
        return {"isa": None, "forced": forced, "error": str(error)}


def _openmp() -> Section:
    runtime = openmp.runtime()
    return {"path": runtime.path if runtime else None, "threads": openmp.threads()}


def _memory_nodes() -> Section:
    found = topology.read()
    return {"numbers": [node.number for node in found.nodes], "schedule": schedule(found)}


def _versions() -> dict[str, str | None]:
    from llvmlite import binding

    packages = ("expertile", "torch", "llvmlite", "numba", "transformers")
    return {
        **{name: _version(name) for name in packages},
        "LLVM": ".".join(map(str, binding.llvm_version_info)),
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache() -> Section:
    info = default_cache().info()
    return {**asdict(info), "directory": str(info.directory)}


# The self-test ------------------------------------------------------------------------------------


def _self_test() -> Section:
    """A small layer through the selected ISA beside the same in float64."""
    result: Section = {"passed": False, "error": None, "bound": LARGEST_ERROR, "problem": None}
    try:
        result["error"] = error = _relative_error()
        result["passed"] = error <= LARGEST_ERROR
    except Exception as problem:  # whatever it is, the doctor's business is to report it
        result["problem"] = f"{type(problem).__name__}: {problem}"
    return result


def _relative_error() -> float:
    """‖layer - reference‖ / ‖reference‖ for 3 tokens, one of which has an expert elsewhere."""
    random = torch.Generator().manual_seed(0)
    gate_up = torch.randn(4, 2 * 72, 200, generator=random).mul(0.1).bfloat16()
    down = torch.randn(4, 200, 72, generator=random).mul(0.1).bfloat16()
    x = torch.randn(3, 200, generator=random).bfloat16().float()
    ids = torch.tensor([[0, 1], [2, 0], [0, -1]])
    router = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 1.0]])
    expected = _reference(x.double(), gate_up.double(), down.double(), ids, router.double())
    actual = expertile.fused_experts(x, gate_up, down, ids, router).double()
    return float((actual - expected).norm() / expected.norm())


def _reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
) -> torch.Tensor:
    """`[T, H]` in float64, the intermediate rounded to bf16 as in the layer."""
    out = torch.zeros_like(x)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        gate, up = (gate_up[expert] @ x[token]).chunk(2)
        hidden = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        out[token] += router[token, slot] * (down[expert] @ hidden)
    return out


# The screen ---------------------------------------------------------------------------------------


def show(console: Console, report: dict[str, Section]) -> None:
    """Print what :func:`examine` found."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str | Text]] = [
        ("machine", _machine_text(report["machine"])),
        ("features", _features_text(report["machine"])),
        *((f"ISA {name}", _isa_text(isa)) for name, isa in report["isas"].items()),
        ("AMX steps", _amx_text(report["amx"])),
        ("selected", _selected_text(report["selected"])),
        ("OpenMP", _openmp_text(report["openmp"])),
        ("memory nodes", _memory_nodes_text(report["memory_nodes"])),
        ("versions", _versions_text(report["versions"])),
        ("cache", _cache_text(report["cache"])),
        ("self-test", _self_test_text(report["self_test"])),
    ]
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def _mark(good: bool) -> tuple[str, str]:
    return ("✓", "green") if good else ("✗", "red")


def _machine_text(machine: Section) -> str:
    cores = f"{machine['cores_for_this_process']} of {machine['cores']} cores"
    return f"{machine['cpu']}, {cores}, LLVM calls it {machine['llvm_cpu']}"


def _features_text(machine: Section) -> Text:
    features = machine["features"]
    text = Text(" ".join(name for name, present in features.items() if present), "green")
    if lacking := [name for name, present in features.items() if not present]:
        text.append(f"  without {' '.join(lacking)}", "dim")
    if machine["masked"]:
        text.append(f"\n{cpu.MASK_VARIABLE}={machine['masked']}", "yellow")
    return text


def _isa_text(isa: Section) -> Text:
    reason = isa["unavailable"]
    text = Text.assemble(_mark(reason is None), f" {isa['summary']}")
    return text.append(f": {reason}", "dim") if reason else text


def _amx_text(amx: Section) -> Text:
    """The steps up to the first that failed."""
    text = Text()
    for step, name in (
        ("cpuid", "CPUID"),
        ("os_enabled", "operating system"),
        ("permission", "permission"),
        ("trial", "trial"),
    ):
        text.append(*_mark(amx[step])).append(f" {name}  ")
        if not amx[step]:
            break
    return text


def _selected_text(selected: Section) -> Text:
    if selected["error"]:
        return Text(selected["error"], "red")
    how = " (forced by EXPERTILE_ISA)" if selected["forced"] else " (the best that works here)"
    return Text.assemble((selected["isa"], "bold green"), how)


def _openmp_text(found: Section) -> str:
    threads = f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    return f"{threads}, {found['path'] or 'no runtime found in this process'}"


def _memory_nodes_text(found: Section) -> str:
    return f"{', '.join(map(str, found['numbers']))}; schedule {found['schedule']}"


def _versions_text(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {number or 'not installed'}" for name, number in versions.items())


def _cache_text(cache: Section) -> Text:
    text = Text.assemble(_mark(cache["enabled"]), f" {cache['directory']}")
    text.append(f": {cache['entries']} objects, {cache['bytes']:,} bytes")
    return text.append(f"\nnot used: {cache['reason']}", "yellow") if cache["reason"] else text


def _self_test_text(test: Section) -> Text:
    text = Text.assemble(_mark(test["passed"]), " ")
    if test["problem"]:
        return text.append(test["problem"], "red")
    return text.append(f"relative error {test['error']:.1e} (at most {test['bound']:.0e})")

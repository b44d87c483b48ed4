"""The command line: what it prints, what it exits with, and that --json leaves stdout to the JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from expertile import _demo, _doctor, _inspect, cli
from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.cache import ObjectCache, default_cache
from expertile.runtime.inspection import inspect, measure

COMMANDS = (
    "doctor", "demo", "bench", "roofline", "tune", "inspect", "numa", "cache info", "cache clear",
)  # fmt: skip
KINDS = ("gate_up:h=96,i=64,m=2", "down:h=96,i=64", "gather:h=96", "finish", "driver")

on_x86 = pytest.mark.skipif(
    not cpu.host().triple.startswith("x86_64"),
    reason="LLVM knows this kind of CPU only, and the features of this kind only",
)


def run(*arguments: str) -> Any:
    """The command in this process: exit_code, stdout, stderr."""
    result = CliRunner().invoke(cli.app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """What it prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def run_apart(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", "from expertile.cli import main; main()", *arguments]
    # Passive: threads of several processes on the same cores must not spin.
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command: str) -> None:
    found: Any = typer.main.get_command(cli.app)
    for name in command.split():
        found = found.commands[name]
    assert any("--json" in parameter.opts for parameter in found.params)
    assert run(*command.split(), "--help").exit_code == 0


# doctor -------------------------------------------------------------------------------------------


def test_doctor_as_json() -> None:
    process = run_apart("doctor", "--json")
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["self_test"]["passed"]
    assert report["self_test"]["error"] <= report["self_test"]["bound"]
    assert tuple(report["isas"]) == (*isas.names(), *isas.byte_names())
    assert report["memory_nodes"]["numbers"]
    assert report["isas"][report["selected"]["isa"]]["unavailable"] is None
    assert report["selected"]["forced"] == os.environ.get("EXPERTILE_ISA")
    assert report["amx"]["usable"] is (report["isas"]["amx"]["unavailable"] is None)
    assert report["versions"]["torch"] == torch.__version__
    assert report["cache"]["directory"] == str(default_cache().directory)


@on_x86
def test_doctor_names_what_the_environment_changes() -> None:
    changes = {"EXPERTILE_ISA": "portable", "EXPERTILE_MASK_FEATURES": "avx512f"}
    process = run_apart("doctor", "--json", **changes)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["selected"] == {"isa": "portable", "forced": "portable", "error": None}
    assert report["machine"]["masked"] == "avx512f"
    assert "avx512bf16" in report["isas"]["avx512_bf16"]["unavailable"]


def test_doctor_fails_where_no_layer_can_run() -> None:
    process = run_apart("doctor", "--json", EXPERTILE_ISA="abacus")
    assert process.returncode == 1
    report = json.loads(process.stdout)
    assert "abacus" in report["selected"]["error"]
    assert "abacus" in report["self_test"]["problem"]


def test_doctor_explains_a_wrong_mask() -> None:
    process = run_apart("doctor", "--json", EXPERTILE_MASK_FEATURES="avx512bf61")
    assert process.returncode == 1
    assert process.stdout == ""
    assert "EXPERTILE_MASK_FEATURES" in process.stderr
    assert "Traceback" not in process.stderr


def test_doctor_on_the_screen() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in (*isas.names(), "AMX steps", "CPUID", "selected", "OpenMP", "versions", "cache"):
        assert word in result.stdout
    assert "✓ relative error" in result.stdout


def test_doctor_fails_with_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_relative_error", lambda: 0.5)
    assert run_json("doctor", exit_code=1)["self_test"]["error"] == 0.5

    def explode() -> float:
        raise RuntimeError("no luck")

    monkeypatch.setattr(_doctor, "_relative_error", explode)
    result = run("doctor")
    assert result.exit_code == 1
    assert "RuntimeError: no luck" in result.stdout


# inspect ------------------------------------------------------------------------------------------

TILE_INSTRUCTIONS = {
    "amx": ("tdpbf16ps", "tileload", "tilestored", "ldtilecfg", "tilerelease"),
    "avx512_bf16": ("vdpbf16ps",),
    "portable": (),
    "portable_exact": (),
}


@on_x86
@pytest.mark.parametrize("spec", KINDS)
@pytest.mark.parametrize("isa", isas.names())
def test_every_kernel_of_every_isa(spec: str, isa: str) -> None:
    found = run_json("inspect", spec, "--isa", isa)
    kind = spec.partition(":")[0]
    assert found["kernel"].startswith(kind)
    assert found["isa"] == ("portable" if kind == "driver" else isa)
    assert found["unavailable"] == isas.by_name(found["isa"]).unavailable()
    assert found["instructions"] == sum(found["classes"].values()) > 0
    assert found["object_bytes"] > 0
    is_expert = kind in ("gate_up", "down")
    assert (found["scratch_bytes"] > 0) is is_expert
    for instruction in TILE_INSTRUCTIONS[isa]:
        assert (instruction in found["assembly"]) is is_expert
    assert "ir" not in found


@on_x86
def test_the_listings_that_are_asked_for() -> None:
    arguments = ("inspect", "gate_up:h=64,i=32", "--isa", "amx")
    both = run_json(*arguments, "--ir", "--optimised-ir")
    for name in ("ir", "optimised_ir"):
        assert "define" in both[name]
        assert "llvm.x86.tdpbf16ps" in both[name]
    assert both["ir"] != both["optimised_ir"]
    assert "assembly" not in both
    assert "assembly" in run_json(*arguments, "--asm", "--ir")


@pytest.mark.parametrize(
    "keys",
    [
        "gate=gelu",
        "gate=relu2",
        "bias=f32",
        "interleaved",
        "transposed",
        "transposed=true,m=32",
        "weights=mxfp4",
    ],
)
def test_keys_change_the_kernel(keys: str) -> None:
    plain = inspect("gate_up:h=64,i=32", "portable")
    assert inspect(f"gate_up:h=64,i=32,{keys}", "portable").ir != plain.ir
    assert inspect("gate_up:h=64,i=32,m=1,gate=silu,transposed=false", "portable").ir == plain.ir


@on_x86
def test_tile_instructions_are_highlighted() -> None:
    kernel = inspect("down:h=64,i=32", "amx")
    screen, page = io.StringIO(), io.StringIO()
    _inspect.show(Console(file=screen, force_terminal=True, width=60), kernel, ["assembly"])
    _inspect.show(Console(file=page, width=60), kernel, ["assembly", "ir"])
    [line] = [line for line in screen.getvalue().splitlines() if "tilerelease" in line]
    assert "43mtilerelease" in line  # on yellow
    assert "\x1b" not in page.getvalue()
    assert max(map(len, kernel.ir.splitlines())) > 60
    for line in kernel.ir.splitlines():
        assert line.rstrip() in page.getvalue()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected one of gate_up, down, gather, finish, driver before the colon, got ''"),
        ("up:h=1", "before the colon, got 'up'"),
        ("down:h=64", "i (intermediate size) is missing"),
        ("down:h=64,i=0", "i: expected a number from 1 to"),
        ("down:h=64,i=-1", "i: expected a number from 1 to"),
        ("down:h=64,i=6.5", "i: expected a number from 1 to"),
        ("down:h=64,i=64,m=33", "m: expected a number from 1 to 32, got '33'"),
        (
            "down:h=64,i=64,gate=silu",
            "down: expected h, i, m, b, bias, transposed, weights, activations, variant, got 'gate=silu'",
        ),
        ("gate_up:h=64,i=64,gate=tanh", "gate: expected one of silu, gelu,"),
        ("gate_up:h=64,i=64,bias=fp8", "bias: expected one of none, bf16, f32, got 'fp8'"),
        ("gate_up:h=64,i=64,transposed=2", "transposed: expected one of true, false, got '2'"),
        ("gather:h=64,h=32", "gather: h is given twice"),
        ("finish:dtype=f64", "dtype: expected one of bf16, f16, f32, got 'f64'"),
        ("driver:m=1", "driver: expected no keys, got 'm=1'"),
        ("down:h=64,i=64,variant=wide", "variant: expected best or one of "),
    ],
)
def test_a_wrong_spec_is_explained(spec: str, message: str) -> None:
    result = run("inspect", spec, "--isa", "portable", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: SPEC: ")
    assert message in result.stderr
    assert "gate_up:h=2048,i=768,m=4,gate=silu" in result.stderr  # all that is accepted follows


def test_a_variant_can_be_named() -> None:
    best = inspect("down:h=64,i=2048,m=4", "portable")
    other = inspect("down:h=64,i=2048,m=4,variant=2x2k512p16_0", "portable")
    assert (best.choice, other.choice) == ("predicted", None)
    assert other.variant == "2x2k512p16_0" != best.variant
    assert other.kernel.endswith(other.variant)
    plain = inspect("down:h=64,i=2048,m=4,variant=2x2k512p16", "portable")
    assert "prefetch" in other.statistics.classes
    assert "prefetch" not in plain.statistics.classes
    assert other.ir != best.ir


def test_an_unknown_isa_is_explained() -> None:
    result = run("inspect", "finish", "--isa", "abacus")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected one of amx, avx512_bf16, portable" in result.stderr


def test_statistics_of_the_hot_loop() -> None:
    """Two loops in one: the inner one multiplies and spills, the outer one spills too, another only adds."""
    statistics = measure(
        """
f:
	pushq	%rbx
	movq	%rdi, -8(%rsp)
.L1:
	vmovups	%zmm1, 64(%rsp)
.L2:
	vmovups	(%rdi), %zmm0
	vmovups	%zmm0, -128(%rsp)
	vmovdqu32	%zmm0, 8(%rsp,%rax,4) {%k1}
	vaddps	64(%rsp), %zmm0, %zmm0
	cmpq	%rax, 16(%rsp)
	vdpbf16ps	%zmm1, %zmm0, %zmm2
	vfmadd231ps	%zmm1, %zmm0, %zmm2
	prefetcht1	64(%rdi)
	jne	.L2
	addq	$1, %rax
	jl	.L1
.L3:
	vmovups	%zmm0, (%rsp)
	jne	.L3
	retq
"""
    )
    assert statistics.instructions == 17
    assert statistics.hot_loops == 1
    assert statistics.spills == 2
    assert statistics.hot_classes == {
        "dot product": 1,
        "multiply-add": 1,
        "prefetch": 1,
        "vector move": 3,
        "vector": 1,
        "branch": 1,
        "scalar": 1,
    }


def test_without_tile_instructions_the_deepest_loop_is_hot() -> None:
    statistics = measure(
        "\n.L1:\n.L2:\n\tincq\t%rax\n\tjne\t.L2\n\tjne\t.L1\n.L3:\n\tdecq\t%rax\n\tjne\t.L3\n"
    )
    assert (statistics.hot_loops, statistics.hot_classes) == (1, {"branch": 1, "scalar": 1})


# cache --------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectCache]:
    """The process's cache, in a directory of its own."""
    monkeypatch.setenv("EXPERTILE_CACHE_DIR", str(tmp_path / "cache"))
    default_cache.cache_clear()
    yield default_cache()
    default_cache.cache_clear()


def test_cache_info_and_clear(cache: ObjectCache) -> None:
    empty = {
        "directory": str(cache.directory),
        "entries": 0,
        "bytes": 0,
        "enabled": True,
        "reason": "",
    }
    assert run_json("cache", "info") == empty
    cache.put("one", b"object")
    cache.put("two", b"object")
    assert run_json("cache", "info")["entries"] == 2
    assert "entries    2" in run("cache", "info").stdout
    removed = {"directory": str(cache.directory), "removed": 2}
    assert run_json("cache", "clear") == removed
    assert run_json("cache", "info") == empty
    assert run("cache", "clear").stdout == f"0 objects removed from {cache.directory}\n"


def test_a_cache_that_others_can_write_to(cache: ObjectCache) -> None:
    cache.put("one", b"object")
    cache.directory.chmod(0o777)
    info = run_json("cache", "info")
    assert not info["enabled"]
    assert "others can write to it" in info["reason"]
    result = run("cache", "clear", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "others can write to it" in result.stderr


# demo ---------------------------------------------------------------------------------------------


def test_demo() -> None:
    pytest.importorskip("transformers")
    small = "--layers 1 --experts 16 --prompt 24 --tokens 4 --rounds 1"
    process = run_apart("demo", "--json", *small.split())
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert tuple(report["results"]) == _demo.IMPLEMENTATIONS
    assert report["agrees"]
    assert report["positions"] == 24 + 2 * 4
    for result in report["results"].values():
        assert result["prefill_tokens_per_s"] > 0
        assert 0 < result["experts_ms"] < result["decode_ms"]
        assert result["relative_error"] <= _demo.LARGEST_ERROR
    assert report["results"]["expertile"]["relative_error"] > 0  # it did not run eager
    assert set(report["speedup"]) == {"eager", "grouped_mm"}


def findings(scale: float) -> dict[str, Any]:
    """A report in which Expertile's logits are those of the others times `scale`."""
    settings = _demo.Settings(layers=1, experts=8, prompt=4, tokens=2, rounds=3)
    logits = torch.linspace(-1, 1, 24).view(6, 4)
    seconds = {"eager": (4.0, 9.0, 1.0), "grouped_mm": (2.0, 2.0, 8.0), "expertile": (1.0, 0.5, 9)}
    return _demo._report(
        settings,
        {name: [_demo._Times(t, t / 2, t / 4) for t in times] for name, times in seconds.items()},
        {"eager": logits, "grouped_mm": logits, "expertile": logits * scale},
    )


def test_demo_reports_medians() -> None:
    report = findings(1.01)
    assert report["results"]["grouped_mm"]["prefill_tokens_per_s"] == 2
    assert report["results"]["expertile"]["decode_ms"] == 500
    assert report["results"]["expertile"]["experts_ms"] == 250
    assert report["speedup"]["eager"] == {"prefill": 4, "decode": 4, "experts": 4}
    assert report["results"]["expertile"]["relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert report["agrees"]


@pytest.mark.parametrize("scale", [1.05, -1.0, float("nan")])
def test_demo_fails_without_agreement(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "run", lambda settings, console: findings(scale))
    assert not run_json("demo", exit_code=1)["agrees"]
    result = run("demo")
    assert result.exit_code == 1
    assert "DOES NOT AGREE" in result.stdout


def test_demo_without_transformers() -> None:
    """In a process of its own: hiding a module that others have imported would leave two copies of the adapter."""
    script = (
        "import sys; sys.modules['transformers'] = None; from expertile.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "demo", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (1, "")
    assert "pip install 'expertile[transformers]'" in result.stderr

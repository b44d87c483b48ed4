"""The machine's ceilings: kernels that read what they claim, working sets, formulas, and what the command reports."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import subprocesses
import torch
from typer.testing import CliRunner

from expertile import _roofline, cli
from expertile._bench import SHAPES, Shape
from expertile.codegen import isa as isas
from expertile.runtime import caches, jit, openmp, roofline
from expertile.runtime.caches import Cache
from expertile.runtime.roofline import Probe
from expertile.templates.stream import TileRead

# Tile reads ---------------------------------------------------------------------------------------


def xor(data: torch.Tensor) -> int:
    """Of the 8-byte words; zeros pad the last."""
    padded = np.zeros(-(-data.numel() // 8) * 8, np.uint8)
    padded[: data.numel()] = data.numpy()
    return int(np.bitwise_xor.reduce(padded.view(np.int64)))


@pytest.mark.parametrize("row_bytes", [64, 192])
@pytest.mark.parametrize("size", [1, 64, 1024, 3072, 3 * 3072 + 1000])
@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_a_tile_read_covers_every_byte_and_no_other(
    isa: str, row_bytes: int, size: int, sweeps: int
) -> None:
    kernel = TileRead(isa, row_bytes, False, sweeps)
    data = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)[: size + 3]  # aligned to nothing
    items = np.array([(data.data_ptr() + 3, size)], np.int64)
    # Tile registers can't be added up: only what follows the last block counts there.
    first = size // kernel.block_bytes * kernel.block_bytes if isa == "amx" else 0
    expected = xor(data[3 + first :]) if sweeps % 2 else 0
    assert roofline.run(jit.address(kernel), items, 1) == expected


def emulated_tile_loads() -> int:
    import amx_emulator
    import numpy as np

    from expertile.codegen import cpu
    from expertile.codegen.compiler import Target, compile_ir
    from expertile.runtime import roofline
    from expertile.templates.stream import TileRead

    amx_emulator.install()
    host, amx = cpu.host(), {"amx-tile", "amx-bf16", "amx-int8"}
    features = {feature for feature in host.features if feature[1:] not in amx}
    target = Target(host.cpu, tuple(sorted(features | {"+" + name for name in amx})), host.triple)
    kernel = TileRead("amx", 64, streaming=True, sweeps=5)
    code = compile_ir(kernel.name, kernel.ir(), target)
    data = np.zeros(3 * 1024, np.uint8)
    roofline.run(code.address, np.array([(data.ctypes.data, data.size)], np.int64), 1)
    assert amx_emulator.live_configurations() == 0
    return int(amx_emulator.counts()["TILELOADDT1"])


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64")
    or isas.by_name("amx").unavailable() is None,
    reason="for x86-64 Linux without AMX",
)
def test_tiles_are_loaded_in_every_sweep() -> None:
    assert subprocesses.run(emulated_tile_loads) == 3 * 5


def test_each_thread_reads_a_memory_of_its_own_over_and_over(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_SAMPLE_BYTES", 10 * 4096)
    seen: list[list[list[int]]] = []
    monkeypatch.setattr(roofline, "run", lambda kernel, items, threads: seen.append(items.tolist()))
    probes = roofline.cache_reads(4096, 3)
    assert len(probes) == (2 if isa == "amx" else 1)
    for probe in probes.values():
        assert probe._step() == 3 * 10 * 4096  # bytes: all threads, ten sweeps
        (start, _), *_ = items = seen[-1]
        assert items == [[start + offset, 4096] for offset in (0, 4096, 8192)]


def test_a_probe_prepares_each_sample_before_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SAMPLE_SECONDS", 0.0001)
    done: list[str] = []

    def step() -> int:
        done.append("step")
        return 1

    probe = Probe(step, prepare=lambda: done.append("prepare"))
    for number in range(2):
        done.clear()
        probe.sample(number)
        assert done == ["prepare", *["step"] * (len(done) - 1)]
        assert len(done) > 1
    assert set(probe.rates) == {0, 1}


def test_progress_is_reported_between_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SAMPLE_SECONDS", 0.0001)
    probes, seen = [Probe(lambda: 1) for _ in range(3)], list[float]()
    roofline.interleave(probes[:2], probes[2:], 0.001, seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 0
    rounds = [set(probe.rates) for probe in probes]
    assert rounds[0] == rounds[1] == rounds[2]
    assert len(seen) == 3 * len(rounds[0]) >= 9


# Caches -------------------------------------------------------------------------------------------


def lay_out(cpu: Path, *entries: tuple[str, str, str, str]) -> Path:
    """A processor's folder as Linux's sysfs has it."""
    for number, values in enumerate(entries):
        index = cpu / "cache" / f"index{number}"
        index.mkdir(parents=True)
        for name, value in zip(("type", "level", "size", "shared_cpu_list"), values, strict=True):
            (index / name).write_text(value + "\n")
    return cpu


def test_caches_are_read_per_core(tmp_path: Path) -> None:
    cpu = lay_out(
        tmp_path,
        ("Data", "1", "48K", "0,28"),  # two hardware threads a core
        ("Instruction", "1", "32K", "0,28"),
        ("Unified", "2", "2M", "0,28"),
        ("Unified", "3", "107520K", "0-27,28-55"),
    )
    found, assumed = caches.caches(cpu)
    assert assumed is None
    assert found == (Cache(1, 48 << 10, 1), Cache(2, 2 << 20, 1), Cache(3, 105 << 20, 28))
    assert [cache.name for cache in found] == ["L1", "L2", "L3"]


@pytest.mark.parametrize("broken", ["missing", "incomplete", "unreadable", "no data"])
def test_without_a_report_the_sizes_are_assumed_and_why(tmp_path: Path, broken: str) -> None:
    if broken == "incomplete":
        lay_out(tmp_path, ("Data", "1", "32K", "0"))
        (tmp_path / "cache" / "index0" / "size").unlink()
    elif broken == "unreadable":
        lay_out(tmp_path, ("Data", "1", "much", "0"))
    elif broken == "no data":
        lay_out(tmp_path, ("Instruction", "1", "32K", "0"))
    found, why = caches.caches(tmp_path)
    assert found == caches.ASSUMED
    assert why is not None
    assert str(tmp_path / "cache") in why


def test_working_sets_fit_their_cache_and_not_the_smaller_one() -> None:
    found = (Cache(1, 48 << 10, 1), Cache(2, 2 << 20, 1), Cache(3, 105 << 20, 28))
    sets = caches.working_sets(found, 2)
    assert sets == {"L1": 24 << 10, "L2": 192 << 10, "L3": 8 << 20}
    sets = caches.working_sets(found, 12)  # 8.75 MiB of the third cache for each
    assert sets["L3"] == 105 * (1 << 20) // 12 // 2 // 1024 * 1024
    crowded = caches.working_sets(found, 28)
    assert {**crowded, "L3": None} == {**sets, "L3": None}
    assert "L3 has 3840 KiB a thread" in str(crowded["L3"])


def test_this_machine_has_working_sets() -> None:
    found, _ = caches.caches()
    sets = caches.working_sets(found, 1)
    sizes = [size for size in sets.values() if isinstance(size, int)]
    assert sizes == sorted(sizes)
    assert all(size % 1024 == 0 and size > 0 for size in sizes)
    assert list(sets) == [cache.name for cache in found]


# Formulas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(4, 1, 3), (4, 2, 3), (5, 3, 2), (3, 3, 2)]
)
def test_expected_experts_by_counting_all_routings(experts: int, top_k: int, tokens: int) -> None:
    routings = list(product(combinations(range(experts), top_k), repeat=tokens))
    distinct = sum(len({expert for token in routing for expert in token}) for routing in routings)
    shape = Shape("test", 64, 32, experts, top_k)
    expected = float(Fraction(distinct, len(routings)))
    assert _roofline.expected_experts(shape, tokens) == pytest.approx(expected, rel=1e-12)


def test_a_bound_is_the_larger_of_both_times() -> None:
    shape = Shape("test", 100, 10, 4, 2)
    # Two tokens use 4 · (1 - 1/4) = 3 experts of 3 · 100 · 10 bf16, and multiply with two each.
    found = _roofline.bound(shape, 2, bandwidth=6000.0, peak=48_000.0)
    assert found == {
        "tokens": 2,
        "experts": 3.0,
        "tokens_per_expert": pytest.approx(4 / 3),
        "bytes": 18_000.0,
        "operations": 24_000,
        "memory_ms": 3000.0,
        "compute_ms": 500.0,
        "bound_ms": 3000.0,
        "bound": "memory",
    }
    found = _roofline.bound(shape, 2, bandwidth=60_000.0, peak=24_000.0)
    assert (found["bound_ms"], found["bound"]) == (1000.0, "compute")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
@pytest.mark.parametrize("corner", [0.3, 1.0, 1.01, 2.5, 15.6, 232.0])
def test_the_corner_is_the_first_call_that_multiplication_limits(
    shape: Shape, corner: float
) -> None:
    tokens = _roofline.corner_tokens(shape, corner)

    def side(count: int) -> str:
        return str(_roofline.bound(shape, count, bandwidth=1e9, peak=corner * 1e9)["bound"])

    # One token an expert is on the edge of a corner of 1, and rounding decides.
    if corner != 1.0:
        assert side(tokens) == "compute"
    assert all(side(count) == "memory" for count in range(1, tokens))


@pytest.mark.parametrize(
    ("threads", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (12, [1, 2, 4, 8, 12])]
)
def test_thread_counts(threads: int, counts: list[int]) -> None:
    assert _roofline.thread_counts(threads) == counts


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss", "30x7x3x2"])
def test_weights_have_the_shape_and_no_two_words_alike(name: str) -> None:
    shape = Shape(name, 30, 7, 3, 2, transposed=name == "gpt-oss")
    first, second, *more = matrices = _roofline.weights(shape, 2.5 * 3 * shape.expert_bytes / 2**30)
    sizes = [(3, 30, 14), (3, 7, 30)] if shape.transposed else [(3, 14, 30), (3, 30, 7)]
    assert [tuple(first.shape), tuple(second.shape)] == sizes
    assert len(more) == 4  # three layers
    assert all(matrix.is_contiguous() and matrix.dtype == torch.bfloat16 for matrix in matrices)
    words = torch.cat([matrix.flatten()[: matrix.numel() // 4 * 4] for matrix in matrices])
    words = words.view(torch.int64)
    assert len(words.unique()) == len(words)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples too short to mean anything."""
    monkeypatch.setattr(roofline, "_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(roofline, "_SAMPLE_BYTES", 1 << 16)
    monkeypatch.setattr(roofline, "_MULTIPLY_STEPS", 4)


def run(options: str) -> Any:
    return CliRunner().invoke(cli.app, ["roofline", *options.split()])


TINY = "--shape 64x32x6x2 --tokens 3,1 --gib 0.0001 --seconds 0.01 --threads"
THREADS = [1, 2] if openmp.runtime() else [1]
SPREAD = {"median", "low", "high", "rounds"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("threads", THREADS)
def test_the_json_has_ceilings_and_bounds(threads: int, isa: str, tmp_path: Path) -> None:
    output = tmp_path / "roofline.json"
    result = run(f"{TINY} {threads} --json --output {output}")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert set(report) == {"machine", "caches", "shapes"}
    assert (report["machine"]["threads"], report["machine"]["isa"]) == (threads, isa)
    sets = report["caches"]["bytes_per_thread"]
    levels = {f"L{cache['level']}" for cache in report["caches"]["levels"]}
    assert levels == {*sets, *report["caches"]["not_measured"]}
    [found] = report["shapes"]
    assert (found["name"], found["hidden"], found["top_k"]) == ("64x32x6x2", 64, 2)
    assert found["weight_bytes"] % (6 * 2 * 3 * 64 * 32) == 0
    assert found["weight_bytes"] >= 0.0001 * 2**30
    assert [each["threads"] for each in found["ceilings"]] == list(range(1, threads + 1))
    for each in found["ceilings"]:
        assert set(each["peak_tflops"]) == SPREAD
        assert [read["place"] for read in each["reads"]] == ["memory", *reversed(sets)]
        for read in each["reads"]:
            rates = {kernel: rate["median"] for kernel, rate in read["gb_per_s"].items()}
            assert rates[read["best"]] == max(rates.values()) > 0
            if read["place"] != "memory":
                assert all(kernel.startswith("tile_read_16x64") for kernel in rates)
            for rate in read["gb_per_s"].values():
                assert set(rate) == SPREAD
                assert rate["rounds"] == each["peak_tflops"]["rounds"] >= 3  # the same rounds
    check_bounds(found)


def check_bounds(found: dict[str, Any]) -> None:
    """Of 64 × 32, 6 experts, top-2, from the ceilings."""
    top = found["ceilings"][-1]
    memory = top["reads"][0]
    bandwidth = memory["gb_per_s"][memory["best"]]["median"] * 1e9
    peak = top["peak_tflops"]["median"] * 1e12
    assert [row["tokens"] for row in found["bounds"]] == [1, 3]
    for row in found["bounds"]:
        experts = 6 * (1 - (4 / 6) ** row["tokens"])
        seconds = experts * 3 * 64 * 32 * 2 / bandwidth, row["tokens"] * 2 * 6 * 64 * 32 / peak
        assert row["memory_ms"] == pytest.approx(seconds[0] * 1e3)
        assert row["compute_ms"] == pytest.approx(seconds[1] * 1e3)
        assert row["bound"] == ("memory" if seconds[0] > seconds[1] else "compute")
        assert row["bound_ms"] == pytest.approx(max(seconds) * 1e3)
    assert found["corner"]["tokens_per_expert"] == pytest.approx(peak / bandwidth)
    assert found["corner"]["tokens"] >= 1


@pytest.mark.usefixtures("quick")
def test_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(
        _roofline, "caches", lambda: ((Cache(1, 8 << 10, 1), Cache(2, 12 << 10, 1)), "none here")
    )
    result = run(f"{TINY} {THREADS[-1]}")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    words = (
        "cache sizes are assumed: none here",
        "not measured: L2 has 12 KiB a thread",
        "64x32x6x2: ceilings",
        "vector_read_",
        "tile_read_16x64",
        "L1, 4 KiB",
        "bf16 TFLOP/s",
        f"{THREADS[-1]} thread",
        "64 × 32 × 6, top-2",
        "both limits meet at",
    )
    for word in words:
        assert word in result.stdout
    assert any(word in result.stdout for word in ("memory │", "compute │"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shape 1x2x3", "hidden x intermediate x experts x top-k"),
        ("--shape 8x8x2x3", "got '8x8x2x3'"),
        ("--tokens 1,b", "got '1,b'"),
        ("--tokens 0", "got '0'"),
        ("--seconds 0", "expected a number above 0, got 0.0"),
        ("--seconds nan", "expected a number above 0, got nan"),
        ("--gib -1", "expected a number above 0, got -1.0"),
        ("--threads 0", "Invalid value for '--threads'"),
        ("--output /nowhere/at/all.json", "/nowhere/at is no directory"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(_roofline, "measure", measure)
    monkeypatch.setenv("COLUMNS", "200")
    result = run(options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_two_threads_need_an_openmp_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    result = run("--threads 2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--threads: expected 1, as no OpenMP runtime is loaded, got 2" in result.stderr


# The picture --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("with_bench", [False, True])
def test_the_picture(tmp_path: Path, with_bench: bool) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "roofline.json", tmp_path / "picture.png"
    assert run(f"{TINY} 1 --shape 32x32x4x1 --output {source}").exit_code == 0
    command = [sys.executable, "benchmarks/plot_roofline.py", str(source)]
    if with_bench:
        call = {"tflops": {"median": 0.1}, "gb_per_s": {"median": 20.0}}
        bench = tmp_path / "bench.json"
        bench.write_text(json.dumps({"shapes": [{"name": "64x32x6x2", "calls": [call]}]}))
        command += ["--bench", str(bench), "--output", str(picture)]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    drawn = picture if with_bench else source.with_suffix(".png")
    assert drawn.read_bytes().startswith(b"\x89PNG")

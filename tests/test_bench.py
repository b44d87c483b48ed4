"""The roofline's kernels read what they claim to read, and the bench reports what it measures."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import expertile
from expertile import _bench
from expertile._bench import formats, fresh, profiles, protocol, reuse
from expertile._bench.implementations import ours
from expertile._bench.workload import Subject, skewed
from expertile.codegen import isa as isas
from expertile.runtime import jit, openmp, roofline
from expertile.runtime.spec import LayerKernels
from expertile.runtime.weights import ExpertWeights
from expertile.templates.stream import Multiply, VectorRead

READS = [
    VectorRead(1, 4096, 4),
    VectorRead(1, 4096, 16, 2048),
    VectorRead(8, 128, 1),
    VectorRead(16, 1536, 1, 512),
]


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def _xor(data: torch.Tensor) -> int:
    padded = np.zeros(-(-data.numel() // 8) * 8, np.uint8)
    padded[: data.numel()] = data.numpy()
    return int(np.bitwise_xor.reduce(padded.view(np.int64)))


@pytest.mark.parametrize("read", READS, ids=lambda read: read.name)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, 24576, 100_003])
def test_a_read_covers_every_byte_and_no_other(read: VectorRead, size: int) -> None:
    data = _bytes(size + 64)[: size + 3]
    items = np.array([(data.data_ptr() + 3, size)], np.int64)  # aligned to nothing
    assert roofline.run(jit.address(read), items, 1) == _xor(data[3:])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_items_run_once_on_any_number_of_threads(threads: int) -> None:
    if threads > 1 and openmp.runtime() is None:
        pytest.skip("no OpenMP runtime")
    read = READS[2]
    regions = [_bytes(3 << 20), _bytes(1000), _bytes((1 << 20) + 24)]
    items = roofline.divide(regions, read.block_bytes)
    assert items[:, 1].sum() == sum(region.numel() for region in regions)
    expected = np.bitwise_xor.reduce([_xor(region) for region in regions])
    assert roofline.run(jit.address(read), items, threads) == expected


def test_probes_read_on_where_the_last_sample_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SAMPLE_BYTES", 2 << 20)
    monkeypatch.setattr(roofline, "_SAMPLE_SECONDS", 1e-9)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        roofline, "run", lambda kernel, items, threads: seen.extend(map(tuple, items.tolist()))
    )
    region = torch.zeros(5 << 20, dtype=torch.uint8).view(-1, 4096)
    probe, *_ = roofline.reads([region], 1).values()
    for number in range(5):
        probe.sample(number)
    assert set(seen) == set(map(tuple, roofline.divide([region], 4096).tolist()))


_TILES = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import amx_emulator
from expertile.codegen import cpu
from expertile.codegen.compiler import Target, compile_ir
from expertile.runtime import roofline
from expertile.templates.stream import Multiply, TileRead

if amx_emulator.needed():
    amx_emulator.install()
else:
    cpu.request_amx_permission()
host, amx = cpu.host(), {"amx-tile", "amx-bf16", "amx-int8"}
features = {feature for feature in host.features if feature[1:] not in amx}
target = Target(host.cpu, tuple(sorted(features | {"+" + name for name in amx})), host.triple)

def run(kernel, address, amount):
    compiled = compile_ir(kernel.name, kernel.ir(), target)
    return roofline.run(compiled.address, np.array([(address, amount)], np.int64), 1)

data = np.zeros(2 * 16 * 128 + 72, np.uint8)  # two blocks of rows, and a rest that is not read in tiles
data[-8] = 5
for streaming in (False, True):
    assert run(TileRead("amx", 128, streaming), data.ctypes.data, data.size) == 5
if amx_emulator.needed():
    counts = amx_emulator.counts()
    assert counts["TILELOADD"] == counts["TILELOADDT1"] == 4, counts
    assert amx_emulator.live_configurations() == 0

operands = np.full(Multiply.OPERAND_BYTES // 2, 0x3F80, np.uint16)  # ones
assert Multiply("amx").operations == 2 * 32 * 32 * 32
run(Multiply("amx"), operands.ctypes.data, 3)
assert (operands.view(np.float32) == 3 * 32).all()
"""


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="for x86-64 Linux"
)
def test_tiles_are_loaded_once_and_multiplied_as_often_as_asked() -> None:
    command = [sys.executable, "-c", _TILES, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_peak_multiplies_as_often_as_asked(isa: str) -> None:
    kernel = Multiply(isa)
    operands = torch.ones(kernel.OPERAND_BYTES // 2, dtype=torch.bfloat16)
    roofline.run(jit.address(kernel), np.array([(operands.data_ptr(), 3)], np.int64), 1)
    products = int((operands.view(torch.float32) == 3 * 32).sum())
    assert products * 2 * 32 == kernel.operations


def test_every_expert_is_used_before_any_is_used_again() -> None:
    shape = _bench.Shape("test", 32, 32, 12, 3)
    calls = _bench.schedule(shape, 2, 1)
    assert [call.layer for call in calls[:4]] == [0, 1, 0, 1]
    for layer in range(2):
        used = torch.cat([call.ids.flatten() for call in calls if call.layer == layer])
        for first in range(0, len(used), 12):
            assert len(set(used[first : first + 12].tolist())) == len(used[first : first + 12])
    assert all(call.bytes == 3 * 2 * 3 * 32 * 32 for call in calls)


def test_routings_name_distinct_experts_and_count_their_bytes() -> None:
    shape = _bench.Shape("test", 16, 8, 40, 5)
    for call in _bench.schedule(shape, 1, 7):
        assert call.ids.shape == call.router.shape == (7, 5)
        assert all(len(set(token)) == 5 for token in call.ids.tolist())
        assert call.bytes == len(set(call.ids.flatten().tolist())) * 2 * 3 * 16 * 8
        torch.testing.assert_close(call.router.sum(1), torch.ones(7))


@pytest.mark.parametrize(("experts", "cold"), [(128, 60), (16, 15)])
def test_a_skewed_batch_has_one_busy_expert(experts: int, cold: int) -> None:
    shape = _bench.Shape("test", 16, 8, experts, 4)
    calls = skewed(shape, 2)
    assert [call.layer for call in calls[:4]] == [0, 1, 0, 1]
    for call in calls:
        assert call.ids.shape == call.router.shape == (500 + cold, 4)
        _, tokens = call.ids[call.ids >= 0].unique(return_counts=True)
        assert sorted(tokens.tolist()) == [1] * cold + [500]
        assert call.bytes == (cold + 1) * shape.expert_bytes
    assert len({call.ids[0, 0].item() for call in calls}) > 1


def test_a_subject_has_whole_layers_and_compiles_what_calls_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = _bench.Shape("test", 64, 32, 6, 2)
    subject = Subject.of(shape, 6 * 2 * 3 * 64 * 32 * 2.5 / 2**30)
    assert (len(subject.layers), len(subject.matrices)) == (3, 6)
    asked: list[list[int]] = []
    monkeypatch.setattr("expertile.compile", lambda spec, rows: asked.append(rows))
    ids = torch.tensor([[0, 1], [1, -1], [1, 5]])
    subject.compile([_bench.Call(0, ids, torch.ones(3, 2), 0)])
    assert asked == [[1, 3]]


@pytest.mark.parametrize("weights", ["bf16", "mxfp4", "int8", "w8a8", "q4_K"])
def test_calls_find_everything_compiled(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = _bench.Shape("test", 256, 256, 6, 2).in_format(weights)
    subject, calls = Subject.of(shape, 1e-4), _bench.schedule(shape, 1, 3)
    subject.compile(calls)
    monkeypatch.delattr(LayerKernels, "add_missing")
    x = torch.randn(3, 256).bfloat16()
    for call in calls:
        y = ours(shape)(subject.layers[0], x, call.ids, call.router)
        assert y.isfinite().all()
        assert y.abs().sum() > 0


@pytest.mark.parametrize("weights", ["int8", "w8a8", "fp8_block", "int4_g32", "mxfp4", "q6_K"])
def test_bytes_are_the_format_s_own(weights: str) -> None:
    shape = _bench.Shape("test", 512, 256, 4, 2).in_format(weights)
    layer = _bench.Weights.random(shape)
    assert isinstance(layer.gate_up, ExpertWeights)
    assert isinstance(layer.down, ExpertWeights)
    assert layer.gate_up.nbytes + layer.down.nbytes == 4 * shape.expert_bytes
    gate_up, down = Subject(shape, [layer]).matrices
    assert gate_up.shape[:2] == (4, 512)
    assert gate_up.nbytes == 4 * 512 * gate_up.shape[-1] * gate_up.element_size() == 2 * down.nbytes
    assert down.is_contiguous()
    [call, *_] = _bench.schedule(shape, 1, 1)
    assert call.bytes == 2 * shape.expert_bytes


def test_layers_have_different_weights() -> None:
    for weights in ("bf16", "mxfp4"):
        shape = _bench.Shape("test", 64, 32, 2, 1).in_format(weights)
        first, second, *_ = Subject.of(shape, 1e-4).matrices[::2]
        assert not torch.equal(first, second)


def test_quantised_weights_are_never_transposed() -> None:
    shape = _bench.SHAPES["gpt-oss"]
    assert shape.in_format("bf16") == shape
    assert not shape.in_format("mxfp4").transposed
    assert shape.in_format("mxfp4").interleaved


SPREAD = {"median", "low", "high", "rounds"}


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_a_measurement_has_all_its_parts(gpt_oss: bool) -> None:
    shape = _bench.Shape("test", 64, 32, 4, 2)
    if gpt_oss:
        shape = _bench.Shape("test", 64, 32, 4, 2, "swiglu_oai", True, True, True)
    others = {} if gpt_oss else _bench.peers() | {"nobody": "absent: it does not exist"}
    found = _bench.measure(shape, [1, 3, 4], gib=1e-4, seconds=0.2, threads=1, others=others)
    assert json.loads(json.dumps(found)) == found
    assert found["weight_bytes"] == found["layers"] * 4 * 2 * 3 * 64 * 32 >= 1e-4 * 2**30
    assert found["read"]["best"] in found["read"]["gb_per_s"]
    assert set(found["peak_tflops"]) == SPREAD
    assert found["cores_used_by_others"] is None or found["cores_used_by_others"] >= 0
    assert [call["tokens"] for call in found["calls"]] == [1, 3, 4]
    for call in found["calls"]:
        assert set(call["share"]) == SPREAD
        assert call["share"]["low"] <= call["share"]["median"] <= call["share"]["high"]
        assert call["share"]["rounds"] >= 3
        assert call["bound"] in ("memory", "compute")
    if gpt_oss:
        assert found["peers"] == []
        return
    assert found["absent_peers"]["nobody"] == "absent: it does not exist"
    names = {"F.linear", "grouped_mm"} - set(found["absent_peers"])
    assert {(peer["tokens"], peer["name"]) for peer in found["peers"]} == {
        (tokens, name) for tokens in (1, 4) for name in names
    }
    assert all(peer["difference"] < 2e-2 for peer in found["peers"])


def test_formats_are_measured_beside_bf16() -> None:
    shape = _bench.Shape("test", 64, 32, 8, 2)
    weights = ["mxfp4", "q4_K", "int8"]
    found = formats.measure(shape, [1, 3], weights=weights, gib=1e-4, seconds=0.2, threads=1)
    assert json.loads(json.dumps(found)) == found
    assert "256" in found["absent_formats"].pop("q4_K")
    assert found["absent_formats"] == {}
    assert [each["weights"] for each in found["formats"]] == ["mxfp4", "int8"]
    scales = 32 * (2 * 32 + 64)  # bits, of a row each
    for each, bits in zip(found["formats"], (4.25, 8 + scales / (3 * 64 * 32)), strict=True):
        assert each["expert_bytes"] * 8 == bits * 3 * 64 * 32
        assert each["weight_bytes"] == each["layers"] * 8 * each["expert_bytes"] >= 1e-4 * 2**30
        assert [call["tokens"] for call in each["calls"]] == [1, 3]
        for call in each["calls"]:
            assert set(call["speedup"]) == set(call["share"]) == SPREAD
            assert call["speedup"]["rounds"] >= 3
            assert set(call["bf16"]["share"]) == SPREAD


def test_a_speed_up_can_be_of_other_things_than_bytes() -> None:
    ours_, other = roofline.Probe(lambda: 1), roofline.Probe(lambda: 1)
    ours_.rates, other.rates = {0: 10.0, 1: 10.0}, {0: 20.0, 1: 20.0, 2: 1.0}
    assert protocol.speedup(ours_, other)["median"] == 0.5
    assert protocol.speedup(ours_, other, 4.0) == {"median": 2, "low": 2, "high": 2, "rounds": 2}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_has_a_thread_s_times_in_each_pass(threads: int) -> None:
    if threads > 1 and openmp.runtime() is None:
        pytest.skip("no OpenMP runtime")
    shape = _bench.Shape("test", 256, 128, 70, 2)
    with _bench.torch_threads(threads):
        found = profiles.measure(shape, [1, 3], gib=1e-4, seconds=0.2, threads=threads)
    assert json.loads(json.dumps(found)) == found
    assert [(b["batch"], b["tokens"]) for b in found["batches"]] == [
        ("1", 1), ("3", 3), ("skewed", 560),
    ]  # fmt: skip
    read = found["read"]["gb_per_s"][found["read"]["best"]]
    for batch in found["batches"]:
        assert set(batch["ms"]) == set(batch["idle"]) == SPREAD
        assert batch["ms"]["rounds"] >= 3
        assert 0 <= batch["idle"]["median"] < 1
        assert [row["pass"] for row in batch["passes"]] == ["gather", "gate_up", "down"]
        for row in batch["passes"]:
            assert 1 <= row["imbalance"]["median"] <= threads
            assert 0 <= row["idle"]["median"] <= 1
            assert 1 <= len(row["threads"]) <= threads
            assert all(each["busy_ms"] >= 0 <= each["barrier_ms"] for each in row["threads"])
    # 61 experts, whose weights take as long as they do at the read bandwidth
    gate_up, down = batch["passes"][1]["threads"], batch["passes"][2]["threads"]
    if threads == 1:
        assert gate_up[0]["weight_bytes"] == 2 * down[0]["weight_bytes"] == 61 * 4 * 256 * 128
        fetch = [down[0]["weight_bytes"] / read[name] / 1e6 for name in ("high", "low")]
        assert fetch[0] * 0.99 <= down[0]["fetch_ms"] <= fetch[1] * 1.01
        assert gate_up[0]["fetch_ms"] == pytest.approx(2 * down[0]["fetch_ms"])


def test_reuse_is_measured_beside_its_model() -> None:
    shape = _bench.Shape("test", 64, 32, 8, 4)
    found = reuse.measure(shape, [1, 16], gib=1e-4, seconds=0.2, threads=1)
    assert json.loads(json.dumps(found)) == found
    one, many = found["calls"]
    assert (one["tokens"], one["distinct_experts"], one["reuse"]) == (1, 4, 1)
    assert (many["tokens"], many["distinct_experts"], many["reuse"]) == (16, 8, 8)
    for row in found["calls"]:
        for name in ("ms", "model_ms", "share_of_read", "token_major_ms", "speedup"):
            assert set(row[name]) == SPREAD
    read = found["read"]["gb_per_s"][found["read"]["best"]]
    assert many["model_ms"]["low"] >= 8 * shape.expert_bytes / read["high"] / 1e6 / 1.01


def test_without_reuse_each_token_is_a_call_of_its_own() -> None:
    shape = _bench.Shape("test", 64, 32, 8, 4)
    weights, (call, *_) = _bench.Weights.random(shape), _bench.schedule(shape, 1, 5)
    x = torch.randn(5, 64).bfloat16()
    arguments = (weights, x, call.ids, call.router)
    before = expertile.calls()
    y = reuse.token_major(ours(shape))(*arguments)
    assert expertile.calls() == before + 5
    assert torch.equal(y, ours(shape)(*arguments))


def _cli() -> typer.Typer:
    cli = typer.Typer()
    cli.command()(_bench.bench)
    return cli


def test_the_command_prints_and_writes_the_same_json(tmp_path: Path) -> None:
    output, threads = tmp_path / "bench.json", torch.get_num_threads()
    options = (
        "--shape 64x32x4x2 --tokens 2,1 --gib 0.0001 --seconds 0.1 --no-host --threads 1 --json"
    )
    result = CliRunner().invoke(_cli(), [*options.split(), "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert report["machine"]["isa"] == isas.select().name
    assert report["machine"]["threads"] == 1
    assert [call["tokens"] for call in report["shapes"][0]["calls"]] == [1, 2]
    assert torch.get_num_threads() == threads


def test_the_command_compares_formats() -> None:
    options = "--shape 64x32x4x2 --tokens 2,1 --gib 0.0001 --seconds 0.1 --threads 1"
    options += " --weights bf16,mxfp4,q6_K"
    result = CliRunner().invoke(_cli(), [*options.split(), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"machine", "formats"}
    [shape] = report["formats"]
    assert [each["weights"] for each in shape["formats"]] == ["mxfp4"]
    shown = CliRunner().invoke(_cli(), options.split())
    assert shown.exit_code == 0, shown.output
    for word in ("bf16", "mxfp4", "4.25", "×", "%", "q6_K: "):
        assert word in shown.stdout


def test_formats_are_known_by_name() -> None:
    assert formats.formats_from("mxfp4, bf16,mxfp4") == ["mxfp4", "bf16"]
    assert {"bf16", "int8", "nvfp4", "q6_K"} <= set(formats.formats_from("all"))


@pytest.mark.parametrize(
    ("question", "tables"),
    [
        ("--profile", ["profiles"]),
        ("--reuse", ["reuse"]),
        ("--profile --reuse", ["profiles", "reuse"]),
    ],
)
def test_other_questions_are_asked_instead(question: str, tables: list[str]) -> None:
    options = "--shape 64x32x4x2 --tokens 2 --gib 0.0001 --seconds 0.1 --threads 1"
    options += f" --weights q8_0 {question}"
    result = CliRunner().invoke(_cli(), [*options.split(), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"machine", *tables}
    assert all(report[table][0]["name"] == "64x32x4x2" for table in tables)
    shown = CliRunner().invoke(_cli(), options.split())
    assert shown.exit_code == 0, shown.output
    assert ("fetch:" in shown.stdout, "reuse:" in shown.stdout) == (
        "profiles" in tables, "reuse" in tables,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    ["--shape 1x2x3", "--shape 8x8x2x3", "--tokens 1,b", "--tokens 0", "--weights bf16,fp5"],
)
def test_bad_options_are_refused(options: str) -> None:
    result = CliRunner().invoke(_cli(), options.split())
    assert result.exit_code == 2
    assert "got" in result.output


def test_fresh_processes_with_a_filled_cache_compile_nothing() -> None:
    found = _bench.host()
    assert found["compiled_cold"] > 0
    assert found["compiled_warm"] == 0
    assert set(found["new_rows_cold_s"]) == set(map(str, fresh.NEW_ROWS))

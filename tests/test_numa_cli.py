"""`expertile numa`: the machine, models on paper against arithmetic of their own, pictures, and wrong arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from expertile import _numa, _numa_models, _numa_picture, cli
from expertile._bench import DEFAULT_SHAPES, MODELS, SHAPES, Shape
from expertile._numa_models import stacks
from expertile._numa_picture import Period
from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import pages
from expertile.runtime.numa import topology as topologies
from expertile.runtime.numa.segments import Segment
from expertile.runtime.numa.topology import Node, Topology
from expertile.templates import formats

GIB = 1 << 30


def run(*arguments: str, width: int = 80) -> Any:
    """The command in this process: exit_code, stdout, stderr."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(cli.app, ["numa", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str) -> Any:
    """What it prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# This machine -------------------------------------------------------------------------------------


def test_the_machine() -> None:
    found = topologies.read()
    report = run_json()
    assert [node["number"] for node in report["nodes"]] == [node.number for node in found.nodes]
    assert [node["cpus"] for node in report["nodes"]] == [list(node.cpus) for node in found.nodes]
    assert report["memory_nodes"] == list(found.memory_nodes)
    assert report["threads"] == found.threads
    assert set(report["calls"]) == {"move_pages", "mbind", "sched_setaffinity"}
    screen = run().stdout
    assert f"{found.threads} at once" in screen
    assert "move_pages" in screen


SOME = Topology(
    (
        Node(0, (0, 1, 2, 3, 8), 64 * GIB, 30 * GIB, (0,), True),
        Node(2, (4, 5), 32 * GIB, 10 * GIB, (1,), False),
        Node(7, (), 16 * GIB, 15 * GIB, (), True),
    ),
    ((10, 21, 31), (21, 10, 31), (31, 31, 10)),
    2.5,
)


def test_a_larger_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTILE_NUMA", raising=False)
    monkeypatch.setattr(topologies, "read", lambda: SOME)
    screen = run().stdout
    for words in (
        "0-3,8", "4-5", "none", "64 GiB", "not for this process", "10 21 31", "31 31 10",
        "2 at once; CPUs that this process may use: 7, for 2.5 CPUs' time", "used: ",
    ):  # fmt: skip
        assert words in screen
    assert run_json()["memory_nodes"] == [0, 2, 7]
    monkeypatch.setenv("EXPERTILE_NUMA", "off")
    assert "EXPERTILE_NUMA" in run().stdout


def test_why_there_is_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTILE_NUMA", raising=False)
    first, second, third = SOME.nodes
    one = Topology((first,), ((10,),), None)
    monkeypatch.setattr(topologies, "read", lambda: one)
    assert "one memory node" in run().stdout
    far = Topology((first, third), ((10, 31), (31, 10)), None)
    monkeypatch.setattr(topologies, "read", lambda: far)
    assert "CPUs of one node only" in run().stdout
    assert second.number == 2


def test_calls_that_a_container_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "where", lambda address, size: None)
    monkeypatch.setattr(pages, "set_affinity", lambda cpus: False)
    calls = run_json()["calls"]
    assert (calls["move_pages"], calls["sched_setaffinity"]) == (False, False)
    assert "move_pages ✗ refused" in run().stdout


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7")],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert _numa._ranges(numbers) == text


# Models -------------------------------------------------------------------------------------------


def test_models_are_known_everywhere() -> None:
    assert len(MODELS) == 23
    assert set(DEFAULT_SHAPES) <= set(SHAPES)
    assert set(MODELS) <= set(SHAPES)
    for shape in MODELS.values():
        shape.in_format(shape.native).spec()  # its checkpoint's format goes with its sizes
    assert SHAPES["deepseek-v3-16e"].hidden == MODELS["deepseek-v3"].hidden


PERIODS = {
    "mixtral-8x7b": ((1, 2), (2, 4)),
    "qwen3-30b-a3b": ((2, 16), (4, 32)),
    "deepseek-v3": ((4, 2), (8, 4)),
    "qwen2-57b-a14b": ((8, 8), (16, 16)),
    "gpt-oss-20b": ((64, 64), (128, 128)),
    "deepseek-v2-lite": ((2, 32), (4, 64)),
}
"""T of gate/up and down in bf16 at two and four nodes, as worked out by hand."""


@pytest.mark.parametrize("model", PERIODS)
def test_periods(model: str) -> None:
    for nodes, expected in zip((2, 4), PERIODS[model], strict=True):
        both = stacks(MODELS[model].in_format("bf16"))
        assert tuple(stack.period(nodes) for stack in both) == expected


@pytest.mark.parametrize("weights", ["bf16", "fp8", "mxfp4"])
def test_no_remote_codes_in_any_model(weights: str) -> None:
    found = _numa_models.overview(MODELS.values(), [weights], _numa.NODES)
    assert len(found) == len(MODELS) * 3
    for row in found:
        assert [role["remote_code_bytes"] for role in row["roles"]] == [0, 0]


@pytest.mark.parametrize("weights", ["q8_0", "q4_0", "q4_K", "q6_K"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_remote_codes_are_half_a_block_a_page_at_most(weights: str, nodes: int) -> None:
    for stack in stacks(Shape("small", 512, 256, 6, 2).in_format(weights)):
        boundaries = stack.experts * stack.code_bytes // _numa_models.PAGE_BYTES
        most = boundaries * stack.memory.grain_bytes // 2
        assert 0 < stack.remote_bytes(nodes) <= most


def test_a_format_that_a_model_cannot_have() -> None:
    found = _numa_models.overview([MODELS["gpt-oss-20b"]], ["q4_K", "mxfp4"], [2])
    assert "multiple of 256" in found[0]["absent"]
    assert found[1]["native"]
    assert found[1]["roles"][0]["scale_bytes"] == 32 * 2 * 2880 * 2880 // 32


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "100x72x3x2"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_segments_are_where_the_pages_are(model: str, nodes: int) -> None:
    report = run_json("--model", model, "--nodes", str(nodes), "--weights", "bf16")
    for role in report["roles"]:
        columns, row_bytes = role["columns"], role["row_bytes"]
        assert row_bytes == 2 * columns
        rows: dict[int, list[Any]] = {}
        for each in role["segments"]:
            rows.setdefault(each["row"], []).append(each)
        assert sorted(rows) == list(range(min(role["period"], role["rows"])))
        for row, parts in rows.items():
            assert [part["first"] for part in parts[1:]] == [part["end"] for part in parts[:-1]]
            assert (parts[0]["first"], parts[-1]["end"]) == (0, columns)
            for part in parts:
                middle = row * row_bytes + part["first"] + part["end"]  # in bytes
                assert part["node"] == middle // 4096 % nodes


def test_a_model_on_the_screen(tmp_path: Path) -> None:
    result = run("--model", "qwen3-30b-a3b", "--nodes", "2")
    assert result.exit_code == 0, result.stderr
    for words in (
        "gate/up: 1536 rows × 2048, 4096 bytes a row: T = 2",
        "down: 2048 rows × 768, 1536 bytes a row: T = 16",
        "node 0: 0–511 ",
        "node 1: 512–767",
        "805,306,368",
        "1.23–1.73×",
        "50% → 0.0%",
    ):
        assert words in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_scales_are_counted_apart() -> None:
    report = run_json("--model", "gpt-oss-20b")
    assert report["weights"] == "mxfp4"  # the checkpoint's own
    codes, scales, remote = (
        sum(role[name] for role in report["roles"])
        for name in ("code_bytes", "scale_bytes", "remote_code_bytes")
    )
    assert (codes, remote) == (16 * scales, 0)
    two, four, _ = report["machines"]
    assert two["calls"][0]["with_remote_share"] == pytest.approx(1 / 17 / 2)
    assert four["calls"][0]["with_remote_share"] == pytest.approx(3 / 17 / 4)
    assert "gate/up scales" in run("--model", "gpt-oss-20b").stdout


def test_a_machine_that_was_measured() -> None:
    arguments = ("--model", "qwen3-30b-a3b", "--nodes", "4", "--local", "100", "--remote", "50")
    report = run_json(*arguments, "--tokens", "1,8")
    own = report["machines"][-1]
    assert (own["nodes"], own["local"], own["remote"]) == (4, 100.0, 50.0)
    assert [call["tokens"] for call in own["calls"]] == [1, 8]
    one_token = 8 * 3 * 2048 * 768 * 2
    assert own["calls"][0]["with_ms"] == pytest.approx([one_token / 4 / 1e8] * 2)
    assert own["gain"] == pytest.approx([1.5, 1.75])


def test_all_models_on_the_screen() -> None:
    result = run("--nodes", "2", "--weights", "bf16,int8,fp8,q4_K", width=100)
    assert result.exit_code == 0, result.stderr
    assert all(model in result.stdout for model in MODELS)
    assert "8 bits: int8, fp8" in result.stdout
    assert "64, 64" in result.stdout
    assert "3 nodes" not in result.stdout
    report = run_json("--all", "--nodes", "2,3", "--weights", "bf16")
    assert [(row["model"], row["nodes"]) for row in report] == [
        (m, n) for m in MODELS for n in (2, 3)
    ]


def test_formats_whose_codes_lie_alike_share_a_column() -> None:
    layouts = {name: _numa._layout(name) for name in ("bf16", *formats.names())}
    for name, layout in layouts.items():
        if not layout.endswith("bits"):
            assert layout == name
    for name in formats.names():
        scheme = formats.resolve(name)
        if layouts[name].endswith("bits"):
            assert f"{scheme.code_bytes(scheme.block) * 8 // scheme.block} bits" == layouts[name]


# Pictures -----------------------------------------------------------------------------------------

CELLS = Period(
    "test", 64, 128, [Segment(0, 0, 32, 3), Segment(0, 32, 128, 0), Segment(1, 0, 128, 1)]
)


def test_cells() -> None:
    assert CELLS.cells(8).tolist() == [[3, 3, 0, 0, 0, 0, 0, 0], [1] * 8]
    assert CELLS.cells(1000).shape == (2, 128)


def test_a_picture_in_the_terminal() -> None:
    first, second = _numa_picture.lines(CELLS)
    assert first.plain == "0 " + 16 * "3" + 48 * "0"
    assert second.plain == "1 " + 64 * "1"
    console = Console(force_terminal=True, color_system="truecolor", width=100)
    with console.capture() as captured:
        console.print(first)
    assert captured.get().count("48;2;") >= 2  # two backgrounds


def test_a_long_period_ends_with_what_is_missing() -> None:
    long = Period("long", 1, 4, [Segment(row, 0, 4, row % 2) for row in range(100)])
    *rows, last = _numa_picture.lines(long)
    assert len(rows) == 32
    assert "68 more rows" in last.plain


def test_a_picture_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "period.png"
    result = run("--model", "qwen3-30b-a3b", "--nodes", "11", "--png", str(picture))
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "period.png written" in result.stdout


def test_a_picture_shows_every_node(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    _numa_picture.save([CELLS], tmp_path / "p.png")
    pixels = np.unique((imread(tmp_path / "p.png")[..., :3].reshape(-1, 3) * 255).round(), axis=0)
    for node in (0, 1, 3):
        colour = np.round(np.array(to_rgb(_numa_picture._colour(node))) * 255)
        assert (pixels == colour).all(axis=1).any()


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    picture = tmp_path / "period.png"
    result = run("--model", "qwen3-30b-a3b", "--png", str(picture))
    assert result.exit_code == 1
    assert "expertile[plots]" in result.stderr
    assert not picture.exists()


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--png x.png", "--model"),
        ("--local 1", "--model"),
        ("--model qwen3-30b-a3b --all", "--all"),
        ("--model qwen3-30b-a3b --nodes 2,4", "one number"),
        ("--model qwen3-30b-a3b --nodes 0", "numbers from 1"),
        ("--nodes 5000", "at most"),
        ("--nodes two", "numbers from 1"),
        ("--model qwen3-30b-a3b --weights fp5", "fp5"),
        ("--model qwen3-30b-a3b --weights w8a8", "w8a8"),
        ("--model qwen3-30b-a3b --weights bf16,fp8", "one format"),
        ("--all --weights bf16,fp5", "fp5"),
        ("--model gpt-oss-20b --weights q4_K", "multiple of 256"),
        ("--model gpt-oss --weights bf16", "transposed"),
        ("--model nothing", "qwen3-30b-a3b"),
        ("--model qwen3-30b-a3b --local 10", "--remote"),
        ("--model qwen3-30b-a3b --local 10 --remote 20", "local, remote"),
        ("--model qwen3-30b-a3b --tokens none", "numbers from 1"),
        ("--model qwen3-30b-a3b --png no/such/folder.png", "--png"),
    ],
)
def test_wrong_arguments(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_transposed_layer_has_no_rows_of_outputs() -> None:
    with pytest.raises(ArgumentError, match="transposed"):
        stacks(SHAPES["gpt-oss"])

"""benchmarks/monotone.py: what its calls are, and what it makes of their times."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from expertile._bench import Shape, shape_from
from expertile.runtime import roofline

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "monotone.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="there is no checkout around")


@pytest.fixture(scope="module")
def monotone() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monotone", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _distinct(ids: torch.Tensor) -> int:
    return len(ids.unique())


def test_experts_are_numbered_as_they_appear(monotone: ModuleType) -> None:
    ids, router = monotone.routing(Shape("test", 32, 32, 12, 3), 40, 0)
    assert ids.shape == router.shape == (40, 3)
    assert all(len(set(token)) == 3 for token in ids.tolist())
    for tokens in range(1, 41):
        assert ids[:tokens].max() + 1 == _distinct(ids[:tokens])


def test_calls_differ_in_the_names_of_experts_only(monotone: ModuleType) -> None:
    shape = Shape("test", 32, 32, 12, 3)
    ids, router = monotone.routing(shape, 5, 1)
    calls = monotone.calls(shape, 2, ids, router)
    assert [call.layer for call in calls[:4]] == [0, 1, 0, 1]
    same = (ids[:, :, None, None] == ids).tolist()
    for call in calls:
        assert call.bytes == _distinct(ids) * shape.expert_bytes
        assert (call.ids[:, :, None, None] == call.ids).tolist() == same
    for layer in range(2):
        used = torch.cat([call.ids.flatten() for call in calls if call.layer == layer])
        assert _distinct(used) == 12


def test_no_expert_is_read_again_before_all_others(monotone: ModuleType) -> None:
    shape = Shape("test", 32, 32, 12, 3)
    ids, router = monotone.routing(shape, 1, 0)
    calls = monotone.calls(shape, 1, ids, router)
    assert sorted(torch.cat([call.ids.flatten() for call in calls]).tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("ms", "drop", "ends"),
    [
        ([1, 2, 3], -1 / 3, (2, 3)),
        ([1, 4, 2, 3], 1.0, (2, 3)),
        ([2, 3, 2.9, 4, 3.5, 3.4], 4 / 3.4 - 1, (4, 6)),
        ([2, 2], 0.0, (1, 2)),
    ],
)
def test_worst_drop(
    monotone: ModuleType, ms: list[float], drop: float, ends: tuple[int, int]
) -> None:
    found = monotone.worst_drop(dict(enumerate(ms, 1)))
    assert found["drop"] == pytest.approx(drop)
    assert (found["from"], found["to"]) == ends


def test_jumps_leave_out_what_more_experts_explain(monotone: ModuleType) -> None:
    found = monotone.jumps({1: 1.0, 2: 2.0, 3: 3.0}, {1: 8, 2: 16, 3: 16})
    assert [(step["from"], step["to"]) for step in found] == [(2, 3), (1, 2)]
    assert [step["jump"] for step in found] == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    ("text", "expected"), [("1:4", [1, 2, 3, 4]), ("2:9:3", [2, 5, 8]), ("1:2", [1, 2])]
)
def test_numbers(monotone: ModuleType, text: str, expected: list[int]) -> None:
    assert monotone.numbers(text) == expected


@pytest.mark.parametrize("text", ["", "7", "0:3", "3:3", "1:4:0", "1:4:9", "a:b", "1:2:3:4"])
def test_wrong_numbers(monotone: ModuleType, text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected first:last"):
        monotone.numbers(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a sample."""
    monkeypatch.setattr(roofline, "_SAMPLE_SECONDS", 1e-9)


@pytest.mark.usefixtures("quick")
def test_every_number_is_sampled_in_every_round(monotone: ModuleType) -> None:
    seen: list[tuple[float, float]] = []
    found: dict[str, Any] = monotone.measure(
        shape_from("64x32x8x2"), [1, 2, 5, 40], rounds=7, gib=1e-4, seed=3,
        progress=lambda passed, expected: seen.append((passed, expected)),
    )  # fmt: skip
    assert found["tokens"] == [1, 2, 5, 40]
    assert found["experts"][0] == 2
    assert found["experts"] == sorted(found["experts"])
    columns = (found[name] for name in ("fastest", "low", "ms", "high"))
    for fastest, low, middle, high in zip(*columns, strict=True):
        assert 0 < fastest <= low <= middle <= high
    assert len(seen) == 4 * 8  # with the round that warms up
    assert seen[-1][0] == pytest.approx(seen[-1][1])
    assert all(passed <= expected and math.isfinite(expected) for passed, expected in seen)


def test_the_fastest_rounds_have_a_worst_drop_of_their_own(monotone: ModuleType) -> None:
    times = {1: [1.0, 9.0, 9.0], 2: [2.0, 3.0, 3.0]}  # slow rounds of T = 1 only
    found = monotone.summary(times, {1: 1, 2: 2})
    assert found["fastest"] == [1000.0, 2000.0]
    assert found["worst_drop"]["drop"] == pytest.approx(2.0)
    assert found["worst_drop_of_fastest"]["drop"] == pytest.approx(-0.5)


@pytest.mark.usefixtures("quick")
def test_the_command_writes_json_and_a_picture(monotone: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output, threads = tmp_path / "found.json", torch.get_num_threads()
    cli = typer.Typer()
    cli.command()(monotone.main)
    options = "--shape 64x32x8x2 --shape 32x32x4x1 --tokens 1:7:2 --gib 0.0001 --threads 1"
    result = CliRunner().invoke(cli, [*options.split(), "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert [found["name"] for found in report["shapes"]] == ["64x32x8x2", "32x32x4x1"]
    assert all(found["tokens"] == [1, 3, 5, 7] for found in report["shapes"])
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "worst drop" in result.stdout
    assert torch.get_num_threads() == threads

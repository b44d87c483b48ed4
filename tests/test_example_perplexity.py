"""The example that measures what each weight format costs, on a smaller model that is hardly trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from expertile.templates import formats

for needed in ("gguf", "ml_dtypes", "transformers"):
    pytest.importorskip(needed, reason="the example needs it")

EIGHT, SIX, FOUR = 0.035, 0.025, 0.13
"""Relative Frobenius error of normally distributed weights in formats of so many bits: a little more than is seen."""
FORMATS = {
    "bf16": 0.0,
    "int8": EIGHT,
    "int8_g128": EIGHT,
    "q8_0": EIGHT,
    "fp8": EIGHT,
    "fp8_block": EIGHT,
    "mxfp8": EIGHT,
    "q6_K": SIX,
    "int4_g32": FOUR,
    "int4_g128": FOUR,
    "q4_K": FOUR,
    "q4_0": FOUR,
    "nvfp4": FOUR,
    "mxfp4": FOUR,
    "ds_fp4": FOUR,
}


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
        import quantised_perplexity

        # Untrained experts must matter, so their weights are large.
        smaller = {"num_hidden_layers": 1, "num_experts": 4, "initializer_range": 0.2}
        patch.setattr(quantised_perplexity, "CONFIG", {**quantised_perplexity.CONFIG, **smaller})
        patch.setattr(quantised_perplexity, "CONTEXT", 32)
        yield quantised_perplexity
        del sys.modules["quantised_perplexity"]


@pytest.fixture
def text(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text, so that it need not be read from many files."""
    line = torch.tensor(list(b"Experts divide the labour. "))
    monkeypatch.setattr(example, "library", lambda: (line.repeat(40), line.repeat(20)))


def _run(example: ModuleType, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, ["--sequences", "8", *arguments])


def test_the_example_has_all_formats(example: ModuleType) -> None:
    assert list(example.FORMATS) == list(FORMATS)
    missing = set(formats.names()) - set(FORMATS)
    assert all(name.startswith("int8_g") for name in missing)  # one group size is enough


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_worth_what_pytorch_is_given(example: ModuleType, name: str) -> None:
    weight = torch.randn(2, 256, 512).bfloat16() * 0.05
    quantised = example.FORMATS[name](weight)
    if name != "bf16":
        stored = torch.stack([quantised.weights.dequantize(expert) for expert in range(2)])
        assert torch.equal(stored, quantised.values)
    error = (quantised.values - weight.float()).norm() / weight.float().norm()
    assert error <= FORMATS[name]
    assert quantised.values.dtype == torch.float32


def test_perplexities_are_measured_on_a_model_that_is_kept(
    example: ModuleType, text: None, tmp_path: Path
) -> None:
    options = ["--steps", "3", "--model", str(tmp_path / "model.pt"), "--json"]
    first = _run(example, "--formats", "mxfp4,q4_K", *options)
    assert first.exit_code == 0, first.output
    rows = {row["format"]: row for row in json.loads(first.stdout)}
    assert list(rows) == ["bf16", "mxfp4", "q4_K"]
    for row in rows.values():
        assert row["perplexity"] == pytest.approx(row["pytorch"], rel=2e-3)
        assert 1 < row["perplexity"] < 1000
    assert rows["bf16"]["bits"] == 16
    assert rows["mxfp4"]["bits"] == 4.25
    assert rows["mxfp4"]["perplexity"] != rows["bf16"]["perplexity"]

    again = _run(example, "--formats", "bf16", *options)
    assert json.loads(again.stdout) == [rows["bf16"]]
    assert "not trained again" in again.stderr


def test_a_table_is_printed(example: ModuleType, text: None) -> None:
    result = _run(example, "--formats", "mxfp4", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "bf16" in result.stdout
    assert "4.25" in result.stdout


def test_experts_that_are_not_those_of_pytorch_are_reported(
    example: ModuleType, text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "plain_experts", lambda x, *weights: torch.zeros_like(x))
    result = _run(example, "--formats", "mxfp4", "--steps", "2")
    assert result.exit_code == 1
    assert "differ by more than 0.5%: bf16, mxfp4" in result.output


def test_an_unknown_format_is_refused(example: ModuleType) -> None:
    result = _run(example, "--formats", "int8,int3")
    assert result.exit_code == 2
    assert "int3" in result.output


def test_the_text_is_that_of_the_python_library(example: ModuleType) -> None:
    training, held_out = example.library()
    assert len(training) > 4 * len(held_out) > 2**20
    assert b"def " in bytes(held_out[:10_000].tolist())

"""Tuning: what wins is what was measured, it is kept for later processes, and results don't change by a bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import oracle
import pytest
import subprocesses
import torch
from typer.testing import CliRunner

import expertile
from expertile import cli
from expertile.codegen import compiler, cpu
from expertile.codegen import isa as isas
from expertile.codegen.cache import default_cache
from expertile.codegen.isa import Variant
from expertile.runtime import choice, layer, openmp, tuning
from expertile.runtime.spec import ExpertSpec, LayerKernels, contiguous
from expertile.templates.kernel import ExpertKernel

SPEC = ExpertSpec(hidden=160, intermediate=96, experts=6, top_k=2)
THREADS = [1, 2] if openmp.runtime() else [1]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for this test; but compiled kernels are kept where they always are."""
    chosen, usual = tmp_path / "cache", default_cache()
    monkeypatch.setattr(compiler, "default_cache", lambda: usual)
    monkeypatch.setenv("EXPERTILE_CACHE_DIR", str(chosen))
    forget()
    yield chosen
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What this process knows of the cache."""
    default_cache.cache_clear()
    choice.tuned.cache_clear()


def kernel(name: str, size: tuple[int, int] = (1, 1), spec: ExpertSpec = SPEC) -> ExpertKernel:
    """The predicted kernel of a projection."""
    found: ExpertKernel = getattr(contiguous(spec), name)(*size)
    return choice.ranked(found, choice.candidates(found))[0]


def last(name: str, size: tuple[int, int], candidates: int = 10) -> Variant:
    """The candidate that the model thinks worst of."""
    return tuning.contenders(kernel(name, size), candidates)[-1].variant


class Stopwatch:
    """Measures nothing: the variant of a kernel says how long it takes, in seconds that pass ever more slowly."""

    def __init__(self, seconds: Callable[[ExpertKernel], float]) -> None:
        self.seconds = seconds
        self.calls: list[tuple[ExpertKernel, ExpertKernel]] = []

    def __call__(self, gate_up: ExpertKernel, down: ExpertKernel) -> tuple[float, float]:
        self.calls.append((gate_up, down))
        drift = 1.001 ** len(self.calls)
        return self.seconds(gate_up) * drift, self.seconds(down) * drift

    def count(self, number: int) -> Counter[Variant]:
        """Calls with each variant of a projection."""
        return Counter(pair[number].variant for pair in self.calls)


def preferring(size: tuple[int, int], seconds: float) -> Stopwatch:
    """The candidates that the model ranks last take so long, all others a second."""
    wanted = {name: last(name, size) for name in tuning.PROJECTIONS}
    projections = {type(kernel(name)): name for name in tuning.PROJECTIONS}
    return Stopwatch(
        lambda kernel: seconds if kernel.variant == wanted[projections[type(kernel)]] else 1.0
    )


# The winner ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_the_winner_is_what_the_measurements_say(isa: str, several: bool) -> None:
    block = isas.by_name(isa).block_tokens
    size = (block, 2) if several else (3, 1)
    watch = preferring(size, 0.8)
    results = tuning.tune(SPEC, [size], seconds=0, measure=watch)
    assert [(r.projection, r.size) for r in results] == [("gate_up", size), ("down", size)]
    for result in results:
        wanted = last(result.projection, size)
        assert result.best.variant == wanted != result.predicted.variant
        assert result.gain == pytest.approx(1 / 0.8, rel=0.03)
        assert result.low <= result.gain <= result.high
        assert choice.best(replace(result.predicted, variant=Variant())).variant == wanted
    layer_ = contiguous(SPEC)
    fresh = LayerKernels(layer_.spec, layer_.stored, isa)
    assert [fresh.gate_up(*size), fresh.down(*size)] == [result.best for result in results]


@pytest.mark.parametrize("seconds", [0.995, 1.3])
def test_what_is_not_faster_by_more_than_the_noise_changes_nothing(
    isa: str, seconds: float
) -> None:
    for result in tuning.tune(SPEC, [(2, 1)], seconds=0, measure=preferring((2, 1), seconds)):
        assert result.best == result.predicted == kernel(result.projection, (2, 1))
        assert choice.best(result.predicted) == result.predicted


def test_noise_is_the_error_of_the_median() -> None:
    predicted, rival = kernel("down"), replace(kernel("down"), variant=Variant(k_block=32))

    def best(gain: float, spread: float, rounds: int) -> ExpertKernel:
        low, high = gain - spread / 2, gain + spread / 2
        return tuning.Result(predicted, rival, 2, rounds, gain, low, high).best

    assert best(1.05, 0.2, 9) == predicted
    assert best(1.05, 0.2, 900) == rival
    assert best(1.15, 0.2, 9) == rival
    assert best(1.005, 0.0, 900) == predicted
    assert best(0.9, 0.0, 900) == predicted


def test_the_slower_half_drops_out_but_never_the_predicted_best() -> None:
    """Seconds are in the order of prediction reversed: the predicted best is the slowest."""
    fields = [tuning.contenders(kernel(name), 10) for name in tuning.PROJECTIONS]
    order = {each: place for field in fields for place, each in enumerate(reversed(field))}
    watch = Stopwatch(lambda kernel: 2.0 + order[kernel])
    results = tuning.tune(SPEC, [(1, 1)], seconds=0, measure=watch)
    for number, (field, result) in enumerate(zip(fields, results, strict=True)):
        count = watch.count(number)
        assert set(count) == {each.variant for each in field}
        assert result.candidates == len(field) <= 10
        assert result.rounds >= 3
        predicted, *others = [count[each.variant] for each in field]
        assert predicted >= result.rounds  # in every round
        assert min(others) >= 3
        if len(field) > 4:
            assert min(others) < result.rounds
        assert result.best == field[-1]


def test_pairs_are_of_one_size_and_change_from_round_to_round() -> None:
    watch = Stopwatch(lambda kernel: 1.0)
    sizes = [(1, 1), (4, 1)]
    tuning.tune(SPEC, sizes, seconds=0, measure=watch)
    assert {(pair[0].tokens, pair[1].tokens) for pair in watch.calls} == {(1, 1), (4, 4)}
    gate_up, down = (tuning.contenders(kernel(name), 10) for name in tuning.PROJECTIONS)
    pairs = {pair for pair in watch.calls if pair[0].tokens == 1}
    assert len(pairs) > max(len(gate_up), len(down))


def test_seconds_are_spent_on_measuring() -> None:
    few, many = (Stopwatch(lambda kernel: 1.0) for _ in range(2))
    tuning.tune(SPEC, [(1, 1)], seconds=0, measure=few)
    tuning.tune(SPEC, [(1, 1)], seconds=0.2, measure=many)
    assert len(many.calls) > len(few.calls)


def test_candidates_are_the_first_and_the_first_of_other_blockings(isa: str) -> None:
    for name in tuning.PROJECTIONS:
        ranked = choice.ranked(kernel(name), choice.candidates(kernel(name)))
        blockings = {replace(each.variant, streaming=False, ahead=()) for each in ranked}
        for count in (2, 5, 10, 1000):
            found = tuning.contenders(kernel(name), count)
            assert found[: (count + 1) // 2] == ranked[: (count + 1) // 2]
            assert len(found) == len(set(found)) == min(count, len(ranked))
            seen = {replace(each.variant, streaming=False, ahead=()) for each in found}
            assert len(seen) >= min(len(blockings), count // 2)


def test_progress() -> None:
    told: list[tuple[Any, float]] = []
    tuning.tune(
        SPEC,
        [(1, 1), (2, 1)],
        seconds=0,
        measure=Stopwatch(lambda kernel: 1.0),
        progress=lambda size, done: told.append((size, done)),
    )
    parts = [done for _, done in told]
    assert told[0] == ((1, 1), 0.0)
    assert told[-1] == ((2, 1), 1.0)
    assert parts == sorted(parts)


# What is kept -------------------------------------------------------------------------------------


def tuned(name: str) -> dict[tuple[int, int], Variant]:
    """What is kept for a projection."""
    return choice.tuned(choice.description(kernel(name)))


def test_sizes_are_added_to_those_kept_before() -> None:
    tuning.tune(SPEC, [(1, 1), (2, 1)], seconds=0, measure=Stopwatch(lambda kernel: 1.0))
    forget()  # as another process
    tuning.tune(SPEC, [(2, 1)], seconds=0, measure=preferring((2, 1), 0.5))
    for name in tuning.PROJECTIONS:
        assert tuned(name) == {
            (1, 1): kernel(name, (1, 1)).variant,
            (2, 1): last(name, (2, 1)),
        }


def test_results_are_kept_size_by_size() -> None:
    watch = preferring((1, 1), 0.5)

    def interrupted(gate_up: ExpertKernel, down: ExpertKernel) -> tuple[float, float]:
        if gate_up.tokens == 2:
            raise KeyboardInterrupt
        return watch(gate_up, down)

    with pytest.raises(KeyboardInterrupt):
        tuning.tune(SPEC, [(1, 1), (2, 1)], seconds=0, measure=interrupted)
    assert tuned("down") == {(1, 1): last("down", (1, 1))}


def chosen_variants(*sizes: list[int]) -> list[str]:
    from expertile.runtime.spec import ExpertSpec, contiguous

    kernels = contiguous(ExpertSpec(hidden=160, intermediate=96, experts=64, top_k=8))
    return [k(*size).variant.name for size in sizes for k in (kernels.gate_up, kernels.down)]


def test_a_later_process_uses_them(directory: Path) -> None:
    """For another number of experts, too: kernels don't depend on it."""
    sizes = [[2, 1], [3, 1]]
    env = {"EXPERTILE_CACHE_DIR": str(directory), "EXPERTILE_ISA": isas.select().name}
    before = subprocesses.run(chosen_variants, *sizes, env=env)
    results = tuning.tune(SPEC, [(2, 1)], seconds=0, measure=preferring((2, 1), 0.5))
    after = subprocesses.run(chosen_variants, *sizes, env=env)
    assert before[:2] == [result.predicted.variant.name for result in results]
    assert after[:2] == [result.best.variant.name for result in results] != before[:2]
    default_cache().clear()
    assert subprocesses.run(chosen_variants, *sizes, env=env) == before


@pytest.mark.parametrize("part", ["model", "features", "caches"])
def test_another_machine_ignores_them(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.tune(SPEC, [(1, 1)], seconds=0, measure=preferring((1, 1), 0.5))
    assert tuned("down")
    host, (levels, assumed) = cpu.host(), choice.caches()
    if part == "model":
        monkeypatch.setattr(cpu, "model_name", lambda: "Other CPU")
    elif part == "features":
        other = replace(host, features=(*host.features, "+other"))
        monkeypatch.setattr(cpu, "host", lambda: other)
    else:
        monkeypatch.setattr(choice, "caches", lambda: (levels[:-1], assumed))
    choice.tuned.cache_clear()
    assert tuned("down") == {}


def test_other_layers_are_not_concerned() -> None:
    tuning.tune(SPEC, [(1, 1)], seconds=0, measure=preferring((1, 1), 0.5))
    for change in ({"hidden": 192}, {"gate": "gelu"}, {"gate_up_bias": "f32"}):
        other = kernel("gate_up", spec=replace(SPEC, **change))
        assert choice.tuned(choice.description(other)) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00 no text",
        b"7",
        b"[3]",
        b'[{"size": [1, 1]}]',
        b'[{"size": [1, 1], "variant": {}}]',
        b'[{"size": [1, 1], "variant": {"ahead": [], "colour": 1}}]',
        b'[{"size": [1, 1], "variant": {"ahead": [], "rows": 5, "tokens": 3}}]',
    ],
)
def test_an_entry_of_another_version_is_ignored(content: bytes) -> None:
    predicted = kernel("down")
    default_cache().put(choice._key(choice.description(predicted)), content)
    assert choice.best(replace(predicted, variant=Variant())) == predicted


def test_a_damaged_entry_is_ignored(directory: Path) -> None:
    tuning.tune(SPEC, [(1, 1)], seconds=0, measure=preferring((1, 1), 0.5))
    files = list(directory.glob("*.obj"))
    assert len(files) == 2  # nothing was compiled
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    choice.tuned.cache_clear()
    for name in tuning.PROJECTIONS:
        assert choice.best(kernel(name)) == kernel(name)


# Results of a layer -------------------------------------------------------------------------------

LAYERS: list[dict[str, Any]] = [
    {},
    {"gate": "relu2", "bias": torch.float32},
    {"transposed": True, "interleaved": True, "bias": torch.bfloat16},
]


def spec_of(options: dict[str, Any]) -> ExpertSpec:
    """The spec of such a layer."""
    bias = {torch.float32: "f32", torch.bfloat16: "bf16", None: None}[options.get("bias")]
    others = {name: value for name, value in options.items() if name != "bias"}
    return replace(SPEC, gate_up_bias=bias, down_bias=bias, **others)


@pytest.mark.parametrize("options", LAYERS, ids=["plain", "no gate half", "gpt-oss"])
def test_a_layer_computes_the_same_afterwards(isa: str, options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"tokens": 4, "experts": 2, "top_k": 1, "nowhere": 0.0}
    case = oracle.make_case(1, hidden=160, intermediate=96, **sizes, **options)

    def kernels() -> LayerKernels:
        made = contiguous(replace(spec_of(options), experts=2, top_k=1))
        return LayerKernels(made.spec, made.stored, isa)

    before = kernels()
    expected = layer.execute(before, case.x, case.weights, case.ids, case.router)
    counts = case.ids[case.ids >= 0].unique(return_counts=True)[1].tolist()
    tuned_for = tuning.sizes_of(counts, before.block_tokens)

    def backwards(kernel: ExpertKernel) -> float:
        ranked = choice.ranked(kernel, choice.candidates(kernel))
        return 1.0 / (1 + ranked.index(kernel))

    tuning.tune(before.spec, tuned_for, seconds=0, measure=Stopwatch(backwards))
    after = kernels()
    assert {after.gate_up(*s) for s in tuned_for} != {before_of(after, s) for s in tuned_for}
    oracle.assert_same_bits(
        layer.execute(after, case.x, case.weights, case.ids, case.router), expected
    )
    oracle.assert_same_bits(case.run(), expected)


def before_of(kernels: LayerKernels, size: tuple[int, int]) -> ExpertKernel:
    """The predicted gate/up kernel."""
    found = kernels.gate_up(*size)
    return choice.ranked(found, choice.candidates(found))[0]


# Real calls ---------------------------------------------------------------------------------------


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The ids of all calls that are measured."""
    seen: list[torch.Tensor] = []
    execute = layer.execute

    def record(*args: Any) -> torch.Tensor:
        seen.append(args[3])
        y = execute(*args)
        assert y.isfinite().all()
        assert y.abs().sum() > 0
        return y

    monkeypatch.setattr(layer, "execute", record)
    return seen


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("options", LAYERS, ids=["plain", "no gate half", "gpt-oss"])
def test_real_calls(
    isa: str, options: dict[str, Any], threads: int, routings: list[torch.Tensor]
) -> None:
    block = isas.by_name(isa).block_tokens
    sizes = [(3, 1), *([] if options else [(block, 2)])]  # those take long to compile
    with oracle.threads(threads):
        results = tuning.tune(spec_of(options), sizes, seconds=0, candidates=2, gib=1e-3)
    assert [result.size for result in results] == [size for size in sizes for _ in range(2)]
    assert all(result.gain > 0 for result in results)
    amounts = set()
    for ids in routings:
        experts, counts = ids.unique(return_counts=True)
        amounts |= set(counts.tolist())
        assert len(counts.unique()) == 1
        assert len(experts) >= ids.shape[1]
        assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert amounts == {tokens * blocks for tokens, blocks in sizes}


def test_quantised_weights(routings: list[torch.Tensor]) -> None:
    spec = replace(SPEC, weights="mxfp4", down_weights="q8_0")
    results = tuning.tune(spec, [(3, 1)], seconds=0, candidates=2, gib=1e-3)
    assert [result.predicted.format.name for result in results] == ["mxfp4", "q8_0"]
    assert routings
    for result in results:
        kept = choice.tuned(choice.description(result.predicted))
        assert kept == {(3, 1): result.best.variant}
        assert choice.best(replace(result.predicted, variant=Variant())) == result.best
        assert tuned(result.projection) == {}  # of bf16
    size = 160 * 96 * (2 * (0.5 + 1 / 32) + 34 / 32)
    count = tuning._expert_count(spec, 1e-3)
    assert (count - 1) * size < 1e-3 * 2**30 <= count * size


def test_no_expert_is_used_again_before_all_others_were(routings: list[torch.Tensor]) -> None:
    measure = tuning.Calls(SPEC, gib=1e-3)
    for _ in range(8):
        measure(kernel("gate_up"), kernel("down"))
    count = tuning._expert_count(SPEC, 1e-3)
    assert count * 2 * 3 * 160 * 96 >= 1e-3 * 2**30
    uses = torch.zeros(count)
    for ids in routings:
        uses[ids.unique()] += 1
        assert uses.max() - uses.min() <= 1
    assert uses.min() >= 1


def test_huge_experts_need_not_all_be_there() -> None:
    def count(gib: float, **sizes: Any) -> int:
        return tuning._expert_count(replace(SPEC, **sizes), gib)

    qwen = {"hidden": 2048, "intermediate": 768, "top_k": 8}
    assert count(1.0, **qwen) == 114
    assert count(0.01, **qwen) == 16
    assert count(1.0, hidden=4096, intermediate=14336) == 4
    assert count(1.0, hidden=4096, intermediate=14336, top_k=8) == 12  # 4 GiB
    assert count(1.0, hidden=32768, intermediate=32768, top_k=8) == 1


# Arguments ----------------------------------------------------------------------------------------


def test_sizes_of_numbers_of_tokens() -> None:
    assert tuning.sizes_of([1, 31, 1], 32) == [(1, 1), (31, 1)]
    assert tuning.sizes_of([32], 32) == [(32, 1)]
    assert tuning.sizes_of([100], 32) == [(4, 1), (32, 2)]
    assert tuning.sizes_of([64 * 8 * 2 + 64 * 5 + 1], 64) == [(1, 1), (64, 4), (64, 8)]
    for block in (32, 64):
        full = [(block, blocks) for blocks in (1, 2, 4, 8)]
        assert [size for size in tuning.default_sizes(block) if size[0] == block] == full
        assert all(tokens <= block for tokens, _ in tuning.default_sizes(block))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [(0, 1)]}, r"sizes: expected \(tokens, 1\) .* got \(0, 1\)"),
        ({"sizes": [(3, 2)]}, r"sizes: .* got \(3, 2\)"),
        ({"sizes": [(1000, 1)]}, r"sizes: .* got \(1000, 1\)"),
        ({"candidates": 1}, "candidates: expected at least 2 to choose from, got 1"),
        ({"seconds": -1}, "seconds: expected a number from 0, got -1"),
        ({"seconds": inf}, "seconds: .* got inf"),
        ({"seconds": nan}, "seconds: .* got nan"),
        ({"gib": 0.0}, "gib: expected a number above 0, got 0"),
        ({"gib": inf}, "gib: .* got inf"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(expertile.ArgumentError, match=message):
        tuning.tune(SPEC, **{"sizes": [(1, 1)], "seconds": 0.0, **change})
    with pytest.raises(expertile.ArgumentError, match=r"rows: expected numbers .* got 0"):
        tuning.sizes_of([1, 0], 32)


# The command --------------------------------------------------------------------------------------

TINY = "--shape 160x96x6x2 --seconds 0 --candidates 3 --gib 0.001"


def run(options: str) -> Any:
    result = CliRunner().invoke(cli.app, ["tune", *options.split()])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("threads", THREADS)
def test_the_json_says_what_is_used_from_now_on(
    threads: int, tmp_path: Path, directory: Path
) -> None:
    output = tmp_path / "tuning.json"
    result = run(f"{TINY} --gate gelu --rows 2,1 --threads {threads} --json --output {output}")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert report["machine"]["threads"] == threads
    assert report["cache"] == {"directory": str(directory), "kept": True, "reason": ""}
    [shape] = report["shapes"]
    assert (shape["name"], shape["gate"]) == ("160x96x6x2", "gelu")
    found = [(r["tokens"], r["blocks"], r["projection"]) for r in shape["results"]]
    assert found == [(m, 1, name) for m in (1, 2) for name in tuning.PROJECTIONS]
    for row in shape["results"]:
        size = row["tokens"], row["blocks"]
        predicted = kernel(row["projection"], size, replace(SPEC, gate="gelu"))
        assert row["predicted"] == predicted.variant.name
        assert row["best"] in (row["predicted"], row["rival"])
        assert row["best"] == choice.best(predicted).variant.name
        assert row["rounds"] >= 3
        assert 2 <= row["candidates"] <= 3
        gain = row["gain"]
        assert 0 < gain["low"] <= gain["median"] <= gain["high"]


def test_the_command_takes_a_format() -> None:
    result = run(f"{TINY} --rows 1 --threads 1 --weights mxfp4 --json")
    assert result.exit_code == 0, result.output
    [shape] = json.loads(result.stdout)["shapes"]
    assert shape["weights"] == "mxfp4"
    spec = replace(SPEC, weights="mxfp4")
    for row in shape["results"]:
        assert row["predicted"] == kernel(row["projection"], (1, 1), spec).variant.name


def test_inspect_says_whether_the_variant_was_measured() -> None:
    def inspect() -> Any:
        arguments = ["inspect", "down:h=160,i=96,m=2", "--json"]
        return json.loads(CliRunner().invoke(cli.app, arguments).stdout)

    before = inspect()
    tuning.tune(SPEC, [(2, 1)], seconds=0, measure=preferring((2, 1), 0.5))
    after = inspect()
    assert (before["choice"], after["choice"]) == ("predicted", "measured")
    assert before["kernel"].endswith(kernel("down", (2, 1)).variant.name)
    assert after["kernel"].endswith(last("down", (2, 1)).name)


def test_on_the_screen(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = run(f"{TINY} --shape 32x160x4x1 --rows 1,3 --threads 1")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for word in ("160x96x6x2", "32x160x4x1", "1 token ", "gate_up", "down", "predicted", "gain"):
        assert word in result.stdout
    assert f"kept in {directory}: processes that start from now on" in result.stdout


def test_a_cache_that_is_not_used_is_mentioned(directory: Path) -> None:
    directory.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="cache"):
        result = run(f"{TINY} --rows 1 --threads 1 --json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["cache"]
    assert found["kept"] is False
    assert found["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Missing option '--shape'"),
        ("--shape 1x2x3", "hidden x intermediate x experts x top-k"),
        ("--shape 8x8x4x2 --rows 1,b", "got '1,b'"),
        ("--shape 8x8x4x2 --weights fp5", "weights: expected one of bf16, int8"),
        ("--shape 8x8x4x2 --weights mxfp4", "mxfp4 needs a multiple of 32 columns, got 8"),
        ("--shape 8x8x4x2 --rows 0", "got '0'"),
        ("--shape 8x8x4x2 --gate no", "gate: expected one of"),
        ("--shape 8x8x4x2 --seconds -1", "seconds: expected a number from 0, got -1.0"),
        ("--shape 8x8x4x2 --seconds nan", "seconds: expected a number from 0, got nan"),
        ("--shape 8x8x4x2 --gib 0", "gib: expected a number above 0, got 0.0"),
        ("--shape 8x8x4x2 --candidates 1", "candidates: expected at least 2"),
        ("--shape 8x8x4x2 --threads 0", "Invalid value for '--threads'"),
        ("--shape 8x8x4x2 --output /nowhere/at/all.json", "got /nowhere/at"),
    ],
)
def test_wrong_options_are_refused_at_once(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*args: Any) -> Any:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(layer, "execute", execute)
    monkeypatch.setenv("COLUMNS", "200")
    result = run(options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_two_threads_need_an_openmp_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    result = run(f"{TINY} --threads 2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--threads: expected 1, as no OpenMP runtime is loaded, got 2" in result.stderr

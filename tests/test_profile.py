"""A profiled call computes the same as a plain one, and its notes account for all of the work and the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch

import expertile
from expertile.runtime import call, openmp, workspace
from expertile.runtime import layer as runtime
from expertile.runtime.driver import driver_ir
from expertile.runtime.profile import Part, Profile, profiled

# Large enough for all threads.
SHAPE: dict[str, Any] = {
    "tokens": 40,
    "experts": 8,
    "top_k": 2,
    "hidden": 512,
    "intermediate": 256,
}


def profile(case: oracle.Case) -> tuple[torch.Tensor, Profile]:
    return profiled(case.x, case.weights, case.ids, case.router)


def weight_bytes(profile: Profile, name: str) -> int:
    return sum(part.weight_bytes for part in profile.passes[name])


def check(case: oracle.Case, profile: Profile) -> None:
    """Weights are counted once an expert, and a thread's times add up to the same for all."""
    active = len(case.ids[case.ids >= 0].unique())
    assert tuple(profile.passes) == call.PASSES
    assert weight_bytes(profile, "gather") == 0
    assert weight_bytes(profile, "gate_up") == active * case.gate_up[0].nbytes
    assert weight_bytes(profile, "down") == active * case.down[0].nbytes
    threads = {len(parts) for parts in profile.passes.values()}
    assert len(threads) == 1
    for parts in profile.passes.values():
        assert sum(part.items for part in parts) > 0
        assert all(part.busy >= 0 and part.wait >= 0 for part in parts)
    # From when the first thread comes to work until the last has done.
    spent = [
        sum(part.busy + part.wait for part in parts)
        for parts in zip(*profile.passes.values(), strict=True)
    ]
    assert spent == pytest.approx([spent[0]] * len(spent), abs=1e-8)
    assert 0 < spent[0] + profile.serial <= profile.seconds


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tokens": 1},
        {"gate": "relu2"},
        {"transposed": True, "interleaved": True, "bias": torch.bfloat16},
    ],
    ids=["plain", "one token", "no gate half", "gpt-oss"],
)
def test_same_result_and_a_full_account(variant: dict[str, Any], threads: int) -> None:
    case = oracle.make_case(1, **SHAPE | variant)
    with oracle.threads(threads):
        expected = case.run()
        for _ in range(3):
            y, found = profile(case)
            oracle.assert_same_bits(y, expected)
            check(case, found)
    team = threads if openmp.runtime() else 1
    assert len(found.passes["down"]) <= team
    if threads == 1:
        assert found.idle("gate_up") < 0.5  # nobody to wait for
        assert found.imbalance("down") == 1


def test_chunks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SCRATCH_CAP", 1 << 20)
    monkeypatch.setattr(runtime, "LEAST_CHUNK", 64)
    workspace.clear()
    case = oracle.make_case(1, **SHAPE | {"tokens": 300})
    before = expertile.calls()
    y, found = profile(case)
    chunks = expertile.calls() - before
    oracle.assert_same_bits(y, case.run())
    assert chunks >= 2
    layer = case.gate_up.nbytes + case.down.nbytes
    assert weight_bytes(found, "gate_up") + weight_bytes(found, "down") == chunks * layer
    assert found.seconds > found.serial > 0


@pytest.mark.parametrize("missing", ["tokens", "experts"])
def test_a_call_without_work_has_no_parts(missing: str) -> None:
    case = oracle.make_case(1, **SHAPE)
    nothing = {"ids": case.ids[:, :0], "router": case.router[:, :0]}
    change = case.tokens([]) if missing == "tokens" else nothing
    y, found = profile(replace(case, **change))
    assert not y.any()
    assert found == Profile(0.0, 0.0, dict.fromkeys(call.PASSES, ()))


def test_errors_are_those_of_a_plain_call() -> None:
    case = oracle.make_case(1, **SHAPE)
    ids = case.ids.clone()
    ids[7, 1] = 8
    with pytest.raises(expertile.ArgumentError, match=r"topk_ids: .* got 8 for token 7, slot 1"):
        profile(replace(case, ids=ids))
    check(case, profile(case)[1])


def test_imbalance_and_idle_share() -> None:
    busy, lazy = Part(busy=3.0, wait=0.0), Part(busy=1.0, wait=2.0)
    found = Profile(4.0, 0.0, {"down": (busy, lazy), "gather": (Part(), Part())})
    assert found.imbalance("down") == 1.5
    assert found.idle("down") == pytest.approx(1 / 3)
    assert (found.imbalance("gather"), found.idle("gather")) == (1.0, 0.0)


def test_the_plain_driver_takes_no_notes() -> None:
    for name in call.PROFILE:
        offset = f"i64 {call.OFFSETS[name]}"
        assert offset not in driver_ir()
        assert offset in driver_ir(profiled=True)

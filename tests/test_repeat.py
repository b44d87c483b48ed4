"""Calls like an earlier one take a short way: whatever differs from that one has to be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from test_quantised import make_case as quantised_case

import expertile
from expertile.runtime import repeat


@pytest.fixture
def case(isa: str) -> oracle.Case:
    """A layer that was called, and so is known."""
    case = oracle.make_case(1, tokens=3, experts=4, top_k=2, hidden=64, intermediate=48)
    oracle.check(case, case.run())
    assert known(case)
    return case


def known(case: oracle.Case) -> bool:
    """Whether the next call would take the short way."""
    seen = repeat.look(case.x, case.weights, case.ids, case.router)
    return repeat.again(seen, case.x, case.weights, case.ids, case.router) is not None


def fresh(case: oracle.Case) -> torch.Tensor:
    """The result of a layer that is not known."""
    repeat._known.clear()
    return case.run()


# What is seen -------------------------------------------------------------------------------------------------------


def test_other_numbers_at_other_places(case: oracle.Case) -> None:
    other = replace(
        case,
        x=torch.randn(3, 64).bfloat16(),
        ids=case.ids.flip(0).contiguous(),
        router=torch.rand(3, 2),
    )
    assert known(other)
    oracle.assert_same_bits(other.run(), fresh(other))


def test_weights_changed_in_place_and_replaced(case: oracle.Case) -> None:
    case.down.mul_(2)
    assert known(case)
    oracle.assert_same_bits(case.run(), fresh(case))
    case.down.data = torch.randn_like(case.down)
    assert not known(case)
    oracle.check(case, case.run())


def test_weights_that_lie_otherwise_at_the_same_address(case: oracle.Case) -> None:
    rows = torch.randn(4, 64, 96).bfloat16()
    case.down.data = rows[:, :, :48]
    oracle.check(case, case.run())
    case.down.data = torch.as_strided(rows, (4, 64, 48), (64 * 48, 48, 1))
    assert not known(case)
    oracle.check(case, case.run())


CHANGES: dict[str, Callable[[oracle.Case], dict[str, Any]]] = {
    "tokens": lambda case: {"x": case.x[:2], "ids": case.ids[:2], "router": case.router[:2]},
    "experts of a token": lambda case: {"ids": case.ids[:, :1], "router": case.router[:, :1]},
    "rows far apart": lambda case: {"x": torch.cat([case.x, case.x], 1)[:, :64]},
    "dtype of x": lambda case: {"x": case.x.float()},
    "dtype of ids": lambda case: {"ids": case.ids.int() if case.ids.dtype == torch.int64 else case.ids.long()},
    "dtype of router weights": lambda case: {"router": case.router.bfloat16()},
    "strides of ids": lambda case: {"ids": case.ids.t().contiguous().t()},
    "gate": lambda case: {"gate": "gelu"},
    "bias": lambda case: {"down_bias": torch.randn(4, 64).bfloat16()},
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_noticed(case: oracle.Case, what: str) -> None:
    other = replace(case, **CHANGES[what](case))
    assert not known(other)
    got = other.run()
    oracle.check(other, got)
    assert known(other)
    oracle.assert_same_bits(other.run(), got)


def test_the_result_has_no_gaps(case: oracle.Case) -> None:
    apart = replace(case, x=torch.cat([case.x, case.x], 1)[:, :64])
    for _ in range(2):
        assert apart.run().stride() == (64, 1)
    one = replace(
        case, x=torch.zeros(1, 999)[:, :64].bfloat16(), ids=case.ids[:1], router=case.router[:1]
    )
    for _ in range(2):
        assert one.run().stride() == (64, 1)


def test_other_threads(case: oracle.Case) -> None:
    expected = case.run()
    with oracle.threads(torch.get_num_threads() + 1):
        assert not known(case)
        oracle.assert_same_bits(case.run(), expected)


def test_scratch_that_moved(case: oracle.Case) -> None:
    expected = case.run()
    many = oracle.make_case(2, tokens=300, experts=4, top_k=2, hidden=64, intermediate=48)
    many.run()  # the workspace grows
    assert known(case)
    oracle.assert_same_bits(case.run(), expected)


def test_another_quantised_weight_with_the_same_metadata() -> None:
    first, second = (
        quantised_case("mxfp4", "mxfp4", (2, 1), hidden=64, intermediate=32, seed=seed)
        for seed in (1, 2)
    )
    first.run()
    assert known(first)
    other = replace(first, gate_up=second.gate_up)
    assert not known(other)
    oracle.check(other, other.run())


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_a_bad_id_in_a_known_call(case: oracle.Case) -> None:
    case.ids[1, 0] = 4
    with pytest.raises(expertile.ArgumentError, match="got 4 for token 1, slot 0"):
        case.run()


def test_kernels_that_a_known_call_lacks(case: oracle.Case) -> None:
    case.ids.copy_(torch.tensor([0, 1]))  # three tokens an expert: two at most before
    oracle.check(case, case.run())


def test_what_requires_grad_in_a_known_call(case: oracle.Case) -> None:
    x = case.x.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            replace(case, x=x).run()
    with torch.enable_grad(), pytest.raises(expertile.ArgumentError, match="x: requires grad"):
        replace(case, x=x).run()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 64, device="meta", dtype=torch.bfloat16), "x: "),
        (torch.zeros(3, 64, dtype=torch.bfloat16).to_sparse(), "x: expected a dense"),
        (torch._neg_view(torch.zeros(3, 64, dtype=torch.bfloat16)), "x: is a lazily negated"),
        (3, "x: expected a torch.Tensor"),
    ],
)
def test_no_tensor_of_numbers_in_a_known_call(case: oracle.Case, x: Any, message: str) -> None:
    with pytest.raises((expertile.ArgumentError, expertile.DtypeError), match=message):
        expertile.fused_experts(x, case.gate_up, case.down, case.ids, case.router)


def test_calls_are_counted(case: oracle.Case) -> None:
    before = expertile.calls()
    for _ in range(3):
        case.run()
    assert expertile.calls() == before + 3


def test_memory_of_many_weights_is_bounded(
    case: oracle.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "_MOST", 4)
    held = [replace(case, down=case.down.clone()) for _ in range(9)]
    for each in held:
        each.run()
        assert len(repeat._known) <= 4
    assert known(held[-1])

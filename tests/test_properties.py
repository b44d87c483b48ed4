"""What holds for any arguments: the right result, whatever the routing, shape, dtypes and strides; a token's bits,
whatever else is in the batch, in any order, on any number of threads; and bad numbers stay where they are."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertile.runtime import layer

HIDDEN, INTERMEDIATE = 68, 40
"""Neither is a multiple of 16; shared, so that the kernels are compiled once."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS = (torch.int32, torch.int64)

seeds = st.integers(0, 2**32 - 1)


# Any routing --------------------------------------------------------------------------------------------------------


@given(
    seed=seeds,
    tokens=st.integers(0, 130),
    experts=st.integers(1, 161),
    top_k=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
    ids_dtype=st.sampled_from(IDS),
    router_dtype=st.sampled_from(DTYPES),
    used=st.sampled_from((1.0, 0.5, 0.05, 0.0)),
    nowhere=st.sampled_from((0.0, 0.1, 0.9, 1.0)),
)
def test_any_routing(
    isa: str,
    seed: int,
    tokens: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    ids_dtype: torch.dtype,
    router_dtype: torch.dtype,
    used: float,
    nowhere: float,
) -> None:
    """`used` is the share of the experts that get tokens: at 0 it is one. Ids may repeat within a token."""
    case = oracle.make_case(
        seed,
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        dtype=dtype,
        ids_dtype=ids_dtype,
        router_dtype=router_dtype,
        nowhere=nowhere,
    )
    last = experts - 1
    case.ids[case.ids >= 0] = last - case.ids[case.ids >= 0] % max(1, int(used * experts))
    oracle.check(case, case.run())


# Any shape ----------------------------------------------------------------------------------------------------------

sizes = st.one_of(
    st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 64, 176, 256, 257)), st.integers(1, 300)
)


@given(
    seed=seeds,
    tokens=st.sampled_from((1, 2, 16, 17)),
    hidden=sizes,
    intermediate=sizes,
    gate=st.sampled_from(("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai", "silu_clamp")),
    bias=st.sampled_from((None, torch.bfloat16, torch.float32)),
    interleaved=st.booleans(),
    transposed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(
    isa: str,
    seed: int,
    tokens: int,
    hidden: int,
    intermediate: int,
    gate: str,
    bias: torch.dtype | None,
    interleaved: bool,
    transposed: bool,
    dtype: torch.dtype,
) -> None:
    case = oracle.make_case(
        seed,
        tokens=tokens,
        experts=2,
        top_k=1,
        hidden=hidden,
        intermediate=intermediate,
        gate=gate,
        bias=bias,
        interleaved=interleaved,
        transposed=transposed,
        dtype=dtype,
        nowhere=0,
    )
    case.ids.fill_(1)  # one row count a case: compiling kernels is what takes the time
    oracle.check(case, case.run())


# Any strides --------------------------------------------------------------------------------------------------------

gaps = st.integers(0, 5)


@given(
    seed=seeds,
    tokens=st.integers(1, 20),
    top_k=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    ids_dtype=st.sampled_from(IDS),
    router_dtype=st.sampled_from(DTYPES),
    x_gap=gaps,
    offset=st.sampled_from((0, 1, 3)),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    list_gaps=st.tuples(gaps, gaps),
)
def test_strided_tokens(
    isa: str,
    seed: int,
    tokens: int,
    top_k: int,
    dtype: torch.dtype,
    ids_dtype: torch.dtype,
    router_dtype: torch.dtype,
    x_gap: int,
    offset: int,
    steps: tuple[int, int],
    list_gaps: tuple[int, int],
) -> None:
    """Hidden states, ids and router weights lie among NaN and ids that don't exist, at any element's address."""
    case = oracle.make_case(
        seed,
        tokens=tokens,
        experts=20,
        top_k=top_k,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        dtype=dtype,
        ids_dtype=ids_dtype,
        router_dtype=router_dtype,
    )
    expected = case.run()
    actual = case.run(
        x=oracle.scattered(case.x, gaps=[x_gap], offset=offset),
        ids=oracle.scattered(case.ids, gaps=[list_gaps[0]], offset=offset, last=steps[0]),
        router=oracle.scattered(case.router, gaps=[list_gaps[1]], offset=offset, last=steps[1]),
    )
    oracle.assert_same_bits(actual, expected)


def test_expanded_inputs(isa: str) -> None:
    """Strides of zero, in every argument that may have them."""
    case = oracle.make_case(
        1,
        tokens=5,
        experts=6,
        top_k=3,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        bias=torch.float32,
        nowhere=0,
    )
    assert case.gate_up_bias is not None
    assert case.down_bias is not None
    expanded = replace(
        case,
        x=case.x[:1].expand(5, -1),
        gate_up=case.gate_up[:1].expand(6, -1, -1),
        down=case.down[:1].expand(6, -1, -1),
        ids=case.ids[:1].expand(5, -1),
        router=case.router[:1, :1].expand(5, 3),
        gate_up_bias=case.gate_up_bias[:1].expand(6, -1),
        down_bias=case.down_bias[:1].expand(6, -1),
    )
    result = expanded.run()
    oracle.check(expanded, result)
    contiguous = {
        name: value.contiguous()
        for name, value in vars(expanded).items()
        if isinstance(value, torch.Tensor)
    }
    oracle.assert_same_bits(expanded.run(**contiguous), result)


# The same bits ------------------------------------------------------------------------------------------------------


def _base(tokens: int = 40) -> oracle.Case:
    """Enough work to wake all threads, and experts with one block and with several."""
    case = oracle.make_case(
        11,
        tokens=tokens,
        experts=40,
        top_k=4,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        dtype=torch.float32,
        nowhere=0,
    )
    case.ids[:, 0] = 3
    return case


def test_any_number_of_threads(isa: str) -> None:
    case = _base()
    with oracle.threads(1):
        expected = case.run()
    oracle.check(case, expected)
    for count in (2, 3, 16):
        with oracle.threads(count):
            oracle.assert_same_bits(case.run(), expected)


def test_fifty_repeats(isa: str) -> None:
    case = _base()
    expected = case.run()
    for _ in range(50):
        oracle.assert_same_bits(case.run(), expected)


def test_alone(isa: str) -> None:
    case = _base()
    expected = case.run()
    for token in range(case.x.shape[0]):
        oracle.assert_same_bits(case.run(**case.tokens([token])), expected[token : token + 1])


@given(order=st.lists(st.integers(0, 39), max_size=60))
def test_any_batch_in_any_order(isa: str, order: list[int]) -> None:
    """Some tokens left out, some there several times."""
    case = _base()
    oracle.assert_same_bits(case.run(**case.tokens(order)), case.run()[order])


@given(order=st.permutations(range(4)))
def test_any_order_of_a_tokens_experts(isa: str, order: Sequence[int]) -> None:
    case = _base()
    # No expert twice in a token: those two are summed in the order of the slots.
    case.ids.copy_(torch.arange(4) * 7 + torch.arange(40)[:, None] % 7)
    actual = case.run(ids=case.ids[:, list(order)], router=case.router[:, list(order)])
    oracle.assert_same_bits(actual, case.run())


def test_chunks_of_tokens(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _base()
    expected = case.run()
    monkeypatch.setattr(layer, "SCRATCH_CAP", 1)
    for least in (1, 7, 39):
        monkeypatch.setattr(layer, "LEAST_CHUNK", least)
        oracle.assert_same_bits(case.run(), expected)


# Bad numbers stay where they are ------------------------------------------------------------------------------------

special = st.sampled_from((0.0, -0.0, -1.5, 1e-30, 2.0**-140, math.inf, -math.inf, math.nan))


@given(value=special, token=st.integers(0, 39), slot=st.integers(0, 3))
def test_router_weight_concerns_its_token(isa: str, value: float, token: int, slot: int) -> None:
    case = _base()
    expected = case.run()
    router = case.router.clone()
    router[token, slot] = value
    actual = case.run(router=router)
    others = torch.arange(40) != token
    oracle.assert_same_bits(actual[others], expected[others])
    if math.isfinite(value):
        alone = replace(case, router=router).tokens([token])
        oracle.check(replace(case, **alone), actual[token : token + 1])
    elif math.isnan(value):
        assert actual[token].isnan().all()
    else:
        assert not actual[token].isfinite().any()


@given(
    value=st.sampled_from((math.nan, math.inf, -math.inf)),
    token=st.integers(0, 39),
    element=st.integers(0, HIDDEN - 1),
)
def test_hidden_state_concerns_its_token(isa: str, value: float, token: int, element: int) -> None:
    case = _base()
    expected = case.run()
    x = case.x.clone()
    x[token, element] = value
    actual = case.run(x=x)
    others = torch.arange(40) != token
    oracle.assert_same_bits(actual[others], expected[others])
    assert not actual[token].isfinite().any()
    if math.isnan(value):
        assert actual[token].isnan().all()


@given(expert=st.integers(0, 39), which=st.sampled_from(("gate_up", "down")), seed=seeds)
def test_weight_concerns_its_experts_tokens(isa: str, expert: int, which: str, seed: int) -> None:
    case = _base()
    expected = case.run()
    weights = getattr(case, which).clone()
    poisoned = weights[expert].flatten()
    poisoned[seed % poisoned.numel()] = math.nan
    weights[expert] = poisoned.view_as(weights[expert])
    actual = case.run(**{which: weights})
    users = (case.ids == expert).any(1)
    oracle.assert_same_bits(actual[~users], expected[~users])
    assert actual[users].isnan().any(1).all()


@given(value=special, seed=seeds)
def test_expert_elsewhere_adds_exactly_zero(isa: str, value: float, seed: int) -> None:
    """As if the slot was not there, whatever its weight."""
    case = _base()
    last = replace(case, ids=case.ids.clone(), router=case.router.clone())
    last.ids[:, 3] = -1
    last.router[:, 3] = value
    expected = case.run(ids=case.ids[:, :3], router=case.router[:, :3])
    oracle.assert_same_bits(last.run(), expected)
    token = seed % 40
    last.ids[token] = -1
    last.router[token] = value
    assert torch.equal(oracle.bits(last.run()[token]), torch.zeros(HIDDEN, dtype=torch.int32))


def test_uninitialised_scratch_is_never_read(tmp_path: Path) -> None:
    """EXPERTILE_DEBUG=poison fills all scratch with NaN before each call: nothing changes."""
    results = []
    for debug in ("", "poison"):
        file = tmp_path / f"result{debug}"
        environment = os.environ | {"EXPERTILE_DEBUG": debug}
        subprocess.run(
            [sys.executable, __file__, str(file)], check=True, env=environment, timeout=300
        )
        results.append(torch.load(file))
    assert set(results[0]) == set(results[1])
    for name, expected in results[0].items():
        oracle.assert_same_bits(results[1][name], expected)


def _results() -> dict[str, torch.Tensor]:
    """Layers with all kinds of tails, on the ISAs that run here."""
    from expertile.codegen import isa as isas

    found = {}
    for isa in isas.names():
        if isas.by_name(isa).unavailable():
            continue
        with oracle.running(isa):
            found[f"{isa} base"] = _base().run()
            for hidden, intermediate, transposed in ((33, 17, False), (17, 49, True)):
                case = oracle.make_case(
                    12,
                    tokens=3,
                    experts=1,
                    top_k=1,
                    hidden=hidden,
                    intermediate=intermediate,
                    transposed=transposed,
                    nowhere=0,
                )
                found[f"{isa} {hidden} {intermediate}"] = case.run()
    return found


if __name__ == "__main__":
    torch.save(_results(), sys.argv[1])

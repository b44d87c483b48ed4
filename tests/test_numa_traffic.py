"""The traffic model: what it predicts where the answer is known, and that it keeps to its own assumptions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa.traffic import PUBLIC, Machine, Role, gain, predict

LAYER = (Role(codes=6_000_000), Role(codes=3_000_000))
TWO = Machine("two", 2, local=200.0, remote=100.0)


def test_local_reads_take_bytes_over_all_nodes_bandwidths() -> None:
    found = predict(TWO, LAYER, experts=4, scheduled=True)
    assert found.remote_share == 0
    assert found.least == found.most == pytest.approx(4 * 9e6 / (2 * 200e9))


def test_without_the_schedule_half_is_remote_on_two_nodes() -> None:
    found = predict(TWO, LAYER, experts=4, scheduled=False)
    a_node = 4 * 9e6 / 2 / 1e9
    assert found.remote_share == 0.5
    # Half of it at 100 takes as long as all of it from a memory that delivers 200, whoever asks.
    assert found.least == pytest.approx(a_node / 200)
    assert found.most == pytest.approx(a_node / 2 / 200 + a_node / 2 / 100)
    assert gain(TWO, LAYER) == pytest.approx((1.0, 1.5))


def test_on_one_node_the_schedule_changes_nothing() -> None:
    one = Machine("one", 1, 40.0, 40.0)
    roles = Role(1000, 100), Role(500, 50)
    both = [predict(one, roles, 8, scheduled) for scheduled in (False, True)]
    assert both[0] == both[1]
    assert both[0].remote_share == 0
    assert both[0].least == both[0].most == pytest.approx(8 * 1650 / 40e9)


def test_scales_stay_as_remote_as_they_are() -> None:
    four = Machine("four", 4, 100.0, 50.0)
    roles = [Role(codes=900, scales=100)]
    assert predict(four, roles, 1, scheduled=False).remote_share == 0.75
    assert predict(four, roles, 1, scheduled=True).remote_share == pytest.approx(0.075)


def test_remote_codes_count() -> None:
    found = predict(TWO, [Role(codes=1000, remote=10)], 1, scheduled=True)
    assert found.remote_share == 0.01
    assert found.most == pytest.approx((990 / 200 + 10 / 100) / 2 / 1e9)


def test_what_the_published_figures_come_to() -> None:
    """As docs/numa.md prints it, for codes alone."""
    found = {machine.name: [round(x, 2) for x in gain(machine, LAYER)] for machine in PUBLIC}
    assert found == {
        "2 nodes": [1.23, 1.73],
        "4 nodes": [3.7, 3.95],
        "2 nodes, HBM": [2.39, 2.89],
    }


sizes = st.integers(1, 10**9)
rates = st.floats(1.0, 1e4)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    low, high = sorted((draw(rates), draw(rates)))
    return Machine("any", draw(st.integers(1, 8)), high, low)


@st.composite
def roles(draw: st.DrawFn) -> Role:
    codes = draw(sizes)
    return Role(codes, draw(st.integers(0, codes)), draw(st.integers(0, codes // 8)))


@given(machines(), st.lists(roles(), min_size=1, max_size=2), st.floats(1.0, 512.0))
def test_times_are_ordered(machine: Machine, layer: list[Role], experts: float) -> None:
    with_it, without = (predict(machine, layer, experts, flag) for flag in (True, False))
    whole = sum(role.codes + role.scales for role in layer) * experts / 1e9
    slack = 1 + 1e-9
    for found in (with_it, without):
        assert 0 < found.least <= found.most * slack
        # All nodes' memories together are never exceeded.
        assert found.least * slack >= whole / (machine.nodes * machine.local)
    if machine.nodes > 1:
        assert with_it.remote_share <= without.remote_share
        assert with_it.least <= without.least * slack
        assert with_it.most <= without.most * slack
    assert without.remote_share == pytest.approx((machine.nodes - 1) / machine.nodes)


@given(machines(), st.lists(roles(), min_size=1, max_size=2), st.floats(1.0, 512.0))
def test_the_gain_is_that_of_any_number_of_experts(
    machine: Machine, layer: list[Role], experts: float
) -> None:
    before, after = (predict(machine, layer, experts, flag) for flag in (False, True))
    low, high = gain(machine, layer)
    assert low <= high
    ratios = before.least / after.least, before.most / after.most
    assert (low, high) == pytest.approx((min(ratios), max(ratios)))


@pytest.mark.parametrize(
    ("nodes", "local", "remote"),
    [(0, 10.0, 5.0), (2, 0.0, 0.0), (2, 10.0, -1.0), (2, 10.0, 11.0), (2, float("inf"), 1.0)],
)
def test_impossible_machines(nodes: int, local: float, remote: float) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        Machine("none", nodes, local, remote)

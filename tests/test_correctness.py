"""The layer against float64: every gate, bias and weight layout, on every ISA that runs here."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch

import expertile

GATES = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai", "silu_clamp")
LAYOUTS = tuple(itertools.product((False, True), repeat=2))


def _combinations() -> list[tuple[str, torch.dtype | None, bool, bool]]:
    """Every gate with every layout; the biases take turns."""
    biases = itertools.cycle((None, torch.bfloat16, torch.float32))
    return [
        (gate, next(biases), interleaved, transposed)
        for gate, (interleaved, transposed) in itertools.product(GATES, LAYOUTS)
    ]


@pytest.mark.parametrize(("gate", "bias", "interleaved", "transposed"), _combinations())
def test_every_gate_and_layout(
    isa: str, gate: str, bias: torch.dtype | None, interleaved: bool, transposed: bool
) -> None:
    case = oracle.make_case(
        1,
        tokens=2,
        experts=2,
        top_k=2,
        hidden=49,
        intermediate=37,
        gate=gate,
        bias=bias,
        interleaved=interleaved,
        transposed=transposed,
        scale=6.0,  # far enough for the clamps
    )
    case.ids.copy_(torch.tensor([1, 0]))  # one row count: compiling kernels is what takes the time
    oracle.check(case, case.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_layer(isa: str, dtype: torch.dtype) -> None:
    """Where the relative Frobenius error is bounded, too."""
    case = oracle.make_case(
        2, tokens=40, experts=2, top_k=2, hidden=512, intermediate=288, dtype=dtype, nowhere=0
    )
    oracle.check(case, case.run())


def test_parameters_of_a_gate(isa: str) -> None:
    for gate in (expertile.swiglu_oai(alpha=1.1, limit=1.5), expertile.silu_clamp(limit=0.75)):
        case = oracle.make_case(
            3, tokens=2, experts=2, top_k=1, hidden=32, intermediate=16, gate=gate
        )
        oracle.check(case, case.run())


def test_no_tokens(isa: str) -> None:
    case = oracle.make_case(4, tokens=0, experts=4, top_k=2, hidden=33, intermediate=17)
    before = expertile.calls()
    result = case.run()
    assert result.shape == (0, 33)
    assert result.dtype == case.x.dtype
    assert expertile.calls() == before


def test_no_experts_a_token(isa: str) -> None:
    case = oracle.make_case(5, tokens=3, experts=4, top_k=0, hidden=33, intermediate=17)
    assert torch.equal(case.run(), torch.zeros(3, 33, dtype=torch.bfloat16))


def test_bound_layer_equals_the_call(isa: str) -> None:
    case = oracle.make_case(
        6,
        tokens=3,
        experts=3,
        top_k=2,
        hidden=49,
        intermediate=37,
        gate="swiglu_oai",
        bias=torch.float32,
    )
    spec = expertile.ExpertSpec(
        49, 37, 3, 2, gate="swiglu_oai", gate_up_bias="f32", down_bias="f32"
    )
    kernels = expertile.compile(spec, rows=[1, 2, 3])
    layer = kernels.bind(
        case.gate_up, case.down, gate_up_bias=case.gate_up_bias, down_bias=case.down_bias
    )
    oracle.assert_same_bits(layer(case.x, case.ids, case.router), case.run())


def test_changed_weights_are_seen(isa: str) -> None:
    case = oracle.make_case(7, tokens=3, experts=3, top_k=2, hidden=33, intermediate=17)
    other = oracle.make_case(8, tokens=3, experts=3, top_k=2, hidden=33, intermediate=17)
    expected = case.run(gate_up=other.gate_up.clone(), down=other.down.clone())
    layer = expertile.compile(expertile.ExpertSpec(33, 17, 3, 2), rows=[]).bind(
        case.gate_up, case.down
    )
    original = case.run()
    assert not torch.equal(original, expected)
    case.gate_up.copy_(other.gate_up)
    case.down.data = other.down.clone()
    oracle.assert_same_bits(case.run(), expected)
    oracle.assert_same_bits(layer(case.x, case.ids, case.router), expected)


def test_alternating_with_torch_mm() -> None:
    """Both use the same threads, and on some CPUs the same tiles."""
    case = oracle.make_case(9, tokens=2, experts=12, top_k=12, hidden=100, intermediate=72)
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    expected, product = case.run(), torch.mm(a, b)
    oracle.check(case, expected)
    for _ in range(1000):
        assert torch.equal(torch.mm(a, b), product)
        assert torch.equal(case.run(), expected)

"""Layers of quantised weights: the bits of the same layer in bf16, or the float64 result where a scale is not rounded;
gate/up and down in any formats, apart, one tensor an expert, interleaved, in views; bad values and bad arguments."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

import expertile
from expertile import ArgumentError, ExpertSpec, ExpertWeights
from expertile.codegen.layouts import GROUP
from expertile.runtime import descriptions
from expertile.runtime.samples import random_weights
from expertile.runtime.weights import rebuild
from expertile.templates import formats
from expertile.templates.formats import Quantized
from expertile.templates.formats.fp8 import Fp8
from expertile.templates.formats.fp8_block import Fp8Block
from expertile.templates.formats.int8 import Int8
from expertile.templates.formats.nvfp4 import Nvfp4

SCHEMES = formats.schemes() | {"nvfp4 divides": Nvfp4(divides=True)}
for group in (32, 64):
    del SCHEMES[f"int8_g{group}"]  # the same code as with 128
EXACT = ("int8", "fp8", "nvfp4", "nvfp4 divides", "mxfp8", "mxfp4", "ds_fp4")
"""Those that round no weight: a scale multiplies the sums, or is a power of two."""
FEEDS = ("int8", "mxfp4", "fp8_block", "q4_K")
"""One of each kind: a scale of sums, a table, rows that share scales, runs that share a block."""
COUNTS = (1, 2, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70)
"""Tokens of an expert: below, at and above a group, a block of 32 and one of 64."""

Change = Callable[[Tensor], Any]


# Layers -------------------------------------------------------------------------------------------------------------


def sizes(scheme: Quantized) -> tuple[int, int]:
    """H and I: few multiples of the format's block (nine where it is 32), at least 256; I one of what rows share."""
    return {32: (288, 384), 128: (384, 256), 256: (512, 256)}[scheme.block]


def make_case(
    gate_up: str | None,
    down: str | None,
    counts: Sequence[int],
    *,
    hidden: int | None = None,
    intermediate: int | None = None,
    seed: int = 0,
    **options: Any,
) -> oracle.Case:
    """Random arguments with so many tokens for each expert; projections of about 2, whatever the format's scales.

    gate_up, down: formats by name; None keeps the bf16 tensors. The sizes are usual ones for gate_up.
    """
    usual = sizes(SCHEMES[gate_up or down or ""])
    case = oracle.make_case(
        seed,
        tokens=sum(counts),
        experts=len(counts),
        top_k=1,
        hidden=hidden or usual[0],
        intermediate=intermediate or usual[1],
        **options,
    )
    for name, form in (("gate_up", gate_up), ("down", down)):
        if form:
            weights: Any = _random(SCHEMES[form], getattr(case, name).shape, seed)
            case = replace(case, **{name: weights})
    random = torch.Generator().manual_seed(seed)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    case.ids.copy_(experts[torch.randperm(len(experts), generator=random)][:, None])
    sample = oracle.exact(case.gate_up, 0)
    case.x.mul_(2 / (sample.square().mean().sqrt() * sample.shape[1] ** 0.5))
    return case


def _random(scheme: Quantized, shape: Sequence[int], seed: int) -> ExpertWeights:
    experts, rows, columns = shape
    weights = random_weights(scheme, (experts, rows, columns), seed)
    if "factor" in weights.parts:
        random = torch.Generator().manual_seed(seed)
        for factor in weights.parts["factor"].tensors:
            factor.copy_(0.5 + 2 * torch.rand(factor.shape, generator=random))
    if scheme.name == "q4_K":
        # Codes are 7.5 in the mean: with minima to match, weights are zero in the mean, as trained ones are.
        blocks = weights.parts["codes"].tensors[0].view(torch.float16).unflatten(2, (-1, 72))
        blocks[..., 1] = 7.5 * blocks[..., 0]
    return weights


def in_bf16(case: oracle.Case) -> oracle.Case:
    """The same layer with plain weights, as they are dequantised and rounded."""
    return replace(case, gate_up=_plain(case.gate_up), down=_plain(case.down))


def _plain(weights: Any) -> Tensor:
    if isinstance(weights, tuple):
        return torch.cat([_plain(half) for half in weights], 1)
    if isinstance(weights, Tensor):
        return weights
    return torch.stack([weights.dequantize(i).bfloat16() for i in range(weights.shape[0])])


def power_of_two_scales(case: oracle.Case) -> None:
    """Scales that multiply sums, and factors, become powers of two: the products with the codes are exact in bf16."""
    for weights in (case.gate_up, case.down):
        if isinstance(weights, ExpertWeights) and weights.scheme.name in oracle.ROW_SCALED:
            name = "factor" if "factor" in weights.parts else "scales"
            for scales in weights.parts[name].tensors:
                scales.copy_(torch.exp2(scales.float().log2().round()))


def over(weights: ExpertWeights, change: Change) -> ExpertWeights:
    """The same format over other tensors: `change` makes a tensor or a list of each part's."""
    changed = {name: change(part.tensors[0]) for name, part in weights.parts.items()}
    numbers = tuple((n, None if isinstance(x, Tensor) else len(x)) for n, x in changed.items())
    tensors = [t for x in changed.values() for t in ([x] if isinstance(x, Tensor) else x)]
    return rebuild("weights", descriptions.encode(weights.scheme, numbers), tensors)


def halves(weights: ExpertWeights) -> tuple[ExpertWeights, ExpertWeights]:
    """Gate and up apart, as views of the rows of both."""

    def half(number: int) -> Change:
        # What has no rows (a factor) is the same for both.
        return lambda part: part if part.dim() == 1 else part.chunk(2, 1)[number]

    return over(weights, half(0)), over(weights, half(1))


def reordered(weights: ExpertWeights, rows: Tensor | slice) -> ExpertWeights:
    """Some rows, copied in another order or as a view."""
    return over(weights, lambda part: part if part.dim() == 1 else part[:, rows])


def as_list(part: Tensor) -> list[Tensor]:
    """A tensor for each expert, the memory of the last one first."""
    return [each.clone() for each in reversed(part.unbind())][::-1]


def scattered(part: Tensor, keep: Change = lambda memory: memory) -> Tensor:
    """The same values with bytes of ones around rows and experts, of a scale that would be NaN, up to the last value.

    keep: puts the memory somewhere.
    """
    row = math.prod(part.shape[2:]) + 3
    inner = [math.prod(part.shape[after:]) for after in range(3, part.dim() + 1)]
    strides = (part.shape[1] * row + 2, row, *inner) if part.dim() > 1 else (3,)
    size = 2 + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
    ones = torch.full((size * part.element_size(),), 255, dtype=torch.uint8)
    return keep(ones).view(part.dtype).as_strided(part.shape, strides, 1).copy_(part)


def counts_of(name: str) -> tuple[int, ...]:
    """Two numbers of tokens: each is some formats' turn."""
    first = list(SCHEMES).index(name)
    return tuple(COUNTS[(first + step) % len(COUNTS)] for step in (0, 6))


each_format = pytest.mark.parametrize("name", SCHEMES)
each_feed = pytest.mark.parametrize("name", FEEDS)


# The right result ---------------------------------------------------------------------------------------------------


@each_format
def test_same_bits_as_dequantised(isa: str, name: str) -> None:
    """Scales that multiply sums are powers of two here: then it makes no difference when they are multiplied by."""
    case = make_case(name, name, counts_of(name))
    power_of_two_scales(case)
    oracle.assert_same_bits(case.run(), in_bf16(case).run())


@pytest.mark.parametrize("name", ["mxfp4", "q4_K"])
def test_same_bits_with_any_number_of_tokens(isa: str, name: str) -> None:
    case = make_case(name, name, COUNTS, hidden=512, intermediate=256, seed=1)
    power_of_two_scales(case)
    oracle.assert_same_bits(case.run(), in_bf16(case).run())


@pytest.mark.parametrize("name", EXACT)
def test_every_element(isa: str, name: str) -> None:
    """No weight is rounded: within the bound of a bf16 layer of these weights in float64."""
    case = make_case(name, name, counts_of(name), seed=2)
    oracle.check(case, case.run())


@pytest.mark.parametrize("scale", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [Int8, Fp8])
def test_every_element_with_scales_of_16_bits(
    kind: Callable[..., Quantized], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "short", kind(scale=scale))
    case = make_case("short", "short", (2, 2), hidden=64, intermediate=96)
    oracle.check(case, case.run())


@each_format
def test_frobenius(isa: str, name: str) -> None:
    """Against exactly dequantised weights, with the intermediate rounded to bf16 once.

    At most 4e-3; for formats that round no weight 3e-3, of which rounding the output to bf16 takes 1.7e-3 (the root of
    the sum of squares counts), whatever the weights are. Here hidden states are fp32, and the limit of those 1e-3.
    """
    case = make_case(name, name, counts_of(name), seed=3, dtype=torch.float32)
    expected = oracle.reference(case, oracle.exact).output
    error = float((case.run().double() - expected).norm() / expected.norm())
    assert error <= (1e-3 if name in EXACT else 4e-3), "are weights rounded?"


# Whatever else is in the batch --------------------------------------------------------------------------------------


def batch(name: str) -> oracle.Case:
    """Tokens with two of three experts each, of which one has more than a block."""
    case = make_case(name, name, (3, 33, 0), seed=4)
    other = (case.ids + 1) % 3
    return replace(case, ids=torch.cat([case.ids, other], 1), router=case.router.expand(-1, 2))


@each_feed
def test_token_alone(name: str) -> None:
    case = batch(name)
    expected = case.run()
    for token in range(0, len(expected), 5):
        oracle.assert_same_bits(case.run(**case.tokens([token])), expected[token : token + 1])


@each_feed
def test_any_order_of_tokens(name: str) -> None:
    case = batch(name)
    order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(5))
    oracle.assert_same_bits(case.run(**case.tokens(order)), case.run()[order])


@each_feed
def test_any_number_of_threads(name: str) -> None:
    case = batch(name)
    with oracle.threads(1):
        expected = case.run()
    oracle.check(case, expected)
    for count in (2, 3):
        with oracle.threads(count):
            oracle.assert_same_bits(case.run(), expected)


# Formats and layouts of a layer's weights ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [("q4_K", "q6_K"), ("int4_g32", "int8"), ("mxfp4", "q8_0"), (None, "q6_K"), ("fp8", None)],
)
def test_gate_up_and_down_of_different_formats(gate_up: str | None, down: str | None) -> None:
    bias = torch.float32 if gate_up is None else torch.bfloat16
    case = make_case(gate_up, down, (2, 2), hidden=256, intermediate=256, bias=bias)
    result = case.run()
    oracle.check(case, result)
    power_of_two_scales(case)
    oracle.assert_same_bits(case.run(), in_bf16(case).run())


@each_feed
def test_rows_that_are_no_multiple_of_16(name: str) -> None:
    """Beside a bf16 matrix, which may have any K, a quantised one may have any number of rows."""
    width = sizes(SCHEMES[name])[1]
    up = make_case(name, None, (2, 2), hidden=width, intermediate=2 * GROUP + 5, gate="relu2")
    down = make_case(None, name, (2, 2), hidden=2 * GROUP + 7, intermediate=width)
    for case in (up, down):
        power_of_two_scales(case)
        oracle.assert_same_bits(case.run(), in_bf16(case).run())


@each_format
def test_gate_and_up_apart(name: str) -> None:
    case = make_case(name, name, (2, 2), seed=6)
    apart = halves(case.gate_up)
    expected = case.run()
    oracle.assert_same_bits(case.run(gate_up=apart), expected)
    if name in FEEDS:  # each in memory of its own
        copies = tuple(over(half, Tensor.clone) for half in apart)
        oracle.assert_same_bits(case.run(gate_up=copies), expected)


def test_bf16_gate_and_up_apart() -> None:
    case = make_case(None, "q8_0", (2, 2))
    gate, up = (half.clone() for half in case.gate_up.chunk(2, 1))
    oracle.assert_same_bits(case.run(gate_up=(gate, up)), case.run())
    each = tuple(ExpertWeights.from_bf16(as_list(half)) for half in (gate, up))
    oracle.assert_same_bits(case.run(gate_up=each), case.run())


@each_format
def test_one_tensor_an_expert(name: str) -> None:
    case = make_case(name, name, (2, 2), seed=7)
    lists: dict[str, Any] = {
        "gate_up": over(case.gate_up, as_list),
        "down": over(case.down, as_list),
    }
    expected = case.run()
    oracle.assert_same_bits(case.run(**lists), expected)
    if name in FEEDS:
        lists["gate_up"] = tuple(over(half, as_list) for half in halves(case.gate_up))
        oracle.assert_same_bits(case.run(**lists), expected)


@pytest.mark.parametrize("name", ["mxfp4", "int8", "q4_K", "nvfp4"])
def test_gate_and_up_alternating(name: str) -> None:
    """As gpt-oss has them, with biases and with its gate."""
    case = make_case(name, name, (2, 2), gate="swiglu_oai", bias=torch.bfloat16, interleaved=True)
    assert case.gate_up_bias is not None
    expected = case.run()
    oracle.check(case, expected)
    rows = torch.arange(case.gate_up.shape[1])
    rows = torch.cat([rows[::2], rows[1::2]])
    options = {"gate_up_bias": case.gate_up_bias[:, rows].contiguous(), "interleaved": False}
    plain = reordered(case.gate_up, rows)
    oracle.assert_same_bits(case.run(gate_up=plain, **options), expected)
    views = tuple(reordered(case.gate_up, slice(first, None, 2)) for first in (0, 1))
    oracle.assert_same_bits(case.run(gate_up=views, **options), expected)


@each_format
def test_rows_and_experts_apart(name: str) -> None:
    """Between them lies what is NaN or wrong."""
    case = make_case(name, name, (2, 2), seed=8)
    views = {part: over(getattr(case, part), scattered) for part in ("gate_up", "down")}
    oracle.assert_same_bits(case.run(**views), case.run())


def test_scales_shared_by_gate_and_up() -> None:
    """Up would begin in the middle of a row of fp8_block's scales; a checkpoint of such a layer has them apart."""
    gate, up, down = (
        random_weights(Fp8Block(), (2, *size), seed)
        for seed, size in enumerate([(192, 288), (192, 288), (288, 192)])
    )
    case = make_case("fp8_block", "fp8_block", (2, 2), hidden=288, intermediate=192)
    with pytest.raises(ArgumentError, match=r"gate_up: .* 128 rows, .* row 192; .* as a pair"):
        case.run()
    with pytest.raises(ArgumentError, match=r"gate_up: .* 128 rows, .* row 1; "):
        case.run(interleaved=True)
    apart = replace(case, gate_up=(gate, up), down=down)
    oracle.assert_same_bits(apart.run(), in_bf16(apart).run())


@each_feed
def test_without_a_gate_half(name: str) -> None:
    case = make_case(name, name, (2, 2), gate="relu2", bias=torch.float32)
    power_of_two_scales(case)
    result = case.run()
    oracle.check(case, result)
    oracle.assert_same_bits(result, in_bf16(case).run())


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda part: part, as_list], ids=["stacked", "lists"])
@each_feed
def test_changes_in_place_are_seen(name: str, change: Change) -> None:
    case, other = (make_case(name, name, (2, 2), seed=seed) for seed in (9, 10))
    case = replace(case, gate_up=over(case.gate_up, change), down=over(case.down, change))
    hidden, intermediate = sizes(SCHEMES[name])
    spec = ExpertSpec(hidden, intermediate, 2, 1, SCHEMES[name])
    bound = expertile.compile(spec, rows=[]).bind(case.gate_up, case.down)
    for part in ("codes", "scales"):
        before = case.run()
        for weights, changed in ((case.gate_up, other.gate_up), (case.down, other.down)):
            if part in weights.parts:
                for expert in range(2):
                    weights.parts[part].of(expert).copy_(changed.parts[part].of(expert))
        if part in case.down.parts:
            assert not torch.equal(case.run(), before), part
    expected = case.run(gate_up=other.gate_up, down=other.down)
    oracle.assert_same_bits(case.run(), expected)
    oracle.assert_same_bits(bound(case.x, case.ids, case.router), expected)


def test_tensors_are_kept_alive() -> None:
    """By the weights, and by a layer that is bound to them."""
    codes, scales = np.ones((2, 64, 64), np.int8), np.ones((2, 64), np.float32)
    memory = [weakref.ref(array) for array in (codes, scales)]
    weights = ExpertWeights.from_int8(torch.from_numpy(codes), torch.from_numpy(scales))
    del codes, scales
    spec = ExpertSpec(64, 64, 2, 1, "int8", gate="relu2")
    layer = expertile.compile(spec, rows=[]).bind(weights, weights)
    x, ids, router = torch.ones(2, 64), torch.tensor([[0], [1]]), torch.ones(2, 1)
    gc.collect()
    expected = torch.full((2, 64), 64.0**3)
    assert torch.equal(
        expertile.fused_experts(x, weights, weights, ids, router, gate="relu2"), expected
    )
    del weights
    gc.collect()
    assert torch.equal(layer(x, ids, router), expected)
    assert all(ref() is not None for ref in memory)
    del layer
    gc.collect()
    assert all(ref() is None for ref in memory), "who holds them now?"


# Edge values --------------------------------------------------------------------------------------------------------

MX = ("mxfp4", "ds_fp4", "mxfp8")


@pytest.mark.parametrize("name", MX)
def test_scale_255_is_nan(isa: str, name: str) -> None:
    """In a row of down it is one output of the expert's tokens, in a row of gate or up all of them."""
    case = make_case(name, name, (2, 2, 2), seed=11)
    expected = case.run()
    users = case.ids[:, 0] == 1
    scales = case.down.parts["scales"].of(1).view(torch.uint8)
    before, scales[77, 3] = scales[77, 3].clone(), 255
    actual = case.run()
    assert actual[users, 77].isnan().all()
    actual[users, 77] = expected[users, 77]
    oracle.assert_same_bits(actual, expected)
    scales[77, 3] = before
    case.gate_up.parts["scales"].of(1).view(torch.uint8)[2, 0] = 255
    actual = case.run()
    assert actual[users].isnan().all()
    oracle.assert_same_bits(actual[~users], expected[~users])


def tiny(name: str, code: int, scale: int, x: float) -> set[float]:
    """The outputs of a relu2 layer of H = I = 32: gate_up is 1, down has one code byte and one scale byte; fp32."""
    gate_up, down = (
        _uniform(name, *of_byte) for of_byte in ((CODES[name]["1"], 127), (code, scale))
    )
    token, one, ids = torch.full((1, 32), x), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    return set(
        expertile.fused_experts(token, gate_up, down, ids, one, gate="relu2").flatten().tolist()
    )


def _uniform(name: str, code: int, scale: int) -> ExpertWeights:
    codes = torch.full((1, 32, 32 if name == "mxfp8" else 16), code, dtype=torch.uint8)
    scales = torch.full((1, 32, 1), scale, dtype=torch.uint8)
    if name == "mxfp8":
        return ExpertWeights.from_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    if name == "ds_fp4":
        return ExpertWeights.from_ds_fp4(codes.view(torch.int8), scales)
    return ExpertWeights.from_mxfp4(codes[:, :, None], scales)


_E2M1 = {"1": 0x22, "0.5": 0x11, "2": 0x44, "-0": 0x88}
CODES = {
    "mxfp4": _E2M1,
    "ds_fp4": _E2M1,
    "mxfp8": {"1": 0x38, "0.5": 0x30, "2": 0x40, "-0": 0x80},
}
"""Bytes of codes by what they are worth."""


@pytest.mark.parametrize("name", MX)
def test_below_and_above_the_numbers_of_bf16(isa: str, name: str) -> None:
    """Weights below 2⁻¹²⁶ are zero: h = 2¹⁰⁰ would make them numbers again. From 2¹²⁸ on they are infinite."""

    codes = CODES[name]
    huge = 2.0**45  # h = (32 · 2⁴⁵)²
    assert tiny(name, codes["1"], 1, huge) == {2.0 ** (100 + 5 - 126)}
    assert tiny(name, codes["1"], 0, huge) == {0}
    assert tiny(name, codes["0.5"], 1, huge) == {0}
    assert tiny(name, codes["0.5"], 2, huge) == {2.0 ** (100 + 5 - 126)}
    small = 2.0**-49  # h = (32 · 2⁻⁴⁹)²
    assert tiny(name, codes["2"], 253, small) == {2.0 ** (-88 + 5 + 127)}
    assert tiny(name, codes["2"], 254, small) == {math.inf}


@pytest.mark.parametrize("name", MX)
def test_minus_zero(name: str) -> None:
    """Is a zero, whatever it is multiplied by that is finite."""
    for scale, x in ((127, 1.0), (254, 2.0**58), (0, -1.0)):
        assert tiny(name, CODES[name]["-0"], scale, x) == {0}


def test_infinite_scales_of_rows() -> None:
    """A row whose scale is too large is infinite or NaN; the others are as they were."""
    case = make_case("int8", "int8", (2, 2), seed=12)
    expected = case.run()
    users = case.ids[:, 0] == 1
    scales = case.down.parts["scales"].of(1)
    scales[5], scales[6] = 3e38, math.nan
    actual = case.run()
    assert actual[users, 5].isinf().all()
    assert actual[users, 6].isnan().all()
    actual[users, 5:7] = expected[users, 5:7]
    oracle.assert_same_bits(actual, expected)


# Errors -------------------------------------------------------------------------------------------------------------


def weights_of(name: str, rows: int, columns: int, experts: int = 2) -> ExpertWeights:
    return random_weights(SCHEMES[name], (experts, rows, columns))


def refuse(words: str, case: oracle.Case, **changes: Any) -> None:
    """The call with these changes raises ArgumentError with these words in this order; no kernel runs."""
    before = expertile.calls()
    pattern = ".*".join(re.escape(word) for word in words.split(" … "))
    with pytest.raises(ArgumentError, match=pattern):
        case.run(**changes)
    assert expertile.calls() == before


def test_shapes_that_do_not_fit() -> None:
    case = make_case("int8", "int8", (2, 2), hidden=64, intermediate=96)
    refuse(
        "down: expected shape (2, 64, 96) … got (2, 64, 64)", case, down=weights_of("int8", 64, 64)
    )
    refuse(
        "down: expected shape (2, 64, 96) … got (2, 96, 96)", case, down=weights_of("mxfp4", 96, 96)
    )
    refuse(
        "down: expected shape (2, 64, 96) … got (3, 64, 96)",
        case,
        down=weights_of("int8", 64, 96, 3),
    )
    refuse("down: expected shape (2, 64, 48)", case, gate_up=weights_of("int8", 96, 64))
    refuse("gate_up: expected an even number … got 95", case, gate_up=weights_of("int8", 95, 64))
    refuse("x: expected shape [T, 64] … (4, 63)", case, x=case.x[:, 1:])
    refuse("topk_ids: expected ids from 0 to 1 … got 2", case, ids=torch.full_like(case.ids, 2))


def test_layouts_that_do_not_fit() -> None:
    case = make_case("int8", "int8", (2, 2), hidden=64, intermediate=64)
    gate, up = (weights_of("int8", 64, 64) for _ in range(2))
    pair = (gate, up)
    plain = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    refuse("transposed: expected False where gate_up is ExpertWeights(int8", case, transposed=True)
    refuse(
        "transposed: expected False where down is ExpertWeights(int8",
        case,
        transposed=True,
        gate_up=torch.zeros(2, 64, 128, dtype=torch.bfloat16),
    )
    for option in ({"interleaved": True}, {"transposed": True}, {"gate": "relu2"}):
        refuse("gate_up: expected one tensor, not a pair", case, gate_up=pair, **option)
    for other in (weights_of("mxfp4", 64, 64), weights_of("int8", 32, 64), plain):
        refuse("gate_up: expected gate and up alike", case, gate_up=(gate, other))
    apart = over(up, scattered)
    refuse("gate_up: expected gate and up alike", case, gate_up=(gate, apart))
    refuse("gate_up: expected a pair (gate, up), got 3 values", case, gate_up=(gate, up, up))
    refuse("gate_up[1]: expected 3 dimensions", case, gate_up=(plain, plain[0]))


@pytest.mark.parametrize(
    ("weights", "down_weights", "message"),
    [
        ("q4_K", None, "down_weights: q4_K needs a multiple of 256 columns, got 384"),
        ("int8", "q6_K", "down_weights: q6_K needs a multiple of 256 columns, got 384"),
        ("int4_g128", "int8", "weights: int4 needs a multiple of 128 columns, got 320"),
        ("q4_k", None, "weights: expected one of bf16, int8, "),
        ("bf16", "fp4", "weights: expected one of bf16, int8, "),
        (4, None, "weights: expected a name or a scheme, got int"),
    ],
)
def test_specs_of_formats_that_do_not_fit(weights: Any, down_weights: Any, message: str) -> None:
    hidden = 320 if weights == "int4_g128" else 512
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ExpertSpec(hidden, 384, 2, 1, weights, down_weights=down_weights)


def test_transposed_spec() -> None:
    with pytest.raises(ArgumentError, match="transposed: expected False with int8 weights"):
        ExpertSpec(64, 96, 2, 1, "int8", transposed=True)


def test_bind_to_other_formats() -> None:
    case = make_case("int8", "int8", (2, 2), hidden=64, intermediate=96)
    spec = ExpertSpec(64, 96, 2, 1, "int8")
    expertile.compile(spec, rows=[]).bind(case.gate_up, case.down)
    for wrong, name in (
        (replace(spec, weights="mxfp4", down_weights="int8"), "weights"),
        (replace(spec, down_weights="mxfp4"), "down_weights"),
        (replace(spec, weights=Int8(scale="bfloat16"), down_weights="int8"), "weights"),
        (replace(spec, weights="bf16"), "weights"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: the spec says .*, the tensors say "):
            expertile.compile(wrong, rows=[]).bind(case.gate_up, case.down)
    # A scheme by name or as itself, said once or twice.
    for same in (
        replace(spec, weights=Int8()),
        replace(spec, down_weights="int8"),
        replace(spec, down_weights=Int8()),
    ):
        expertile.compile(same, rows=[]).bind(case.gate_up, case.down)

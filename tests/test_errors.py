"""Every bad argument is refused before anything is read, by an error that names it, what was expected and what came."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import expertile
from expertile import ArgumentError, DtypeError, ExpertSpec
from expertile.codegen import isa as isas
from expertile.runtime import layer

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, TOP_K = 33, 17, 3, 5, 2


def case(**options: Any) -> oracle.Case:
    return oracle.make_case(
        1,
        tokens=TOKENS,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        bias=torch.float32,
        nowhere=0,
        **options,
    )


def refuse(error: type[Exception], *words: str, **changes: Any) -> None:
    """The call with these changes raises `error`, whose message has the words; no kernel runs."""
    before = expertile.calls()
    with pytest.raises(error) as raised:
        case().run(**changes)
    assert isinstance(raised.value, expertile.ExpertileError)
    assert isinstance(raised.value, TypeError if error is DtypeError else ValueError)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert expertile.calls() == before


ARGUMENTS = {
    "x": "x",
    "gate_up": "gate_up",
    "down": "down",
    "ids": "topk_ids",
    "router": "topk_weights",
    "gate_up_bias": "gate_up_bias",
    "down_bias": "down_bias",
}
each_argument = pytest.mark.parametrize("field", ARGUMENTS)


@each_argument
@pytest.mark.parametrize("extra", [-1, 1])
def test_rank(field: str, extra: int) -> None:
    tensor: Tensor = getattr(case(), field)
    wrong = tensor[0] if extra < 0 else tensor[None]
    expected = f"{tensor.dim()} dimensions"
    refuse(
        ArgumentError, f"{ARGUMENTS[field]}: ", expected, str(tuple(wrong.shape)), **{field: wrong}
    )


@each_argument
def test_scalar_tensor(field: str) -> None:
    refuse(
        ArgumentError, f"{ARGUMENTS[field]}: ", "()", **{field: getattr(case(), field).flatten()[0]}
    )


@each_argument
def test_not_a_tensor(field: str) -> None:
    value = getattr(case(), field).tolist()
    refuse(DtypeError, f"{ARGUMENTS[field]}: ", "torch.Tensor", "list", **{field: value})


WRONG_DTYPES = {
    "x": (torch.float64, torch.int64, torch.complex64),
    "gate_up": (torch.float16, torch.float32, torch.int8),
    "down": (torch.float16, torch.float32, torch.float8_e4m3fn),
    "ids": (torch.int16, torch.uint8, torch.float32, torch.bool),
    "router": (torch.float64, torch.int32),
    "gate_up_bias": (torch.float16, torch.float64),
    "down_bias": (torch.float16, torch.int32),
}


@pytest.mark.parametrize(
    ("field", "dtype"),
    [(field, dtype) for field, dtypes in WRONG_DTYPES.items() for dtype in dtypes],
)
def test_dtype(field: str, dtype: torch.dtype) -> None:
    words = [f"{ARGUMENTS[field]}: expected ", f"got {str(dtype).removeprefix('torch.')}"]
    if field in ("gate_up", "down"):
        words.append(".to(torch.bfloat16)")
    refuse(DtypeError, *words, **{field: getattr(case(), field).to(dtype)})


@each_argument
def test_device(field: str) -> None:
    refuse(
        ArgumentError,
        f"{ARGUMENTS[field]}: ",
        "CPU",
        "meta",
        **{field: getattr(case(), field).to("meta")},
    )


@each_argument
def test_sparse(field: str) -> None:
    sparse = getattr(case(), field).to_sparse()
    refuse(
        ArgumentError, f"{ARGUMENTS[field]}: ", "torch.sparse_coo", ".to_dense()", **{field: sparse}
    )


@pytest.mark.parametrize("field", ["x", "gate_up", "down", "gate_up_bias", "down_bias"])
def test_last_dimension(field: str) -> None:
    tensor: Tensor = getattr(case(), field)
    wrong = tensor.mT.contiguous().mT
    refuse(
        ArgumentError,
        f"{ARGUMENTS[field]}: ",
        "stride",
        str(wrong.stride()),
        ".contiguous()",
        **{field: wrong},
    )


@pytest.mark.parametrize("field", ["x", "gate_up", "down", "router", "gate_up_bias", "down_bias"])
def test_requires_grad(field: str) -> None:
    tensor = getattr(case(), field).clone().requires_grad_()
    refuse(
        ArgumentError, f"{ARGUMENTS[field]}: requires grad", "torch.no_grad()", **{field: tensor}
    )
    expected = case().run()
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            oracle.assert_same_bits(case().run(**{field: tensor}), expected)
    # What was fine without grad has not become fine with it.
    refuse(ArgumentError, f"{ARGUMENTS[field]}: requires grad", **{field: tensor})


# Sizes that don't fit -----------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[str, Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "H of x": ("x", lambda t: t[:, 1:], ("[T, 33]", "(5, 32)")),
    "H of down": ("down", lambda t: t[:, 1:], ("(3, 33, 17)", "(3, 32, 17)")),
    "I of down": ("down", lambda t: t[:, :, 1:], ("(3, 33, 17)", "(3, 33, 16)")),
    "E of down": ("down", lambda t: t[1:], ("(3, 33, 17)", "(2, 33, 17)")),
    "odd rows": ("gate_up", lambda t: t[:, 1:], ("even", "33")),
    "E of gate_up_bias": ("gate_up_bias", lambda t: t[1:], ("(3, 34)", "(2, 34)")),
    "I of gate_up_bias": ("gate_up_bias", lambda t: t[:, 1:], ("(3, 34)", "(3, 33)")),
    "E of down_bias": ("down_bias", lambda t: t[1:], ("(3, 33)", "(2, 33)")),
    "H of down_bias": ("down_bias", lambda t: t[:, 1:], ("(3, 33)", "(3, 32)")),
    "T of ids": ("ids", lambda t: t[1:], ("5 rows", "(4, 2)")),
    "T of router": ("router", lambda t: t[1:], ("(5, 2)", "(4, 2)")),
    "k of router": ("router", lambda t: t[:, 1:], ("(5, 2)", "(5, 1)")),
}


@pytest.mark.parametrize("what", SHAPES)
def test_shape(what: str) -> None:
    field, change, words = SHAPES[what]
    refuse(
        ArgumentError, f"{ARGUMENTS[field]}: ", *words, **{field: change(getattr(case(), field))}
    )


def test_transposed_weights_without_saying_so() -> None:
    transposed = case(transposed=True)
    refuse(
        ArgumentError, "gate_up: ", "(3, 33, 34)", gate_up=transposed.gate_up, down=transposed.down
    )


def test_plain_weights_called_transposed() -> None:
    refuse(ArgumentError, "gate_up: expected an even", transposed=True, gate_up_bias=None)


@pytest.mark.parametrize("field", ["gate_up", "down"])
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_nothing_in_the_weights(field: str, dimension: int) -> None:
    """E = 0 and the like, also where no token asks for an expert."""
    shape = list(getattr(case(), field).shape)
    shape[dimension] = 0
    empty = torch.empty(shape, dtype=torch.bfloat16)
    words = (f"{field}: expected at least one", str(tuple(shape)))
    refuse(ArgumentError, *words, **{field: empty})
    refuse(ArgumentError, *words, **{field: empty}, **case().tokens([]))


# Ids ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [EXPERTS, EXPERTS + 1, -2, 2**31 - 1, -(2**31)])
def test_id_out_of_range(isa: str, dtype: torch.dtype, bad: int) -> None:
    ids = case().ids.to(dtype)
    ids[3, 1] = bad
    refuse(ArgumentError, "topk_ids: ", "0 to 2", "-1", f"got {bad}", "token 3, slot 1", ids=ids)


@pytest.mark.parametrize("bad", [2**62, -(2**62), 2**32, -(2**63)])
def test_id_of_64_bits(bad: int) -> None:
    ids = case().ids.clone()
    ids[0, 0] = bad
    refuse(ArgumentError, f"got {bad}", "token 0, slot 0", ids=ids)


def test_first_bad_id_is_named() -> None:
    ids = case().ids.clone()
    ids[2:] = 77
    refuse(ArgumentError, "got 77", "token 2, slot 0", ids=ids)


def test_bad_id_in_a_later_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SCRATCH_CAP", 1)
    monkeypatch.setattr(layer, "LEAST_CHUNK", 2)
    ids = case().ids.clone()
    ids[4, 0] = EXPERTS
    with pytest.raises(ArgumentError, match="got 3 for token 4, slot 0"):
        case().run(ids=ids)


def test_a_refused_call_leaves_the_next_one_right() -> None:
    expected = case().run()
    refuse(ArgumentError, ids=torch.full_like(case().ids, EXPERTS))
    oracle.assert_same_bits(case().run(), expected)


# Gates and specs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["swish", "", None, 3, ["silu"], torch.nn.functional.silu])
def test_gate(gate: Any) -> None:
    refuse(ArgumentError, "gate: expected ", gate=gate)


GOOD_SPEC = ExpertSpec(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, gate_up_bias="f32", down_bias="f32")


@pytest.mark.parametrize("name", ["hidden", "intermediate", "experts", "top_k"])
@pytest.mark.parametrize("value", [0, -1])
def test_spec_sizes(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected at least 1, got {value}"):
        replace(GOOD_SPEC, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "f16"),
        ("gate_up_bias", "f16"),
        ("down_bias", "bfloat16"),
        ("gate", "swish"),
        ("gate", None),
    ],
)
def test_spec_names(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        replace(GOOD_SPEC, **{name: value})
    assert f"{name}: expected" in str(raised.value)
    assert repr(value) in str(raised.value) or type(value).__name__ in str(raised.value)


@pytest.mark.parametrize("count", [0, -1])
def test_rows_to_compile(count: int) -> None:
    with pytest.raises(ArgumentError, match=f"rows: .* got {count}"):
        expertile.compile(GOOD_SPEC, rows=[1, count])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", HIDDEN + 1),
        ("intermediate", INTERMEDIATE + 1),
        ("experts", EXPERTS + 1),
        ("gate_up_bias", None),
        ("down_bias", "bf16"),
    ],
)
def test_bind_to_other_tensors(name: str, value: Any) -> None:
    kernels = expertile.compile(replace(GOOD_SPEC, **{name: value}), rows=[])
    good = case()
    with pytest.raises(ArgumentError) as raised:
        kernels.bind(
            good.gate_up, good.down, gate_up_bias=good.gate_up_bias, down_bias=good.down_bias
        )
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)


def test_bound_layer_refuses_bad_tokens() -> None:
    good = case()
    bound = expertile.compile(GOOD_SPEC, rows=[]).bind(
        good.gate_up, good.down, gate_up_bias=good.gate_up_bias, down_bias=good.down_bias
    )
    with pytest.raises(ArgumentError, match="x: expected shape"):
        bound(good.x[:, 1:], good.ids, good.router)
    with pytest.raises(ArgumentError, match=r"topk_ids: .* got 3"):
        bound(good.x, torch.full_like(good.ids, 3), good.router)


def test_isa_that_does_not_exist() -> None:
    with pytest.raises(expertile.CodegenError, match=r"expected one of amx, .* got 'sse9'"):
        isas.by_name("sse9")


def test_isa_asked_for_that_does_not_exist() -> None:
    """EXPERTILE_ISA is read once a process."""
    child = subprocess.run(
        [sys.executable, "-c", "from expertile.codegen import isa; isa.select()"],
        env=os.environ | {"EXPERTILE_ISA": "sse9"},
        capture_output=True,
        text=True,
    )
    assert child.returncode != 0
    assert "expected one of amx," in child.stderr
    assert "got 'sse9'" in child.stderr

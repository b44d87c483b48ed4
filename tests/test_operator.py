"""`torch.ops.expertile.fused_experts`: the layer under torch.compile, torch.export, fake tensors and make_fx."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import expertile

OPERATOR = torch.ops.expertile.fused_experts.default

SHAPE: dict[str, Any] = {
    "tokens": 5,
    "experts": 4,
    "top_k": 2,
    "hidden": 64,
    "intermediate": 32,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32 hidden, int32 ids": {"dtype": torch.float32, "ids_dtype": torch.int32},
    "gpt-oss": {
        "gate": expertile.swiglu_oai(alpha=1.5, limit=6.0),
        "bias": torch.bfloat16,
        "interleaved": True,
        "transposed": True,
    },
    "one projection": {"gate": "relu2"},
}

no_compiler = not any(map(shutil.which, ("c++", "g++", "clang++")))
backend = pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(no_compiler, reason="inductor needs a C++ compiler"),
        ),
    ],
)


@pytest.fixture(autouse=True)
def fresh_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled function is left from, or for, another test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=list(SETTINGS))
def case(request: pytest.FixtureRequest) -> oracle.Case:
    return make_case(request.param)


def make_case(settings: str = "plain", seed: int = 1, **shape: int) -> oracle.Case:
    return oracle.make_case(seed, **SHAPE | SETTINGS[settings] | shape)


def operator_arguments(case: oracle.Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case as the operator takes it."""
    gate = case.gate
    arguments = (
        case.x,
        [case.gate_up],
        [case.down],
        case.ids,
        case.router,
        [] if case.gate_up_bias is None else [case.gate_up_bias],
        [] if case.down_bias is None else [case.down_bias],
    )
    options = {
        "gate": gate if isinstance(gate, str) else gate.name,
        "gate_parameters": [] if isinstance(gate, str) else [gate.alpha, gate.limit],
        "interleaved": case.interleaved,
        "transposed": case.transposed,
    }
    return arguments, options


def bound(case: oracle.Case) -> expertile.Layer:
    spec = expertile.ExpertSpec(
        **{name: SHAPE[name] for name in ("hidden", "intermediate", "experts", "top_k")}
    )
    return expertile.compile(spec, rows=[1]).bind(case.gate_up, case.down)


# The operator -------------------------------------------------------------------------------------


def test_operator_computes_the_layer(case: oracle.Case) -> None:
    arguments, options = operator_arguments(case)
    result = OPERATOR(*arguments, **options)
    oracle.check(case, result)
    oracle.assert_same_bits(result, case.run())


def test_operator_is_what_pytorch_expects(case: oracle.Case) -> None:
    """Schema, fake kernel, registrations, and tracing with dynamic shapes."""
    arguments, options = operator_arguments(case)
    torch.library.opcheck(OPERATOR, arguments, options)


def test_schema_takes_lists_of_weights() -> None:
    types = {argument.name: str(argument.type) for argument in OPERATOR._schema.arguments}
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert types[name] == "List[Tensor]"


@pytest.mark.parametrize("copies", [0, 2])
def test_other_than_one_weight_is_refused(copies: int) -> None:
    case = make_case()
    with pytest.raises(
        expertile.ArgumentError, match=rf"down: expected a list of one.*got {copies}"
    ):
        OPERATOR(case.x, [case.gate_up], [case.down] * copies, case.ids, case.router, [], [])


def test_wrong_number_of_gate_parameters_is_refused() -> None:
    arguments, _ = operator_arguments(make_case())
    with pytest.raises(
        expertile.ArgumentError, match=r"gate_parameters: expected 2 .*alpha.*got 1"
    ):
        OPERATOR(*arguments, gate="swiglu_oai", gate_parameters=[1.0])


# torch.compile ------------------------------------------------------------------------------------


@backend
def test_compiled_without_a_graph_break(backend: str, case: oracle.Case) -> None:
    def layer(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        return case.run(x=x, ids=ids, router=router) * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    before = expertile.calls()
    result = compiled(case.x, case.ids, case.router)
    assert expertile.calls() == before + 1
    oracle.assert_same_bits(result, case.run() * 2)


@backend
def test_compiled_once_for_all_numbers_of_tokens(backend: str) -> None:
    case = make_case(tokens=40)
    compiled = torch.compile(
        lambda x, ids, router: case.run(x=x, ids=ids, router=router),
        fullgraph=True,
        backend=backend,
        dynamic=True,
    )
    with torch.compiler.set_stance("default"):
        compiled(*case.tokens(range(7)).values())
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 33, 40):
            some = case.tokens(range(tokens))
            oracle.assert_same_bits(compiled(*some.values()), case.run(**some))


@backend
def test_bound_layer_compiled(backend: str) -> None:
    case = make_case()
    layer = bound(case)
    inputs = (case.x, case.ids, case.router)
    before = expertile.calls()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    oracle.assert_same_bits(compiled(*inputs), case.run())
    within = torch.compile(lambda *inputs: layer(*inputs) + 1, fullgraph=True, backend=backend)
    oracle.assert_same_bits(within(*inputs), case.run() + 1)
    assert expertile.calls() == before + 4


def test_compiled_layer_sees_weight_changes() -> None:
    case = make_case()
    layer = bound(case)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(case.x, case.ids, case.router)
    case.down.neg_()
    oracle.assert_same_bits(compiled(case.x, case.ids, case.router), case.run())
    case.gate_up.data = torch.randn_like(case.gate_up)
    oracle.assert_same_bits(compiled(case.x, case.ids, case.router), case.run())


@pytest.mark.parametrize("argument", ["x", "gate_up", "down", "router"])
def test_compiled_training_is_refused(argument: str) -> None:
    """The compiled graph would otherwise run with autograd off, and silently give no gradient."""
    case = make_case()
    tensor = getattr(case, argument).requires_grad_()
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    name = "topk_weights" if argument == "router" else argument
    with pytest.raises(Exception, match=rf"{name}: requires grad"):
        compiled(**{argument: tensor})
    with torch.no_grad():
        result = compiled(**{argument: tensor})
        oracle.assert_same_bits(result, case.run())


# Other ways to record -----------------------------------------------------------------------------


def test_fake_tensors_have_the_shape_and_nothing_is_computed(case: oracle.Case) -> None:
    before = expertile.calls()
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value)
            for name, value in vars(case).items()
            if isinstance(value, Tensor)
        }
        within = case.run(**fakes)
    outside = case.run(**fakes)
    for result in (within, outside):
        assert (result.shape, result.dtype, result.device) == (
            case.x.shape,
            case.x.dtype,
            case.x.device,
        )
        assert result.is_contiguous()
    assert expertile.calls() == before


def test_operator_on_meta_tensors(case: oracle.Case) -> None:
    arguments, options = operator_arguments(case)
    on_meta = torch.utils._pytree.tree_map_only(Tensor, lambda each: each.to("meta"), arguments)
    result = OPERATOR(*on_meta, **options)
    assert (result.shape, result.dtype, result.device.type) == (
        case.x.shape,
        case.x.dtype,
        "meta",
    )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(mode: Literal["real", "fake", "symbolic"]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    case = make_case()

    def layer(x: Tensor, ids: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return case.run(x=x, ids=ids, router=router, gate_up=gate_up, down=down)

    arguments = (case.x, case.ids, case.router, case.gate_up, case.down)
    graph = make_fx(layer, tracing_mode=mode)(*arguments)
    assert OPERATOR in [node.target for node in graph.graph.nodes]
    changed = (-case.x, *arguments[1:])
    oracle.assert_same_bits(graph(*changed), layer(*changed))


class _Module(torch.nn.Module):
    def __init__(self, layer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        return self.layer(x, ids, router)


def test_export_keeps_the_operator() -> None:
    case = make_case("gpt-oss")
    module = _Module(lambda x, ids, router: case.run(x=x, ids=ids, router=router))
    inputs = (case.x, case.ids, case.router)
    exported = torch.export.export(module, inputs).module()
    oracle.assert_same_bits(exported(*inputs), case.run())


class _Named(torch.Tensor):
    """A subclass with data like any tensor's."""


def test_a_subclass_of_tensor_is_computed() -> None:
    case = make_case()
    result = case.run(x=case.x.as_subclass(_Named))
    oracle.assert_same_bits(result.as_subclass(Tensor), case.run())


def test_no_tensor_at_all_is_refused_by_name() -> None:
    case = make_case()
    with pytest.raises(expertile.DtypeError, match=r"x: expected a torch\.Tensor, got list"):
        case.run(x=case.x.tolist())

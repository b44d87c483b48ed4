"""`torch.ops.expertile.fused_experts`: the layer under torch.compile, torch.export, fake tensors and make_fx."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import expertile
from expertile import ExpertWeights

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


# Quantised weights --------------------------------------------------------------------------------


def random_bytes(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)


def small(*shape: int) -> Tensor:
    """Scales from 2⁻⁷ to 2⁻⁶."""
    return (random_bytes(*shape).float() / 256 + 1) / 128


def int8(experts: int, rows: int, columns: int) -> ExpertWeights:
    codes = random_bytes(experts, rows, columns).view(torch.int8)
    return ExpertWeights.from_int8(codes, small(experts, rows))


def mxfp4(experts: int, rows: int, columns: int) -> ExpertWeights:
    blocks = random_bytes(experts, rows, columns // 32, 16)
    return ExpertWeights.from_mxfp4(blocks, random_bytes(experts, rows, columns // 32) % 4 + 122)


def int4_lists(experts: int, rows: int, columns: int) -> ExpertWeights:
    codes = random_bytes(experts, rows, columns // 2).view(torch.int32)
    scales = small(experts, rows, columns // 32).bfloat16()
    return ExpertWeights.from_compressed_tensors(codes.unbind(), scales.unbind(), group_size=32)


def bf16_lists(experts: int, rows: int, columns: int) -> ExpertWeights:
    return ExpertWeights.from_bf16(list(small(experts, rows, columns).bfloat16()))


def q4_0(experts: int, rows: int, columns: int, path: Path) -> ExpertWeights:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0
    values = (small(experts, rows, columns) - 0.01).numpy()
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tensor("experts", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The file is mapped copy on write, such that a test can change the weights.
    return ExpertWeights.from_gguf(gguf.GGUFReader(path, "c"), "experts")


Build = Callable[[int, int, int], ExpertWeights]


@pytest.fixture(params=["int8", "mxfp4", "int4 lists", "q4_0", "pair", "mixed pair"])
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> oracle.Case:
    def from_file(*shape: int) -> ExpertWeights:
        return q4_0(*shape, tmp_path / f"{shape}.gguf")

    builds: dict[str, tuple[Build, Build]] = {
        "int8": (int8, int8),
        "mxfp4": (mxfp4, mxfp4),
        "int4 lists": (int4_lists, int4_lists),
        "q4_0": (from_file, from_file),
        "pair": (int8, mxfp4),
        "mixed pair": (bf16_lists, int4_lists),
    }
    return quantized_case(*builds[request.param], pair="pair" in request.param)


def quantized_case(first: Build, second: Build, pair: bool = False) -> oracle.Case:
    case = make_case()
    experts, rows, hidden = case.gate_up.shape
    half = first(experts, rows // 2, hidden)
    gate_up = (half, half) if pair else first(experts, rows, hidden)
    return replace(case, gate_up=gate_up, down=second(experts, hidden, rows // 2))


def change(case: oracle.Case) -> None:
    """Change the weights of every expert in place, in a way that stays in their format."""
    for tensor in case.down.tensors:
        if not tensor.dtype.is_floating_point:
            tensor.copy_(tensor.flip(0) if tensor.dim() > 2 else tensor.roll(1, 0))


@backend
def test_compiled_with_quantized_weights(backend: str, quantized: oracle.Case) -> None:
    def layer(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        return quantized.run(x=x, ids=ids, router=router) * 2

    inputs = (quantized.x, quantized.ids, quantized.router)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    before = expertile.calls()
    first = compiled(*inputs)
    assert expertile.calls() == before + 1
    oracle.assert_same_bits(first, quantized.run() * 2)
    change(quantized)
    second = compiled(*inputs)
    assert not torch.equal(second, first)
    oracle.assert_same_bits(second, quantized.run() * 2)


def test_compiled_module_sees_that_its_quantized_weights_are_others() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.case = quantized_case(int8, int8)

        def forward(self, x: Tensor) -> Tensor:
            return self.case.run(x=x)

    module = Holder()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = module.case.x
    oracle.assert_same_bits(compiled(x), module.case.run())
    module.case = quantized_case(mxfp4, int4_lists)
    oracle.assert_same_bits(compiled(x), module.case.run())


def test_export_with_quantized_weights(quantized: oracle.Case) -> None:
    module = _Module(lambda x, ids, router: quantized.run(x=x, ids=ids, router=router))
    inputs = (quantized.x, quantized.ids, quantized.router)
    exported = torch.export.export(module, inputs).module()
    oracle.assert_same_bits(exported(*inputs), quantized.run())


def test_fake_hidden_states_with_quantized_weights(quantized: oracle.Case) -> None:
    before = expertile.calls()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, ids, router = map(mode.from_tensor, (quantized.x, quantized.ids, quantized.router))
        result = quantized.run(x=x, ids=ids, router=router)
    assert (result.shape, result.dtype) == (quantized.x.shape, quantized.x.dtype)
    assert expertile.calls() == before


def test_operator_with_quantized_weights_is_what_pytorch_expects(quantized: oracle.Case) -> None:
    arguments, formats = described(quantized)
    oracle.assert_same_bits(OPERATOR(*arguments, **formats), quantized.run())
    torch.library.opcheck(OPERATOR, arguments, formats)


def described(case: oracle.Case) -> tuple[tuple[Any, ...], dict[str, str]]:
    """The case as the operator takes it."""
    first = case.gate_up if isinstance(case.gate_up, tuple) else (case.gate_up,)
    tensors = [tensor for matrix in first for tensor in matrix.tensors]
    arguments = (case.x, tensors, [*case.down.tensors], case.ids, case.router, [], [])
    lines = "\n".join(matrix.description for matrix in first)
    return arguments, {"gate_up_format": lines, "down_format": case.down.description}


def test_operator_with_a_pair_of_plain_tensors() -> None:
    case = make_case()
    gate, up = case.gate_up.chunk(2, 1)
    arguments = (case.x, [gate, up], [case.down], case.ids, case.router, [], [])
    oracle.assert_same_bits(OPERATOR(*arguments, gate_up_format="\n"), case.run())
    pair = torch.compile(replace(case, gate_up=(gate, up)).run, fullgraph=True, backend="eager")
    oracle.assert_same_bits(pair(), case.run())


def test_weights_of_other_tensors_at_the_same_address() -> None:
    """What the operator remembers of tensors that it has seen depends on all that it relies on."""
    case = quantized_case(int8, int8)
    arguments, formats = described(case)
    OPERATOR(*arguments, **formats)
    codes, scales = arguments[1]
    for wrong in (codes.view(torch.uint8), codes[:, :, :32], codes[:, ::2], codes.mT):
        with pytest.raises(expertile.ExpertileError, match="gate_up"):
            OPERATOR(case.x, [wrong, scales], *arguments[2:], **formats)


def test_the_operator_keeps_no_tensors_alive() -> None:
    case = quantized_case(int8, int8)
    arguments, formats = described(case)
    codes, scales = arguments[1]
    memory = codes.numpy().copy()
    OPERATOR(case.x, [torch.from_numpy(memory), scales], *arguments[2:], **formats)
    held = weakref.ref(memory)
    del memory
    assert held() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what", "down_format: expected the description"),
        ("7", "down_format: expected the description"),
        ('[2, "int8", {}, {}]', "down_format: expected a description of version 1, got 2"),
        ('[1, "int7", {}, {"codes": null}]', "down_format: expected one of the formats bf16, int8"),
        ('[1, "int8", {"bits": 8}, {"codes": null}]', "down_format: expected one of the formats"),
        ("{}\n{}", "down: expected 4 tensors, as down_format says, got 2"),
        ("", "down: expected a list of one tensor"),
    ],
)
def test_wrong_descriptions_are_refused(text: str, message: str) -> None:
    case = quantized_case(int8, int8)
    arguments, formats = described(case)
    formats["down_format"] = text.replace("{}\n{}", "\n".join([formats["down_format"]] * 2))
    with pytest.raises(expertile.ArgumentError, match=message):
        OPERATOR(*arguments, **formats)


def test_description_that_belongs_to_other_tensors_is_refused() -> None:
    arguments, formats = described(quantized_case(int8, int8))
    other = described(quantized_case(mxfp4, mxfp4))[1]
    with pytest.raises(expertile.DtypeError, match="down codes: expected uint8, got int8"):
        OPERATOR(*arguments, **formats | {"down_format": other["down_format"]})


def test_descriptions_are_of_the_format_not_of_where_rows_lie() -> None:
    """Exported programs keep them; version 1 reads like this."""
    codes, scales = random_bytes(4, 32, 128).view(torch.int8), small(4, 32)
    views = ExpertWeights.from_int8(codes[:, ::2, :64], scales[:, ::2])
    whole = ExpertWeights.from_int8(codes[:, :16, :64].clone(), scales[:, :16])
    assert views.scheme != whole.scheme
    assert views.description == whole.description
    assert json.loads(int4_lists(4, 16, 64).description) == [
        1, "int4", {"group": 32, "scale": "bfloat16"}, {"codes": 4, "scales": 4},
    ]  # fmt: skip

"""int8 weights by int8 activations, to the bit: every machine that multiplies bytes against integers in NumPy.

Without AMX its kernels run through the emulator, in a process of their own; as a program this file does that and prints
what the emulator counted, as JSON.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import amx_emulator
import numpy as np
import oracle
import pytest
import torch
from subprocesses import check_output, run
from test_bit_exact import (
    amx_target,
    assert_tiles_released,
    emulate_amx,
    tiles_in_assembly,
    tiles_in_ir,
)
from test_gates import evaluate
from test_layouts import guarded
from test_variants import forced, some_blockings
from torch import Tensor

import expertile
from expertile import ArgumentError, ExpertSpec, ExpertWeights
from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import assembly
from expertile.codegen.isa.bytes import MOST_K
from expertile.runtime import roofline
from expertile.runtime.matrices import LayerWeights
from expertile.runtime.spec import LayerKernels
from expertile.templates import gates
from expertile.templates.stream import Multiply

BESIDE = {"amx": "amx_int8", "avx512_bf16": "avx512_vnni", "portable": "portable_int8"}
"""The machines that multiply bytes, by the ISA that a process runs on."""


@pytest.fixture(scope="module", params=BESIDE)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each machine that this one has; layers run on it."""
    name: str = request.param
    for each in (name, BESIDE[name]):
        if reason := isas.by_name(each).unavailable():
            pytest.skip(f"{each}: {reason}")
    with oracle.running(name):
        yield name


# A layer --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    x: Tensor
    gate_up: tuple[Tensor, Tensor]
    """Codes and scales."""
    down: tuple[Tensor, Tensor]
    ids: Tensor
    router: Tensor
    gate: Any = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False

    @property
    def weights(self) -> LayerWeights:
        """What stays the same from call to call."""
        gate_up, down = (ExpertWeights.from_int8(*each) for each in (self.gate_up, self.down))
        return LayerWeights(
            gate_up, down, self.gate_up_bias, self.down_bias,
            self.gate, self.interleaved, activations="int8",
        )  # fmt: skip

    def run(self, **changes: Any) -> Tensor:
        """The result, with some arguments replaced."""
        case = replace(self, **changes)
        weights = case.weights._asdict()
        matrices = weights.pop("gate_up"), weights.pop("down")
        return expertile.fused_experts(case.x, *matrices, case.ids, case.router, **weights)

    def tokens(self, index: Any) -> dict[str, Any]:
        """The arguments for some of the tokens: changes for `run`."""
        return {name: getattr(self, name)[index] for name in ("x", "ids", "router")}


def make_case(
    seed: int,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int = 2,
    top_k: int = 2,
    gate: Any = "silu",
    bias: torch.dtype | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.float32,
) -> Case:
    """Random codes, −128 among them, whose products are of the size of x; a tenth of the ids is −1."""
    random = torch.Generator().manual_seed(seed)
    rows = intermediate if gate == "relu2" else 2 * intermediate

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-128, 128, (experts, rows, columns), generator=random)
        scales = (0.5 + torch.rand(experts, rows, 1, generator=random)) / 74 / columns**0.5
        return codes.to(torch.int8), scales.to(scale_dtype)

    ids = torch.randint(experts, (tokens, top_k), generator=random)
    ids[torch.rand(tokens, top_k, generator=random) < 0.1] = -1
    return Case(
        x=normal(tokens, hidden).to(dtype),
        gate_up=matrix(rows, hidden),
        down=matrix(hidden, intermediate),
        ids=ids,
        router=normal(tokens, top_k),
        gate=gate,
        gate_up_bias=None if bias is None else normal(experts, rows).to(bias),
        down_bias=None if bias is None else normal(experts, hidden).to(bias),
        interleaved=interleaved,
    )


# The reference --------------------------------------------------------------------------------------------------------


def quantized(x: Any) -> tuple[Any, Any]:
    """float32 `[t, k]` of bf16 numbers as integers `[t, k]` and scales `[t, 1]`, as the documentation defines them."""
    amax = np.abs(x).max(axis=1, keepdims=True)
    small = amax < np.float32(2.0**-119)
    with np.errstate(all="ignore"):
        scale = np.where(small, np.float32(0), amax / np.float32(127))
        inverse = np.where(small, np.float32(0), np.float32(127) / amax)
        scale = np.where(np.isfinite(amax), scale, np.float32("nan"))
        return np.nan_to_num(np.rint(x * inverse)).astype(np.int64), scale


def product(x: Any, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Any:
    """Quantise the tokens, multiply exactly, and scale in fp32: by the row's scale, then by the token's."""
    q, token_scale = quantized(x)
    sums = q.astype(np.float64) @ codes.numpy().astype(np.float64).T  # exact: far below 2^53
    with np.errstate(all="ignore"):
        y = sums.astype(np.float32) * scales.float().numpy().reshape(1, -1) * token_scale
        return y if bias is None else y + bias.float().numpy()


def halves(case: Case, rows: Any) -> tuple[Any, Any]:
    """Gate and up; the same twice where there is no gate half."""
    if case.gate == "relu2":
        return rows, rows
    if case.interleaved:
        return rows[:, 0::2], rows[:, 1::2]
    return tuple(np.split(rows, 2, axis=1))


def activated(case: Case, rows: Any) -> Any:
    """The gate function of a product, by its own kernel on fp32 numbers, rounded to bf16."""
    gate = gates.resolve(case.gate)
    g, u = (np.ascontiguousarray(each).ravel() for each in halves(case, rows))
    h = evaluate(
        gate.name, lambda b, g, u: gate.emit(b, g if gate.gated else None, u), g, u, "portable"
    )
    return torch.from_numpy(h.reshape(len(rows), -1)).bfloat16().float().numpy()


def reference(case: Case) -> Tensor:
    """The layer to the bit."""
    sums = np.zeros(case.x.shape, np.float32)
    x = case.x.bfloat16().float().numpy()
    for expert in range(case.down[0].shape[0]):
        token, slot = (each.numpy() for each in (case.ids == expert).nonzero(as_tuple=True))
        if not token.size:
            continue
        biases = [
            None if bias is None else bias[expert] for bias in (case.gate_up_bias, case.down_bias)
        ]
        first, second = ([part[expert] for part in each] for each in (case.gate_up, case.down))
        h = activated(case, product(x[token], *first, biases[0]))
        y = product(h, *second, biases[1])
        for i in range(token.size):
            router = case.router[token[i], slot[i]].float().numpy()
            sums[token[i]] = multiply_add(router, y[i], sums[token[i]])
    return torch.from_numpy(sums).to(case.x.dtype)


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """What kernels do with a product and a sum: round once where the CPU can."""
    host = cpu.host()
    if host.triple.startswith("x86_64") and not host.has("fma"):
        return a * b + c
    return oracle.fma(a, b, c, flush=False)


def check(case: Case) -> None:
    oracle.assert_same_bits(case.run(), reference(case))


# To the bit -----------------------------------------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "one chunk": {"hidden": 64, "intermediate": 64},
    "half a chunk": {"hidden": 32, "intermediate": 32, "gate": "gelu", "dtype": torch.float32},
    "tails": {"hidden": 160, "intermediate": 224, "bias": torch.float32, "gate": "swiglu_oai"},
    "rows in between": {"hidden": 544, "intermediate": 96, "bias": torch.bfloat16},
    "interleaved": {
        "hidden": 128,
        "intermediate": 96,
        "interleaved": True,
        "bias": torch.bfloat16,
        "dtype": torch.float16,
    },
    "no gate half": {"hidden": 96, "intermediate": 160, "gate": "relu2", "dtype": torch.float32},
    "half scales": {"hidden": 192, "intermediate": 64, "scale_dtype": torch.float16},
    "bf16 scales": {"hidden": 64, "intermediate": 192, "scale_dtype": torch.bfloat16},
}
TOKENS = (1, 37)


def each_number_of_tokens() -> Case:
    """Expert e gets the first e + 1 of 70 tokens."""
    case = make_case(70, tokens=70, experts=70, top_k=70, hidden=96, intermediate=32, gate="relu2")
    numbers = torch.arange(70)
    case.ids.copy_(torch.where(numbers[:, None] <= numbers, numbers, -1))
    return case


def test_each_number_of_tokens(isa: str) -> None:
    check(each_number_of_tokens())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(isa: str, name: str, tokens: int) -> None:
    check(make_case(tokens, tokens=tokens, **LAYERS[name]))


def test_largest_sums(isa: str) -> None:
    """Codes and tokens at their limits: sums above 2^24, which fp32 has to round."""
    case = make_case(1, tokens=3, hidden=2048, intermediate=1056, gate="relu2", top_k=1)
    case.x[:] = torch.tensor([[1.0], [-2.0], [0.5]])
    for codes, _ in (case.gate_up, case.down):
        codes[:, 0::2], codes[:, 1::2] = -128, 127
        codes[:, :5, 3] = 1
    case.ids.fill_(1)
    check(case)


def test_variants(isa: str) -> None:
    compare_variants()


def compare_variants() -> None:
    """No variant changes a bit: k blocks with a rest, whole token blocks and less."""
    case = make_case(5, tokens=65, hidden=1120, intermediate=96, experts=2, top_k=1, gate="relu2")
    case.ids.fill_(1)
    for tokens in (2, 65):
        part = replace(case, **case.tokens(slice(tokens)))
        expected, number, count = reference(part), 0, 1
        while number < count:
            actual, names = forced(part, number, number, lambda kernel: some_blockings(kernel, 1))
            oracle.assert_same_bits(actual, expected)
            number, count = number + 1, max(names.values())


x86_64_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="AMX is x86-64's"
)


@x86_64_linux
def test_amx() -> None:
    if cpu.amx_status().usable:
        pytest.skip("there is AMX: it runs in this process")
    if not amx_emulator.needed():
        pytest.skip("AMX can't be emulated here")
    report = json.loads(check_output([sys.executable, __file__], timeout=500).splitlines()[-1])
    for instruction in ("LDTILECFG", "TILELOADD", "TDPBSSD", "TILESTORED", "TILERELEASE"):
        assert report[instruction] > 0, instruction
    assert report["TDPBF16PS"] == 0


def main() -> None:
    """All of the above on emulated tiles, on one thread and on two."""
    gc.freeze()  # see `conftest`
    emulate_amx()
    with oracle.running("amx"):
        check(each_number_of_tokens())
        for number, options in enumerate(LAYERS.values()):
            torch.set_num_threads(1 + number % 2)
            tokens = TOKENS[number // 2 % 2]
            check(make_case(tokens, tokens=tokens, **options))
        compare_variants()
    assert_tiles_released()
    assert amx_emulator.live_configurations() == 0
    print(json.dumps(amx_emulator.counts()))


# Properties -----------------------------------------------------------------------------------------------------------


def test_a_token_does_not_depend_on_the_others(isa: str) -> None:
    case = make_case(2, tokens=67, hidden=160, intermediate=96)
    whole = case.run()
    for index in ([5], [66, 3, 3], list(range(20, 53))):
        oracle.assert_same_bits(case.run(**case.tokens(index)), whole[index])


def test_threads(isa: str) -> None:
    """More work than a single thread takes without waking others."""
    case = make_case(3, tokens=50, hidden=320, intermediate=256, experts=8)
    with oracle.threads(1):
        alone = case.run()
    oracle.assert_same_bits(alone, reference(case))
    for count in (2, 3):
        with oracle.threads(count):
            oracle.assert_same_bits(case.run(), alone)


def test_idle_experts_and_tokens_elsewhere(isa: str) -> None:
    case = make_case(4, tokens=9, hidden=64, intermediate=96, experts=40)
    case.ids[3:] = -1
    result = case.run()
    oracle.assert_same_bits(result, reference(case))
    assert not result[3:].any()
    case.ids.fill_(-1)
    assert not case.run().any()


def test_rows_apart_and_at_the_edge_of_memory(isa: str) -> None:
    """Views whose rows have gaps, and rows that end where memory ends."""
    case = make_case(6, tokens=19, hidden=96, intermediate=160)
    expected = reference(case)

    def edged(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return guarded(codes, at_end=True), guarded(scales, at_end=True)

    def apart(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return oracle.scattered(codes, gaps=(5, 7), filler=99), scales

    for change in (edged, apart):
        got = case.run(gate_up=change(*case.gate_up), down=change(*case.down))
        oracle.assert_same_bits(got, expected)


def test_pairs_and_lists(isa: str) -> None:
    case = make_case(7, tokens=5, hidden=96, intermediate=64)
    codes, scales = case.gate_up
    gate, up = (
        ExpertWeights.from_int8(list(codes[:, part]), list(scales[:, part]))
        for part in (slice(64), slice(64, None))
    )
    weights = case.weights
    got = expertile.fused_experts(
        case.x, (gate, up), weights.down, case.ids, case.router, activations="int8"
    )
    oracle.assert_same_bits(got, reference(case))


def test_as_an_operator(isa: str) -> None:
    """A recorded call says which activations it wants."""
    case = make_case(15, tokens=3, hidden=64, intermediate=32)
    weights = case.weights

    def layer(x: Tensor) -> Tensor:
        given = weights.gate_up, weights.down, case.ids, case.router
        return expertile.fused_experts(x, *given, activations="int8")

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    oracle.assert_same_bits(compiled(case.x), reference(case))


# Tokens that are not like others --------------------------------------------------------------------------------------


def test_zeros(isa: str) -> None:
    """Of a token of zeros and of one that counts as zero, only the biases are left."""
    case = make_case(8, tokens=4, hidden=96, intermediate=64, bias=torch.float32)
    case.x[1] = 0
    case.x[2] *= 2.0**-125
    result = case.run()
    oracle.assert_same_bits(result, reference(case))
    zero = case.run(x=torch.zeros_like(case.x))
    oracle.assert_same_bits(result[1:3], zero[1:3])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_not_finite(isa: str, value: float, tokens: int) -> None:
    """A NaN or an infinity makes all of its token's result NaN, and nothing of any other's."""
    case = make_case(9, tokens=tokens, hidden=96, intermediate=64)
    case.ids[:] = torch.tensor([0, 1])
    expected = reference(case)
    case.x[0, 70] = value
    result = case.run()
    assert result[0].isnan().all()
    oracle.assert_same_bits(result[1:], expected[1:])


def test_smallest_and_largest(isa: str) -> None:
    """Around the smallest token that is not taken for zero, and up to the largest bf16."""
    case = make_case(10, tokens=40, hidden=64, intermediate=32, gate="relu2", dtype=torch.float32)
    magnitudes = torch.cat([torch.arange(-130, -110), torch.arange(100, 120)]).double()
    units = case.x.double() / case.x.double().abs().amax(1, keepdim=True)
    x = (units * torch.exp2(magnitudes)[:, None]).float()
    x[-1] *= 3.38e38 / x[-1].abs().max()
    check(replace(case, x=x))


# Accuracy -------------------------------------------------------------------------------------------------------------


def test_accuracy(isa: str) -> None:
    """No further from the layer of bf16 activations than 1.05 times what their quantisation to 8 bits costs."""
    case = make_case(11, tokens=33, hidden=1024, intermediate=512, dtype=torch.float32)
    plain = float64_layer(case, lambda x: x)
    ideal = distance(float64_layer(case, to_8_bits), plain)
    assert 1e-2 < ideal < 4e-2
    assert distance(case.run(), plain) <= 1.05 * ideal


def to_8_bits(x: Tensor) -> Tensor:
    """The nearest multiples of a 127th of each token's largest number."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def float64_layer(case: Case, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer in float64, with what becomes of its activations before each product."""
    output = torch.zeros(case.x.shape, dtype=torch.float64)
    gate_up, down = (
        codes.double() * scales.double() for codes, scales in (case.gate_up, case.down)
    )
    for expert in range(len(down)):
        token, slot = (case.ids == expert).nonzero(as_tuple=True)
        rows = quantize(oracle.to_bf16(case.x[token].double())) @ gate_up[expert].mT
        g, u = rows.chunk(2, dim=1)
        h = quantize(oracle.to_bf16(oracle.gate_function(case.gate)(g, u)))
        y = h @ down[expert].mT
        output.index_add_(0, token, case.router[token, slot].double()[:, None] * y)
    return output


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# Wrong arguments ------------------------------------------------------------------------------------------------------


def test_weights_that_have_no_bytes() -> None:
    case = make_case(12, tokens=2, hidden=64, intermediate=64)
    good = case.weights
    codes = case.down[0]
    plain = codes.bfloat16()
    grouped = ExpertWeights.from_int8(codes, torch.ones(2, 64, 2), group=32)
    for weights, names in (
        (good._replace(down=plain), "int8 and bf16"),
        (good._replace(down=grouped), "int8 and int8_grouped"),
        (good._replace(gate_up=case.gate_up[0].bfloat16(), down=plain), "bf16 and bf16"),
    ):
        with pytest.raises(ArgumentError, match=rf"activations: .*from_int8.*{names}"):
            expertile.fused_experts(
                case.x, weights.gate_up, weights.down, case.ids, case.router, activations="int8"
            )
    # The same weights do with bf16 activations.
    expertile.fused_experts(case.x, good.gate_up, grouped, case.ids, case.router)


def test_specs() -> None:
    spec = ExpertSpec(64, 32, 2, 1, weights="int8", activations="int8")
    assert spec != replace(spec, activations="bf16")
    for wrong, text in (
        ({"activations": "int4"}, "activations: expected"),
        ({"weights": "bf16"}, "activations: .*int8 weights"),
        ({"down_weights": "int8_g32"}, "activations: .*int8_grouped"),
        ({"hidden": MOST_K + 32}, f"hidden: expected at most {MOST_K}"),
        ({"intermediate": MOST_K + 32}, f"intermediate: expected at most {MOST_K}"),
    ):
        with pytest.raises(ArgumentError, match=text):
            replace(spec, **wrong)


def test_bound_weights_are_those_of_the_spec() -> None:
    case = make_case(13, tokens=2, hidden=64, intermediate=32)
    spec = ExpertSpec(64, 32, 2, 2, weights="int8", activations="int8")
    weights = case.weights
    layer = expertile.compile(spec, rows=[1]).bind(weights.gate_up, weights.down)
    oracle.assert_same_bits(layer(case.x, case.ids, case.router), case.run())


def test_machines() -> None:
    assert isas.for_bytes("portable") == "portable_int8"
    assert isas.for_bytes("portable_exact") == "portable_int8"
    for name in (*isas.names(), *BESIDE.values()):
        found = isas.for_bytes(name)
        assert isas.for_bytes(found) == found
        if isas.by_name(name).unavailable() is None:
            assert isas.by_name(found).unavailable() is None


@x86_64_linux
def test_llvm_keeps_the_tile_numbers() -> None:
    """See `test_bit_exact`: of a second tile instruction as well."""
    spec = ExpertSpec(96, 64, 1, 1, weights="int8", activations="int8")
    kernels = LayerKernels(spec, spec.formats(), isa="amx")
    for kernel in (kernels.gate_up(1), kernels.down(17), kernels.down(64)):
        ir = kernel.ir()
        tiles = tiles_in_ir(ir)
        assert {verb for verb, *_ in tiles} >= {"tdpbssd", "tilezero"}
        assert tiles_in_assembly(assembly(ir, amx_target("sapphirerapids"))) == tiles


def test_a_machine_without_vnni() -> None:
    """Its neighbour multiplies bytes then."""

    def machine() -> list[str]:
        from expertile.codegen import isa as isas

        return [isas.select().name, isas.for_bytes(isas.select().name)]

    found = run(machine, env={"EXPERTILE_MASK_FEATURES": "amx-int8,avx512vnni"})
    assert found[1] == "portable_int8"


def test_peak(isa: str) -> None:
    """A multiplication of bytes is of twice as many numbers."""
    bytes_, pairs = Multiply(isas.for_bytes(isa)), Multiply(isa)
    assert bytes_.operations == 2 * pairs.operations
    assert roofline.peak(1, "int8")._step() % bytes_.operations == 0


if __name__ == "__main__":
    main()

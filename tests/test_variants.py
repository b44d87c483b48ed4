"""No variant that the chooser can pick changes a bit: of each ISA that runs here, and of AMX under emulation.

As a program this file forces variants upon layers of awkward sizes whose weights lie among NaN, up to the edge of their
memory: a kernel that reads on ends the process. Blockings, prefetches and hints take turns over the sizes; under the
hypothesis profile `long`, every variant of every size is there in every layer.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import amx_emulator
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import check_output
from test_bit_exact import (
    amx_target,
    assert_tiles_released,
    emulate_amx,
    tiles_in_assembly,
    tiles_in_ir,
)
from test_layouts import guarded
from torch import Tensor

from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import assembly
from expertile.codegen.isa import Variant
from expertile.runtime import choice, layer
from expertile.runtime.spec import ExpertSpec, LayerKernels, contiguous
from expertile.templates.expert import Down
from expertile.templates.kernel import ExpertKernel


@dataclass(frozen=True)
class Shape:
    """A layer, and the numbers of tokens an expert gets in it."""

    options: dict[str, Any]
    rests: tuple[int, ...]
    """Fewer tokens than a block (where a block has so many) or as many."""
    blocks: int
    """Full blocks, with one more token."""


SHAPES = {
    # k blocks of 1024 and less and a rest of 8; an odd number of row blocks in gate/up, 8 rows more in down
    "long gate/up": Shape({"hidden": 1064, "intermediate": 80}, (1, 17), 2),
    "long down": Shape({"hidden": 88, "intermediate": 1072, "interleaved": True}, (2, 33), 3),
    "no gate half": Shape(
        {"hidden": 536, "intermediate": 49, "gate": "relu2", "bias": torch.float32}, (5, 16, 63), 8
    ),
    "transposed": Shape(
        {"hidden": 536, "intermediate": 72, "transposed": True, "bias": torch.bfloat16}, (31,), 1
    ),
    "less than a tile": Shape({"hidden": 20, "intermediate": 9}, (48,), 1),
}
SIZES = (1, 2, 5, 16, 17, 31, 32, 33, 47, 48, 63, 64)
_MOST = 3
"""Blockings of a kernel in a quick run."""
_SECONDS = 60 * settings().max_examples
"""For a whole program, on a busy machine."""

x86_64_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="AMX is x86-64's"
)


def thorough() -> bool:
    """Whether this is an hour's run."""
    return settings().max_examples >= 1000


# Forcing variants ---------------------------------------------------------------------------------------------------

Choose = Callable[[ExpertKernel], Sequence[Variant]]
"""The variants of a kernel that are tried."""


def blocking(variant: Variant) -> Variant:
    """The variant but for how it fetches."""
    return replace(variant, streaming=False, ahead=())


def of_each_blocking(kernel: ExpertKernel, offset: int = 0) -> list[Variant]:
    """A candidate of each blocking: hints and prefetches take turns, with another one first at another offset."""
    alike: dict[Variant, list[Variant]] = {}
    for variant in choice.candidates(kernel):
        alike.setdefault(blocking(variant), []).append(variant)
    return [some[(offset + i) % len(some)] for i, some in enumerate(alike.values())]


def some_blockings(kernel: ExpertKernel, offset: int) -> list[Variant]:
    """The same for few blockings, others at another offset."""
    every = of_each_blocking(kernel, offset)
    step = -(-len(every) // _MOST)
    return every[offset % step :: step]


def forced(
    case: oracle.Case, gate_up: int, down: int, variants: Choose = choice.candidates
) -> tuple[Tensor, dict[str, int]]:
    """The result of a layer whose kernels are in the variants with these numbers (modulo how many there are).

    Also: the kernels' names, with how many variants there are.
    """
    found: dict[str, int] = {}

    def choose(kernel: ExpertKernel) -> ExpertKernel:
        some = variants(kernel)
        chosen = some[(down if isinstance(kernel, Down) else gate_up) % len(some)]
        kernel = replace(kernel, variant=chosen)
        found[kernel.name] = len(some)
        return kernel

    prepared = layer.prepare(case.weights, case.ids.shape[1])
    kernels = LayerKernels(prepared.spec, prepared.stored, prepared.isa, choose=choose)
    found.clear()  # it looks at some kernels that it may not need
    return layer.execute(kernels, case.x, case.weights, case.ids, case.router), found


def make_case(seed: int, tokens: int, **options: Any) -> oracle.Case:
    """All tokens on both the second and the last of four experts; the others are NaN, and so is what lies between."""
    case = oracle.make_case(seed, tokens=tokens, experts=4, top_k=2, nowhere=0, **options)
    case.ids.copy_(torch.tensor([3, 1]))
    for weights in (case.gate_up, case.down, case.gate_up_bias, case.down_bias):
        if weights is not None:
            weights[[0, 2]] = float("nan")
    return case


def at_the_edge(weights: Tensor) -> Tensor:
    """The same values as a view with NaN between its rows, whose last byte is the last one that may be read."""
    _, rows, columns = weights.shape
    gap = 5
    strides = (rows * (columns + gap) + 2, columns + gap, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(weights.shape, strides, strict=True))
    memory = guarded(torch.full((size,), float("nan"), dtype=weights.dtype), at_end=True)
    return memory.as_strided(weights.shape, strides).copy_(weights)


# Every variant ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("isa", isas.names())
def test_every_variant_has_the_same_bits(isa: str) -> None:
    reason = isas.by_name(isa).unavailable()
    if reason and not (isa == "amx" and _can_emulate()):
        pytest.skip(reason)
    command = [sys.executable, __file__, isa, str(settings().max_examples)]
    output = check_output(command, timeout=_SECONDS)
    report = json.loads(output.splitlines()[-1])
    assert report["layers"] == list(SHAPES)
    assert report["kernels"] > 2 * len(SHAPES)
    if reason:
        for instruction in ("TILELOADD", "TILELOADDT1", "TDPBF16PS", "TILESTORED"):
            assert report["counts"][instruction] > 0, instruction


def _can_emulate() -> bool:
    system = (platform.system(), platform.machine())
    return system == ("Linux", "x86_64") and amx_emulator.needed()


def compare(isa: str, case: oracle.Case, variants: Choose) -> set[str]:
    """One layer in some variants, against the first candidates or the exact reference of AMX; the kernels' names."""
    with oracle.running("portable_exact" if isa == "amx" else isa):
        expected, _ = forced(case, 0, 0)
    oracle.check(case, expected)
    seen: set[str] = set()
    number, count = 0, 1
    with oracle.running(isa):
        while number < count:
            actual, names = forced(case, number, number, variants)
            try:
                oracle.assert_same_bits(actual, expected)
            except AssertionError as error:
                raise AssertionError(f"{', '.join(names)}: {error}") from None
            number, count = number + 1, max(count, *names.values())
            seen |= set(names)
    return seen


def compare_all(isa: str) -> dict[str, Any]:
    """All layers; which ones and how many kernels that were."""
    kernels: set[str] = set()
    block, offset = isas.by_name(isa).block_tokens, 0
    for shape in SHAPES.values():
        rests = SIZES if thorough() else shape.rests
        for tokens in [*(size for size in rests if size <= block), shape.blocks * block + 1]:
            offset += 1
            case = make_case(offset, tokens, **shape.options)
            edged = {name: at_the_edge(getattr(case, name)) for name in ("gate_up", "down")}
            kernels |= compare(isa, replace(case, **edged), _variants(offset))
    return {"layers": list(SHAPES), "kernels": len(kernels)}


def _variants(offset: int) -> Choose:
    return choice.candidates if thorough() else lambda kernel: some_blockings(kernel, offset)


# Any variant of any layer -------------------------------------------------------------------------------------------

_any_layer = given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.one_of(st.sampled_from(SIZES), st.integers(1, 200)),
    hidden=st.one_of(st.sampled_from((31, 32, 512, 513, 1055, 2080)), st.integers(1, 700)),
    intermediate=st.one_of(st.sampled_from((15, 48, 80, 528, 1025)), st.integers(1, 700)),
    gate=st.sampled_from(("silu", "relu2")),
    bias=st.sampled_from((None, torch.bfloat16, torch.float32)),
    interleaved=st.booleans(),
    transposed=st.booleans(),
    gaps=st.sampled_from(((0, 0), (7, 3), (100, 0))),
    gate_up=st.integers(0, 999),
    down=st.integers(0, 999),
)


def any_layer(test: Callable[..., None]) -> Callable[..., None]:
    """With half as many examples as usual: each compiles four kernels and more."""
    return settings(max_examples=max(1, settings().max_examples // 2))(_any_layer(test))


def compare_any(
    isa: str,
    gaps: tuple[int, int],
    gate_up: int,
    down: int,
    **options: Any,
) -> None:
    """Two variants, by number, against the first ones; of AMX against its exact reference."""
    case = make_case(**options)
    views = {name: oracle.scattered(getattr(case, name), gaps=gaps) for name in ("gate_up", "down")}
    case = replace(case, **views)
    with oracle.running("portable_exact" if isa == "amx" else isa):
        expected, _ = forced(case, 0, 0)
    with oracle.running(isa):
        actual, _ = forced(case, gate_up, down)
    oracle.assert_same_bits(actual, expected)


@any_layer
def test_any_variant_of_any_layer(isa: str, **options: Any) -> None:
    compare_any(isa, **options)


@x86_64_linux
@pytest.mark.timeout(_SECONDS)
def test_any_variant_of_any_layer_on_amx() -> None:
    """As above, in a process of its own."""
    if not cpu.amx_status().usable and not _can_emulate():
        pytest.skip(cpu.amx_status().reason)
    examples = settings().max_examples
    command = [sys.executable, __file__, "amx", str(examples), "any"]
    report = json.loads(check_output(command, timeout=_SECONDS).splitlines()[-1])
    assert report["examples"] >= examples // 2


# Tiles as they are configured ---------------------------------------------------------------------------------------


def test_amx_tiles_are_used_as_they_are_configured() -> None:
    """In the IR: shapes agree in every product, and with the strides in memory."""
    used = set()
    for spec in (ExpertSpec(536, 80, 1, 1), ExpertSpec(88, 49, 1, 1, gate="relu2")):
        kernels = contiguous(spec, "amx")
        for tokens in (1, 16, 20, 48, 50, 64):
            for kernel in (kernels.gate_up(tokens), kernels.down(tokens)):
                for variant in of_each_blocking(kernel):
                    used |= check_tiles(replace(kernel, variant=variant).ir())
    assert used == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)}


_CONFIGURATION = re.compile(r'@"(\w+)" = private constant \[64 x i8\] c"(.*)"')
_TILE_CALL = re.compile(
    r'call void @"llvm\.x86\.(ldtilecfg|tilezero|tileload\w+|tilestored64|tdpbf16ps)"\((.*)\)'
)


def check_tiles(ir: str) -> set[tuple[int, int]]:
    """Row blocks and columns of the C tiles, by configuration."""
    shapes = {name: _shapes(text) for name, text in _CONFIGURATION.findall(ir)}
    # A kernel configures before whatever uses it, in the order of the text too.
    regions: list[tuple[str, list[tuple[str, list[str]]]]] = []
    for verb, arguments in _TILE_CALL.findall(ir):
        values = re.findall(r"i8 (\d+)|i64 (\d+)|ptr @\"(\w+)\"", arguments)
        words = ["".join(value) for value in values]
        if verb == "ldtilecfg":
            regions.append((words[0], []))
        else:
            regions[-1][1].append((verb, words))
    return {_check_region(shapes[name], calls) for name, calls in regions}


def _shapes(text: str) -> list[tuple[int, int]]:
    """Rows and bytes a row of each tile, from the bytes that LDTILECFG reads, as LLVM writes them."""
    data = bytes(int(pair[1:], 16) if len(pair) == 3 else ord(pair) for pair in _characters(text))
    assert len(data) == 64
    assert data[0] == 1, "palette"
    return [
        (data[48 + tile], int.from_bytes(data[16 + 2 * tile : 18 + 2 * tile], "little"))
        for tile in range(8)
    ]


def _characters(text: str) -> list[str]:
    return re.findall(r"\\[0-9A-Fa-f]{2}|.", text)


def _check_region(
    shapes: list[tuple[int, int]], calls: list[tuple[str, list[str]]]
) -> tuple[int, int]:
    products = {tuple(map(int, words)) for verb, words in calls if verb == "tdpbf16ps"}
    sums, weights, tokens = (set(tiles) for tiles in zip(*products, strict=True))
    assert len(sums | weights | tokens) == len(sums) + len(weights) + len(tokens)
    for c, a, b in products:
        assert shapes[c][0] == shapes[a][0] == 16
        assert shapes[c][1] == shapes[b][1]
        assert shapes[a][1] == 64 == 4 * shapes[b][0]
    for verb, words in calls:
        tile = int(words[0])
        if verb == "tilezero":
            assert tile in sums
        elif verb != "tdpbf16ps" and tile not in weights:  # whose rows lie anyhow
            assert int(words[1]) == shapes[tile][1], (verb, words)
    return len(weights), len(sums) // len(weights)


@x86_64_linux
@pytest.mark.parametrize("tokens", [1, 20, 48, 64])
def test_llvm_keeps_the_tile_numbers_of_every_variant(tokens: int) -> None:
    target = amx_target("sapphirerapids")
    for spec in (ExpertSpec(536, 80, 1, 1), ExpertSpec(536, 48, 1, 1, gate="relu2")):
        kernels = contiguous(spec, "amx")
        for kernel in (kernels.gate_up(tokens), kernels.down(tokens)):
            for variant in of_each_blocking(kernel, tokens):
                if variant.k_block // 32 >= kernel.inputs // 32:
                    continue  # one k block: LLVM drops what goes on with sums
                ir = replace(kernel, variant=variant).ir()
                assert tiles_in_assembly(assembly(ir, target)) == tiles_in_ir(ir)


# The program --------------------------------------------------------------------------------------------------------


def main(isa: str, examples: str, *what: str) -> None:
    settings.register_profile("child", settings(), max_examples=int(examples))
    settings.load_profile("child")
    torch.set_num_threads(2)
    gc.freeze()  # what was imported, or each collection while IR is written would look through it
    emulated = isa == "amx" and not cpu.amx_status().usable
    if emulated:
        emulate_amx()
    report = compare_many(isa) if what else compare_all(isa)
    if isa == "amx":
        assert_tiles_released()
    if emulated:
        assert amx_emulator.live_configurations() == 0
        report["counts"] = amx_emulator.counts()
    print(json.dumps(report))


def compare_many(isa: str) -> dict[str, Any]:
    """As many layers as hypothesis wants to see."""
    count = 0

    @any_layer
    def compare_one(**options: Any) -> None:
        nonlocal count
        count += 1
        compare_any(isa, **options)

    compare_one()
    return {"examples": count}


if __name__ == "__main__":
    import conftest  # noqa: F401  the profiles

    main(*sys.argv[1:])

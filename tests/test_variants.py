"""No variant that the chooser can pick changes a bit: of each ISA that runs here, and of AMX under emulation.

As a program this file forces variant by variant through layers of awkward sizes whose weights lie among NaN, up to the
edge of their memory; a kernel that reads on ends the process. Each blocking comes once a size, with one of its
prefetches and hints; under the hypothesis profile `long`, every variant of every size in every layer.
"""

from __future__ import annotations

import itertools
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import amx_emulator
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import check_output
from test_bit_exact import assert_tiles_released, emulate_amx
from test_layouts import guarded
from torch import Tensor

from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import assembly
from expertile.codegen.isa import Variant
from expertile.runtime import choice, inspection, layer
from expertile.runtime.spec import ExpertSpec, LayerKernels, contiguous
from expertile.templates.expert import Down, ExpertKernel

LAYERS: dict[str, dict[str, Any]] = {
    # k blocks of 1024 and less, and a rest of 8; an odd number of row blocks, and 8 rows more
    "long gate/up": {"hidden": 1064, "intermediate": 88, "bias": torch.float32},
    "long down": {
        "hidden": 88,
        "intermediate": 1064,
        "interleaved": True,
        "bias": torch.bfloat16,
        "gate": "swiglu_oai",
    },
    "no gate half": {"hidden": 536, "intermediate": 49, "gate": "relu2"},
    "transposed": {"hidden": 1064, "intermediate": 72, "transposed": True, "bias": torch.float32},
    "less than a tile": {"hidden": 20, "intermediate": 9, "interleaved": True},
}
SIZES = (1, 2, 5, 16, 17, 31, 32, 33, 47, 48, 63, 64)

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


def of_each_blocking(kernel: ExpertKernel) -> list[Variant]:
    """The first candidate, and one of each blocking: their hints and prefetches take turns."""
    candidates = choice.candidates(kernel)
    alike: dict[Variant, list[Variant]] = {}
    for variant in candidates:
        alike.setdefault(blocking(variant), []).append(variant)
    turns = (some[number % len(some)] for number, some in enumerate(alike.values()))
    return list(dict.fromkeys([candidates[0], *turns]))


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

    weights = case.gate_up, case.down, case.gate_up_bias, case.down_bias
    prepared = layer.prepare(
        *weights[:2], case.gate, *weights[2:], case.ids.shape[1], case.interleaved, case.transposed
    )
    shape = prepared.spec, prepared.gate_up_row, prepared.down_row, prepared.isa
    kernels = LayerKernels(*shape, choose=choose)
    found.clear()  # it looks at some kernels that it may not need
    return layer.execute(kernels, case.x, weights, case.ids, case.router), found


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
    experts, rows, columns = weights.shape
    gap = 5
    strides = (rows * (columns + gap) + 2, columns + gap, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(weights.shape, strides, strict=True))
    memory = guarded(torch.full((size,), float("nan"), dtype=weights.dtype), at_end=True)
    return memory.as_strided(weights.shape, strides).copy_(weights)


# Every variant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", isas.names())
def test_every_variant_has_the_same_bits(isa: str) -> None:
    reason = isas.by_name(isa).unavailable()
    if reason and not (isa == "amx" and _can_emulate()):
        pytest.skip(reason)
    examples = settings().max_examples
    output = check_output([sys.executable, __file__, isa, str(examples)], timeout=40 * examples)
    report = json.loads(output.splitlines()[-1])
    assert report["layers"] == list(LAYERS)
    assert report["variants"] > 1
    if reason:
        for instruction in ("TILELOADD", "TILELOADDT1", "TDPBF16PS", "TILESTORED"):
            assert report["counts"][instruction] > 0, instruction


def _can_emulate() -> bool:
    system = (platform.system(), platform.machine())
    return system == ("Linux", "x86_64") and amx_emulator.needed()


def sizes(isa: str, number: int) -> list[int]:
    """Tokens of an expert for layer `number`: a third of all, or all."""
    block = isas.by_name(isa).block_tokens
    within = [size for size in SIZES if size <= block]
    every = [*within, 2 * block, 3 * block + 1, 9 * block + 2]
    return every if thorough() else every[number % 3 :: 3]


def compare(isa: str, case: oracle.Case) -> set[str]:
    """One layer in all variants; the kernels' names."""
    variants = choice.candidates if thorough() else of_each_blocking
    with oracle.running("portable_exact" if isa == "amx" else isa):
        expected, _ = forced(case, 0, 0)
    oracle.check(case, expected)
    seen: set[str] = set()
    count = 1
    with oracle.running(isa):
        for number in itertools.count():
            if number == count:
                return seen
            actual, names = forced(case, number, number, variants)
            count = max(count, *names.values())
            seen |= set(names)
            try:
                oracle.assert_same_bits(actual, expected)
            except AssertionError as error:
                raise AssertionError(f"{', '.join(names)}: {error}") from None
    raise AssertionError


def compare_all(isa: str) -> dict[str, Any]:
    """All layers; which ones and how many kernels that were."""
    kernels: set[str] = set()
    for number, options in enumerate(LAYERS.values()):
        for tokens in sizes(isa, number):
            case = make_case(number, tokens, **options)
            edged = {name: at_the_edge(getattr(case, name)) for name in ("gate_up", "down")}
            kernels |= compare(isa, replace(case, **edged))
    return {"layers": list(LAYERS), "variants": len(kernels)}


# Any variant of any layer -------------------------------------------------------------------------------------------

any_layer = given(
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
def test_any_variant_of_any_layer_on_amx() -> None:
    """As above, in a process of its own."""
    examples = settings().max_examples
    if not cpu.amx_status().usable and not _can_emulate():
        pytest.skip(cpu.amx_status().reason)
    command = [sys.executable, __file__, "amx", str(examples), "any"]
    report = json.loads(check_output(command, timeout=60 * examples).splitlines()[-1])
    assert report["examples"] >= examples


# Tiles as they are configured ---------------------------------------------------------------------------------------


def test_amx_tiles_are_used_as_they_are_configured() -> None:
    """Of every kernel's IR: shapes agree in every product, and with the strides in memory."""
    used = set()
    for spec in (ExpertSpec(1064, 88, 1, 1), ExpertSpec(536, 49, 1, 1, gate="relu2")):
        kernels = contiguous(spec, "amx")
        for tokens in SIZES:
            for kernel in (kernels.gate_up(tokens), kernels.down(tokens)):
                for variant in of_each_blocking(kernel):
                    used |= check_tiles(replace(kernel, variant=variant))
    assert used == {(blocks, columns) for blocks in (1, 2) for columns in (1, 2, 3, 4)} - {
        (2, 3),
        (2, 4),
    }

"""No variant that the chooser can pick for a quantised kernel changes a bit, nor reads beside a tensor.

As a program this file forces variants upon layers whose codes, scales and factors lie among bytes of ones, up to the
edge of their memory: a kernel that reads on ends the process. On AMX the layers run under emulation where it has to be,
and are compared with its exact reference.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from dataclasses import replace
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
from test_quantised import SCHEMES, make_case, over, scattered
from test_variants import (
    SIZES,
    Choose,
    _can_emulate,
    compare,
    forced,
    of_each_blocking,
    some_blockings,
    thorough,
)
from torch import Tensor

from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.isa import Variant
from expertile.runtime import choice
from expertile.templates.kernel import ExpertKernel

LAYERS: tuple[tuple[str | None, str | None, dict[str, Any], int, int], ...] = (
    (None, "int8", {"hidden": 41, "intermediate": 544, "bias": torch.float32}, 0, 5),
    ("mxfp4", "mxfp4", {"hidden": 544, "intermediate": 96, "interleaved": True}, 1, 1),
    ("nvfp4", None, {"hidden": 544, "intermediate": 53, "gate": "relu2"}, 0, 1),
    ("fp8_block", "fp8_block", {"hidden": 288, "intermediate": 640}, 0, 17),
    ("q4_K", "q6_K", {"hidden": 768, "intermediate": 256}, 2, 2),
)
"""Formats of gate/up and down, sizes (a rest after a k block of 512), full blocks of tokens, and how many more."""
_SECONDS = 60 * settings().max_examples
"""For a whole program, on a busy machine."""


def layer(
    gate_up: str | None, down: str | None, tokens: int, seed: int, **options: Any
) -> oracle.Case:
    """All tokens on both the second and the last of four experts; the others are NaN or wrong, and what lies between.

    Each part of the weights ends at a page that can't be touched.
    """
    case = make_case(gate_up, down, (tokens, 0, 0, 0), seed=seed, **options)
    ids, router = torch.tensor([[3, 1]]).expand(tokens, -1), case.router.expand(-1, 2)
    edged = {name: _edged(getattr(case, name)) for name in ("gate_up", "down")}
    return replace(case, ids=ids, router=router, **edged)


def _edged(weights: Any) -> Any:
    if not isinstance(weights, Tensor):
        return over(weights, _edged)
    weights.view(4, -1).view(torch.uint8)[::2] = 255
    return scattered(weights, _at_the_edge)


def _at_the_edge(memory: Tensor) -> Tensor:
    return guarded(memory, at_end=True)


# Every variant ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize("isa", isas.names())
def test_every_variant_has_the_same_bits(isa: str) -> None:
    reason = isas.by_name(isa).unavailable()
    if reason and not (isa == "amx" and _can_emulate()):
        pytest.skip(reason)
    command = [sys.executable, __file__, isa, str(settings().max_examples)]
    report = json.loads(check_output(command, timeout=_SECONDS).splitlines()[-1])
    assert report["layers"] == len(LAYERS)
    assert report["kernels"] > 2 * len(LAYERS)
    if reason:
        for instruction in ("TILELOADD", "TDPBF16PS", "TILESTORED"):
            assert report["counts"][instruction] > 0, instruction


def compare_all(isa: str) -> dict[str, Any]:
    """All layers; which ones and how many kernels that were."""
    kernels: set[str] = set()
    block = isas.by_name(isa).block_tokens
    for offset, (gate_up, down, options, blocks, rest) in enumerate(LAYERS):
        rests = SIZES if thorough() else (rest,)
        for tokens in (blocks * block + more for more in rests):
            case = layer(gate_up, down, tokens, offset, **options)
            kernels |= compare(isa, case, variants(offset))
    return {"layers": len(LAYERS), "kernels": len(kernels)}


def variants(offset: int) -> Choose:
    """All there are; a few in a quick run."""
    return choice.candidates if thorough() else lambda kernel: some_blockings(kernel, offset)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_decoded_beside_others_have_the_same_bits(isa: str, name: str) -> None:
    """In as many passes as a few tokens take, or in several launches that share the rows."""
    if not isas.by_name(isa).registers:
        pytest.skip(f"{isa} has no such variants")
    number = list(SCHEMES).index(name)
    case = layer(name, name, (7, 41)[number % 2], seed=3)

    def carried(kernel: ExpertKernel) -> list[Variant]:
        every = of_each_blocking(kernel)
        # There is none for rows that are multiplied once.
        return [each for each in every if each.carried] or every

    expected, _ = forced(case, 0, 0)
    actual, kernels = forced(case, number, number, carried)
    for projection in ("gate_up", "down"):
        of_it = [kernel for kernel in kernels if kernel.startswith(projection)]
        assert any(re.search(r"p\d+a?wr", kernel) for kernel in of_it)
    oracle.assert_same_bits(actual, expected)


# Any variant of any layer -------------------------------------------------------------------------------------------


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    seed=st.integers(0, 2**32 - 1),
    formats=st.tuples(st.sampled_from(tuple(SCHEMES)), st.sampled_from(tuple(SCHEMES))),
    tokens=st.one_of(st.sampled_from(SIZES), st.integers(1, 200)),
    hidden=st.sampled_from((256, 512, 768)),
    intermediate=st.sampled_from((256, 512, 768)),
    gate=st.sampled_from(("silu", "relu2")),
    bias=st.sampled_from((None, torch.bfloat16, torch.float32)),
    variants=st.tuples(st.integers(0, 999), st.integers(0, 999)),
)
def test_any_variant_of_any_layer(
    isa: str,
    seed: int,
    formats: tuple[str, str],
    tokens: int,
    variants: tuple[int, int],
    **options: Any,
) -> None:
    """Two variants, by number, against the first ones."""
    case = make_case(*formats, (tokens,), seed=seed, **options)
    expected, _ = forced(case, 0, 0)
    oracle.check(case, expected)
    actual, _ = forced(case, *variants)
    oracle.assert_same_bits(actual, expected)


# The program --------------------------------------------------------------------------------------------------------


def main(isa: str, examples: str) -> None:
    settings.register_profile("child", settings(), max_examples=int(examples))
    settings.load_profile("child")
    torch.set_num_threads(2)
    gc.freeze()  # what was imported, or each collection while IR is written would look through it
    emulated = isa == "amx" and not cpu.amx_status().usable
    if emulated:
        emulate_amx()
    report = compare_all(isa)
    if isa == "amx":
        assert_tiles_released()
    if emulated:
        assert amx_emulator.live_configurations() == 0
        report["counts"] = amx_emulator.counts()
    print(json.dumps(report))


if __name__ == "__main__":
    import conftest  # noqa: F401  the profiles

    main(*sys.argv[1:])

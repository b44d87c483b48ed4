"""The AMX arithmetic to the bit: `portable_exact` against TDPBF16PS in NumPy, and `amx` against `portable_exact`.

Without AMX the `amx` kernels run through the emulator, in a process of their own; with AMX, natively. As a program
this file compares the two for every number of rows and prints what the emulator counted, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import amx_emulator
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expertile
from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.compiler import Target, assembly
from expertile.runtime.spec import LayerKernels

AMX_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")


# portable_exact against NumPy ---------------------------------------------------------------------------------------


def wide(seed: int, *shape: int, middle: int, spread: int) -> torch.Tensor:
    """bf16 with random bits and exponents from 2^(middle - spread) to 2^(middle + spread)."""
    random = np.random.default_rng(seed)
    exponent = np.clip(random.integers(middle - spread, middle + spread + 1, shape) + 127, 0, 255)
    bits = random.integers(0, 2, shape) << 15 | exponent << 7 | random.integers(0, 128, shape)
    return torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)


def wide_case(
    seed: int,
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    middle: int = 0,
    spread: int = 20,
    **options: Any,
) -> oracle.Case:
    """A case with wide exponents around 2^middle in x and gate_up; bf16 biases of the products' size."""
    case = oracle.make_case(
        seed,
        tokens=tokens,
        experts=1,
        top_k=1,
        hidden=hidden,
        intermediate=intermediate,
        nowhere=0,
        **options,
    )
    x = wide(seed, *case.x.shape, middle=middle, spread=spread)
    gate_up = wide(seed + 1, *case.gate_up.shape, middle=middle, spread=spread)
    down = wide(seed + 2, *case.down.shape, middle=-middle, spread=spread)
    return replace(case, x=x, gate_up=gate_up, down=down)


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    reason = isas.by_name("portable_exact").unavailable()
    if reason:
        pytest.skip(reason)
    with oracle.running("portable_exact"):
        yield


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.sampled_from((1, 2, 16, 17, 33)),
    shape=st.sampled_from(((1, 1), (33, 17), (64, 48), (100, 72))),
    middle=st.sampled_from((0, -62, -66, -90, 40)),
    spread=st.sampled_from((0, 3, 20, 127)),
    bias=st.sampled_from((None, torch.float32)),
)
def test_portable_exact_is_tdpbf16ps(
    exact: None,
    seed: int,
    tokens: int,
    shape: tuple[int, int],
    middle: int,
    spread: int,
    bias: torch.dtype | None,
) -> None:
    """Products from far below the smallest normal number to beyond the largest, denormals, infinities and NaN."""
    case = wide_case(
        seed,
        tokens=tokens,
        hidden=shape[0],
        intermediate=shape[1],
        middle=middle,
        spread=spread,
        gate="relu2",
        bias=bias,
    )
    oracle.assert_same_bits(case.run(), oracle.exact_layer(case))


def test_portable_exact_flushes_as_x86(exact: None) -> None:
    """2⁻¹²⁶ - 2⁻¹⁵⁰ is denormal, so it is flushed, although it would round to the smallest normal number."""
    case = _cancelling()
    expected = oracle.exact_layer(case)
    assert float(expected) == 0
    oracle.assert_same_bits(case.run(), expected)


def _cancelling() -> oracle.Case:
    """The down projection multiplies h = (2⁻⁶⁴, 0, 2⁻⁷⁶, 0) by (2⁻⁶², 0, -2⁻⁷⁴, 0)."""
    case = oracle.make_case(
        1,
        tokens=1,
        experts=1,
        top_k=1,
        hidden=1,
        intermediate=4,
        gate="relu2",
        dtype=torch.float32,
        nowhere=0,
    )
    gate_up = torch.tensor([[[2.0**-32], [0], [2.0**-38], [0]]])
    down = torch.tensor([[[2.0**-62, 0, -(2.0**-74), 0]]])
    one = torch.ones(1, 1)
    return replace(case, x=one, router=one, gate_up=gate_up.bfloat16(), down=down.bfloat16())


def test_fma_of_the_oracle() -> None:
    """The oracle's own fused multiply-add, on cases worked out by hand."""

    def fma(a: float, b: float, c: float, flush: bool = False) -> float:
        numbers = (np.array([each], np.float32) for each in (a, b, c))
        return float(oracle.fma(*numbers, flush=flush)[0])

    a = 1 + 2.0**-12
    assert fma(a, a, -1) == 2.0**-11 + 2.0**-24
    # a² is halfway between two floats: what float64 can't hold decides.
    assert fma(a, a, 0) == 1 + 2.0**-11
    assert fma(a, a, 2.0**-60) == 1 + 2.0**-11 + 2.0**-23
    assert fma(a, a, -(2.0**-60)) == 1 + 2.0**-11
    assert fma(2.0**-70, 2.0**-70, 0) == 2.0**-140
    assert fma(2.0**-70, 2.0**-70, 0, flush=True) == 0
    assert fma(-(2.0**-75), 2.0**-75, 2.0**-126) == 2.0**-126
    assert fma(-(2.0**-75), 2.0**-75, 2.0**-126, flush=True) == 0
    assert fma(2.0**100, 2.0**100, 0) == float("inf")


# amx against portable_exact -----------------------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "row-major": {"hidden": 68, "intermediate": 40, "gate": "silu"},
    "one": {"hidden": 1, "intermediate": 1, "gate": "relu2", "bias": torch.float32},
    "tails": {"hidden": 33, "intermediate": 49, "gate": "swiglu_oai", "bias": torch.bfloat16},
    "transposed": {
        "hidden": 64,
        "intermediate": 96,
        "gate": "gelu",
        "interleaved": True,
        "transposed": True,
        "bias": torch.float32,
    },
}
ROWS = {
    "row-major": range(1, 34),
    "one": (1, 2, 17, 97),
    "tails": (1, 16, 31, 50),
    "transposed": (1, 17, 64),
}


x86_64_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="AMX is x86-64's"
)


@x86_64_linux
@pytest.mark.parametrize("processor", ["sapphirerapids", "skylake-avx512", "x86-64", "znver4"])
def test_llvm_keeps_the_tile_numbers(processor: str) -> None:
    """A tile renamed after register allocation would have another tile's shape.

    LLVM's post-RA scheduler does that to break anti-dependencies, for the processors whose model asks for it.
    """
    target = amx_target(processor)
    shape = expertile.ExpertSpec(33, 49, 1, 1)
    kernels = LayerKernels(shape, shape.formats(), isa="amx")
    for kernel in (kernels.gate_up(1), kernels.down(1), kernels.down(17), kernels.down(50)):
        assert tiles_in_assembly(assembly(kernel.ir(), target)) == tiles_in_ir(kernel.ir())


def tiles_in_ir(ir: str) -> set[tuple[str, ...]]:
    """The tile instructions of a kernel with their tiles: ("tdpbf16ps", "0", "4", "7") …"""
    calls = re.findall(r'call void @"llvm\.x86\.(\w+?)(?:64)?"\((i8 .*)\)', ir)
    return {(verb, *re.findall(r"i8 (\d+)", arguments)) for verb, arguments in calls}


def tiles_in_assembly(text: str) -> set[tuple[str, ...]]:
    """The same in AT&T syntax, where the order is reversed."""
    lines = re.findall(r"^\t(t\w+)\t(.*%tmm.*)$", text, re.MULTILINE)
    return {(verb, *reversed(re.findall(r"%tmm(\d+)", operands))) for verb, operands in lines}


@x86_64_linux
@pytest.mark.parametrize("name", LAYERS)
def test_amx_equals_portable_exact(name: str) -> None:
    status = cpu.amx_status()
    if not status.usable and not amx_emulator.needed():
        pytest.skip(status.reason)
    child = subprocess.run(
        [sys.executable, __file__, name],
        stdout=subprocess.PIPE,
        text=True,
        timeout=550,
        env=os.environ,
    )
    assert child.returncode == 0
    report = json.loads(child.stdout)
    assert report["layers"] == len(ROWS[name]) * 3 + 1
    if not status.usable:
        for instruction in (
            "LDTILECFG",
            "TILEZERO",
            "TILELOADD",
            "TDPBF16PS",
            "TILESTORED",
            "TILERELEASE",
        ):
            assert report["counts"][instruction] > 0, instruction
        # A kernel of two neighbouring row blocks configures again for a single one.
        assert report["counts"]["LDTILECFG"] >= report["counts"]["TILERELEASE"]


def amx_target(processor: str) -> Target:
    """This machine with AMX, scheduled for a processor that LLVM knows by name."""
    host = Target.host()
    wanted = {"-" + feature for feature in AMX_FEATURES}
    features = sorted("+" + each[1:] if each in wanted else each for each in host.features)
    return Target(processor, tuple(features), host.triple)


def emulate_amx() -> None:
    """From here on this process has AMX, as far as Expertile can tell."""
    amx_emulator.install()
    target = amx_target("sapphirerapids")
    for name in ("amx", "amx_int8"):
        amx: Any = isas.by_name(name)
        amx.target = lambda: target
        amx.unavailable = lambda: None


_STORE_CONFIGURATION = bytes.fromhex("c4e2794907c3")  # sttilecfg [rdi]; ret


def assert_tiles_released() -> None:
    """The configuration of this thread is the one before any ldtilecfg: all zeros."""
    import ctypes

    configuration = (ctypes.c_uint8 * 64)(*[1] * 64)
    cpu._execute(_STORE_CONFIGURATION, None, configuration)
    assert not any(configuration)


def compare(case: oracle.Case) -> None:
    """One layer on both ISAs."""
    with oracle.running("portable_exact"):
        expected = case.run()
    with oracle.running("amx"):
        actual = case.run()
    assert_tiles_released()
    oracle.assert_same_bits(actual, expected)


def compare_all(name: str) -> int:
    """Every number of rows of a layer, with exponents that fit, that underflow and that overflow; layers compared."""
    done = 0
    for rows in ROWS[name]:
        for middle, spread in ((0, 8), (-63, 4), (0, 127)):
            compare(wide_case(rows, tokens=rows, middle=middle, spread=spread, **LAYERS[name]))
            done += 1
    several = oracle.make_case(3, tokens=rows, experts=40, top_k=40, nowhere=0, **LAYERS[name])
    several.ids.copy_(torch.arange(40))
    compare(several)  # on several threads
    return done + 1


def main(name: str) -> None:
    gc.freeze()  # see `conftest`
    emulated = not cpu.amx_status().usable
    if emulated:
        emulate_amx()
    report = {"layers": compare_all(name), "counts": {}}
    if emulated:
        assert amx_emulator.live_configurations() == 0
        report["counts"] = amx_emulator.counts()
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])

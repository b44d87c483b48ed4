"""The AMX emulator (or the processor, where it has AMX) against exact references.

Every job runs in a process of its own, as wrong tile code, or a wrong emulator, takes its process
down.  One worker, this file run as a program, installs the emulator and forks for each job.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import amx_emulator
import llvmlite.binding as llvm
import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(
    (sys.platform, os.uname().machine) != ("linux", "x86_64"), reason="for x86-64 Linux"
)

JOBS: dict[str, Callable[[], None]] = {}


def job(function: Callable[[], None]) -> Callable[[], None]:
    """Let the worker run a function: it fails by an exception."""
    JOBS[function.__name__] = function
    return function


# --- Code with AMX instructions -------------------------------------------------------------------

_engines: list[Any] = []  # own the code of the functions


def compile_ir(text: str) -> Any:
    """The MCJIT engine of a module, for a target with AMX."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten() + ",+amx-tile,+amx-bf16,+amx-int8",
        opt=2,
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine


def assemble(*bodies: str) -> list[Any]:
    """C functions `void f(void *, void *, void *)` with these AT&T assembly bodies, `ret` added."""
    text = "".join(
        f"define void @f{number}(ptr %0, ptr %1, ptr %2) naked {{\n"
        f'  call void asm sideeffect "{_escape(body)}\\0Aret", ""()\n  unreachable\n}}\n'
        for number, body in enumerate(bodies)
    )
    engine = compile_ir(text)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return [kind(engine.get_function_address(f"f{number}")) for number in range(len(bodies))]


def _escape(assembly: str) -> str:
    return assembly.strip().replace("$", "$$").replace("\n", "\\0A")


# Bits of the VEX prefix, the first two in its second byte, the others in its third.
R, B, W, L = 0x80, 0x20, 0x80, 0x04


def vex(opcode: int, *operand: int, pp: int, vvvv: int = 0, second: int = 0, third: int = 0) -> str:
    """Bytes of map 0F38; `second` and `third` are flipped in those bytes of the VEX prefix."""
    prefix = (0xC4, 0xE2 ^ second, ((~vvvv & 15) << 3 | pp) ^ third)
    return ".byte " + ", ".join(map(hex, (*prefix, opcode, *operand)))


def configuration(*shapes: tuple[int, int]) -> NDArray[np.uint8]:
    """The 64 bytes of LDTILECFG for tiles of (rows, bytes a row); the others are not used."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (rows, row_bytes) in enumerate(shapes):
        config[16 + 2 * tile] = row_bytes
        config[48 + tile] = rows
    return config


FULL = configuration(*[(16, 64)] * 8)


@functools.cache
def product(intrinsic: str) -> Any:
    """`f(config, a, a_stride, b, b_stride, c, c_stride, steps)`, strides in bytes.

    C, tile 0, is loaded, increased by the products of `steps` tiles A, side by side, and B, below
    one another, and stored.
    """
    engine = compile_ir(
        f"""
        declare void @llvm.x86.ldtilecfg(ptr)
        declare void @llvm.x86.tilerelease()
        declare void @llvm.x86.tileloadd64(i8, ptr, i64)
        declare void @llvm.x86.tileloaddt164(i8, ptr, i64)
        declare void @llvm.x86.tilestored64(i8, ptr, i64)
        declare void @llvm.x86.{intrinsic}(i8, i8, i8)

        define void @f(ptr %config, ptr %a, i64 %a_stride, ptr %b, i64 %b_stride,
                       ptr %c, i64 %c_stride, i64 %steps) {{
          call void @llvm.x86.ldtilecfg(ptr %config)
          call void @llvm.x86.tileloadd64(i8 0, ptr %c, i64 %c_stride)
          %b_step = mul i64 %b_stride, 16
          br label %loop
        loop:
          %k = phi i64 [0, %0], [%k_next, %loop]
          %b_offset = phi i64 [0, %0], [%b_next, %loop]
          %a_offset = mul i64 %k, 64
          %a_k = getelementptr i8, ptr %a, i64 %a_offset
          %b_k = getelementptr i8, ptr %b, i64 %b_offset
          call void @llvm.x86.tileloadd64(i8 5, ptr %a_k, i64 %a_stride)
          call void @llvm.x86.tileloaddt164(i8 7, ptr %b_k, i64 %b_stride)
          call void @llvm.x86.{intrinsic}(i8 0, i8 5, i8 7)
          %b_next = add i64 %b_offset, %b_step
          %k_next = add i64 %k, 1
          %more = icmp ult i64 %k_next, %steps
          br i1 %more, label %loop, label %done
        done:
          call void @llvm.x86.tilestored64(i8 0, ptr %c, i64 %c_stride)
          call void @llvm.x86.tilerelease()
          ret void
        }}"""
    )
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(
        None, pointer, pointer, integer, pointer, integer, pointer, integer, integer
    )
    return kind(engine.get_function_address("f"))


def multiply(
    intrinsic: str, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], steps: int = 1
) -> None:
    """C [M, N] += A [M, steps · K, n] · B [steps · K, N, n] for n elements in 4 bytes, in place.

    With more than one step, K has to be 16.
    """
    (m, k), columns = a.shape[:2], c.shape[1]
    tiles = [(0, 0)] * 8
    tiles[0], tiles[5], tiles[7] = (m, 4 * columns), (m, 4 * k // steps), (k // steps, 4 * columns)
    config = configuration(*tiles)
    arguments = itertools.chain.from_iterable((x.ctypes.data, x.strides[0]) for x in (a, b, c))
    product(intrinsic)(config.ctypes.data, *arguments, steps)


# --- The exact reference of TDPBF16PS -------------------------------------------------------------

SMALLEST = Fraction(2) ** -126  # normal fp32


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < SMALLEST else x


def rounded(x: Fraction) -> float:
    """The fp32 nearest to x ≠ 0, ties to even; 0 if, so rounded, x is too small for a normal."""
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    size = round(size / unit) * unit
    if size >= 2**128:
        return math.copysign(math.inf, x)
    return math.copysign(flushed(float(size)), x)


def fma(a: float, b: float, c: float) -> float:
    """a · b + c of fp32 values, as the SDM wants it: RNE, DAZ, FTZ."""
    a, b, c = flushed(a), flushed(b), flushed(c)
    if math.isfinite(a) and math.isfinite(b) and math.isfinite(c):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact:
            return rounded(exact)
    return a * b + c  # an infinity, a NaN or a zero with its sign: double arithmetic is right


def exact_product(
    a: NDArray[np.uint16], b: NDArray[np.uint16], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """C [M, N] + A [M, K, 2] · B [K, N, 2], in the order of the SDM."""
    left, right = (
        (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64).tolist() for x in (a, b)
    )
    result = np.empty_like(c)
    for m, n in np.ndindex(c.shape):
        even = odd = 0.0
        for k in range(b.shape[0]):
            even = fma(left[m][k][0], right[k][n][0], even)
            odd = fma(left[m][k][1], right[k][n][1], odd)
        result[m, n] = fma(1.0, float(c[m, n]), fma(1.0, even, odd))
    return result


def assert_same(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """The same bits, and NaNs in the same places."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(
        np.where(nan, 0, actual.view(np.uint32)), np.where(nan, 0, expected.view(np.uint32))
    )


# --- Operands of TDPBF16PS, as (bf16 bits, fp32 bits) of biased exponents -------------------------

Exponents = Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]
EXPONENTS: dict[str, Exponents] = {
    "close": lambda rng, shape: rng.integers(124, 131, shape),  # sums round and cancel
    "wide": lambda rng, shape: rng.integers(70, 185, shape),  # no sum overflows, few terms count
    "tiny": lambda rng, shape: rng.integers(58, 70, shape) * (rng.random(shape) < 0.8),  # flushes
    "huge": lambda rng, shape: rng.integers(185, 195, shape),  # overflows
    "any": lambda rng, shape: rng.integers(0, 256, shape),  # with infinities and NaNs
}


def operands(
    kind: str, m: int, k: int, n: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float32]]:
    """A [m, k, 2], B [k, n, 2] and C [m, n] of random signs and mantissas."""
    rng = np.random.default_rng(hash((m, k, n)) ^ len(kind))

    def bits(shape: tuple[int, ...], mantissa: int, bias: int) -> NDArray[Any]:
        sign = rng.integers(0, 2, shape) << 8
        exponent = np.clip(EXPONENTS[kind](rng, shape) + bias, 0, 255)
        return (sign | exponent) << mantissa | rng.integers(0, 1 << mantissa, shape)

    product_bias = {"tiny": -60, "huge": 60}.get(kind, 0)  # C is of the size of the products
    a, b = (bits(shape, 7, 0).astype(np.uint16) for shape in ((m, k, 2), (k, n, 2)))
    return a, b, bits((m, n), 23, product_bias).astype(np.uint32).view(np.float32)


def check_bf16(kind: str) -> None:
    for m, k, n in ((16, 16, 16), (1, 1, 1), (3, 5, 7), (16, 1, 16), (7, 16, 2), (2, 9, 16)):
        a, b, c = operands(kind, m, k, n)
        expected = exact_product(a, b, c)
        frame = np.full((m + 1, n + 3), 17, np.float32)  # rows are further apart than they are wide
        frame[:m, :n] = c
        multiply("tdpbf16ps", a, b, frame[:m, :n])
        assert_same(frame[:m, :n].copy(), expected)
        frame[:m, :n] = 17
        assert (frame == 17).all(), "stored outside of the tile"


JOBS |= {f"bf16_{kind}": functools.partial(check_bf16, kind) for kind in EXPONENTS}


def bf16(*values: float) -> NDArray[np.uint16]:
    """The bits of numbers that bf16 represents."""
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@job
def bf16_flushes_what_is_tiny_after_rounding() -> None:
    """2⁻¹²⁶ − 2⁻¹⁵¹ rounds to 2⁻¹²⁶ with 24 bits; 2⁻¹²⁶ − 2⁻¹⁵⁰ has 24 bits and is no normal."""
    for exponent, expected in ((-76, 2.0**-126), (-75, 0.0)):
        a = bf16(2.0**-63, 0, -(2.0**-75), 0).reshape(1, 2, 2)
        b = bf16(2.0**-63, 0, 2.0**exponent, 0).reshape(2, 1, 2)
        c = np.zeros((1, 1), np.float32)
        multiply("tdpbf16ps", a, b, c)
        assert c[0, 0] == expected, (exponent, c)


@job
def bf16_adds_the_sums_before_c() -> None:
    """(2²⁴ + 1) + −2²⁴ with 2²⁴ + 1 rounded: 0, whether 1 is in the odd sum or the next pair."""
    for values in ((2.0**24, 1, 0, 0), (2.0**24, 0, 1, 0)):
        c = np.full((1, 1), -(2.0**24), np.float32)
        multiply("tdpbf16ps", bf16(*values).reshape(1, 2, 2), bf16(1, 1, 1, 1).reshape(2, 1, 2), c)
        assert c[0, 0] == 0


# --- Products of bytes ----------------------------------------------------------------------------


def check_bytes(letters: str) -> None:
    rng = np.random.default_rng(ord(letters[0]) + 2 * ord(letters[1]))
    for m, k, n in ((16, 16, 16), (1, 1, 1), (3, 5, 7), (16, 2, 5)):
        a, b = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((m, k, 4), (k, n, 4)))
        a[0] = b[:, 0] = 0x80, 0x7F, 0xFF, 1
        c = rng.integers(-(2**31), 2**31, (m, n)).astype(np.int32)  # some sums wrap
        left, right = (
            x.view(np.int8 if letter == "s" else np.uint8).astype(np.int64)
            for x, letter in zip((a, b), letters, strict=True)
        )
        expected = c + np.einsum("mki,kni->mn", left, right)
        multiply(f"tdpb{letters}d", a, b, c)
        np.testing.assert_array_equal(c, expected.astype(np.int32))


JOBS |= {
    f"bytes_{letters}": functools.partial(check_bytes, letters)
    for letters in ("ss", "su", "us", "uu")
}


# --- Addresses ------------------------------------------------------------------------------------

REGISTERS = (
    *("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi"),
    *(f"r{number}" for number in range(8, 16)),
)
CALLEE_SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")


def with_registers(base: str, index: str | None, *instructions: str) -> str:
    """Instructions run with the first argument in `base`, the second in `index`.

    The last of them finds the third argument in rdx, 64 in rcx and the stack as it should be.
    """
    *tested, last = instructions
    return "\n".join(
        [
            *(f"pushq %{register}" for register in CALLEE_SAVED),
            *("movq %rsp, %xmm0", "movq %rdx, %xmm1", "movq %rdi, %xmm2", "movq %rsi, %xmm3"),
            f"movq %xmm2, %{base}",
            *([f"movq %xmm3, %{index}"] if index else []),
            *tested,
            *("movq %xmm0, %rsp", "movq %xmm1, %rdx", "movl $64, %ecx"),
            last,
            *(f"popq %{register}" for register in reversed(CALLEE_SAVED)),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Address:
    """displacement(base, index, scale), with the value of the index; 0 where there is none."""

    base: str
    index: str | None
    scale: int
    displacement: int
    value: int

    def __str__(self) -> str:
        tail = f", %{self.index}, {self.scale}" if self.index else ""
        return f"{self.displacement or ''}(%{self.base}{tail})"


def addresses_with_index() -> Iterator[Address]:
    """Every base with every index; scales, displacements of 0, 1 and 4 bytes and signs in turn."""
    scales, values = itertools.cycle([1, 2, 4, 8]), itertools.cycle([64, -24, 80, 8, -64])
    displacements = itertools.cycle([0, -64, 0x1234, 127, -128, -0x1000, 128])
    for base, index in itertools.product(REGISTERS, REGISTERS):
        if index not in (base, "rsp"):  # rsp cannot be one; the same register twice has its own job
            address = Address(base, index, next(scales), next(displacements), next(values))
            yield upward(address) if base == "rsp" else address


def addresses_without_index() -> Iterator[Address]:
    for base, displacement in itertools.product(REGISTERS, [0, -64, 127, 128, -0x1000]):
        address = Address(base, None, 1, displacement, 0)
        yield upward(address) if base == "rsp" else address


def upward(address: Address) -> Address:
    """The memory below rsp is lost to the signal frame: have nothing there."""
    return dataclasses.replace(
        address, displacement=abs(address.displacement), value=abs(address.value)
    )


MIDDLE = 1 << 15  # where the base points to in a buffer of twice that


def random_buffer() -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, 2 * MIDDLE).astype(np.uint8)


def rows_of(data: NDArray[np.uint8], offset: int, stride: int) -> NDArray[np.uint8]:
    """The 16 × 64 bytes of a full tile loaded from `data`."""
    return np.stack([data[offset + stride * row :][:64] for row in range(16)])


def configure(config: NDArray[np.uint8]) -> None:
    (load,) = assemble("ldtilecfg (%rdi)")
    load(config.ctypes.data, None, None)


@job
def tile_moves_address_all_registers() -> None:
    configure(FULL)
    cases = list(addresses_with_index())
    tiles = [number % 8 for number in range(len(cases))]
    loads = assemble(
        *(
            with_registers(
                case.base,
                case.index,
                f"tileload{'dt1' if tile % 3 == 0 else 'd'} {case}, %tmm{tile}",
                f"tilestored %tmm{tile}, (%rdx, %rcx)",
            )
            for case, tile in zip(cases, tiles, strict=True)
        )
    )
    stores = assemble(
        *(
            with_registers(case.base, case.index, f"tilestored %tmm{tile}, {case}", "nop")
            for case, tile in zip(cases, tiles, strict=True)
        )
    )
    original = random_buffer()
    for case, load, store in zip(cases, loads, stores, strict=True):
        data, loaded = original.copy(), np.zeros((16, 64), np.uint8)
        offset, stride = MIDDLE + case.displacement, case.value * case.scale
        load(data.ctypes.data + MIDDLE, case.value, loaded.ctypes.data)
        expected = rows_of(original, offset, stride)
        np.testing.assert_array_equal(loaded, expected, str(case))
        data[:] = 0
        store(data.ctypes.data + MIDDLE, case.value, None)
        stored = np.zeros_like(data)
        for row in range(16):
            stored[offset + stride * row :][:64] = expected[row]
        above = MIDDLE if case.base == "rsp" else 0  # below is the signal frame
        np.testing.assert_array_equal(data[above:], stored[above:], str(case))


@job
def tile_moves_address_in_rarer_ways() -> None:
    data = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT
    view = np.frombuffer(data, np.uint8)
    view[:] = random_buffer()
    configure(FULL)
    store = "movl $64, %ecx\ntilestored %tmm3, (%rdx, %rcx)"
    low_address = view.ctypes.data.to_bytes(4, "little")
    absolute, absolute_vex_b, no_index, same_register = assemble(
        f"tileloadd {view.ctypes.data}(, %rsi, 2), %tmm3\n{store}",
        # the same, but that VEX.B would make the base, which there is not, r13 instead of rbp
        vex(0x4B, 0x1C, 0x75, *low_address, pp=3, second=B) + f"\n{store}",
        # tileloadd 64(%rdi), %tmm3: an index of 4 is none, so that the stride is 0
        vex(0x4B, 0x5C, 0x27, 64, pp=3) + f"\n{store}",
        f"tileloadd -64(%rsi, %rsi), %tmm3\n{store}",
    )
    loaded = np.zeros((16, 64), np.uint8)
    for function in (absolute, absolute_vex_b):
        loaded[:] = 0
        function(None, 72, loaded.ctypes.data)
        np.testing.assert_array_equal(loaded, rows_of(view, 0, 144))
    no_index(view.ctypes.data, 72, loaded.ctypes.data)
    np.testing.assert_array_equal(loaded, rows_of(view, 64, 0))
    configure(configuration(*[(1, 64)] * 4))
    same_register(None, view.ctypes.data + 64, loaded.ctypes.data)  # one row: no stride in it
    np.testing.assert_array_equal(loaded[0], view[:64])


@job
def configurations_address_all_registers() -> None:
    cases = [*addresses_without_index(), *itertools.islice(addresses_with_index(), 0, None, 4)]
    functions = assemble(
        *(
            with_registers(
                case.base, case.index, f"ldtilecfg {case}", "sttilecfg (%rdx)\ntilerelease"
            )
            for case in cases
        ),
        *(
            with_registers(
                case.base, case.index, f"sttilecfg {case}", "ldtilecfg (%rdx)\ntilerelease"
            )
            for case in cases
        ),
    )
    config = configuration((16, 64), (3, 20), (0, 0), (1, 4))
    for case, load in zip(cases, functions[: len(cases)], strict=True):
        data, stored = random_buffer(), np.zeros(64, np.uint8)
        offset = MIDDLE + case.displacement + case.value * case.scale
        data[offset:][:64] = config
        load(data.ctypes.data + MIDDLE, case.value, stored.ctypes.data)
        np.testing.assert_array_equal(stored, config, str(case))
    for case, store in zip(cases, functions[len(cases) :], strict=True):
        configure(config)
        data, other = random_buffer(), FULL.copy()
        offset = MIDDLE + case.displacement + case.value * case.scale
        store(data.ctypes.data + MIDDLE, case.value, other.ctypes.data)
        np.testing.assert_array_equal(data[offset:][:64], config, str(case))


@job
def configuration_relative_to_rip() -> None:
    config = configuration((5, 12), (16, 64))
    (function,) = assemble(
        f"""
        ldtilecfg 1f(%rip)
        sttilecfg (%rdi)
        tilerelease
        ret
        1: .byte {", ".join(map(str, config))}"""
    )
    stored = np.zeros(64, np.uint8)
    function(stored.ctypes.data, None, None)
    np.testing.assert_array_equal(stored, config)


# --- Configurations -------------------------------------------------------------------------------


@job
def configuration_comes_and_goes() -> None:
    configure_and_read, release_and_read, clear = assemble(
        "ldtilecfg (%rdi)\nsttilecfg (%rsi)",
        "tilerelease\nsttilecfg (%rsi)",
        "tilezero %tmm2",
    )
    stored = np.ones(64, np.uint8)
    release_and_read(None, stored.ctypes.data, None)  # legal unconfigured
    assert not stored.any()
    config = configuration(
        (16, 64), (3, 20), (2, 6), (0, 0), (1, 4)
    )  # 6 bytes: no moves, but legal
    config[1] = 2
    configure_and_read(config.ctypes.data, stored.ctypes.data, None)
    np.testing.assert_array_equal(stored, config)
    clear(None, None, None)
    (read,) = assemble("sttilecfg (%rdi)")
    read(stored.ctypes.data, None, None)
    assert stored[1] == 0, "start_row"
    for initial in (np.zeros(64, np.uint8), np.eye(1, 64, 40, np.uint8) * 7):
        configure_and_read(config.ctypes.data, stored.ctypes.data, None)
        assert stored.any()
        configure_and_read(initial.ctypes.data, stored.ctypes.data, None)  # palette 0
        assert not stored.any()


@job
def tiles_are_zeroed_and_kept() -> None:
    """LDTILECFG zeroes all, TILEZERO one; rows above start_row are neither loaded nor stored."""
    load, clear, store = assemble(
        "movl $64, %ecx\ntileloadd (%rdi, %rcx), %tmm7\ntileloadd (%rdi, %rcx), %tmm1",
        "tilezero %tmm7",
        """
        movl $64, %ecx
        tilestored %tmm7, (%rdi, %rcx)
        tilestored %tmm1, (%rsi, %rcx)""",
    )
    source = random_buffer()[:1024].reshape(16, 64) | 1
    seven, one = np.zeros((2, 16, 64), np.uint8)

    def stored() -> tuple[bool, bool]:
        seven[:] = one[:] = 3
        store(seven.ctypes.data, one.ctypes.data, None)
        return bool(seven.any()), bool((one == source).all())

    configure(FULL)
    load(source.ctypes.data, None, None)
    assert stored() == (True, True)
    clear(None, None, None)
    assert stored() == (False, True)
    configure(FULL)
    assert stored() == (False, False)
    assert not one.any()
    late = FULL.copy()
    late[1] = 4
    configure(late)
    load(source.ctypes.data, None, None)
    assert stored() == (True, True)
    assert not seven[:4].any()
    np.testing.assert_array_equal(seven[4:], source[4:])
    configure(late)
    stored()
    assert (seven[:4] == 3).all()
    assert not seven[4:].any()


# --- What code around AMX may rely on -------------------------------------------------------------


@job
def registers_flags_and_red_zone_survive() -> None:
    """And MXCSR, set to round up and keep denormals, neither changes nor matters."""
    tested = [register for register in REGISTERS if register not in ("rdi", "rsp")]
    # Words of the block at rdi: general registers, red zone, vector registers, flags, MXCSR;
    # first as they are set, then, `half` further, as they are found.
    general, zone, vectors, flags, mxcsr, half = 0, 16, 32, 64, 65, 66
    moves = [
        *((f"%{name}", general + i, "movq") for i, name in enumerate(tested)),
        *((f"%xmm{i}", vectors + 2 * i, "movups") for i in range(16)),
    ]
    (function,) = assemble(
        "\n".join(
            [
                *(f"pushq %{name}" for name in CALLEE_SAVED),
                "stmxcsr -8(%rsp)\nmovl -8(%rsp), %eax\npushq %rax",
                f"ldmxcsr {8 * mxcsr}(%rdi)\npushq {8 * flags}(%rdi)\npopfq",
                *(
                    f"movq {8 * (zone + i)}(%rdi), %rax\nmovq %rax, {-8 - 8 * i}(%rsp)"
                    for i in range(16)
                ),
                *(f"{move} {8 * word}(%rdi), {name}" for name, word, move in moves),
                "tdpbf16ps %tmm7, %tmm5, %tmm0",
                *(f"{move} {name}, {8 * (half + word)}(%rdi)" for name, word, move in moves),
                *(
                    f"movq {-8 - 8 * i}(%rsp), %rax\nmovq %rax, {8 * (half + zone + i)}(%rdi)"
                    for i in range(16)
                ),
                f"pushfq\npopq {8 * (half + flags)}(%rdi)\nstmxcsr {8 * (half + mxcsr)}(%rdi)",
                "cld\nldmxcsr (%rsp)\npopq %rax",
                *(f"popq %{name}" for name in reversed(CALLEE_SAVED)),
            ]
        )
    )
    load, store = assemble(
        """
        movl $64, %ecx
        tileloadd (%rdi, %rcx), %tmm0
        tileloadd (%rsi, %rcx), %tmm5
        tileloadd (%rdx, %rcx), %tmm7""",
        "movl $64, %ecx\ntilestored %tmm0, (%rdi, %rcx)",
    )
    for kind in ("close", "tiny"):
        a, b, c = operands(kind, 16, 16, 16)
        block = np.random.default_rng(6).integers(0, 2**63, 2 * half).astype(np.uint64)
        block[mxcsr] = block[half + mxcsr] = 0x5F80
        block[flags] = 0xED7  # CF, PF, AF, ZF, SF, DF, OF; and IF and bit 1, which are always set
        configure(FULL)
        load(c.ctypes.data, a.ctypes.data, b.ctypes.data)
        function(block.ctypes.data, None, None)
        np.testing.assert_array_equal(block[half:][: len(tested)], block[: len(tested)])
        np.testing.assert_array_equal(block[half + zone : 2 * half], block[zone:half])
        expected = exact_product(a, b, c)
        store(c.ctypes.data, None, None)
        assert_same(c, expected)


def integer_operands(
    seed: int, m: int, k: int, n: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float32]]:
    """A, B and A · B of small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-8, 9, (m, k, 2)), rng.integers(-8, 9, (k, n, 2))
    return (
        bf16(*a.ravel()).reshape(a.shape),
        bf16(*b.ravel()).reshape(b.shape),
        np.einsum("mki,kni->mn", a, b).astype(np.float32),
    )


@job
def loops_accumulate() -> None:
    a, b, expected = integer_operands(1, 16, 16 * 20, 16)
    c = np.zeros((16, 16), np.float32)
    multiply("tdpbf16ps", a, b, c, steps=20)
    np.testing.assert_array_equal(c, expected)


@job
def threads_have_tiles_of_their_own() -> None:
    product("tdpbf16ps")
    start = threading.Barrier(2)

    def work(seed: int, m: int, n: int) -> None:
        a, b, expected = integer_operands(seed, m, 16 * 100, n)
        start.wait()
        for _ in range(20):
            c = np.zeros((m, n), np.float32)
            multiply("tdpbf16ps", a, b, c, steps=100)
            np.testing.assert_array_equal(c, expected)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, 1, 16, 16), pool.submit(work, 2, 9, 5)]:
            future.result()
    assert amx_emulator.live_configurations() == 0


@job
def counts_and_live_configurations() -> None:
    (release,) = assemble("tilerelease")

    def counted(**expected: int) -> None:
        assert {name: n for name, n in amx_emulator.counts().items() if n} == expected

    a, b, _ = integer_operands(3, 16, 16 * 3, 16)
    amx_emulator.reset_counts()
    multiply("tdpbf16ps", a, b, np.zeros((16, 16), np.float32), steps=3)
    counted(LDTILECFG=1, TILELOADD=4, TILELOADDT1=3, TDPBF16PS=3, TILESTORED=1, TILERELEASE=1)
    assert amx_emulator.live_configurations() == 0
    configure(FULL)
    configure(FULL)
    assert amx_emulator.live_configurations() == 1
    thread = threading.Thread(target=configure, args=[FULL])  # and dies with it loaded
    thread.start()
    thread.join()
    assert amx_emulator.live_configurations() == 2
    release(None, None, None)
    assert amx_emulator.live_configurations() == 1
    amx_emulator.reset_counts()
    counted()


ONLY_EMULATED = {"counts_and_live_configurations"}


# --- What ends the process ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Death:
    """Code that must not survive; rdi points to `ODD` with `patch` applied, rsi to memory."""

    code: str
    says: str = ""  # by the emulator; nothing if it has to take no interest
    signal: signal.Signals = signal.SIGILL
    configured: bool = True
    patch: dict[int, int] = dataclasses.field(default_factory=dict)

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        config, memory = ODD.copy(), np.zeros(1 << 16, np.uint8)
        config[[*self.patch]] = [*self.patch.values()]
        (function,) = assemble(
            "movl $64, %ecx\n" + ("ldtilecfg (%rdi)\n" if self.configured else "") + self.code
        )
        function(config.ctypes.data, memory.ctypes.data, None)


ODD = configuration((16, 64), (16, 64), (16, 64), (8, 64), (16, 32), (1, 6), (0, 0), (3, 16))
LOAD, STORE = "tileloadd (%rsi, %rcx), %tmm", "tilestored %tmm{}, (%rsi, %rcx)"
UNCONFIGURED = "no tile configuration"


def wrong_config(says: str, patch: dict[int, int]) -> Death:
    return Death("", says, signal.SIGSEGV, patch=patch)


DEATHS = {
    "ud2": Death("ud2"),
    "signal_from_outside": Death(  # kill(getpid(), SIGILL)
        "movl $39, %eax\nsyscall\nmovl %eax, %edi\nmovl $4, %esi\nmovl $62, %eax\nsyscall"
    ),
    "tilezero_unconfigured": Death("tilezero %tmm0", UNCONFIGURED, configured=False),
    "load_unconfigured": Death(LOAD + "0", UNCONFIGURED, configured=False),
    "store_unconfigured": Death(STORE.format(0), UNCONFIGURED, configured=False),
    "product_unconfigured": Death("tdpbf16ps %tmm2, %tmm1, %tmm0", UNCONFIGURED, configured=False),
    "product_released": Death("tilerelease\ntdpbf16ps %tmm2, %tmm1, %tmm0", UNCONFIGURED),
    "c_is_a": Death(vex(0x5C, 0xC0, pp=2, vvvv=2), "not distinct"),
    "c_is_b": Death(vex(0x5E, 0xC1, pp=3, vvvv=0), "not distinct"),
    "a_is_b": Death(vex(0x5C, 0xC1, pp=2, vvvv=1), "not distinct"),
    "c_and_a_differ": Death("tdpbf16ps %tmm2, %tmm3, %tmm0", "C.rows differs"),
    "c_and_b_differ": Death("tdpbuud %tmm4, %tmm1, %tmm0", "C.colsb differs"),
    "a_and_b_differ": Death("tdpbf16ps %tmm2, %tmm4, %tmm0", "A.colsb / 4 differs"),
    "product_of_odd_width": Death("tdpbf16ps %tmm2, %tmm1, %tmm5", "multiple of 4"),
    "product_of_no_rows": Death("tdpbf16ps %tmm6, %tmm1, %tmm0", "no rows"),
    "tilezero_of_no_rows": Death("tilezero %tmm6", "no rows"),
    "load_of_no_rows": Death(LOAD + "6", "no rows"),
    "load_of_odd_width": Death(LOAD + "5", "multiple of 4"),
    "store_of_odd_width": Death(STORE.format(5), "multiple of 4"),
    "load_from_row_3_of_3": Death(LOAD + "7", "start_row", patch={1: 3}),
    "store_from_row_3_of_3": Death(STORE.format(7), "start_row", patch={1: 3}),
    "tilezero_8": Death(vex(0x49, 0xC0, pp=3, second=R), "above 7"),
    "load_8": Death(vex(0x4B, 0x04, 0x0E, pp=3, second=R), "above 7"),
    "product_into_8": Death(vex(0x5C, 0xC1, pp=2, vvvv=2, second=R), "above 7"),
    "product_of_a_8": Death(vex(0x5C, 0xC1, pp=2, vvvv=2, second=B), "above 7"),
    "product_of_b_8": Death(vex(0x5C, 0xC1, pp=2, vvvv=8), "above 7"),
    "load_without_sib": Death(vex(0x4B, 0x06, pp=3)),
    "load_from_register": Death(vex(0x4B, 0xC4, pp=3)),
    "move_without_prefix": Death(vex(0x4B, 0x04, 0x0E, pp=0)),
    "product_with_memory": Death(vex(0x5C, 0x06, pp=2, vvvv=2)),
    "ldtilecfg_of_register": Death(vex(0x49, 0xC1, pp=0)),
    "ldtilecfg_with_reg": Death(vex(0x49, 0x0F, pp=0)),
    "sttilecfg_of_register": Death(vex(0x49, 0xC0, pp=1)),
    "tilezero_with_rm": Death(vex(0x49, 0xC1, pp=3)),
    "tilezero_with_vvvv": Death(vex(0x49, 0xC0, pp=3, vvvv=2)),
    "load_with_vvvv": Death(vex(0x4B, 0x04, 0x0E, pp=3, vvvv=1)),
    "tilezero_vex_256": Death(vex(0x49, 0xC0, pp=3, third=L)),
    "tilezero_vex_w1": Death(vex(0x49, 0xC0, pp=3, third=W)),
    "product_vex_w1": Death(vex(0x5C, 0xC1, pp=2, vvvv=2, third=W)),
    "palette_2": wrong_config("palette", {0: 2}),
    "reserved_byte_2": wrong_config("reserved", {2: 1}),
    "reserved_byte_15": wrong_config("reserved", {15: 1}),
    "reserved_byte_40": wrong_config("reserved", {40: 1}),
    "reserved_byte_63": wrong_config("reserved", {63: 0x80}),
    "17_rows": wrong_config("1 to 16 rows", {48: 17}),
    "68_bytes": wrong_config("1 to 64 bytes", {16: 68}),
    "320_bytes": wrong_config("1 to 64 bytes", {17: 1}),
    "rows_without_bytes": wrong_config("0 of 0", {16: 0}),
    "bytes_without_rows": wrong_config("0 of 0", {48: 0}),
    "load_from_nowhere": Death("tileloadd (%rdx, %rcx), %tmm0", signal=signal.SIGSEGV),
}


# --- The worker, and the tests that give it jobs --------------------------------------------------


def serve() -> None:
    """Run the jobs named on stdin, each in a child; a line of JSON for each tells how it ended."""
    if amx_emulator.needed():
        amx_emulator.install()
    else:
        from expertile.codegen import cpu

        cpu.request_amx_permission()
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                run_and_exit((JOBS | DEATHS)[line.strip()])
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([status, output.read().decode()]), flush=True)


def run_and_exit(function: Callable[[], None]) -> None:
    try:
        function()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class Worker:
    """The other end of `serve`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, name: str) -> tuple[int, str]:
        """(exit status, negative for a signal; output) of a job."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the worker ended with status {self.process.wait()}"
        status, output = json.loads(answer)
        return status, output


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.process.communicate()  # closes stdin, which ends it


@pytest.mark.parametrize("name", JOBS)
def test_job(worker: Worker, name: str) -> None:
    if name in ONLY_EMULATED and not amx_emulator.needed():
        pytest.skip("the processor has AMX: nothing is emulated")
    status, output = worker.run(name)
    assert status == 0, output


@pytest.mark.parametrize("name", DEATHS)
def test_death(worker: Worker, name: str) -> None:
    death = DEATHS[name]
    status, output = worker.run(name)
    assert status == -death.signal, output
    if amx_emulator.needed():
        assert death.says in output
        assert bool(output) == bool(death.says), output


def test_install_refuses_a_processor_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_emulator, "needed", lambda: False)
    with pytest.raises(RuntimeError, match="natively"):
        amx_emulator.install()


if __name__ == "__main__":
    serve()

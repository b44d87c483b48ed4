"""Vector units: each gives what NumPy gives, at the edges too; and the kit that tests formats with them."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from formats_kit import assert_same, expected_bits, rounded, units

from expertile.codegen import cpu
from expertile.codegen.compiler import Target, compile_ir
from expertile.codegen.ir import Builder, Module, Value, f32, i8, i16, i32, i64, ptr, vec
from expertile.codegen.vectors import PLAIN, Vectors, halves, host

_LANES = 32


@pytest.fixture(params=units())
def unit(request: pytest.FixtureRequest) -> Vectors:
    return units()[request.param]


def _run(body: Callable[..., Value], results: type, *operands: np.ndarray) -> np.ndarray:
    """`body(b, *vectors)` over 32 elements of each operand at a time."""
    module = Module("vectors")
    names = [f"x{i}" for i in range(len(operands))]
    parameters = dict.fromkeys((*names, "into"), ptr) | {"n": i64}
    with module.function("vectors", parameters) as (b, arg), b.loop(0, arg.n, _LANES) as i:
        loaded = []
        for name, operand in zip(names, operands, strict=True):
            type_ = {1: i8, 2: i16, 4: f32}[operand.itemsize]
            address = getattr(arg, name).at(i * operand.itemsize)
            loaded.append(address.load(vec(type_, _LANES)))
        arg.into.at(i * np.dtype(results).itemsize).store(body(b, *loaded))
    count = len(operands[0])
    assert count % _LANES == 0
    result = np.empty(count, results)
    address = compile_ir("vectors", str(module), Target.host()).address
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(operands) + 1), ctypes.c_int64)(address)
    run(*(x.ctypes.data for x in operands), result.ctypes.data, count)
    return result


def _pack(unit: Vectors, x: np.ndarray) -> np.ndarray:
    def body(b: Builder, both: Value) -> Value:
        low, high = (both.shuffle(range(first, first + 16)) for first in (0, 16))
        return unit.pack_bf16(b, low, high)

    return _run(body, np.uint16, np.ascontiguousarray(x))


def _decode_bytes(unit: Vectors, table: list[int], codes: np.ndarray) -> np.ndarray:
    return _run(lambda b, x: unit.decode_bytes(b, table, x), np.uint16, codes)


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_the_host_has_the_best_unit_it_can_run() -> None:
    has = cpu.host().has
    assert (host() is not PLAIN) == (has("avx512bw") and has("avx512bf16"))
    assert units()["plain"] is PLAIN


# Arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [False, True])
def test_a_number_in_all_lanes(unit: Vectors, spread: bool) -> None:
    """Whatever its bits: nothing is rounded."""
    bits = np.random.default_rng(9).integers(1 << 32, size=1 << 12, dtype=np.uint32)
    bits[:8] = 0, 1 << 31, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x00800000

    def body(b: Builder, x: Value) -> Value:
        memory, sums = b.buffer(4 * _LANES), b.zero(vec(i32, _LANES))
        memory.store(x)
        for lane in range(_LANES):
            place = memory.at(4 * lane)
            same = unit.spread(b, place.load(f32)) if spread else unit.broadcast(b, place)
            words = same.bitcast(vec(i32, 16))
            # Each lane of the result has seen all lanes of what should be the same.
            every = words.extract(0)
            for other in range(1, 16):
                every = every & words.extract(other)
            sums = sums.insert(lane, every)
        return sums

    got = _run(body, np.uint32, bits.view(np.float32))
    np.testing.assert_array_equal(got, bits)


def test_affine_reads_what_was_just_written(unit: Vectors) -> None:
    """Products of few bits, as the caller promises; then it makes no difference how often they are rounded."""
    rng = np.random.default_rng(0)
    x, f = (rng.integers(-(1 << 11), 1 << 11, 1 << 10).astype(np.float32) for _ in range(2))
    less = rng.standard_normal(1 << 10).astype(np.float32) * 1000

    def body(b: Builder, x: Value, f: Value, less: Value) -> Value:
        numbers, results = b.buffer(2 * 4 * _LANES), []
        numbers.store(f)
        numbers.at(4 * _LANES).store(less)
        for start in (0, 16):
            sums = b.zero(vec(f32, 16))
            for lane in range(16):
                place = numbers.at(4 * (start + lane))
                part = x.shuffle(range(start, start + 16))
                one = unit.affine(b, part, place, place.at(4 * _LANES)).extract(lane)
                sums = sums.insert(lane, one)
            results.append(sums)
        return results[0].shuffle(range(_LANES), results[1])

    assert_same(_run(body, np.float32, x, f, less), x * f - less)


# Rounding -------------------------------------------------------------------------------------------------------------

_TAILS = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
"""Low halves of fp32: exact, just above, around and at a tie, just below the next."""


def _every_upper_half() -> np.ndarray:
    """All signs, exponents and upper mantissas with each tail: denormals, ties, infinities, NaNs."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return (upper[:, None] | _TAILS).ravel().view(np.float32)


def test_pack_rounds_like_the_kit(unit: Vectors) -> None:
    x = _every_upper_half()
    assert_same(_floats(_pack(unit, x)), rounded(x))


def test_pack_keeps_the_order(unit: Vectors) -> None:
    x = np.arange(_LANES, dtype=np.float32)
    assert _floats(_pack(unit, x)).tolist() == list(range(_LANES))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),  # denormals
        (0x807FFFFF, 0x8000),  # one that would round up to the smallest normal number
        (0x00800000, 0x0080),
        (0x3F808000, 0x3F80),  # ties go to even
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80),  # too large
        (0xFF800000, 0xFF80),
    ],
)
def test_pack_at_the_edges(unit: Vectors, bits: int, expected: int) -> None:
    x = np.full(_LANES, bits, np.uint32).view(np.float32)
    assert set(_pack(unit, x).tolist()) == {expected}
    assert set(expected_bits(x).tolist()) == {expected}


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF, 0xFF80FFFF])
def test_pack_keeps_nan(unit: Vectors, bits: int) -> None:
    x = np.full(_LANES, bits, np.uint32).view(np.float32)
    assert np.isnan(_floats(_pack(unit, x))).all()


def test_the_kit_rounds_like_ml_dtypes() -> None:
    x = _every_upper_half()
    normal = ~((np.abs(x) < 2.0**-126) & (x != 0))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        oracle = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same(rounded(x)[normal], oracle[normal])
    assert_same(rounded(x)[~normal], np.copysign(np.float32(0), x[~normal]))


# Tables ---------------------------------------------------------------------------------------------------------------


def test_lookup_takes_the_index_modulo_32(unit: Vectors) -> None:
    rng = np.random.default_rng(1)
    index = rng.permutation(1 << 16).astype(np.uint16)
    tables = rng.integers(1 << 16, size=(len(index) // _LANES, _LANES), dtype=np.uint16)
    got = _run(lambda b, t, x: unit.lookup(b, t, x), np.uint16, tables.ravel(), index)
    rows = np.repeat(np.arange(len(tables)), _LANES)
    np.testing.assert_array_equal(got, tables[rows, index % _LANES])


def test_lookup_in_half_as_many_lanes(unit: Vectors) -> None:
    rng = np.random.default_rng(8)
    index = rng.permutation(1 << 16).astype(np.uint16)
    tables = rng.integers(1 << 16, size=(len(index) // 16, 16), dtype=np.uint16)

    def body(b: Builder, t: Value, x: Value) -> Value:
        parts = [[v.shuffle(range(first, first + 16)) for v in (t, x)] for first in (0, 16)]
        low, high = (unit.lookup(b, *part) for part in parts)
        return low.shuffle(range(_LANES), high)

    rows = np.arange(len(index)) // 16
    got = _run(body, np.uint16, tables.ravel(), index)
    np.testing.assert_array_equal(got, tables[rows, index % 16])


def _tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    half = rng.integers(1 << 15, size=128)
    signed = np.concatenate([half, half | 1 << 15])
    almost = signed.copy()
    almost[200] ^= 1
    negative_first = np.concatenate([half | 1 << 15, half])
    return {
        "arbitrary": rng.integers(1 << 16, size=256),
        "halves that differ in the sign": signed,
        "all but one": almost,
        "the negative half first": negative_first,
    }


@pytest.mark.parametrize("name", _tables())
def test_decode_bytes_looks_every_code_up(unit: Vectors, name: str) -> None:
    table = _tables()[name]
    rng = np.random.default_rng(3)
    codes = np.concatenate([np.arange(256), *(rng.permutation(256) for _ in range(15))])
    got = _decode_bytes(unit, table.tolist(), codes.astype(np.uint8))
    np.testing.assert_array_equal(got, table[codes])


def test_decode_signed_looks_up_in_memory(unit: Vectors) -> None:
    rng = np.random.default_rng(4)
    table = rng.integers(1 << 16, size=128)
    codes = np.concatenate([np.arange(256), *(rng.permutation(256) for _ in range(15))])

    def body(b: Builder, x: Value) -> Value:
        return unit.decode_signed(b, b.constant_bytes(halves(table.tolist())), x)

    got = _run(body, np.uint16, codes.astype(np.uint8))
    np.testing.assert_array_equal(got, table[codes & 127] ^ (codes & 128) << 8)


def test_lookup_halves_has_a_table_for_each_half(unit: Vectors) -> None:
    rng = np.random.default_rng(5)
    index = rng.permutation(1 << 16).astype(np.uint16)
    low, high = rng.integers(1 << 16, size=(2, len(index) // _LANES, 16), dtype=np.uint16)
    repeated = (np.tile(table, 2).ravel() for table in (low, high))
    got = _run(lambda b, x, y, i: unit.lookup_halves(b, x, y, i), np.uint16, *repeated, index)
    rows, lanes = np.arange(len(index)) // _LANES, np.arange(len(index)) % _LANES
    expected = np.where(lanes < 16, low[rows, index % 16], high[rows, index % 16])
    np.testing.assert_array_equal(got, expected)


def _twice(
    decode: Callable[[Builder, Value, Value], tuple[Value, Value]], codes: np.ndarray
) -> np.ndarray:
    """What becomes of codes beside others: first as the first of the two, then as the second."""
    others = np.random.default_rng(6).permutation(codes)
    return np.concatenate(
        [
            _run(lambda b, x, y: decode(b, x, y)[0], np.uint16, codes, others),
            _run(lambda b, x, y: decode(b, y, x)[1], np.uint16, codes, others),
        ]
    )


def test_decode_signed_twice_is_decode_signed(unit: Vectors) -> None:
    rng = np.random.default_rng(7)
    table = rng.integers(1 << 16, size=128)
    codes = np.concatenate([rng.permutation(256) for _ in range(16)]).astype(np.uint8)

    def decode(b: Builder, x: Value, y: Value) -> tuple[Value, Value]:
        address = b.constant_bytes(halves(table.tolist()))
        return unit.decode_signed_twice(b, address, x, y)

    expected = table[codes & 127] ^ (codes & 128).astype(int) << 8
    np.testing.assert_array_equal(_twice(decode, codes), np.tile(expected, 2))


def test_integers_twice_are_exact(unit: Vectors) -> None:
    rng = np.random.default_rng(8)
    codes = np.concatenate([rng.permutation(256) for _ in range(16)]).astype(np.uint8)
    got = _twice(lambda b, x, y: unit.integers_twice(b, x, y), codes)
    assert_same(_floats(got), np.tile(codes.view(np.int8), 2).astype(np.float32))


# The kit --------------------------------------------------------------------------------------------------------------

_OUT_OF_BOUNDS = """
import sys
import numpy as np
from formats_kit import decode, units
from expertile.templates.formats.int8 import Int8

class Beyond(Int8):
    def words(self, b, vectors, matrix, row, chunk):
        return super().words(b, vectors, matrix, row, chunk + int(sys.argv[1]))

decode(Beyond(), units()["plain"], np.zeros((3, 64), np.uint8), np.zeros((3, 4), np.uint8), None, 3, 64)
print("finished")
"""


@pytest.mark.parametrize(("shift", "survives"), [(0, True), (1, False), (-1, False)])
def test_the_kit_notices_reads_out_of_bounds(shift: int, survives: bool) -> None:
    program = textwrap.dedent(_OUT_OF_BOUNDS)
    command = [sys.executable, "-c", program, str(shift)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    if survives:
        assert done.stdout.strip() == "finished", done.stderr
    else:
        assert done.returncode == -signal.SIGSEGV, done.stderr

"""How formats are tested without an expert: a small kernel that writes every chunk of a matrix as bf16.

    got = decode(scheme, vectors, codes, scales, factor, rows, columns)
    assert_same(got, rounded(scheme.values(columns, codes, scales, factor)))

The tensors lie against pages that may not be touched, once behind them and once before, so that a read outside of them
ends the process rather than going unnoticed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import numpy as np

from expertile.codegen.compiler import Target, compile_ir
from expertile.codegen.ir import Module, f32, i64, ptr, vec
from expertile.codegen.layouts import CHUNK, GROUP
from expertile.codegen.vectors import PLAIN, Avx512, Vectors, host
from expertile.templates.formats import Quantized
from expertile.templates.formats.base import Matrix

_PAGE = mmap.PAGESIZE


@cache
def units() -> dict[str, Vectors]:
    """The vector units that this machine can run, by name: the plain one is always there."""
    found: dict[str, Vectors] = {"plain": PLAIN}
    if host() is not PLAIN:
        found |= {"words": Avx512(bytes_=False), "host": host()}
    return found


def decode(
    format_: Quantized,
    vectors: Vectors,
    codes: np.ndarray,
    scales: np.ndarray | None,
    factor: np.ndarray | None,
    rows: int,
    columns: int,
) -> np.ndarray:
    """What a kernel makes of a matrix: fp32 `[rows, columns]`, the bf16 words times `row_scale` if there is one.

    The parts are bytes, as `values` takes them, or arrays of any dtype.  A scheme without strides is laid out
    contiguously.  Fails if `words` and `decoder` differ.
    """
    laid_out = format_ if format_.row_bytes else format_.laid_out(columns)
    unit = laid_out.unit_of(columns // CHUNK)
    run = _kernel(laid_out, vectors, unit, rows % GROUP)
    results = []
    for at_end in (True, False):
        words, decoded = (np.full((rows, columns), gap, np.uint16) for gap in (0x1234, 0x4321))
        factors = np.empty(-(-rows // GROUP) * GROUP, np.float32)
        with ExitStack() as stack:
            parts = [stack.enter_context(_guarded(x, at_end)) for x in (codes, scales, factor)]
            into = [x.ctypes.data for x in (words, decoded, factors)]
            run(*parts, *into, rows, columns // CHUNK)
        assert_same(_floats(decoded), _floats(words))
        assert not factors[rows:].any(), "row_scale: the lanes of missing rows must be zero"
        with np.errstate(all="ignore"):
            results.append(_floats(words) * factors[:rows, None])
    assert_same(*results)
    return results[0]


def staged(
    format_: Quantized,
    vectors: Vectors,
    codes: np.ndarray,
    scales: np.ndarray | None,
    factor: np.ndarray | None,
    rows: int,
    first: int,
    end: int,
) -> np.ndarray:
    """What `stage` writes of k = first…end of up to 16 rows of a laid out matrix: fp32 `[16, end − first]`, unscaled.

    Fails if it writes anything else.
    """
    stride = 2 * (end - first) + 64
    run = _stage_kernel(format_, vectors, rows, first, end, stride)
    result = np.full((GROUP, stride // 2), 0x1234, np.uint16)
    with ExitStack() as stack:
        parts = [stack.enter_context(_guarded(x, True)) for x in (codes, scales, factor)]
        run(*parts, result.ctypes.data)
    assert (result[:, end - first :] == 0x1234).all(), "stage: it wrote behind the end of a row"
    return _floats(result[:, : end - first])


def expected_bits(values: np.ndarray) -> np.ndarray:
    """Numbers as bf16 bits (uint16), rounded as kernels round: to fp32, then to bf16 with denormals as zeros.

    NaN is 0x7fc0.
    """
    with np.errstate(all="ignore"):
        bits = np.asarray(values).astype(np.float32).view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded_ = (bits + (bits >> 16 & 1) + 0x7FFF) >> 16
    rounded_ = np.where(magnitude < 0x00800000, bits >> 16 & 0x8000, rounded_)
    return np.where(magnitude > 0x7F800000, 0x7FC0, rounded_).astype(np.uint16)


def rounded(values: np.ndarray) -> np.ndarray:
    """The same as fp32 numbers, to compare with :func:`decode`."""
    return _floats(expected_bits(values))


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit (zeros by their sign), except that any NaN is as good as another."""
    assert actual.shape == expected.shape
    actual, expected = (x.astype(np.float32) for x in (actual, expected))
    same = actual.view(np.uint32) == expected.view(np.uint32)
    wrong = np.argwhere(~(same | (np.isnan(actual) & np.isnan(expected))))
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {actual.size} differ, the first at {tuple(map(int, at))}: "
            f"expected {expected[at]!r}, got {actual[at]!r}"
        )


def kernel_ir(format_: Quantized, vectors: Vectors, unit: int, rest: int) -> str:
    """The kernel behind :func:`decode`, for a number of rows that leaves `rest` when divided by 16.

    unit: chunks that are decoded together.
    """
    module = Module("decode")
    pointers = dict.fromkeys(("codes", "scales", "factor", "words", "decoded", "factors"), ptr)
    with module.function("decode", pointers | {"rows": i64, "chunks": i64}) as (b, arg):
        matrix = Matrix(arg.codes, arg.scales, arg.factor)
        full = arg.rows - rest
        with b.loop(0, arg.rows, GROUP) as first:
            block = format_.rows(matrix, first)
            with b.loop(0, b.min(arg.rows - first, GROUP)) as row:
                offset = (first + row) * arg.chunks * (2 * CHUNK)
                with b.loop(0, arg.chunks) as chunk:
                    words = format_.words(b, vectors, block, row, chunk)
                    arg.words.at(offset + chunk * (2 * CHUNK)).store(words)
                with b.loop(0, arg.chunks, unit) as start:
                    [decode] = format_.decoders(b, vectors, block, [row], start)
                    with b.loop(start, start + unit, format_.step) as chunk:
                        for place, words in enumerate(decode(chunk)):
                            arg.decoded.at(offset + (chunk + place) * (2 * CHUNK)).store(words)
        for start, end, count in ((0, full, GROUP), (full, arg.rows, rest)):
            with b.loop(start, end, GROUP) as first:
                factors = format_.row_scale(b, format_.rows(matrix, first), count)
                if factors is None:
                    factors = b.const(
                        vec(f32, GROUP), [float(lane < count) for lane in range(GROUP)]
                    )
                arg.factors.at(first * 4).store(factors)
    return str(module)


@cache
def _kernel(format_: Quantized, vectors: Vectors, unit: int, rest: int) -> Callable[..., None]:
    compiled = compile_ir("decode", kernel_ir(format_, vectors, unit, rest), Target.host())
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 2)
    return prototype(compiled.address)


@cache
def _stage_kernel(
    format_: Quantized, vectors: Vectors, rows: int, first: int, end: int, stride: int
) -> Callable[..., None]:
    module = Module("stage")
    pointers = dict.fromkeys(("codes", "scales", "factor", "into"), ptr)
    with module.function("stage", pointers) as (b, arg):
        matrix = Matrix(arg.codes, arg.scales, arg.factor)
        format_.stage(b, vectors, [matrix], rows, first, end, [arg.into], stride)
    compiled = compile_ir("stage", str(module), Target.host())
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(compiled.address)


@contextmanager
def _guarded(part: np.ndarray | None, at_end: bool) -> Iterator[int]:
    """The address of a copy that ends before a page without access, or begins behind one.

    Without a part it is the address of a page without access.
    """
    data = b"" if part is None else np.ascontiguousarray(part).tobytes()
    room = -(-len(data) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, room + 2 * _PAGE)
    view = ctypes.c_char.from_buffer(memory)
    first = ctypes.addressof(view) + _PAGE
    start = first + (room - len(data) if at_end else 0)
    ctypes.memmove(start, data, len(data))
    for page in (first - _PAGE, first + room):
        _protect(page, 0)
    try:
        yield start
    finally:
        del view
        memory.close()


def _protect(page: int, access: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), access):
        raise OSError(ctypes.get_errno(), "mprotect")


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)

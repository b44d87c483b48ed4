"""Weights are read where they lie: any strides, in memory that is not ours on all sides, beyond 2³¹ elements.

As a program this file runs layers whose every argument begins right after, or ends right before, a page that must not
be touched: reading one byte too many ends the process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.codegen.ir import Module, Value, f32, i32, ptr, vec
from expertile.codegen.layouts import groups_of, round_to_bf16, transpose

TENSORS = ("x", "gate_up", "down", "ids", "router", "gate_up_bias", "down_bias")
ORDERS = tuple(itertools.product((False, True), repeat=2))


def case(hidden: int, intermediate: int, tokens: int = 3, **options: Any) -> oracle.Case:
    """One row count, all tokens on both experts: few kernels."""
    found = oracle.make_case(
        1,
        tokens=tokens,
        experts=2,
        top_k=2,
        hidden=hidden,
        intermediate=intermediate,
        nowhere=0,
        **{"bias": torch.float32} | options,
    )
    found.ids.copy_(torch.tensor([1, 0]))
    return found


# Views of weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interleaved", "transposed"), ORDERS)
def test_weights_among_nan(isa: str, interleaved: bool, transposed: bool) -> None:
    """Between rows, between experts, before and after: nothing of it reaches a result."""
    bias = torch.bfloat16 if transposed else torch.float32
    plain = case(49, 37, interleaved=interleaved, transposed=transposed, bias=bias)
    assert plain.gate_up_bias is not None
    assert plain.down_bias is not None
    actual = plain.run(
        gate_up=oracle.scattered(plain.gate_up, gaps=(5, 3), offset=3),
        down=oracle.scattered(plain.down, gaps=(1, 7), offset=1),
        gate_up_bias=oracle.scattered(plain.gate_up_bias, gaps=(3,), offset=1),
        down_bias=oracle.scattered(plain.down_bias, gaps=(9,), offset=5),
    )
    oracle.assert_same_bits(actual, plain.run())


def test_every_second_expert(isa: str) -> None:
    plain = case(33, 17, bias=None)
    gate_up, down = (weights.repeat_interleave(2, 0) for weights in (plain.gate_up, plain.down))
    gate_up[1::2], down[1::2] = float("nan"), float("nan")
    oracle.assert_same_bits(plain.run(gate_up=gate_up[::2], down=down[::2]), plain.run())


def test_gate_and_up_in_one_bank_with_down(isa: str) -> None:
    """Both matrices are slices of the same rows, as some checkpoints keep them."""
    plain = case(32, 32, bias=None)
    bank = torch.cat([plain.gate_up, plain.down], 1)
    oracle.assert_same_bits(plain.run(gate_up=bank[:, :64], down=bank[:, 64:]), plain.run())


@pytest.mark.parametrize(("interleaved", "transposed"), ORDERS)
def test_layouts_agree(isa: str, interleaved: bool, transposed: bool) -> None:
    """The same layer in another layout has the same bits."""
    plain = case(49, 37)
    assert plain.gate_up_bias is not None
    gate_up, gate_up_bias, down = plain.gate_up, plain.gate_up_bias, plain.down
    if interleaved:
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
        gate_up_bias = torch.stack(gate_up_bias.chunk(2, 1), 2).flatten(1, 2)
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    actual = plain.run(
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        interleaved=interleaved,
        transposed=transposed,
    )
    oracle.assert_same_bits(actual, plain.run())


def test_bank_beyond_2_31_elements() -> None:
    """Addresses are 64-bit. The memory is only reserved: two of the experts are ever touched."""
    hidden, intermediate, experts = 1024, 512, 4100
    small = oracle.make_case(
        2, tokens=3, experts=2, top_k=2, hidden=hidden, intermediate=intermediate, nowhere=0
    )
    gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    down = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16)
    assert min(gate_up.numel(), down.numel()) > 2**31
    for name, bank in (("gate_up", gate_up), ("down", down)):
        bank[1], bank[-1] = getattr(small, name)
    ids = torch.where(small.ids == 0, 1, experts - 1)
    oracle.assert_same_bits(small.run(gate_up=gate_up, down=down, ids=ids), small.run())


# Nothing outside the arguments is touched ---------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_no_byte_beside_an_argument_is_touched(isa: str) -> None:
    child = subprocess.run([sys.executable, __file__, isa], timeout=500, env=os.environ)
    assert child.returncode == 0, "a kernel read or wrote outside its arguments"


def guarded(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy between two pages that can't be accessed, right before the second one (or after the first)."""
    size = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    inside = -(-size // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for edge in (start, start + page + inside):
        if libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    first = page + inside - size if at_end else page
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=first)
    return copy.view(tensor.shape).copy_(tensor)


def check_guarded(plain: oracle.Case) -> None:
    """The same bits with every argument at the edge of its memory."""
    expected = plain.run()
    for at_end in (False, True):
        arguments = {name: getattr(plain, name) for name in TENSORS}
        edged = {
            name: guarded(each, at_end) for name, each in arguments.items() if each is not None
        }
        oracle.assert_same_bits(plain.run(**edged), expected)


def main(isa: str) -> None:
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    with oracle.running(isa):
        for (hidden, intermediate), (interleaved, transposed) in itertools.product(
            ((1, 1), (33, 17)), ORDERS
        ):
            check_guarded(
                case(
                    hidden,
                    intermediate,
                    interleaved=interleaved,
                    transposed=transposed,
                    bias=torch.bfloat16 if interleaved else torch.float32,
                    dtype=next(dtypes),
                )
            )
        check_guarded(case(64, 48))
        check_guarded(case(49, 37, tokens=17, dtype=torch.float32))


# In registers -------------------------------------------------------------------------------------------------------


def _run(name: str, emit: Callable[[Any, Any], None], *buffers: Tensor) -> None:
    """Compile a function of some pointers and call it once."""
    names = [f"p{i}" for i in range(len(buffers))]
    module = Module(name)
    with module.function(name, dict.fromkeys(names, ptr)) as (b, arg):
        emit(b, [getattr(arg, each) for each in names])
    compiled = compile_ir(name, str(module), isas.by_name("portable").target())
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(buffers))(compiled.address)
    function(*(buffer.data_ptr() for buffer in buffers))


def test_transpose() -> None:
    matrix = torch.arange(256, dtype=torch.int32).view(16, 16)
    result = torch.empty_like(matrix)

    def emit(b: Any, arg: list[Value]) -> None:
        rows = [arg[0].at(64 * row).load(vec(i32, 16)) for row in range(16)]
        for row, vector in enumerate(transpose(b, rows)):
            arg[1].at(64 * row).store(vector)

    _run("transpose", emit, matrix, result)
    assert torch.equal(result, matrix.T)


def test_rounding_to_bf16() -> None:
    """Every pair of neighbouring bf16 numbers: just under, at and just over the middle; denormals and NaN too."""
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    values = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )
    result = torch.empty(values.numel(), dtype=torch.int32)

    def emit(b: Any, arg: list[Value]) -> None:
        with b.loop(0, values.numel(), 16) as i:
            arg[1].at(i * 4).store(round_to_bf16(b, arg[0].at(i * 4).load(vec(f32, 16))))

    _run("round", emit, values, result)
    assert result.min() >= 0
    assert result.max() <= 0xFFFF
    rounded = result.to(torch.uint16).view(torch.bfloat16)
    oracle.assert_same_bits(rounded, values.bfloat16())


@pytest.mark.parametrize(
    ("tokens", "groups"), [(1, [1]), (16, [16]), (17, [16, 1]), (32, [16, 16])]
)
def test_groups(tokens: int, groups: list[int]) -> None:
    assert groups_of(tokens) == groups


if __name__ == "__main__":
    main(sys.argv[1])

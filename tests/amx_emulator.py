"""Intel AMX in software: lets x86-64 Linux machines without tiles run AMX code, for tests.

`install()` hooks SIGILL with a handler compiled by Numba that takes no lock, allocates nothing and
touches no Python object.  From then on every AMX instruction of any thread traps, is decoded at the
saved RIP, executed on tiles kept in memory, and stepped over.  That costs microseconds: enough to
test results, useless to test speed.

Emulated are LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
TDPBF16PS and TDPB{SS,SU,US,UU}D, after the Software Developer's Manual ("SDM"): vol. 1 ch. 18
(programming with AMX), vol. 2 §2.1.5 (ModR/M and SIB), §2.3 (VEX), §2.10 (AMX exception classes)
and the page of each instruction.  The emulator is as strict as the processor and says on stderr
what it objects to: what is #UD there ends the process with SIGILL, what is #GP there (a wrong
configuration) with SIGSEGV.  Any other cause of SIGILL ends the process as if no handler was there.

Left out: prefixes before VEX (segments, 67), and resuming a tile load after a page fault (reading
an unmapped address is simply SIGSEGV).  A child of fork() starts without tiles.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import signal
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic


class Instruction(IntEnum):
    """The AMX instructions that are emulated; the value is the index of its counter."""

    NONE = 0  # whatever else stands at RIP
    LDTILECFG = 1
    STTILECFG = 2
    TILERELEASE = 3
    TILEZERO = 4
    TILELOADD = 5
    TILELOADDT1 = 6
    TILESTORED = 7
    TDPBF16PS = 8  # from here on VEX.vvvv is an operand
    TDPBSSD = 9
    TDPBSUD = 10
    TDPBUSD = 11
    TDPBUUD = 12


class Fault(IntEnum):
    """Why an instruction is not executed."""

    NONE = 0
    NOT_AMX = 1
    UNCONFIGURED = 2
    NUMBER = 3
    INVALID = 4
    COLUMNS = 5
    START_ROW = 6
    DISTINCT = 7
    ROWS = 8
    WIDTH = 9
    DEPTH = 10
    THREADS = 11
    PALETTE = 12
    RESERVED = 13
    SHAPE = 14


_TEXTS = {
    Fault.UNCONFIGURED: "#UD, this thread has no tile configuration",
    Fault.NUMBER: "#UD, a tile number is above 7",
    Fault.INVALID: "#UD, a tile has no rows in the configuration",
    Fault.COLUMNS: "#UD, the row of a tile is not a multiple of 4 bytes",
    Fault.START_ROW: "#UD, start_row is not below the rows of the tile",
    Fault.DISTINCT: "#UD, the three tiles of a product are not distinct",
    Fault.ROWS: "#UD, C.rows differs from A.rows",
    Fault.WIDTH: "#UD, C.colsb differs from B.colsb",
    Fault.DEPTH: "#UD, A.colsb / 4 differs from B.rows",
    Fault.THREADS: "more than 256 threads hold a tile configuration",
    Fault.PALETTE: "#GP, the palette is neither 0 nor 1",
    Fault.RESERVED: "#GP, a reserved byte of the configuration is not zero",
    Fault.SHAPE: "#GP, a tile needs 1 to 16 rows of 1 to 64 bytes, or 0 of 0",
}
_MESSAGES = tuple(
    f"amx_emulator: {_TEXTS[fault]}\n".encode() if fault in _TEXTS else b"" for fault in Fault
)
_MESSAGE_LENGTHS = tuple(len(message) for message in _MESSAGES)
_SIGNALS = tuple(  # as Linux translates the exceptions
    int(signal.SIGSEGV if b"#GP" in message else signal.SIGILL) for message in _MESSAGES
)


# --- Memory shared with the handler ---------------------------------------------------------------

_THREADS = 256
_CONFIG_BYTES = 64  # palette, start_row, from byte 16 the 16-bit colsb, from byte 48 the rows
_TILE_BYTES = 16 * 64
_SUMS = _CONFIG_BYTES + 8 * _TILE_BYTES  # of one row of C, for each column the even and the odd sum
_STATE_BYTES = _SUMS + 16 * 2 * 4

_LAYOUT = np.dtype(
    [
        # A thread id, as long as that thread has a tile configuration loaded; else 0.
        ("owners", np.int64, _THREADS),
        ("states", np.uint8, (_THREADS, _STATE_BYTES)),
        ("counters", np.int64, len(Instruction)),
        ("messages", "S96", len(Fault)),
        ("mxcsr", np.uint32),
    ]
)
assert _LAYOUT.fields is not None
_OWNERS, _STATES, _COUNTERS, _MESSAGES_AT, _MXCSR = (
    int(field[1]) for field in _LAYOUT.fields.values()
)
_memory = np.zeros((), _LAYOUT)
_memory["messages"] = _MESSAGES
# FTZ, DAZ, all exceptions masked, round to nearest even: what TDPBF16PS computes with.
_memory["mxcsr"] = 0x9FC0
# The handler finds the memory by symbol: Numba caches its code, so no address may stand in there.
_SYMBOL = "amx_emulator_memory"
llvm.add_symbol(_SYMBOL, _memory.ctypes.data)

# `ucontext_t` of x86-64 Linux: gregs begin at byte 40, in the order of <sys/ucontext.h>.
_GREGS = 40
_RIP = 8 * 16
# Offset of rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 … r15 among them.
_GREG_OFFSETS = tuple(8 * i for i in (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7))

# The values of VEX.pp, and the instructions of opcodes 4B and 5E by them.
_NP, _66, _F3, _F2 = range(4)
_MOVES = (
    Instruction.NONE,
    Instruction.TILELOADDT1,
    Instruction.TILESTORED,
    Instruction.TILELOADD,
)
_BYTE_PRODUCTS = (
    Instruction.TDPBUUD,
    Instruction.TDPBUSD,
    Instruction.TDPBSUD,
    Instruction.TDPBSSD,
)


# --- Operations that Numba has no words for -------------------------------------------------------

_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_FALSE = ir.Constant(ir.IntType(1), 0)
_Emit = Callable[..., Any]


def _operation(signature: Any) -> Callable[[_Emit], Any]:
    """Make a function that emits LLVM IR a function of nopython code with that Numba signature."""

    def decorate(emit: _Emit) -> Any:
        def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            result = emit(builder, *arguments)
            return context.get_dummy_value() if result is None else result

        typings: tuple[Any, ...] = (  # Numba counts the parameters
            lambda typing: (signature, lower),
            lambda typing, a: (signature, lower),
            lambda typing, a, b: (signature, lower),
            lambda typing, a, b, c: (signature, lower),
        )
        return intrinsic(typings[len(signature.args)])

    return decorate


def _reader(bits: int, *, signed: bool) -> Any:
    """An operation that reads an unaligned integer at an address and widens it to int64."""

    @_operation(types.int64(types.int64))
    def read(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        value = b.load(b.inttoptr(address, ir.IntType(bits).as_pointer()), align=1)
        return b.sext(value, _I64) if signed else b.zext(value, _I64)

    return read


_u8 = _reader(8, signed=False)
_i8 = _reader(8, signed=True)
_u16 = _reader(16, signed=False)
_i32 = _reader(32, signed=True)
_i64 = _reader(64, signed=True)


@_operation(types.int64())
def _memory_at(b: ir.IRBuilder) -> ir.Value:
    """The address of `_memory`."""
    memory = b.module.globals.get(_SYMBOL) or ir.GlobalVariable(b.module, ir.IntType(8), _SYMBOL)
    return b.ptrtoint(memory, _I64)


@_operation(types.void(types.int64, types.int64))
def _store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    b.store(value, b.inttoptr(address, _I64.as_pointer()))


@_operation(types.voidptr(types.int64))
def _pointer(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, _POINTER)


@_operation(types.void(types.int64, types.int64, types.int64))
def _copy(b: ir.IRBuilder, to: ir.Value, source: ir.Value, size: ir.Value) -> None:
    memcpy = b.module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, _I64])
    b.call(memcpy, [b.inttoptr(to, _POINTER), b.inttoptr(source, _POINTER), size, _FALSE])


@_operation(types.void(types.int64, types.int64))
def _clear(b: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    memset = b.module.declare_intrinsic("llvm.memset", [_POINTER, _I64])
    b.call(memset, [b.inttoptr(address, _POINTER), ir.Constant(ir.IntType(8), 0), size, _FALSE])


@_operation(types.boolean(types.int64, types.int64, types.int64))
def _exchange(b: ir.IRBuilder, address: ir.Value, old: ir.Value, new: ir.Value) -> ir.Value:
    """Atomically put `new` where `old` stands; whether it stood there."""
    pointer = b.inttoptr(address, _I64.as_pointer())
    return b.extract_value(b.cmpxchg(pointer, old, new, "acq_rel", "acquire"), 1)


@_operation(types.void(types.int64))
def _increment(b: ir.IRBuilder, address: ir.Value) -> None:
    pointer = b.inttoptr(address, _I64.as_pointer())
    b.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "monotonic")


@_operation(types.void(types.int64))
def _load_mxcsr(b: ir.IRBuilder, address: ir.Value) -> None:
    # The memory clobber holds back every load, and so all arithmetic, which is on loaded values.
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    b.call(ir.InlineAsm(kind, "ldmxcsr ($0)", "r,~{memory}", side_effect=True), [address])


@_operation(types.float32(types.float32, types.float32, types.float32))
def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x · y + z, rounded once."""
    return b.fma(x, y, z)


@_operation(types.float32(types.uint16))
def _widen(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The fp32 of a bf16: the same bits, then 16 zeros."""
    word = b.zext(bits, ir.IntType(32))
    return b.bitcast(b.shl(word, ir.Constant(word.type, 16)), ir.FloatType())


def _libc(name: str, signature: Any) -> Any:
    """A function of libc for nopython code.  All those below are async-signal-safe."""
    return types.ExternalFunction(name, signature)


_gettid = _libc("gettid", types.int32())
_write = _libc("write", types.int64(types.int32, types.int64, types.int64))
_signal = _libc("signal", types.int64(types.int32, types.int64))
_raise = _libc("raise", types.int32(types.int32))


# --- Decoding -------------------------------------------------------------------------------------


@njit
def _register(gregs: int, number: int) -> int:
    return _i64(gregs + _GREG_OFFSETS[number])


@njit
def _operand(modrm: int, extend_x: int, extend_b: int, gregs: int) -> tuple[int, int, int]:
    """(base + displacement, scaled index, address after it) of the memory operand at `modrm`.

    `extend_x` and `extend_b` are 8 where VEX.X and VEX.B extend the index and the base, else 0.
    An index left out counts as 0, also as the stride of a tile load or store (SDM, TILELOADD).
    """
    mode, base = _u8(modrm) >> 6, _u8(modrm) & 7
    end = modrm + 1
    scaled = 0
    has_sib = base == 4
    if has_sib:
        sib = _u8(end)
        end += 1
        base = sib & 7
        index = sib >> 3 & 7 | extend_x
        if index != 4:  # rsp means none; r12, the same three bits, is an index like any other
            scaled = _register(gregs, index) << (sib >> 6)
    if mode == 0 and base == 5:  # in place of rbp and r13, which always have a displacement
        displacement = _i32(end)
        end += 4
        # Without SIB it is relative to the next instruction: AMX has no immediate after it.
        return (displacement if has_sib else end + displacement), scaled, end
    address = _register(gregs, base | extend_b)
    if mode == 1:
        return address + _i8(end), scaled, end + 1
    if mode == 2:
        return address + _i32(end), scaled, end + 4
    return address, scaled, end


@njit
def _identify(opcode: int, prefix: int, reg: int, rm: int, in_memory: bool) -> Instruction:
    """The instruction of map 0F38 with VEX.pp = `prefix` and these (extended) ModR/M fields."""
    instruction = Instruction.NONE
    if opcode == 0x49 and in_memory and reg == 0:
        if prefix == _NP:
            instruction = Instruction.LDTILECFG
        elif prefix == _66:
            instruction = Instruction.STTILECFG
    elif opcode == 0x49 and not in_memory and rm == 0:
        if prefix == _NP and reg == 0:
            instruction = Instruction.TILERELEASE
        elif prefix == _F2:
            instruction = Instruction.TILEZERO
    elif opcode == 0x4B and in_memory and rm & 7 == 4:  # SIB is mandatory
        instruction = _MOVES[prefix]
    elif opcode == 0x5C and not in_memory and prefix == _F3:
        instruction = Instruction.TDPBF16PS
    elif opcode == 0x5E and not in_memory:
        instruction = _BYTE_PRODUCTS[prefix]
    return instruction


@njit
def _decode(code: int, gregs: int) -> tuple[Instruction, int, int, int, int, int, int]:
    """(instruction, reg, rm, vvvv, base, index, end) at address `code`; the rest as `_operand`.

    All of AMX is VEX.128.0F38.W0, so none of it has the two-byte VEX prefix, which implies map 0F.
    """
    nothing = Instruction.NONE, 0, 0, 0, 0, 0, 0
    if _u8(code) != 0xC4:
        return nothing
    second, third = _u8(code + 1), _u8(code + 2)
    if second & 0x1F != 2 or third & 0x84 != 0:  # map; W and L
        return nothing
    extensions, vvvv = ~second, ~third >> 3 & 15  # stored inverted
    extend_r, extend_x, extend_b = extensions >> 4 & 8, extensions >> 3 & 8, extensions >> 2 & 8
    modrm = _u8(code + 4)
    reg, rm = modrm >> 3 & 7 | extend_r, modrm & 7 | extend_b
    in_memory = modrm < 0xC0
    instruction = _identify(_u8(code + 3), third & 3, reg, rm, in_memory)
    if instruction < Instruction.TDPBF16PS and vvvv != 0:
        return nothing
    base, index, end = 0, 0, code + 5
    if in_memory:
        base, index, end = _operand(code + 4, extend_x, extend_b, gregs)
    return instruction, reg, rm, vvvv, base, index, end


# --- Tile states ----------------------------------------------------------------------------------


@njit
def _state_of(thread: int) -> int:
    """Address of the configuration, tiles and sums of a thread; 0 if it is not configured."""
    for slot in range(_THREADS):
        if _i64(_memory_at() + _OWNERS + 8 * slot) == thread:
            return _memory_at() + _STATES + _STATE_BYTES * slot
    return 0


@njit
def _replace_owner(old: int, new: int) -> None:
    """Hand one slot of `old` over to `new`; 0 stands for nobody."""
    for slot in range(_THREADS):
        if _exchange(_memory_at() + _OWNERS + 8 * slot, old, new):
            return


@njit
def _rows(state: int, tile: int) -> int:
    return _u8(state + 48 + tile)


@njit
def _row_bytes(state: int, tile: int) -> int:
    return _u16(state + 16 + 2 * tile)


@njit
def _data(state: int, tile: int) -> int:
    """Address of 16 rows of 64 bytes."""
    return state + _CONFIG_BYTES + _TILE_BYTES * tile


# --- What each instruction objects to -------------------------------------------------------------


@njit
def _configuration_fault(config: int) -> Fault:
    """Of LDTILECFG, to the 64 bytes at address `config` with a palette that is not 0."""
    if _u8(config) != 1:
        return Fault.PALETTE
    for byte in range(2, 64):
        is_reserved = byte < 16 or 32 <= byte < 48 or byte >= 56
        if is_reserved and _u8(config + byte) != 0:
            return Fault.RESERVED
    for tile in range(8):
        rows, row_bytes = _rows(config, tile), _row_bytes(config, tile)
        if rows > 16 or row_bytes > 64 or (rows == 0) != (row_bytes == 0):
            return Fault.SHAPE
    return Fault.NONE


@njit
def _tile_fault(state: int, tile: int) -> Fault:
    """Of TILEZERO (class AMX-E5)."""
    if tile > 7:
        return Fault.NUMBER
    if _rows(state, tile) == 0:
        return Fault.INVALID
    return Fault.NONE


@njit
def _operand_fault(state: int, tile: int) -> Fault:
    """Of every instruction that reads or writes parts of a tile."""
    fault = _tile_fault(state, tile)
    if fault == Fault.NONE and _row_bytes(state, tile) % 4 != 0:
        fault = Fault.COLUMNS
    return fault


@njit
def _move_fault(state: int, tile: int) -> Fault:
    """Of TILELOADD, TILELOADDT1 and TILESTORED (class AMX-E3)."""
    fault = _operand_fault(state, tile)
    if fault == Fault.NONE and _u8(state + 1) >= _rows(state, tile):
        fault = Fault.START_ROW
    return fault


@njit
def _product_fault(state: int, c: int, a: int, b: int) -> Fault:
    """Of TDP* (class AMX-E4)."""
    if c in (a, b) or a == b:
        return Fault.DISTINCT
    for tile in (c, a, b):
        fault = _operand_fault(state, tile)
        if fault != Fault.NONE:
            return fault
    if _rows(state, c) != _rows(state, a):
        return Fault.ROWS
    if _row_bytes(state, c) != _row_bytes(state, b):
        return Fault.WIDTH
    if _row_bytes(state, a) != 4 * _rows(state, b):
        return Fault.DEPTH
    return Fault.NONE


# --- Execution ------------------------------------------------------------------------------------


@njit
def _load_configuration(thread: int, config: int) -> Fault:
    """LDTILECFG.  Palette 0 is the state of a thread that has not configured anything."""
    if _u8(config) == 0:
        _replace_owner(thread, 0)
        return Fault.NONE
    fault = _configuration_fault(config)
    if fault != Fault.NONE:
        return fault
    if _state_of(thread) == 0:
        _replace_owner(0, thread)
    state = _state_of(thread)
    if state == 0:
        return Fault.THREADS
    _copy(state, config, _CONFIG_BYTES)
    _clear(_data(state, 0), 8 * _TILE_BYTES)
    return Fault.NONE


@njit
def _store_configuration(state: int, to: int) -> None:
    """STTILECFG."""
    if state == 0:
        _clear(to, _CONFIG_BYTES)
    else:
        _copy(to, state, _CONFIG_BYTES)


@njit
def _load_tile(state: int, tile: int, memory: int, stride: int) -> None:
    """TILELOADD, from start_row on: 0, unless LDTILECFG was given another.

    The SDM zeroes what is outside of the shape.  It is zero: LDTILECFG, which alone changes the
    shape, has cleared all tiles, and no instruction writes there.
    """
    for row in range(_u8(state + 1), _rows(state, tile)):
        _copy(_data(state, tile) + 64 * row, memory + stride * row, _row_bytes(state, tile))


@njit
def _store_tile(state: int, tile: int, memory: int, stride: int) -> None:
    """TILESTORED."""
    for row in range(_u8(state + 1), _rows(state, tile)):
        _copy(memory + stride * row, _data(state, tile) + 64 * row, _row_bytes(state, tile))


@njit
def _multiply_bf16(state: int, c_tile: int, a_tile: int, b_tile: int) -> None:
    """TDPBF16PS, in the order of the SDM; it rounds and flushes as `_memory["mxcsr"]` says."""
    c = carray(_pointer(_data(state, c_tile)), (16, 16), np.float32)
    a = carray(_pointer(_data(state, a_tile)), (16, 16, 2), np.uint16)
    b = carray(_pointer(_data(state, b_tile)), (16, 16, 2), np.uint16)
    sums = carray(_pointer(state + _SUMS), (16, 2), np.float32)
    columns = _row_bytes(state, c_tile) // 4
    for m in range(_rows(state, a_tile)):
        for n in range(columns):
            sums[n, 0] = sums[n, 1] = 0
        for k in range(_rows(state, b_tile)):
            even, odd = _widen(a[m, k, 0]), _widen(a[m, k, 1])
            for n in range(columns):
                sums[n, 0] = _fma(even, _widen(b[k, n, 0]), sums[n, 0])
                sums[n, 1] = _fma(odd, _widen(b[k, n, 1]), sums[n, 1])
        for n in range(columns):
            c[m, n] += sums[n, 0] + sums[n, 1]


@njit
def _multiply_bytes(
    state: int, c_tile: int, a_tile: int, b_tile: int, signs: tuple[int, int]
) -> None:
    """TDPB*D, modulo 2³².  The signs are 128 where the bytes of A, of B are signed, else 0."""
    c = carray(_pointer(_data(state, c_tile)), (16, 16), np.int32)
    a = carray(_pointer(_data(state, a_tile)), (16, 16, 4), np.uint8)
    b = carray(_pointer(_data(state, b_tile)), (16, 16, 4), np.uint8)
    columns = _row_bytes(state, c_tile) // 4
    for m in range(_rows(state, a_tile)):
        for k in range(_rows(state, b_tile)):
            for n in range(columns):
                dot = 0
                for i in range(4):  # (u ^ 128) − 128 is the byte u read as a signed number
                    left = (a[m, k, i] ^ signs[0]) - signs[0]
                    right = (b[k, n, i] ^ signs[1]) - signs[1]
                    dot += left * right
                c[m, n] += np.int32(dot)


@njit
def _multiply(instruction: Instruction, state: int, c: int, a: int, b: int) -> None:
    if instruction == Instruction.TDPBF16PS:
        _multiply_bf16(state, c, a, b)
    elif instruction == Instruction.TDPBSSD:
        _multiply_bytes(state, c, a, b, (128, 128))
    elif instruction == Instruction.TDPBSUD:
        _multiply_bytes(state, c, a, b, (128, 0))
    elif instruction == Instruction.TDPBUSD:
        _multiply_bytes(state, c, a, b, (0, 128))
    else:
        _multiply_bytes(state, c, a, b, (0, 0))


@njit
def _run_on_tiles(
    instruction: Instruction, state: int, reg: int, rm: int, vvvv: int, memory: int, stride: int
) -> Fault:
    """Everything but the three instructions on the configuration; the thread is configured."""
    if instruction == Instruction.TILEZERO:
        fault = _tile_fault(state, reg)
    elif instruction >= Instruction.TDPBF16PS:
        fault = _product_fault(state, reg, rm, vvvv)
    else:
        fault = _move_fault(state, reg)
    if fault != Fault.NONE:
        return fault
    if instruction == Instruction.TILEZERO:
        _clear(_data(state, reg), _TILE_BYTES)
    elif instruction >= Instruction.TDPBF16PS:
        _multiply(instruction, state, reg, rm, vvvv)
    elif instruction == Instruction.TILESTORED:
        _store_tile(state, reg, memory, stride)
    else:
        _load_tile(state, reg, memory, stride)
    _clear(state + 1, 1)  # an instruction that completes leaves start_row = 0
    return Fault.NONE


@njit
def _execute(code: int, gregs: int) -> tuple[Fault, int]:
    """Run the instruction at address `code`: (fault, address of the next instruction)."""
    instruction, reg, rm, vvvv, base, index, end = _decode(code, gregs)
    if instruction == Instruction.NONE:
        return Fault.NOT_AMX, end
    _increment(_memory_at() + _COUNTERS + 8 * instruction)
    thread = _gettid()
    state = _state_of(thread)
    fault = Fault.NONE
    if instruction == Instruction.LDTILECFG:
        fault = _load_configuration(thread, base + index)
    elif instruction == Instruction.STTILECFG:
        _store_configuration(state, base + index)
    elif instruction == Instruction.TILERELEASE:
        _replace_owner(thread, 0)
    elif state == 0:
        fault = Fault.UNCONFIGURED
    else:
        fault = _run_on_tiles(instruction, state, reg, rm, vvvv, base, index)
    return fault, end


def _on_sigill(_number: int, _information: int, context: int) -> None:
    """The handler.  The kernel has spared the red zone and restores all registers, MXCSR too."""
    _load_mxcsr(_memory_at() + _MXCSR)
    gregs = context + _GREGS
    fault, following = _execute(_i64(gregs + _RIP), gregs)
    while fault == Fault.NONE:
        _store(gregs + _RIP, following)
        # The trap is most of the cost: run the AMX instructions that follow directly in the same.
        fault, following = _execute(following, gregs)
        if fault == Fault.NOT_AMX:
            return
    _write(2, _memory_at() + _MESSAGES_AT + 96 * fault, _MESSAGE_LENGTHS[fault.value])
    # SIGILL is blocked in its own handler: raised here, it ends the process on return.
    _signal(_SIGNALS[fault.value], 0)  # SIG_DFL
    _raise(_SIGNALS[fault.value])


# --- The door -------------------------------------------------------------------------------------


class _SigAction(ctypes.Structure):
    """`struct sigaction` of x86-64 Linux."""

    _fields_ = (
        ("sa_sigaction", ctypes.c_void_p),
        ("sa_mask", ctypes.c_ulong * 16),
        ("sa_flags", ctypes.c_int),
        ("sa_restorer", ctypes.c_void_p),
    )


_SA_SIGINFO = 4


@functools.cache
def _handler() -> Any:
    """The compiled handler, kept alive to the end of the process."""
    llvm.initialize_native_asmparser()  # for the inline assembly of `_load_mxcsr`
    return cfunc(types.void(types.int32, types.int64, types.int64), cache=True)(_on_sigill)


def needed() -> bool:
    """Whether AMX code can run here only through the emulator: the processor has no tiles."""
    return "amx_tile" not in Path("/proc/cpuinfo").read_text().split()


def install() -> None:
    """Emulate AMX in every thread of this process from now on.  May be called again.

    Raises RuntimeError where the emulator cannot work (not x86-64 Linux) or has nothing to do (a
    processor with AMX), and OSError if the system refuses the handler.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise RuntimeError(f"the AMX emulator needs x86-64 Linux, this is {platform.platform()}")
    if not needed():
        raise RuntimeError("this processor has AMX: run the code natively, without the emulator")
    # No SA_NODEFER: an illegal instruction in the handler must end the process.  No SA_ONSTACK: an
    # alternate stack is another handler's, sized for its needs.
    action = _SigAction(sa_sigaction=_handler().address, sa_flags=_SA_SIGINFO)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(signal.SIGILL, ctypes.byref(action), None) != 0:
        raise OSError(ctypes.get_errno(), "sigaction(SIGILL) failed")


def counts() -> dict[str, int]:
    """How often each instruction, by its name in the SDM, has run since `reset_counts()`."""
    counters = _memory["counters"]
    return {kind.name: int(counters[kind]) for kind in Instruction if kind != Instruction.NONE}


def reset_counts() -> None:
    """Set the counters to zero, while no thread runs AMX code."""
    _memory["counters"] = 0


def live_configurations() -> int:
    """How many threads have a tile configuration loaded: 0 once kernels have released theirs."""
    return int(np.count_nonzero(_memory["owners"]))

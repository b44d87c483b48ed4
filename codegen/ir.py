"""A structured builder for LLVM IR: values with operators, pointers, variables, loops, vectors.

Everything above this file writes kernels in terms of these classes; LLVM's own names (basic blocks, phis, GEPs) stay
in here.  A :class:`Module` holds one exported function and, if it needs them, private ones:

    module = Module("axpy")
    with module.function("axpy", {"n": i64, "a": f32, "x": ptr, "y": ptr}) as (b, arg):
        with b.loop(0, arg.n, 16) as i:
            address = arg.y.at(i * 4)
            address.store(b.fma(b.splat(arg.a, 16), arg.x.at(i * 4).load(vec(f32, 16)), address.load(vec(f32, 16))))

Pointers are opaque and count in **bytes**.  Vector loads and stores assume only the alignment of one element unless
told otherwise, because weights come from wherever a user put them.  Variables live in allocas, which LLVM's SROA pass
turns into registers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, Protocol

from llvmlite import ir as L
from llvmlite.ir.values import ArgumentAttributes


class _BFloat(L.Type):
    """bfloat16, which llvmlite.ir lacks; good for bitcasts and intrinsic operands, not for arithmetic."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


i1 = L.IntType(1)
i8 = L.IntType(8)
i16 = L.IntType(16)
i32 = L.IntType(32)
i64 = L.IntType(64)
f16 = L.HalfType()
f32 = L.FloatType()
bf16 = _BFloat()
ptr = L.PointerType()
void = L.VoidType()

Number = int | float

# Kernels call nothing: "no-builtins" keeps LLVM from turning a copy loop into a call of memcpy (a call inside a tile
# region clobbers the tiles).  The widths keep 512-bit vectors whole on CPUs for which LLVM would split them.
_FUNCTION_ATTRIBUTES = (
    "nounwind",
    '"no-builtins"',
    '"min-legal-vector-width"="512"',
    '"prefer-vector-width"="512"',
)


def vec(element: L.Type, lanes: int) -> L.VectorType:
    """The vector type of `lanes` elements."""
    return L.VectorType(element, lanes)


def element_bytes(type_: L.Type) -> int:
    """Bytes of a scalar or of one element of a vector."""
    scalar = getattr(type_, "element", type_) if isinstance(type_, L.VectorType) else type_
    if isinstance(scalar, L.IntType):
        return max(1, scalar.width // 8)
    return {"half": 2, "float": 4, "ptr": 8}[str(scalar)]


def _is_float(type_: L.Type) -> bool:
    scalar = type_.element if isinstance(type_, L.VectorType) else type_
    return isinstance(scalar, L.FloatType | L.HalfType)


def _constant(type_: L.Type, value: Number) -> L.Constant:
    if isinstance(type_, L.VectorType):
        return L.Constant(type_, [_constant(type_.element, value)] * type_.count)
    if isinstance(type_, L.FloatType):  # LLVM wants literals that are exact in the type
        return L.Constant(type_, struct.unpack("f", struct.pack("f", value))[0])
    return L.Constant(type_, value)


class Value:
    """An SSA value with Python's operators; plain numbers become constants of the other side's type.

    Integers are signed where it matters (`//`, `%`, `>>` on negative numbers are not used: `>>` is a logical shift).
    """

    __slots__ = ("b", "ir")

    def __init__(self, b: Builder, value: L.Value) -> None:
        self.b = b
        self.ir = value

    @property
    def type(self) -> L.Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        return int(self.type.count)

    def _binary(self, other: Any, on_ints: str, on_floats: str | None, swap: bool = False) -> Value:
        name = on_floats if _is_float(self.type) else on_ints
        if name is None:
            raise TypeError(f"no such operation on {self.type}")
        left, right = self.ir, self.b.raw(other, self.type)
        if swap:
            left, right = right, left
        return self.b.wrap(getattr(self.b.llvm, name)(left, right))

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "add", "fadd")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub", swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "sdiv", "fdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary(other, "sdiv", "fdiv", swap=True)

    def __floordiv__(self, other: Any) -> Value:
        return self._binary(other, "sdiv", None)

    def __mod__(self, other: Any) -> Value:
        return self._binary(other, "srem", None)

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_", None)

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_", None)

    def __xor__(self, other: Any) -> Value:
        return self._binary(other, "xor", None)

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", None)

    def __rshift__(self, other: Any) -> Value:
        return self._binary(other, "lshr", None)

    def shift_signed(self, bits: int) -> Value:
        """`>>` that copies the sign."""
        return self._binary(bits, "ashr", None)

    def __neg__(self) -> Value:
        return 0 - self if not _is_float(self.type) else self.b.wrap(self.b.llvm.fneg(self.ir))

    def _compare(self, sign: str, other: Any) -> Value:
        right = self.b.raw(other, self.type)
        llvm = self.b.llvm
        compare = llvm.fcmp_ordered if _is_float(self.type) else llvm.icmp_signed
        return self.b.wrap(compare(sign, self.ir, right))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Any) -> Value:
        return self._compare("==", other)

    def ne(self, other: Any) -> Value:
        return self._compare("!=", other)

    def is_nan(self) -> Value:
        return self.b.wrap(self.b.llvm.fcmp_unordered("uno", self.ir, self.ir))

    def bitcast(self, type_: L.Type) -> Value:
        return self.b.wrap(self.b.llvm.bitcast(self.ir, type_))

    def to(self, type_: L.Type) -> Value:
        """Convert the number: widen (signed), narrow, or change between integer and float."""
        b, source = self.b, self.type
        if source == type_:
            return self
        if _is_float(source) and _is_float(type_):
            widen = element_bytes(type_) > element_bytes(source)
            return b.wrap((b.llvm.fpext if widen else b.llvm.fptrunc)(self.ir, type_))
        if _is_float(source):
            return b.wrap(b.llvm.fptosi(self.ir, type_))
        if _is_float(type_):
            return b.wrap(b.llvm.sitofp(self.ir, type_))
        widen = _bits(type_) > _bits(source)
        return b.wrap((b.llvm.sext if widen else b.llvm.trunc)(self.ir, type_))

    def zext(self, type_: L.Type) -> Value:
        return self.b.wrap(self.b.llvm.zext(self.ir, type_))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Pick lanes of this vector (0…n-1) and of `other` (n…2n-1)."""
        second = other.ir if other is not None else L.Constant(self.type, L.Undefined)
        return self.b.wrap(self.b.llvm.shuffle_vector(self.ir, second, _lanes(*lanes)))

    def extract(self, lane: int) -> Value:
        return self.b.wrap(self.b.llvm.extract_element(self.ir, L.Constant(i32, lane)))

    def insert(self, lane: int, element: Value) -> Value:
        return self.b.wrap(self.b.llvm.insert_element(self.ir, element.ir, L.Constant(i32, lane)))

    # On pointers -----------------------------------------------------------------------------------------------

    def at(self, offset: Any) -> Value:
        """The address `offset` bytes further."""
        if isinstance(offset, int) and offset == 0:
            return self
        raw = self.b.raw(offset, i64)
        return self.b.wrap(self.b.llvm.gep(self.ir, [raw], source_etype=i8))

    def load(self, type_: L.Type, align: int | None = None) -> Value:
        self.b.reads(self, _bytes(type_))
        align = align or element_bytes(type_)
        return self.b.wrap(self.b.llvm.load(self.ir, typ=type_, align=align))

    def store(self, value: Value, align: int | None = None) -> None:
        self.b.llvm.store(value.ir, self.ir, align=align or element_bytes(value.type))

    def load_masked(self, type_: L.Type, lanes: Value | int) -> Value:
        """The first `lanes` elements (a number, or a mask of i1); the rest reads as zero and touches no memory."""
        mask = self.b.mask(lanes, type_.count)
        self.b.reads(self, element_bytes(type_), mask=mask)
        zero = L.Constant(type_, None)
        name = f"llvm.masked.load.{_mangle(type_)}.p0"
        align = L.Constant(i32, element_bytes(type_))
        return self.b.call(name, type_, [self.ir, align, mask.ir, zero])

    def store_masked(self, value: Value, lanes: Value | int) -> None:
        """Store the first `lanes` elements; the bytes behind them are not touched."""
        mask = self.b.mask(lanes, value.lanes)
        name = f"llvm.masked.store.{_mangle(value.type)}.p0"
        align = L.Constant(i32, element_bytes(value.type))
        self.b.call(name, void, [value.ir, self.ir, align, mask.ir])

    def prefetch(self, locality: int) -> None:
        """Ask for the cache line: locality 3 = all caches (t0), 2 = L2 and outwards (t1), 0 = non-temporal."""
        self.b.call(
            "llvm.prefetch.p0", void, [self.ir, *(L.Constant(i32, n) for n in (0, locality, 1))]
        )


class Var:
    """A variable: read it with `.get()`, change it with `.set(value)`."""

    __slots__ = ("b", "slot", "type")

    def __init__(self, b: Builder, type_: L.Type, slot: L.Value) -> None:
        self.b, self.type, self.slot = b, type_, slot

    def get(self) -> Value:
        return self.b.wrap(self.b.llvm.load(self.slot, typ=self.type))

    def set(self, value: Any) -> None:
        self.b.llvm.store(self.b.raw(value, self.type), self.slot)

    def add(self, value: Any) -> None:
        """Advance: by a number, or by bytes if the variable is a pointer."""
        now = self.get()
        self.set(now.at(value) if self.type == ptr else now + value)


class Tracer(Protocol):
    """Whoever wants to know what the code reads: see `codegen.tracing`."""

    def note(self, b: Builder, address: Value, size: Value, rows: int, stride: int) -> None:
        """Emit what takes note, where the code runs, of `rows` reads of `size` (i64) bytes, `stride` bytes apart."""


tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
"""Who is told of all reads in the code that is being written."""


class Builder:
    """Emits instructions into one function."""

    def __init__(self, module: L.Module, function: L.Function) -> None:
        self.module = module
        self.function = function
        self._tracer = tracer.get()
        self._entry = L.IRBuilder(function.append_basic_block("entry"))
        self.llvm = L.IRBuilder(function.append_basic_block("body"))
        self._body = self.llvm.block

    def finish(self) -> None:
        """Close the block of the variables; called once, by :meth:`Module.function`."""
        self._entry.branch(self._body)

    def wrap(self, value: L.Value) -> Value:
        return Value(self, value)

    def raw(self, value: Any, type_: L.Type) -> L.Value:
        return value.ir if isinstance(value, Value) else _constant(type_, value)

    def const(self, type_: L.Type, value: Any) -> Value:
        """A constant: a number (in every lane), or a list with one number a lane."""
        if isinstance(value, list | tuple):
            elements = [_constant(type_.element, each) for each in value]
            return self.wrap(L.Constant(type_, elements))
        return self.wrap(_constant(type_, value))

    def zero(self, type_: L.Type) -> Value:
        return self.wrap(L.Constant(type_, None))

    def var(self, type_: L.Type, initial: Any) -> Var:
        variable = Var(self, type_, self._entry.alloca(type_))
        variable.set(initial)
        return variable

    def buffer(self, size: int, align: int = 64) -> Value:
        """`size` bytes on the stack, for as long as the function runs."""
        slot = self._entry.alloca(L.ArrayType(i8, size))
        slot.align, slot.type = align, ptr
        return self.wrap(slot)

    def constant_bytes(self, data: bytes, align: int = 64) -> Value:
        """The address of a private constant; equal ones are the same."""
        name = f"constant_{sha256(data).hexdigest()[:16]}_{align}"
        glob = self.module.globals.get(name)
        if glob is None:
            glob = L.GlobalVariable(self.module, L.ArrayType(i8, len(data)), name)
            glob.initializer = L.Constant(glob.value_type, bytearray(data))
            glob.global_constant, glob.linkage, glob.align = True, "private", align
            glob.type = ptr
        return self.wrap(glob)

    def splat(self, scalar: Value, lanes: int) -> Value:
        type_ = vec(scalar.type, lanes)
        first = self.llvm.insert_element(
            L.Constant(type_, L.Undefined), scalar.ir, L.Constant(i32, 0)
        )
        return self.wrap(first).shuffle([0] * lanes)

    def mask(self, lanes: Value | int, count: int) -> Value:
        """A vector of i1: true in the first `lanes` lanes (a number known now or later), or the mask itself."""
        if isinstance(lanes, int):
            return self.const(vec(i1, count), [int(lane < lanes) for lane in range(count)])
        if isinstance(lanes.type, L.VectorType):
            return lanes
        index = self.const(vec(i32, count), list(range(count)))
        return index < self.splat(lanes.to(i32), count)

    # Reads -----------------------------------------------------------------------------------------------------

    def reads(
        self,
        address: Value,
        size: int,
        *,
        mask: Value | None = None,
        rows: int = 1,
        stride: int = 0,
    ) -> None:
        """Say that the next instruction reads memory. Loads say so themselves; a tile ISA must, of its own.

        `rows` times `size` bytes, `stride` bytes apart; or `size` bytes for each lane that is on in `mask`, which are
        the first ones.
        """
        told, self._tracer = self._tracer, None  # it reads itself
        if told is not None:
            count = self.const(i64, size)
            if mask is not None:
                bits = mask.bitcast(L.IntType(mask.lanes))
                count = self.unary("ctpop", bits).zext(i64) * size
            told.note(self, address, count, rows, stride)
        self._tracer = told

    # Calls -----------------------------------------------------------------------------------------------------

    def call(self, name: str, returns: L.Type, args: Sequence[Any]) -> Value:
        """Call an LLVM intrinsic (or another function of this module) by name."""
        raw = [arg.ir if isinstance(arg, Value) else arg for arg in args]
        callee = self.module.globals.get(name)
        if callee is None:
            callee = L.Function(
                self.module, L.FunctionType(returns, [arg.type for arg in raw]), name
            )
        return self.wrap(self.llvm.call(callee, raw))

    def load_by(self, instruction: str, type_: L.Type, address: Value) -> Value:
        """What an instruction of the machine makes of the memory at an address: as many bytes as an element has.

        For where LLVM knows several instructions that do the same, and chooses one that takes longer.
        """
        self.reads(address, element_bytes(type_))
        function = L.FunctionType(type_, [ptr])
        call = self.llvm.call(L.InlineAsm(function, f"{instruction} $1, $0", "=v,*m"), [address.ir])
        element = ArgumentAttributes()
        # llvmlite's own add() does not know them.
        set.add(element, f"elementtype({type_.element})")
        set.add(call.attributes, "memory(argmem: read)")
        call.arg_attributes[0] = element
        return self.wrap(call)

    def call_address(self, address: Value, returns: L.Type, args: Sequence[Value]) -> Value:
        """Call machine code at an address (i64 or ptr)."""
        target = address.ir
        if address.type == i64:
            target = self.llvm.inttoptr(target, ptr)
        type_ = L.FunctionType(returns, [arg.type for arg in args])
        return self.wrap(self.llvm.call(_Callee(target, type_), [arg.ir for arg in args]))

    def address_of(self, name: str) -> Value:
        """The address of another function of this module."""
        return self.wrap(self.module.globals[name])

    def to_ptr(self, address: Value) -> Value:
        return self.wrap(self.llvm.inttoptr(address.ir, ptr))

    def to_int(self, address: Value) -> Value:
        return self.wrap(self.llvm.ptrtoint(address.ir, i64))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c rounded once (needs a CPU with FMA: elsewhere LLVM would call libm, which is refused)."""
        return self.call(f"llvm.fma.{_mangle(c.type)}", c.type, [a, b, c])

    def fmuladd(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c, rounded once where the CPU does that as quickly, else twice."""
        return self.call(f"llvm.fmuladd.{_mangle(c.type)}", c.type, [a, b, c])

    def unary(self, name: str, x: Value) -> Value:
        """An intrinsic of one operand and the same type: fabs, rint, floor…"""
        return self.call(f"llvm.{name}.{_mangle(x.type)}", x.type, [x])

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        type_ = yes.type if isinstance(yes, Value) else no.type
        return self.wrap(self.llvm.select(condition.ir, self.raw(yes, type_), self.raw(no, type_)))

    def min(self, x: Value, y: Any) -> Value:
        """The smaller one; x if either is NaN (so that a NaN in x stays)."""
        other = self.wrap(self.raw(y, x.type))
        return self.select(other < x, other, x)

    def max(self, x: Value, y: Any) -> Value:
        """The larger one; x if either is NaN (so that a NaN in x stays)."""
        other = self.wrap(self.raw(y, x.type))
        return self.select(other > x, other, x)

    def atomic_add(self, address: Value, value: Any) -> Value:
        """Add to an i64 in memory that other threads add to; the old value."""
        return self.wrap(self.llvm.atomic_rmw("add", address.ir, self.raw(value, i64), "monotonic"))

    # Control ---------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """for i in range(start, stop, step), on i64; `start` and `stop` are numbers or values, step > 0."""
        first, last = self.raw(start, i64), self.raw(stop, i64)
        before = self.llvm.block
        head, body, end = (
            self.function.append_basic_block(name) for name in ("loop", "do", "done")
        )
        self.llvm.branch(head)
        self.llvm.position_at_end(head)
        index = self.llvm.phi(i64)
        index.add_incoming(first, before)
        self.llvm.cbranch(self.llvm.icmp_signed("<", index, last), body, end)
        self.llvm.position_at_end(body)
        yield self.wrap(index)
        following = self.llvm.add(index, self.raw(step, i64), flags=("nsw",))
        index.add_incoming(following, self.llvm.block)
        self.llvm.branch(head)
        self.llvm.position_at_end(end)

    @contextmanager
    def while_true(self) -> Iterator[_Breaker]:
        """Repeat until `.leave_if(condition)`."""
        body, end = (self.function.append_basic_block(name) for name in ("repeat", "left"))
        self.llvm.branch(body)
        self.llvm.position_at_end(body)
        yield _Breaker(self, end)
        self.llvm.branch(body)
        self.llvm.position_at_end(end)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        yes, end = (self.function.append_basic_block(name) for name in ("then", "endif"))
        self.llvm.cbranch(condition.ir, yes, end)
        self.llvm.position_at_end(yes)
        yield
        if not self.llvm.block.is_terminated:
            self.llvm.branch(end)
        self.llvm.position_at_end(end)

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """with b.if_else(c) as (yes, no):  with yes: …   with no: …"""
        with self.llvm.if_else(condition.ir) as branches:
            yield branches

    def ret(self, value: Any = None) -> None:
        if value is None:
            self.llvm.ret_void()
        else:
            self.llvm.ret(self.raw(value, self.function.ftype.return_type))


class _Breaker:
    def __init__(self, b: Builder, end: L.Block) -> None:
        self._b, self._end = b, end

    def leave_if(self, condition: Value) -> None:
        stay = self._b.function.append_basic_block("stay")
        self._b.llvm.cbranch(condition.ir, self._end, stay)
        self._b.llvm.position_at_end(stay)


class _Callee:
    """What llvmlite wants of a called value, for an opaque pointer: it can't tell the type from the pointer."""

    def __init__(self, target: L.Value, function_type: L.FunctionType) -> None:
        self.function_type = self.ftype = function_type
        self.type = ptr
        self._target = target

    def get_reference(self) -> str:
        return str(self._target.get_reference())


class Module:
    """One compilation unit: functions by name; `str()` of it is the IR.

    tuning: the processor whose scheduling model LLVM should use, if not that of the machine it compiles for.
    """

    def __init__(self, name: str, tuning: str | None = None) -> None:
        self.name = name
        self._attributes = [*_FUNCTION_ATTRIBUTES]
        if tuning is not None:
            self._attributes.append(f'"tune-cpu"="{tuning}"')
        self._module = L.Module(name)

    @contextmanager
    def function(
        self,
        name: str,
        parameters: Mapping[str, L.Type],
        returns: L.Type = void,
        private: bool = False,
        inline: bool = False,
    ) -> Iterator[tuple[Builder, SimpleNamespace]]:
        """Define a function; the body gets a builder and the arguments by name. A void one returns by itself."""
        function = L.Function(self._module, L.FunctionType(returns, parameters.values()), name)
        for attribute in self._attributes:
            set.add(
                function.attributes, attribute
            )  # llvmlite's own add() knows no string attributes
        if private:
            function.linkage = "private"
            set.add(function.attributes, "alwaysinline" if inline else "noinline")
        b = Builder(self._module, function)
        for argument, parameter in zip(function.args, parameters, strict=True):
            argument.name = parameter
        arguments = SimpleNamespace(**{arg.name: b.wrap(arg) for arg in function.args})
        yield b, arguments
        if not b.llvm.block.is_terminated:
            b.ret()
        b.finish()

    def __str__(self) -> str:
        return str(self._module)


def _bytes(type_: L.Type) -> int:
    """Of a scalar or of a whole vector."""
    lanes = type_.count if isinstance(type_, L.VectorType) else 1
    return int(lanes * element_bytes(type_))


@cache
def _lanes(*lanes: int) -> L.Constant:
    """The mask of a shuffle; making one takes longer than the rest of it."""
    return L.Constant(vec(i32, len(lanes)), [L.Constant(i32, lane) for lane in lanes])


def _bits(type_: L.Type) -> int:
    scalar = type_.element if isinstance(type_, L.VectorType) else type_
    return int(scalar.width)


def _mangle(type_: L.Type) -> str:
    """LLVM's suffix of an overloaded intrinsic."""
    if isinstance(type_, L.VectorType):
        return f"v{type_.count}{_mangle(type_.element)}"
    if isinstance(type_, L.IntType):
        return f"i{type_.width}"
    return {"half": "f16", "float": "f32"}[str(type_)]

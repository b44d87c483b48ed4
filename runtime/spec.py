"""What a layer is specialised on, and the kernels of a specialisation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from expertile.codegen import isa as isas
from expertile.codegen.isa import Variant
from expertile.codegen.isa.bytes import MOST_K
from expertile.runtime import choice, jit
from expertile.runtime.call import BUCKETS, table_slots
from expertile.runtime.errors import ArgumentError
from expertile.templates import formats, gates
from expertile.templates.activations import QuantizingGather, Requantize
from expertile.templates.expert import Down, GateUp
from expertile.templates.formats import Quantized
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.bf16 import RowMajor
from expertile.templates.formats.bf16_transposed import Transposed
from expertile.templates.formats.int8 import Int8
from expertile.templates.gates import Gate
from expertile.templates.kernel import ExpertKernel
from expertile.templates.tokens import Finish, Gather

DTYPES = ("bf16", "f16", "f32")
"""Of hidden states; an index here is the driver's `router_kind` too, with fp32 first there."""


@dataclass(frozen=True)
class ExpertSpec:
    """The expert feed-forward layer to specialise kernels for.

    hidden, intermediate: H and I, elements.  experts, top_k: E and k; kernels do not depend on them.
    weights: the weight format: "bf16", or a quantised one by its name (`expertile.formats()`) or as a scheme.
    down_weights: that of the down projection, if it is another one.
    activations: what products are made of: "bf16", or "int8" if all weights are int8 with a scale for each row.
    gate: a gate's name or a :class:`Gate`.
    gate_up_bias, down_bias: None, "bf16" or "f32".
    interleaved: gate and up rows (columns when transposed) alternate instead of [gate; up].
    transposed: gate/up is `[E, H, 2I]` and down `[E, I, H]`.

    Raises ArgumentError for sizes below 1, unknown names, sizes that a format can't have, and activations that can't be
    multiplied by such weights.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weights: str | Quantized = "bf16"
    gate: str | Gate = "silu"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    interleaved: bool = False
    transposed: bool = False
    down_weights: str | Quantized | None = None
    activations: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("gate_up_bias", "down_bias"):
            if getattr(self, name) not in (None, "bf16", "f32"):
                raise ArgumentError(
                    f'{name}: expected None, "bf16" or "f32", got {getattr(self, name)!r}'
                )
        try:
            gates.resolve(self.gate)
            self.formats()
        except (ValueError, TypeError) as error:
            raise ArgumentError(str(error)) from None
        if self.activations not in ("bf16", "int8"):
            raise ArgumentError(f'activations: expected "bf16" or "int8", got {self.activations!r}')
        if self.activations == "int8":
            self._check_bytes()

    def _check_bytes(self) -> None:
        """Raise unless all weights are what int8 activations can be multiplied by."""
        names = [format_.name for format_ in self.formats()]
        if any(name != Int8.name for name in names):
            raise ArgumentError(
                'activations: "int8" needs int8 weights with a scale for each row in gate_up and down '
                f'(ExpertWeights.from_int8), got {names[0]} and {names[1]}; use activations="bf16"'
            )
        for name in ("hidden", "intermediate"):
            if getattr(self, name) > MOST_K:
                raise ArgumentError(
                    f"{name}: expected at most {MOST_K} with int8 activations, whose sums are int32, got "
                    f"{getattr(self, name)}"
                )

    @property
    def projections(self) -> int:
        """Rows of gate/up for each of I: 2 with a gate half, else 1."""
        return 2 if gates.resolve(self.gate).gated else 1

    def resolved(self, name: str) -> Any:
        """A field, weights as schemes."""
        value = (
            self.weights
            if name == "down_weights" and self.down_weights is None
            else getattr(self, name)
        )
        return formats.resolve(value) if name.endswith("weights") and value != "bf16" else value

    def formats(self) -> tuple[WeightFormat, WeightFormat]:
        """The formats of contiguous gate/up and down weights, as their tensors lie."""
        down = self.weights if self.down_weights is None else self.down_weights
        columns = self.projections * self.intermediate
        return (
            self._format("weights", self.weights, columns, self.hidden),
            self._format("down_weights", down, self.hidden, self.intermediate),
        )

    def _format(self, name: str, weights: str | Quantized, rows: int, columns: int) -> WeightFormat:
        if weights == "bf16":
            return RowMajor(2 * (rows if self.transposed else columns))
        scheme = formats.resolve(weights)
        if columns % scheme.block:
            raise ArgumentError(
                f"{name}: {scheme.name} needs a multiple of {scheme.block} columns, got {columns}"
            )
        if self.transposed:
            raise ArgumentError(f"transposed: expected False with {scheme.name} weights")
        return scheme.laid_out(columns)


class LayerKernels:
    """The kernels of one layer shape, made as they are needed.

    An expert with more tokens than a block (32 or 64, by ISA) is computed in full blocks and a rest. So at most
    (31 or 63 rests + 4 kernels for full blocks) × 2 projections, 3 gathers, 3 finishes and one driver are ever compiled
    for a layer shape and weight layout. Weights whose rows are further apart than their length (views) have kernels of
    their own.

    stored: the formats of gate/up and down with the strides of the tensors.
    choose: puts a kernel into the variant to use; a tuner has its own.
    """

    # Everything is made here, nothing lazily: threads must never see two tables, nor a forked child the lock of a
    # cached property that another thread held.
    def __init__(
        self,
        spec: ExpertSpec,
        stored: tuple[WeightFormat, WeightFormat],
        isa: str,
        choose: Callable[[ExpertKernel], ExpertKernel] = choice.best,
    ) -> None:
        self.spec = spec
        self._choose = choose
        self.stored = stored
        self._bytes = spec.activations == "int8"
        self.isa = isas.for_bytes(isa) if self._bytes else isa
        self.gate = gates.resolve(spec.gate)
        self.rows_between = 2 if spec.interleaved and self.gate.gated else 1
        """Rows of memory from a row of gate or up to its next one."""
        machine = isas.by_name(self.isa)
        self.block_tokens = machine.block_tokens
        self.operand_bytes = tuple(map(machine.operand_bytes, (spec.hidden, spec.intermediate)))
        """Bytes of a token in the operands of gate/up and down."""
        self.requantize = 0
        """The address of the kernel that makes int8 of the hidden operand, if that is what down multiplies."""
        if self._bytes:
            self.requantize = jit.address(Requantize(self.isa, spec.intermediate))
        self.formats = self._kernel_formats()
        """The formats of gate/up and down as kernels see them: gate and up are matrices of their own."""
        self.gate_up_table = KernelTable(self.gate_up, self.block_tokens)
        self.down_table = KernelTable(self.down, self.block_tokens)
        self._ends: dict[str, tuple[int, int]] = {}
        both = self.gate_up(1), self.down(1)
        self.scratch_bytes = max(choice.most_scratch(choice.description(kernel)) for kernel in both)
        """Per-thread scratch the expert kernels need, whichever variants are chosen."""
        self.corner = choice.corner(self.isa)
        """Tokens from which on multiplying a row takes longer than fetching it."""
        self.row_unit = max(kernel.row_unit for kernel in both)
        """Rows are divided among threads in multiples of this."""
        self.row_spans = both[0].row_span, both[1].row_span
        """Bytes of codes from a row to the next, for what is fetched ahead."""

    @property
    def up_row(self) -> int:
        """The stored row (or column, when transposed) of gate/up where the up half begins."""
        if not self.gate.gated:
            return 0
        return 1 if self.spec.interleaved else self.spec.intermediate

    def _kernel_formats(self) -> tuple[WeightFormat, WeightFormat]:
        """The formats as kernels see them: gate and up are matrices of their own."""
        gate_up, down = self.stored
        if self.spec.transposed:
            return (
                Transposed(gate_up.row_bytes, outputs=64, interleaved=self.rows_between == 2),
                Transposed(down.row_bytes, outputs=128, interleaved=False),
            )
        if self._bytes:
            assert isinstance(gate_up, Int8)
            assert isinstance(down, Int8)
            gate_up, down = gate_up.in_place(), down.in_place()
        return gate_up.every(self.rows_between), down

    def gate_up(self, tokens: int, blocks: int = 1) -> ExpertKernel:
        """The spec of the gate/up kernel for `tokens` tokens, or for so many full blocks and more."""
        spec, format_ = self.spec, self.formats[0]
        sizes = self.isa, spec.hidden, spec.intermediate, tokens, blocks
        return self._choose(
            GateUp(*sizes, format_, spec.gate_up_bias, Variant(), self.gate, self.rows_between)
        )

    def down(self, tokens: int, blocks: int = 1) -> ExpertKernel:
        """The spec of the down kernel for `tokens` tokens, or for so many full blocks and more."""
        spec, format_ = self.spec, self.formats[1]
        sizes = self.isa, spec.intermediate, spec.hidden, tokens, blocks
        return self._choose(Down(*sizes, format_, spec.down_bias, Variant()))

    def ends(self, dtype: str) -> tuple[int, int]:
        """The addresses of the gather and of the finish for hidden states of a dtype."""
        found = self._ends.get(dtype)
        if found is None:
            kind = QuantizingGather if self._bytes else Gather
            gather, finish = kind(self.isa, self.spec.hidden, dtype), Finish(self.isa, dtype)
            found = self._ends[dtype] = jit.address(gather), jit.address(finish)
        return found

    def add_missing(self) -> None:
        """Compile the kernels that a call lacked."""
        for table in (self.gate_up_table, self.down_table):
            table.add_marked()

    def compile(self, rows: Iterable[int] | None) -> None:
        """Compile everything that experts with these numbers of tokens need, or with any number.

        Raises ArgumentError for numbers below 1.
        """
        add_all((self.gate_up_table, self.down_table), rows)
        for dtype in DTYPES:
            self.ends(dtype)
        jit.driver()


class KernelTable:
    """Addresses of the kernels compiled so far, as the driver reads them: see :func:`call.table_slots`."""

    def __init__(self, kernel: Callable[[int, int], ExpertKernel], block_tokens: int) -> None:
        self._kernel, self._block = kernel, block_tokens
        self._slots = table_slots(block_tokens)
        self._words = (ctypes.c_int64 * (2 * self._slots))()
        self.address = ctypes.addressof(self._words)

    def add(self, count: int) -> None:
        """Compile what an expert with `count` tokens needs."""
        full, rest = divmod(count, self._block)
        launches = {min(full - done, BUCKETS[-1]) for done in range(0, full, BUCKETS[-1])}
        for blocks in launches:
            self._put(self._block - 2 + sum(blocks >= least for least in BUCKETS))
        if rest:
            self._put(rest - 1)

    def add_all(self) -> None:
        """Compile what any expert needs."""
        for slot in range(self._slots):
            self._put(slot)

    def add_marked(self) -> None:
        """Compile the kernels that the driver found missing."""
        for slot in range(self._slots):
            if self._words[self._slots + slot]:
                self._put(slot)
                self._words[self._slots + slot] = 0

    def _put(self, slot: int) -> None:
        if self._words[slot]:
            return
        full = slot - (self._block - 1)
        sizes = (slot + 1, 1) if full < 0 else (self._block, BUCKETS[full])
        self._words[slot] = jit.address(self._kernel(*sizes))


def add_all(tables: Sequence[KernelTable], rows: Iterable[int] | None) -> None:
    """Compile what experts with these numbers of tokens need of some tables, or with any number.

    Raises ArgumentError for numbers below 1.
    """
    if rows is None:
        for table in tables:
            table.add_all()
    for count in () if rows is None else rows:
        if count < 1:
            raise ArgumentError(f"rows: expected numbers of tokens from 1, got {count}")
        for table in tables:
            table.add(count)


@cache
def kernels(spec: ExpertSpec, stored: tuple[WeightFormat, WeightFormat], isa: str) -> LayerKernels:
    """The kernels of a layer shape; the same object for the same arguments."""
    return LayerKernels(spec, stored, isa)


def contiguous(spec: ExpertSpec, isa: str | None = None) -> LayerKernels:
    """The kernels for contiguous weights, on this process's ISA unless another is named."""
    # As the checks say it of tensors, so that a call finds these kernels and no second ones.
    weights, down_weights = spec.resolved("weights"), spec.resolved("down_weights")
    gate = gates.resolve(spec.gate)
    as_called = replace(spec, gate=gate, weights=weights, down_weights=down_weights)
    return kernels(as_called, spec.formats(), isa or isas.select().name)

"""What kernels really read of weights that lie on several nodes: each byte once, by a thread of its node, and no other.

The nodes are logical ones. The addresses are those that instrumented kernels load from, whatever the schedule says.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import amx_emulator
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from subprocesses import check_output
from test_bit_exact import assert_tiles_released, emulate_amx
from torch import Tensor

import expertile
from expertile.codegen import isa as isas
from expertile.codegen.cache import ObjectCache
from expertile.codegen.compiler import compile_ir
from expertile.codegen.errors import CodegenError
from expertile.codegen.ir import Module, i8, i16, i32, i64, ptr, vec
from expertile.codegen.layouts import CHUNK
from expertile.codegen.tracing import Log, Unkept, recording
from expertile.runtime import jit, openmp
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.simulation import LogicalMachine, Reads, Stretch, declared, read
from expertile.runtime.parts import collect
from expertile.runtime.samples import random_weights
from expertile.runtime.weights import ExpertWeights
from expertile.templates import formats
from expertile.templates.formats.base import ByRows
from expertile.templates.formats.bf16 import RowMajor
from expertile.templates.formats.blocks import Blocks
from expertile.templates.tokens import Finish

PAGE, HUGE = 4096, 2 << 20
FORMATS = ("bf16", *expertile.formats())
PARALLEL_FROM = 1 << 16
"""Weights of a pass, times active experts, from which a call takes more than one thread."""

pytestmark = [
    pytest.mark.skipif(openmp.runtime() is None, reason="no OpenMP runtime here"),
    pytest.mark.filterwarnings("ignore:.*expert matrices lie on the memory nodes"),
]


# Notes of loads -------------------------------------------------------------------------------------------------------


Note = tuple[int, int, int, int]
"""Offset, bytes, rows, stride."""


def noted(body: Callable[[Any, Any], None], watch: tuple[int, int] = (0, 400)) -> list[Note]:
    """The notes of a function of 400 bytes of memory and the number 5, of loads from some of it."""
    log, module, memory = Log(100), Module("body"), np.zeros(400, np.uint8)
    with recording(log), module.function("body", {"memory": ptr, "number": i64}) as (b, arg):
        body(b, arg)
    target = isas.by_name("portable").target()
    compiled = compile_ir("body", str(module), target, store=Unkept())
    first = memory.ctypes.data
    log.watch(first + watch[0], first + watch[1])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(compiled.address)(first, 5)
    found = log.loads()
    assert len(set(found["thread"].tolist())) <= 1
    fields = (found[name].tolist() for name in ("bytes", "rows", "stride"))
    return list(zip((found["address"] - first).tolist(), *fields, strict=True))


def test_a_load_notes_its_bytes() -> None:
    def body(b: Any, arg: Any) -> None:
        arg.memory.load(i8)
        arg.memory.at(100).load(ptr)
        arg.memory.at(200).load(vec(i16, 3))
        arg.memory.at(arg.number * 3).load(vec(i32, 16))

    assert noted(body) == [(0, 1, 1, 0), (100, 8, 1, 0), (200, 6, 1, 0), (15, 64, 1, 0)]


def test_a_masked_load_notes_the_lanes_that_are_on() -> None:
    def body(b: Any, arg: Any) -> None:
        for place, lanes in enumerate((3, arg.number, arg.number + 20, b.mask(arg.number, 16), 0)):
            arg.memory.at(place * 32).load_masked(vec(i16, 16), lanes)

    sizes = {note[0]: note[1] for note in noted(body)}
    assert sizes.pop(128, 0) == 0
    assert sizes == {0: 6, 32: 10, 64: 32, 96: 10}


def test_what_is_executed_is_noted_and_stores_and_prefetches_are_not() -> None:
    def body(b: Any, arg: Any) -> None:
        with b.loop(0, arg.number) as i:
            arg.memory.at(i * 8).load(i64)
        with b.if_(arg.number > 5):
            arg.memory.load(i64)
        arg.memory.store(b.const(i64, 1))
        arg.memory.store_masked(b.zero(vec(i8, 16)), 3)
        arg.memory.prefetch(3)
        b.var(i64, 7).get()

    assert noted(body) == [(8 * i, 8, 1, 0) for i in range(5)]


def test_only_loads_that_touch_watched_addresses_are_noted() -> None:
    def body(b: Any, arg: Any) -> None:
        for offset in (0, 19, 20, 26, 39, 40, 60):
            arg.memory.at(offset).load(vec(i8, 8))

    assert [note[0] for note in noted(body, (27, 40))] == [20, 26, 39]


def test_too_many_loads_are_an_error() -> None:
    def body(b: Any, arg: Any) -> None:
        with b.loop(0, arg.number * 21):
            arg.memory.load(i64)

    with pytest.raises(CodegenError, match="at most 100 loads of watched addresses, got 105"):
        noted(body)


def test_kernels_with_notes_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From those without, from those of another log, and out of the cache of later processes."""
    kept: list[str] = []
    monkeypatch.setattr(ObjectCache, "put", lambda self, key, data: kept.append(key))
    monkeypatch.setattr(ObjectCache, "get", lambda self, key: None)
    monkeypatch.setattr(jit, "_addresses", {})
    spec, logs = Finish("portable", "f32"), (Log(1), Log(1))
    plain = jit.address(spec)
    before = len(kept)
    found = []
    for log in logs:
        with recording(log):
            found.append(jit.address(spec))
    assert len(kept) == before
    assert len({plain, *found}) == 3
    assert jit.address(spec) == plain
    with recording(logs[0]):
        assert jit.address(spec) == found[0]


# Logical machines -----------------------------------------------------------------------------------------------------


def test_a_machine_by_formula() -> None:
    rule, other = Interleaving(PAGE, (0, 1, 1)), Interleaving(PAGE, (2,))
    stretches = [Stretch(10 * PAGE, PAGE, None), Stretch(9 * PAGE, 3 * PAGE, other)]
    machine = LogicalMachine(declared([(0, 1), (2,), ()]), rule, stretches)
    nodes = machine.nodes(5 * PAGE - 1, 8 * PAGE + 2)
    assert nodes[[0, 1, PAGE, PAGE + 1, -1]].tolist() == [1, 1, 1, 0, 1]
    by_page = nodes[1:-1].reshape(-1, PAGE)
    assert (by_page == by_page[:, :1]).all()
    assert by_page[:, 0].tolist() == [1, 0, 1, 1, 2, -1, 2, 0]
    pages = [(0, 9), (8, 2), (9, 1), (10, 1), (9, 3), (11, 1), (12, 1)]
    ranges = [(first * PAGE, count * PAGE) for first, count in pages]
    assert machine.locate(ranges) == [rule, None, other, None, None, other, rule]
    groups = machine.groups(6)
    assert groups.thread_group == (0, 0, 0, 0, 1, 1)
    assert groups.owner == {0: 0, 1: 1, 2: 0} | {2: groups.owner[2]}


def test_an_even_machine() -> None:
    machine = LogicalMachine.even(3, HUGE)
    assert machine.topology.memory_nodes == (0, 1, 2)
    assert machine.interleaving == Interleaving(HUGE, (0, 1, 2))
    assert machine.groups(3).thread_group == (0, 1, 2)
    assert not machine.pins


# Weights at chosen addresses ------------------------------------------------------------------------------------------


class Arena:
    """Bytes 0xff, which are NaN to most, around a multiple of 2 MiB; tensors are put among them."""

    def __init__(self, size: int) -> None:
        self._memory = torch.full((2 * size + HUGE,), 255, dtype=torch.uint8)
        self.middle = -(-(self._memory.data_ptr() + size) // HUGE) * HUGE
        self.address, self.size = self.middle - size, 2 * size

    def put(self, tensor: Tensor, address: int, row_bytes: int, step: int) -> Tensor:
        """A copy of [E, N, …] at an address, with bytes from a row and from an expert to the next."""
        size, offset = tensor.element_size(), address - self._memory.data_ptr()
        assert self.address <= address
        assert address + len(tensor) * step <= self.address + self.size
        flat = self._memory[offset % size :]
        flat = flat[: len(flat) // size * size].view(tensor.dtype)
        strides = (step // size, row_bytes // size, *tensor.stride()[2:])
        where = flat.storage_offset() + offset // size
        return flat.as_strided(tensor.shape, strides, where).copy_(tensor)


@dataclass(frozen=True)
class Codes:
    """Where an expert's matrix has its codes."""

    expert: int
    address: int
    rows: int
    row_bytes: int
    code_bytes: int
    grain_bytes: int
    """What can't be read by two threads."""

    @property
    def size(self) -> int:
        """Bytes from the first to the last."""
        return (self.rows - 1) * self.row_bytes + self.code_bytes

    def mask(self) -> np.ndarray:
        """Which of these bytes are codes."""
        return np.arange(self.size) % self.row_bytes < self.code_bytes


@dataclass(frozen=True)
class Placing:
    """How weights are put into memory: bytes, multiples of the size of an element."""

    phase: int = 0
    """From a multiple of the page size to gate/up."""
    row_gap: int = 0
    expert_gap: int = 0
    """Between rows, and between experts."""
    tables: bool = False
    """Whether each expert has tensors of its own."""
    pair: bool = False
    """Whether gate and up are tensors of their own."""


@dataclass(frozen=True)
class Laid:
    """A layer's weights in an arena."""

    case: oracle.Case
    arena: Arena
    codes: list[Codes]

    def stretches(self, rules: Sequence[Interleaving | None]) -> list[Stretch]:
        """The matrices of each expert under a rule of its own; gate and up may alternate in one tensor."""
        found: list[Stretch] = []
        for expert, rule in enumerate(rules):
            own = sorted((c.address, c.size) for c in self.codes if c.expert == expert)
            first, end = own[0][0], 0
            for address, size in own:
                if end and address >= end:
                    found.append(Stretch(first, end - first, rule))
                    first = address
                end = max(end, address + size)
            found.append(Stretch(first, end - first, rule))
        return found


def lay_out(
    seed: int,
    weights: str = "bf16",
    *,
    hidden: int,
    intermediate: int,
    experts: int = 3,
    tokens: int = 1,
    top_k: int = 2,
    gate: str = "silu",
    bias: bool = False,
    interleaved: bool = False,
    placing: Placing = Placing(),
) -> Laid:
    """A layer whose last expert is never chosen, around the middle of an arena."""
    case = oracle.make_case(
        seed,
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        gate=gate,
        bias=torch.bfloat16 if bias else None,
        interleaved=interleaved,
        nowhere=0,
    )
    ids = torch.arange(tokens * top_k).view(tokens, top_k) % (experts - 1)
    case = replace(case, ids=ids)
    stored = [case.gate_up, case.down]
    if placing.pair:
        stored[:1] = case.gate_up.chunk(2, dim=1)
    values = [_in_format(weights, tensor, seed) for tensor in stored]
    strides = [_strides(value, placing) for value in values]
    sizes = [experts * step + PAGE + placing.phase for _, step in strides]
    arena = Arena(sum(sizes))
    address = arena.middle - sum(sizes) // 2 // PAGE * PAGE + placing.phase
    put: list[Any] = []
    codes: list[Codes] = []
    for value, (row_bytes, step), size in zip(values, strides, sizes, strict=True):
        put.append(_put(value, arena, address, row_bytes, step, placing.tables))
        halves = 2 if value is values[0] and gate != "relu2" and not placing.pair else 1
        for expert in range(experts):
            codes += _codes(value, expert, address + expert * step, row_bytes, halves, interleaved)
        address += size
    first = tuple(put[:-1]) if placing.pair else put[0]
    return Laid(replace(case, gate_up=first, down=put[-1]), arena, codes)


def _in_format(name: str, values: Tensor, seed: int) -> Tensor | ExpertWeights:
    """Weights of that shape: the values as bf16, or whatever is in a quantised format."""
    if name == "bf16":
        return values
    experts, rows, columns = values.shape
    return random_weights(formats.resolve(name), (experts, rows, columns), seed)


def _part(value: Tensor | ExpertWeights) -> Tensor:
    """The codes, [E, N, …]."""
    if isinstance(value, Tensor):
        return value
    [codes] = value.parts["codes"].tensors
    return codes


def _strides(value: Tensor | ExpertWeights, placing: Placing) -> tuple[int, int]:
    """Bytes from a row and from an expert to the next."""
    codes = _part(value)
    row_bytes = codes[0, 0].nbytes + placing.row_gap
    return row_bytes, codes.shape[1] * row_bytes + placing.expert_gap


def _put(
    value: Tensor | ExpertWeights,
    arena: Arena,
    address: int,
    row_bytes: int,
    step: int,
    tables: bool,
) -> Tensor | ExpertWeights:
    """The same weights with their codes in the arena."""
    codes = arena.put(_part(value), address, row_bytes, step)
    given = list(codes) if tables else codes
    if isinstance(value, Tensor):
        return ExpertWeights.from_bf16(given) if tables else codes
    parts = value.parts | {"codes": collect("codes", given, [str(codes.dtype)[6:]])}
    return ExpertWeights(replace(value.scheme, row_bytes=row_bytes), value.shape, parts)


def _codes(
    value: Tensor | ExpertWeights,
    expert: int,
    address: int,
    row_bytes: int,
    halves: int,
    interleaved: bool,
) -> Iterator[Codes]:
    """An expert's matrices: gate and up, or a single one."""
    rows, columns = value.shape[1:]
    scheme = value.scheme if isinstance(value, ExpertWeights) else RowMajor(0)
    assert isinstance(scheme, ByRows)
    sizes = scheme.code_bytes(columns), scheme.code_bytes(scheme.grain * CHUNK)
    apart, begin = (halves, row_bytes) if interleaved else (1, rows // halves * row_bytes)
    for half in range(halves):
        first = address + half * begin
        yield Codes(expert, first, rows // halves, apart * row_bytes, *sizes)


# What is read ---------------------------------------------------------------------------------------------------------


def run(laid: Laid, machine: LogicalMachine, threads: int) -> tuple[Tensor, Reads]:
    """The layer on a machine, and what it read; the result is right."""
    case = laid.case
    with oracle.threads(threads):
        y, reads = read(machine, case.weights, case.x, case.ids, case.router)
    oracle.check(case, y)
    return y, reads


def check_reads(laid: Laid, reads: Reads) -> None:
    """All codes of active experts, each byte by one thread, and nothing else; by threads of their nodes."""
    arena, active = laid.arena, set(laid.case.ids.flatten().tolist())
    wanted = np.zeros(arena.size, bool)
    for codes in laid.codes:
        if codes.expert in active:
            first = codes.address - arena.address
            wanted[first : first + codes.size] |= codes.mask()
    readers = np.zeros(arena.size, np.int8)
    total = np.zeros(arena.size, np.int32)
    for thread in range(len(reads.groups.thread_group)):
        counts = reads.counts(arena.address, arena.size, [thread])
        readers += counts > 0
        total += counts
    assert not total[~wanted].any(), "bytes that are nobody's, or another expert's"
    assert (readers[wanted] == 1).all(), "bytes of codes that no thread reads, or several"
    if len(laid.case.x) == 1:
        most = total[wanted].max()
        assert most == 1 or (most <= 2 and _have_headers(laid)), f"a byte is read {most} times"
    if len(active) * laid.case.x.shape[1] * _intermediate(laid) < PARALLEL_FROM:
        return  # one thread does it all
    for codes in laid.codes:
        if codes.expert in active:
            check_local(codes, reads)


def _have_headers(laid: Laid) -> bool:
    """Whether codes have bytes among them that all chunks of a block need."""
    down = laid.case.down
    return isinstance(down, ExpertWeights) and isinstance(down.scheme, Blocks)


def _intermediate(laid: Laid) -> int:
    return int(laid.case.down.shape[2])


def check_local(codes: Codes, reads: Reads) -> None:
    """No remote byte where rows begin with a line; else less than a grain where the pages of two groups meet."""
    mask, nodes = codes.mask(), reads.machine.nodes(codes.address, codes.size)
    owner = np.full(nodes.max(initial=-1) + 2, -1)
    for node, group in reads.groups.owner.items():
        owner[node : node + 1] = group
    own = owner[nodes]
    remote = np.zeros(codes.size, bool)
    for group in range(len(reads.groups.cpus)):
        counts = reads.group_counts(codes.address, codes.size, group)
        remote |= (counts > 0) & mask & (own != group)
    if reads.machine.locate([(codes.address, codes.size)]) == [None]:
        return
    aligned = not (codes.address % 64 or codes.row_bytes % 64 or 64 % codes.grain_bytes)
    if aligned:
        assert not remote.any(), f"{remote.sum()} bytes are read from other nodes"
    for row in range(codes.rows):
        inside = slice(row * codes.row_bytes, row * codes.row_bytes + codes.code_bytes)
        meetings = np.count_nonzero(np.diff(own[inside]))
        assert remote[inside].sum() <= meetings * codes.grain_bytes // 2


# Any layer on any machine ---------------------------------------------------------------------------------------------

SIZES = (32, 64, 200, 256, 320, 512, 768, 1024, 1408, 2048, 2880, 4096, 5120, 7168, 14336, 16384)
MOST = 1 << 18
"""Weights of a matrix, if its format can be so small."""


@st.composite
def machines(draw: st.DrawFn) -> LogicalMachine:
    """1 to 8 nodes, any of them of memory only but the first, and pages in any pattern."""
    count = draw(st.integers(1, 8))
    cpus = [(cpu,) if draw(st.integers(0, 5)) or not cpu else () for cpu in range(count)]
    in_turn = st.permutations(range(count))
    weighted = st.lists(st.sampled_from(range(count)), min_size=1, max_size=2 * count)
    pattern = draw(st.one_of(in_turn, weighted))
    page_bytes = draw(st.sampled_from((PAGE, PAGE, 16 * PAGE, HUGE)))
    return LogicalMachine(declared(cpus), Interleaving(page_bytes, tuple(pattern)))


@st.composite
def layers(draw: st.DrawFn) -> Laid:
    """Any format, sizes and place."""
    weights = draw(st.sampled_from(FORMATS))
    scheme = None if weights == "bf16" else formats.resolve(weights)
    unit = max(scheme.block, scheme.shared_rows) if scheme else 1
    sizes = [k for k in SIZES if k % unit == 0]
    most = max(MOST, 16 * sizes[0] ** 2)
    hidden = draw(st.sampled_from([k for k in sizes if k * sizes[0] <= most]))
    some = [k for k in sizes if k * hidden <= most]
    intermediate = draw(st.sampled_from([k for k in some if k * hidden >= PARALLEL_FROM] or some))
    gate = draw(st.sampled_from(("silu", "relu2")))
    pair = gate == "silu" and draw(st.booleans())
    alone = scheme is None or scheme.shared_rows == 1
    interleaved = gate == "silu" and not pair and alone and draw(st.booleans())
    step = draw(st.sampled_from((4, 64)))  # the largest element is of 4 bytes
    placing = Placing(
        phase=step * draw(st.integers(0, 2 * PAGE // step)),
        row_gap=draw(st.sampled_from((0, 0, 64, PAGE // 2, 5 * step))),
        expert_gap=step * draw(st.integers(0, PAGE // step)),
        tables=draw(st.booleans()),
        pair=pair,
    )
    return lay_out(
        draw(st.integers(0, 1 << 20)),
        weights,
        hidden=hidden,
        intermediate=intermediate,
        tokens=draw(st.sampled_from((1, 1, 2, 5, 16, 17, 32))),
        gate=gate,
        bias=draw(st.booleans()),
        interleaved=interleaved,
        placing=placing,
    )


@given(laid=layers(), machine=machines(), times=st.integers(1, 2), data=st.data())
def test_each_byte_is_read_once_by_its_own_node(
    laid: Laid, machine: LogicalMachine, times: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans(), "experts have rules of their own"):
        usual = machine.interleaving
        assert usual is not None
        other = Interleaving(PAGE, usual.pattern[::-1])
        rules = data.draw(st.lists(st.sampled_from((usual, other, None)), min_size=3, max_size=3))
        machine = replace(machine, exceptions=laid.stretches(rules))
    nodes = len([node for node in machine.topology.nodes if node.cpus])
    _, reads = run(laid, machine, nodes * times)
    check_reads(laid, reads)


# Certain ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMATS)
def test_every_format(weights: str) -> None:
    laid = lay_out(1, weights, hidden=1024, intermediate=256, gate="relu2")
    _, reads = run(laid, LogicalMachine.even(2), 2)
    check_reads(laid, reads)
    for matrix in (laid.case.gate_up, laid.case.down):
        if isinstance(matrix, ExpertWeights) and "scales" in matrix.parts:
            check_scales(matrix, reads)


def check_scales(matrix: ExpertWeights, reads: Reads) -> None:
    """They are read from wherever they are: all of active experts, none of the last one."""
    for expert in range(matrix.shape[0]):
        scales = matrix.parts["scales"].of(expert)
        counts = reads.counts(scales.data_ptr(), scales.nbytes)
        assert ((counts > 0) == (expert < matrix.shape[0] - 1)).all()


def test_the_longest_rows() -> None:
    laid = lay_out(2, hidden=16384, intermediate=24, gate="relu2", experts=2, top_k=1)
    _, reads = run(laid, LogicalMachine.even(5), 5)
    check_reads(laid, reads)


def test_fewer_threads_than_nodes() -> None:
    """Threads read what is on the nodes of their group."""
    laid = lay_out(3, hidden=2880, intermediate=96, interleaved=True, gate="swiglu_oai")
    machine = LogicalMachine.even(8)
    _, reads = run(laid, machine, 3)
    assert sorted(set(reads.groups.owner.values())) == [0, 1, 2]
    check_reads(laid, reads)


def test_experts_that_lie_each_in_their_own_way() -> None:
    """In no pattern, in that of others, in huge pages, on one node."""
    laid = lay_out(4, hidden=2048, intermediate=96, experts=6, top_k=5, gate="relu2")
    rules = (
        None,
        Interleaving(PAGE, (1, 0, 0)),
        Interleaving(HUGE, (0, 1)),
        Interleaving(PAGE, (1,)),
        Interleaving(PAGE, (0, 1)),
        None,
    )
    machine = replace(LogicalMachine.even(2), exceptions=laid.stretches(rules))
    _, reads = run(laid, machine, 4)
    check_reads(laid, reads)
    everything = laid.arena.address, laid.arena.size
    assert reads.remote(*everything)[0] == 0
    # All threads have something to do even where nobody knows.
    [first] = [c for c in laid.codes if c.expert == 0 and c.row_bytes == 4096]
    for group in range(2):
        assert reads.group_counts(first.address, first.size, group).sum() == first.size // 2


@pytest.mark.parametrize("name", isas.names())
def test_each_isa(name: str) -> None:
    if reason := isas.by_name(name).unavailable():
        pytest.skip(reason)
    if name == isas.select().name:
        pytest.skip("the ISA of all other tests here")
    with oracle.running(name):
        check_isa()


def check_isa() -> dict[str, Tensor]:
    """Rows of no whole chunks for more than a group of tokens, and of blocks for a single one; the results."""
    ragged = Placing(phase=34, row_gap=6)
    layouts = {
        "ragged": lay_out(5, hidden=520, intermediate=72, tokens=17, placing=ragged),
        "blocks": lay_out(6, "q4_K", hidden=256, intermediate=256, gate="relu2", bias=True),
    }
    found = {}
    for key, laid in layouts.items():
        found[key], reads = run(laid, LogicalMachine.even(2), 2)
        check_reads(laid, reads)
    return found


def test_what_is_remote_is_seen() -> None:
    """By a schedule for another page map, every byte; by that of one node, half of them."""
    laid = lay_out(8, hidden=2048, intermediate=64, gate="relu2")
    machine = LogicalMachine.even(2)
    _, reads = run(laid, machine, 2)
    everything = laid.arena.address, laid.arena.size
    total = sum(c.rows * c.code_bytes for c in laid.codes if c.expert < 2)
    assert reads.remote(*everything) == (0, total)
    swapped = replace(machine, interleaving=Interleaving(PAGE, (1, 0)))
    assert replace(reads, machine=swapped).remote(*everything) == (total, total)
    unknown = replace(machine, interleaving=None)
    assert replace(reads, machine=unknown).remote(*everything) == (0, 0)
    with pytest.raises(AssertionError, match="bytes are read from other nodes"):
        check_reads(laid, replace(reads, machine=swapped))


# AMX, in a process of its own -----------------------------------------------------------------------------------------


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="AMX is x86-64's"
)
def test_emulated_amx() -> None:
    """Tiles are loaded row by row; results are those of its exact reference."""
    if not amx_emulator.needed():
        pytest.skip("this CPU has AMX")
    report = json.loads(check_output([sys.executable, __file__]).splitlines()[-1])
    assert all(count > 0 for count in report.values()), report


def main() -> None:
    with oracle.running("portable_exact"):
        expected = check_isa()
    emulate_amx()
    with oracle.running("amx"):
        found = check_isa()
    for key, y in found.items():
        oracle.assert_same_bits(y, expected[key])
    assert_tiles_released()
    counts = amx_emulator.counts()
    print(json.dumps({name: counts[name] for name in ("TILELOADD", "TDPBF16PS", "TILESTORED")}))


if __name__ == "__main__":
    main()

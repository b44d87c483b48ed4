"""A layer on several memory nodes: right, reproducible, and threads are where they were when it is done.

The nodes are logical ones, as in test_numa_simulation, which looks at what is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import run
from torch import Tensor

import expertile
from expertile.codegen import isa as isas
from expertile.codegen.compiler import compile_ir
from expertile.codegen.ir import Module, i32, i64, ptr
from expertile.codegen.tracing import Unkept
from expertile.runtime import layer, openmp
from expertile.runtime.errors import ArgumentError
from expertile.runtime.matrices import LayerWeights
from expertile.runtime.numa import active, plan, simulation
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.simulation import LogicalMachine, Stretch, declared
from expertile.runtime.samples import random_weights
from expertile.templates import formats

PAGE, HUGE = 4096, 2 << 20

pytestmark = [
    pytest.mark.skipif(openmp.runtime() is None, reason="no OpenMP runtime here"),
    pytest.mark.filterwarnings("ignore:.*expert matrices lie on the memory nodes"),
]


def computed(
    case: oracle.Case, machine: LogicalMachine | None, threads: int, **changes: Any
) -> Tensor:
    """The layer on a machine, with so many threads."""
    with oracle.threads(threads), active.using(machine):
        return case.run(**changes)


def planned(case: oracle.Case, machine: LogicalMachine, threads: int) -> plan.Plan:
    """How a machine does it: not as on one node."""
    found: list[plan.Plan | None] = []
    original = plan.find

    def find(*arguments: Any) -> plan.Plan | None:
        found.append(original(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "find", find)
        computed(case, machine, threads)
    [one] = found
    assert one is not None
    return one


# Results --------------------------------------------------------------------------------------------------------------

SIZES = (64, 200, 256, 520, 768, 1024, 2048, 2880, 4096)
MOST = 1 << 18
"""Weights of a matrix."""


@st.composite
def cases(draw: st.DrawFn) -> oracle.Case:
    """Layers of bf16, most of them big enough for several threads, whose active experts have all tokens."""
    hidden = draw(st.sampled_from(SIZES))
    intermediate = draw(st.sampled_from([n for n in SIZES if n * hidden <= MOST]))
    gate = draw(st.sampled_from(("silu", "gelu", "swiglu_oai", "relu2")))
    top_k = draw(st.integers(1, 3))
    case = oracle.make_case(
        draw(st.integers(0, 1 << 20)),
        tokens=draw(st.sampled_from((1, 2, 7, 16, 33, 70))),
        experts=4,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        gate=gate,
        bias=draw(st.sampled_from((None, torch.bfloat16, torch.float32))),
        interleaved=gate != "relu2" and draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float32, torch.float16))),
        ids_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        router_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        scale=1.0,
    )
    chosen = draw(st.permutations(range(4)))[:top_k]
    case.ids.copy_(torch.tensor(chosen))
    return case


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    case=cases(),
    pattern=st.lists(st.integers(0, 4), min_size=1, max_size=10),
    page_bytes=st.sampled_from((PAGE, 16 * PAGE, HUGE)),
    threads=st.integers(1, 8),
)
def test_any_layer_on_any_machine(
    case: oracle.Case, pattern: list[int], page_bytes: int, threads: int
) -> None:
    cpus = [(node,) for node in range(max(pattern) + 1)]
    machine = LogicalMachine(declared(cpus), Interleaving(page_bytes, tuple(pattern)))
    oracle.check(case, computed(case, machine, threads))


@dataclass(frozen=True)
class Shape:
    """A layer, and how far apart the rows of its tiles are on two nodes, in gate/up and in down."""

    options: dict[str, Any]
    apart: tuple[int, int]
    parts: int
    """Sums that a row of gate/up is divided into, at most."""


SHAPES = {
    "whole rows": Shape({"hidden": 2048, "intermediate": 256}, (2, 16), 1),
    "halves": Shape({"hidden": 4096, "intermediate": 128}, (1, 1), 2),
    "long periods": Shape(
        {
            "hidden": 2880,
            "intermediate": 288,
            "gate": "swiglu_oai",
            "interleaved": True,
            "bias": torch.bfloat16,
        },
        (32, 128),
        2,
    ),
    "ragged": Shape(
        {"hidden": 1048, "intermediate": 200, "gate": "relu2", "bias": torch.float32}, (1, 1), 2
    ),
}


@cache
def shaped(name: str, tokens: int) -> oracle.Case:
    """A layer of three experts that have all tokens each, but for one of the first three; aligned to huge pages."""
    case = oracle.make_case(5, tokens=tokens, experts=3, top_k=3, **SHAPES[name].options)
    ids = torch.arange(3).repeat(tokens, 1)
    ids[:3].fill_diagonal_(-1)
    return replace(case, ids=ids, gate_up=on_pages(case.gate_up), down=on_pages(case.down))


def on_pages(tensor: Tensor) -> Tensor:
    """A copy that begins with a huge page, so that plans are the same in every run."""
    memory = torch.empty(tensor.numel() + HUGE // 2, dtype=tensor.dtype)
    first = -memory.data_ptr() % HUGE // 2
    return memory[first:][: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_what_they_are_called(name: str) -> None:
    shape, case = SHAPES[name], shaped(name, 17)
    found = planned(case, LogicalMachine.even(2), 2)
    gate_up, down = found.gate_up.tables, found.down.tables
    assert (gate_up.apart, down.apart, gate_up.most_parts) == (*shape.apart, shape.parts)


def check_near(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of additions, and how that makes h be rounded."""
    difference = (actual.double() - expected.double()).norm()
    assert float(difference) <= 1e-3 * float(expected.double().norm())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("nodes", [2, 3])
def test_same_bits_whatever_the_number_of_threads(name: str, nodes: int) -> None:
    case, machine = shaped(name, 17), LogicalMachine.even(nodes)
    first = computed(case, machine, nodes)
    oracle.check(case, first)
    check_near(first, computed(case, None, 2))
    for threads in (1, 2, nodes, nodes + 1, 2 * nodes, 3 * nodes):
        oracle.assert_same_bits(computed(case, machine, threads), first)


def test_same_bits_whichever_tokens_share_the_batch() -> None:
    """Several token blocks, and any rest."""
    case, machine = shaped("halves", 200), LogicalMachine.even(2)
    everything = computed(case, machine, 2)
    oracle.check(case, everything)
    order = torch.randperm(197, generator=torch.Generator().manual_seed(1)) + 3
    for count in (1, 15, 16, 17, 33, 64):
        some = order[:count].tolist()
        y = computed(case, machine, 2, **case.tokens(some))
        oracle.assert_same_bits(y, everything[some])


def test_same_bits_in_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case, machine = shaped("ragged", 33), LogicalMachine.even(2)
    expected = computed(case, machine, 2)
    monkeypatch.setattr(layer, "SCRATCH_CAP", 1)
    monkeypatch.setattr(layer, "LEAST_CHUNK", 16)
    before = layer.calls()
    oracle.assert_same_bits(computed(case, machine, 2), expected)
    assert layer.calls() - before == 3


def test_bound_layers_have_the_same_bits() -> None:
    case, machine = shaped("halves", 17), LogicalMachine.even(2)
    spec = expertile.ExpertSpec(4096, 128, experts=3, top_k=3)
    with oracle.threads(2), active.using(machine):
        bound = expertile.compile(spec, rows=[]).bind(case.gate_up, case.down)
        y = bound(case.x, case.ids, case.router)
    oracle.assert_same_bits(y, computed(case, machine, 2))


def test_weights_changed_in_place_change_the_result() -> None:
    case, machine = shaped("halves", 17), LogicalMachine.even(2)
    before = computed(case, machine, 2)
    case.down.neg_()
    try:
        oracle.assert_same_bits(computed(case, machine, 2), -before)
    finally:
        case.down.neg_()


def test_nothing_chosen_is_zero() -> None:
    case = shaped("halves", 17)
    y = computed(case, LogicalMachine.even(2), 2, ids=torch.full_like(case.ids, -1))
    assert not y.any()


def test_a_layer_that_one_thread_computes() -> None:
    """So little work that waking others would not pay: the thread does it for all groups."""
    case = oracle.make_case(3, tokens=5, experts=4, top_k=2, hidden=33, intermediate=100)
    machine = LogicalMachine(declared([(0,), (1,)]), Interleaving(64, (0, 1)))
    y = computed(case, machine, 2)
    oracle.check(case, y)
    oracle.assert_same_bits(computed(case, machine, 4), y)


@pytest.mark.parametrize("name", isas.names())
def test_each_isa(name: str) -> None:
    if reason := isas.by_name(name).unavailable():
        pytest.skip(reason)
    case, machine = shaped("ragged", 17), LogicalMachine.even(2)
    with oracle.running(name):
        y = computed(case, machine, 2)
        oracle.check(case, y)
        oracle.assert_same_bits(computed(case, machine, 3), y)
        oracle.assert_same_bits(computed(case, machine, 2, **case.tokens([16])), y[16:])


# A wrong page map -----------------------------------------------------------------------------------------------------


def test_no_page_map_makes_it_wrong() -> None:
    """Whatever rule each expert has, and if it has none."""
    case = shaped("long periods", 17)
    step = case.gate_up[0].nbytes
    rules = (
        None,
        Interleaving(HUGE, (1, 0)),
        Interleaving(PAGE, (1, 1, 0)),
    )
    first = case.gate_up.data_ptr()
    stretches = [Stretch(first + n * step, step, rule) for n, rule in enumerate(rules)]
    for rule in (Interleaving(PAGE, (0, 1)), None):
        y = computed(case, LogicalMachine(declared([(0,), (1,)]), rule, stretches), 2)
        oracle.check(case, y)


# As on one node -------------------------------------------------------------------------------------------------------


def test_nodes_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    case = oracle.make_case(1, tokens=5, experts=4, top_k=2, hidden=64, intermediate=4096)
    case = replace(case, x=case.x.float())
    monkeypatch.setenv("EXPERTILE_NUMA", "off")
    ignored = active.this_machine()
    assert ignored is None
    expected = computed(case, ignored, 2)
    several = computed(case, LogicalMachine.even(2), 2)
    assert not torch.equal(several, expected)  # the rows of down are divided
    with active.using(LogicalMachine.even(2)):
        oracle.assert_same_bits(computed(case, None, 2), expected)


def test_unknown_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTILE_NUMA", "on")
    with pytest.raises(ArgumentError, match='EXPERTILE_NUMA: expected "auto" or "off", got \'on\''):
        active.this_machine()


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_single_group_is_one_node(nodes: int) -> None:
    """Of a machine with one node, and where one node alone has CPUs."""
    case = shaped("halves", 17)
    cpus = [(0,), *[()] * (nodes - 1)]
    machine = LogicalMachine(declared(cpus), Interleaving(PAGE, tuple(range(nodes))))
    oracle.assert_same_bits(computed(case, machine, 2), computed(case, None, 2))


def test_what_has_no_rows_in_memory_is_computed_as_on_one_node() -> None:
    """Transposed weights, and products of int8."""
    machine = LogicalMachine.even(2)
    shape = {"tokens": 5, "experts": 4, "top_k": 2, "hidden": 256, "intermediate": 128}
    case = oracle.make_case(1, transposed=True, **shape)
    oracle.assert_same_bits(computed(case, machine, 2), computed(case, None, 2))
    int8 = formats.resolve("int8")
    weights = LayerWeights(
        random_weights(int8, (4, 256, 256)), random_weights(int8, (4, 256, 128)), activations="int8"
    )
    found = []
    for each in (machine, None):
        with oracle.threads(2), active.using(each):
            found.append(layer.run(case.x, weights, case.ids, case.router))
    oracle.assert_same_bits(*found)


# Processes and threads ------------------------------------------------------------------------------------------------


def test_python_threads_at_once() -> None:
    """Each has an OpenMP team of its own."""
    cases_ = [shaped(name, 17) for name in ("whole rows", "halves", "long periods")]
    machine, wrong = LogicalMachine.even(2), []
    with oracle.threads(2), active.using(machine):
        expected = [case.run() for case in cases_]

        def work(number: int) -> None:
            torch.set_num_threads(2)
            for turn in range(4):
                which = (number + turn) % len(cases_)
                y = cases_[which].run()
                if not torch.equal(oracle.bits(y), oracle.bits(expected[which])):
                    wrong.append(which)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def _forked() -> list[str]:
    """The bits of a layer in a child that is the first to compute, after that in the parent, and in another child."""
    import oracle
    from subprocesses import digest, in_fork

    from expertile.runtime.numa import active
    from expertile.runtime.numa.simulation import LogicalMachine

    sizes = {"experts": 2, "top_k": 2, "hidden": 1024, "intermediate": 256, "nowhere": 0}
    case = oracle.make_case(1, tokens=3, **sizes)

    def child() -> str:
        return digest(case.run())

    with oracle.threads(2), active.using(LogicalMachine.even(2)):
        first = in_fork(child)
        y = case.run()
        again = in_fork(child)
        assert digest(case.run()) == digest(y)
    oracle.check(case, y)
    return [first, again, digest(y)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_compute_layers() -> None:
    """With one thread, which does the work of all groups."""
    first, again, here = run(_forked)
    assert first == again == here


def _check_twice(sizes: dict[str, Any]) -> None:
    """A layer on three nodes is right, and the same again."""
    import oracle
    import torch

    from expertile.runtime.numa import active
    from expertile.runtime.numa.simulation import LogicalMachine

    case = oracle.make_case(1, tokens=19, experts=3, top_k=3, **sizes)
    case.ids.copy_(torch.arange(3))
    with oracle.threads(3), active.using(LogicalMachine.even(3)):
        y, again = case.run(), case.run()
    oracle.check(case, y)
    oracle.assert_same_bits(again, y)


def test_nothing_is_used_that_was_not_written() -> None:
    """With scratch full of NaN."""
    sizes = {"hidden": 2872, "intermediate": 104, "interleaved": True, "gate": "swiglu_oai"}
    run(_check_twice, sizes, env={"EXPERTILE_DEBUG": "poison"})


# Where threads run ----------------------------------------------------------------------------------------------------

GET, SET = 0, 1


@dataclass(frozen=True)
class Affinity:
    """A note of a call that asks for, or sets, the CPUs of a thread: those below 64 that it then has, a bit each."""

    kind: int
    cpus: int


class Watched:
    """Functions in place of sched_getaffinity and sched_setaffinity, which take notes and call others, or answer so."""

    def __init__(
        self, real: tuple[int, int] | None = None, answers: tuple[int, int] = (0, 0)
    ) -> None:
        self._notes = np.zeros((1000, 4), np.int64)
        self.addresses = tuple(self._function(kind, real, answers[kind]) for kind in (GET, SET))

    def _function(self, kind: int, real: tuple[int, int] | None, answer: int) -> int:
        module, name = Module("affinity"), f"affinity_{kind}"
        parameters = {"thread": i32, "size": i64, "mask": ptr}
        with module.function(name, parameters, returns=i32) as (b, arg):
            log, status = b.to_ptr(b.const(i64, self._notes.ctypes.data)), b.var(i32, answer)
            note = log.at((b.atomic_add(log, 1) + 1) * 32)
            if real is not None:
                given = [arg.thread, arg.size, arg.mask]
                status.set(b.call_address(b.const(i64, real[kind]), i32, given))
                if kind == SET:
                    b.call_address(b.const(i64, real[GET]), i32, given)
            elif kind == GET and answer == 0:
                with b.loop(0, arg.size, 8) as offset:
                    arg.mask.at(offset).store(b.const(i64, 0))
                arg.mask.store(b.const(i64, 0b1011))
            note.store(b.const(i64, kind))
            note.at(8).store(b.to_int(b.call("llvm.thread.pointer", ptr, [])))
            note.at(16).store(arg.mask.load(i64))
            b.ret(status.get())
        target = isas.by_name("portable").target()
        return compile_ir(name, str(module), target, store=Unkept()).address

    def calls(self, threads: int) -> list[list[Affinity]]:
        """Those of each thread of the team, in order."""
        count = int(self._notes[0, 0])
        notes = self._notes[1 : count + 1].tolist()
        pointers = simulation.thread_pointers(threads).tolist()
        assert {note[1] for note in notes} <= set(pointers)
        return [
            [Affinity(kind, cpus % 2**64) for kind, pointer, cpus, _ in notes if pointer == own]
            for own in pointers
        ]


@pytest.fixture
def pinning() -> LogicalMachine:
    """Two nodes with CPUs 0 and 1, and 2, to which threads move."""
    return LogicalMachine(declared([(0, 1), (2,)]), Interleaving(PAGE, (0, 1)), pins=True)


def calls_in(
    monkeypatch: pytest.MonkeyPatch, watched: Watched, machine: LogicalMachine, case: oracle.Case
) -> list[list[Affinity]]:
    """What a call of three threads asks for."""
    monkeypatch.setattr(plan, "_affinity", lambda: watched.addresses)
    with oracle.threads(3):  # all the time, so that the team stays the same
        expected = computed(case, replace(machine, pins=False), 3)
        oracle.assert_same_bits(computed(case, machine, 3), expected)
        return watched.calls(3)


def test_threads_move_to_their_node_and_back(
    monkeypatch: pytest.MonkeyPatch, pinning: LogicalMachine
) -> None:
    found = calls_in(monkeypatch, Watched(), pinning, shaped("halves", 17))
    back = Affinity(SET, 0b1011)
    for calls, cpus in zip(found, (0b11, 0b11, 0b100), strict=True):
        assert calls == [Affinity(GET, 0b1011), Affinity(SET, cpus), back]


def test_threads_stay_where_nobody_says_where_they_were(
    monkeypatch: pytest.MonkeyPatch, pinning: LogicalMachine
) -> None:
    """They could not be moved back."""
    found = calls_in(monkeypatch, Watched(answers=(-1, 0)), pinning, shaped("halves", 17))
    assert [[call.kind for call in calls] for calls in found] == [[GET]] * 3


def test_threads_that_may_not_move_compute_all_the_same(
    monkeypatch: pytest.MonkeyPatch, pinning: LogicalMachine
) -> None:
    found = calls_in(monkeypatch, Watched(answers=(0, -1)), pinning, shaped("halves", 17))
    assert all(calls[0].kind == GET for calls in found)


def test_a_single_thread_stays(monkeypatch: pytest.MonkeyPatch, pinning: LogicalMachine) -> None:
    case = oracle.make_case(3, tokens=2, experts=2, top_k=1, hidden=40, intermediate=24)
    assert calls_in(monkeypatch, Watched(), pinning, case) == [[]] * 3


def _masks() -> dict[int, set[int]]:
    """The CPUs of all threads of the process."""
    return {
        int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")
    }


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two CPUs",
)
@pytest.mark.parametrize("own", [False, True])
def test_threads_really_move_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Nor is anything different afterwards: for threads, for later ones, for children; wherever the caller was."""
    case, everywhere = shaped("halves", 17), sorted(os.sched_getaffinity(0))
    halves = everywhere[::2], everywhere[1::2]
    machine = LogicalMachine(declared(halves), Interleaving(PAGE, (0, 1)), pins=True)
    real = plan._affinity()
    if not all(real):
        pytest.skip("threads may not be moved here")
    watched = Watched(real)
    monkeypatch.setattr(plan, "_affinity", lambda: watched.addresses)
    here = {everywhere[0]} if own else set(everywhere)
    wrong: list[Any] = []

    def work() -> None:
        if own:
            os.sched_setaffinity(0, here)
        torch.set_num_threads(3)
        with active.using(replace(machine, pins=False)):
            expected = case.run()  # now all threads are there
        before = _masks()
        with active.using(machine):
            y = case.run()
        after = _masks()
        if not torch.equal(oracle.bits(y), oracle.bits(expected)):
            wrong.append("other bits")
        if {thread: after.get(thread) for thread in before} != before:
            wrong.append((before, after))
        command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        child = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if set(map(int, child.split())) != here:
            wrong.append(child)
        calls = watched.calls(3)
        groups = machine.groups(3)
        for thread, group in enumerate(groups.thread_group):
            turns = (here, groups.cpus[group], here)
            cpus = [sum(1 << cpu for cpu in some if cpu < 64) for some in turns]
            if [call.cpus for call in calls[thread]] != cpus:
                wrong.append((thread, calls[thread]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not wrong

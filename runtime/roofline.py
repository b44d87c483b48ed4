"""What the machine can do at most: its read bandwidths and its peak of bf16 operations, on the layer's own threads.

The kernels of `templates.stream` run as the layer's do: one parallel region of the same OpenMP threads, which take
pieces of work from a shared counter. Rates are taken by probes, in rounds: the machines drift, so that numbers can
only be compared with others of the same round.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from expertile.codegen import isa as isas
from expertile.codegen.ir import Builder, Module, Value, i32, i64, ptr, void
from expertile.runtime import jit, openmp
from expertile.runtime.errors import ArgumentError
from expertile.templates.stream import LINE, Multiply, TileRead, VectorRead

Read = VectorRead | TileRead

_FIELDS = ("kernel", "items", "results", "parallel", "thread_number", "count", "threads", "counter")
_RESULT_STRIDE = 64
_ITEM_BYTES = 1 << 20
"""About what the layer's driver gives a thread at a time."""
_SAMPLE_BYTES = 256 << 20
"""Read in a step: of the regions by all threads, out of a cache by each."""
_MULTIPLY_STEPS = 1 << 14
_MULTIPLY_ITEMS = 32
"""For each thread."""
_SAMPLE_SECONDS = 0.02
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 40


@dataclass(frozen=True)
class _Runner:
    """void runner(record): call `kernel(address, amount)` for each of the items, on all threads."""

    isa = "portable"
    name = "runner"

    def ir(self) -> str:
        module = Module(self.name)
        with module.function("share", {"record": ptr}, private=True) as (b, arg):
            _share(b, arg.record)
        with module.function(self.name, {"record": ptr}) as (b, arg):
            parallel, threads = _load(arg.record, "parallel"), _load(arg.record, "threads")
            with b.if_else(threads > 1) as (team, alone):
                with team:
                    body = b.address_of("share")
                    b.call_address(
                        parallel, void, [body, arg.record, threads.to(i32), b.const(i32, 0)]
                    )
                with alone:
                    b.call("share", void, [arg.record])
        return str(module)


def _load(record: Value, name: str) -> Value:
    return record.at(8 * _FIELDS.index(name)).load(i64)


def _share(b: Builder, record: Value) -> None:
    """What every thread of the team does: its results are xored into a slot of its own."""
    thread = b.var(i64, 0)
    with b.if_(_load(record, "threads") > 1):
        thread.set(b.call_address(_load(record, "thread_number"), i32, []).to(i64))
    result = b.to_ptr(_load(record, "results")).at(thread.get() * _RESULT_STRIDE)
    items, kernel = b.to_ptr(_load(record, "items")), _load(record, "kernel")
    counter, count = record.at(8 * _FIELDS.index("counter")), _load(record, "count")
    with b.while_true() as loop:
        number = b.atomic_add(counter, 1)
        loop.leave_if(number >= count)
        item = items.at(number * 16)
        value = b.call_address(kernel, i64, [b.to_ptr(item.load(i64)), item.at(8).load(i64)])
        result.store(result.load(i64) ^ value)


_Native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(kernel: int, items: np.ndarray, threads: int) -> int:
    """Run a kernel, given by its address, on all items `[n, 2]` int64 (address, amount); the xor of its results.

    Raises ArgumentError if there is no OpenMP runtime for more than one thread.
    """
    omp = openmp.runtime()
    if threads > 1 and omp is None:
        raise ArgumentError(f"threads: expected 1, as no OpenMP runtime is loaded, got {threads}")
    results = np.zeros((threads, _RESULT_STRIDE // 8), np.int64)
    entries = (omp.parallel, omp.thread_number) if omp else (0, 0)
    items = np.ascontiguousarray(items, np.int64)
    record = np.array(
        [kernel, items.ctypes.data, results.ctypes.data, *entries, len(items), threads, 0], np.int64
    )
    _Native(jit.address(_Runner()))(record.ctypes.data)
    return int(np.bitwise_xor.reduce(results, axis=None))


class Probe:
    """Some work and its rate: `step()` does a piece of it and returns how much that was (bytes, operations).

    `prepare()` is called before each sample and not timed.
    """

    def __init__(
        self, step: Callable[[], int], prepare: Callable[[], object] | None = None
    ) -> None:
        self._step, self._prepare = step, prepare
        self.forget()

    def forget(self) -> None:
        """Drop all samples."""
        self.rates: dict[int, float] = {}
        """Amount a second, by round."""
        self.step_seconds: dict[int, float] = {}
        """Seconds a step, by round."""
        self.seconds = 0.0
        """Spent so far."""

    def sample(self, number: int) -> None:
        """Take the sample of a round: as many steps as fill 20 ms, at least one."""
        if self._prepare is not None:
            self._prepare()
        amount = steps = 0
        seconds, start = 0.0, time.perf_counter()
        while seconds < _SAMPLE_SECONDS:
            amount += self._step()
            steps += 1
            seconds = time.perf_counter() - start
        self.rates[number], self.step_seconds[number] = amount / seconds, seconds / steps
        self.seconds += seconds


def interleave(
    references: Sequence[Probe],
    probes: Sequence[Probe],
    seconds: float,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Sample all in rounds, each in a new random order, for `seconds` or until each probe has its part of them.

    The references are sampled in every round. A probe drops out with 40 samples, and not with less than 3. `progress`
    is called between samples with the part of `seconds` that has passed, which exceeds 1 where 3 rounds take longer.
    """
    order, part = random.Random(0), seconds / max(1, len(probes))
    number, due, start = 0, list(probes), time.perf_counter()
    while due:
        together = [*references, *due]
        order.shuffle(together)
        for probe in together:
            probe.sample(number)
            if progress is not None:
                progress((time.perf_counter() - start) / seconds)
        number += 1
        if number >= _FEWEST_SAMPLES:
            over = number == _MOST_SAMPLES or time.perf_counter() > start + seconds
            due = [] if over else [probe for probe in due if probe.seconds < part]


def reads(regions: Sequence[torch.Tensor], threads: int) -> dict[str, Probe]:
    """Probes, by name, of all ways to read the regions (contiguous tensors); each sample goes on where one stopped.

    Rows are as far apart as those of the first region's matrices.
    """
    row_bytes = regions[0].shape[-1] * regions[0].element_size()
    position = _Position()
    return {
        kernel.name: _read_probe(kernel, regions, threads, position)
        for kernel in _kernels(row_bytes)
    }


def _kernels(row_bytes: int) -> list[Read]:
    row_bytes = max(LINE, row_bytes // LINE * LINE)
    kernels: list[Read] = [
        VectorRead(1, 4096, unroll, ahead) for unroll in (4, 16) for ahead in (0, 2048, 4096)
    ]
    kernels += [VectorRead(rows, row_bytes, 1, ahead) for rows in (8, 16) for ahead in (0, 512)]
    isa = isas.select().name
    if isa == "amx":
        kernels += [TileRead(isa, row_bytes, streaming) for streaming in _hints(isa)]
    return kernels


def _hints(isa: str) -> tuple[bool, ...]:
    """What `streaming` can be where it makes a difference."""
    return (False, True) if isa == "amx" else (False,)


@dataclass
class _Position:
    """Where the next sample starts, in bytes; common to all, so that none finds what another left in the caches."""

    byte: int = 0


def _read_probe(
    kernel: Read, regions: Sequence[torch.Tensor], threads: int, position: _Position
) -> Probe:
    address, items = jit.address(kernel), divide(regions, kernel.block_bytes)
    ends = np.cumsum(items[:, 1])

    def step() -> int:
        first = int(np.searchsorted(ends, position.byte % ends[-1], "right"))
        some = np.roll(items, -first, axis=0)
        some = some[: int(np.searchsorted(np.cumsum(some[:, 1]), _SAMPLE_BYTES)) + 1]
        amount = int(some[:, 1].sum())
        position.byte += amount
        run(address, some, threads)
        return amount

    return Probe(step)


def divide(regions: Sequence[torch.Tensor], unit: int) -> np.ndarray:
    """The bytes of contiguous tensors as items of about 1 MiB, in multiples of `unit` up to the end of a region."""
    size = max(1, _ITEM_BYTES // unit) * unit
    items = []
    for region in regions:
        start, length = region.data_ptr(), region.numel() * region.element_size()
        items += [(start + offset, min(size, length - offset)) for offset in range(0, length, size)]
    return np.array(items, np.int64)


def cache_reads(set_bytes: int, threads: int) -> dict[str, Probe]:
    """Probes, by name, of the ISA's tile loads: each thread reads a memory of `set_bytes` of its own over and over.

    set_bytes: a multiple of 1024, of packed tiles.
    """
    isa = isas.select().name
    sweeps = max(1, _SAMPLE_BYTES // set_bytes)
    kernels = [TileRead(isa, LINE, streaming, sweeps) for streaming in _hints(isa)]
    return {kernel.name: _cache_probe(kernel, set_bytes, threads) for kernel in kernels}


def _cache_probe(kernel: TileRead, set_bytes: int, threads: int) -> Probe:
    memory = torch.arange(threads * set_bytes // 8)  # every page is written
    starts = range(memory.data_ptr(), memory.data_ptr() + threads * set_bytes, set_bytes)
    items = np.array([(start, set_bytes) for start in starts], np.int64)
    address = jit.address(kernel)

    def step() -> int:
        run(address, items, threads)
        return memory.numel() * memory.element_size() * kernel.sweeps

    return Probe(step, prepare=step)  # the first sweep brings the memory into the cache


def peak(threads: int, activations: str = "bf16") -> Probe:
    """A probe of the most operations a second that this process's ISA reaches, out of registers.

    activations: "bf16", or "int8" for the machine that multiplies bytes.
    """
    isa = isas.select().name
    kernel = Multiply(isas.for_bytes(isa) if activations == "int8" else isa)
    count = _MULTIPLY_ITEMS * threads
    operands = torch.empty(count, kernel.OPERAND_BYTES // 2, dtype=torch.bfloat16)
    items = np.array([(operand.data_ptr(), _MULTIPLY_STEPS) for operand in operands], np.int64)
    address = jit.address(kernel)

    def step() -> int:
        operands.fill_(1)
        run(address, items, threads)
        return kernel.operations * _MULTIPLY_STEPS * count

    return Probe(step)

"""A layer call from Python: check, lay out the scratch, make one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from expertile.codegen import isa as isas
from expertile.runtime import call, checks, jit, openmp, repeat, spec, workspace
from expertile.runtime.driver import most_items, sums_bytes
from expertile.runtime.errors import ArgumentError
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.numa import active
from expertile.runtime.repeat import Written
from expertile.runtime.spec import LayerKernels
from expertile.runtime.weights import ExpertWeights
from expertile.templates import gates

if TYPE_CHECKING:
    from expertile.runtime.numa.plan import Plan, Scratch

SCRATCH_CAP = 512 << 20
"""Scratch bytes above which a call is cut into chunks of tokens."""
_SCRATCH = 10
"""Parts of the scratch on one node."""
LEAST_CHUNK = 2048
"""Tokens of a chunk, at least."""

_calls = 0


def calls() -> int:
    """Native layer calls in this process so far (two that end at the same moment in two threads may count as one)."""
    return _calls


@dataclass(frozen=True)
class _Scratch:
    """Where the parts of the scratch begin, for a number of tokens; the last one is where it ends."""

    offsets: tuple[int, ...]
    thread_bytes: int
    size: int


@lru_cache(maxsize=4096)
def _scratch(
    kernels: LayerKernels, nodes: Scratch | None, tokens: int, top_k: int, threads: int
) -> _Scratch:
    """O(tokens · top_k · (H + I)) and, for each thread, the kernels' scratch and the sums of a down item."""
    shape = kernels.spec
    slots = tokens * top_k
    margin = 64  # layouts read up to a vector past the end
    thread_bytes = _align(nodes.kernel_bytes if nodes else kernels.scratch_bytes)
    if not nodes:
        thread_bytes += _align(sums_bytes(tokens, kernels.row_unit) + margin)
    sizes = {
        "counters": (nodes.counters if nodes else call.COUNTERS) * call.COUNTER_STRIDE,
        "counts": 8 * shape.experts,
        "experts": call.EXPERT_BYTES * min(shape.experts, slots),
        "groups": call.GROUP_BYTES * slots,
        "items": call.ITEM_BYTES
        * most_items(threads, min(shape.experts, slots), shape.intermediate),
        "token": 4 * slots,
        "sorted_router": 4 * slots,
        "operand": kernels.operand_bytes[0] * slots + margin,
        "hidden_operand": kernels.operand_bytes[1] * slots + margin,
        "thread_scratch": thread_bytes * threads,
    }
    if nodes:
        sizes |= nodes.sizes(tokens, slots)
    offsets, end = [], 0
    for size in sizes.values():
        offsets.append(end)
        end += _align(size)
    return _Scratch(tuple(offsets), thread_bytes, end)


def _align(size: int) -> int:
    return (size + 63) & ~63


class Recorder(Protocol):
    """Whoever wants a call profiled."""

    def start(self, kernels: LayerKernels, threads: int) -> tuple[int, int]:
        """A native call follows on that many threads: the values of `call.PROFILE`."""

    def stop(self) -> None:
        """It is done."""


_prepared: dict[tuple[Any, ...], LayerKernels] = {}


def prepare(weights: LayerWeights, top_k: int) -> LayerKernels:
    """The kernels for these weights; checked in full the first time their metadata is seen."""
    try:
        key = (weights.key(), top_k, torch.is_grad_enabled())
        found = _prepared.get(key)
        if found is not None:
            return found
    except (AttributeError, TypeError, RuntimeError):
        key = None  # not all dense tensors: the checks will say so
    try:
        gate = gates.resolve(weights.gate)
    except (ValueError, TypeError) as error:
        raise ArgumentError(str(error)) from None
    shape, stored = checks.layer(weights._replace(gate=gate), top_k)
    kernels = spec.kernels(shape, stored, isas.select().name)
    if key is not None:
        _prepared[key] = kernels
    return kernels


def plan_ahead(kernels: LayerKernels, weights: LayerWeights, rows: Iterable[int] | None) -> None:
    """Do now what a first call would do on a machine of several memory nodes; compile for `rows` tokens an expert."""
    found = active.find(kernels, _places(kernels, weights), openmp.threads())
    if found:
        found.kernels.compile(rows)


def run(
    x: torch.Tensor,
    weights: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """The layer, computed. Arguments as in :func:`expertile.fused_experts`; the profiled driver runs for a recorder."""
    global _calls
    # Calls that are profiled or planned are not repeated.
    alone = recorder is None and active.machine is None
    seen = repeat.look(x, weights, topk_ids, topk_weights) if alone else None
    out = repeat.again(seen, x, weights, topk_ids, topk_weights)
    if out is not None:
        _calls += 1
        return out
    top_k = topk_ids.shape[-1] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() else 1
    kernels = prepare(weights, max(top_k, 1))
    out, written = _execute(kernels, x, weights, topk_ids, topk_weights, recorder)
    if seen is not None and written is not None:
        repeat.remember(seen, x, weights, written)
    return out


def execute(
    kernels: LayerKernels,
    x: torch.Tensor,
    weights: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """The layer, computed by given kernels, which must be for such weights."""
    out, _ = _execute(kernels, x, weights, topk_ids, topk_weights, recorder)
    return out


def _execute(
    kernels: LayerKernels,
    x: torch.Tensor,
    weights: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    recorder: Recorder | None,
) -> tuple[torch.Tensor, Written | None]:
    """The same, and the native call if it was a single one."""
    checks.routing(x, topk_ids, topk_weights, kernels.spec.hidden)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # the default may be elsewhere
    if x.shape[0] == 0:
        return out, None
    if topk_ids.shape[1] == 0:
        # zero_() would want threads, which a forked child doesn't have.
        ctypes.memset(out.data_ptr(), 0, out.nbytes)
        return out, None
    places = _places(kernels, weights)
    written = _chunks(kernels, x, out, topk_ids, topk_weights, places, recorder)
    return out, written[0] if len(written) == 1 else None


Places = tuple[tuple[int, ...], tuple[int, ...]]
"""Addresses and steps of `call.WEIGHTS`."""


def _places(kernels: LayerKernels, weights: LayerWeights) -> Places:
    """Where the parts of gate, up and down are."""
    first, up_row = weights.gate_up, kernels.up_row
    gate, up = first if isinstance(first, tuple) else (first, first)
    row_bytes = 2 if kernels.spec.transposed else kernels.stored[0].row_bytes
    parts = (
        *_parts(gate, 0, row_bytes), _bias(weights.gate_up_bias, 0),
        *_parts(up, 0 if isinstance(first, tuple) else up_row, row_bytes), _bias(weights.gate_up_bias, up_row),
        *_parts(weights.down, 0, 0), _bias(weights.down_bias, 0),
    )  # fmt: skip
    addresses, steps = zip(*parts, strict=True)
    return addresses, steps


_NOTHING = (0, 0)


def _parts(matrix: Matrix, row: int, row_bytes: int) -> tuple[tuple[int, int], ...]:
    """Address and step of codes, scales and factor of a matrix from row `row` on."""
    if isinstance(matrix, ExpertWeights):
        return matrix.places(row)
    return (matrix.data_ptr() + row * row_bytes, 2 * matrix.stride(0)), _NOTHING, _NOTHING


def _bias(bias: torch.Tensor | None, first: int) -> tuple[int, int]:
    if bias is None:
        return _NOTHING
    size = bias.element_size()
    return bias.data_ptr() + first * size, size * bias.stride(0)


def _chunks(
    kernels: LayerKernels,
    x: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    places: Places,
    recorder: Recorder | None,
) -> list[Written]:
    """Run the layer on as many tokens at a time as the scratch cap allows."""
    tokens, top_k = ids.shape
    threads = openmp.threads()
    # There is no profile of a call in segments.
    plan = None if recorder else active.find(kernels, places, threads)
    nodes = plan.scratch if plan else None
    size = _scratch(kernels, nodes, tokens, top_k, threads).size
    step = tokens
    if size > SCRATCH_CAP and tokens > LEAST_CHUNK:
        step = max(LEAST_CHUNK, SCRATCH_CAP * tokens // size)
    written = []
    space = workspace.acquire()
    try:
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            whole = step == tokens
            arguments = (
                (x, out, ids, router) if whole else (x[part], out[part], ids[part], router[part])
            )
            # Its own for the last chunk: with fewer tokens the sums of a down item may take more.
            scratch = _scratch(kernels, nodes, min(step, tokens - first), top_k, threads)
            try:
                written.append(
                    _native(kernels, plan, space, scratch, threads, *arguments, places, recorder)
                )
            except _BadId as error:
                _raise_bad_id(arguments[2], error.position, first, kernels.spec.experts)
    finally:
        workspace.release(space)
    return written


class _BadId(Exception):
    def __init__(self, position: int) -> None:
        self.position = position


def _raise_bad_id(ids: torch.Tensor, position: int, first: int, experts: int) -> None:
    token, slot = divmod(position, ids.shape[1])
    raise ArgumentError(
        f"topk_ids: expected ids from 0 to {experts - 1}, or -1 for an expert that is elsewhere, got "
        f"{int(ids[token, slot])} for token {first + token}, slot {slot}"
    ) from None


_Native = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
_entries: dict[str, Any] = {}


def _entry(driver: str) -> Any:
    """A driver, to be called from Python."""
    found = _entries.get(driver)
    if found is None:
        found = _entries[driver] = _Native(jit.driver(driver))
    return found


def _native(
    kernels: LayerKernels,
    plan: Plan | None,
    space: workspace.Workspace,
    scratch: _Scratch,
    threads: int,
    x: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    places: Places,
    recorder: Recorder | None,
) -> Written:
    """One native call, and another if kernels had to be compiled first. Fields in the order of `call.OFFSETS`."""
    global _calls
    addresses, steps = places
    driver = _entry("numa" if plan else "profiled" if recorder else "plain")
    shape, omp, own = kernels.spec, openmp.runtime(), plan.kernels if plan else kernels
    base = space.reserve(scratch.size)
    dtype = checks.HIDDEN_DTYPES[x.dtype]
    gate_up, down = own.gate_up_table, own.down_table
    ids_size, router_size, size = ids.element_size(), router.element_size(), x.element_size()
    while True:
        fields = (
            x.data_ptr(), out.data_ptr(), ids.data_ptr(), router.data_ptr(), *addresses,
            *kernels.ends(dtype), gate_up.address, down.address,
            *((omp.parallel, omp.barrier, omp.thread_number) if omp else (0, 0, 0)),
            *(base + offset for offset in scratch.offsets[:_SCRATCH]),
            ids.shape[0], ids.shape[1], shape.experts, shape.hidden, shape.intermediate,
            *kernels.operand_bytes, kernels.requantize,
            x.stride(0) * size, out.stride(0) * size, size,
            ids.stride(0) * ids_size, ids.stride(1) * ids_size,
            router.stride(0) * router_size, router.stride(1) * router_size,
            *steps, *kernels.row_spans,
            ids_size, checks.ROUTER_KINDS[router.dtype],
            kernels.block_tokens.bit_length() - 1, kernels.corner,
            threads, scratch.thread_bytes, _align(own.scratch_bytes), kernels.row_unit,
            0, 0, 0, 0, 0,
            *(recorder.start(kernels, threads) if recorder else (0, 0)),
        )  # fmt: skip
        space.write(*fields)
        if plan:
            behind = (base + offset for offset in scratch.offsets[_SCRATCH:])
            space.write_numa(*plan.fields(dtype), *behind)
        status = driver(space.record)
        if status == call.OK:
            _calls += 1
            if recorder:
                recorder.stop()
            return Written(driver, fields, base, scratch.size)
        if status == call.BAD_ID:
            raise _BadId(space.read("bad_position"))
        own.add_missing()

"""Which variant a kernel is compiled in: description → candidates → best (as in DeepGEMM).

A description is a kernel without a variant: projection, shape, format, tokens. Its candidates are what the ISA thinks
worth trying. The best is the one that `expertile tune` measured to be fastest on this machine, or else the one that a
model of the core and its caches predicts to be. No variant changes a result.

The model counts core cycles for 16 rows of each matrix and all tokens: multiplications against loads from L1 or L2 for
every pass, what it costs to save, restore and finish C tiles, and the lines fetched from memory beside it. Its
constants are rounded from measurements (docs/performance/notes.md); it only has to rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar

from expertile.codegen import cpu
from expertile.codegen import isa as isas
from expertile.codegen.cache import default_cache
from expertile.codegen.isa import TilePlan, Variant
from expertile.codegen.layouts import GROUP, groups_of
from expertile.runtime.caches import caches
from expertile.templates.formats.base import ByRows, WeightFormat
from expertile.templates.kernel import ExpertKernel

Kernel = TypeVar("Kernel", bound=ExpertKernel)
Size = tuple[int, int]
"""Tokens of a block, and how many blocks at least."""

FETCH_CYCLES = 9.0
"""Core cycles for a cache line from memory, while all cores read."""
_HIDDEN = 0.7
"""The part of the shorter of fetching and multiplying that the longer one hides, if lines are asked for ahead."""
_LATE = 0.5
"""The part of lost requests that nothing hides."""
_CROWDED = 0.25
"""The part of fetching that an operand from L2 spoils, as it takes the places of misses; less if there is time."""
_ASK_CYCLES = 0.2
_L2_CYCLES = 2.0
"""Core cycles to ask for a line, and for a line from L2."""
_STAGE_CYCLES = 1.0
"""Core cycles to write a chunk of a decoded row to L2 and to have it back, beside decoding it."""
_DECODE_CYCLES = 1.0
"""Core cycles that decoding any rows takes a chunk, which more rows share."""
_MANY_SUMS = 16
"""Of a pass; more leave few registers for decoding."""
_SPILLED_CYCLES = 4.0
"""Core cycles to have a chunk of a decoded row back from beyond L2."""
_L2_PART = 0.75
"""What decoded rows may take of L2, which holds operands and sums besides."""
_L1_PART = 1.6
"""Working sets a bit larger than L1 still do: what is read in order comes back in time."""


# Candidates -------------------------------------------------------------------------------------------------------


def candidates(kernel: ExpertKernel) -> tuple[Variant, ...]:
    """The variants worth choosing between, of which no two are the same code."""
    found: dict[Any, Variant] = {}
    for variant in _offered(kernel):
        plan = _plan(replace(kernel, variant=variant))
        if variant.carried and plan.sweeps * kernel.blocks == 1:
            continue  # what is multiplied once needs not be written
        found.setdefault((plan, replace(variant, rows=GROUP, tokens=GROUP)), variant)
    return tuple(found.values())


def _offered(kernel: ExpertKernel) -> list[Variant]:
    """What the ISA offers, fitted to the kernel."""
    return [_fitting(kernel, variant) for variant in _all_offered(kernel)]


def _all_offered(kernel: ExpertKernel) -> list[Variant]:
    """What the ISA offers for such a format."""
    isa, format_ = isas.by_name(kernel.isa), kernel.format
    decoded = isinstance(format_, ByRows) and not format_.direct
    offered = (isa.decoding if decoded else isa.variants)(kernel.tokens, kernel.matrices)
    unit = isa.chunk * (format_.unit if isinstance(format_, ByRows) else 1)
    return [variant for variant in offered if variant.k_block % unit == 0 and kernel.takes(variant)]


def _fitting(kernel: ExpertKernel, variant: Variant) -> Variant:
    """The variant without what makes no difference to the kernel."""
    if not isinstance(kernel.format, ByRows):  # staged, and whoever did has asked for the next rows
        variant = replace(variant, neighbours=1, copied=False, streaming=False, ahead=())
    if variant.k_block >= kernel.inputs and not variant.copied:
        variant = replace(variant, k_block=0)
    return variant if variant.k_block else replace(variant, panel=GROUP)


def _plan(kernel: ExpertKernel) -> TilePlan:
    blocks = (kernel.matrices if kernel.variant.together else 1) * kernel.variant.neighbours
    isa = isas.by_name(kernel.isa)
    return isa.plan(groups_of(kernel.tokens), blocks, kernel.variant)


@cache
def most_scratch(kernel: ExpertKernel) -> int:
    """Bytes of per-thread scratch that suffice for any number of tokens in any variant of a description."""
    isa = isas.by_name(kernel.isa)
    full = replace(kernel, tokens=isa.block_tokens)
    variants = {
        variant
        for tokens in range(1, isa.block_tokens + 1)
        for variant in _all_offered(replace(kernel, tokens=tokens))
    }
    fitting = {_fitting(kernel, variant) for variant in variants}
    return max(replace(full, variant=variant).scratch_bytes for variant in fitting)


# The best ---------------------------------------------------------------------------------------------------------


def best(kernel: Kernel) -> Kernel:
    """The kernel in the variant to use on this machine."""
    kept = {size: _fitting(kernel, v) for size, v in tuned(description(kernel)).items()}
    if kept:
        offered = _offered(kernel)
        kept = {size: variant for size, variant in kept.items() if variant in offered}
    variant = _nearest(kept, (kernel.tokens, kernel.blocks))
    if variant is not None:
        return replace(kernel, variant=variant)
    return ranked(kernel, candidates(kernel))[0]


def ranked(kernel: Kernel, variants: Sequence[Variant]) -> list[Kernel]:
    """The kernel in each of the variants, those first that the model thinks fastest."""
    return sorted((replace(kernel, variant=variant) for variant in variants), key=predict)


def _nearest(measured: dict[Size, Variant], size: Size) -> Variant | None:
    """The variant for the size that is the nearest by ratio, among those of one block or those of several."""
    tokens, blocks = size
    alike = [other for other in measured if (other[1] > 1) == (blocks > 1)]
    if not alike:
        return None
    amount = tokens * blocks

    def distance(other: Size) -> float:
        theirs = other[0] * other[1]
        return max(amount / theirs, theirs / amount)

    return measured[min(alike, key=distance)]


# The model --------------------------------------------------------------------------------------------------------


def predict(kernel: ExpertKernel) -> float:
    """Core cycles that a kernel takes for 16 rows of each matrix, as the model sees it."""
    isa = isas.by_name(kernel.isa)
    lines = GROUP * kernel.matrices * kernel.format.code_bytes(kernel.inputs) / 64
    plan = _plan(kernel)
    a_in_l1, b_in_l1 = _in_l1(kernel, plan)
    multiplying = _multiplying(kernel, plan, a_in_l1, b_in_l1)
    if not isinstance(kernel.format, ByRows):
        return multiplying
    often = len(kernel.variant.ahead)
    late = isa.lost / often if often else isa.unasked
    fetching = lines * FETCH_CYCLES * (1 + late)
    if not often:  # a core that is busy doesn't look far ahead by itself
        idle = max(0.0, 1 - multiplying / fetching)
        return fetching + multiplying * (1 - _HIDDEN * idle)
    longer, shorter = max(fetching, multiplying), min(fetching, multiplying)
    spoilt = late * _LATE
    if not b_in_l1:
        spoilt += _CROWDED * fetching / longer
    return longer + shorter * (1 - _HIDDEN) + lines * FETCH_CYCLES * spoilt


def _multiplying(kernel: ExpertKernel, plan: TilePlan, a_in_l1: bool, b_in_l1: bool) -> float:
    """Cycles of all passes, with the weights in L2."""
    isa, variant, chunks = kernel.machine, kernel.variant, kernel.machine.chunks(kernel.inputs)
    k_blocks = -(-chunks // _k_chunks(kernel))
    repeats = GROUP // plan.rows / variant.neighbours
    if not variant.together:
        repeats *= kernel.matrices
    rows = plan.rows * plan.blocks
    cycles = 0.0
    written = variant.copied or variant.staged
    for number, one in enumerate(plan.passes):
        tokens = sum(tile.tokens for tile in one.tiles)
        # The first pass finds the rows in L2, the others where they stay.
        from_l2 = 0 if a_in_l1 and (number or variant.copied) else rows
        from_l2 += 0 if b_in_l1 else tokens
        multiply = max(isa.multiply_cycles * rows * tokens, isa.latency_cycles)
        multiply += 0.0 if written else _decoding(kernel.format, rows, tokens)
        step = max(multiply, sum(isa.load_cycles(plan, one)), from_l2 * _L2_CYCLES)
        saving, storing = isa.store_cycles(plan, one)
        times = one.repeat * one.groups * repeats
        cycles += times * (step * chunks + saving * (k_blocks - 1) + storing)
    asking = _ASK_CYCLES * len(variant.ahead)
    writing = _writing(kernel) if written else 0.0
    return cycles * kernel.blocks + GROUP * kernel.matrices * chunks * (asking + writing)


def _decoding(format_: WeightFormat, rows: int, tokens: int) -> float:
    """Cycles to decode a chunk of the rows of a pass."""
    crowded = format_.crowded_cycles if rows * tokens > _MANY_SUMS else 0.0
    return (format_.decode_cycles + crowded) * rows + _DECODE_CYCLES


def _writing(kernel: ExpertKernel) -> float:
    """Cycles to write a chunk of a decoded row and to have it back, beside what multiplying hides."""
    variant, format_ = kernel.variant, kernel.format
    if not variant.staged:
        return format_.stage_cycles + _L2_CYCLES + 1
    if not variant.carried:
        return format_.stage_cycles + _STAGE_CYCLES
    rows = 2 * GROUP * kernel.matrices * kernel.panel_stride
    spilled = _SPILLED_CYCLES if rows > _L2_PART * _cache_bytes(2) else 0.0
    return format_.carry_cycles + _STAGE_CYCLES + spilled


def _k_chunks(kernel: ExpertKernel) -> int:
    """Chunks of a k block."""
    chunks = kernel.machine.chunks(kernel.inputs)
    return min(kernel.machine.chunks(kernel.variant.k_block) or chunks, chunks)


def _in_l1(kernel: ExpertKernel, plan: TilePlan) -> tuple[bool, bool]:
    """Whether the rows of a pass stay in L1 while they are needed again, and whether the tokens' operand does."""
    variant, isa = kernel.variant, isas.by_name(kernel.isa)
    k_chunks = _k_chunks(kernel)
    room = _cache_bytes(1) * _L1_PART
    rows = plan.rows * plan.blocks * 64 * k_chunks
    if variant.copied:  # all rows of the k block stay, the tokens pass by
        return True, False
    tokens = kernel.tokens * 64 * k_chunks
    unfinished = (
        variant.panel * plan.blocks * kernel.tokens * isa.sum_bytes if variant.k_block else 0
    )
    return 2 * rows < room, rows + tokens + unfinished / 2 < room


@cache
def _cache_bytes(level: int) -> int:
    """Of a core's cache; of the largest there is, if there are not as many levels."""
    found, _ = caches()
    return found[min(level, len(found)) - 1].bytes


def corner(isa: str) -> int:
    """Tokens from which on multiplying a row takes longer than fetching it."""
    return max(1, round(FETCH_CYCLES / isas.by_name(isa).multiply_cycles))


# What was measured ------------------------------------------------------------------------------------------------


def description(kernel: Kernel) -> Kernel:
    """What measurements are kept for: the kernel without its tokens and its variant."""
    return replace(kernel, tokens=1, blocks=1, variant=Variant())


@cache
def tuned(kernel: ExpertKernel) -> dict[Size, Variant]:
    """The measured best variants of a description, by size; empty if it was never tuned on this machine."""
    data = default_cache().get(_key(kernel))
    if data is None:
        return {}
    try:
        return {tuple(entry["size"]): _variant(entry["variant"]) for entry in json.loads(data)}
    except (KeyError, TypeError, ValueError):
        return {}  # written by another version


def keep(kernel: ExpertKernel, measured: dict[Size, Variant]) -> None:
    """Remember the best variants of a description for this machine, for later processes too."""
    entries = [{"size": size, "variant": asdict(variant)} for size, variant in measured.items()]
    default_cache().put(_key(kernel), json.dumps(entries).encode())
    tuned.cache_clear()


def _variant(fields: dict[str, Any]) -> Variant:
    return Variant(**fields | {"ahead": tuple(fields["ahead"])})


def _key(kernel: ExpertKernel) -> str:
    """Of a description on this machine."""
    host, (found, _) = cpu.host(), caches()
    machine = (cpu.model_name(), host.cpu, host.features, found)
    return sha256(repr(("tuned", machine, kernel)).encode()).hexdigest()

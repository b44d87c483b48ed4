"""Measuring which variants of the expert kernels are fastest on this machine, for :func:`choice.best` to choose.

    results = tune(ExpertSpec(2048, 768, 128, 8), seconds=60)

A size at a time, candidates of both projections run in pairs in the same layer calls: those that the model ranks
first, and the first of each other blocking. They do so in rounds, each in a new random order, so that drift hits all
alike, and the slower half drops out again and again, so that most time goes to those that are hard to tell apart. The
predicted best never drops out: what wins must be faster than it by more than the noise, or else nothing changes.

What won is kept for later processes. In this one, kernels that a layer has used already stay as they are.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median, quantiles

import torch

from expertile.codegen.isa import Variant
from expertile.runtime import choice, layer
from expertile.runtime.call import BUCKETS
from expertile.runtime.choice import Size
from expertile.runtime.errors import ArgumentError
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.profile import Profile, Recorder
from expertile.runtime.samples import random_bf16, random_weights
from expertile.runtime.spec import ExpertSpec, LayerKernels, contiguous
from expertile.templates.expert import Down, GateUp
from expertile.templates.formats import Quantized
from expertile.templates.formats.base import WeightFormat
from expertile.templates.kernel import ExpertKernel

PROJECTIONS = ("gate_up", "down")

Measure = Callable[[ExpertKernel, ExpertKernel], tuple[float, float]]
"""Seconds that a gate/up and a down kernel of the same size take in a layer call."""

_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_FEWEST_ROUNDS = 3
"""Between two halvings."""
_LEAST_GAIN = 0.01
"""What isn't faster by more than that is no reason to leave the prediction."""
_CALL_SECONDS = 0.03
_MOST_BYTES = 4 << 30
"""Of weights, unless more are asked for."""


# Sizes ------------------------------------------------------------------------------------------------------------


def default_sizes(block_tokens: int) -> list[Size]:
    """The sizes to tune for; others use the variant of the nearest."""
    return sizes_of((*_TOKENS, *(block_tokens * blocks for blocks in BUCKETS)), block_tokens)


def sizes_of(rows: Iterable[int], block_tokens: int) -> list[Size]:
    """The sizes of the kernels that experts with these numbers of tokens run, in ascending order.

    Raises ArgumentError for numbers below 1.
    """
    sizes: set[Size] = set()
    for count in rows:
        if count < 1:
            raise ArgumentError(f"rows: expected numbers of tokens from 1, got {count}")
        full, rest = divmod(count, block_tokens)
        for done in range(0, full, BUCKETS[-1]):
            sizes.add((block_tokens, max(least for least in BUCKETS if least <= full - done)))
        if rest:
            sizes.add((rest, 1))
    return sorted(sizes)


# Tuning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What was found for a projection and a size."""

    predicted: ExpertKernel
    rival: ExpertKernel | None
    """The fastest of all other candidates; None if there are none."""
    candidates: int
    rounds: int
    gain: float
    """Time of the predicted best over that of its rival, the median of all rounds; 1 without a rival."""
    low: float
    high: float
    """Its quartiles."""

    @property
    def best(self) -> ExpertKernel:
        """The one that is kept: the rival only if it is faster by more than the noise."""
        noise = 2 * (self.high - self.low) / math.sqrt(self.rounds)  # two errors of the median
        better = self.gain - 1 > max(noise, _LEAST_GAIN)
        return self.rival if self.rival is not None and better else self.predicted

    @property
    def size(self) -> Size:
        """Tokens of a block, and how many blocks at least."""
        return self.predicted.tokens, self.predicted.blocks

    @property
    def projection(self) -> str:
        """One of PROJECTIONS."""
        return PROJECTIONS[isinstance(self.predicted, Down)]


def tune(
    spec: ExpertSpec,
    sizes: Sequence[Size] | None = None,
    *,
    seconds: float = 60.0,
    candidates: int = 10,
    gib: float = 1.0,
    measure: Measure | None = None,
    progress: Callable[[Size, float], None] | None = None,
) -> list[Result]:
    """Measure the candidates for a layer with contiguous weights, and keep the best of each projection and size.

    sizes: (tokens of a block, blocks), see :func:`sizes_of`; all usual ones by default.
    seconds: to spend on measuring; compiling the candidates comes on top, and so do the rounds it takes at least.
    candidates: of a projection and a size, at most.
    gib: weights to cycle over, at least, see :class:`Calls`.
    measure: what to measure with, instead of real layer calls.
    progress: called between rounds with the size that is being measured and the part of all that is done.
    Results are kept size by size, so that those of a run that is interrupted are not lost.

    Raises ArgumentError for sizes that no kernel has, fewer than 2 candidates, seconds below 0 and GiB not above it.
    """
    kernels = contiguous(spec)
    sizes = default_sizes(kernels.block_tokens) if sizes is None else sizes
    _check(sizes, kernels.block_tokens, seconds, candidates)
    measure = measure or Calls(spec, gib)
    results = []
    for number, size in enumerate(sizes):
        contests = [
            _Contest(contenders(kernel, candidates))
            for kernel in (kernels.gate_up(*size), kernels.down(*size))
        ]

        def advance(part: float, number: int = number, size: Size = size) -> None:
            if progress is not None:
                progress(size, (number + part) / len(sizes))

        _run(contests, measure, seconds / len(sizes), advance)
        for contest in contests:
            results.append(contest.result())
            _keep(results[-1])
    return results


def _keep(result: Result) -> None:
    """Remember the best beside what was found for other sizes."""
    best = result.best
    description = choice.description(best)
    choice.keep(description, choice.tuned(description) | {result.size: best.variant})


def _check(sizes: Sequence[Size], block_tokens: int, seconds: float, candidates: int) -> None:
    for size in sizes:
        tokens, blocks = size
        several = tokens == block_tokens and blocks in BUCKETS
        if not (several or (blocks == 1 and 1 <= tokens < block_tokens)):
            raise ArgumentError(
                f"sizes: expected (tokens, 1) with 1 to {block_tokens} tokens or ({block_tokens}, blocks) with "
                f"{', '.join(map(str, BUCKETS))} blocks, got {size}"
            )
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f"seconds: expected a number from 0, got {seconds}")
    if candidates < 2:
        raise ArgumentError(f"candidates: expected at least 2 to choose from, got {candidates}")


def contenders(kernel: ExpertKernel, count: int) -> list[ExpertKernel]:
    """Up to `count` candidates, the predicted best first.

    Half of them are those that the model ranks first, which may differ in little but their prefetches. The others are
    the first of each other blocking, in case the model is wrong about the blocking.
    """
    ranked = choice.ranked(kernel, choice.candidates(kernel))
    half = -(-count // 2)
    chosen = ranked[:half]
    for other in ranked[half:]:
        if len(chosen) < count and _blocking(other) not in map(_blocking, chosen):
            chosen.append(other)
    rest = [other for other in ranked if other not in chosen]
    return chosen + rest[: count - len(chosen)]


def _blocking(kernel: ExpertKernel) -> Variant:
    """The variant but for how it fetches."""
    return replace(kernel.variant, streaming=False, ahead=())


class _Contest:
    """The candidates of a projection and a size, and how long they took in each round."""

    def __init__(self, field: list[ExpertKernel]) -> None:
        self.field = self.left = field
        self.forget()

    def forget(self) -> None:
        """Drop all times."""
        self.seconds: dict[ExpertKernel, dict[int, float]] = {kernel: {} for kernel in self.field}

    @property
    def open(self) -> bool:
        """Whether there is still something to choose."""
        return len(self.left) > 1

    def halve(self) -> None:
        """Drop the slower half, but not the predicted best, nor its last rival."""
        count = max(2, -(-len(self.left) // 2))
        fastest = sorted(self.left, key=self._median)[:count]
        self.left = [kernel for kernel in self.left if kernel in (self.field[0], *fastest)]

    def result(self) -> Result:
        """What was found; all that are left were there in all rounds."""
        predicted, *others = self.left
        before = self.seconds[predicted]
        rival = min(others, key=self._median, default=None)
        times = before if rival is None else self.seconds[rival]
        gains = [before[number] / times[number] for number in before]
        low, gain, high = quantiles(gains, n=4, method="inclusive")
        return Result(predicted, rival, len(self.field), len(gains), gain, low, high)

    def _median(self, kernel: ExpertKernel) -> float:
        return median(self.seconds[kernel].values())


def _run(
    contests: list[_Contest], measure: Measure, seconds: float, progress: Callable[[float], None]
) -> None:
    """Successive halving: stages of equal time, after each of which the slower half drops out."""
    order = random.Random(0)
    progress(0.0)
    _round(contests, measure, order, -1)  # compiles what is missing
    for contest in contests:
        contest.forget()
    stages = max(len(contest.field) for contest in contests).bit_length()
    start, number = time.perf_counter(), 0
    for stage in range(1, stages + 1):
        least, end = number + _FEWEST_ROUNDS, start + seconds * stage / stages
        while number < least or (time.perf_counter() < end and any(c.open for c in contests)):
            _round(contests, measure, order, number)
            number += 1
        progress(stage / stages)
        if stage < stages:
            for contest in contests:
                contest.halve()


def _round(contests: list[_Contest], measure: Measure, order: random.Random, number: int) -> None:
    """Measure all that are left, in new pairs; of the shorter side some again, whose last time counts."""
    fields = [order.sample(contest.left, len(contest.left)) for contest in contests]
    calls = max(map(len, fields))
    for gate_up, down in zip(*(islice(cycle(field), calls) for field in fields), strict=True):
        times = measure(gate_up, down)
        for contest, kernel, seconds in zip(contests, (gate_up, down), times, strict=True):
            contest.seconds[kernel][number] = seconds


# Measuring --------------------------------------------------------------------------------------------------------


class Calls:
    """Measures kernels in layer calls on the layer's threads, with weights that come from memory.

    gib: weights to cycle over, at least. Every expert of a call has as many tokens as the size says. The experts take
    turns, so that none is read again before all others were.

    The time of a kernel is that of all threads in its pass, without what they wait for each other.
    """

    def __init__(self, spec: ExpertSpec, gib: float) -> None:
        if not 0 < gib < math.inf:
            raise ArgumentError(f"gib: expected a number above 0, got {gib}")
        self._base = contiguous(spec)
        self._shape = replace(self._base.spec, experts=_expert_count(spec, gib))
        self._weights = _weights(self._shape)
        self._first = 0
        self._size: Size | None = None

    def __call__(self, gate_up: ExpertKernel, down: ExpertKernel) -> tuple[float, float]:
        """Thread seconds of both passes in a call with kernels of the same size."""
        size = gate_up.tokens, gate_up.blocks
        if size != self._size:
            self._size, self._tokens = size, gate_up.tokens * gate_up.blocks
            self._pairs: dict[tuple[ExpertKernel, ExpertKernel], LayerKernels] = {}
            self._active = self._fitting(self._pair(gate_up, down))
            self._x = self._hidden_states(self._active)
        profile = self._call(self._pair(gate_up, down), self._active, self._x)
        first, second = (sum(part.busy for part in profile.passes[name]) for name in PROJECTIONS)
        return first, second

    def _pair(self, gate_up: ExpertKernel, down: ExpertKernel) -> LayerKernels:
        """A layer with these kernels, whatever it asks for: calls have experts of one size only."""
        found = self._pairs.get((gate_up, down))
        if found is None:
            kernels = {GateUp: gate_up, Down: down}
            found = self._pairs[gate_up, down] = LayerKernels(
                self._shape,
                self._base.stored,
                self._base.isa,
                choose=lambda kernel: kernels[type(kernel)],
            )
        return found

    def _fitting(self, kernels: LayerKernels) -> int:
        """Experts of a call that takes about 30 ms: as many as a token has, a multiple of them, or fewer."""
        few = min(self._shape.top_k, self._shape.experts)
        seconds = self._call(kernels, few, self._hidden_states(few)).seconds
        fitting = min(int(few * _CALL_SECONDS / seconds), self._shape.experts)
        return fitting // few * few or max(1, fitting)

    def _hidden_states(self, active: int) -> torch.Tensor:
        """So many that each of the active experts gets as many as the size says."""
        top_k = min(self._shape.top_k, active)
        return random_bf16(self._tokens * active // top_k, self._shape.hidden, scale=1.0)

    def _call(self, kernels: LayerKernels, active: int, x: torch.Tensor) -> Profile:
        """A call on the next `active` experts."""
        slots = torch.arange(self._tokens * active, device="cpu")
        ids = ((self._first + slots % active) % self._shape.experts).view(len(x), -1)
        self._first += active
        router = torch.full(ids.shape, 1 / ids.shape[1], dtype=torch.float32, device="cpu")
        recorder = Recorder()
        layer.execute(kernels, x, self._weights, ids, router, recorder)
        return recorder.profile()


def _expert_count(spec: ExpertSpec, gib: float) -> int:
    """So many that there are `gib` GiB of weights, and what two tokens can choose without choosing the same."""
    gate_up, down = spec.formats()
    size = gate_up.matrix_bytes(spec.projections * spec.intermediate, spec.hidden)
    size += down.matrix_bytes(spec.hidden, spec.intermediate)
    apart = max(1, min(2 * spec.top_k, _MOST_BYTES // size))
    return max(apart, math.ceil(gib * 2**30 / size))


def _weights(spec: ExpertSpec) -> LayerWeights:
    columns = spec.projections * spec.intermediate
    sizes = (columns, spec.hidden), (spec.hidden, spec.intermediate)
    gate_up, down = (
        _matrices(spec, format_, *size) for format_, size in zip(spec.formats(), sizes, strict=True)
    )
    widths = (columns, spec.gate_up_bias), (spec.hidden, spec.down_bias)
    gate_up_bias, down_bias = (
        None if kind is None else random_bf16(spec.experts, width).to(_BIAS_DTYPES[kind])
        for width, kind in widths
    )
    options = spec.gate, spec.interleaved, spec.transposed, spec.activations
    return LayerWeights(gate_up, down, gate_up_bias, down_bias, *options)


def _matrices(spec: ExpertSpec, format_: WeightFormat, rows: int, columns: int) -> Matrix:
    if isinstance(format_, Quantized):
        return random_weights(format_, (spec.experts, rows, columns))
    return random_bf16(spec.experts, *((columns, rows) if spec.transposed else (rows, columns)))


_BIAS_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

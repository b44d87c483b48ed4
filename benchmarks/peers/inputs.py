"""Weights, tokens and routings from seeds: the same bits under every version of PyTorch and NumPy.

All of it comes from the raw words of NumPy's PCG64, whose stream is guaranteed to stay, by exact integer arithmetic and
single roundings. PyTorch's generators and its `softmax`, `topk` or `randn` may change with a version.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from peers import formats
from peers.formats import FORMATS, Quantised

Matrix = Tensor | Quantised
"""The matrices of a projection: bf16 `[experts, rows, columns]`, or in another format."""

# For each layer; a run does not get beyond 4 where calls are long.
_ROUTINGS, _ROUTINGS_OF_MANY_TOKENS, _MANY_TOKENS = 16, 4, 256
_BLOCK = (1 << 22) + 33
"""Numbers that are drawn for a bf16 tensor, and repeated: no multiple of a page, so that no two pages are alike."""
_SCALE = 0.02  # of weights
_CHECKED_TOKENS = 8
_WEIGHTS, _TOKENS, _CALLS = range(3)  # what a seed is for


@dataclass(frozen=True)
class Size:
    """An expert layer with SiLU-gated experts, no biases."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    weights: str = "bf16"
    """Or one of `FORMATS`."""

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of gate_up, gates first, and of down."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights, codes and scales. Raises ValueError for sizes that a format can't have."""
        if self.weights == "bf16":
            return 2 * 3 * self.hidden * self.intermediate
        return sum(FORMATS[self.weights].matrix_bytes(*size) for size in self.matrices)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's weights."""
        return self.experts * self.expert_bytes

    def operations(self, tokens: int) -> int:
        """Multiplications and additions of a call."""
        return 2 * 3 * self.hidden * self.intermediate * tokens * self.top_k


@dataclass(frozen=True)
class Call:
    """What a call computes: which experts of which layer."""

    layer: int
    ids: Tensor
    """int64 `[tokens, top_k]`"""
    router: Tensor
    """fp32 `[tokens, top_k]`; a token's sum is 1."""
    bytes: int
    """Of the distinct experts' weights."""


def weights(size: Size, layer: int) -> tuple[Matrix, Matrix]:
    """gate_up `[experts, 2 * intermediate, hidden]`, gates first, and down `[experts, hidden, intermediate]`."""
    gate_up, down = (
        _matrix(size.weights, (size.experts, *each), (_WEIGHTS, layer, number))
        for number, each in enumerate(size.matrices)
    )
    return gate_up, down


def tokens(size: Size, count: int) -> Tensor:
    """bf16 `[count, hidden]`, variance 1."""
    return _normal((_TOKENS, count), count * size.hidden).bfloat16().view(count, size.hidden)


def calls(size: Size, layers: int, count: int) -> list[Call]:
    """Calls of `count` tokens with independent uniform routings; the layers take turns.

    Experts are renamed so that a call uses those that were used longest ago: the routing stays random, and nothing is
    read again before everything else was, however few experts a call has.
    """
    last_use = np.zeros((layers, size.experts), np.int64)
    routings = _ROUTINGS_OF_MANY_TOKENS if count >= _MANY_TOKENS else _ROUTINGS
    found = []
    for number in range(routings * layers):
        layer = number % layers
        scores = _words((_CALLS, count, number, 0), count * size.experts)
        ids = scores.reshape(count, -1).argsort(1, kind="stable")[:, : size.top_k]
        used, names = np.unique(ids, return_inverse=True)
        shuffled = _words((_CALLS, count, number, 1), size.experts).argsort(kind="stable")
        oldest = shuffled[last_use[layer, shuffled].argsort(kind="stable")][: len(used)]
        last_use[layer, oldest] = number + 1
        words = _words((_CALLS, count, number, 2), count * size.top_k) >> np.uint64(44)
        parts = 1 + words.astype(np.int64).reshape(count, -1)
        router = (parts / parts.sum(1, keepdims=True)).astype(np.float32)
        chosen = oldest[names.reshape(count, -1)]
        found.append(
            Call(layer, torch.from_numpy(chosen), torch.from_numpy(router), len(used) * size.expert_bytes)
        )  # fmt: skip
    return found


def rows(schedules: Sequence[Sequence[Call]]) -> list[int]:
    """All numbers of tokens that an expert gets in them, ascending."""
    each = [np.unique(call.ids, return_counts=True)[1] for calls in schedules for call in calls]
    return [int(number) for number in np.unique(np.concatenate(each))]


def checked(count: int) -> Tensor:
    """Which of `count` tokens are compared with the reference: up to 8, evenly spread."""
    return torch.linspace(0, count - 1, min(count, _CHECKED_TOKENS)).round().long()


def dense(matrix: Matrix, expert: int) -> Tensor:
    """An expert's matrix, fp32 `[rows, columns]`."""
    return matrix[expert].float() if isinstance(matrix, Tensor) else matrix.dense(expert)


def reference(gate_up: Matrix, down: Matrix, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """The layer in fp32 from start to end: `[tokens, hidden]`."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].float(), dense(gate_up, expert)).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, dense(down, expert))
        out.index_add_(0, token, y * router[token, slot, None])
    return out


def sample(gate_up: Matrix, down: Matrix) -> list[Tensor]:
    """Tensors that tell a layer's weights from others: of the first expert and of the last."""
    pairs = (gate_up, 0), (down, -1)
    parts = ([m[n]] if isinstance(m, Tensor) else m.of(n) for m, n in pairs)
    return [tensor for some in parts for tensor in some]


def digest(*tensors: Tensor) -> str:
    """A hash of the tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _matrix(weights: str, shape: tuple[int, int, int], seed: Sequence[int]) -> Matrix:
    """Every page is written."""
    if weights == "bf16":
        count = min(math.prod(shape), _BLOCK)
        return _repeated(_normal(seed, count).mul_(_SCALE).bfloat16(), shape)
    drawn = itertools.count()

    def draw(count: int) -> Tensor:
        words = _words((*seed, next(drawn)), -(-count // 8)).view(np.uint8)[:count]
        return torch.from_numpy(words.astype(np.int64))

    return formats.random(FORMATS[weights], shape, draw, _repeated)


def _repeated(block: Tensor, shape: Sequence[int]) -> Tensor:
    tensor = torch.empty(tuple(shape), dtype=block.dtype)
    flat = tensor.view(-1)
    whole = flat.numel() // block.numel() * block.numel()
    flat[:whole].view(-1, block.numel()).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


def _normal(seed: Sequence[int], count: int) -> Tensor:
    """fp32 numbers of mean 0 and variance 1, near enough to normal: the sum of a word's bytes."""
    octets = _words(seed, count).view(np.uint8).reshape(count, 8)
    centred = octets.sum(1, dtype=np.int32) - 4 * 255
    return torch.from_numpy(centred.astype(np.float32) * np.float32((12 / 8) ** 0.5 / 256))


def _words(seed: Sequence[int], count: int) -> np.ndarray:
    """uint64 `[count]`."""
    generator = np.random.PCG64(np.random.SeedSequence(list(seed)))
    return generator.random_raw(count)

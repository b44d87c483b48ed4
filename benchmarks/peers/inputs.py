"""Weights, tokens and routings from seeds: the same bits under every version of PyTorch and NumPy.

All of it comes from the raw words of NumPy's PCG64, whose stream is guaranteed to stay, by exact integer arithmetic and
single roundings. PyTorch's generators and its `softmax`, `topk` or `randn` may change with a version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# For each layer; a run does not get beyond 4 where calls are long.
_ROUTINGS, _ROUTINGS_OF_MANY_TOKENS, _MANY_TOKENS = 16, 4, 256
_BLOCK = (1 << 22) + 33
"""Numbers that are drawn for a tensor, and repeated: no multiple of a page, so that no two pages are alike."""
_SCALE = 0.02  # of weights
_CHECKED_TOKENS = 8
_WEIGHTS, _TOKENS, _CALLS = range(3)  # what a seed is for


@dataclass(frozen=True)
class Size:
    """An expert layer with SiLU-gated experts, bf16, no biases."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        return 2 * 3 * self.hidden * self.intermediate

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


def weights(size: Size, layer: int) -> tuple[Tensor, Tensor]:
    """bf16 gate_up `[experts, 2 * intermediate, hidden]`, gates first, and down `[experts, hidden, intermediate]`."""
    e, h, i = size.experts, size.hidden, size.intermediate
    shapes = ((e, 2 * i, h), (e, h, i))
    gate_up, down = (_filled(shape, (_WEIGHTS, layer, n)) for n, shape in enumerate(shapes))
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


def reference(gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
    """The layer in fp32 from start to end: `[tokens, hidden]`."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].float(), gate_up[expert].float()).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert].float())
        out.index_add_(0, token, y * router[token, slot, None])
    return out


def digest(*tensors: Tensor) -> str:
    """A hash of the tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _filled(shape: Sequence[int], seed: Sequence[int]) -> Tensor:
    """Every page is written."""
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    flat = tensor.view(-1)
    block = _normal(seed, min(flat.numel(), _BLOCK)).mul_(_SCALE).bfloat16()
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

"""A part of all experts' matrices (their codes, scales or factors): what its tensors must be, and where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from expertile.runtime import tensors as checks
from expertile.runtime.errors import ArgumentError, DtypeError

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""What users pass for a part: a tensor `[E, …]`, or a list of E tensors."""


@dataclass(frozen=True, eq=False)
class PartTensors:
    """The tensors of a part, checked by themselves: alike, dense, aligned, with contiguous rows."""

    name: str
    """As the user knows it."""
    tensors: tuple[torch.Tensor, ...]
    stacked: bool
    """Whether it is one tensor, whose first dimension is the expert."""

    @property
    def given(self) -> Tensors:
        """As a user passes them."""
        return self.tensors[0] if self.stacked else self.tensors

    @property
    def number(self) -> int | None:
        """How many tensors there are, for a list."""
        return None if self.stacked else len(self.tensors)

    @property
    def experts(self) -> int:
        """E."""
        return self.tensors[0].shape[0] if self.stacked else len(self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one expert."""
        return tuple(self.of(0).shape)

    @property
    def dtype(self) -> str:
        """PyTorch's name of the dtype."""
        return checks.dtype_name(self.tensors[0])

    @property
    def length(self) -> int:
        """Bytes of a row."""
        return prod(self.shape[1:]) * self.tensors[0].element_size()

    @property
    def row_bytes(self) -> int:
        """Bytes from a row of an expert to the next."""
        return _row_bytes(self.of(0))

    @property
    def described(self) -> str:
        """Shape in a message."""
        shape = tuple(self.tensors[0].shape)
        return str(shape) if self.stacked else f"{self.experts} × {shape}"

    def of(self, expert: int) -> torch.Tensor:
        """An expert's tensor."""
        return self.tensors[0][expert] if self.stacked else self.tensors[expert]

    def shaped(self, expected: tuple[int, ...], why: str) -> PartTensors:
        """These tensors in the shape expected of one expert's; a dimension of 1 may be missing or too many at the end.

        Raises ArgumentError for any other shape.
        """
        if self.shape == expected:
            return self
        if (*self.shape, 1) == expected:
            return self._map(lambda x: x.unsqueeze(-1))
        if self.shape == (*expected, 1):
            return self._map(lambda x: x.squeeze(-1))
        whole = (self.experts, *expected) if self.stacked else expected
        each = "" if self.stacked else " of each tensor"
        got = tuple(self.tensors[0].shape)
        raise ArgumentError(
            f"{self.name}: expected shape {whole}{each} {why}, got {got}; check that they are of the same matrix "
            "and group size"
        )

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartTensors:
        return replace(self, tensors=tuple(map(change, self.tensors)))

    def step(self) -> int:
        """Bytes from expert to expert in a stacked tensor."""
        return self.tensors[0].stride(0) * self.tensors[0].element_size()

    def signature(self) -> tuple[Hashable, ...]:
        """Metadata of the first, which the others' are like, and the addresses of all."""
        first = self.tensors[0]
        return (
            first.shape, first.stride(), first.dtype, first.layout, first.device, first.requires_grad,
            torch.is_grad_enabled(), *map(torch.Tensor.data_ptr, self.tensors),
        )  # fmt: skip

    def addresses(self, offset: int) -> ctypes.Array[ctypes.c_int64]:
        """A table of where each expert's tensor begins, and so many bytes further."""
        return (ctypes.c_int64 * len(self.tensors))(*(x.data_ptr() + offset for x in self.tensors))


def collect(name: str, value: object, dtypes: Collection[str]) -> PartTensors:
    """Check what a user passed for a part: a tensor `[E, …]`, or a list of E alike, of one of the dtypes.

    Held are aliases, of the same memory.  Raises ArgumentError or DtypeError naming the tensor.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise ArgumentError(
                f"{name}: expected a first dimension of experts, or a list of a tensor for each, got a single number; "
                f"use [{name}]"
            )
        return PartTensors(name, (_usable(name, value, dtypes, 1),), True)
    if not isinstance(value, Iterable):
        raise DtypeError(
            f"{name}: expected a torch.Tensor, or a list of one for each expert, got {type(value).__name__}"
        )
    found = tuple(_usable(f"{name}[{i}]", x, dtypes, 0) for i, x in enumerate(value))
    if not found:
        raise ArgumentError(f"{name}: expected a tensor for each expert, got none")
    _alike(name, found)
    return PartTensors(name, found, False)


def _usable(name: str, value: object, dtypes: Collection[str], first: int) -> torch.Tensor:
    """An alias of a tensor, checked; its rows are counted by dimension `first`."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    checks.dense(name, value)
    checks.dtype(name, value, dtypes, _conversion(value, dtypes))
    checks.no_grad(name, value)
    if value.numel() == 0:
        raise ArgumentError(
            f"{name}: expected at least one expert, row and column, got shape {tuple(value.shape)}"
        )
    _row_contiguous(name, value, first)
    _aligned(name, value)
    return value.detach()


def _conversion(value: torch.Tensor, dtypes: Collection[str]) -> str:
    """How a tensor comes to have one of the dtypes, for a message."""
    for name in dtypes:
        wanted = getattr(torch, name)
        if wanted.itemsize == value.element_size():
            return f"; if its bytes are such, use .view({wanted})"
        if wanted.is_floating_point and value.is_floating_point():
            return f"; convert once with .to({wanted})"
    return ""


def _row_contiguous(name: str, value: torch.Tensor, first: int) -> None:
    """Raise unless the elements of a row are neighbours in memory."""
    expected = 1
    for size, stride in zip(value.shape[:first:-1], value.stride()[:first:-1], strict=True):
        if size > 1 and stride != expected:
            raise ArgumentError(
                f"{name}: expected contiguous rows, got strides {value.stride()} for shape {tuple(value.shape)}; "
                "use .contiguous()"
            )
        expected *= size


def _aligned(name: str, value: torch.Tensor) -> None:
    """Raise unless a tensor has memory, and begins at a multiple of its element size."""
    checks.memory(name, value)
    address = value.data_ptr()
    if address % value.element_size():
        raise ArgumentError(
            f"{name}: expected an address that is a multiple of {value.element_size()} for {value.dtype}, got "
            f"{address:#x}; load the file such that it is aligned, or use .clone()"
        )


def _alike(name: str, found: tuple[torch.Tensor, ...]) -> None:
    """Raise unless a list's tensors have the same shape, dtype and distance between rows."""
    want = _layout(found[0])
    for number, each in enumerate(found):
        if _layout(each) != want:
            raise ArgumentError(
                f"{name}[{number}]: expected shape, dtype and bytes from row to row as in {name}[0], {want}, "
                f"got {_layout(each)}"
            )


def _layout(value: torch.Tensor) -> tuple[tuple[int, ...], str, int]:
    return tuple(value.shape), checks.dtype_name(value), _row_bytes(value)


def _row_bytes(value: torch.Tensor) -> int:
    """Bytes from a row to the next of one expert's tensor."""
    if value.dim() == 0:
        return 0
    apart = value.stride(0) if value.shape[0] > 1 else prod(value.shape[1:])
    return apart * value.element_size()

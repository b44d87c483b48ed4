"""Tensors of GGUF files, as `gguf.GGUFReader` maps them into memory. The `gguf` package itself is not needed here."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from expertile.runtime.errors import ArgumentError, DtypeError
from expertile.templates import formats
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.bf16 import RowMajor

FORMATS = {"BF16": "bf16", "Q4_0": "q4_0", "Q8_0": "q8_0", "Q4_K": "q4_K", "Q6_K": "q6_K"}
"""The tensor types that can be multiplied, and the formats they are."""


class Entry(Protocol):
    """A tensor of a file: what is used of a `gguf.ReaderTensor`."""

    @property
    def name(self) -> str: ...
    @property
    def tensor_type(self) -> Any:
        """A member of `gguf.GGMLQuantizationType`."""

    @property
    def shape(self) -> Any:
        """Elements, the row first: [K, N], or [K, N, E]."""

    @property
    def data(self) -> np.ndarray:
        """The bytes, mapped."""


class Reader(Protocol):
    """What is used of a `gguf.GGUFReader`."""

    @property
    def tensors(self) -> Sequence[Entry]: ...


def tensors(reader: Reader, names: Sequence[str]) -> tuple[WeightFormat, list[torch.Tensor]]:
    """Tensors of one type, in the file's mapping: their format, and bf16 `[…, N, K]` or uint8 `[…, N, bytes of a row]`.

    Raises ArgumentError or DtypeError, naming the tensor, for names and types that are not there, for types that can't
    be multiplied or differ, and where there are fewer bytes than a shape says.
    """
    entries = [_find(reader, name) for name in names]
    if not entries:
        raise ArgumentError("name: expected the name of a tensor for each expert, got none")
    kinds = [_kind(entry) for entry in entries]
    for entry, kind in zip(entries, kinds, strict=True):
        if kind != kinds[0]:
            raise ArgumentError(
                f"{entry.name}: expected type {kinds[0]}, as {entries[0].name} has, got {kind}"
            )
    name = FORMATS[kinds[0]]
    scheme: WeightFormat = RowMajor(0) if name == "bf16" else formats.resolve(name)
    found = [_bytes(entry, scheme) for entry in entries]
    return scheme, [each.view(torch.bfloat16) if scheme.direct else each for each in found]


def _find(reader: Reader, name: object) -> Entry:
    """A file's tensor of a name."""
    entries = {entry.name: entry for entry in getattr(reader, "tensors", ())}
    if not entries:
        raise DtypeError(
            f"reader: expected a gguf.GGUFReader of a file with tensors, got {type(reader).__name__}; "
            "make one with gguf.GGUFReader(path)"
        )
    if not isinstance(name, str):
        raise DtypeError(f"name: expected the name of a tensor, got {type(name).__name__}")
    if name not in entries:
        close = get_close_matches(name, entries, n=3) or list(entries)[:3]
        raise ArgumentError(
            f"{name}: expected one of the file's {len(entries)} tensors, such as {', '.join(close)}"
        )
    if getattr(reader, "byte_order", "I") != "I":
        raise ArgumentError(f"{name}: expected a file in this machine's byte order; convert it")
    return entries[name]


def _kind(entry: Entry) -> str:
    """The name of a tensor's type, one of FORMATS."""
    kind = str(getattr(entry.tensor_type, "name", entry.tensor_type))
    if kind not in FORMATS:
        raise DtypeError(
            f"{entry.name}: expected type {', '.join(FORMATS)}, got {kind}; quantise the model to one of these"
        )
    return kind


def _bytes(entry: Entry, scheme: WeightFormat) -> torch.Tensor:
    """A tensor's memory, uint8 `[…, N, bytes of a row]`."""
    columns, *outer = (int(size) for size in entry.shape)
    rows, row = outer[::-1], scheme.code_bytes(columns)
    data, expected = entry.data, prod(rows) * row
    if data.nbytes != expected or not data.flags.c_contiguous:
        raise ArgumentError(
            f"{entry.name}: expected {expected} contiguous bytes for shape {(*rows, columns)}, got {data.nbytes}; the "
            "file may be truncated: fetch it again"
        )
    return torch.from_numpy(np.asarray(_Memory(data))).view(*rows, row)


class _Memory:
    """An array's bytes as they lie, for PyTorch, which has no read-only tensors and would warn of a read-only mapping.

    The tensor keeps this object, and with it the mapping, alive.
    """

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (data.nbytes,),
            "data": (data.ctypes.data, False),
        }

"""A text that says what a list of tensors is: how the PyTorch operator is told of `expertile.ExpertWeights`.

    [1, "int4", {"group": 32, "scale": "bfloat16"}, {"codes": null, "scales": null}]

That is the version of this encoding, a format by name with its parameters, and the parts in the order of their tensors:
null for a tensor of all experts, a number for so many tensors of an expert each.  Exported programs keep such texts.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache, lru_cache
from typing import NamedTuple

from expertile.runtime.errors import ArgumentError
from expertile.templates import formats
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.bf16 import RowMajor

VERSION = 1

_STRIDES = ("row_bytes", "scale_row_bytes")
"""Of a format's fields those that a text leaves out: the tensors say them."""


class Description(NamedTuple):
    """What a text says."""

    scheme: WeightFormat
    """Without strides."""
    parts: tuple[tuple[str, int | None], ...]
    """A part's name, and how many tensors it consists of, or None for one of all experts."""
    tensors: int
    """How many there are."""


@lru_cache(maxsize=256)
def encode(scheme: WeightFormat, parts: tuple[tuple[str, int | None], ...]) -> str:
    """The text for a format, with or without strides, and its parts as in `Description`."""
    names = [field.name for field in fields(scheme) if field.name not in _STRIDES]
    return json.dumps(
        [VERSION, scheme.name, {name: getattr(scheme, name) for name in names}, dict(parts)]
    )


@lru_cache(maxsize=256)
def decode(name: str, text: str) -> Description:
    """What a text says. Raises ArgumentError, naming the argument `name`, for one that `encode` didn't make."""
    try:
        version, kind, parameters, parts = json.loads(text)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"{name}: expected the description of expertile.ExpertWeights, got {text!r}"
        ) from None
    if version != VERSION:
        raise ArgumentError(
            f"{name}: expected a description of version {VERSION}, got {version!r}; export again with this Expertile"
        )
    try:
        tensors = sum(1 if number is None else number for number in parts.values())
        return Description(_kinds()[kind](row_bytes=0, **parameters), tuple(parts.items()), tensors)
    except (KeyError, TypeError, AttributeError):
        known = ", ".join(_kinds())
        raise ArgumentError(
            f"{name}: expected one of the formats {known} with its parameters, got {text}"
        ) from None


@cache
def _kinds() -> dict[str, type[WeightFormat]]:
    """The classes of formats that ExpertWeights can have, by name."""
    return {each.name: type(each) for each in (RowMajor(0), *formats.schemes().values())}

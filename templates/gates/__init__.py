"""Gate functions, one file each: what happens between the two projections, in fp32.

A gate is a frozen value (it is part of a kernel's spec) with a name, its parameters, whether it has a gate half, and
`emit`.  Adding one is adding a file that defines `GATE`, the gate with its usual parameters, and its name to
`_MODULES`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from expertile.templates.gates.base import Gate

__all__ = ["Gate", "by_name", "names", "resolve"]

_MODULES = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "silu_clamp", "relu2")


def names() -> tuple[str, ...]:
    """The names :func:`resolve` knows."""
    return _MODULES


@cache
def by_name(name: str) -> Gate:
    """The gate called `name`, with its usual parameters. Raises ValueError for an unknown one."""
    if name not in _MODULES:
        raise ValueError(f"gate: expected one of {', '.join(_MODULES)} or a Gate, got {name!r}")
    gate = import_module(f"expertile.templates.gates.{name}").GATE
    assert isinstance(gate, Gate)
    return gate


def resolve(gate: str | Gate) -> Gate:
    """A gate from its name or from itself. Raises ValueError or TypeError for anything else."""
    if isinstance(gate, Gate):
        return gate
    if isinstance(gate, str):
        return by_name(gate)
    raise TypeError(f"gate: expected a name or a Gate, got {type(gate).__name__}")

"""`torch.ops.expertile.fused_experts`: the layer as a PyTorch operator, so that torch.compile(fullgraph=True) keeps it.

Registered through torch.library.Library with a fake kernel (the `custom_op` decorator costs a second at first use and
9 µs a call).  Gates travel as their name and their parameters.  Weights are the tensors they consist of, with a text
that has a line for each matrix (two for a pair): empty for a plain tensor, see `descriptions` for `ExpertWeights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from expertile.runtime import descriptions, layer
from expertile.runtime.errors import ArgumentError
from expertile.runtime.matrices import LayerWeights, Matrix
from expertile.runtime.tensors import no_grad
from expertile.runtime.weights import ExpertWeights, rebuild
from expertile.templates import gates
from expertile.templates.gates import Gate

_SCHEMA = (
    "fused_experts(Tensor x, Tensor[] gate_up, Tensor[] down, Tensor topk_ids, Tensor topk_weights, "
    'Tensor[] gate_up_bias, Tensor[] down_bias, str gate="silu", float[] gate_parameters=[], '
    'bool interleaved=False, bool transposed=False, str gate_up_format="", str down_format="", '
    'str activations="bf16") -> Tensor'
)

_library = torch.library.Library("expertile", "DEF")
_library.define(_SCHEMA)


def _one(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ArgumentError(
            f"{name}: expected a list of one tensor [experts, rows, columns], got {len(tensors)}"
        )
    return tensors[0]


def _optional(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return _one(name, tensors) if tensors else None


def _matrices(name: str, tensors: Sequence[torch.Tensor], text: str) -> list[Matrix]:
    """The matrices that a list of tensors makes up."""
    lines = text.split("\n")
    if lines == [""]:
        return [_one(name, tensors)]
    counts = [descriptions.decode(f"{name}_format", line).tensors if line else 1 for line in lines]
    if sum(counts) != len(tensors):
        raise ArgumentError(
            f"{name}: expected {sum(counts)} tensors, as {name}_format says, got {len(tensors)}"
        )
    rest = iter(tensors)
    parts = [list(itertools.islice(rest, count)) for count in counts]
    return [
        rebuild(name, line, part) if line else part[0]
        for line, part in zip(lines, parts, strict=True)
    ]


def parameters(gate: Gate) -> list[float]:
    """A gate's parameters, in the order of its fields."""
    return [float(getattr(gate, field.name)) for field in fields(gate)]


@lru_cache(maxsize=256)
def gate_from(name: str, values: tuple[float, ...]) -> Gate:
    """The gate of a name with these parameters (its usual ones if none are given)."""
    gate = gates.resolve(name)
    names = [field.name for field in fields(gate)]
    if values and len(values) != len(names):
        raise ArgumentError(
            f"gate_parameters: expected {len(names)} values ({', '.join(names)}), got {len(values)}"
        )
    return replace(gate, **dict(zip(names, values, strict=False)))


def _compute(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_bias: Sequence[torch.Tensor],
    down_bias: Sequence[torch.Tensor],
    gate: str = "silu",
    gate_parameters: Sequence[float] = (),
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_format: str = "",
    down_format: str = "",
    activations: str = "bf16",
) -> torch.Tensor:
    first = _matrices("gate_up", gate_up, gate_up_format)
    second = _matrices("down", down, down_format)
    if len(second) != 1:
        raise ArgumentError(f"down_format: expected one line, got {len(second)}")
    weights = LayerWeights(
        first[0] if len(first) == 1 else tuple(first),  # type: ignore[arg-type]
        second[0],
        _optional("gate_up_bias", gate_up_bias),
        _optional("down_bias", down_bias),
        gate_from(gate, tuple(gate_parameters)),
        interleaved,
        transposed,
        activations,
    )
    return layer.run(x, weights, topk_ids, topk_weights)


def _fake(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_bias: Sequence[torch.Tensor],
    down_bias: Sequence[torch.Tensor],
    *settings: object,
    **more_settings: object,
) -> torch.Tensor:
    # A compiled graph runs the operator with autograd already off: only here can training be refused.
    for name, tensors in {
        "x": [x],
        "gate_up": gate_up,
        "down": down,
        "topk_weights": [topk_weights],
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }.items():
        for tensor in tensors:
            no_grad(name, tensor)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_library.impl("fused_experts", _compute, "CPU")
torch.library.register_fake("expertile::fused_experts", _fake, lib=_library)

OPERATOR = torch.ops.expertile.fused_experts.default
"""Takes the arguments of `_SCHEMA`."""


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, ExpertWeights, type(None)})
"""Types of arguments whose data is where `data_ptr()` says."""


def _subclassed(arguments: Sequence[object]) -> bool:
    """Whether there are subclasses of Tensor among arguments; what is no tensor at all is for the checks."""
    if _PLAIN.issuperset(map(type, arguments)):
        return False
    known = torch.Tensor, ExpertWeights, type(None)
    return all(isinstance(each, known) for each in arguments)


def fused_experts(
    x: torch.Tensor,
    weights: LayerWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """:func:`expertile.runtime.layer.run`, directly, or as a call of the operator where PyTorch must see it.

    That is while torch.compile, torch.export or a dispatch mode (fake tensors, make_fx) records, and for subclasses of
    Tensor, which may have no data at all.
    """
    gate_up = weights.gate_up
    first = gate_up if isinstance(gate_up, tuple) else (gate_up,)
    if not _seen((x, topk_ids, topk_weights, *first, *weights[1:4])):
        return layer.run(x, weights, topk_ids, topk_weights)
    gate = weights.gate
    output: torch.Tensor = OPERATOR(
        x,
        _tensors(first),
        _tensors([weights.down]),
        topk_ids,
        topk_weights,
        [] if weights.gate_up_bias is None else [weights.gate_up_bias],
        [] if weights.down_bias is None else [weights.down_bias],
        gate if isinstance(gate, str) else gate.name,
        [] if isinstance(gate, str) else parameters(gate),
        weights.interleaved,
        weights.transposed,
        _format(first),
        _format([weights.down]),
        weights.activations,
    )
    return output


def apply(
    x: torch.Tensor,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_bias: list[torch.Tensor],
    down_bias: list[torch.Tensor],
    *settings: Any,
) -> torch.Tensor:
    """What the operator gives for its arguments, by a call of it only where PyTorch must see it."""
    tensors = [x, *gate_up, *down, topk_ids, topk_weights, *gate_up_bias, *down_bias]
    call = OPERATOR if _seen(tensors) else _compute
    output: torch.Tensor = call(
        x, gate_up, down, topk_ids, topk_weights, gate_up_bias, down_bias, *settings
    )
    return output


def _seen(arguments: Sequence[object]) -> bool:
    """Whether PyTorch must see a call with these arguments."""
    return is_compiling() or is_in_torch_dispatch_mode() or _subclassed(arguments)


def _tensors(matrices: Sequence[Matrix]) -> list[torch.Tensor]:
    """All tensors of matrices; what is neither of the two is for the operator to refuse."""
    found: list[torch.Tensor] = []
    for matrix in matrices:
        found += matrix.tensors if isinstance(matrix, ExpertWeights) else [matrix]
    return found


def _format(matrices: Sequence[Matrix]) -> str:
    """What they are, as the operator takes it."""
    return "\n".join(
        matrix.description if isinstance(matrix, ExpertWeights) else "" for matrix in matrices
    )

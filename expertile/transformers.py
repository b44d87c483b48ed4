"""The adapter for Transformers: importing this module registers "expertile" as one of its experts
implementations.

    import expertile.transformers
    model.set_experts_implementation("expertile")

Transformers dispatches every experts module (`@use_experts_implementation`) to a function of that
module, the hidden states and the routing. Here it is :func:`experts_forward`: one call of
:func:`expertile.fused_experts` on the weights that the module holds at that moment. How the weights
lie and which gate is between them is read from the flags that the decorator sets, from `act_fn` and
from `_apply_gate`. A module that says anything this file does not know is refused, by name.

Experts in FP8 (`FP8Experts`) are run as they are stored. So that a model loaded on a CPU has such,
and those of gpt-oss in mxfp4, name the implementation when loading:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="expertile")
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertile import fused_experts, silu_clamp, swiglu_oai
from expertile.runtime import operator
from expertile.templates.gates import Gate, by_name

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

    _DECORATOR = inspect.signature(use_experts_implementation).parameters
    if "is_concatenated" not in _DECORATOR:  # nor does set_experts_implementation take our name
        raise ImportError("the installed version is too old")
except ImportError as error:
    raise ImportError(
        f"expertile.transformers needs Transformers 5.7 or later ({error}): "
        "pip install 'expertile[transformers]'"
    ) from error

from expertile._transformers_quantized import (
    Mxfp4ExpertsInterface,
    Stored,
    keep_experts,
    stored,
)

__all__ = ["experts_forward"]


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The sum of each token's experts, as every experts implementation of Transformers gives it.

    hidden_states is [T, H] in bf16, fp16 or fp32, top_k_index [T, k] in int32 or int64 and
    top_k_weights [T, k] in bf16, fp16 or fp32. Returns [T, H] in the dtype of hidden_states. In an
    expert-parallel module the id E, by which Transformers marks the experts of other ranks,
    contributes nothing.

    Raises NotImplementedError for a module whose settings are not supported, and whatever
    `fused_experts` raises. `torch.compile` takes the settings of a module, unlike its weights, for
    constants: changing them later changes nothing in a compiled model.
    """
    layer = _layers[_layer_number(module)]
    if module.__dict__.get("_is_expert_parallel"):
        experts: int = module.num_experts  # type: ignore[assignment]
        top_k_index = top_k_index.masked_fill(top_k_index == experts, -1)
    gate_up_bias = getattr(module, layer.first + "_bias") if layer.has_bias else None
    down_bias: Tensor | None = module.down_proj_bias if layer.has_bias else None  # type: ignore
    if layer.quantized is None:
        return fused_experts(
            hidden_states,
            getattr(module, layer.first),
            module.down_proj,  # type: ignore[arg-type]
            top_k_index,
            top_k_weights,
            gate=layer.gate,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            interleaved=layer.interleaved,
            transposed=layer.transposed,
        )
    # As the operator takes it, torch.compile sees the tensors that the module holds at that moment.
    first, down = layer.quantized
    return operator.apply(
        hidden_states,
        first.tensors(module),
        down.tensors(module),
        top_k_index,
        top_k_weights,
        [] if gate_up_bias is None else [gate_up_bias],
        [] if down_bias is None else [down_bias],
        layer.gate.name,
        layer.gate_parameters,
        layer.interleaved,
        layer.transposed,
        first.format,
        down.format,
    )


@dataclass(frozen=True)
class _Layer:
    """What the settings of a module say about each call. No tensors: a call reads those itself."""

    gate: Gate
    first: str
    """The name of the first projection: gate_up_proj, or up_proj where there is no gate half."""
    has_bias: bool
    interleaved: bool
    transposed: bool
    quantized: tuple[Stored, Stored] | None
    """How the two projections are stored if they are not plain tensors."""

    @property
    def gate_parameters(self) -> list[float]:
        """As the operator takes them."""
        return operator.parameters(self.gate)


_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
"""The flags that are understood, each with what it is in versions of Transformers without it."""

_PARAMETERS = ("alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
"""The attributes in which modules with a gate of their own keep its parameters."""

_SETTINGS = ("_apply_gate", *_FLAGS, *_PARAMETERS)

_numbers: dict[tuple[Any, ...], int] = {}
_layers: dict[int, _Layer] = {}
_next_number = itertools.count().__next__


@torch.compiler.assume_constant_result
def _layer_number(module: nn.Module) -> int:
    """The key in `_layers` of the layer that the settings of `module` describe.

    It is found by the settings themselves rather than by the module, so that nothing ever needs to
    be invalidated: a module whose settings change has another key. They come from the dictionaries
    of the module because nn.Module takes a microsecond to say that it lacks an attribute. The
    result is a number because `torch.compile` can handle that as a constant, but not an object.
    """
    attributes = module.__dict__
    activation = module._modules.get("act_fn")
    settings = (
        type(module),
        getattr(type(module), "_apply_gate", None),
        attributes.get("act_fn") if activation is None else type(activation),
        *map(attributes.get, _SETTINGS),
        *_storage(module),
    )
    number = _numbers.get(settings)
    if number is None:
        layer = _read_layer(module)
        number = _next_number()
        _layers[number] = layer
        _numbers[settings] = number
    return number


def _storage(module: nn.Module) -> tuple[Any, ...]:
    """What says how the weights of a module are stored, as far as they may be quantised."""
    parameters = module._parameters
    codes = parameters.get("gate_up_proj", parameters.get("up_proj"))
    if codes is None or codes.dtype is torch.bfloat16:
        return ()
    block = module.__dict__.get("block_size")
    found = (parameters.get("down_proj"), *map(parameters.get, _SCALES))
    dtypes = (None if tensor is None else tensor.dtype for tensor in found)
    return block and tuple(block), codes.dtype, codes.shape, *dtypes


_SCALES = ("gate_up_proj_scale_inv", "up_proj_scale_inv", "down_proj_scale_inv")


def _read_layer(module: nn.Module) -> _Layer:
    """Work out the layer. Raises NotImplementedError for a setting that is not supported."""
    flags = _read_flags(module)
    has_gate, interleaved = flags["has_gate"], not flags["is_concatenated"]
    first = "gate_up_proj" if has_gate else "up_proj"
    return _Layer(
        gate=_read_gate(module, interleaved) if has_gate else _read_ungated(module),
        first=first,
        has_bias=flags["has_bias"],
        interleaved=has_gate and interleaved,
        transposed=flags["is_transposed"],
        quantized=_read_quantized(module, first),
    )


def _read_quantized(module: nn.Module, first: str) -> tuple[Stored, Stored] | None:
    try:
        gate_up = stored(module, first, first == "gate_up_proj")
        down = stored(module, "down_proj", False)
    except ValueError as error:
        _refuse(module, str(error))
    if gate_up is None or down is None:
        return None
    return gate_up, down


def _read_flags(module: nn.Module) -> dict[str, bool]:
    flags = {name: getattr(module, name, default) for name, default in _FLAGS.items()}
    for name, value in flags.items():
        if not isinstance(value, bool):
            _refuse(module, f"{name} is {value!r}, and only True and False are known")
    if flags["has_post_expert_norm"]:
        _refuse(module, "has_post_expert_norm is True, and a norm after each expert is unsupported")
    # A later Transformers may set more flags: one at its default says that nothing is new here.
    for name, value in vars(module).items():
        if name.startswith(("has_", "is_")) and name not in _FLAGS:
            default = _DECORATOR[name].default if name in _DECORATOR else False
            if value != default:
                _refuse(module, f"{name} is {value!r}, and this flag is unknown")
    return flags


class _Recipe(NamedTuple):
    """A gate of ours, and what it makes of the gate and up projections."""

    gate: Gate
    meaning: Callable[[Tensor, Tensor], Tensor]


_ACTIVATIONS = {
    "silu": "silu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
"""Our name for each `act_fn`: a class of Transformers or PyTorch, or a function of PyTorch."""

_GATED = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}


def _read_activation(module: nn.Module) -> str:
    """Our name for the `act_fn` of `module`."""
    activation = getattr(module, "act_fn", None)
    kind = type(activation) if isinstance(activation, nn.Module) else activation
    package, name = _origin(kind)
    if package not in ("torch", "transformers") or name not in _ACTIVATIONS:
        _refuse(module, f"act_fn is {activation!r}, and this activation is unknown")
    return _ACTIVATIONS[name]


def _read_ungated(module: nn.Module) -> Gate:
    name = _read_activation(module)
    if by_name(name).gated:
        _refuse(module, f"has_gate is False and act_fn is {name}, which is only known with a gate")
    return by_name(name)


def _plain(module: nn.Module) -> _Recipe:
    name = _read_activation(module)
    if name not in _GATED:
        _refuse(module, f"has_gate is True and act_fn is {name}, which is only known without one")
    return _Recipe(by_name(name), _GATED[name])


def _clamped(limit_name: str) -> Callable[[nn.Module], _Recipe]:
    """silu_clamp, with its limit in the attribute called `limit_name`."""

    def read(module: nn.Module) -> _Recipe:
        limit = _read_number(module, limit_name)

        def meaning(gate: Tensor, up: Tensor) -> Tensor:
            return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

        return _Recipe(silu_clamp(limit=limit), meaning)

    return read


def _fp8(module: nn.Module) -> _Recipe:
    """The gate of FP8Experts, which is that of the model whose experts they replace."""
    if getattr(module, "swiglu_alpha", None) is not None:
        return _oai("swiglu_alpha", "swiglu_limit")(module)
    if getattr(module, "limit", None) is not None and _read_activation(module) == "silu":
        return _clamped("limit")(module)
    return _plain(module)


def _oai(alpha_name: str, limit_name: str) -> Callable[[nn.Module], _Recipe]:
    """swiglu_oai, with its parameters in the attributes called `alpha_name` and `limit_name`."""

    def read(module: nn.Module) -> _Recipe:
        alpha, limit = _read_number(module, alpha_name), _read_number(module, limit_name)

        def meaning(gate: Tensor, up: Tensor) -> Tensor:
            gate = gate.clamp(max=limit)
            return gate * torch.sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)

        return _Recipe(swiglu_oai(alpha=alpha, limit=limit), meaning)

    return read


_GATES: dict[str, Callable[[nn.Module], _Recipe]] = {
    "_default_apply_gate": _plain,
    "BeamExperts._apply_gate": _plain,  # in fp32 there, as always here
    "DeepseekV4Experts._apply_gate": _clamped("limit"),
    "Glm5NextTextExperts._apply_gate": _clamped("swiglu_limit"),
    "FP8Experts._apply_gate": _fp8,
    "GptOssExperts._apply_gate": _oai("alpha", "limit"),
    "HYV4Experts._apply_gate": _clamped("swiglu_limit"),
    "HYV4VLExperts._apply_gate": _clamped("swiglu_limit"),
    "MiniMaxM3VLExperts._apply_gate": _oai("swiglu_alpha", "swiglu_limit"),
    "OpenAIPrivacyFilterExperts._apply_gate": _oai("alpha", "limit"),
}
"""The gate functions of Transformers: the default and those that its models put in its place."""


def _read_gate(module: nn.Module, interleaved: bool) -> Gate:
    """The gate that `module._apply_gate` applies.

    It is known by name, and then confirmed on a grid of values: the names are those of one version
    of Transformers, and in another the gate may have changed, or its halves may lie differently.
    """
    override = vars(module).get("_apply_gate", getattr(type(module), "_apply_gate", None))
    package, name = _origin(override)
    if package != "transformers" or name not in _GATES:
        _refuse(module, f"_apply_gate is {override!r}, and this gate is unknown")
    recipe = _GATES[name](module)
    side = torch.cat([torch.linspace(-8, 8, 33), torch.tensor([-1e3, -1e2, -2e1, 2e1, 1e2, 1e3])])
    gate, up = torch.meshgrid(side.double(), side.double(), indexing="ij")
    halves = torch.stack([gate, up], dim=-1).flatten(1) if interleaved else torch.cat([gate, up], 1)
    with torch.no_grad():
        actual = module._apply_gate(halves)  # type: ignore[operator]
    expected = recipe.meaning(gate, up)
    if actual.shape != expected.shape or not torch.allclose(actual, expected, 1e-6, 1e-6):
        layout = "interleaved" if interleaved else "concatenated"
        _refuse(module, f"_apply_gate is not {recipe.gate} of {layout} gate and up projections")
    return recipe.gate


def _read_number(module: nn.Module, name: str) -> float:
    value = getattr(module, name, None)
    if not isinstance(value, int | float):
        _refuse(module, f"{name}, a parameter of its gate, is {value!r}, and must be a number")
    return float(value)


def _origin(item: Any) -> tuple[str, str]:
    """The top-level package and the qualified name of a class or a function."""
    package = str(getattr(item, "__module__", "")).partition(".")[0]
    return package, str(getattr(item, "__qualname__", ""))


def _refuse(module: nn.Module, reason: str) -> NoReturn:
    how = "such as model.set_experts_implementation('grouped_mm')"
    if any(name.endswith(("_scale_inv", "_scales")) for name in module._parameters):
        how = "when loading it: from_pretrained(..., experts_implementation='grouped_mm')"
    raise NotImplementedError(
        f"expertile cannot run {type(module).__name__}: {reason}. Choose another implementation "
        f"for this model, {how}."
    )


for _interface in (ExpertsInterface, FP8ExpertsInterface, Mxfp4ExpertsInterface):
    _interface.register("expertile", experts_forward)
keep_experts()

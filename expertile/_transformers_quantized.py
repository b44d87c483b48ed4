"""Quantised experts in Transformers: how the modules store them, and loading that keeps them.

On a CPU, Transformers dequantises FP8 and mxfp4 checkpoints to bf16 while it loads them. The quantisers here leave the
experts as they are in the checkpoint if they are to run on "expertile", and everything else to Transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from expertile.runtime import descriptions
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.ds_fp4 import DsFp4
from expertile.templates.formats.fp8 import Fp8
from expertile.templates.formats.fp8_block import Fp8Block
from expertile.templates.formats.mxfp4 import Mxfp4
from expertile.templates.formats.mxfp8 import MxFp8

# Modules --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A quantised projection of a module. No tensors: a call reads those itself."""

    codes: str
    scales: str
    """The names of its parameters."""
    format: str
    """What its tensors are, as the operator takes it."""
    half: int = 0
    """Rows after which the matrix is given as two, where gate and up have blocks of their own."""
    per_tensor: bool = False
    """Whether there is one scale for all rows."""

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The tensors themselves, and views of them."""
        codes: Tensor = getattr(module, self.codes)
        scales: Tensor = getattr(module, self.scales)
        if not self.half:
            return [codes, self._rows(scales, codes)]
        (gate, up), middle = (codes[:, : self.half], codes[:, self.half :]), scales.shape[1] // 2
        return [gate, self._rows(scales[:, :middle], gate), up, self._rows(scales[:, middle:], up)]

    def _rows(self, scales: Tensor, codes: Tensor) -> Tensor:
        return scales.expand(-1, codes.shape[1], 1) if self.per_tensor else scales


def stored(module: nn.Module, name: str, gated: bool) -> Stored | None:
    """How a module stores the projection called `name`, of gate and up if `gated`; None for a plain tensor.

    Raises ValueError with the reason if it is quantised in a way that is not known.
    """
    parameters = module._parameters
    if f"{name}_blocks" in parameters:
        return Stored(f"{name}_blocks", f"{name}_scales", _format(Mxfp4()))
    names = name, f"{name}_scale_inv"
    codes, scales = map(parameters.get, names)
    if codes is None or scales is None or codes.element_size() > 1:
        return None
    half = codes.shape[1] // 2 if gated else 0
    block = getattr(module, "block_size", None)
    dtype = str(scales.dtype).removeprefix("torch.")
    if codes.dtype is torch.int8:
        return Stored(*names, _format(DsFp4()))
    if block is None:
        return Stored(*names, _format(Fp8(scale=dtype), half), half, per_tensor=True)
    if tuple(block) == (1, 32):
        return Stored(*names, _format(MxFp8()))
    if tuple(block) == (128, 128):
        half = half if half % 128 else 0
        return Stored(*names, _format(Fp8Block(scale=dtype), half), half)
    raise ValueError(f"block_size is {tuple(block)}, and only (128, 128) and (1, 32) are known")


def _format(scheme: WeightFormat, half: int = 0) -> str:
    line = descriptions.encode(scheme, (("codes", None), ("scales", None)))
    return f"{line}\n{line}" if half else line


class Mxfp4ExpertsInterface(ExpertsInterface):
    """Implementations of :class:`Mxfp4Experts`."""

    _global_mapping: ClassVar[dict[str, Callable[..., Any]]] = {}  # type: ignore[misc]

    def get_interface(self, experts_implementation: str, default: Callable) -> Callable:
        """The implementation, or the module's own, which says that there is none."""
        return self._global_mapping.get(experts_implementation, default)


@use_experts_implementation(
    experts_interface=Mxfp4ExpertsInterface(), is_concatenated=False, has_bias=True
)
class Mxfp4Experts(nn.Module):
    """The experts of gpt-oss, with the parameters of its checkpoints, under their names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_local_experts
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self._allocate("gate_up_proj", 2 * config.intermediate_size, config.hidden_size)
        self._allocate("down_proj", config.hidden_size, config.intermediate_size)

    def _allocate(self, name: str, rows: int, columns: int) -> None:
        blocks = (self.num_experts, rows, columns // 32, 16)
        for part, shape in (("blocks", blocks), ("scales", blocks[:-1])):
            tensor = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
            self.register_parameter(f"{name}_{part}", tensor)
        self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(blocks[:2])))

    _apply_gate = GptOssExperts._apply_gate

    def forward(self, *_: Tensor) -> Tensor:
        """Called for any other implementation. Raises NotImplementedError."""
        chosen = self.config._experts_implementation  # type: ignore[union-attr]
        raise NotImplementedError(
            f"these experts were kept in mxfp4 for 'expertile', and {chosen!r} needs them in bf16: load the model with "
            f"from_pretrained(..., experts_implementation={chosen!r})"
        )


# Loading --------------------------------------------------------------------------------------------------------------


def _ours(model: nn.Module) -> bool:
    """Whether a model's experts are to run on Expertile."""
    return model.config.get_text_config()._experts_implementation == "expertile"  # type: ignore


_OTHERS = r"(?!.*\.experts$).*"
"""All modules but experts, as Transformers describes modules to leave out."""


class _Fp8Quantizer(FineGrainedFP8HfQuantizer):
    """Keeps FP8 experts where Transformers would dequantise them unasked."""

    _kept = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        asked = self.quantization_config.dequantize
        super().validate_environment(*args, **kwargs)
        self._unasked = self.quantization_config.dequantize and not asked

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        self._kept = self._unasked and _ours(model)
        if self._kept:
            config = copy.copy(self.quantization_config)
            config.dequantize = False
            skipped = [*(self.modules_to_not_convert or []), _OTHERS]
            # Transformers looks at the parameters there are: what has scales of its own is not dequantised.
            replace_with_fp8_linear(model, skipped, config, pre_quantized=True)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        if self._kept:  # such that the model says what it is, and can be saved
            skipped = self.quantization_config.modules_to_not_convert or []
            self.quantization_config.modules_to_not_convert = [*skipped, _OTHERS]
            self.quantization_config.dequantize = False
        return super().postprocess_model(model, **kwargs)


class _Mxfp4Quantizer(Mxfp4HfQuantizer):
    """Keeps mxfp4 experts where Transformers would dequantise them unasked, or run them on Triton."""

    _kept = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._asked = self.quantization_config.dequantize
        super().validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if self._asked or not self.pre_quantized or not _ours(model):
            super()._process_model_before_weight_loading(model, *args, **kwargs)
            return
        self._kept, self.quantization_config.dequantize = True, False
        skipped = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, GptOssExperts) and should_convert_module(name, skipped):
                with torch.device("meta"):
                    model.set_submodule(name, Mxfp4Experts(module.config))

    def get_weight_conversions(self) -> list[Any]:
        # Kept parameters have the names they have in the checkpoint.
        return [] if self._kept else super().get_weight_conversions()


def keep_experts() -> None:
    """Make Transformers load with the quantisers above, where it can dequantise a part of a model only.

    That it does by the parameters there are; versions before that know a model's `dequantize`, and do that as ever.
    """
    if hasattr(HfQuantizer, "serialized_names"):
        AUTO_QUANTIZER_MAPPING.update(fp8=_Fp8Quantizer, mxfp8=_Fp8Quantizer, mxfp4=_Mxfp4Quantizer)

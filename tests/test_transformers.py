"""The Transformers adapter: small models built from configurations, on the real kernels."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expertile

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="tests models of Transformers 5.24"
)

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

import expertile.transformers as adapter  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 64, 48

# Twice to four times what is seen. Eager rounds to bf16 after every operation.
LOGITS_BOUND = 3e-2
"""Relative Frobenius error of logits against eager, with the same bf16 weights and routing."""
LAYER_BOUND = 5e-3
"""Relative Frobenius error of one layer against eager in fp32, with the same weights."""


@pytest.fixture(autouse=True)
def _reproducible_inference() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# Models ----------------------------------------------------------------------------------------

_COMMON = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # at the usual 0.02, so narrow an expert layer hardly moves a logit
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_DEEPSEEK_V3 = {
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "head_dim": 16},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "olmoe": ("OlmoeConfig", {"num_experts": EXPERTS}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK_V3),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "head_dim": 16}),
}


def _model(name: str) -> Any:
    """A bf16 model of two layers with random weights, its experts still eager."""
    config_class, options = CONFIGS[name]
    config = getattr(transformers, config_class)(**_COMMON | options)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    )
    return model.eval()


def _experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "has_gate")]


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return _model(request.param)


class _Routing:
    """Records which experts each layer is given, and gives it the same ones later.

    A rounding difference can swap two experts with almost the same score, which no bound on the
    error of the logits could tell from a fault.
    """

    def __init__(self, model: nn.Module) -> None:
        self.recorded: dict[nn.Module, tuple[Tensor, ...]] = {}
        for module in _experts_of(model):
            module.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_states, *routing = args
        return hidden_states, *self.recorded.setdefault(module, tuple(routing))


def test_logits_agree_with_eager_and_kernels_ran(model: Any) -> None:
    _Routing(model)
    tokens = torch.randint(0, 96, (2, 9))
    expected = model(tokens).logits
    model.set_experts_implementation("expertile")
    before = expertile.calls()
    actual = model(tokens).logits
    assert expertile.calls() - before == len(_experts_of(model))
    assert actual.dtype == expected.dtype
    assert _relative_error(actual, expected) <= LOGITS_BOUND
    for module in _experts_of(model):
        module.down_proj.zero_()
    without_experts = model(tokens).logits
    assert _relative_error(without_experts, expected) > 10 * LOGITS_BOUND


def test_generates(model: Any) -> None:
    model.set_experts_implementation("expertile")
    before = expertile.calls()
    prompt = torch.randint(0, 96, (2, 5))
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
    )
    assert tokens.shape == (2, 9)
    forwards = 4  # the prompt gives the first new token
    assert expertile.calls() - before == len(_experts_of(model)) * forwards


def test_gpt_oss_is_transposed_interleaved_and_biased() -> None:
    experts = _experts_of(_model("gpt_oss"))[0]
    layer = _layer(experts)
    assert layer.transposed
    assert layer.interleaved
    assert layer.has_bias
    assert layer.gate == expertile.swiglu_oai(alpha=1.702, limit=7.0)


# Experts modules -------------------------------------------------------------------------------


def _inputs(tokens: int = 7, hidden: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """hidden_states, top_k_index and top_k_weights as the routers of most models give them."""
    scores = torch.rand(tokens, EXPERTS).softmax(-1)
    weights, ids = scores.topk(TOP_K)
    return torch.randn(tokens, HIDDEN).to(hidden), ids, weights


def _randomise(module: Any) -> Any:
    """bf16 weights at which the gate sees both of its arms and its limits."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(torch.bfloat16)


def _config(**options: Any) -> Any:
    """What the experts modules of Transformers read from their configurations."""
    settings = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "moe_num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "moe_latent_size": None,
        "_experts_implementation": "eager",
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_hidden_act": "relu2",
        "swiglu_alpha": 1.5,
        "swiglu_limit": 2.0,
    }
    return SimpleNamespace(**settings | options)


def _experts(model: str, name: str, **options: Any) -> Any:
    """The experts module called `name` of a model of Transformers, randomised."""
    try:
        source = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError:
        pytest.skip(f"this Transformers has no {model}")
    return _randomise(getattr(source, name)(_config(**options)))


def _qwen3(**options: Any) -> Any:
    return _experts("qwen3_moe", "Qwen3MoeExperts", **options)


OAI = expertile.swiglu_oai(alpha=1.5, limit=2.0)
CLAMP = expertile.silu_clamp(limit=2.0)
MODULES: dict[str, tuple[str | expertile.Gate, Callable[[], Any]]] = {
    "silu": ("silu", _qwen3),
    "swish": ("silu", lambda: _qwen3(hidden_act="swish")),
    "silu function": ("silu", lambda: _experts("lfm2_moe", "Lfm2MoeExperts")),
    "gelu": ("gelu", lambda: _qwen3(hidden_act="gelu")),
    "gelu_new": ("gelu_tanh", lambda: _qwen3(hidden_act="gelu_new")),
    "gelu_fast": ("gelu_tanh", lambda: _qwen3(hidden_act="gelu_fast")),
    "gelu tanh": ("gelu_tanh", lambda: _experts("gemma4", "Gemma4TextExperts")),
    "ungated": ("relu2", lambda: _experts("nemotron_h", "NemotronHExperts")),
    "transposed": ("silu", lambda: _experts("aria", "AriaExperts")),
    "gate in fp32": ("silu", lambda: _experts("beam", "BeamExperts")),
    "oai interleaved": (OAI, lambda: _experts("gpt_oss", "GptOssExperts")),
    "oai concatenated": (OAI, lambda: _experts("minimax_m3_vl", "MiniMaxM3VLExperts")),
    "oai transposed": (
        OAI,
        lambda: _experts("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    ),
    "clamp": (CLAMP, lambda: _experts("deepseek_v4", "DeepseekV4Experts")),
    "clamp in glm5_next": (CLAMP, lambda: _experts("glm5_next", "Glm5NextTextExperts")),
    "clamp in hy_v4": (CLAMP, lambda: _experts("hy_v4", "HYV4Experts")),
    "clamp in hy_v4_vl": (CLAMP, lambda: _experts("hy_v4_vl", "HYV4VLExperts")),
}


def _layer(module: Any) -> Any:
    """What the adapter reads from the settings of `module`."""
    return adapter._layers[adapter._layer_number(module)]


def _eager_in_fp32(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    exact = copy.deepcopy(module).float()
    hidden_states, ids, weights = inputs
    exact.config._experts_implementation = "eager"
    return exact(hidden_states.float(), ids, weights.float())


def _run(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    module.config._experts_implementation = "expertile"
    return module(*inputs)


@pytest.mark.parametrize(("gate", "build"), MODULES.values(), ids=MODULES)
def test_layer_agrees_with_eager(gate: str | expertile.Gate, build: Callable[[], Any]) -> None:
    module, inputs = build(), _inputs()
    found = _layer(module).gate
    assert gate in (found, found.name)
    before = expertile.calls()
    actual = _run(module, inputs)
    assert expertile.calls() - before == 1
    assert actual.dtype == torch.bfloat16
    assert _relative_error(actual, _eager_in_fp32(module, inputs)) <= LAYER_BOUND


@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32])
def test_returns_the_dtype_of_the_hidden_states(hidden: torch.dtype, weights: torch.dtype) -> None:
    module = _qwen3()
    states, ids, router_weights = _inputs(hidden=hidden)
    inputs = (states.bfloat16().to(hidden), ids, router_weights.to(weights))
    actual = _run(module, inputs)
    assert actual.dtype == hidden
    assert actual.shape == states.shape
    assert _relative_error(actual, _eager_in_fp32(module, inputs)) <= LAYER_BOUND


def test_no_tokens() -> None:
    assert _run(_qwen3(), _inputs(tokens=0)).shape == (0, HIDDEN)


def test_weights_in_fp32_are_refused_with_the_way_to_convert_them() -> None:
    with pytest.raises(expertile.ExpertileError, match="bfloat16"):
        _run(_qwen3().float(), _inputs())


def _new_values(parameter: Tensor) -> Tensor:
    return torch.randn_like(parameter) * 0.3


def _set_in_place(module: Any) -> None:
    module.gate_up_proj.copy_(_new_values(module.gate_up_proj))


def _set_data(module: Any) -> None:
    module.gate_up_proj.data = _new_values(module.gate_up_proj)


def _set_parameter(module: Any) -> None:
    module.down_proj = nn.Parameter(_new_values(module.down_proj))


@pytest.mark.parametrize("change", [_set_in_place, _set_data, _set_parameter])
@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
def test_changed_weights_are_seen(change: Callable[[Any], None], compiled: bool) -> None:
    module, inputs = _qwen3(), _inputs()
    module.config._experts_implementation = "expertile"
    call = _compiled(module) if compiled else module
    before = call(*inputs)
    change(module)
    after = call(*inputs)
    assert not torch.equal(before, after)
    assert torch.equal(after, _run(module, inputs))


def test_changed_settings_are_seen() -> None:
    module, inputs = _experts("gpt_oss", "GptOssExperts"), _inputs()
    before = _run(module, inputs)
    module.limit = 0.5
    after = _run(module, inputs)
    assert _relative_error(before, after) > LAYER_BOUND
    assert _relative_error(after, _eager_in_fp32(module, inputs)) <= LAYER_BOUND


def test_a_copied_module_runs_on_its_own_weights() -> None:
    module, inputs = _qwen3(), _inputs()
    before = _run(module, inputs)
    twin = copy.deepcopy(module)
    twin.down_proj.zero_()
    assert torch.equal(_run(twin, inputs), torch.zeros_like(before))
    assert torch.equal(_run(module, inputs), before)


# Expert parallelism ----------------------------------------------------------------------------


def _with_sentinels() -> tuple[Tensor, ...]:
    """Routing as a rank of an expert-parallel group gets it: id E, weight 0 for absent experts."""
    hidden_states, ids, weights = _inputs()
    ids[0] = EXPERTS
    ids[1:, 0] = EXPERTS
    return hidden_states, ids, weights.masked_fill(ids == EXPERTS, 0)


def test_sentinels_of_an_expert_parallel_module_contribute_nothing() -> None:
    module, inputs = _qwen3(), _with_sentinels()
    module._is_expert_parallel = True
    hidden_states, ids, weights = inputs
    given = ids.clone()
    weights = weights.masked_fill(ids == EXPERTS, torch.nan)
    actual = _run(module, (hidden_states, ids, weights))
    assert torch.equal(ids, given)
    assert torch.equal(actual[0], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert _relative_error(actual, _eager_in_fp32(module, inputs)) <= LAYER_BOUND
    assert torch.equal(_compiled(module)(hidden_states, ids, weights), actual)


def test_sentinels_are_errors_elsewhere() -> None:
    with pytest.raises(expertile.ExpertileError, match=str(EXPERTS)):
        _run(_qwen3(), _with_sentinels())


def test_ids_beyond_the_sentinel_are_errors() -> None:
    module = _qwen3()
    module._is_expert_parallel = True
    hidden_states, ids, weights = _inputs()
    ids[0, 0] = EXPERTS + 1
    with pytest.raises(expertile.ExpertileError, match=str(EXPERTS + 1)):
        _run(module, (hidden_states, ids, weights))


# torch.compile ---------------------------------------------------------------------------------


def _compiled(module: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


@pytest.mark.parametrize("cold", [True, False], ids=["first call", "after a call"])
@pytest.mark.parametrize("name", ["silu", "ungated", "oai interleaved", "clamp"])
def test_layer_compiles_into_one_graph(name: str, cold: bool) -> None:
    module, inputs = MODULES[name][1](), _inputs()
    expected = _run(module, inputs)
    if cold:
        adapter._numbers.clear()
        adapter._layers.clear()
    compiled = _compiled(module)
    before = expertile.calls()
    assert torch.equal(compiled(*inputs), expected)
    assert expertile.calls() - before == 1
    longer = _inputs(tokens=11)
    assert torch.equal(compiled(*longer), _run(module, longer))


def test_model_compiles_into_one_graph() -> None:
    model = _model("qwen3_moe")
    model.set_experts_implementation("expertile")
    tokens = torch.randint(0, 96, (2, 9))
    expected = model(tokens, use_cache=False).logits
    actual = _compiled(model)(tokens, use_cache=False).logits
    assert torch.equal(actual, expected)


# Quantised experts -----------------------------------------------------------------------------


@use_experts_implementation(
    experts_interface=sys.modules[FP8Experts.__module__].ALL_FP8_EXPERTS_FUNCTIONS
)
class _Fp8Experts(FP8Experts):
    """The class as Transformers decorates it when it loads a model."""


WIDE = {"hidden_size": 256, "moe_intermediate_size": 128}
PLAIN = {"swiglu_alpha": None, "swiglu_limit": None}
BLOCKS = {"block_size": [128, 128]}
FP8: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks": (BLOCKS, WIDE | PLAIN),
    "blocks of gate and up apart": (BLOCKS, WIDE | PLAIN | {"moe_intermediate_size": 64}),
    "blocks with e8m0": (BLOCKS | {"scale_fmt": "ue8m0"}, WIDE | PLAIN),
    "a scale for each tensor": ({"block_size": None}, WIDE | PLAIN),
    "static activations": (BLOCKS | {"activation_scheme": "static"}, WIDE | PLAIN),
    "mxfp8": ({"block_size": [1, 32], "scale_fmt": "ue8m0"}, WIDE | PLAIN),
    "fp4": (BLOCKS | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}, WIDE | PLAIN),
    "oai": (BLOCKS, WIDE),
    "clamp": (BLOCKS, WIDE | {"swiglu_alpha": None}),
    "gelu": (BLOCKS, WIDE | PLAIN | {"hidden_activation": "gelu_pytorch_tanh"}),
}
"""What FP8Experts is told, and the configuration."""


def _fp8(name: str = "blocks", **more: Any) -> Any:
    """FP8 experts with random codes and scales."""
    options, settings = FP8[name]
    settings = {"hidden_activation": "silu"} | settings
    module = _Fp8Experts(_config(**settings), **options | more)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        if "scale" in _name_of(module, parameter):
            powers = torch.randint(-6, -3, parameter.shape).float().exp2()
            parameter.copy_(powers * (1.0 if parameter.dtype.itemsize == 1 else 1.3))
        elif parameter.dtype == torch.int8:
            parameter.copy_(torch.randint(-128, 128, parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape))
    return module


def _name_of(module: nn.Module, parameter: Tensor) -> str:
    return next(name for name, each in module.named_parameters() if each is parameter)


def _fp8_inputs(module: Any) -> tuple[Tensor, ...]:
    _, ids, weights = _inputs()
    return torch.randn(len(ids), module.hidden_dim).bfloat16(), ids, weights


def _dequantised(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Eager in fp32, on what Transformers makes of the weights."""
    exact, read = copy.deepcopy(module), Fp8Dequantize(None)._dequantize_one
    for name in ("gate_up_proj", "down_proj"):
        values = read(getattr(module, name), getattr(module, f"{name}_scale_inv"), torch.float32)
        setattr(exact, name, nn.Parameter(values, requires_grad=False))
    exact.config._experts_implementation = "eager"
    hidden_states, ids, weights = inputs
    return exact(hidden_states.float(), ids, weights.float())


@pytest.mark.parametrize("name", FP8)
def test_fp8_experts_agree_with_dequantised_ones(name: str) -> None:
    module = _fp8(name)
    inputs = _fp8_inputs(module)
    before = expertile.calls()
    actual = _run(module, inputs)
    assert expertile.calls() - before == 1
    assert actual.dtype == torch.bfloat16
    assert _relative_error(actual, _dequantised(module, inputs)) <= LAYER_BOUND


def test_gates_of_fp8_experts() -> None:
    assert _layer(_fp8("oai")).gate == OAI
    assert _layer(_fp8("clamp")).gate == CLAMP
    assert _layer(_fp8("gelu")).gate.name == "gelu_tanh"


def _change_scales(module: Any) -> None:
    module.down_proj_scale_inv.mul_(-2)


def _set_scales(module: Any) -> None:
    module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv * 3


def _set_codes(module: Any) -> None:
    module.down_proj = nn.Parameter(module.down_proj.flip(0), requires_grad=False)


@pytest.mark.parametrize("change", [_change_scales, _set_scales, _set_codes])
@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
def test_changed_fp8_weights_are_seen(change: Callable[[Any], None], compiled: bool) -> None:
    module = _fp8("blocks of gate and up apart")
    module.config._experts_implementation = "expertile"
    inputs = _fp8_inputs(module)
    call = _compiled(module) if compiled else module
    before = call(*inputs)
    change(module)
    after = call(*inputs)
    assert not torch.equal(before, after)
    assert _relative_error(after, _dequantised(module, inputs)) <= LAYER_BOUND


@pytest.mark.parametrize("name", ["a scale for each tensor", "fp4", "oai"])
def test_quantised_layer_compiles_into_one_graph(name: str) -> None:
    module = _fp8(name)
    inputs = _fp8_inputs(module)
    expected = _run(module, inputs)
    adapter._numbers.clear()
    adapter._layers.clear()
    assert torch.equal(_compiled(module)(*inputs), expected)


def test_fp8_experts_of_an_expert_parallel_module() -> None:
    module = _fp8()
    hidden_states, ids, weights = _fp8_inputs(module)
    module._is_expert_parallel = True
    actual = _run(module, (hidden_states, ids.masked_fill(ids == 2, EXPERTS), weights))
    expected = _run(module, (hidden_states, ids, weights.masked_fill(ids == 2, 0)))
    assert torch.equal(actual, expected)


def test_quantised_training_is_refused() -> None:
    module = _fp8()
    module.gate_up_proj_scale_inv.requires_grad_()
    with (
        torch.enable_grad(),
        pytest.raises(expertile.ArgumentError, match="gate_up scales: requires grad"),
    ):
        _run(module, _fp8_inputs(module))


def test_unknown_blocks_are_refused_with_the_way_to_load_them() -> None:
    module = _fp8(block_size=[64, 64])
    with pytest.raises(NotImplementedError, match=r"block_size is \(64, 64\).*from_pretrained"):
        _run(module, _fp8_inputs(module))


def test_softcapped_gate_is_refused() -> None:
    module = _fp8()
    _run(module, _fp8_inputs(module))
    module.gate_softcap = module.up_softcap = 5.0
    with pytest.raises(NotImplementedError, match="_apply_gate is not Silu"):
        _run(module, _fp8_inputs(module))


def test_blocks_that_gate_and_up_share_are_refused_by_name() -> None:
    module = _fp8()
    module.gate_up_proj_scale_inv = nn.Parameter(torch.ones(EXPERTS, 3, 2), requires_grad=False)
    with pytest.raises(
        expertile.ArgumentError, match=r"gate_up scales: expected shape \(8, 2, 2\)"
    ):
        _run(module, _fp8_inputs(module))


# Loading quantised checkpoints -----------------------------------------------------------------

NARROW = {
    "head_dim": 32,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
}


def _write(
    path: Path, name: str, quantise: Callable[..., dict[str, Tensor]], **config: Any
) -> None:
    """A checkpoint of a small model, its tensors replaced by what `quantise` makes of each."""
    config_class, options = CONFIGS[name]
    settings = getattr(transformers, config_class)(**_COMMON | options | NARROW)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = [quantise(*item) for item in load_file(file).items()]
    merged = {name: value.contiguous() for some in tensors for name, value in some.items()}
    save_file(merged, file, {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"quantization_config": config}))


def _to_blocks(name: str, value: Tensor) -> dict[str, Tensor]:
    """FP8 with a scale for 128 × 128 elements, as in checkpoints of DeepSeek-V3 and Qwen3."""
    if not name.endswith("_proj.weight"):
        return {name: value}
    blocks = value.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def _to_mxfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    """Blocks and scales, as in the checkpoints of gpt-oss; random ones, for values do not matter here."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    experts, columns, rows = value.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(123, 126, blocks.shape[:-1], dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, **options
    ).eval()


def _agrees_with_dequantised(model: Any, eager: Any) -> None:
    _Routing(model).recorded = routing = {}
    tokens = torch.randint(0, 96, (2, 9))
    before = expertile.calls()
    actual = model(tokens).logits
    experts = _experts_of(model)
    assert expertile.calls() - before == len(experts)
    for module, theirs in zip(experts, _experts_of(eager), strict=True):
        chosen = routing[module]
        theirs.register_forward_pre_hook(lambda _, args, chosen=chosen: (args[0], *chosen))
    assert _relative_error(actual, eager(tokens).logits) <= LOGITS_BOUND


@pytest.fixture
def fp8_checkpoint(tmp_path: Path) -> Path:
    config = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    _write(tmp_path, "qwen3_moe", _to_blocks, quant_method="fp8", **config)
    return tmp_path


@pytest.fixture
def mxfp4_checkpoint(tmp_path: Path) -> Path:
    _write(tmp_path, "gpt_oss", _to_mxfp4, quant_method="mxfp4")
    return tmp_path


def test_experts_of_an_fp8_checkpoint_are_kept(fp8_checkpoint: Path) -> None:
    model = _load(fp8_checkpoint, experts_implementation="expertile")
    stored = load_file(fp8_checkpoint / "model.safetensors")
    for number, experts in enumerate(_experts_of(model)):
        name = f"model.layers.{number}.mlp.experts.5.down_proj.weight"
        assert experts.down_proj.dtype == torch.float8_e4m3fn
        assert torch.equal(experts.down_proj[5].view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(experts.down_proj_scale_inv[5], stored[f"{name}_scale_inv"])
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    _agrees_with_dequantised(model, _load(fp8_checkpoint, experts_implementation="eager"))


def test_experts_of_an_mxfp4_checkpoint_are_kept(mxfp4_checkpoint: Path) -> None:
    model = _load(mxfp4_checkpoint, experts_implementation="expertile")
    stored = load_file(mxfp4_checkpoint / "model.safetensors")
    for number, experts in enumerate(_experts_of(model)):
        for name, parameter in experts.named_parameters():
            assert torch.equal(parameter, stored[f"model.layers.{number}.mlp.experts.{name}"])
        assert _layer(experts).gate == expertile.swiglu_oai(alpha=1.702, limit=7.0)
        assert _layer(experts).interleaved
    _agrees_with_dequantised(model, _load(mxfp4_checkpoint, experts_implementation="eager"))


@pytest.mark.parametrize("checkpoint", ["fp8_checkpoint", "mxfp4_checkpoint"])
def test_model_is_saved_as_it_was_loaded(
    checkpoint: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = _load(request.getfixturevalue(checkpoint), experts_implementation="expertile")
    model.save_pretrained(tmp_path / "saved")
    again = _load(tmp_path / "saved", experts_implementation="expertile").state_dict()
    for name, parameter in model.state_dict().items():
        assert parameter.dtype == again[name].dtype
        assert torch.equal(parameter.view(torch.uint8), again[name].view(torch.uint8))


def test_mxfp4_experts_run_on_nothing_else(mxfp4_checkpoint: Path) -> None:
    model = _load(mxfp4_checkpoint, experts_implementation="expertile")
    for chosen in ("eager", "grouped_mm"):
        model.set_experts_implementation(chosen)
        with pytest.raises(NotImplementedError, match=f"kept in mxfp4.*implementation='{chosen}'"):
            model(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("checkpoint", ["fp8_checkpoint", "mxfp4_checkpoint"])
def test_experts_are_dequantised_where_that_is_asked_for(
    checkpoint: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(checkpoint)
    kind = {"fp8": transformers.FineGrainedFP8Config, "mxfp": transformers.Mxfp4Config}
    asked = kind[checkpoint.partition("_")[0].rstrip("4")](dequantize=True)
    model = _load(path, experts_implementation="expertile", quantization_config=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    before = expertile.calls()
    model(torch.tensor([[1, 2, 3]]))
    assert expertile.calls() > before


def test_unpacking_of_mxfp4_is_that_of_transformers() -> None:
    """Transformers' own dequantisation of a module's blocks, in the same module unquantised."""
    from expertile._transformers_quantized import Mxfp4Experts

    config = _config(intermediate_size=64)
    module = Mxfp4Experts(config)
    exact = _experts("gpt_oss", "GptOssExperts", intermediate_size=64).float()
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales")
        blocks.copy_(torch.randint(0, 256, blocks.shape))
        scales.copy_(torch.randint(121, 124, scales.shape))
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(exact, name).copy_(values)
        getattr(module, f"{name}_bias").copy_(getattr(exact, f"{name}_bias"))
    inputs = _inputs()
    assert _relative_error(_run(module, inputs), _eager_in_fp32(exact, inputs)) <= LAYER_BOUND


# Refusals --------------------------------------------------------------------------------------


def _refused(module: Any, *, naming: str) -> None:
    with pytest.raises(NotImplementedError, match=naming) as caught:
        _run(module, _inputs())
    assert type(module).__name__ in str(caught.value)
    assert "set_experts_implementation" in str(caught.value)


@pytest.mark.parametrize(
    "flag", ["has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"]
)
def test_unknown_values_of_flags_are_refused(flag: str) -> None:
    module = _qwen3()
    _run(module, _inputs())
    setattr(module, flag, "rotated")
    _refused(module, naming=f"{flag} is 'rotated'")


def test_post_expert_norm_is_refused() -> None:
    module = _qwen3()
    module.has_post_expert_norm = True
    _refused(module, naming="has_post_expert_norm is True")


@pytest.mark.parametrize("flag", ["has_shared_scale", "is_blocked"])
def test_unknown_flags_are_refused_unless_they_say_nothing(flag: str) -> None:
    class NewExperts(type(_qwen3())):  # type: ignore[misc]
        """A class that no call has been made of."""

    module = _randomise(NewExperts(_config()))
    setattr(module, flag, True)
    _refused(module, naming=f"{flag} is True")
    setattr(module, flag, False)
    _run(module, _inputs())


def test_wrongly_flagged_layout_is_refused() -> None:
    module = _qwen3()
    module.is_concatenated = False
    _refused(module, naming="_apply_gate is not Silu.* of interleaved")


@pytest.mark.parametrize("activation", ["mish", "quick_gelu", "relu", "tanh", "relu2"])
def test_unknown_activations_are_refused(activation: str) -> None:
    module = _qwen3(hidden_act=activation)
    _refused(module, naming="act_fn is")


def test_activation_changed_after_a_call_is_refused() -> None:
    module = _qwen3()
    _run(module, _inputs())
    module.act_fn = ACT2FN["mish"]
    _refused(module, naming="MishActivation")


def test_subclassed_activation_is_refused() -> None:
    class ScaledSiLU(nn.SiLU):
        """Another function under a known base."""

    module = _qwen3()
    module.act_fn = ScaledSiLU()
    _refused(module, naming="ScaledSiLU")


def test_known_activation_without_gate_is_refused() -> None:
    _refused(_experts("nemotron_h", "NemotronHExperts", mlp_hidden_act="silu"), naming="has_gate")


def test_override_of_the_gate_in_a_class_is_refused() -> None:
    @use_experts_implementation
    class OwnGateExperts(type(_qwen3())):  # type: ignore[misc]
        """Overrides what Transformers calls between the projections."""

        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

    _refused(_randomise(OwnGateExperts(_config())), naming=r"_apply_gate.*OwnGateExperts")


def test_override_of_the_gate_in_a_module_is_refused() -> None:
    module = _qwen3()
    _run(module, _inputs())
    module._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    _refused(module, naming="_apply_gate is <function")


def test_known_gate_that_changed_its_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _experts("gpt_oss", "GptOssExperts")
    known = type(module)._apply_gate

    def later_version(self: Any, gate_up: Tensor) -> Tensor:
        return known(self, gate_up) * 1.01

    later_version.__module__, later_version.__qualname__ = known.__module__, known.__qualname__
    monkeypatch.setattr(type(module), "_apply_gate", later_version)
    _refused(module, naming="_apply_gate is not SwigluOai")


def test_gate_without_its_limit_is_refused() -> None:
    module = _experts("gpt_oss", "GptOssExperts")
    module.limit = None
    _refused(module, naming="limit.* is None")


# Import ----------------------------------------------------------------------------------------


WITHOUT = "import sys; sys.modules['transformers'] = None"
TOO_OLD = "from transformers.integrations import moe; moe.use_experts_implementation = lambda *_: 0"


@pytest.mark.parametrize("before", [WITHOUT, TOO_OLD], ids=["without", "too old"])
def test_import_without_transformers_names_the_extra(before: str) -> None:
    code = before + "; import expertile.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ImportError: expertile.transformers needs Transformers 5.7" in result.stderr
    assert "pip install 'expertile[transformers]'" in result.stderr

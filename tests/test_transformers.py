"""The Transformers adapter: small models built from configurations, on the real kernels."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import expertile

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="tests models of Transformers 5.24"
)

from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

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
    return SimpleNamespace(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        moe_num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        moe_latent_size=None,
        _experts_implementation="eager",
        **{
            "hidden_act": "silu",
            "hidden_activation": "gelu_pytorch_tanh",
            "mlp_hidden_act": "relu2",
            "swiglu_alpha": 1.5,
            "swiglu_limit": 2.0,
        }
        | options,
    )


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

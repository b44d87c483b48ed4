"""`expertile demo`: a mixture-of-experts model in Transformers generates text with three experts implementations.

The model has the shape of Qwen3-30B-A3B, but few of its 48 layers, a small vocabulary (so that the experts are about as
large a part of the work as in the whole model) and random weights.  For the agreement each implementation is fed the
tokens that `eager` chose, all at once, and one by one after the prompt: greedy texts of a random model drift apart at
the first near-tie, and then nothing could be compared.  For the speed each generates greedily, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import expertile
from expertile.codegen import isa as isas
from expertile.codegen.cpu import model_name
from expertile.runtime.errors import ExpertileError

IMPLEMENTATIONS = ("eager", "grouped_mm", "expertile")
"""The first is what the others are compared with."""

LARGEST_ERROR = 3e-2
LEAST_TOP1 = 0.90
"""What counts as agreement with `eager`: the relative Frobenius error of the logits, and the share of positions with
the same most likely token. All three round to bf16, in different places. Over prompts of 192 tokens through 1, 2 and 4
layers, grouped_mm came to errors of 0.003 to 0.015 and shares of 95 to 100 %, and Expertile to the same, mostly from
tokens for which a near-tie in a router falls the other way. With one of eight experts left out it is 0.23 and 59 %."""

_VOCABULARY = 8192
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_SPREAD = 0.02  # of the weights, as Qwen3 is initialised
_BLOCK = 1 << 25  # elements, more than the largest matrix has


@dataclass(frozen=True)
class Settings:
    """How much to run: layers, experts in each, tokens of the prompt, tokens to generate, timed rounds."""

    layers: int
    experts: int
    prompt: int
    tokens: int
    rounds: int


def run(settings: Settings, progress: Console) -> dict[str, Any]:
    """Build the model and run it; the findings as JSON takes them. Progress goes to the console.

    Raises ExpertileError if Transformers is missing or too old, or runs without calling Expertile.
    """
    _require_transformers()
    names = IMPLEMENTATIONS
    with _steps(progress, 2 + len(names) * (1 + settings.rounds)) as step, torch.inference_mode():
        step("building the model")
        model = _build(settings)
        experts = _Stopwatch(layer.mlp.experts for layer in model.model.layers)
        prompt = torch.randint(_VOCABULARY, (1, settings.prompt), generator=_random(1))
        step(f"{names[0]}: text")
        model.set_experts_implementation(names[0])
        text = _generate(model, prompt, settings.tokens).sequences
        logits = {}
        for name in names:
            step(f"{name}: logits")
            model.set_experts_implementation(name)
            before = expertile.calls()
            logits[name] = _forced_logits(model, text, settings.prompt)
            if name == "expertile" and expertile.calls() == before:
                raise ExpertileError("the model ran with 'expertile' and did not call it")
        times: dict[str, list[_Times]] = {name: [] for name in names}
        for number in range(settings.rounds):
            first = number % len(names)  # rotated, so that a drift of the machine hits all alike
            for name in names[first:] + names[:first]:
                step(f"{name}: round {number + 1} of {settings.rounds}")
                model.set_experts_implementation(name)
                times[name].append(_time(model, prompt, settings.tokens, experts))
    return _report(settings, times, logits)


def _require_transformers() -> None:
    try:
        import expertile.transformers  # noqa: F401  (registers the implementation)
    except ImportError as error:
        raise ExpertileError(str(error)) from error


@contextmanager
def _steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar, and the function that announces the next step."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(description: str) -> None:
            bar.update(task, description=description)
            bar.advance(task)

        yield step


# The model ----------------------------------------------------------------------------------------


def _build(settings: Settings) -> Any:
    """The model in bf16. Its weights come from one block of normal numbers, each matrix from another place in it:
    drawing them all would take longer than the whole demo."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.initialization import no_init_weights

    config = Qwen3MoeConfig(
        **_SHAPE, num_hidden_layers=settings.layers, num_experts=settings.experts
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    random = _random(0)
    block = torch.empty(_BLOCK, dtype=torch.bfloat16).normal_(0, _SPREAD, generator=random)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)  # of a norm
            continue
        for matrix in parameter if parameter.dim() == 3 else [parameter]:
            size = matrix.numel()
            start = int(torch.randint(_BLOCK - size, (), generator=random))
            matrix.copy_(block[start : start + size].view_as(matrix))
    return model


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Generation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """Seconds of one generation: until the first token, for each further one, and in the experts of those."""

    prefill: float
    token: float
    experts: float


class _Stopwatch:
    """Adds up the seconds in the calls of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.seconds = 0.0
        self._started = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started


class _Streamer:
    """Notes the time, and that in the experts so far, whenever `generate` passes it the prompt or a token."""

    def __init__(self, experts: _Stopwatch) -> None:
        self._experts = experts
        self.times: list[tuple[float, float]] = []

    def put(self, value: Tensor) -> None:
        self.times.append((time.perf_counter(), self._experts.seconds))

    def end(self) -> None:
        """Nothing is left to do."""


def _generate(model: Any, prompt: Tensor, tokens: int, **options: Any) -> Any:
    """Greedy, exactly `tokens` tokens."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def _time(model: Any, prompt: Tensor, tokens: int, experts: _Stopwatch) -> _Times:
    streamer = _Streamer(experts)
    _generate(model, prompt, tokens, streamer=streamer)
    (start, _), (first, experts_first), *_, (last, experts_last) = streamer.times
    return _Times(
        prefill=first - start,
        token=(last - first) / (tokens - 1),
        experts=(experts_last - experts_first) / (tokens - 1),
    )


def _forced_logits(model: Any, text: Tensor, prompt: int) -> Tensor:
    """Logits `[n, vocabulary]` over `text`: of all positions at once, then of the generated ones one at a time."""
    tokens = text.shape[1] - prompt
    stepwise = _generate(
        model,
        text[:, :prompt],
        tokens,
        prefix_allowed_tokens_fn=lambda _, so_far: [int(text[0, len(so_far)])],
        output_logits=True,
    )
    return torch.cat([model(text).logits[0], *stepwise.logits]).float()


# Findings -----------------------------------------------------------------------------------------


def _report(
    settings: Settings, times: dict[str, list[_Times]], logits: dict[str, Tensor]
) -> dict[str, Any]:
    reference = logits[IMPLEMENTATIONS[0]]
    results = {}
    for name in IMPLEMENTATIONS:
        token = median(each.token for each in times[name])
        results[name] = {
            "prefill_tokens_per_s": settings.prompt / median(each.prefill for each in times[name]),
            "decode_tokens_per_s": 1 / token,
            "decode_ms": 1e3 * token,
            "experts_ms": 1e3 * median(each.experts for each in times[name]),
            "relative_error": _relative_error(logits[name], reference),
            "top1": float((logits[name].argmax(1) == reference.argmax(1)).double().mean()),
        }
    ours = results["expertile"]
    return {
        "machine": model_name(),
        "threads": torch.get_num_threads(),
        "isa": isas.select().name,
        "settings": asdict(settings),
        "results": results,
        "speedup": {
            name: {
                "prefill": ours["prefill_tokens_per_s"] / theirs["prefill_tokens_per_s"],
                "decode": theirs["decode_ms"] / ours["decode_ms"],
                "experts": theirs["experts_ms"] / ours["experts_ms"],
            }
            for name, theirs in results.items()
            if name != "expertile"
        },
        "positions": len(reference),
        "bounds": {"relative_error": LARGEST_ERROR, "top1": LEAST_TOP1},
        "agrees": ours["relative_error"] <= LARGEST_ERROR and ours["top1"] >= LEAST_TOP1,
    }


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def show(console: Console, report: dict[str, Any]) -> None:
    """Print what :func:`run` found."""
    settings = report["settings"]
    table = Table(
        title=f"Qwen3-30B-A3B widths, {settings['layers']} of 48 layers, {settings['experts']} experts, bf16",
        title_justify="left",
        caption=f"{report['machine']}, {report['threads']} threads, ISA {report['isa']}\n"
        f"medians of {settings['rounds']} rounds; logits beside those of {IMPLEMENTATIONS[0]}",
        caption_justify="left",
    )
    table.add_column("experts")
    for column in (
        "prefill\ntokens/s",
        "decode\ntokens/s",
        "decode\nms/token",
        "experts\nms/token",
        "logits\nerror",
        "top-1\nsame",
    ):
        table.add_column(column, justify="right")
    for name, result in report["results"].items():
        table.add_row(
            name,
            f"{result['prefill_tokens_per_s']:.0f}",
            f"{result['decode_tokens_per_s']:.1f}",
            f"{result['decode_ms']:.1f}",
            f"{result['experts_ms']:.1f}",
            f"{result['relative_error']:.1e}",
            f"{result['top1']:.1%}",
            style="bold" if name == "expertile" else "",
        )
    console.print(table)
    for name, speedup in report["speedup"].items():
        console.print(
            f"expertile against {name}: prefill {speedup['prefill']:.2f}×, decode {speedup['decode']:.2f}×, "
            f"the experts in decode {speedup['experts']:.2f}×",
            soft_wrap=True,
        )
    bounds = report["bounds"]
    verdict = "[green]agrees[/]" if report["agrees"] else "[bold red]DOES NOT AGREE[/]"
    console.print(
        f"expertile {verdict} with {IMPLEMENTATIONS[0]} over {report['positions']} positions: error at most "
        f"{bounds['relative_error']:.0e}, top-1 at least {bounds['top1']:.0%}",
        soft_wrap=True,
    )

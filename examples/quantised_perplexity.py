"""What each weight format costs: perplexity of a small language model with its experts quantised.

    python examples/quantised_perplexity.py --model model.pt

A mixture-of-experts model of bytes is trained on the sources of the Python library, which takes a
few minutes and happens once: then it is kept in the file. Its experts are quantised into each
format, and the perplexity of files that it was not trained on is measured twice: with Expertile,
which reads the quantised tensors, and with PyTorch on what they are worth, worked out here without
Expertile. The two must agree; the difference to the first row is the price of the format.

Besides Expertile this needs `pip install transformers ml_dtypes gguf`.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import quantisers
import torch
import typer
from gguf import GGMLQuantizationType as Kind
from ml_dtypes import float4_e2m1fn as E2M1
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import expertile
from expertile import ExpertWeights

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 256,  # both widths of the experts are multiples of 256, the block of q4_K
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
CONTEXT = 256  # bytes
BATCH = 8  # sequences
AGREEMENT = 5e-3
"""How far apart the two perplexities may be, relatively: rounding differs, and now and then so does a token's route."""

notes = Console(stderr=True)  # standard output is for the table or the JSON


# Quantisers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantised:
    """The matrices [E, N, K] of the experts of a layer."""

    weights: ExpertWeights | Tensor
    """What a checkpoint holds."""
    values: Tensor
    """What that is worth, in fp32."""


def blocks_of(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[E, N, K] as [E, N / rows, rows, K / columns, columns]."""
    return weight.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))


def largest(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, [E, N / rows, 1, K / columns, 1]; not quite zero, to divide by it."""
    return blocks.abs().amax((2, 4), keepdim=True).clamp(min=1e-12)


def joined(blocks: Tensor) -> Tensor:
    """The inverse of `blocks_of`, and, of a scale for each block, [E, N / rows, K / columns]."""
    return blocks.flatten(3, 4).flatten(1, 2)


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 [E, N, K], two to a byte, the even one in its low half: [E, N, K / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def bf16(weight: Tensor) -> Quantised:
    return Quantised(weight, weight.float())


def int8(weight: Tensor, group: int | None = None) -> Quantised:
    blocks = blocks_of(weight.float(), 1, group or weight.shape[2])
    scale = largest(blocks) / 127
    codes = (blocks / scale).round()
    stored = ExpertWeights.from_int8(joined(codes).to(torch.int8), joined(scale), group=group)
    return Quantised(stored, joined(codes * scale))


def int4(weight: Tensor, group: int) -> Quantised:
    blocks = blocks_of(weight.float(), 1, group)
    scale = (largest(blocks) / 7.5).bfloat16()  # to use all 16 codes, of which eight are negative
    codes = (blocks / scale.float()).round().clamp(-8, 7)
    packed = pairs(joined(codes + 8).to(torch.uint8)).view(torch.int32)
    stored = ExpertWeights.from_compressed_tensors(packed, joined(scale), group_size=group)
    return Quantised(stored, joined(codes * scale.float()))


def fp8(weight: Tensor) -> Quantised:
    codes, scale, values = e4m3(weight, 1, weight.shape[2])
    return Quantised(ExpertWeights.from_fp8(codes, scale), values)


def fp8_block(weight: Tensor) -> Quantised:
    codes, scale, values = e4m3(weight, 128, 128)
    return Quantised(ExpertWeights.from_fp8_block(codes, scale), values)


def e4m3(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scale of each block that takes its largest value to 448, and the values."""
    blocks = blocks_of(weight.float(), rows, columns)
    scale = largest(blocks) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return joined(codes), joined(scale), joined(codes.float() * scale)


def mxfp8(weight: Tensor) -> Quantised:
    blocks = blocks_of(weight.float(), 1, 32)
    exponent = torch.frexp(largest(blocks)).exponent - 1 - 8  # 448 is 1.75 · 2^8: a few are clamped
    codes = torch.ldexp(blocks, -exponent).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = ExpertWeights.from_mxfp8(joined(codes), joined(exponent + 127).to(torch.uint8))
    return Quantised(stored, joined(torch.ldexp(codes.float(), exponent)))


def mxfp4(weight: Tensor) -> Quantised:
    """The scale takes the largest value of a block to 4…8, of which what is above 6 is clamped."""
    blocks = blocks_of(weight.float(), 1, 32)
    exponent = torch.frexp(largest(blocks)).exponent - 1 - 2
    codes, values = e2m1(blocks, exponent)
    packed = pairs(codes).unflatten(2, (-1, 16))
    stored = ExpertWeights.from_mxfp4(packed, joined(exponent + 127).to(torch.uint8))
    return Quantised(stored, values)


def ds_fp4(weight: Tensor) -> Quantised:
    """The scale takes the largest value of a block to 3…6, and nothing is clamped."""
    blocks = blocks_of(weight.float(), 1, 32)
    exponent = (largest(blocks) / 6).log2().ceil().int()
    codes, values = e2m1(blocks, exponent)
    scale = joined(exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantised(ExpertWeights.from_ds_fp4(pairs(codes).view(torch.int8), scale), values)


def e2m1(blocks: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [E, N, K], and values, where a code stands for so much times 2^exponent of its block."""
    codes = torch.ldexp(blocks, -exponent).clamp(-6, 6).numpy().astype(E2M1)
    values = torch.ldexp(torch.from_numpy(codes.astype(np.float32)), exponent)
    return joined(torch.from_numpy(codes.view(np.uint8))), joined(values)


def nvfp4(weight: Tensor) -> Quantised:
    packed, scales, factors = zip(*map(quantisers.nvfp4, weight.float().numpy()), strict=True)
    codes, scale = torch.from_numpy(np.stack(packed)), torch.from_numpy(np.stack(scales))
    scale, factor = scale.view(torch.float8_e4m3fn), torch.tensor(factors)
    stored = ExpertWeights.from_nvfp4(codes, scale, weight_scale_2=factor)
    each = torch.stack([codes & 15, codes >> 4], 3).flatten(2).numpy()
    blocks = blocks_of(torch.from_numpy(each.view(E2M1).astype(np.float32)), 1, 16)
    values = joined(blocks * scale.float()[:, :, None, :, None])
    return Quantised(stored, values * factor[:, None, None])


def in_gguf(weight: Tensor, kind: Kind) -> Quantised:
    """Written to a file as a converter for llama.cpp does, and mapped from it."""
    values = weight.float().numpy()
    quantise = GGUF_QUANTISERS[kind]
    data = np.stack([quantise(matrix) for matrix in values])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.gguf"
        writer = gguf.GGUFWriter(path, "qwen3moe")
        writer.add_tensor("experts", data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        stored = ExpertWeights.from_gguf(gguf.GGUFReader(path), "experts")
    return Quantised(stored, torch.from_numpy(gguf.quants.dequantize(data, kind)))


GGUF_QUANTISERS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {
    Kind.Q8_0: partial(gguf.quants.quantize, qtype=Kind.Q8_0),
    Kind.Q6_K: quantisers.q6_K,
    Kind.Q4_K: quantisers.q4_K,
    Kind.Q4_0: partial(gguf.quants.quantize, qtype=Kind.Q4_0),
}
FORMATS: dict[str, Callable[[Tensor], Quantised]] = {
    "bf16": bf16,
    "int8": int8,
    "int8_g128": partial(int8, group=128),
    "q8_0": partial(in_gguf, kind=Kind.Q8_0),
    "fp8": fp8,
    "fp8_block": fp8_block,
    "mxfp8": mxfp8,
    "q6_K": partial(in_gguf, kind=Kind.Q6_K),
    "int4_g32": partial(int4, group=32),
    "int4_g128": partial(int4, group=128),
    "q4_K": partial(in_gguf, kind=Kind.Q4_K),
    "q4_0": partial(in_gguf, kind=Kind.Q4_0),
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "ds_fp4": ds_fp4,
}


# The model ------------------------------------------------------------------------------------------------------------


def library() -> tuple[Tensor, Tensor]:
    """The bytes of the Python library's sources to train on, and those of every 16th file, held out."""
    root = Path(sysconfig.get_path("stdlib"))
    tables_and_tests = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = [path for path in root.rglob("*.py") if tables_and_tests.isdisjoint(path.parts)]
    files = [path.read_bytes() for path in sorted(paths)]
    held_out = b"".join(files[::16])
    del files[::16]
    training, testing = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        for text in (b"".join(files), held_out)
    )
    return training, testing


def trained(path: Path | None, text: Tensor, steps: int) -> Qwen3MoeForCausalLM:
    """The model in bf16, from the file if there is one, or else trained and written to it."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    if path is not None and path.exists():
        model.load_state_dict(torch.load(path))
        notes.print(f"the model in {path} is not trained again", soft_wrap=True)
    else:
        train(model, text, steps)
        if path is not None:
            torch.save(model.state_dict(), path)
    return model.bfloat16().eval()


def train(model: Qwen3MoeForCausalLM, text: Tensor, steps: int) -> None:
    """Train on `steps` batches of sequences from anywhere in the text."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    windows = text.unfold(0, CONTEXT, 1)
    model.train()
    with progress("bits/byte") as bar:
        task = bar.add_task("training", total=steps, figure=math.nan)
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (BATCH,))]
            # The router logits are for the loss that balances the experts' load.
            output = model(input_ids=batch, labels=batch, output_router_logits=True)
            output.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update(task, advance=1, figure=output.loss.item() / math.log(2))


@torch.inference_mode()
def perplexity(model: Qwen3MoeForCausalLM, batches: tuple[Tensor, ...]) -> float:
    """Of a byte, given those before it in its sequence: `batches` of sequences, [B, L] each."""
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
    return torch.stack(losses).mean().exp().item()


def progress(figure: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figure]:.3f} " + figure),
        console=notes,
    )


# The comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    format: str
    bits: float
    """A weight of the experts, scales included."""
    perplexity: float
    """With Expertile."""
    pytorch: float
    """With PyTorch."""


class Experts(nn.Module):
    """Stands in for the experts of a layer: a function such as `expertile.fused_experts`, and its weights."""

    def __init__(self, function: Callable[..., Tensor], gate_up: Any, down: Any) -> None:
        super().__init__()
        self.function, self.gate_up, self.down = function, gate_up, down

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.function(x, self.gate_up, self.down, topk_ids, topk_weights)


def plain_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """`expertile.fused_experts` in plain PyTorch, in fp32."""
    result = torch.zeros(x.shape)
    for expert in range(len(down)):
        token, choice = torch.where(topk_ids == expert)
        gate, up = F.linear(x[token].float(), gate_up[expert]).chunk(2, dim=1)
        y = F.linear(F.silu(gate) * up, down[expert])
        result.index_add_(0, token, y * topk_weights[token, choice, None])
    return result.to(x.dtype)


def compare(model: Qwen3MoeForCausalLM, formats: list[str], text: Tensor) -> Iterator[Row]:
    """A row for each format: perplexities of the text, [B, L]."""
    layers = [layer.mlp for layer in model.model.layers]
    originals = [layer.experts for layer in layers]
    batches = text.split(BATCH)

    def measure(function: Callable[..., Tensor], weights: list[tuple[Any, Any]]) -> float:
        for layer, (gate_up, down) in zip(layers, weights, strict=True):
            layer.experts = Experts(function, gate_up, down)
        return perplexity(model, batches)

    for name in formats:
        experts = [
            (
                FORMATS[name](original.gate_up_proj.detach()),
                FORMATS[name](original.down_proj.detach()),
            )
            for original in originals
        ]
        matrices = [matrix for pair in experts for matrix in pair]
        stored = sum(matrix.weights.nbytes for matrix in matrices)
        yield Row(
            name,
            8 * stored / sum(matrix.values.numel() for matrix in matrices),
            measure(expertile.fused_experts, [(a.weights, b.weights) for a, b in experts]),
            measure(plain_experts, [(a.values, b.values) for a, b in experts]),
        )


def table(rows: list[Row]) -> Table:
    result = Table("format", title="Perplexity of a byte of held-out text")
    for heading in ("bits a weight", "perplexity", "above bf16", "PyTorch's"):
        result.add_column(heading, justify="right")
    for row in rows:
        above = f"{row.perplexity / rows[0].perplexity - 1:+.2%}"
        result.add_row(
            row.format, f"{row.bits:.2f}", f"{row.perplexity:.4f}", above, f"{row.pytorch:.4f}"
        )
    return result


def main(
    formats: Annotated[str, typer.Option(help="Formats, separated by commas.")] = ",".join(FORMATS),
    steps: Annotated[int, typer.Option(help="Training steps, if it is to be trained.")] = 800,
    model: Annotated[Path | None, typer.Option(help="File of the trained model.")] = None,
    sequences: Annotated[int, typer.Option(help="Held-out sequences of 256 bytes.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Train a small mixture-of-experts model, quantise its experts, and measure perplexities."""
    chosen = ["bf16", *(name for name in formats.split(",") if name != "bf16")]
    if unknown := [name for name in chosen if name not in FORMATS]:
        raise typer.BadParameter(
            f"no such format: {', '.join(unknown)}; there are {', '.join(FORMATS)}"
        )
    training, held_out = library()
    text = held_out[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    text = text[torch.linspace(0, len(text) - 1, sequences).long()]  # of all its files
    network = trained(model, training, steps)
    rows: list[Row] = []
    with progress("perplexity") as bar:
        task = bar.add_task("measuring", total=len(chosen), figure=math.nan)
        for row in compare(network, chosen, text):
            rows.append(row)
            bar.update(task, advance=1, figure=row.perplexity)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(table(rows))
    if apart := [row.format for row in rows if abs(row.perplexity / row.pytorch - 1) > AGREEMENT]:
        sys.exit(f"Expertile and PyTorch differ by more than {AGREEMENT:.1%}: {', '.join(apart)}")


if __name__ == "__main__":
    typer.run(main)

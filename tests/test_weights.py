"""ExpertWeights from files that the real libraries wrote: their values, the files' memory, and what is refused."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertile import ArgumentError, DtypeError, ExpertWeights
from expertile.runtime.call import TABLE

E, N, K = 3, 17, 256
State = dict[str, Tensor]


# Checkpoints ----------------------------------------------------------------------------------------------------------


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded())


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)


def random_e4m3(*shape: int) -> Tensor:
    codes = random_bytes(*shape)
    return torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)


def compressed(
    compressor: Any, scales: Callable[[], State], **arguments: Any
) -> Callable[[], tuple[list[State], list[Tensor]]]:
    """Experts as one of compressed-tensors' compressors writes them, and what it reads from them."""

    def make() -> tuple[list[State], list[Tensor]]:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        states = [
            compressor.compress({"weight": (expert + 1) * normal(N, K), **scales()}, scheme)
            for expert in range(E)
        ]
        return states, [compressor.decompress(state, scheme)["weight"] for state in states]

    return make


def scales(columns: int) -> Callable[[], State]:
    return lambda: {"weight_scale": normal(N, columns).abs() / 8}


def powers_of_two(columns: int) -> State:
    return {"weight_scale": torch.ldexp(torch.ones(N, columns), random_bytes(N, columns) // 16 - 8)}


def nvfp4_scales() -> State:
    # The library dequantises to bf16, where a power of two loses nothing.
    return {
        "weight_scale": random_e4m3(N, K // 16).float().abs(),
        "weight_global_scale": torch.tensor([64.0]),
    }


def gpt_oss() -> tuple[list[State], list[Tensor]]:
    blocks, exponents = random_bytes(E, N, K // 32, 16), random_bytes(E, N, K // 32) // 2 + 64
    values = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).transpose(1, 2)
    states = [{"blocks": b, "scales": s} for b, s in zip(blocks, exponents, strict=True)]
    return states, list(values)


def deepseek_v4() -> tuple[list[State], list[Tensor]]:
    exponents = (random_bytes(E, N, K // 32) // 2 + 64).view(torch.float8_e8m0fnu)
    states = [
        {"weight": codes.view(torch.int8), "scale": scale}
        for codes, scale in zip(random_bytes(E, N, K // 2), exponents, strict=True)
    ]
    return states, transformers_values(states, "scale")


def deepseek_v3(dtype: torch.dtype) -> Callable[[], tuple[list[State], list[Tensor]]]:
    def make() -> tuple[list[State], list[Tensor]]:
        factors = normal(E, 2, K // 128).to(dtype)
        states = [
            {"weight": codes, "weight_scale_inv": scale}
            for codes, scale in zip(random_e4m3(E, 256, K), factors, strict=True)
        ]
        return states, transformers_values(states, "weight_scale_inv")

    return make


def transformers_values(states: list[State], scale: str) -> list[Tensor]:
    read = Fp8Dequantize(None)._dequantize_one
    return [read(state["weight"], state[scale], torch.float32) for state in states]


def modelopt() -> tuple[list[State], list[Tensor]]:
    codes, scale = random_bytes(E, N, K // 2), random_e4m3(E, N, K // 16)
    factors = normal(E)
    e2m1 = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).numpy()
    values = torch.from_numpy(e2m1.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    values = values * scale.double().repeat_interleave(16, -1) * factors.double()[:, None, None]
    names = "weight", "weight_scale", "weight_scale_2"
    states = [
        dict(zip(names, parts, strict=True)) for parts in zip(codes, scale, factors, strict=True)
    ]
    return states, list(values.float())


def plain() -> tuple[list[State], list[Tensor]]:
    weight = normal(E, N, 33).bfloat16()
    return [{"weight": each} for each in weight], list(weight.float())


INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
packed = PackedQuantizationCompressor
naive = NaiveQuantizationCompressor
CHECKPOINTS: dict[str, tuple[Callable[[], tuple[list[State], list[Tensor]]], str, dict[str, Any]]] = {
    "bf16": (plain, "from_bf16", {}),
    "int8": (
        compressed(naive, scales(1), num_bits=8, strategy="channel", **INT), "from_int8", {},
    ),
    "int8 g64": (
        compressed(naive, scales(K // 64), num_bits=8, strategy="group", group_size=64, **INT),
        "from_int8", {"group": 64},
    ),
    "int4 g32": (
        compressed(packed, scales(K // 32), num_bits=4, strategy="group", group_size=32, **INT),
        "from_compressed_tensors", {"group_size": 32},
    ),
    "int4 g128": (
        compressed(packed, scales(K // 128), num_bits=4, strategy="group", group_size=128, **INT),
        "from_compressed_tensors", {"group_size": 128},
    ),
    "fp8": (
        compressed(naive, scales(1), num_bits=8, strategy="channel", **FLOAT), "from_fp8", {},
    ),
    "fp8 block fp32": (deepseek_v3(torch.float32), "from_fp8_block", {}),
    "fp8 block bf16": (deepseek_v3(torch.bfloat16), "from_fp8_block", {"block": [128, 128]}),
    "mxfp8": (
        compressed(
            MXFP8QuantizationCompressor, lambda: powers_of_two(K // 32), num_bits=8, strategy="group",
            group_size=32, scale_dtype=torch.uint8, **FLOAT,
        ),
        "from_mxfp8", {},
    ),
    "mxfp4": (gpt_oss, "from_mxfp4", {}),
    "ds_fp4": (deepseek_v4, "from_ds_fp4", {}),
    "nvfp4 compressed-tensors": (
        compressed(
            NVFP4PackedCompressor, nvfp4_scales, num_bits=4, strategy="tensor_group", group_size=16,
            scale_dtype=torch.float8_e4m3fn, **FLOAT,
        ),
        "from_nvfp4", {},
    ),
    "nvfp4 ModelOpt": (modelopt, "from_nvfp4", {}),
}  # fmt: skip
"""What makes the experts and their values, the constructor, and its options."""

each_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)
each_form = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])


@cache
def checkpoint(name: str) -> tuple[list[State], list[Tensor]]:
    return CHECKPOINTS[name][0]()


def arguments(name: str, load: Callable[[str], Any]) -> dict[str, Any]:
    """The constructor's arguments, of the tensors that `load` gives by their name in the checkpoint."""
    _, constructor, options = CHECKPOINTS[name]
    states, _ = checkpoint(name)
    renamed = {"from_int8": "scale", "from_fp8": "scale", "from_mxfp8": "scale"}
    found = dict(options)
    for key in states[0]:
        argument = renamed.get(constructor, key) if key == "weight_scale" else key
        argument = "weight" if (constructor, key) == ("from_nvfp4", "weight_packed") else argument
        found[argument] = load(key)
    return found


def build(name: str, load: Callable[[str], Any]) -> ExpertWeights:
    weights: ExpertWeights = getattr(ExpertWeights, CHECKPOINTS[name][1])(**arguments(name, load))
    return weights


def stack(name: str) -> Callable[[str], Tensor]:
    return lambda key: torch.stack([state[key] for state in checkpoint(name)[0]])


def from_file(name: str, stacked: bool, path: Path) -> tuple[ExpertWeights, dict[str, Any]]:
    """Written by safetensors, and mapped by it; with the tensors it gave."""
    states, _ = checkpoint(name)
    if stacked:
        save_file({key: stack(name)(key) for key in states[0]}, path)
    else:
        save_file(
            {f"{i}.{key}": state[key] for i, state in enumerate(states) for key in state}, path
        )
    loaded: dict[str, Any] = {}
    with safe_open(path, "pt") as file:

        def load(key: str) -> Any:
            loaded[key] = (
                file.get_tensor(key)
                if stacked
                else [file.get_tensor(f"{i}.{key}") for i in range(E)]
            )
            return loaded[key]

        return build(name, load), loaded


def mapped_file(address: int) -> str:
    """The file that is mapped at an address, or ""."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split(maxsplit=5)
        first, end = (int(x, 16) for x in span.split("-"))
        if first <= address < end:
            return last
    return ""


# Values and memory ----------------------------------------------------------------------------------------------------


@each_checkpoint
@each_form
def test_values_are_the_librarys_and_memory_is_the_files(
    name: str, stacked: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    weights, loaded = from_file(name, stacked, path)
    _, expected = checkpoint(name)
    assert weights.shape == (E, *expected[0].shape)
    for expert, values in enumerate(expected):
        assert torch.equal(weights.dequantize(expert), values.float())
    given = [
        t for key, x in loaded.items() if key != "weight_shape" for t in ([x] if stacked else x)
    ]
    assert {t.data_ptr() for t in weights.tensors} == {t.data_ptr() for t in given}
    assert {mapped_file(t.data_ptr()) for t in weights.tensors} == {str(path)}
    assert weights.nbytes == sum(t.nbytes for t in given)


@each_checkpoint
@each_form
def test_places_lead_to_every_row_of_every_expert(name: str, stacked: bool) -> None:
    states, _ = checkpoint(name)
    weights = build(name, stack(name) if stacked else lambda key: [s[key] for s in states])
    keys = [key for key in states[0] if key != "weight_shape"]
    order = sorted(
        keys,
        key=lambda key: (
            key not in ("weight", "weight_packed", "blocks"),
            "2" in key or "global" in key,
        ),
    )
    row = 128 if "block" in name else 5
    for expert in range(E):
        offsets = [*weights.scheme.offsets(row), 0]
        for key, place, offset in zip(order, weights.places(row), offsets, strict=False):
            part = states[expert][key]
            start = part.reshape(-1).view(torch.uint8)[offset:]
            length = part[0].nbytes if part.dim() else part.nbytes
            address = expert_address(place, expert)
            assert ctypes.string_at(address, length) == bytes(start[:length].numpy())
    assert weights.places(row) is weights.places(row)
    assert weights.places()[len(order) :] == ((0, 0),) * (3 - len(order))


def expert_address(place: tuple[int, int], expert: int) -> int:
    start, step = place
    if step == TABLE:
        return int(ctypes.c_int64.from_address(start + 8 * expert).value)
    return start + step * expert


def test_views_are_read_with_their_strides() -> None:
    whole = random_bytes(2 * E, 2 * N, K).view(torch.int8)
    weight, scale = whole[::2, ::2, :64], normal(2 * E, N, 3)[::2, :, 1]
    weights = ExpertWeights.from_int8(weight, scale)
    assert weights.scheme.row_bytes == 2 * K
    assert weights.scheme.scale_row_bytes == 12  # type: ignore[attr-defined]
    assert weights.places() == (
        (weight.data_ptr(), 4 * N * K), (scale.data_ptr(), 2 * 4 * N * 3), (0, 0),
    )  # fmt: skip
    for expert in range(E):
        expected = weight[expert].double() * scale[expert].double()[:, None]
        assert torch.equal(weights.dequantize(expert), expected.float())


def test_changes_in_place_are_seen() -> None:
    weight, scale = torch.ones(1, 1, 32, dtype=torch.int8), torch.ones(1, 1)
    weights = ExpertWeights.from_int8(weight, scale)
    scale.mul_(3)
    weight[0, 0, 1] = -2
    assert weights.dequantize(0)[0, :3].tolist() == [3, -6, 3]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@each_form
def test_a_copy_has_its_own_memory(twin: Callable[[Any], Any], stacked: bool) -> None:
    states, expected = checkpoint("int8")
    weights = build("int8", stack("int8") if stacked else lambda key: [s[key] for s in states])
    weights.places()
    other = twin(weights)
    assert other.scheme == weights.scheme
    assert other.shape == weights.shape
    addresses = {expert_address(place, e) for place in other.places()[:2] for e in range(E)}
    assert addresses == {part.of(e).data_ptr() for part in other.parts.values() for e in range(E)}
    assert not addresses & {
        part.of(e).data_ptr() for part in weights.parts.values() for e in range(E)
    }
    assert torch.equal(other.dequantize(1), expected[1])


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        build("mxfp4", stack("mxfp4")).shape = (1, 1, 1)  # type: ignore[misc]


def test_it_says_what_it_is() -> None:
    text = repr(build("int4 g128", stack("int4 g128")))
    assert text == "ExpertWeights(int4 (group 128, scale float32), 3 of 17 × 256, 0.0 MiB)"


def test_rounded_once_from_the_exact_value() -> None:
    scale = torch.tensor([[1 + 2**-23, 3e38, 2**-149]])
    weights = ExpertWeights.from_int8(torch.full((1, 3, 32), 127, dtype=torch.int8), scale)
    expected = [np.float32(127 * np.float64(s)) for s in scale[0].numpy()[:1]]
    assert weights.dequantize(0)[:, 0].tolist() == [*expected, np.inf, 127 * 2.0**-149]


# GGUF -----------------------------------------------------------------------------------------------------------------

Type = gguf.GGMLQuantizationType
_K_BLOCKS = {Type.Q4_K: (144, slice(0, 4)), Type.Q6_K: (210, slice(208, 210))}
"""Bytes of a block, and where its fp16 numbers are."""


def gguf_bytes(kind: gguf.GGMLQuantizationType, *shape: int) -> np.ndarray:
    """A tensor of that type: quantised by the library, or blocks of random codes where it only dequantises."""
    if kind not in _K_BLOCKS:
        return np.asarray(gguf.quants.quantize(normal(*shape).numpy(), kind))
    size, floats = _K_BLOCKS[kind]
    blocks = random_bytes(*shape[:-1], shape[-1] // 256, size).numpy()
    halves = normal(*blocks.shape[:-1], (floats.stop - floats.start) // 2).half()
    blocks[..., floats] = halves.numpy().view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path, tensors: dict[str, tuple[gguf.GGMLQuantizationType, np.ndarray]]
) -> gguf.GGUFReader:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


KINDS = [Type.BF16, Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
NAME = "blk.0.ffn_gate_exps.weight"


@each_kind
@each_form
def test_gguf(kind: gguf.GGMLQuantizationType, stacked: bool, tmp_path: Path) -> None:
    data = gguf_bytes(kind, E, N, 2 * K)
    names = [NAME] if stacked else [f"blk.0.ffn_gate.{i}.weight" for i in range(E)]
    filler = gguf_bytes(Type.F16, 5)  # the tensors must not begin where the file does
    reader = write_gguf(
        tmp_path / "model.gguf",
        {"token_embd.weight": (Type.F16, filler)}
        | dict(zip(names, [(kind, data)] if stacked else [(kind, x) for x in data], strict=True)),
    )
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weights = ExpertWeights.from_gguf(reader, NAME if stacked else names)
    finally:
        torch.set_warn_always(always)
    assert weights.scheme.name == {Type.BF16: "bf16", Type.Q4_K: "q4_K", Type.Q6_K: "q6_K"}.get(
        kind, kind.name.lower()
    )
    assert weights.shape == (E, N, 2 * K)
    mapped = {entry.name: entry.data.ctypes.data for entry in reader.tensors}
    assert [t.data_ptr() for t in weights.tensors] == [mapped[name] for name in names]
    assert {mapped_file(t.data_ptr()) for t in weights.tensors} == {str(tmp_path / "model.gguf")}
    expected = gguf.quants.dequantize(data, kind)
    for expert in range(E):
        assert np.array_equal(weights.dequantize(expert).numpy(), expected[expert])


def test_gguf_outlives_its_reader(tmp_path: Path) -> None:
    path, data = tmp_path / "model.gguf", gguf_bytes(Type.Q8_0, E, N, K)
    weights = ExpertWeights.from_gguf(write_gguf(path, {NAME: (Type.Q8_0, data)}), NAME)
    gc.collect()
    mapped = mapped_file(weights.tensors[0].data_ptr())
    assert mapped == str(path)
    del weights
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.fixture
def reader(tmp_path: Path) -> gguf.GGUFReader:
    kinds = {NAME: Type.Q8_0, "other": Type.Q5_0, "0": Type.Q4_0, "1": Type.Q8_0, "norm": Type.BF16}
    shapes = {"0": (N, K), "1": (N, K), "norm": (K,)}
    return write_gguf(
        tmp_path / "model.gguf",
        {n: (kind, gguf_bytes(kind, *shapes.get(n, (E, N, K)))) for n, kind in kinds.items()},
    )


def changed(reader: gguf.GGUFReader, name: str, **fields: Any) -> Any:
    """A reader with other fields in one tensor's entry."""
    tensors = [t._replace(**fields) if t.name == name else t for t in reader.tensors]
    return SimpleNamespace(tensors=tensors)


def test_gguf_truncated(reader: gguf.GGUFReader) -> None:
    data = next(t for t in reader.tensors if t.name == NAME).data.reshape(-1)
    bytes_ = E * N * K // 32 * 34
    refuse(
        lambda: ExpertWeights.from_gguf(changed(reader, NAME, data=data[:-1]), NAME),
        ArgumentError, NAME, f"expected {bytes_} contiguous bytes", f"got {bytes_ - 1}", "truncated",
    )  # fmt: skip


def test_gguf_bad_input(reader: gguf.GGUFReader, tmp_path: Path) -> None:
    make = ExpertWeights.from_gguf
    refuse(lambda: make(reader, "blk.0.ffn_gate_exp.weight"), ArgumentError, "5 tensors", NAME)
    refuse(lambda: make(reader, "other"), DtypeError, "other", "Q4_0", "got Q5_0")
    refuse(lambda: make(reader, ["0", "1"]), ArgumentError, "1:", "Q4_0, as 0 has", "got Q8_0")
    refuse(lambda: make(reader, "1"), ArgumentError, "1: expected 3 dimensions", "in a list")
    refuse(lambda: make(reader, "norm"), ArgumentError, "norm: expected 3 dimensions")
    refuse(lambda: make(reader, []), ArgumentError, "name:", "none")
    refuse(lambda: make(reader, [3]), DtypeError, "name:", "got int")  # type: ignore[list-item]
    path: Any = tmp_path / "model.gguf"
    refuse(lambda: make(path, NAME), DtypeError, "reader:", "gguf.GGUFReader(path)")
    swapped = SimpleNamespace(tensors=reader.tensors, byte_order="S")
    refuse(lambda: make(swapped, NAME), ArgumentError, NAME, "byte order")


# Refusals -------------------------------------------------------------------------------------------------------------


def refuse(make: Callable[[], object], error: type[Exception], *words: str) -> None:
    """It raises `error`, with these words in its message."""
    with pytest.raises(error) as raised:
        make()
    for word in words:
        assert word in str(raised.value), str(raised.value)


def parts_of(name: str) -> list[str]:
    """The arguments that are tensors."""
    return [key for key, x in arguments(name, stack(name)).items() if isinstance(x, Tensor)]


PARTS = [(name, part) for name in CHECKPOINTS for part in parts_of(name)]
each_part = pytest.mark.parametrize(("name", "part"), PARTS)


def refuse_stacked(
    name: str, part: str, change: Callable[[Tensor], Any], error: type[Exception], *words: str
) -> None:
    """A checkpoint with one part, stacked, changed is refused with the part's name."""
    given = arguments(name, stack(name))
    given[part] = change(given[part])
    make = getattr(ExpertWeights, CHECKPOINTS[name][1])
    refuse(lambda: make(**given), error, f"{part}: ", *words)


def refuse_both(
    name: str, part: str, change: Callable[[Tensor], Any], error: type[Exception], *words: str
) -> None:
    """And with the last expert's tensor in a list changed."""
    refuse_stacked(name, part, change, error, *words)
    given = arguments(name, stack(name))
    given[part] = [*given[part][:-1], change(given[part][-1])]
    make = getattr(ExpertWeights, CHECKPOINTS[name][1])
    refuse(lambda: make(**given), error, f"{part}[2]: ", *words)


@each_part
def test_wrong_dtype(name: str, part: str) -> None:
    refuse_both(name, part, lambda x: x.float().to(torch.complex64), DtypeError, "got complex64")
    refuse_both(name, part, lambda x: x.float().double(), DtypeError, "expected", "got float64")


@each_part
def test_wrong_device(name: str, part: str) -> None:
    refuse_both(name, part, lambda x: x.to("meta"), ArgumentError, "on the CPU", "meta", ".cpu()")


@each_part
def test_wrong_shape(name: str, part: str) -> None:
    more = lambda x: torch.stack([x] * 3, -1)  # noqa: E731
    refuse_both(name, part, more, ArgumentError, "expected", "got")
    refuse_both(name, part, lambda x: x.flatten()[:0], ArgumentError, "at least one", "(0,)")


@each_part
def test_wrong_number_of_scales_and_experts(name: str, part: str) -> None:
    if part in ("weight", "weight_packed", "blocks"):  # the others are compared with it
        return
    wider = lambda x: x.unsqueeze(-1).expand(*x.shape, 2).flatten(1)  # noqa: E731
    refuse_stacked(name, part, wider, ArgumentError, "expected shape", "got", "the same matrix")
    refuse_stacked(name, part, lambda x: x[:2], ArgumentError, "expected 3 experts", "got 2")
    refuse_stacked(name, part, lambda x: [*x, x[0]], ArgumentError, "expected 3 experts", "got 4")


@each_part
def test_misaligned(name: str, part: str) -> None:
    def shift(x: Tensor) -> Tensor:
        memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
        memory[:] = x.reshape(-1).view(torch.uint8).numpy()
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)

    given = arguments(name, stack(name))
    size = given[part].element_size()
    if size == 1:
        getattr(ExpertWeights, CHECKPOINTS[name][1])(**given | {part: shift(given[part])})
    else:
        words = "address", f"multiple of {size}", ".clone()"
        refuse_both(name, part, shift, ArgumentError, *words)


@each_part
def test_gaps_between_the_elements_of_a_row(name: str, part: str) -> None:
    if arguments(name, stack(name))[part].shape[2:].numel() > 1:
        spread = lambda x: torch.stack([x, x], -1)[..., 0]  # noqa: E731
        words = "contiguous rows", "strides", ".contiguous()"
        refuse_both(name, part, spread, ArgumentError, *words)


@each_part
def test_not_a_tensor(name: str, part: str) -> None:
    refuse_stacked(name, part, lambda x: 3, DtypeError, "a torch.Tensor", "got int")
    refuse_stacked(name, part, lambda x: [], ArgumentError, "a tensor for each expert", "got none")
    refuse_stacked(name, part, lambda x: torch.tensor(1), ArgumentError, f"use [{part}]")
    given = arguments(name, stack(name))
    given[part] = [None] * E
    make = getattr(ExpertWeights, CHECKPOINTS[name][1])
    refuse(lambda: make(**given), DtypeError, f"{part}[0]: ", "got NoneType")


@each_part
def test_no_memory(name: str, part: str) -> None:
    fake = FakeTensorMode().from_tensor
    refuse_both(name, part, fake, ArgumentError, "no memory", "FakeTensor")
    wrapper = Wrapper._make_wrapper_subclass
    words = "no memory", "Wrapper"
    refuse_both(
        name, part, lambda x: wrapper(Wrapper, x.shape, dtype=x.dtype), ArgumentError, *words
    )


class Wrapper(Tensor):
    """Of tensors that are elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> None:
        raise NotImplementedError


def test_sparse() -> None:
    for name, part in (("int8", "scale"), ("bf16", "weight")):
        refuse_both(name, part, Tensor.to_sparse, ArgumentError, "dense", ".to_dense()")


def test_lists_that_differ() -> None:
    codes, scale = random_bytes(E, N, K).view(torch.int8), normal(E, N)
    make = ExpertWeights.from_int8
    short = [codes[0], codes[1, :5], codes[2]]
    refuse(lambda: make(short, scale), ArgumentError, "weight[1]: ", f"({N}, {K})", "(5, 256)")
    apart = [codes[0], torch.cat([codes[1], codes[1]], 1)[:, :K], codes[2]]
    refuse(lambda: make(apart, scale), ArgumentError, "weight[1]: ", "row to row", "256)", "512)")
    mixed = [scale[0], scale[1].bfloat16(), scale[2]]
    refuse(lambda: make(codes, mixed), ArgumentError, "scale[1]: ", "float32", "bfloat16")


def test_requires_grad() -> None:
    weight = [torch.nn.Parameter(x) for x in normal(E, N, K).bfloat16()]
    refuse(lambda: ExpertWeights.from_bf16(weight), ArgumentError, "weight[0]: ", "requires grad")
    with torch.no_grad():
        held = ExpertWeights.from_bf16(weight).tensors
    assert [x.data_ptr() for x in held] == [x.data_ptr() for x in weight]
    assert not any(x.requires_grad for x in held)


def test_negated_view() -> None:
    negated = torch.complex(normal(E, N), normal(E, N)).conj().imag
    assert negated.is_neg()
    codes = torch.ones(E, N, K, dtype=torch.int8)
    refuse(
        lambda: ExpertWeights.from_int8(codes, negated), ArgumentError, "scale: ", ".resolve_neg()"
    )


@pytest.mark.parametrize(("name", "part", "multiple"), [
    ("int8", "weight", 32), ("int8 g64", "weight", 64), ("int4 g32", "weight_packed", 32),
    ("int4 g128", "weight_packed", 128), ("fp8", "weight", 32), ("fp8 block fp32", "weight", 32),
    ("mxfp8", "weight", 32), ("ds_fp4", "weight", 32), ("nvfp4 ModelOpt", "weight", 32),
])  # fmt: skip
def test_columns_not_a_multiple_of_the_block(name: str, part: str, multiple: int) -> None:
    def cut(x: Tensor) -> Tensor:
        return x.view(torch.uint8)[..., :-4].contiguous().view(x.dtype)

    refuse_stacked(name, part, cut, ArgumentError, f"a multiple of {multiple} columns", "got")


def test_groups() -> None:
    codes, scale = torch.ones(E, N, K, dtype=torch.int8), normal(E, N, K // 32)
    make = ExpertWeights.from_int8
    shape = f"expected shape ({E}, {N}, 2)"
    refuse(lambda: make(codes, scale, group=128), ArgumentError, "scale: ", shape, "group size")
    refuse(lambda: make(codes, scale), ArgumentError, "scale: ", f"({E}, {N}, 1)")
    refuse(lambda: make(codes, scale, group=48), ArgumentError, "group: ", "multiple of 32", "48")
    refuse(lambda: make(codes, scale, group=0), ArgumentError, "group: ", "multiple of 32")
    packed = torch.ones(E, N, K // 8, dtype=torch.int32)
    int4 = ExpertWeights.from_compressed_tensors
    refuse(
        lambda: int4(packed, scale, group_size=64), ArgumentError, "weight_scale: ", "(3, 17, 4)"
    )
    refuse(lambda: int4(packed, scale, group_size=16), ArgumentError, "group_size: ", "16")


def test_noted_shape() -> None:
    noted = torch.tensor([[N, K], [N, K], [N, K - 1]])
    given = arguments("int4 g32", stack("int4 g32"))
    refuse(
        lambda: ExpertWeights.from_compressed_tensors(**given | {"weight_shape": noted}),
        ArgumentError, "weight_shape: expected (17, 256)", "weight_packed", "(17, 255) for expert 2",
    )  # fmt: skip


def test_blocks() -> None:
    given = arguments("fp8 block fp32", stack("fp8 block fp32"))
    make = ExpertWeights.from_fp8_block
    refuse(
        lambda: make(**given, block=(64, 128)), ArgumentError, "block: ", "(128, 128)", "(64, 128)"
    )


def test_one_global_scale() -> None:
    given = arguments("nvfp4 ModelOpt", stack("nvfp4 ModelOpt"))
    make = ExpertWeights.from_nvfp4
    both = given | {"weight_global_scale": given["weight_scale_2"]}
    refuse(lambda: make(**both), ArgumentError, "weight_scale_2, weight_global_scale", "got 2")
    del given["weight_scale_2"]
    refuse(lambda: make(**given), ArgumentError, "weight_scale_2, weight_global_scale", "neither")


def test_expert_outside() -> None:
    weights = build("mxfp8", stack("mxfp8"))
    for expert in (-1, E):
        refuse(lambda at=expert: weights.dequantize(at), ArgumentError, "expert: ", "0 to 2")  # type: ignore[misc]

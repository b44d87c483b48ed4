"""`expertile.ExpertWeights`: the matrices of all experts in one format, as a checkpoint has them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from expertile.runtime import descriptions, gguf
from expertile.runtime.call import TABLE
from expertile.runtime.errors import ArgumentError
from expertile.runtime.parts import PartTensors, Tensors, collect
from expertile.templates.formats.base import WeightFormat
from expertile.templates.formats.bf16 import RowMajor
from expertile.templates.formats.ds_fp4 import DsFp4
from expertile.templates.formats.fp8 import Fp8
from expertile.templates.formats.fp8_block import Fp8Block
from expertile.templates.formats.int4 import Int4
from expertile.templates.formats.int8 import GroupedInt8, Int8
from expertile.templates.formats.mxfp4 import Mxfp4
from expertile.templates.formats.mxfp8 import MxFp8
from expertile.templates.formats.nvfp4 import Nvfp4
from expertile.templates.formats.quantized import Part, Quantized

Place = tuple[int, int]
"""An address and the bytes from expert to expert; or that of a table of addresses, and TABLE; or (0, 0) for nothing."""


@dataclass(frozen=True, eq=False, repr=False)
class ExpertWeights:
    """The matrices `[E, N, K]` of all experts in one format, in the memory of a checkpoint's own tensors.

    Make one with the constructor for the checkpoint, and pass it to :func:`expertile.fused_experts` as gate_up or down:

        gate_up = ExpertWeights.from_mxfp4(blocks, scales)

    Each constructor takes, for each part, a tensor whose first dimension is the expert or a list of a tensor for each
    expert (`[N, K]` below stands for both), and checks all that kernels rely on: dtypes, shapes against each other,
    memory. Rows may lie further apart than they are long (views), but the elements of a row must be neighbours. What
    doesn't fit is a DtypeError or an ArgumentError that names the tensor and says what was expected.

    Nothing is copied: the tensors' memory is held, and changes made in it are seen. Where it is, is settled now:
    another tensor put in place of one (`parameter.data = …`) is not seen, and memory must not be moved away underneath
    (`share_memory_()`, `resize_()`).

    scheme: the format, with the strides of these tensors.  shape: (E, N, K).
    """

    scheme: WeightFormat
    shape: tuple[int, int, int]
    parts: dict[str, PartTensors]
    """By what they are: "codes", "scales", "factor"."""
    description: str = field(init=False)
    """Format and parts as :mod:`expertile.runtime.descriptions` writes them."""
    serial: int = field(default_factory=itertools.count().__next__, init=False)
    """Another for each that is made."""
    _places: dict[int, tuple[Place, ...]] = field(default_factory=dict, init=False)
    _tables: list[ctypes.Array[ctypes.c_int64]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        parts = tuple((name, part.number) for name, part in self.parts.items())
        object.__setattr__(self, "description", descriptions.encode(self.scheme, parts))

    # Constructors ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_bf16(cls, weight: Tensors) -> ExpertWeights:
        """bf16 `[N, K]`, any K: for one tensor an expert (a stacked one needs no ExpertWeights)."""
        return _assemble([RowMajor(0)], codes=("weight", weight))

    @classmethod
    def from_int8(cls, weight: Tensors, scale: Tensors, group: int | None = None) -> ExpertWeights:
        """int8 `[N, K]` times a scale of its row (`[N]` or `[N, 1]`) or of its `group` elements (`[N, K/group]`).

        Symmetric; scales are fp32, bf16 or fp16. group: a multiple of 32.
        """
        kind = Int8 if group is None else partial(GroupedInt8, group=_group("group", group))
        return _assemble(_scaled(kind), codes=("weight", weight), scales=("scale", scale))

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensors,
        weight_scale: Tensors,
        weight_shape: Tensors | None = None,
        *,
        group_size: int,
    ) -> ExpertWeights:
        """int4 of compressed-tensors ("pack-quantized", symmetric): int32 `[N, K/8]`, scales `[N, K/group_size]`.

        Scales are fp32, bf16 or fp16. group_size: from the checkpoint's quantization_config, a multiple of 32.
        weight_shape: int64 or int32 `[2]`, compared with what the other tensors say.
        """
        kind = partial(Int4, group=_group("group_size", group_size))
        codes, scales = ("weight_packed", weight_packed), ("weight_scale", weight_scale)
        weights = _assemble(_scaled(kind), codes=codes, scales=scales)
        if weight_shape is not None:
            _compare("weight_shape", weight_shape, weights)
        return weights

    @classmethod
    def from_fp8(cls, weight: Tensors, scale: Tensors) -> ExpertWeights:
        """float8_e4m3fn `[N, K]` times a scale of its row: fp32, bf16 or fp16, `[N]` or `[N, 1]`."""
        return _assemble(_scaled(Fp8), codes=("weight", weight), scales=("scale", scale))

    @classmethod
    def from_fp8_block(
        cls, weight: Tensors, weight_scale_inv: Tensors, block: tuple[int, int] = (128, 128)
    ) -> ExpertWeights:
        """float8_e4m3fn `[N, K]` times a scale of its block, as in DeepSeek-V3: `[ceil(N/128), ceil(K/128)]`.

        Scales are fp32, bf16 or fp16.  block: the weight_block_size of the checkpoint's quantization_config.
        """
        if tuple(block) != (128, 128):
            raise ArgumentError(
                f"block: expected (128, 128), got {tuple(block)}; other blocks have no kernel, dequantise to bf16"
            )
        scales = "weight_scale_inv", weight_scale_inv
        return _assemble(_scaled(Fp8Block), codes=("weight", weight), scales=scales)

    @classmethod
    def from_mxfp8(cls, weight: Tensors, scale: Tensors) -> ExpertWeights:
        """float8_e4m3fn `[N, K]` times a power of two of its 32 elements: uint8 or float8_e8m0fnu `[N, K/32]`."""
        return _assemble([MxFp8()], codes=("weight", weight), scales=("scale", scale))

    @classmethod
    def from_mxfp4(cls, blocks: Tensors, scales: Tensors) -> ExpertWeights:
        """gpt-oss: blocks uint8 `[N, K/32, 16]`, low half first, and scales uint8 `[N, K/32]`, powers of two.

        A matrix packed as `[N, K/2]` is the same memory: `packed.unflatten(-1, (-1, 16))`.
        """
        return _assemble([Mxfp4()], codes=("blocks", blocks), scales=("scales", scales))

    @classmethod
    def from_ds_fp4(cls, weight: Tensors, scale: Tensors) -> ExpertWeights:
        """DeepSeek-V4: weight int8 `[N, K/2]`, low half first, and scale float8_e8m0fnu `[N, K/32]`."""
        return _assemble([DsFp4()], codes=("weight", weight), scales=("scale", scale))

    @classmethod
    def from_nvfp4(
        cls,
        weight: Tensors,
        weight_scale: Tensors,
        *,
        weight_scale_2: Tensors | None = None,
        weight_global_scale: Tensors | None = None,
    ) -> ExpertWeights:
        """NVFP4: uint8 `[N, K/2]`, low half first, times float8_e4m3fn `[N, K/16]`, and a number for each expert.

        Give the number under the name it has in the checkpoint, fp32 `[]` or `[1]` (stacked: `[E]` or `[E, 1]`):
        weight_scale_2 (ModelOpt) multiplies, weight_global_scale (compressed-tensors, whose weight is "weight_packed")
        divides.
        """
        factors = {"weight_scale_2": weight_scale_2, "weight_global_scale": weight_global_scale}
        given = [(name, factor) for name, factor in factors.items() if factor is not None]
        if len(given) != 1:
            raise ArgumentError(
                f"weight_scale_2, weight_global_scale: expected one of them, got {len(given) or 'neither'}"
            )
        scheme = Nvfp4(divides=given[0][0] == "weight_global_scale")
        codes, scales = ("weight", weight), ("weight_scale", weight_scale)
        return _assemble([scheme], codes=codes, scales=scales, factor=given[0])

    @classmethod
    def from_gguf(cls, reader: gguf.Reader, name: str | Sequence[str]) -> ExpertWeights:
        """A tensor of a GGUF file, such as "blk.0.ffn_gate_exps.weight", or a list of names, one for each expert.

        reader: a `gguf.GGUFReader`; its mapping of the file is what kernels read. The format is the tensor's own:
        BF16, Q4_0, Q8_0, Q4_K or Q6_K.
        """
        if isinstance(name, str):
            scheme, (found,) = gguf.tensors(reader, [name])
            return _assemble([scheme], codes=(name, found))
        scheme, each = gguf.tensors(reader, list(name))
        return _assemble([scheme], codes=("name", each))

    # What it holds ---------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors: aliases of those that were given."""
        return tuple(tensor for part in self.parts.values() for tensor in part.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and factors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantize(self, expert: int) -> torch.Tensor:
        """The values of an expert's matrix, fp32 `[N, K]`, exact but for one rounding: to look at, not to compute with.

        Raises ArgumentError for a number outside 0…E-1.
        """
        if not 0 <= expert < self.shape[0]:
            raise ArgumentError(f"expert: expected 0 to {self.shape[0] - 1}, got {expert}")
        parts = {name: part.of(expert) for name, part in self.parts.items()}
        if not isinstance(self.scheme, Quantized):
            return parts["codes"].float()
        raw = {name: _raw(part) for name, part in parts.items()}
        return torch.from_numpy(self.scheme.values(self.shape[2], **raw)).float()

    def places(self, row: int = 0) -> tuple[Place, ...]:
        """Where codes, scales and factors are, from row `row` of each matrix on; found once for a row."""
        found = self._places.get(row)
        if found is None:
            codes, scales = self.scheme.offsets(row)
            offsets = {"codes": codes, "scales": scales, "factor": 0}
            found = tuple(self._place(self.parts.get(name), by) for name, by in offsets.items())
            self._places[row] = found
        return found

    def _place(self, part: PartTensors | None, offset: int) -> Place:
        if part is None:
            return 0, 0
        if part.stacked:
            return part.tensors[0].data_ptr() + offset, part.step()
        table = part.addresses(offset)
        self._tables.append(table)
        return ctypes.addressof(table), TABLE

    def over(self, parts: dict[str, PartTensors]) -> ExpertWeights:
        """The same weights, with other tensors that are where these are: all that was found out stays true."""
        found = object.__new__(ExpertWeights)
        found.__dict__.update(self.__dict__, parts=parts)
        return found

    def __repr__(self) -> str:
        experts, rows, columns = self.shape
        size = self.nbytes / 2**20
        return f"ExpertWeights({_describe(self.scheme)}, {experts} of {rows} × {columns}, {size:.1f} MiB)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has memory, and so addresses, of its own.
        return ExpertWeights, (self.scheme, self.shape, self.parts)


def rebuild(name: str, text: str, tensors: Sequence[torch.Tensor]) -> ExpertWeights:
    """The weights over these tensors, as many as their `description` says; `name` is the argument's, for messages.

    Checked as by the constructors when such tensors, at such addresses, are first seen; then it takes microseconds.
    """
    parts, rest = {}, tuple(tensors)
    described = descriptions.decode(name, text)
    for part, number in described.parts:
        end = 1 if number is None else number
        parts[part], rest = PartTensors(f"{name} {part}", rest[:end], number is None), rest[end:]
    key = text, *(part.signature() for part in parts.values())
    known = _rebuilt.get(key)
    if known:
        return known.over(parts)
    given = {part: (found.name, found.given) for part, found in parts.items()}
    checked = _assemble([described.scheme], **given)
    if len(_rebuilt) >= _MOST_REBUILT:
        _rebuilt.clear()
    _rebuilt[key] = checked.over({})
    return checked


_rebuilt: dict[tuple[Any, ...], ExpertWeights] = {}
"""What has been checked, without the tensors, whose memory would never be freed."""
_MOST_REBUILT = 4096


# Schemes --------------------------------------------------------------------------------------------------------------


def _scaled(kind: Callable[..., Quantized]) -> list[Quantized]:
    """A scheme with each dtype that its scales can have."""
    return [kind(scale=dtype) for dtype in ("float32", "bfloat16", "float16")]


def _group(name: str, size: int) -> int:
    if not isinstance(size, int) or size < 1 or size % 32:
        raise ArgumentError(f"{name}: expected a multiple of 32, got {size!r}")
    return size


def _block(scheme: WeightFormat) -> int:
    return scheme.block if isinstance(scheme, Quantized) else 1


def _parts(scheme: WeightFormat, rows: int, columns: int) -> dict[str, Part]:
    if isinstance(scheme, Quantized):
        return scheme.parts(rows, columns)
    return {"codes": Part((rows, columns), ("bfloat16",))}


def _describe(scheme: WeightFormat) -> str:
    """A scheme's name and parameters."""
    strides = "row_bytes", "scale_row_bytes"
    found = [f"{f.name} {getattr(scheme, f.name)}" for f in fields(scheme) if f.name not in strides]
    return f"{scheme.name} ({', '.join(found)})" if found else scheme.name


# Checks ---------------------------------------------------------------------------------------------------------------


def _assemble(schemes: Sequence[WeightFormat], **given: tuple[str, object]) -> ExpertWeights:
    """Check the parts against each other, and find which of the schemes they are, which differ in dtypes only."""
    example = _parts(schemes[0], 1, _block(schemes[0]))["codes"]
    codes = collect(*given.pop("codes"), example.dtypes)
    rows, columns = _size(codes, schemes[0], len(example.shape))
    found = {"codes": codes}
    for part, (name, value) in given.items():
        dtypes = {scheme: _parts(scheme, rows, columns)[part].dtypes for scheme in schemes}
        found[part] = collect(name, value, [each for usable in dtypes.values() for each in usable])
        _same_experts(found[part], codes)
        schemes = [scheme for scheme in schemes if found[part].dtype in dtypes[scheme]]
    why = f"to go with {codes.name} of shape {codes.described} in {_describe(schemes[0])}"
    expected = _parts(schemes[0], rows, columns)
    parts = {name: part.shaped(expected[name].shape, why) for name, part in found.items()}
    return ExpertWeights(_laid_out(schemes[0], parts), (codes.experts, rows, columns), parts)


def _size(codes: PartTensors, scheme: WeightFormat, rank: int) -> tuple[int, int]:
    """N and K, from the codes' shape: K is what takes as many bytes as a row has."""
    if len(codes.shape) != rank:
        wanted = f"{rank + 1} dimensions, experts first," if codes.stacked else f"{rank} dimensions"
        raise ArgumentError(
            f"{codes.name}: expected {wanted} for {_describe(scheme)}, got shape {codes.described}; "
            "pass the tensors of all experts, stacked or in a list"
        )
    block = _block(scheme)
    columns = codes.length * block // scheme.code_bytes(block)
    if columns % block or scheme.code_bytes(columns) != codes.length:
        raise ArgumentError(
            f"{codes.name}: expected a multiple of {block} columns for {_describe(scheme)}, got {columns} in shape "
            f"{codes.described}; dequantise such a matrix to bf16"
        )
    return codes.shape[0], columns


def _laid_out(scheme: WeightFormat, parts: dict[str, PartTensors]) -> WeightFormat:
    """A scheme with the strides of these tensors."""
    row_bytes = parts["codes"].row_bytes
    if isinstance(scheme, Quantized) and "scales" in parts:
        return replace(scheme, row_bytes=row_bytes, scale_row_bytes=parts["scales"].row_bytes)
    return replace(scheme, row_bytes=row_bytes)


def _same_experts(part: PartTensors, codes: PartTensors) -> None:
    if part.experts != codes.experts:
        raise ArgumentError(
            f"{part.name}: expected {codes.experts} experts, as {codes.name} has, got {part.experts}; pass both for "
            "the same experts"
        )


def _compare(name: str, value: Tensors, weights: ExpertWeights) -> None:
    """Raise unless the shapes that a checkpoint notes are those of its tensors."""
    codes, expected = weights.parts["codes"], weights.shape[1:]
    noted = collect(name, value, ("int64", "int32"))
    _same_experts(noted, codes)
    noted = noted.shaped((2,), "for rows and columns")
    for expert in range(noted.experts):
        got = tuple(noted.of(expert).tolist())
        if got != expected:
            raise ArgumentError(
                f"{name}: expected {expected} to go with {codes.name} of shape {codes.described}, got {got} for expert "
                f"{expert}"
            )


def _raw(part: torch.Tensor) -> np.ndarray:
    """A tensor's bytes: uint8, a row each (or all, for a single number)."""
    rows = part.shape[:1]
    return part.contiguous().view(-1).view(torch.uint8).view(*rows, -1).numpy()

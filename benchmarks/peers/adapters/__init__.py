"""A peer is a file of this folder: what pip installs for it, and how a layer is made and called.

An adapter registers itself. It imports its library in `start`, not at the top: the controller reads it without one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from peers.inputs import Size

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A layer: x `[tokens, hidden]`, ids and fp32 router weights `[tokens, top_k]`; returns `[tokens, hidden]`."""


@dataclass(frozen=True)
class Setup:
    """What a process is going to be asked for."""

    size: Size
    layers: int
    tokens: tuple[int, ...]
    """The sizes of calls."""
    rows: tuple[int, ...]
    """All numbers of tokens that an expert gets in them."""
    threads: int


class Peer:
    """An adapter. One instance serves a process."""

    name: ClassVar[str]
    implementations: ClassVar[tuple[str, ...]]
    """What is measured; they share the process and what they can of the weights."""
    requirements: ClassVar[tuple[str, ...]]
    """Arguments of `pip install`, one installation after the other. None: the environment that runs the benchmark."""
    environment: ClassVar[str] = ""
    """Another peer whose environment it shares; default: one of its own, by its name."""
    weights: ClassVar[str] = "plain"
    """"plain": read where PyTorch has them; "repacked": copied into an order of its own, the original dropped."""
    formats: ClassVar[tuple[str, ...]] = ("bf16",)
    """The weight formats it has kernels for: "bf16" and names of `peers.formats.FORMATS`."""
    scratch: ClassVar[int] = 4
    """Bytes of memory it keeps for each row of a token and expert, by column of hidden + intermediate, about."""
    x_dtype: ClassVar[torch.dtype] = torch.bfloat16
    ids_dtype: ClassVar[torch.dtype] = torch.int64
    install_variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables for pip, where it compiles."""

    def start(self, setup: Setup) -> str:
        """Load the library; returns which kernels it uses here. Raises anything if it can't run here."""
        raise NotImplementedError

    def layer(self, gate_up: Any, down: Any) -> Mapping[str, Run]:
        """By implementation. The weights are freed unless it keeps them: tensors for bf16, else `Quantised`."""
        raise NotImplementedError

    def refusal(self, implementation: str, tokens: int) -> str | None:
        """Why not to run a size of calls, if so."""
        return None


_registered: list[type[Peer]] = []
_P = TypeVar("_P", bound=type[Peer])


def register(peer: _P) -> _P:
    """Make an adapter known (a class decorator)."""
    _registered.append(peer)
    return peer


def read(file: Path) -> type[Peer]:
    """The adapter that a file registers. Raises ValueError if it registers none, or several."""
    spec = importlib.util.spec_from_file_location(f"peers.adapters.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"adapter: expected a Python file, got {file}")
    count = len(_registered)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    found = _registered[count:]
    if len(found) != 1:
        raise ValueError(f"adapter: expected one registered Peer in {file}, got {len(found)}")
    return found[0]


def files() -> list[Path]:
    """The adapters of this folder."""
    return sorted(file for file in Path(__file__).parent.glob("*.py") if file.stem != "__init__")

"""The checks of a tensor by itself: that it is dense, in the CPU's memory, of a dtype and a number of dimensions."""

from __future__ import annotations

from collections.abc import Collection

import torch

from expertile.runtime.errors import ArgumentError, DtypeError


def tensor(
    name: str, value: object, rank: int, dtypes: Collection[torch.dtype], how: str = ""
) -> None:
    """Raise unless `value` is a dense CPU tensor of the rank and one of the dtypes."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    dense(name, value)
    if value.dim() != rank:
        raise ArgumentError(f"{name}: expected {rank} dimensions, got shape {tuple(value.shape)}")
    if value.dtype not in dtypes:  # this is on the way of every call, and names take a microsecond
        dtype(name, value, [_name(each) for each in dtypes], how)
    no_grad(name, value)


def dense(name: str, value: torch.Tensor) -> None:
    """Raise unless a tensor's memory is the CPU's, and holds its elements as they are."""
    if value.layout is not torch.strided:
        raise ArgumentError(
            f"{name}: expected a dense (strided) tensor, got layout {value.layout}; use .to_dense()"
        )
    if value.device.type != "cpu":
        raise ArgumentError(
            f"{name}: expected a tensor on the CPU, got device {value.device}; use .cpu()"
        )
    if value.is_neg():
        raise ArgumentError(
            f"{name}: is a lazily negated view, whose memory holds other numbers; use .resolve_neg()"
        )


def memory(name: str, value: torch.Tensor) -> None:
    """Raise unless a tensor's elements are in its own storage: not of fake tensors and of those that wrap others."""
    try:
        storage = value.untyped_storage()
        found = storage.device.type == "cpu" and storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        found = False
    if not found:
        raise ArgumentError(
            f"{name}: has no memory of its own ({type(value).__name__}); pass the tensors that hold the data"
        )


def dtype(name: str, value: torch.Tensor, expected: Collection[str], how: str = "") -> None:
    """Raise unless a tensor has one of the dtypes, given by PyTorch's names."""
    if dtype_name(value) not in expected:
        raise DtypeError(f"{name}: expected {' or '.join(expected)}, got {dtype_name(value)}{how}")


def dtype_name(value: torch.Tensor) -> str:
    """PyTorch's name of a tensor's dtype, such as "bfloat16"."""
    return _name(value.dtype)


def _name(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def no_grad(name: str, value: torch.Tensor) -> None:
    """Raise if autograd would record what happens to `value`."""
    if torch.is_grad_enabled() and value.requires_grad:
        raise ArgumentError(
            f"{name}: requires grad, but Expertile computes inference only; call it under torch.no_grad() or "
            "torch.inference_mode(), or use .detach()"
        )


def last_contiguous(name: str, value: torch.Tensor) -> None:
    """Raise unless neighbours in the last dimension are neighbours in memory."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides {tuple(value.stride())}; "
            "use .contiguous()"
        )

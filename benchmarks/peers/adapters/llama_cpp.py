"""llama.cpp: the graph of its expert layers, from the ggml libraries that its Python package is built with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.adapters import Peer, Run, Setup, register
from peers.inputs import Matrix

_F32, _I32 = 0, 26  # of enum ggml_type
_TYPES = {"bf16": 30, "q4_0": 2, "q8_0": 8, "q4_K": 12, "q6_K": 14}
_GRAPH_NODES = 256
_Pointer = ctypes.c_void_p
_I64, _Size = ctypes.c_int64, ctypes.c_size_t


class _Parameters(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("size", _Size), ("buffer", _Pointer), ("no_alloc", ctypes.c_bool))


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result's type, then the arguments'
    "ggml_init": (_Pointer, _Parameters),
    "ggml_free": (None, _Pointer),
    "ggml_tensor_overhead": (_Size,),
    "ggml_graph_overhead": (_Size,),
    "ggml_new_tensor_3d": (_Pointer, _Pointer, ctypes.c_int, _I64, _I64, _I64),
    "ggml_new_tensor_2d": (_Pointer, _Pointer, ctypes.c_int, _I64, _I64),
    "ggml_mul_mat_id": (_Pointer, _Pointer, _Pointer, _Pointer, _Pointer),
    "ggml_swiglu": (_Pointer, _Pointer, _Pointer),
    "ggml_mul": (_Pointer, _Pointer, _Pointer, _Pointer),
    "ggml_add": (_Pointer, _Pointer, _Pointer, _Pointer),
    "ggml_view_2d": (_Pointer, _Pointer, _Pointer, _I64, _I64, _Size, _Size),
    "ggml_new_graph": (_Pointer, _Pointer),
    "ggml_build_forward_expand": (None, _Pointer, _Pointer),
    "ggml_set_input": (None, _Pointer),
    "ggml_set_output": (None, _Pointer),
    "ggml_gallocr_new": (_Pointer, _Pointer),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, _Pointer, _Pointer),
    "ggml_backend_cpu_buffer_type": (_Pointer,),
    "ggml_backend_cpu_reg": (_Pointer,),
    "ggml_backend_reg_dev_get": (_Pointer, _Pointer, _Size),
    "ggml_backend_reg_get_proc_address": (_Pointer, _Pointer, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, _Pointer, _Pointer),
    "ggml_backend_buft_name": (ctypes.c_char_p, _Pointer),
    "ggml_backend_buft_get_alloc_size": (_Size, _Pointer, _Pointer),
    "ggml_backend_buft_alloc_buffer": (_Pointer, _Pointer, _Size),
    "ggml_backend_buffer_get_base": (_Pointer, _Pointer),
    "ggml_backend_buffer_free": (None, _Pointer),
    "ggml_backend_cpu_buffer_from_ptr": (_Pointer, _Pointer, _Size),
    "ggml_backend_tensor_alloc": (ctypes.c_int, _Pointer, _Pointer, _Pointer),
    "ggml_backend_tensor_set": (None, _Pointer, _Pointer, _Size, _Size),
    "ggml_backend_tensor_get": (None, _Pointer, _Pointer, _Size, _Size),
    "ggml_backend_graph_compute": (ctypes.c_int, _Pointer, _Pointer),
    "ggml_backend_cpu_init": (_Pointer,),
    "ggml_backend_cpu_set_n_threads": (None, _Pointer, ctypes.c_int),
    "ggml_cpu_has_avx512_bf16": (ctypes.c_int,),
}


class _Ggml:
    """The C functions that are used here, typed."""

    def __init__(self) -> None:
        spec = find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("llama_cpp is not installed")
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu")
        ]
        for name, (result, *arguments) in _SIGNATURES.items():
            function = next(f for lib in libraries if (f := getattr(lib, name, None)))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is missing from _SIGNATURES")


@register
class LlamaCpp(Peer):
    """`mul_mat_id` · `swiglu` · `mul_mat_id` · weighted sum, on fp32 activations.

    It rounds those to the type that goes with the weights': bf16, or blocks of int8. Weights are read where they are,
    unless it has an order of its own for them, into which its programs load them as well.
    """

    name = "llama.cpp"
    implementations = ("llama.cpp",)
    requirements = (
        "torch==2.13.0 numpy",
        "--no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36",
    )
    install_variables = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}  # noqa: RUF012
    scratch = 8
    formats = tuple(_TYPES)
    x_dtype = torch.float32
    ids_dtype = torch.int32

    def start(self, setup: Setup) -> str:
        self.ggml, self.setup = _Ggml(), setup
        self.in_place: list[Tensor] = []
        self.backend = self.ggml.backend_cpu_init()
        self.ggml.backend_cpu_set_n_threads(self.backend, setup.threads)
        self.allocators = {
            tokens: self.ggml.gallocr_new(self.ggml.backend_cpu_buffer_type())
            for tokens in setup.tokens
        }
        vectors = "avx512_bf16" if self.ggml.cpu_has_avx512_bf16() else "no avx512_bf16"
        self.order = self._own_order()
        place = self.ggml.backend_buft_name(self.order).decode() if self.order else "in place"
        return f"mul_mat_id {setup.size.weights}, {place} ({vectors})"

    def new_context(self) -> int:
        """For the tensors of a graph, without their data; lives as long as the process."""
        g = self.ggml
        overhead = _GRAPH_NODES * g.tensor_overhead() + g.graph_overhead()
        context: int = g.init(_Parameters(overhead, None, True))
        return context

    def _own_order(self) -> int | None:
        """The buffer type with an order of its own for such weights, if there is one."""
        g, size = self.ggml, self.setup.size
        device = g.backend_reg_dev_get(g.backend_cpu_reg(), 0)
        address = g.backend_reg_get_proc_address(
            g.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
        )
        types = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(device)
        for buffer_type in takewhile(bool, types):
            context = self.new_context()
            weight = self._tensor(context, (size.experts, *size.matrices[0]))
            buffer = self._allocate(buffer_type, weight)
            x = g.new_tensor_3d(context, _F32, size.hidden, 1, 1)
            ids = g.new_tensor_2d(context, _I32, size.top_k, 1)
            product = g.mul_mat_id(context, weight, x, ids)
            able = g.backend_dev_supports_op(device, product)
            g.backend_buffer_free(buffer)
            if able:
                return buffer_type
        return None

    def _tensor(self, context: int, shape: tuple[int, ...]) -> int:
        experts, rows, columns = shape
        type_ = _TYPES[self.setup.size.weights]
        tensor: int = self.ggml.new_tensor_3d(context, type_, columns, rows, experts)
        return tensor

    def _allocate(self, buffer_type: int, tensor: int) -> int:
        """A buffer for a tensor."""
        g = self.ggml
        size = g.backend_buft_get_alloc_size(buffer_type, tensor)
        buffer: int = g.backend_buft_alloc_buffer(buffer_type, size)
        g.backend_tensor_alloc(buffer, tensor, g.backend_buffer_get_base(buffer))
        return buffer

    def layer(self, gate_up: Matrix, down: Matrix) -> Mapping[str, Run]:
        context = self.new_context()
        weights = tuple(self._weight(context, matrix) for matrix in (gate_up, down))
        graphs = {tokens: _Graph(self, weights, tokens) for tokens in self.setup.tokens}
        return {"llama.cpp": lambda x, ids, router: graphs[len(x)](x, ids, router)}

    def _weight(self, context: int, weight: Matrix) -> int:
        """The tensor, in place or in its own order."""
        g = self.ggml
        data = weight if isinstance(weight, Tensor) else weight.codes
        tensor = self._tensor(context, weight.shape)
        if self.order:
            self._allocate(self.order, tensor)
            g.backend_tensor_set(tensor, data.data_ptr(), 0, data.nbytes)
        else:
            self.in_place.append(data)
            buffer = g.backend_cpu_buffer_from_ptr(data.data_ptr(), data.nbytes)
            g.backend_tensor_alloc(buffer, tensor, data.data_ptr())
        return tensor


class _Graph:
    """A layer for one number of tokens. Its scratch is shared with the other layers' graphs of that size."""

    def __init__(self, peer: LlamaCpp, weights: tuple[int, ...], tokens: int) -> None:
        self.ggml, self.backend, self.allocator = peer.ggml, peer.backend, peer.allocators[tokens]
        self.size, self.tokens, self.weights = peer.setup.size, tokens, weights
        self.context = peer.new_context

    @cached_property
    def _built(self) -> tuple[int, int, int, int, int]:
        """The graph, and its x, ids, router weights and result; allocated once, as all layers' graphs are alike."""
        g, s, tokens = self.ggml, self.size, self.tokens
        context, (gate_up, down) = self.context(), self.weights
        x = g.new_tensor_3d(context, _F32, s.hidden, 1, tokens)
        ids = g.new_tensor_2d(context, _I32, s.top_k, tokens)
        router = g.new_tensor_3d(context, _F32, 1, s.top_k, tokens)
        for tensor in (x, ids, router):
            g.set_input(tensor)
        inner = g.swiglu(context, g.mul_mat_id(context, gate_up, x, ids))
        each = g.mul(context, g.mul_mat_id(context, down, inner, ids), router)
        row = 4 * s.hidden
        slots = [
            g.view_2d(context, each, s.hidden, tokens, s.top_k * row, slot * row)
            for slot in range(s.top_k)
        ]
        graph, out = g.new_graph(context), slots[0]
        g.build_forward_expand(graph, each)
        for slot in slots[1:]:
            out = g.add(context, out, slot)
        g.set_output(out)
        g.build_forward_expand(graph, out)
        if not g.gallocr_alloc_graph(self.allocator, graph):
            raise MemoryError(f"ggml could not allocate the graph of {tokens} tokens")
        return graph, x, ids, router, out

    def __call__(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        g = self.ggml
        graph, *inputs, result = self._built
        for tensor, value in zip(inputs, (x, ids, router), strict=True):
            g.backend_tensor_set(tensor, value.data_ptr(), 0, 4 * value.numel())
        status = g.backend_graph_compute(self.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute ended with status {status}")
        out = torch.empty_like(x)
        g.backend_tensor_get(result, out.data_ptr(), 0, 4 * out.numel())
        return out

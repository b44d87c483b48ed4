"""What the schedule makes of a model's weights on several memory nodes, on paper.

Weights are stacked tensors that begin at a page, and their pages of 4 KiB are on nodes 0, 1, 2 … in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from expertile._bench import Shape
from expertile._roofline import expected_experts
from expertile.codegen.layouts import CHUNK
from expertile.runtime.errors import ArgumentError
from expertile.runtime.numa import traffic
from expertile.runtime.numa.interleaving import Interleaving
from expertile.runtime.numa.segments import (
    Geometry,
    Segment,
    period,
    remote_bytes,
    segments,
    tables,
)
from expertile.templates.formats.base import ByRows

Json = dict[str, Any]

PAGE_BYTES = 4096


# Matrices -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """The matrices of a projection, of all experts in one tensor. Gate and up are in one."""

    role: str
    format: ByRows
    rows: int
    """Of an expert."""
    columns: int
    experts: int
    matrices: int
    """That the rows of an expert belong to: gate and up, or one."""
    step: int
    """Rows from one of a matrix to its next."""

    @property
    def memory(self) -> Geometry:
        """An expert's rows as they lie."""
        return Geometry.of(self.format, self.rows, self.columns, CHUNK)

    @property
    def scale_bytes(self) -> int:
        """Of an expert, in a tensor of their own."""
        return self.format.matrix_bytes(self.rows, self.columns) - self.code_bytes

    @property
    def code_bytes(self) -> int:
        """Of an expert."""
        return self.rows * self.format.code_bytes(self.columns)

    def period(self, nodes: int) -> int:
        """T."""
        return period(self.memory.row_bytes, _in_turn(nodes))

    def segments(self, nodes: int) -> list[Segment]:
        """Of the rows of one period, from the first row on."""
        return segments(self.memory, 0, _in_turn(nodes))

    def addresses(self) -> Iterator[int]:
        """Where each matrix begins."""
        apart = 1 if self.step > 1 else self.rows // self.matrices
        for expert in range(self.experts):
            for matrix in range(self.matrices):
                yield (expert * self.rows + matrix * apart) * self.format.row_bytes

    def remote_bytes(self, nodes: int) -> int:
        """Bytes of the codes of all experts that threads of another node read under the schedule."""
        geometry = Geometry.of(
            self.format.every(self.step), self.rows // self.matrices, self.columns, CHUNK
        )
        return _remote_bytes(geometry, tuple(self.addresses()), nodes)


@cache
def _remote_bytes(geometry: Geometry, addresses: tuple[int, ...], nodes: int) -> int:
    """Formats that differ in their scales only share an answer."""
    rule = _in_turn(nodes)
    placed = [(address, rule) for address in addresses]
    owner = {node: node for node in range(nodes)}
    return remote_bytes(geometry, tables(geometry, placed, owner, nodes), placed, owner)[0]


def _in_turn(nodes: int) -> Interleaving:
    return Interleaving(PAGE_BYTES, tuple(range(nodes)))


def stacks(shape: Shape) -> tuple[Stack, Stack]:
    """Gate/up and down of a layer in the shape's weight format.

    Raises ArgumentError for a format that can't have such rows, and for transposed weights.
    """
    spec = shape.spec()
    if spec.transposed:
        raise ArgumentError(
            f"--model: expected weights with a row for each output, got {shape.name}, which is transposed"
        )
    gate_up, down = spec.formats()
    assert isinstance(gate_up, ByRows)
    assert isinstance(down, ByRows)
    both, sizes = spec.projections, (shape.hidden, shape.intermediate)
    step = both if spec.interleaved else 1
    return (
        Stack("gate_up", gate_up, both * sizes[1], sizes[0], shape.experts, both, step),
        Stack("down", down, sizes[0], sizes[1], shape.experts, 1, 1),
    )


# Reports --------------------------------------------------------------------------------------------------------------


def study(
    shape: Shape, nodes: int, tokens: Sequence[int], machines: Sequence[traffic.Machine]
) -> Json:
    """A model's weights on several nodes, and how long machines take to read them for calls of so many tokens."""
    return {
        **asdict(shape),
        "nodes": nodes,
        "page_bytes": PAGE_BYTES,
        "roles": [_role(stack, nodes) for stack in stacks(shape)],
        "machines": [_expected(shape, machine, tokens) for machine in machines],
    }


def _role(stack: Stack, nodes: int) -> Json:
    geometry = stack.memory
    return {
        **_sizes(stack, nodes),
        "rows": stack.rows,
        "columns": stack.columns,
        "row_bytes": geometry.row_bytes,
        "segments": [
            {"row": row, "node": node, "first": first, "end": end}
            for row, first, end, node in _in_columns(stack, stack.segments(nodes))
        ],
    }


def _sizes(stack: Stack, nodes: int) -> Json:
    """What the table of all models has of a projection; bytes are those of all experts."""
    return {
        "role": stack.role,
        "period": stack.period(nodes),
        "code_bytes": stack.experts * stack.code_bytes,
        "remote_code_bytes": stack.remote_bytes(nodes),
        "scale_bytes": stack.experts * stack.scale_bytes,
    }


def _in_columns(stack: Stack, found: Iterable[Segment]) -> Iterator[Segment]:
    """Segments in elements in place of bytes, cut where rows can be divided; those that nothing is left of are gone."""
    for row, first, end, node in found:
        begin, stop = _column(stack, first), _column(stack, end)
        if begin < stop:
            yield Segment(row, begin, stop, node)


def _column(stack: Stack, byte: int) -> int:
    """The element nearest to a byte of a row at which rows can be divided."""
    geometry = stack.memory
    if byte == geometry.code_bytes:
        return stack.columns
    grain = (2 * byte + geometry.grain_bytes - 1) // (2 * geometry.grain_bytes)
    return min(grain * geometry.grain_chunks * CHUNK, stack.columns)


def _expected(shape: Shape, machine: traffic.Machine, tokens: Sequence[int]) -> Json:
    """What the traffic model says of calls on a machine."""
    roles = [
        traffic.Role(each.code_bytes, each.scale_bytes, each.remote_bytes(machine.nodes) / each.experts)
        for each in stacks(shape)
    ]  # fmt: skip

    def call(count: int) -> Json:
        experts = expected_experts(shape, count)
        found: Json = {"tokens": count, "experts": experts}
        for name, scheduled in (("without", False), ("with", True)):
            each = traffic.predict(machine, roles, experts, scheduled)
            found[f"{name}_ms"] = [each.least * 1e3, each.most * 1e3]
            found[f"{name}_remote_share"] = each.remote_share
        return found

    return {
        **asdict(machine),
        "gain": list(traffic.gain(machine, roles)),
        "calls": [call(count) for count in tokens],
    }


def overview(shapes: Iterable[Shape], weights: Sequence[str], nodes: Sequence[int]) -> list[Json]:
    """Periods and remote bytes of each model in each format on so many nodes; or why it can't have the format."""
    found = []
    for shape in shapes:
        for name in weights:
            row: Json = {"model": shape.name, "weights": name, "native": shape.native == name}
            try:
                both = stacks(shape.in_format(name))
            except ArgumentError as error:
                found.append(row | {"absent": str(error)})
                continue
            found += [
                row | {"nodes": n, "roles": [_sizes(stack, n) for stack in both]} for n in nodes
            ]
    return found

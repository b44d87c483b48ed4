"""`expertile.numa`: what it refuses, that it leaves contents alone, and what it says of pages wherever they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import expertile
import expertile.numa
from expertile.runtime.errors import ArgumentError, DtypeError, ExpertileError
from expertile.runtime.numa import interleaving, pages, plan
from expertile.runtime.numa.groups import Groups
from expertile.runtime.numa.interleaving import Interleaving, PageMap, fitted
from expertile.runtime.numa.report import Memory, Part
from expertile.runtime.numa.report import report as report_memory
from expertile.runtime.numa.segments import Geometry, remote_bytes, tables
from expertile.runtime.numa.topology import Node, Topology

PAGE = pages.PAGE_BYTES


def machine(
    *nodes: int, without_memory: Sequence[int] = (), closed: Sequence[int] = ()
) -> Topology:
    """Nodes of these numbers, with a CPU each."""
    found = tuple(
        Node(number, (number,), 0 if number in without_memory else 2**30, 2**29, (0,), number not in closed)
        for number in nodes
    )  # fmt: skip
    distances = tuple(tuple(10 if a == b else 20 for b in nodes) for a in nodes)
    return Topology(found, distances, None)


@contextmanager
def pages_at(rule: Callable[[int], int]) -> Iterator[None]:
    """As if each page, by its number, were on such a node."""

    def page_map(address: int, size: int) -> PageMap:
        first, count = pages.span(address, size)
        nodes = np.array([rule(number) for number in range(first, first + count)], np.int16)
        return fitted(nodes, address, PAGE)

    with mock.patch.object(interleaving, "page_map", page_map):
        yield


@pytest.fixture
def movable() -> None:
    """Skips where a container forbids the calls."""
    memory = torch.zeros(4 * PAGE, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pages.where(memory.data_ptr(), PAGE)
        address = -(-memory.data_ptr() // PAGE) * PAGE
        bound = pages.bind(address, PAGE, pages.Policy(pages.DEFAULT))
    if found is None or not bound:
        pytest.skip("this system refuses move_pages or mbind")


# interleave ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("movable")
@pytest.mark.parametrize("shape", [(3, 700, 512), (1,), (40, 129)])
def test_interleaving_changes_where_a_tensor_is_and_nothing_else(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float32)
    before, address, alias = tensor.clone(), tensor.data_ptr(), tensor.view(-1)
    found = expertile.numa.interleave(tensor)
    assert torch.equal(tensor, before)
    assert tensor.data_ptr() == address == alias.data_ptr()
    assert found.pages == found.placed + found.untouched + found.refused
    assert found.pages == pages.span(address, tensor.nbytes)[1]
    assert found.untouched == 0
    if tensor.dim() > 1 and not found.refused:
        [part] = expertile.numa.report(tensor).parts
        assert part.share == 1.0


@pytest.mark.usefixtures("movable")
def test_what_is_interleaved_may_lie_in_any_order() -> None:
    tensor = torch.zeros(8, 64, 512)
    assert expertile.numa.interleave(tensor.transpose(0, 2)).pages > 0
    shared = torch.zeros(8, 4096).share_memory_()
    assert expertile.numa.interleave(shared).pages > 0


def recorded(
    monkeypatch: pytest.MonkeyPatch, found: pages.Placement | None
) -> list[tuple[int, int, Any]]:
    """The calls of `pages.interleave`, none of which is made."""
    calls: list[tuple[int, int, Any]] = []

    def interleave(address: int, size: int, nodes: Any) -> pages.Placement | None:
        calls.append((address, size, nodes))
        return found

    monkeypatch.setattr(pages, "interleave", interleave)
    return calls


PLACED = pages.Placement(3, 3, 0, 0, True, ())


def test_all_nodes_with_memory_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    four = machine(0, 2, 3, 5, without_memory=[3], closed=[5])
    monkeypatch.setattr(expertile.numa, "topology", lambda: four)
    calls = recorded(monkeypatch, PLACED)
    tensor = torch.zeros(3, PAGE)
    assert expertile.numa.interleave(tensor) is PLACED
    [(address, size, nodes)] = calls
    assert list(nodes) == [0, 2]
    # Whole pages, those at both ends too: a row may begin on the first one.
    assert address % PAGE == size % PAGE == 0
    assert address <= tensor.data_ptr() < address + PAGE
    end = tensor.data_ptr() + tensor.nbytes
    assert address + size - PAGE < end <= address + size


def test_layers_are_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, PLACED)
    forgotten = []
    monkeypatch.setattr(plan, "forget", lambda: forgotten.append(True))
    expertile.numa.interleave(torch.zeros(10))
    assert forgotten


@pytest.mark.parametrize(
    "nodes", [[], [1], [0, 0], [-1], [4], [0, 3], [5]], ids=lambda nodes: str(nodes)
)
def test_nodes_that_cannot_be_used(nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    topology = machine(0, 2, 3, 5, without_memory=[3], closed=[5])
    monkeypatch.setattr(expertile.numa, "topology", lambda: topology)
    with pytest.raises(ArgumentError, match=r"^nodes: .*\[0, 2\]"):
        expertile.numa.interleave(torch.zeros(10), nodes)


@pytest.mark.parametrize(
    "found", [None, pages.Placement(3, 0, 0, 3, False, ("3 pages: no",))], ids=["all", "moving"]
)
def test_a_system_that_refuses(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, found)
    with pytest.raises(ExpertileError, match="move_pages"):
        expertile.numa.interleave(torch.zeros(10))


def _mapped(tmp_path: Path, mode: str) -> torch.Tensor:
    file = tmp_path / "weights"
    file.write_bytes(bytes(4 * PAGE))
    with warnings.catch_warnings():  # PyTorch's, of read-only memory
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.memmap(file, np.float32, mode))


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_mapped_files_stay_where_they_are(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"file /.*weights"):
        expertile.numa.interleave(_mapped(tmp_path, mode))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/anon_hugepage (deleted)", "huge pages"),
        ("/data/model.safetensors", "model.safetensors"),
        ("/memfd:weights (deleted)", None),
        ("/dev/shm/torch_1", None),
        ("[heap]", None),
        ("", None),
    ],
)
def test_what_memory_is_called(
    path: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(PAGE)
    begin, end = tensor.data_ptr() - 64, tensor.data_ptr() + tensor.nbytes
    maps = tmp_path / "maps"
    lines = (
        f"{begin - 4096:x}-{begin:x} r--p 00000000 fe:00 7 /lib/before.so",
        f"{begin:x}-{end:x} rw-p 00000000 00:00 0 {path}",
        f"{end:x}-{end + 4096:x} r--p 00000000 fe:00 7 /lib/behind.so",
    )
    maps.write_text("\n".join(lines))
    monkeypatch.setattr(expertile.numa, "_MAPS", maps)
    recorded(monkeypatch, PLACED)
    if words is None:
        assert expertile.numa.interleave(tensor) is PLACED
    else:
        with pytest.raises(ArgumentError, match=words):
            expertile.numa.interleave(tensor)


class Wrapper(torch.Tensor):
    """A tensor whose elements are somewhere else."""

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


def _wrapper() -> torch.Tensor:
    found: torch.Tensor = torch.Tensor._make_wrapper_subclass(Wrapper, (4, 4))
    return found


NO_TENSORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [1.0], DtypeError, "torch.Tensor"),
    "array": (lambda: np.zeros(3), DtypeError, "ndarray"),
    "meta": (lambda: torch.zeros(4, device="meta"), ArgumentError, "meta"),
    "sparse": (lambda: torch.eye(4).to_sparse(), ArgumentError, "to_dense"),
    "gaps": (lambda: torch.zeros(4, 64)[:, :32], ArgumentError, "gaps"),
    "expanded": (lambda: torch.zeros(4, 1).expand(4, 8), ArgumentError, "gaps"),
    "empty": (lambda: torch.zeros(0, 3), ArgumentError, "at least one element"),
    "wrapper": (_wrapper, ArgumentError, "no memory"),
}


@pytest.mark.parametrize("what", NO_TENSORS)
def test_what_has_no_pages_to_move(what: str) -> None:
    make, kind, words = NO_TENSORS[what]
    with pytest.raises(kind, match=words) as raised:
        expertile.numa.interleave(make())
    assert str(raised.value).startswith("tensor: ")


# report -------------------------------------------------------------------------------------------


def parts(topology: Topology, rule: Callable[[int], int], *weights: Any) -> tuple[Part, ...]:
    """What is reported of weights whose pages are by a rule on a machine with such nodes."""
    with (
        pages_at(rule),
        mock.patch.object(expertile.numa, "topology", return_value=topology),
        mock.patch.object(expertile.numa.openmp, "threads", return_value=4),
    ):
        return expertile.numa.report(*weights).parts


@pytest.mark.parametrize(
    ("rows", "columns", "nodes", "period"),
    [
        (1536, 2048, 2, 2),
        (128, 768, 2, 16),
        (64, 4096, 2, 1),
        (300, 2880, 4, 128),
        (64, 1408, 4, 64),
    ],
)
@pytest.mark.skipif(PAGE != 4096, reason="the periods are those of pages of 4 KiB")
def test_interleaved_tensors_are_read_locally(
    rows: int, columns: int, nodes: int, period: int
) -> None:
    weights = torch.zeros(3, rows, columns, dtype=torch.bfloat16)
    [part] = parts(machine(*range(nodes)), lambda page: page % nodes, weights)
    assert part.interleaving == Interleaving(PAGE, tuple(range(nodes)))
    assert (part.share, part.period, part.local) == (1.0, period, 1.0)
    assert part.nbytes == weights.nbytes
    assert part.pages is not None
    assert sum(part.pages.values()) == pages.span(weights.data_ptr(), weights.nbytes)[1]
    assert set(part.pages) == set(range(nodes))


def test_this_machine_says_where_pages_are() -> None:
    weights = torch.ones(2, 64, 256, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [part] = expertile.numa.report(weights).parts
    if part.pages is None:
        assert part.local is None
        assert "does not say" in str(part)
        return
    assert set(part.pages) <= set(expertile.numa.topology().memory_nodes)
    if len(expertile.numa.topology().memory_nodes) == 1:
        assert (part.share, part.local) == (1.0, 1.0)


def test_everything_on_one_node_of_two() -> None:
    """Whatever is on a node is read by its threads, which leaves the others without work."""
    [part] = parts(machine(0, 1), lambda page: 1, torch.zeros(2, 64, 256))
    assert part.interleaving == Interleaving(PAGE, (1,))
    assert (part.share, part.period, part.local) == (1.0, 1, 1.0)
    assert list(part.pages or {}) == [1]


def test_nodes_whose_cpus_are_not_ours() -> None:
    """Confined to one node's CPUs, a process reads half of it from afar; memory without CPUs is as near as it gets."""
    two = machine(0, 1)
    for sockets, local in (((1,), 0.5), ((), 1.0)):
        other = replace(two.nodes[1], cpus=(), sockets=sockets)
        here = replace(two, nodes=(two.nodes[0], other))
        [part] = parts(here, lambda page: page % 2, torch.zeros(2, 64, 2048))
        assert part.share == 1.0
        assert part.local == pytest.approx(local, abs=0.02)


def test_pages_that_nobody_has_touched() -> None:
    [part] = parts(machine(0, 1), lambda page: -2, torch.zeros(2, 64, 1024))
    assert (part.interleaving, part.period, part.share, part.local) == (None, None, 0.0, 0.0)
    assert list(part.pages or {}) == [-1]
    assert "no node yet" in str(part)


def test_a_kernel_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaving, "page_map", lambda address, size: None)
    [part] = expertile.numa.report(torch.zeros(2, 64, 1024)).parts
    assert (part.pages, part.interleaving, part.local, part.share) == (None, None, None, 0.0)


def test_expert_weights_are_their_parts() -> None:
    blocks = torch.zeros(4, 64, 8, 16, dtype=torch.uint8)
    scales = torch.zeros(4, 64, 8, dtype=torch.uint8)
    weights = expertile.ExpertWeights.from_mxfp4(blocks, scales)
    codes, found_scales = parts(machine(0, 1), lambda page: page % 2, weights)
    assert codes.name == "weights[0] codes"
    assert codes.shape == (4, 64, 8, 16)
    assert (codes.nbytes, codes.period, codes.local) == (blocks.nbytes, 2 * PAGE // 128, 1.0)
    assert found_scales.name == "weights[0] scales"
    assert (found_scales.nbytes, found_scales.period, found_scales.local) == (
        scales.nbytes,
        None,
        None,
    )


def test_a_tensor_for_each_expert() -> None:
    each = [torch.zeros(64, 2048, dtype=torch.bfloat16) for _ in range(3)]
    weights = expertile.ExpertWeights.from_bf16(each)
    [part] = parts(machine(0, 1), lambda page: page % 2, weights)
    assert (part.shape, part.local) == ((3, 64, 2048), 1.0)
    assert part.nbytes == 3 * each[0].nbytes


def test_rows_with_gaps() -> None:
    both = torch.zeros(3, 128, 2048, dtype=torch.bfloat16)
    [part] = parts(machine(0, 1), lambda page: page % 2, both[:, ::2])
    assert (part.shape, part.local) == ((3, 64, 2048), 1.0)
    assert part.period == 2 * PAGE // np.gcd(2 * PAGE, 8192)


def test_a_report_is_a_line_a_part() -> None:
    weights = torch.zeros(8, 64, 2048, dtype=torch.bfloat16)
    with pages_at(lambda page: page % 2):
        found = str(expertile.numa.report(weights, weights[0]))
    first, second = found.splitlines()
    assert first.startswith("weights[0]: 8 × 64 × 2048, 2.0 MiB; pages on node 0: ")
    assert second.startswith("weights[1]: 64 × 2048, ")
    assert "100.0% in turn on 0, 1, " in first
    assert expertile.numa.report().parts == ()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [torch.zeros(2, 2)], DtypeError, "ExpertWeights"),
    "vector": (lambda: torch.zeros(4), ArgumentError, r"\[E, N, K\]"),
    "four dimensions": (lambda: torch.zeros(2, 2, 2, 2), ArgumentError, r"\[E, N, K\]"),
    "empty": (lambda: torch.zeros(0, 4, 4), ArgumentError, "at least one"),
    "columns": (lambda: torch.zeros(2, 8, 4).transpose(1, 2), ArgumentError, "contiguous"),
    "meta": (lambda: torch.zeros(2, 4, 4, device="meta"), ArgumentError, "meta"),
    "wrapper": (_wrapper, ArgumentError, "no memory"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_weight(what: str) -> None:
    make, kind, words = WRONG[what]
    with pytest.raises(kind, match=words) as raised:
        expertile.numa.report(torch.zeros(2, 4), make())
    assert str(raised.value).startswith("weights[1]: ")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Geometry, list[int], int]:
    """A matrix, where there are such, and the number of nodes."""
    grain_chunks, grain_bytes = draw(
        st.sampled_from([(1, 64), (1, 32), (1, 16), (8, 144), (1, 34)])
    )
    grains = draw(st.integers(1, 400))
    code_bytes = grains * grain_bytes
    row_bytes = code_bytes + draw(st.sampled_from([0, 0, 64, code_bytes]))
    rows = draw(st.integers(1, 40))
    geometry = Geometry(
        rows, row_bytes, code_bytes, grains * grain_chunks, grain_chunks, grain_bytes
    )
    first = draw(st.integers(0, 3 * PAGE)) & -16
    addresses = [
        2**40 + first + expert * rows * row_bytes for expert in range(draw(st.integers(1, 3)))
    ]
    return geometry, addresses, draw(st.integers(1, 4))


def _groups(nodes: int) -> Groups:
    each = range(nodes)
    return Groups({node: node for node in each}, tuple(each), tuple(frozenset([n]) for n in each))


def _memory(geometry: Geometry, addresses: list[int]) -> Memory:
    end = addresses[-1] + (geometry.rows - 1) * geometry.row_bytes + geometry.code_bytes
    return Memory(addresses[0], end - addresses[0], addresses)


@given(layouts())
def test_local_is_what_is_not_remote(layout: tuple[Geometry, list[int], int]) -> None:
    geometry, addresses, nodes = layout
    groups = _groups(nodes)
    with pages_at(lambda page: page % nodes):
        memory = _memory(geometry, addresses)
        where = interleaving.page_map(memory.address, memory.size)
        part = report_memory("w", (), [memory], geometry, groups)
    assert where is not None
    span = (geometry.rows - 1) * geometry.row_bytes + geometry.code_bytes
    placed = [(address, where.interleaving(address, span)) for address in addresses]
    if any(rule is None for _, rule in placed):  # too few pages to tell a pattern
        return
    divided = tables(geometry, placed, groups.owner, nodes)
    remote, total = remote_bytes(geometry, divided, placed, groups.owner)
    assert part.local == pytest.approx(1 - remote / total, abs=1e-12)


@given(layouts(), st.randoms(use_true_random=False))
def test_local_is_counted_byte_by_byte(
    layout: tuple[Geometry, list[int], int], random: Any
) -> None:
    """Pages anywhere, or nowhere: each byte belongs to a reader, and is on that reader's node or is not."""
    geometry, addresses, nodes = layout
    on: dict[int, int] = {}

    def rule(page: int) -> int:
        return on.setdefault(page, random.randrange(-1, nodes))

    groups = _groups(nodes)
    with pages_at(rule):
        memory = _memory(geometry, addresses)
        where = interleaving.page_map(memory.address, memory.size)
        part = report_memory("w", (), [memory], geometry, groups)
    assert where is not None
    span = (geometry.rows - 1) * geometry.row_bytes + geometry.code_bytes
    placed = [(address, where.interleaving(address, span)) for address in addresses]
    divided = tables(geometry, placed, groups.owner, nodes)
    local = total = 0
    for address, phase in zip(addresses, divided.phase.tolist(), strict=True):
        for group in range(nodes):
            for first, end in divided.cells[phase, group].tolist():
                for row, _, rows, begin, stop, _ in divided.entries[first:end].tolist():
                    for number in range(rows):
                        start = address + (row + number * divided.apart) * geometry.row_bytes
                        for chunks in divided.ranges[begin:stop].tolist():
                            left, right = (_byte(geometry, chunk) for chunk in chunks)
                            total += right - left
                            local += sum(
                                min(right, (page + 1) * PAGE - start)
                                - max(left, page * PAGE - start)
                                for page in range(
                                    (start + left) // PAGE, (start + right - 1) // PAGE + 1
                                )
                                if on[page] == group
                            )
    assert total == len(addresses) * geometry.rows * geometry.code_bytes
    assert part.local == pytest.approx(local / total, abs=1e-12)


def _byte(geometry: Geometry, chunk: int) -> int:
    return min(chunk // geometry.grain_chunks * geometry.grain_bytes, geometry.code_bytes)

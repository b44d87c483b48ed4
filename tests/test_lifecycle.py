"""From import to exit: what is loaded, which ISA is chosen, new processes, forks. Each in a process of its own."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
from subprocesses import digest, run

from expertile.codegen import cpu
from expertile.codegen import isa as isas

SHAPE: dict[str, Any] = {
    "tokens": 24,
    "experts": 8,
    "top_k": 2,
    "hidden": 512,
    "intermediate": 256,
}

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86-64")
x86_64_linux = pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"),
    reason="AMX permission is a matter of Linux on x86-64",
)
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(scope="module")
def expected() -> str:
    """The layer's bits, computed by one thread of this process."""
    with oracle.threads(1):
        case = oracle.make_case(1, **SHAPE)
        result = case.run()
    oracle.check(case, result)
    return digest(result)


# Import -------------------------------------------------------------------------------------------


def _loaded_by(step: str) -> list[str]:
    """Top-level modules that are loaded beyond those of torch and its own, up to a step."""
    import sys

    import torch

    names = ("numba", "rich", "typer", "platformdirs", "filelock", "transformers", "matplotlib")
    before = {name for name in names if name in sys.modules}
    import expertile

    if step == "call":
        x, ids = torch.ones(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
        weights = torch.ones(2, 64, 32).bfloat16(), torch.ones(2, 32, 32).bfloat16()
        expertile.fused_experts(x, *weights, ids, torch.ones(2, 1))
    return sorted({name for name in names if name in sys.modules} - before)


def test_import_loads_nothing_for_later() -> None:
    """Neither what the command line needs, nor what finds the cache, nor any compiler but LLVM."""
    assert run(_loaded_by, "import") == []


def test_a_call_loads_nothing_but_what_finds_the_cache(tmp_path: Path) -> None:
    env = {"EXPERTILE_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert run(_loaded_by, "call", env=env) == ["platformdirs"]
    assert run(_loaded_by, "call", env={"EXPERTILE_CACHE_DIR": str(tmp_path)}) == []


# New processes ------------------------------------------------------------------------------------


def _computed(shape: dict[str, Any]) -> dict[str, Any]:
    """The layer's bits, the ISA, how much was compiled, and whether Numba (which also could) is there."""
    import sys

    import oracle
    from subprocesses import digest

    from expertile.codegen import isa as isas
    from expertile.codegen.compiler import counters

    case = oracle.make_case(1, **shape)
    result = case.run()
    oracle.check(case, result)
    return {
        "digest": digest(result),
        "isa": isas.select().name,
        "llvm": counters().llvm,
        "cache_hits": counters().cache_hits,
        "numba": "numba" in sys.modules,
    }


def test_a_second_process_compiles_nothing(expected: str, tmp_path: Path) -> None:
    env = {"EXPERTILE_CACHE_DIR": str(tmp_path)}
    first, second = (run(_computed, SHAPE, env=env) for _ in range(2))
    assert first["llvm"] > 0
    assert second["llvm"] == 0
    assert second["cache_hits"] == first["llvm"] + first["cache_hits"]
    assert not first["numba"]
    assert not second["numba"]
    assert first["digest"] == second["digest"] == expected


# Which ISA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", isas.names())
def test_an_isa_by_name(name: str) -> None:
    """The one that EXPERTILE_ISA names computes the layer, or says why it can't: none takes its place."""
    reason = isas.by_name(name).unavailable()
    env = {"EXPERTILE_ISA": name}
    if reason is None:
        assert run(_computed, SHAPE | {"tokens": 3}, env=env)["isa"] == name
    else:
        message = run(_refusal, env=env)
        assert f"EXPERTILE_ISA={name}" in message
        assert reason in message


def _refusal() -> str:
    import oracle
    import pytest

    from expertile import CodegenError

    case = oracle.make_case(1, tokens=1, experts=1, top_k=1, hidden=32, intermediate=32)
    with pytest.raises(CodegenError) as caught:
        case.run()
    return str(caught.value)


def test_an_unknown_isa_is_refused() -> None:
    message = run(_refusal, env={"EXPERTILE_ISA": "avx512_bf61"})
    assert "avx512_bf61" in message
    for name in isas.names():
        assert name in message


def test_tiles_without_tiles_are_refused_with_the_reason() -> None:
    status = cpu.amx_status()
    if status.usable:
        pytest.skip("AMX works here")
    assert status.reason in run(_refusal, env={"EXPERTILE_ISA": "amx"})


@x86_64
def test_plain_vectors_where_the_features_are_masked() -> None:
    env = {"EXPERTILE_MASK_FEATURES": "amx-tile,avx512bf16", "EXPERTILE_ISA": ""}
    assert run(_computed, SHAPE, env=env)["isa"] == "portable"


@x86_64
def test_plain_vectors_without_avx512() -> None:
    env = {"EXPERTILE_MASK_FEATURES": "amx-tile,avx512f", "EXPERTILE_ISA": ""}
    assert run(_computed, SHAPE | {"tokens": 3}, env=env)["isa"] == "portable"


def _without_amx_permission(shape: dict[str, Any]) -> dict[str, Any]:
    """A seccomp filter answers EPERM when a process asks Linux for tiles; then a layer is computed."""
    import ctypes
    import struct

    import oracle

    from expertile.codegen import cpu
    from expertile.codegen import isa as isas

    load, equal, give = (
        0x20,
        0x15,
        0x06,
    )  # of BPF: a word of the call's description; skip unless; return
    program = b"".join(
        struct.pack("=HBBI", *step)
        for step in (
            (load, 0, 0, 0),  # the system call's number
            (equal, 0, 3, 158),  # arch_prctl?
            (load, 0, 0, 16),  # its first argument
            (equal, 0, 1, 0x1023),  # ARCH_REQ_XCOMP_PERM?
            (give, 0, 0, 0x00050001),  # EPERM
            (give, 0, 0, 0x7FFF0000),  # allowed
        )
    )
    code = ctypes.create_string_buffer(program)
    description = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, seccomp, filter_mode = 38, 22, 2
    assert prctl(no_new_privileges, 1, 0, 0, 0) == 0
    if prctl(seccomp, filter_mode, description, 0, 0) != 0:
        return {"skip": f"no seccomp filters here (errno {ctypes.get_errno()})"}
    try:
        cpu.request_amx_permission()
        answer = "granted"
    except OSError as error:
        answer = str(error)
    case = oracle.make_case(1, **shape)
    oracle.check(case, case.run())
    status = cpu.amx_status()
    return {
        "answer": answer,
        "isa": isas.select().name,
        "cpuid": status.cpuid and status.os_enabled,
        "usable": status.usable,
        "reason": status.reason,
    }


@x86_64_linux
def test_a_process_without_amx_permission_computes_without_amx() -> None:
    found = run(_without_amx_permission, SHAPE | {"tokens": 3}, env={"EXPERTILE_ISA": ""})
    if "skip" in found:
        pytest.skip(found["skip"])
    assert "EPERM" in found["answer"]
    assert not found["usable"]
    assert found["isa"] != "amx"
    if found["cpuid"]:  # else the reason is that there is no AMX to permit
        assert "permission refused" in found["reason"]


# Forks --------------------------------------------------------------------------------------------


def _in_children(shape: dict[str, Any]) -> dict[str, list[str]]:
    """The layer's bits in children of a process that has used two threads, and in it before and after."""
    import oracle
    import torch
    from subprocesses import digest, in_fork, os_threads

    import expertile

    torch.set_num_threads(2)
    case = oracle.make_case(1, **shape)
    spec = expertile.ExpertSpec(shape["hidden"], shape["intermediate"], shape["experts"], 2)
    layer = expertile.compile(spec, rows=[1]).bind(case.gate_up, case.down)

    def compute() -> list[str]:
        assert torch.get_num_threads() == 2
        return [digest(case.run()), digest(layer(case.x, case.ids, case.router))]

    return {
        "before": compute(),
        "child": in_fork(compute),
        "child of child": in_fork(lambda: in_fork(compute)),
        "another child": in_fork(compute),
        "after": compute(),
        "threads": [str(os_threads() > 1)],
    }


@forks
@pytest.mark.parametrize(
    "isa", [name for name in isas.names() if not isas.by_name(name).unavailable()]
)
def test_forked_children_compute_the_same_bits(isa: str) -> None:
    found = run(_in_children, SHAPE | {"tokens": 5}, env={"EXPERTILE_ISA": isa}, timeout=120)
    assert found.pop("threads") == ["True"]
    assert len({each for digests in found.values() for each in digests}) == 1


def _first_use_in_a_child(shape: dict[str, Any]) -> list[str]:
    """A shape that a child compiles, then another child, then the parent; all from the cache or not at all."""
    import oracle
    import torch
    from subprocesses import digest, in_fork

    from expertile.codegen.compiler import counters

    torch.set_num_threads(2)
    oracle.make_case(1, **shape).run()
    new = oracle.make_case(1, **shape | {"hidden": shape["hidden"] + 16})
    before = counters()

    def compute() -> str:
        result = digest(new.run())
        assert counters() != before
        return result

    return [in_fork(compute), in_fork(compute), compute()]


@forks
@pytest.mark.parametrize("cache", ["used", "unwritable"])
def test_forked_children_compile(cache: str, tmp_path: Path) -> None:
    directory = tmp_path if cache == "used" else Path("/proc/expertile")
    env = {"EXPERTILE_CACHE_DIR": str(directory), "PYTHONWARNINGS": "ignore"}
    assert len(set(run(_first_use_in_a_child, SHAPE | {"tokens": 3}, env=env, timeout=120))) == 1


def _much_memory_in_a_child() -> list[str]:
    """Outputs and scratch so large that PyTorch would fill them with two threads."""
    import oracle
    import torch
    from subprocesses import digest, in_fork

    torch.set_num_threads(2)
    case = oracle.make_case(
        1, tokens=4096, experts=1, top_k=1, hidden=64, intermediate=32, nowhere=0
    )

    def compute() -> list[str]:
        nothing = case.run(ids=case.ids[:, :0], router=case.router[:, :0])
        assert not nothing.view(torch.uint8).numpy().any()  # a sum would want PyTorch's threads
        return [digest(case.run())]

    return in_fork(compute) + compute()


@forks
@pytest.mark.parametrize("debug", ["", "poison"])
def test_forked_children_fill_memory_alone(debug: str) -> None:
    assert len(set(run(_much_memory_in_a_child, env={"EXPERTILE_DEBUG": debug}, timeout=120))) == 1


def _in_a_pool(shape: dict[str, Any]) -> list[str]:
    """multiprocessing's workers, forked, each with two calls; then the parent."""
    import multiprocessing

    import oracle
    import torch
    from subprocesses import digest

    torch.set_num_threads(2)
    case = oracle.make_case(1, **shape)
    expected = digest(case.run())

    def compute(_: int) -> str:
        return digest(case.run())

    # Workers look for a function by its name in the main module.
    globals()["compute"] = compute
    compute.__qualname__ = "compute"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return [expected, *pool.map(compute, range(4)), compute(0)]


@forks
def test_a_pool_of_forked_workers(expected: str) -> None:
    assert set(run(_in_a_pool, SHAPE, timeout=120)) == {expected}


def _while_others_call(shape: dict[str, Any]) -> list[bool]:
    """Forks of a process whose other threads compute, and compile: there is always a new shape."""
    import itertools
    import threading

    import oracle
    import torch
    from subprocesses import digest, in_fork

    torch.set_num_threads(2)
    case = oracle.make_case(1, **shape)
    expected = digest(case.run())
    stop = threading.Event()
    wrong = []

    def compute() -> None:
        while not stop.is_set():
            if digest(case.run()) != expected:
                wrong.append("parent")

    def compile_() -> None:
        for hidden in itertools.count(1):
            if stop.is_set():
                return
            oracle.make_case(
                1, tokens=1, experts=1, top_k=1, hidden=hidden, intermediate=hidden
            ).run()

    threads = [threading.Thread(target=each) for each in (compute, compute, compile_)]
    for thread in threads:
        thread.start()
    try:
        same = [in_fork(lambda: digest(case.run())) == expected for _ in range(20)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return [not wrong, *same]


@forks
def test_forks_while_other_threads_call(tmp_path: Path) -> None:
    env = {"EXPERTILE_CACHE_DIR": str(tmp_path)}
    assert all(run(_while_others_call, SHAPE | {"tokens": 5}, env=env, timeout=120))

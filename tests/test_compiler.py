"""From IR to an address: what is compiled, what is cached, what is refused."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from expertile.codegen import compiler
from expertile.codegen.cache import ObjectCache
from expertile.codegen.compiler import (
    Compiled,
    Target,
    assembly,
    compile_ir,
    counters,
    object_key,
    optimised_ir,
    undefined_symbols,
)
from expertile.codegen.errors import CodegenError

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="intrinsics of x86-64")

AMX_TARGET = Target(
    "sapphirerapids", ("+amx-bf16", "+amx-int8", "+amx-tile"), "x86_64-unknown-linux-gnu"
)


@pytest.fixture
def target() -> Target:
    return Target.host()


@pytest.fixture
def store(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache")


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to forget what is loaded, as a new process would; forgotten for the test's start."""

    def forget() -> None:
        monkeypatch.setattr(compiler, "_loaded", {})

    forget()
    return forget


def adds(number: int) -> str:
    """IR of a function `f` that adds `number` to its argument."""
    return f"define i64 @f(i64 %x) {{ %r = add i64 %x, {number}\n ret i64 %r }}"


def call(compiled: Compiled, argument: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)
    return int(function(argument))


def work_since(before: compiler.Counters) -> tuple[int, int]:
    """(compiled by LLVM, found in the cache) since then."""
    now = counters()
    return now.llvm - before.llvm, now.cache_hits - before.cache_hits


# Compiling and loading ----------------------------------------------------------------------------


@pytest.mark.usefixtures("new_process")
def test_a_function_is_compiled_once_and_runs(target: Target, store: ObjectCache) -> None:
    before = counters()
    compiled = compile_ir("f", adds(5), target, store=store)
    assert call(compiled, 37) == 42
    assert (compiled.name, compiled.cached) == ("f", False)
    assert compile_ir("f", adds(5), target, store=store) is compiled
    assert work_since(before) == (1, 0)


@pytest.mark.usefixtures("new_process")
def test_hundreds_of_functions_of_one_name_live_together(
    target: Target, store: ObjectCache
) -> None:
    compiled = [compile_ir("f", adds(n), target, store=store) for n in range(300)]
    assert [call(each, 1) for each in compiled] == [n + 1 for n in range(300)]
    symbols = {re.findall(rb"\0(f\.\w+)\0", each.object)[0] for each in compiled}
    assert len(symbols) == 300


def test_constants_jump_tables_and_private_functions_are_found(
    target: Target, store: ObjectCache
) -> None:
    numbers = [3, 1, 4, 1, 5, 9, 2, 6]
    cases = "\n".join(f"i64 {n}, label %case{n}" for n in range(8))
    blocks = "\n".join(
        f"case{n}: %v{n} = call i64 @helper(i64 {n * n * 7919})\n ret i64 %v{n}" for n in range(8)
    )
    text = f"""
    @table = private constant [8 x i64] [{", ".join(f"i64 {n}" for n in numbers)}]
    define private i64 @helper(i64 %n) noinline {{
      %slot = and i64 %n, 7
      %address = getelementptr i64, ptr @table, i64 %slot
      %value = load i64, ptr %address
      ret i64 %value
    }}
    define i64 @f(i64 %x) {{
      switch i64 %x, label %other [ {cases} ]
    {blocks}
      other: ret i64 -1
    }}
    """
    compiled = compile_ir("f", text, target, store=store)
    expected = [numbers[n * n * 7919 % 8] for n in range(8)]
    assert [call(compiled, n) for n in range(9)] == [*expected, -1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_code_is_executable_and_not_writable(target: Target, store: ObjectCache) -> None:
    address = compile_ir("f", adds(6), target, store=store).address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= address < high:
            assert access == "r-xp"
            return
    pytest.fail("the code is in no mapping")


def test_listings_show_optimised_code(target: Target) -> None:
    text = "define i64 @f(i64 %x) { %a = add i64 %x, 1\n %b = add i64 %a, 2\n ret i64 %b }"
    assert re.search(r"add .*, 3\b", optimised_ir(text, target))
    assert re.search(r"^f:", assembly(text, target), re.MULTILINE)


@pytest.mark.parametrize("text", ["define", "define i64 @f( {", "define void @f() { ret i64 0 }"])
def test_invalid_ir_is_an_error(text: str, target: Target, store: ObjectCache) -> None:
    with pytest.raises(CodegenError, match="LLVM refuses the IR"):
        compile_ir("f", text, target, store=store)


def test_a_name_the_ir_does_not_define_is_an_error(target: Target, store: ObjectCache) -> None:
    with pytest.raises(CodegenError, match=r"expected a function that the IR defines \(f\)"):
        compile_ir("g", adds(1), target, store=store)
    with pytest.raises(CodegenError, match=r"\(none\), got 'f'"):
        compile_ir("f", "declare i64 @f(i64)", target, store=store)


# The key ------------------------------------------------------------------------------------------


def test_each_component_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("cpu", ("+a", "-b"), "triple")
    keys = [
        object_key("f", "ir", target),
        object_key("g", "ir", target),
        object_key("f", "ir2", target),
        object_key("f", "ir", replace(target, cpu="cpu2")),
        object_key("f", "ir", replace(target, triple="triple2")),
        object_key("f", "ir", replace(target, features=("+a", "+b"))),
        object_key("f", "ir", replace(target, features=("+a",))),
        # the same characters, cut elsewhere
        object_key("fi", "r", target),
        object_key("f", "ir", replace(target, features=("+a-b",))),
    ]
    versions = ["22.1.0", "0.50.0", "0.1.0"]
    for changed in range(3):
        others = [v + "1" if n == changed else v for n, v in enumerate(versions)]
        monkeypatch.setattr(compiler, "_versions", lambda others=others: tuple(others))
        keys.append(object_key("f", "ir", target))
    monkeypatch.setattr(compiler, "_versions", lambda: tuple(versions))
    keys.append(object_key("f", "ir", target))
    monkeypatch.setattr(compiler, "_RECIPE", "O1")
    keys.append(object_key("f", "ir", target))
    # The real versions may be those written here: then that one key is there twice.
    monkeypatch.undo()
    same = compiler._versions() == tuple(versions)
    assert len(set(keys)) == len(keys) - same
    assert object_key("f", "ir", target) == keys[0]


def test_the_versions_are_those_installed() -> None:
    from importlib.metadata import version

    llvm, llvmlite, expertile = compiler._versions()
    assert llvm == ".".join(map(str, binding.llvm_version_info))
    assert llvmlite == version("llvmlite")
    assert expertile == version("expertile")


def test_a_target_without_a_feature_has_another_key(target: Target) -> None:
    feature = next(each[1:] for each in target.features if each.startswith("+"))
    lesser = Target.host(without=(feature,))
    assert target.has(feature)
    assert not lesser.has(feature)
    assert object_key("f", "ir", lesser) != object_key("f", "ir", target)


# The cache ----------------------------------------------------------------------------------------


def test_a_cached_object_is_not_compiled_again(
    target: Target, store: ObjectCache, new_process: Callable[[], None]
) -> None:
    first = compile_ir("f", adds(10), target, store=store)
    new_process()
    # A symbol can be loaded once a process; the copy answers to another name in the same way.
    before = counters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_load", lambda _symbol, code: len(code))
        again = compile_ir("f", adds(10), target, store=store)
    assert work_since(before) == (0, 1)
    assert again.cached
    assert again.object == first.object


PROGRAM = """
import ctypes, sys
from expertile.codegen.compiler import Target, compile_ir, counters
target = Target.host()
for number in map(int, sys.argv[1:]):
    text = f"define i64 @f(i64 %x) {{ %r = add i64 %x, {number}\\n ret i64 %r }}"
    compiled = compile_ir("f", text, target)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(1) == number + 1
print(counters().llvm, counters().cache_hits)
"""


def start(directory: Path, numbers: list[int], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, numbers)],
        env={**os.environ, "EXPERTILE_CACHE_DIR": str(directory), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, int]:
    """(compiled, found) of a process started by `start`, which came to a good end."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    compiled, found = map(int, out.split())
    return compiled, found


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    numbers = list(range(5))
    assert finish(start(tmp_path / "cache", numbers)) == (5, 0)
    assert finish(start(tmp_path / "cache", numbers)) == (0, 5)


@x86_64
def test_a_process_with_fewer_features_shares_nothing(tmp_path: Path) -> None:
    assert finish(start(tmp_path / "cache", [1])) == (1, 0)
    feature = next(each[1:] for each in Target.host().features if each.startswith("+avx"))
    masked = {"EXPERTILE_MASK_FEATURES": feature}
    assert finish(start(tmp_path / "cache", [1], **masked)) == (1, 0)
    assert finish(start(tmp_path / "cache", [1], **masked)) == (0, 1)


def test_damaged_objects_are_compiled_again(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert finish(start(directory, [1, 2, 3, 4])) == (4, 0)
    cut, flipped, foreign, _ = sorted(directory.glob("*.obj"))
    cut.write_bytes(cut.read_bytes()[:-1])
    code = bytearray(flipped.read_bytes())
    code[-100] ^= 4
    flipped.write_bytes(code)
    foreign.write_bytes(cut.read_bytes())
    assert finish(start(directory, [1, 2, 3, 4])) == (3, 1)
    assert finish(start(directory, [1, 2, 3, 4])) == (0, 4)


def test_processes_fill_one_cache_together(tmp_path: Path) -> None:
    numbers = list(range(25))
    directory = tmp_path / "cache"
    processes = [start(directory, numbers) for _ in range(4)]
    for process in processes:
        compiled, found = finish(process)
        assert compiled + found == len(numbers)
    assert len(list(directory.glob("*.obj"))) == len(numbers)
    assert not list(directory.glob(".*.tmp"))
    assert finish(start(directory, numbers)) == (0, len(numbers))


@pytest.mark.usefixtures("new_process")
def test_a_cache_that_cannot_be_used_is_done_without(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = ObjectCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning) as caught:
        functions = [compile_ir("f", adds(n), target, store=store) for n in (21, 22, 23)]
    assert len(caught) == 1
    assert [call(function, 1) for function in functions] == [22, 23, 24]


# Threads and forks --------------------------------------------------------------------------------


@pytest.mark.usefixtures("new_process")
def test_threads_compile_each_function_once(target: Target, store: ObjectCache) -> None:
    before = counters()
    numbers = [n % 10 for n in range(80)]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda n: compile_ir("f", adds(1000 + n), target, store=store), numbers)
        )
    assert [call(each, 0) for each in results] == [1000 + n for n in numbers]
    assert work_since(before) == (10, 0)


def in_fork(work: Callable[[], Any], seconds: int) -> None:
    """Fork; in the child run `work`, which must return something true within the time."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest-timeout's
        signal.alarm(seconds)  # ends a child that hangs
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# Python 3.12 warns of forks beside threads, which is what is tested here.
fork_beside_threads = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@needs_fork
@fork_beside_threads
@pytest.mark.usefixtures("new_process")
def test_a_fork_during_a_compilation_can_compile(
    target: Target, store: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = threading.Event()
    real = compiler._compile
    main = os.getpid()

    def slow(*args: Any) -> bytes:
        if os.getpid() == main:
            compiling.set()
            time.sleep(0.5)  # holding the lock
        return real(*args)

    monkeypatch.setattr(compiler, "_compile", slow)
    thread = threading.Thread(
        target=compile_ir, args=("f", adds(31), target), kwargs={"store": store}
    )
    thread.start()
    assert compiling.wait(120)
    in_fork(lambda: call(compile_ir("f", adds(32), target, store=store), 1) == 33, seconds=120)
    thread.join()
    assert call(compile_ir("f", adds(33), target, store=store), 1) == 34


@needs_fork
@fork_beside_threads
@pytest.mark.usefixtures("new_process")
def test_a_fork_while_someone_else_is_in_llvm_can_compile(
    target: Target, store: ObjectCache
) -> None:
    compile_ir("f", adds(40), target, store=store)  # LLVM is loaded
    inside = threading.Event()

    def hold() -> None:
        with binding.ffi.lib._lock:
            inside.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(120)
    in_fork(lambda: call(compile_ir("f", adds(41), target, store=store), 1) == 42, seconds=120)
    thread.join()
    assert call(compile_ir("f", adds(42), target, store=store), 1) == 43


@needs_fork
@fork_beside_threads
@pytest.mark.usefixtures("new_process")
def test_threads_that_fork_and_compile_at_once(target: Target, store: ObjectCache) -> None:
    def work(number: int) -> bool:
        if number % 2:
            in_fork(
                lambda: call(compile_ir("f", adds(number), target, store=store), 0), seconds=120
            )
        return call(compile_ir("f", adds(number), target, store=store), 0) == number

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(2000, 2024)))


# What would call out or abort ---------------------------------------------------------------------

COPY = """
define void @f(ptr %to, ptr %from, i64 %n) {
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %n, i1 false)
  ret void
}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""
EXPONENTIAL = """
define float @f(float %x) { %r = call float @llvm.exp.f32(float %x) ret float %r }
declare float @llvm.exp.f32(float)
"""
DECLARED = """
define i64 @f(i64 %x) { %r = call i64 @elsewhere(i64 %x) ret i64 %r }
declare i64 @elsewhere(i64)
"""
VARIABLE = """
@shared = external global i64
define i64 @f() { %r = load i64, ptr @shared ret i64 %r }
"""


@pytest.mark.parametrize(
    ("text", "symbol"),
    [(COPY, "memcpy"), (EXPONENTIAL, "expf"), (DECLARED, "elsewhere"), (VARIABLE, "shared")],
)
def test_code_that_needs_a_symbol_is_refused(
    text: str, symbol: str, target: Target, store: ObjectCache
) -> None:
    with pytest.raises(CodegenError, match=rf"'f': .* got calls of {symbol}\b"):
        compile_ir("f", text, target, store=store)
    assert store.info().entries == 0


def test_a_declaration_that_nothing_uses_is_harmless(target: Target, store: ObjectCache) -> None:
    text = adds(51) + "\ndeclare i64 @elsewhere(i64)"
    assert call(compile_ir("f", text, target, store=store), 1) == 52


@pytest.mark.parametrize("code", [b"", b"\x7fELF\x01", b"\xcf\xfa\xed\xfe" + bytes(100)])
def test_symbols_are_read_from_64_bit_elf_only(code: bytes) -> None:
    with pytest.raises(CodegenError, match="expected 64-bit ELF"):
        undefined_symbols(code)


def tile_ir(call: str, signature: str) -> str:
    return f"define void @f(ptr %p) {{ call void @llvm.x86.{call}\n ret void }}\n" + (
        f"declare void @llvm.x86.{signature}"
    )


TILES = "i8 0, i8 1, i8 2"
TILE_INTRINSICS = {
    "ldtilecfg": tile_ir("ldtilecfg(ptr %p)", "ldtilecfg(ptr)"),
    "tilerelease": tile_ir("tilerelease()", "tilerelease()"),
    "tilezero": tile_ir("tilezero(i8 0)", "tilezero(i8)"),
    "tileloadd64": tile_ir("tileloadd64(i8 0, ptr %p, i64 64)", "tileloadd64(i8, ptr, i64)"),
    "tileloaddt164": tile_ir("tileloaddt164(i8 0, ptr %p, i64 64)", "tileloaddt164(i8, ptr, i64)"),
    "tilestored64": tile_ir("tilestored64(i8 0, ptr %p, i64 64)", "tilestored64(i8, ptr, i64)"),
    "tdpbf16ps": tile_ir(f"tdpbf16ps({TILES})", "tdpbf16ps(i8, i8, i8)"),
    "tdpbssd": tile_ir(f"tdpbssd({TILES})", "tdpbssd(i8, i8, i8)"),
}
MNEMONICS = {
    "tileloadd64": "tileloadd",
    "tileloaddt164": "tileloaddt1",
    "tilestored64": "tilestored",
}


@x86_64
@pytest.mark.parametrize("name", TILE_INTRINSICS)
def test_tile_intrinsics_are_refused_without_amx(name: str, store: ObjectCache) -> None:
    text = TILE_INTRINSICS[name]
    without = Target("sapphirerapids", ("-amx-bf16", "-amx-int8", "-amx-tile"), AMX_TARGET.triple)
    for attempt in (
        lambda: compile_ir("f", text, without, store=store),
        lambda: assembly(text, without),
        lambda: optimised_ir(text, without),
    ):
        with pytest.raises(CodegenError, match=rf"llvm\.x86\.{name}: expected a target with amx-"):
            attempt()
    # and from an altered cache directory no such object comes back either
    store.put(object_key("f", text, without), b"code")
    with pytest.raises(CodegenError):
        compile_ir("f", text, without, store=store)


@x86_64
@pytest.mark.parametrize("name", TILE_INTRINSICS)
def test_tile_intrinsics_compile_for_amx(name: str) -> None:
    listing = assembly(TILE_INTRINSICS[name], AMX_TARGET)
    assert re.search(rf"\t{MNEMONICS.get(name, name)}\b", listing)


@x86_64
@pytest.mark.parametrize(("name", "feature"), [("tdpbf16ps", "amx-bf16"), ("tdpbssd", "amx-int8")])
def test_a_part_of_amx_is_not_enough(name: str, feature: str) -> None:
    features = tuple(each.replace("+" + feature, "-" + feature) for each in AMX_TARGET.features)
    with pytest.raises(CodegenError, match=f"without {feature}"):
        assembly(TILE_INTRINSICS[name], replace(AMX_TARGET, features=features))


DOT = """
define <16 x float> @f(<16 x float> %c, <32 x bfloat> %a, <32 x bfloat> %b) {
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %c, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %r
}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float>, <32 x bfloat>, <32 x bfloat>)
"""


@x86_64
def test_vector_intrinsics_need_their_feature() -> None:
    target = Target("x86-64", ("+avx512bf16",), AMX_TARGET.triple)
    assert "vdpbf16ps" in assembly(DOT, target)
    with pytest.raises(CodegenError, match="without avx512bf16"):
        assembly(DOT, replace(target, features=("+avx512f", "-avx512bf16")))


@x86_64
@pytest.mark.parametrize("name", ["tcmmimfp16ps", "tdpbf16ps.internal", "rdtsc", '"quoted"'])
def test_an_intrinsic_nobody_vouches_for_is_refused(name: str) -> None:
    name = name.strip('"')
    quoted = f'@"llvm.x86.{name}"'
    with pytest.raises(CodegenError, match=rf"llvm\.x86\.{re.escape(name)}: which CPU features"):
        assembly(f"define void @f() {{ ret void }}\ndeclare void {quoted}()", AMX_TARGET)

"""From LLVM IR to an address: optimise, emit an object, cache it, load it.

    compiled = compile_ir("axpy", str(module), Target.host())
    function = ctypes.CFUNCTYPE(None, …)(compiled.address)

Fresh and cached objects take the same way in: both are object files, added to one engine that
lives as long as the process.  LLVM is loaded at the first compilation.  Everything here may be
called from any thread; a fork waits for the compilation in progress, so that the child finds LLVM
in order and its locks free.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

from expertile.codegen import cpu
from expertile.codegen.cache import ObjectCache, default_cache
from expertile.codegen.errors import CodegenError

_SPEED_LEVEL = 2
# Templates write the vectors they want, so the vectorisers would only cost time.  Position
# independent and small: the engine keeps the sections of an object side by side.
_RECIPE = f"O{_SPEED_LEVEL}, no loop or SLP vectorisation, pic, small"


@dataclass(frozen=True)
class Target:
    """What LLVM compiles for: CPU name, features as in `cpu.Host`, triple."""

    cpu: str
    features: tuple[str, ...]
    triple: str

    @classmethod
    def host(cls, without: tuple[str, ...] = ()) -> Target:
        """This machine, with some features (and what builds on them) turned off.

        Raises CodegenError for a feature that LLVM doesn't know here.
        """
        host = cpu.host()
        return cls(host.cpu, cpu.without(host.features, without), host.triple)

    def has(self, feature: str) -> bool:
        """Whether code for this target may use the LLVM feature."""
        return "+" + feature in self.features


@dataclass(frozen=True)
class Compiled:
    """A function in memory, there until the process ends."""

    name: str
    address: int
    object: bytes
    """The object file; its symbol is the name followed by "." and a part of the key."""
    cached: bool
    """The object came from the cache."""


@dataclass(frozen=True)
class Counters:
    """What compile_ir has done since the process started (a forked child counts on)."""

    llvm: int = 0
    """Objects compiled by LLVM."""
    cache_hits: int = 0
    """Objects read from the cache."""


_lock = threading.RLock()
_loaded: dict[str, Compiled] = {}
_counters = Counters()


def counters() -> Counters:
    """The counts at this moment."""
    return _counters


def compile_ir(
    name: str, ir_text: str, target: Target, *, store: ObjectCache | None = None
) -> Compiled:
    """Machine code of the function `name` of a module, from memory, from `store` or from LLVM.

    `store` is the process's cache unless given.  Raises CodegenError if the IR is invalid or
    defines no such function, if the code would call something outside the module (nothing is
    there, and tiles don't survive a call), or if it uses an intrinsic that `target` lacks (LLVM
    would abort).
    """
    global _counters
    with _lock:
        key = object_key(name, ir_text, target)
        if key in _loaded:
            return _loaded[key]
        _check_intrinsics(ir_text, target)
        store = default_cache() if store is None else store
        code = store.get(key)
        cached = code is not None
        if code is None:
            code = _compile(name, _symbol(name, key), ir_text, target)
            _counters = replace(_counters, llvm=_counters.llvm + 1)
            store.put(key, code)
        else:
            _counters = replace(_counters, cache_hits=_counters.cache_hits + 1)
        compiled = Compiled(name, _load(_symbol(name, key), code), code, cached)
        return _loaded.setdefault(key, compiled)


def optimised_ir(ir_text: str, target: Target) -> str:
    """The module as LLVM IR after optimisation. Raises CodegenError like compile_ir."""
    _check_intrinsics(ir_text, target)
    with _lock, _optimised(ir_text, target) as (module, _machine):
        return str(module)


def assembly(ir_text: str, target: Target) -> str:
    """The module in the target's assembly language. Raises CodegenError like compile_ir."""
    _check_intrinsics(ir_text, target)
    with _lock, _optimised(ir_text, target) as (module, machine):
        return str(machine.emit_assembly(module))


def object_key(name: str, ir_text: str, target: Target) -> str:
    """The cache key: a hash of all that the object depends on."""
    digest = sha256()
    for part in (name, ir_text, *target.features, target.cpu, target.triple, *_versions(), _RECIPE):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # no two lists run together alike
        digest.update(encoded)
    return digest.hexdigest()


@cache
def _versions() -> tuple[str, str, str]:
    """LLVM, llvmlite, Expertile."""
    from importlib.metadata import version

    import llvmlite

    llvm = ".".join(map(str, _llvm().llvm_version_info))
    return llvm, llvmlite.__version__, version("expertile")


def _symbol(name: str, key: str) -> str:
    """The name in the object file: all objects share one engine, so it must be the object's own."""
    return f"{name}.{key[:32]}"


# Compilation --------------------------------------------------------------------------------------


@cache
def _llvm() -> Any:
    """llvmlite's binding, ready for this machine."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    return binding


def _target_machine(target: Target) -> Any:
    return (
        _llvm()
        .Target.from_triple(target.triple)
        .create_target_machine(
            cpu=target.cpu,
            features=",".join(target.features),
            opt=3,
            reloc="pic",
            codemodel="small",
            jit=True,
        )
    )


@contextmanager
def _optimised(
    ir_text: str, target: Target, rename: tuple[str, str] | None = None
) -> Iterator[tuple[Any, Any]]:
    """The optimised module and its target machine; `rename` gives a function another name first."""
    llvm = _llvm()
    machine = _target_machine(target)
    try:
        # A context of its own: what the module interned goes with it.
        module = llvm.parse_assembly(ir_text, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"LLVM refuses the IR: {error}") from error
    if rename:
        _rename(module, *rename)
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=_SPEED_LEVEL)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    yield module, machine


def _rename(module: Any, name: str, symbol: str) -> None:
    defined = [function for function in module.functions if not function.is_declaration]
    for function in defined:
        if function.name == name:
            function.name = symbol
            return
    names = ", ".join(function.name for function in defined) or "none"
    raise CodegenError(f"name: expected a function that the IR defines ({names}), got {name!r}")


def _compile(name: str, symbol: str, ir_text: str, target: Target) -> bytes:
    with _optimised(ir_text, target, rename=(name, symbol)) as (module, machine):
        code = bytes(machine.emit_object(module))
    if outside := undefined_symbols(code):
        raise CodegenError(
            f"kernel {name!r}: expected code that calls nothing outside, got calls of "
            f"{', '.join(outside)}; LLVM makes them of declared functions, and of memory and "
            "mathematical intrinsics that the target has no instructions for"
        )
    return code


_ELF64 = b"\x7fELF\x02"
_SYMBOL_TABLE = 2


def undefined_symbols(code: bytes) -> list[str]:
    """Names that a 64-bit ELF object expects from elsewhere. Raises CodegenError for others."""
    if not code.startswith(_ELF64):
        raise CodegenError(f"object: expected 64-bit ELF (Linux), got {code[:5]!r}")
    order = "<" if code[5] == 1 else ">"
    table, entry_bytes, entries = _elf(order, "40x Q 10x 2H", code)
    sections = []  # type, offset, size, link
    for at in range(table, table + entry_bytes * entries, entry_bytes):
        sections.append(_elf(order, "4x I 16x 2Q I", code, at))
    names = []
    for type_, offset, size, link in sections:
        if type_ != _SYMBOL_TABLE:
            continue
        strings = sections[link][1]
        symbols = struct.iter_unpack(order + "I 2x H 16x", code[offset : offset + size])
        for name, section in symbols:
            if name and section == 0:
                start = strings + name
                names.append(code[start : code.index(b"\0", start)].decode())
    return names


def _elf(order: str, layout: str, code: bytes, at: int = 0) -> tuple[int, ...]:
    return struct.unpack_from(order + layout, code, at)


# Intrinsics ---------------------------------------------------------------------------------------

_INTRINSIC = re.compile(r"@\"?llvm\.x86\.([\w.]+)")

# LLVM ends the process when it can't select an intrinsic, so each must be known here with what it
# needs: the first pattern that matches all of the name after "llvm.x86.".
_NEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"ldtilecfg|sttilecfg|tilerelease|tilezero|tileload\w*64|tilestored64", ("amx-tile",)),
    (r"tdpbf16ps", ("amx-tile", "amx-bf16")),
    (r"tdpb(ss|su|us|uu)d", ("amx-tile", "amx-int8")),
    (r"tdpfp16ps", ("amx-tile", "amx-fp16")),
    (r"avx512bf16\.[\w.]+\.512", ("avx512bf16",)),
    (r"avx512bf16\.[\w.]+", ("avx512bf16", "avx512vl")),
    (r"avx512\.(mask\.)?vcvtps2ph\.512|avx512\.(mask\.)?vcvtph2ps\.512", ("avx512f",)),
    (r"avx512\.vp(dp\w+)\.512", ("avx512vnni",)),
    (r"avx512\.permvar\.hi\.512", ("avx512bw",)),
    (r"avx512\.permvar\.hi\.256", ("avx512bw", "avx512vl")),
    (r"avx512\.vpermi2var\.qi\.512", ("avx512vbmi",)),
    (r"vcvtps2ph\.(128|256)", ("f16c",)),
    (r"avx2\.[\w.]+", ("avx2",)),
    (r"avx\.[\w.]+", ("avx",)),
)


def _check_intrinsics(ir_text: str, target: Target) -> None:
    """Raise CodegenError for an x86 intrinsic that is unknown here or that the target lacks."""
    for name in sorted(set(_INTRINSIC.findall(ir_text))):
        needs = next((needs for names, needs in _NEEDS if re.fullmatch(names, name)), None)
        if needs is None:
            raise CodegenError(
                f"intrinsic llvm.x86.{name}: which CPU features does it need? Add it to the table "
                "of intrinsics in codegen/compiler.py"
            )
        missing = [feature for feature in needs if not target.has(feature)]
        if missing:
            raise CodegenError(
                f"intrinsic llvm.x86.{name}: expected a target with {', '.join(needs)}, got "
                f"{target.cpu} without {', '.join(missing)}; choose another ISA "
                "(`expertile doctor` says which work here)"
            )


# Loading ------------------------------------------------------------------------------------------


@cache
def _engine() -> Any:
    """The engine that holds all objects (one for each takes 15 times as long to load)."""
    llvm = _llvm()
    try:
        llvm.check_jit_execution()
    except OSError as error:
        raise CodegenError(f"this system forbids generated machine code: {error}") from error
    # llvmlite's memory manager maps an object's sections side by side, as the small code model
    # needs; pages are writable until the object is complete, then executable, never both.
    empty = llvm.parse_assembly("", llvm.create_context())
    return llvm.create_mcjit_compiler(empty, _target_machine(Target.host()), use_lmm=True)


def _load(symbol: str, code: bytes) -> int:
    engine = _engine()
    engine.add_object_file(_llvm().ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = int(engine.get_function_address(symbol))
    if not address:
        raise CodegenError(f"object: expected it to define {symbol}; it doesn't")
    return address


# Forks --------------------------------------------------------------------------------------------


_lock_of_llvmlite: Any = None


def _before_fork() -> None:
    # LLVM must not be at work while its memory is copied: not for us, and not for someone else
    # (Numba), which is when llvmlite's own lock is held.
    global _lock_of_llvmlite
    _lock.acquire()
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    _lock_of_llvmlite = getattr(library, "_lock", None)
    if _lock_of_llvmlite is not None:
        _lock_of_llvmlite.__enter__()


def _after_fork() -> None:
    if _lock_of_llvmlite is not None:
        _lock_of_llvmlite.__exit__(None, None, None)
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )

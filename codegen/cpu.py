"""The CPU this process runs on: what LLVM may use, and whether AMX really works.

Nothing is examined at import; every answer is computed at first use and kept.

Environment:
    EXPERTILE_MASK_FEATURES   LLVM feature names, comma separated ("amx-tile,avx512bf16"), that this
                              process must treat as absent; features that build on a masked one go
                              with it.  Read once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from expertile.codegen.errors import CodegenError

if TYPE_CHECKING:
    import subprocess

MASK_VARIABLE = "EXPERTILE_MASK_FEATURES"


# Features -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """The CPU as LLVM names it.

    `features` holds "+x" and "-x", sorted, which puts every "-x" last: LLVM applies them in order,
    and turning a feature on turns on what it builds on.
    """

    cpu: str
    features: tuple[str, ...]
    triple: str

    def has(self, feature: str) -> bool:
        """Whether code may use the LLVM feature `feature`."""
        return "+" + feature in self.features


@cache
def host() -> Host:
    """This machine without what EXPERTILE_MASK_FEATURES masks.

    In a virtual machine the name may be that of an older CPU: rely on the features.  Raises
    CodegenError if the variable holds a name LLVM doesn't know.
    """
    from llvmlite import binding

    found = binding.get_host_cpu_features()
    features = tuple(sorted("-+"[present] + name for name, present in found.items()))
    masked = os.environ.get(MASK_VARIABLE, "").replace(",", " ").split()
    return Host(
        cpu=binding.get_host_cpu_name(),
        features=without(features, masked, MASK_VARIABLE),
        triple=binding.get_process_triple(),
    )


# What a feature builds on, as LLVM has it (X86TargetParser.cpp), from AVX upwards.
_BUILDS_ON = {
    "f16c": ("avx",),
    "fma": ("avx",),
    "fma4": ("avx",),
    "xop": ("fma4",),
    "vaes": ("avx",),
    "vpclmulqdq": ("avx",),
    "sm3": ("avx",),
    "sm4": ("avx2",),
    "sha512": ("avx2",),
    "avx2": ("avx",),
    "avx512f": ("avx2", "f16c", "fma"),
    "avx512bf16": ("avx512bw",),
    "avx512bitalg": ("avx512bw",),
    "avx512vbmi": ("avx512bw",),
    "avx512vbmi2": ("avx512bw",),
    "avx512fp16": ("avx512bw", "avx512dq", "avx512vl"),
    "avx10.1": (
        "avx512bf16",
        "avx512bitalg",
        "avx512cd",
        "avx512fp16",
        "avx512ifma",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512vnni",
        "avx512vpopcntdq",
    ),
    "avx10.2": ("avx10.1",),
    "amx-avx512": ("amx-tile", "avx10.2"),
}
_FAMILY_BUILDS_ON = {"avx512": ("avx512f",), "avx": ("avx2",), "amx-": ("amx-tile",)}
_ROOTS = {"avx", "amx-tile"}


def _builds_on(feature: str) -> tuple[str, ...]:
    if feature in _ROOTS:
        return ()
    if feature in _BUILDS_ON:
        return _BUILDS_ON[feature]
    family = next((prefix for prefix in _FAMILY_BUILDS_ON if feature.startswith(prefix)), None)
    return _FAMILY_BUILDS_ON[family] if family else ()


def without(
    features: tuple[str, ...], names: Iterable[str], source: str = "without"
) -> tuple[str, ...]:
    """`features` with `names`, and all that builds on them, turned off; sorted again.

    Raises CodegenError for a name that isn't among the features; `source` is what the message calls
    the argument.
    """
    known = {feature[1:] for feature in features}
    off = set(names)
    if unknown := sorted(off - known):
        raise CodegenError(
            f"{source}: expected names of LLVM's {platform.machine()} features, "
            f"got {', '.join(unknown)}{_similar(unknown[0], known)}"
        )
    while dependents := {name for name in known - off if off.intersection(_builds_on(name))}:
        off |= dependents
    return tuple(sorted("-" + each[1:] if each[1:] in off else each for each in features))


def _similar(name: str, known: set[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(name, sorted(known), n=3)
    return f"; similar names: {', '.join(matches)}" if matches else ""


@cache
def model_name() -> str:
    """The marketing name from /proc/cpuinfo, else the architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty where there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            block = file.read().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


# AMX ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AmxStatus:
    """Whether kernels may use AMX; the steps are taken in order, up to the first that fails."""

    usable: bool
    reason: str
    """For `expertile doctor`: why it can't be used, or that it works."""
    cpuid: bool
    """The CPU has AMX-TILE, AMX-BF16 and AMX-INT8."""
    os_enabled: bool
    """The operating system saves tile state (XCR0)."""
    permission: bool
    """The kernel let this process use it."""
    trial: bool
    """A child process executed tile instructions."""


class _NoAmx(Exception):
    """Why AMX can't be used."""


@cache
def amx_status() -> AmxStatus:
    """Examine AMX, once: CPUID, XGETBV, the mask, permission (which is taken), a trial."""
    passed = dict.fromkeys(("cpuid", "os_enabled", "permission", "trial"), False)
    try:
        _check_platform()
        _check_cpuid()
        passed["cpuid"] = True
        _check_os()
        passed["os_enabled"] = True
        _check_mask()
        _check_permission()
        passed["permission"] = True
        _try_tiles(_TRIAL_CODE)
        passed["trial"] = True
    except _NoAmx as why:
        return AmxStatus(False, str(why), **passed)
    return AmxStatus(True, "AMX works: tile operations ran in a trial process", **passed)


def _x86_64_linux() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def _check_platform() -> None:
    if not _x86_64_linux():
        raise _NoAmx(
            f"AMX needs 64-bit Linux on x86-64; this is {platform.system()} on {platform.machine()}"
        )


_AMX_BITS = {22: "AMX-BF16", 24: "AMX-TILE", 25: "AMX-INT8"}


def _check_cpuid() -> None:
    highest_leaf = _cpuid(0)[0]
    edx = _cpuid(7)[3] if highest_leaf >= 7 else 0
    missing = [name for bit, name in _AMX_BITS.items() if not edx >> bit & 1]
    if not missing:
        return
    masked = "; a hypervisor may hide it" if "hypervisor" in _cpuinfo().get("flags", "") else ""
    what = "AMX" if len(missing) == len(_AMX_BITS) else ", ".join(missing)
    raise _NoAmx(f"CPU has no {what} (CPUID.7.0:EDX bits 22,24,25): {model_name()}{masked}")


def _check_os() -> None:
    osxsave = _cpuid(1)[2] >> 27 & 1  # without it XGETBV itself is illegal
    if osxsave and _xcr0() >> 17 & 3 == 3:
        return
    flags = _cpuinfo().get("flags", "").split()
    listed = "lists" if "amx_tile" in flags else "doesn't list"
    raise _NoAmx(
        f"OS has not enabled tile state (XCR0 bits 17,18): this is Linux {platform.release()}, "
        f"5.16 is needed; /proc/cpuinfo {listed} amx_tile"
    )


def _check_mask() -> None:
    absent = [name for name in ("amx-tile", "amx-bf16") if not host().has(name)]
    if absent:
        mask = os.environ.get(MASK_VARIABLE)
        why = f"turned off by {MASK_VARIABLE}={mask}" if mask else "unknown to this LLVM"
        raise _NoAmx(f"{' and '.join(absent)} {why}")


def _check_permission() -> None:
    try:
        request_amx_permission()
    except OSError as error:
        raise _NoAmx(error.strerror) from error


_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18
_REFUSALS = {
    errno.ENOSPC: "a signal stack installed with sigaltstack is too small to save the tiles "
    "(8 KiB more); enlarge it, or call Expertile before whatever installs it",
    errno.EINVAL: "this kernel doesn't know the request; Linux 5.16 or newer is needed",
    errno.EOPNOTSUPP: "the kernel doesn't support tile state on this CPU",
    errno.EPERM: "a security filter (seccomp) forbids it",
    errno.ENOSYS: "a security filter (seccomp) or an emulated kernel doesn't provide it",
}


@cache
def request_amx_permission() -> None:
    """Ask Linux to let this process, its threads and its forks use tiles.

    Without it the first tile instruction ends the process (SIGILL).  Raises OSError with the errno.
    """
    if not _x86_64_linux():
        raise OSError(errno.ENOSYS, "AMX permission: only Linux on x86-64 has it")
    libc = ctypes.CDLL(None, use_errno=True)
    request = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA))
    if libc.syscall(*request) != 0:
        code = ctypes.get_errno()
        why = _REFUSALS.get(code, os.strerror(code))
        name = errno.errorcode.get(code, "unknown")
        raise OSError(code, f"permission refused: errno {code} ({name}): {why}")


# Machine code -------------------------------------------------------------------------------------

# void f(leaf: edi, subleaf: esi, uint32_t out[4]: rdx)
_CPUID_CODE = bytes.fromhex(
    "53"  # push rbx
    "4989d0"  # mov r8, rdx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
# uint64_t f(void)
_XGETBV_CODE = bytes.fromhex(
    "31c9"  # xor ecx, ecx
    "0f01d0"  # xgetbv
    "48c1e220"  # shl rdx, 32
    "4809d0"  # or rax, rdx
    "c3"  # ret
)
# void f(config: rdi)
_TRIAL_CODE = bytes.fromhex(
    "c4e2784907"  # ldtilecfg [rdi]
    "c4e27b49c0"  # tilezero tmm0
    "c4e27b49c8"  # tilezero tmm1
    "c4e27b49d0"  # tilezero tmm2
    "c4e26a5cc1"  # tdpbf16ps tmm0, tmm1, tmm2
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)
_CONFIG_OFFSET = 64
# Palette 1, and three tiles of 16 rows (from byte 48 on) × 64 bytes (two bytes, from byte 16 on).
_TRIAL_CONFIG = struct.pack("<B 15x 3H 26x 3B 13x", 1, 64, 64, 64, 16, 16, 16)


def _cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """EAX, EBX, ECX, EDX."""
    out = (ctypes.c_uint32 * 4)()
    _execute(_CPUID_CODE, None, ctypes.c_uint32(leaf), ctypes.c_uint32(subleaf), out)
    return out[0], out[1], out[2], out[3]


def _xcr0() -> int:
    """The state components the operating system has enabled."""
    return int(_execute(_XGETBV_CODE, ctypes.c_uint64))


def _execute(code: bytes, returns: Any, *args: Any) -> Any:
    """Call machine code with arguments of ctypes types."""
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, access)
    except OSError as error:
        raise _NoAmx(f"this system forbids generated machine code: {error}") from error
    page.write(code)
    start = ctypes.c_char.from_buffer(page)  # keeps the page mapped until the call is over
    function = ctypes.CFUNCTYPE(returns, *(type(arg) for arg in args))(ctypes.addressof(start))
    return function(*args)


# The child asks for its own permission (exec drops it) and leaves no core file when it is killed.
_TRIAL_PROGRAM = f"""
import ctypes, mmap, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.CDLL(None).syscall({_ARCH_PRCTL}, {_ARCH_REQ_XCOMP_PERM}, {_XTILEDATA})
page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
page.write(bytes.fromhex(sys.argv[1]))
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start)(start + {_CONFIG_OFFSET})
print("done", flush=True)
"""
_TRIAL_SECONDS = 20


def _try_tiles(code: bytes) -> None:
    """Run machine code (at most 64 bytes; rdi = the configuration's address) in a child process.

    Raises _NoAmx if the child doesn't come through.
    """
    import subprocess

    if not sys.executable or getattr(sys, "frozen", False):
        raise _NoAmx("no Python interpreter (sys.executable) to try the tile instructions in")
    page = code.ljust(_CONFIG_OFFSET, b"\xcc") + _TRIAL_CONFIG
    command = [sys.executable, "-I", "-S", "-c", _TRIAL_PROGRAM, page.hex()]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _NoAmx(f"the tile instructions could not be tried: {error}") from error
    # The output counts, not the exit code: that one is lost when the application ignores SIGCHLD.
    if child.stdout.strip() != b"done":
        raise _NoAmx(f"tile instructions failed in a trial process: {_ending(child)}")


def _ending(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"ended by {signal.Signals(-child.returncode).name}"
    last_line = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return " ".join([f"exit code {child.returncode}", *last_line])

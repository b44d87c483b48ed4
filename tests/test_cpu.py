"""What is said of the CPU: features, masks, and AMX step by step."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
from llvmlite import binding

from expertile.codegen import cpu
from expertile.codegen.compiler import Target, assembly
from expertile.codegen.errors import CodegenError

x86_64_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="machine code of x86-64 Linux"
)
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86-64")


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def flags() -> set[str]:
    return set(cpu._cpuinfo()["flags"].split())


# Features -----------------------------------------------------------------------------------------


def test_host_is_what_llvm_says() -> None:
    host = cpu.host()
    found = binding.get_host_cpu_features()
    assert host.features == tuple(sorted(host.features))
    assert {each[1:] for each in host.features} == set(found)
    assert host.triple == binding.get_process_triple()
    assert cpu.host() is host
    assert not host.has("no-such-feature")


def test_masking_nothing_changes_nothing() -> None:
    features = cpu.host().features
    assert cpu.without(features, ()) == features


FULL = (
    *("+amx-bf16", "+amx-int8", "+amx-tile", "+avx", "+avx2", "+avx512bf16", "+avx512bw"),
    *("+avx512dq", "+avx512f", "+avx512fp16", "+avx512vl", "+avx512vnni", "+avxvnni"),
    *("+f16c", "+fma", "+sse4.2"),
)


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        ("amx-tile", FULL[3:]),
        ("amx-int8", FULL[:1] + FULL[2:]),
        (
            "avx512bw",
            tuple(f for f in FULL if f not in ("+avx512bw", "+avx512bf16", "+avx512fp16")),
        ),
        ("avx512f", tuple(f for f in FULL if not f.startswith("+avx512"))),
        ("fma", tuple(f for f in FULL if not f.startswith("+avx512") and f != "+fma")),
        ("avx", (*FULL[:3], "+sse4.2")),
    ],
)
def test_what_builds_on_a_masked_feature_goes_with_it(mask: str, left: tuple[str, ...]) -> None:
    masked = cpu.without(FULL, [mask])
    assert tuple(f for f in masked if f.startswith("+")) == left
    assert {f[1:] for f in masked} == {f[1:] for f in FULL}
    assert list(masked) == sorted(masked)


@x86_64
def test_llvm_obeys_a_mask() -> None:
    text = """
    define <16 x float> @f(<16 x float> %a, <16 x float> %b, <16 x float> %c) {
      %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %a, <16 x float> %b, <16 x float> %c)
      ret <16 x float> %r
    }
    declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
    """
    for mask, present, absent in (((), "zmm", "xyz"), (("avx512f",), "ymm", "zmm")):
        target = Target("x86-64", cpu.without(FULL, mask), cpu.host().triple)
        listing = assembly(text, target)
        assert present in listing
        assert absent not in listing


@x86_64
def test_llvm_knows_the_names_in_the_tables() -> None:
    known = set(binding.get_host_cpu_features())
    named = set(cpu._BUILDS_ON) | {base for bases in cpu._BUILDS_ON.values() for base in bases}
    assert named <= known


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(CodegenError, match=r"got amx_tile; similar names: .*amx-tile"):
        cpu.without(FULL, ["amx_tile"])
    with pytest.raises(CodegenError, match="no-such-feature"):
        Target.host(without=("no-such-feature",))


@x86_64
def test_the_environment_masks_features() -> None:
    program = (
        "from expertile.codegen import cpu; host = cpu.host()\n"
        "print(*(name for name in ('avx', 'avx2', 'fma', 'avx512f') if host.has(name)))\n"
        "print('-avx2' in host.features, '-avx512f' in host.features)"
    )
    result = run_python(program, EXPERTILE_MASK_FEATURES="avx2, fma")
    expected = [name for name in ("avx",) if binding.get_host_cpu_features()[name]]
    assert result.stdout.splitlines() == [" ".join(expected), "True True"]


@x86_64
def test_a_misspelt_mask_is_an_error() -> None:
    program = "from expertile.codegen import cpu; cpu.host()"
    result = run_python(program, EXPERTILE_MASK_FEATURES="avx512-f")
    assert result.returncode == 1
    assert "EXPERTILE_MASK_FEATURES" in result.stderr.splitlines()[-1]
    assert "avx512-f" in result.stderr.splitlines()[-1]


def test_importing_examines_nothing() -> None:
    program = (
        "import sys, expertile; before = set(sys.modules); import expertile.codegen.compiler\n"
        "assert not {'llvmlite', 'subprocess', 'torch', 'numpy'} & (set(sys.modules) - before)"
    )
    result = run_python(program)
    assert result.returncode == 0, result.stderr


# AMX on this machine ------------------------------------------------------------------------------


def test_amx_status_is_consistent() -> None:
    status = cpu.amx_status()
    steps = [status.cpuid, status.os_enabled, status.permission, status.trial]
    assert steps == sorted(steps, reverse=True)  # no step passed after one that failed
    assert status.usable == all(steps)
    assert status.reason
    assert cpu.amx_status() is status


@x86_64_linux
def test_amx_status_agrees_with_the_other_witnesses() -> None:
    status = cpu.amx_status()
    found = binding.get_host_cpu_features()
    llvm_sees_it = found["amx-tile"] and found["amx-bf16"] and found["amx-int8"]
    assert (status.cpuid and status.os_enabled) == llvm_sees_it
    if status.usable:
        assert {"amx_tile", "amx_bf16", "amx_int8"} <= flags()
        cpu.request_amx_permission()
    if not status.cpuid:
        assert "CPUID.7.0:EDX bits 22,24,25" in status.reason


@x86_64_linux
def test_cpuid_and_xgetbv_agree_with_linux() -> None:
    _, ebx, ecx, edx = cpu._cpuid(0)
    vendor = b"".join(word.to_bytes(4, "little") for word in (ebx, edx, ecx))
    assert vendor.decode() == cpu._cpuinfo()["vendor_id"]
    assert bool(cpu._cpuid(7)[1] >> 5 & 1) == ("avx2" in flags())
    if "avx" in flags():
        assert cpu._xcr0() & 0b111 == 0b111  # x87, SSE, AVX
    if "avx512f" in flags():
        assert cpu._xcr0() >> 5 & 0b111 == 0b111


@x86_64_linux
def test_permission_is_granted_or_refused_with_an_errno() -> None:
    refused = None
    try:
        cpu.request_amx_permission()
    except OSError as error:
        refused = error
    granted = ctypes.c_uint64()  # the kernel's own word for it: ARCH_GET_XCOMP_PERM
    asked = ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted)) == 0
    assert (asked and granted.value >> 18 & 1) == (refused is None)
    if refused:
        assert f"permission refused: errno {refused.errno}" in str(refused)
        assert not cpu.amx_status().usable


# The trial ----------------------------------------------------------------------------------------


@x86_64_linux
def test_the_trial_survives_a_deadly_instruction() -> None:
    with pytest.raises(cpu._NoAmx, match="ended by SIGILL"):
        cpu._try_tiles(b"\x0f\x0b")  # ud2


@x86_64_linux
def test_the_trial_passes_on_code_that_runs() -> None:
    cpu._try_tiles(b"\xc3")  # ret


def expects(at: int, byte: int) -> bytes:
    """cmp byte [rdi + at], byte; je over; ud2; over: ret"""
    return bytes([0x80, 0x7F, at, byte, 0x74, 0x02, 0x0F, 0x0B, 0xC3])


@x86_64_linux
def test_the_trial_hands_over_the_tile_configuration() -> None:
    assert len(cpu._TRIAL_CONFIG) == 64
    for at, byte in {0: 1, 16: 64, 17: 0, 20: 64, 22: 0, 48: 16, 50: 16, 51: 0}.items():
        assert cpu._TRIAL_CONFIG[at] == byte
    cpu._try_tiles(expects(48, 16))
    with pytest.raises(cpu._NoAmx, match="SIGILL"):
        cpu._try_tiles(expects(48, 17))


@x86_64_linux
def test_the_trial_ends_code_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_TRIAL_SECONDS", 1)
    with pytest.raises(cpu._NoAmx, match="timed out"):
        cpu._try_tiles(b"\xeb\xfe")  # jump to itself


@x86_64_linux
@pytest.mark.parametrize("executable", ["", "/bin/true", "/bin/false", "/no/such/python"])
def test_the_trial_needs_a_python_that_answers(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(cpu._NoAmx):
        cpu._try_tiles(b"\xc3")


@x86_64
def test_the_machine_code_is_what_its_comments_say() -> None:
    binding.initialize_native_asmparser()
    lines = {
        cpu._TRIAL_CODE: r"ldtilecfg (%rdi)\0Atilezero %tmm0\0Atilezero %tmm1\0Atilezero %tmm2\0A"
        r"tdpbf16ps %tmm2, %tmm1, %tmm0\0Atilerelease\0Aret",
        cpu._XGETBV_CODE: r"xorl %ecx, %ecx\0Axgetbv\0Ashlq $$32, %rdx\0Aorq %rdx, %rax\0Aret",
        cpu._CPUID_CODE: r"pushq %rbx\0Amovq %rdx, %r8\0Amovl %edi, %eax\0Amovl %esi, %ecx\0A"
        r"cpuid\0Amovl %eax, (%r8)\0Amovl %ebx, 4(%r8)\0Amovl %ecx, 8(%r8)\0Amovl %edx, 12(%r8)\0A"
        r"popq %rbx\0Aret",
    }
    target = binding.Target.from_triple(cpu.host().triple)
    machine = target.create_target_machine(cpu="sapphirerapids")
    for code, source in lines.items():
        text = f'define void @f() {{ call void asm sideeffect "{source}", ""() ret void }}'
        assert code in machine.emit_object(binding.parse_assembly(text))


# AMX on machines that aren't here -----------------------------------------------------------------

ALL_BITS = 1 << 22 | 1 << 24 | 1 << 25


class Machine:
    """Stands for the machine; each attribute is what one step finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.edx, self.xcr0, self.osxsave, self.refusal = ALL_BITS, 0x600E7, 1, 0
        self.features = ("+amx-bf16", "+amx-int8", "+amx-tile")
        self.tried: list[bytes] = []
        monkeypatch.setattr(cpu, "_cpuid", self.cpuid)
        monkeypatch.setattr(cpu, "_xcr0", lambda: self.xcr0)
        monkeypatch.setattr(cpu, "host", lambda: cpu.Host("it", self.features, "x86_64"))
        monkeypatch.setattr(cpu, "_try_tiles", self.tried.append)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_a, **_k: self)
        monkeypatch.setattr(ctypes, "get_errno", lambda: self.refusal)
        monkeypatch.setattr(cpu, "request_amx_permission", cpu.request_amx_permission.__wrapped__)
        monkeypatch.setattr(cpu, "_x86_64_linux", lambda: True)

    def cpuid(self, leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
        return {0: (7, 0, 0, 0), 1: (0, 0, self.osxsave << 27, 0), 7: (0, 0, 0, self.edx)}[leaf]

    def syscall(self, *args: Any) -> int:
        assert [arg.value for arg in args] == [158, 0x1023, 18]
        return -1 if self.refusal else 0

    def status(self) -> cpu.AmxStatus:
        return cpu.amx_status.__wrapped__()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def steps(status: cpu.AmxStatus) -> str:
    return "".join(
        "x" if step else "."
        for step in (status.cpuid, status.os_enabled, status.permission, status.trial)
    )


def test_amx_that_works(machine: Machine) -> None:
    status = machine.status()
    assert status.usable
    assert steps(status) == "xxxx"
    assert machine.tried == [cpu._TRIAL_CODE]


@pytest.mark.parametrize("bit", [22, 24, 25])
def test_amx_with_a_part_missing(machine: Machine, bit: int) -> None:
    machine.edx = ALL_BITS & ~(1 << bit)
    status = machine.status()
    assert not status.usable
    assert steps(status) == "...."
    assert cpu._AMX_BITS[bit] in status.reason
    assert machine.tried == []


@pytest.mark.parametrize("xcr0", [0xE7, 0x200E7, 0x400E7])
def test_amx_that_the_system_has_not_enabled(machine: Machine, xcr0: int) -> None:
    machine.xcr0 = xcr0
    status = machine.status()
    assert steps(status) == "x..."
    assert "XCR0 bits 17,18" in status.reason
    assert machine.tried == []


def test_xgetbv_is_not_executed_without_osxsave(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.osxsave = 0
    monkeypatch.setattr(cpu, "_xcr0", lambda: pytest.fail("XGETBV would end the process"))
    assert steps(machine.status()) == "x..."


@pytest.mark.parametrize(
    ("refusal", "words"),
    [(errno.ENOSPC, "sigaltstack"), (errno.EINVAL, "5.16"), (errno.EPERM, "seccomp")],
)
def test_permission_refused(machine: Machine, refusal: int, words: str) -> None:
    machine.refusal = refusal
    status = machine.status()
    assert steps(status) == "xx.."
    assert f"permission refused: errno {refusal} ({errno.errorcode[refusal]})" in status.reason
    assert words in status.reason
    assert machine.tried == []


def test_amx_masked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTILE_MASK_FEATURES", "amx-bf16")
    machine.features = ("+amx-int8", "+amx-tile", "-amx-bf16")
    status = machine.status()
    assert steps(status) == "xx.."
    assert status.reason == "amx-bf16 turned off by EXPERTILE_MASK_FEATURES=amx-bf16"
    assert machine.tried == []


def test_a_failed_trial(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_code: bytes) -> None:
        raise cpu._NoAmx("tile instructions failed")

    monkeypatch.setattr(cpu, "_try_tiles", fail)
    status = machine.status()
    assert not status.usable
    assert steps(status) == "xxx."
    assert status.reason == "tile instructions failed"


@pytest.mark.parametrize(("system", "arch"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_other_machines_execute_nothing(
    system: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: arch)
    monkeypatch.setattr(cpu, "_execute", lambda *_args: pytest.fail("executed x86 Linux code"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_named: pytest.fail("called Linux"))
    status = cpu.amx_status.__wrapped__()
    assert not status.usable
    assert "64-bit Linux on x86-64" in status.reason
    assert arch in status.reason
    with pytest.raises(OSError, match="only Linux on x86-64"):
        cpu.request_amx_permission.__wrapped__()

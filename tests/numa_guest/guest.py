"""Boots a guest of several memory nodes under QEMU's software emulation, and runs one command in it.

The guest's memory is the host process's own, so that all of it is on one real node; what has nodes is the guest's
kernel, which is the one that places pages and answers where they are. The emulated CPU has AVX and neither AVX-512
nor AMX, so that kernels are those of the portable ISA. Nothing here says anything about speed.
"""

from __future__ import annotations

import importlib.util
import shlex
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from . import image, packages

_HERE = Path(__file__).parent
_ROOMS = ("expertile", "expertile.codegen", "expertile.templates", "expertile.runtime")
_WORK = "/run/work"
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LC_ALL": "C.UTF-8",
    "OMP_WAIT_POLICY": "passive",  # more guest CPUs than the host gives it time for
    "PATH": "/bin",
    "PYTHONHOME": f"{sys.base_prefix}:{sys.base_exec_prefix}",
    "PYTHONPATH": f"{_WORK}:{image.PACKAGES}",
}


class GuestFailed(Exception):
    """The guest did not get as far as the command's end, and what it said last."""


@dataclass(frozen=True)
class Guest:
    """A machine: its nodes, each with the same memory and about the same share of the CPUs."""

    nodes: int
    cpus: int = 4
    mib: int = 1536

    @property
    def node_mib(self) -> int:
        """Of one node."""
        return self.mib // self.nodes

    def run(self, module: str, arguments: Sequence[str], timeout: float) -> Iterator[str]:
        """The lines that `python -m module arguments…` prints in the guest, as they come.

        Raises GuestFailed if it fails or takes longer than `timeout` seconds, packages.Unavailable if there is no
        guest here.
        """
        tools = packages.tools()
        disk = image.disk_image(tools)
        command = [str(image.PYTHON), "-u", "-m", module, *arguments]
        variables = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
        script = shlex.join(["exec", "env", "-i", *variables, "/bin/chroot", "/image", *command])
        with tempfile.TemporaryDirectory(prefix="numa-guest-") as scratch:
            folder = Path(scratch)
            files = _ramdisk_files(tools) | {"command": script.encode()}
            (folder / "initrd").write_bytes(cpio(files))
            yield from self._boot(tools, disk, folder, timeout)
            _check_status(folder)

    def _boot(
        self, tools: packages.Tools, disk: Path, folder: Path, timeout: float
    ) -> Iterator[str]:
        command = [*tools.qemu, *self._machine(), *_devices(tools, disk, folder)]
        with (
            open(folder / "qemu", "w") as complaints,
            subprocess.Popen(
                command,
                env=tools.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                errors="replace",
            ) as process,
        ):
            alarm = threading.Timer(timeout, process.kill)
            alarm.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    yield line.rstrip()
            finally:
                alarm.cancel()
                process.kill()  # the reader may have stopped early

    def _machine(self) -> list[str]:
        """The machine's CPUs and nodes, in QEMU's words.

        CPUs take turns in one thread of the host: where they run at once, Linux may crash as it patches itself. They
        are without AVX2, whose gathers QEMU 7.2 gets wrong: NumPy sorts with them.
        """
        options = ["-machine", "q35", "-accel", "tcg,thread=single,tb-size=256"]
        options += ["-cpu", "max,-avx2", "-smp", f"{self.cpus},sockets={self.cpus}"]
        options += ["-m", f"{self.nodes * self.node_mib}M"]
        for node in range(self.nodes):
            first, end = (self.cpus * n // self.nodes for n in (node, node + 1))
            options += ["-object", f"memory-backend-ram,id=memory{node},size={self.node_mib}M"]
            options += ["-numa", f"node,nodeid={node},memdev=memory{node},cpus={first}-{end - 1}"]
        return options


def _devices(tools: packages.Tools, disk: Path, folder: Path) -> list[str]:
    """One disk, three serial lines (the kernel's console, the command's output, its status), and what to boot."""
    return [
        "-nodefaults", "-no-reboot", "-display", "none",
        "-drive", f"if=none,id=image,file={disk},format=raw,readonly=on",
        "-device", "nvme,drive=image,serial=image",
        "-serial", f"file:{folder / 'console'}", "-serial", "stdio", "-serial", f"file:{folder / 'status'}",
        "-kernel", str(tools.kernel), "-initrd", str(folder / "initrd"),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr transparent_hugepage=madvise",
    ]  # fmt: skip


def _check_status(folder: Path) -> None:
    """Raise GuestFailed unless the command ended well."""
    said = {name: _tail(folder / name) for name in ("status", "console", "qemu")}
    if said["status"] == "status 0":
        return
    how = (
        f"its command ended with {said['status']}"
        if said["status"]
        else "it never ended its command"
    )
    raise GuestFailed(f"the guest failed: {how}\nconsole: {said['console']}\nQEMU: {said['qemu']}")


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-30:]).strip()


# The initial ramdisk ------------------------------------------------------------------------------------------------


def _ramdisk_files(tools: packages.Tools) -> dict[str, bytes]:
    files = {"init": _HERE / "init", "bin/busybox": tools.program("busybox")}
    files |= {f"work/numa_guest/{path.name}": path for path in _HERE.glob("*.py")}
    files |= {"work/oracle.py": _HERE.parent / "oracle.py"}
    for room in _ROOMS:
        folder = _folder(room)
        for path in folder.rglob("*.py"):
            files[f"work/{room.replace('.', '/')}/{path.relative_to(folder)}"] = path
    contents = {name: path.read_bytes() for name, path in files.items()}
    metadata = f"Metadata-Version: 2.1\nName: expertile\nVersion: {version('expertile')}\n"
    return contents | {"work/expertile.dist-info/METADATA": metadata.encode()}


def _folder(package: str) -> Path:
    """Where a package's modules are, be it installed or in a checkout."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def cpio(files: Mapping[str, bytes]) -> bytes:
    """An archive in the kernel's format for initial ramdisks ("newc"), of executable files and their folders."""
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in sorted(folders)]
    entries += [(name, stat.S_IFREG | 0o755, content) for name, content in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    return b"".join(_cpio_entry(number, *entry) for number, entry in enumerate(entries, start=1))


def _cpio_entry(number: int, name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    # inode, mode, user, group, links, time, size, device (2), special device (2), length of the name, checksum
    fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + encoded) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)

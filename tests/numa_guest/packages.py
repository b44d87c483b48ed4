"""What a guest needs from Debian, without installing it: packages are downloaded and unpacked into a cache folder.

`apt-get download` and `dpkg -x` need neither root nor a writable system, so that this works in a container as well.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

_PROGRAMS = ("qemu-system-x86", "busybox-static", "e2fsprogs")
_KERNELS = ("linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64")
"""Kernels with NVMe and ext4 built in, the first that the release has; weighted interleave needs 6.9 or later."""
_NETWORK = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")


class Unavailable(Exception):
    """A guest can't be had on this machine, and why."""


@dataclass(frozen=True)
class Tools:
    """Programs unpacked under a folder; where a program is not there, the system's own serves."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return next(self.folder.glob("boot/vmlinuz-*"))

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which programs find the libraries that came with them."""
        libraries = (self.folder / "usr/lib/x86_64-linux-gnu", self.folder / "lib/x86_64-linux-gnu")
        return os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}

    @property
    def qemu(self) -> list[str]:
        """The emulator's command, with the folders of its firmware."""
        firmware = [str(self.folder / "usr/share" / name) for name in ("qemu", "seabios")]
        return [str(self.program("qemu-system-x86_64")), "-L", firmware[0], "-L", firmware[1]]

    def program(self, name: str) -> Path:
        """The path of a program. Raises Unavailable."""
        own = [str(self.folder / place) for place in ("usr/bin", "usr/sbin", "bin", "sbin")]
        found = shutil.which(name, path=os.pathsep.join([*own, os.defpath, "/usr/sbin", "/sbin"]))
        if found is None:
            raise Unavailable(f"{name} is in none of the packages {', '.join(_PROGRAMS)}")
        return Path(found)


def cache_folder() -> Path:
    """The folder in the user's cache that this suite keeps."""
    folder = user_cache_path("expertile") / "numa_guest"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def new_folder(target: Path) -> Iterator[Path | None]:
    """A temporary folder that becomes `target` if the block succeeds; None where `target` is there already."""
    with FileLock(f"{target}.lock"):
        if target.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            yield made
            made.rename(target)


def tools() -> Tools:
    """The programs, downloaded if they are not in the cache. Raises Unavailable with the reason."""
    target = cache_folder() / f"tools-{_system()}"
    with new_folder(target) as folder:
        if folder is not None:
            _download(folder)
    return Tools(target)


def _system() -> str:
    """The release by whose packages the tools were made. Raises Unavailable unless it is Debian's, on x86-64."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Unavailable(f"the guest is an x86-64 one, this is {platform.platform()}")
    missing = [
        name for name in ("apt-get", "apt-cache", "dpkg", "ldd") if shutil.which(name) is None
    ]
    if missing:
        raise Unavailable(
            f"its programs come in Debian packages, and there is no {missing[0]} here"
        )
    release = platform.freedesktop_os_release()
    return f"{release['ID']}-{release.get('VERSION_ID', 'unstable')}"


def _download(folder: Path) -> None:
    """Unpack the packages, by the system's own package lists or, where they are missing or stale, by fresh ones."""
    with tempfile.TemporaryDirectory(prefix="apt-") as scratch:
        first, second = Path(scratch) / "first", Path(scratch) / "second"
        try:
            packages = _fetch(Apt(), first)
        except Unavailable:
            packages = _fetch(Apt.with_fresh_lists(second), second)
        for package in packages:
            _unpack(package, folder)


@dataclass(frozen=True)
class Apt:
    """APT with some options: only what reads the lists or downloads into a folder of ours."""

    options: tuple[str, ...] = ("-o", "APT::Sandbox::User=root")

    @classmethod
    def with_fresh_lists(cls, folder: Path) -> Apt:
        """With package lists of its own, kept in `folder`. Raises Unavailable if they can't be downloaded."""
        lists, cache = folder / "lists", folder / "cache"
        for part in (lists, cache / "archives"):
            (part / "partial").mkdir(parents=True)  # APT makes it only where it runs as root
        apt = cls((*cls().options, "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"))
        apt.run("apt-get", "update", "-qq", *_NETWORK)
        return apt

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """The output of a command. Raises Unavailable with what it complained about."""
        command = [program, *self.options, *arguments]
        environment = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            complaint = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise Unavailable(f"`{program} {arguments[0]}` failed: {complaint[-1]}")
        return done.stdout

    def kernel(self) -> str:
        """The name of the package with the kernel itself."""
        found = re.search(
            r"Depends: (linux-image-\S+)", self.run("apt-cache", "depends", *_KERNELS)
        )
        if found is None:
            raise Unavailable(f"the package lists name no kernel {' or '.join(_KERNELS)}")
        return found[1]

    def needed(self) -> list[str]:
        """The programs' packages, and what they need that this system has not installed."""
        plan = self.run("apt-get", "--simulate", "--no-install-recommends", "install", *_PROGRAMS)
        return re.findall(r"^Inst (\S+)", plan, re.MULTILINE)


def _fetch(apt: Apt, folder: Path) -> list[Path]:
    """Download the packages into `folder`."""
    folder.mkdir(exist_ok=True)
    names = [*apt.needed(), apt.kernel()]
    apt.run("apt-get", "download", "-qq", *_NETWORK, *names, cwd=folder)
    return sorted(folder.glob("*.deb"))


def _unpack(package: Path, folder: Path) -> None:
    """A package's files; of a kernel's only the kernel, as everything it needs here is built in."""
    if not package.name.startswith("linux-image"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        return
    command = ["dpkg", "--fsys-tarfile", package]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.name.startswith("./boot/vmlinuz-"):
                    archive.extract(member, folder, filter="data")

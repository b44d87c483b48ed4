"""A disk image for the guest: this Python, and the packages that Expertile requires, without Expertile itself.

Python and the libraries it is linked with lie at their own paths, where they look for each other. Packages lie in
:data:`PACKAGES` wherever their environment is, so that environments of the same versions share an image.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .packages import Tools, Unavailable, cache_folder

PACKAGES = "/packages"
PYTHON = Path(sys._base_executable).resolve()
_ROOTS = ("expertile", "pytest")
"""What the guest imports; the oracle is written with pytest."""
_MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp")
_NOT_NEEDED = re.compile(
    r"""(^|/) (tests? | include | site-packages | dist-packages | config-[^/]* | ensurepip | idlelib | tkinter) /
    | ^torch/bin/ (?!torch_shm_manager) | /_tkinter\.
    | \. (a | h | pyi) $""",
    re.VERBOSE,
)
_KEPT = 2
"""Images kept in the cache: of the versions of now, and of those before."""


def disk_image(tools: Tools) -> Path:
    """The image, made if these versions have none yet; about 1.2 GB. Raises Unavailable."""
    distributions = _required(_ROOTS)
    image = cache_folder() / f"image-{_key(distributions)}.ext4"
    with FileLock(cache_folder() / "image.lock"):
        if not image.exists():
            _make(image, distributions, tools)
        os.utime(image)
        for old in sorted(cache_folder().glob("image-*.ext4"), key=_age)[_KEPT:]:
            old.unlink()
    return image


def _age(path: Path) -> float:
    return -path.stat().st_mtime


def _required(roots: Iterable[str]) -> list[Distribution]:
    """The installed distributions that the roots require, directly or not, ordered by name; without Expertile."""
    found: dict[str, Distribution] = {}
    wanted = list(roots)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        with suppress(
            PackageNotFoundError
        ):  # optional for another platform, or left out on purpose
            found[name] = distribution(name)
            requirements = map(Requirement, found[name].requires or ())
            wanted += [
                r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return [found[name] for name in sorted(found) if name != "expertile"]


def _key(distributions: Iterable[Distribution]) -> str:
    """What the image is made of, in short: Python, the versions of packages, the rules in this file."""
    versions = [f"{found.name}=={found.version}" for found in distributions]
    system = [sys.version, str(PYTHON), os.confstr("CS_GNU_LIBC_VERSION") or ""]
    rules = Path(__file__).read_text()
    return hashlib.sha256("\n".join([*system, *versions, rules]).encode()).hexdigest()[:16]


def _make(image: Path, distributions: Iterable[Distribution], tools: Tools) -> None:
    """Lay the files out in a folder beside the image, of links where that can be, and write the file system."""
    with tempfile.TemporaryDirectory(dir=image.parent, prefix="image-") as scratch:
        root = Path(scratch) / "root"
        for name in _MOUNT_POINTS:
            (root / name).mkdir(parents=True)
        for source, target in _files(distributions):
            _put(source, root / target.lstrip("/"))
        _byte_compile(root)
        unfinished = Path(scratch) / "image"
        _write_file_system(root, unfinished, tools)
        unfinished.rename(image)


def _files(distributions: Iterable[Distribution]) -> Iterator[tuple[Path, str]]:
    """Each file, and its path in the guest."""
    binaries = [PYTHON]
    for source, target in [*_standard_library(), *_packages(distributions)]:
        if re.search(r"\.so(\.|$)", source.name):
            binaries.append(source)
        yield source, target
    yield PYTHON, str(PYTHON)
    for library in _libraries(binaries):
        yield Path(library), library
    for cache in Path("/etc").glob(
        "ld.so.cache"
    ):  # folders that the loader searches beside its own
        yield cache, str(cache)


def _standard_library() -> Iterator[tuple[Path, str]]:
    platform = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    for folder in {Path(sysconfig.get_path("stdlib")), Path(platform)}:
        for path in folder.rglob("*"):
            if path.is_file() and not _NOT_NEEDED.search(str(path.relative_to(folder))):
                yield path, str(path)


def _packages(distributions: Iterable[Distribution]) -> Iterator[tuple[Path, str]]:
    for found in distributions:
        if found.files is None:
            raise Unavailable(f"{found.name} was installed without a list of its files")
        for name in found.files:
            outside = ".." in name.parts or name.is_absolute()  # commands, manual pages
            if not outside and not _NOT_NEEDED.search(str(name)):
                path = Path(str(name.locate()))
                if path.is_file():
                    yield path, f"{PACKAGES}/{name}"


def _libraries(binaries: Iterable[Path]) -> list[str]:
    """The system's libraries that they are linked with, and the loader; what lies in packages finds itself."""
    command = ["ldd", *map(str, binaries)]
    output = subprocess.run(
        command, capture_output=True, text=True
    ).stdout  # fails where one is static
    found = set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(0x", output, re.MULTILINE))
    own = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return sorted(path for path in found if not path.startswith(own))


def _put(source: Path, target: Path) -> None:
    """The file's content at `target`: as a link, which takes no time or room, where the file systems allow it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        try:
            os.link(source.resolve(), target)
        except FileExistsError:
            raise
        except OSError:
            shutil.copy2(source, target)


def _byte_compile(root: Path) -> None:
    """Compile what the installer has not: emulated, that would take a minute at each boot."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-s", root, "-p", "/", root]
    subprocess.run(
        command, stdout=subprocess.DEVNULL
    )  # fails for files in Python 2, which some packages have


def _write_file_system(root: Path, image: Path, tools: Tools) -> None:
    used = sum(-(-path.lstat().st_size // 4096) * 4 for path in root.rglob("*"))  # KiB
    command = [
        str(tools.program("mke2fs")),
        "-q",
        "-t",
        "ext4",
        "-O",
        "^has_journal",
        "-m",
        "0",
        "-d",
        str(root),
    ]
    subprocess.run(
        [*command, str(image), f"{used * 11 // 10 + 32768}k"],
        env=tools.environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )

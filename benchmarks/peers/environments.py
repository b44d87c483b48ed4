"""An environment for each peer: made by `setup`, found by `run`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

from peers import adapters
from peers.adapters import Peer

DIRECTORY = Path(platformdirs.user_cache_dir("expertile")) / "peers"
_MARK = "installed.txt"


class Adapter:
    """An adapter and where it comes from."""

    def __init__(self, file: Path) -> None:
        self.file, self.peer = file, adapters.read(file)

    @property
    def name(self) -> str:
        """Of the peer."""
        return self.peer.name

    def python(self, directory: Path) -> Path:
        """The interpreter that its process runs on, there or not."""
        if not self.peer.requirements:
            return Path(sys.executable)
        return self.environment(directory) / "bin" / "python"

    def environment(self, directory: Path) -> Path:
        """The folder of its environment."""
        return directory / (self.peer.environment or self.name)

    def installed(self, directory: Path) -> bool:
        """Whether `setup` has finished with today's requirements."""
        mark = self.environment(directory) / _MARK
        return not self.peer.requirements or (
            mark.exists() and mark.read_text() == _content(self.peer)
        )


def known(further: Sequence[Path] = ()) -> dict[str, Adapter]:
    """All adapters by name, those of `further` files included."""
    found = [Adapter(file) for file in (*adapters.files(), *further)]
    return {adapter.name: adapter for adapter in found}


def command(name: str, directory: Path) -> str:
    """What to type to install a peer."""
    place = "" if directory == DIRECTORY else f" --directory {shlex.quote(str(directory))}"
    return f"python -m benchmarks.peers setup {name}{place}"


def install(adapter: Adapter, directory: Path, say: Callable[[str], None]) -> None:
    """Make the environment, or bring it up to date. Raises CalledProcessError if pip fails."""
    folder = adapter.environment(directory)
    venv.create(folder, symlinks=True, with_pip=True)
    (folder / _MARK).unlink(missing_ok=True)
    for requirement in adapter.peer.requirements:
        arguments = ["-m", "pip", "install", *shlex.split(requirement)]
        say(f"{adapter.name}: pip install {requirement}")
        subprocess.run(
            [adapter.python(directory), *arguments],
            env=os.environ | dict(adapter.peer.install_variables),
            check=True,
        )
    (folder / _MARK).write_text(_content(adapter.peer))


def _content(peer: type[Peer]) -> str:
    return "\n".join(peer.requirements) + "\n"

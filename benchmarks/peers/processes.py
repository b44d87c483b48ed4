"""The controller's side of a worker: one line there, one line back, and stopped in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_FOLDER = Path(__file__).resolve().parents[1]  # where `peers` is imported from


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Memory in huge pages, wherever a library asks malloc for it. Small pages are read up to a quarter slower if they lie
scattered, which depends on what was in memory before, and so on who was first to ask."""


class PeerError(Exception):
    """A peer that can't be measured, and why."""


class Process:
    """A worker. It gets no CPU time but while it serves a command: between them it is stopped (SIGSTOP).

    So no runtime's idle threads have to be told not to spin, and each keeps the settings its users have.
    """

    def __init__(self, python: Path, adapter: Path, threads: int) -> None:
        """Start it. Raises PeerError if there is no such interpreter."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        paths = [str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        tunables = filter(None, [os.environ.get("GLIBC_TUNABLES"), _HUGE_PAGES])
        environment = os.environ | {
            "GLIBC_TUNABLES": ":".join(tunables),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
        }
        try:
            self._process = subprocess.Popen(
                [
                    python,
                    "-P",
                    "-m",
                    "peers.worker",
                    str(adapter.resolve()),
                ],  # -P: nothing from this folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        except OSError as error:
            raise PeerError(f"can't start {python}: {error.strerror}") from None

    def ask(self, command: str, *, timeout: float, **arguments: Any) -> Json:
        """Have a command served. Raises PeerError if it fails, the process dies, or `timeout` seconds have passed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._process.send_signal(signal.SIGCONT)
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise PeerError(self._death()) from None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise PeerError(f"{command}: no answer within {timeout:.0f} s")
        answered = self._process.stdout.readline()
        if not answered:
            raise PeerError(self._death())
        self._process.send_signal(signal.SIGSTOP)
        answer: Json = json.loads(answered)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            if file is not None and not file.closed:
                with contextlib.suppress(BrokenPipeError):  # a command it did not live to read
                    file.close()

    def _death(self) -> str:
        code = self._process.wait()
        end = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{end}: {lines[-1]}" if lines else end

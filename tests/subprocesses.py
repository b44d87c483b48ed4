"""Functions of the tests that run in a new Python process: their source is sent, their result comes back as JSON.

def counts() -> list[int]:
    import torch                        # nothing of the test module is there: a function imports what it needs
    ...
assert run(counts, env={"OMP_THREAD_LIMIT": "1"}) == [1, 1]
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TESTS = Path(__file__).parent
_MARK = "result: "


def run(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    python: str | Path = sys.executable,
    timeout: float = 120,
) -> Any:
    """What `function(*args)` returns in a new process that can import the tests' helpers.

    env: variables to set; "" removes one. Raises AssertionError with the process's output if it fails or takes longer
    than `timeout` seconds.
    """
    program = "\n".join(
        (
            "from __future__ import annotations",
            "import json, sys",
            textwrap.dedent(inspect.getsource(function)),
            f"print({_MARK!r} + json.dumps({function.__name__}(*json.loads(sys.argv[1]))))",
        )
    )
    command = [str(python), "-c", program, json.dumps(args)]
    output = check_output(command, env=env, cwd=cwd, timeout=timeout)
    return json.loads(output.rpartition(_MARK)[2])


def check_output(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> str:
    """What a command prints. Raises AssertionError with all its output if it fails or doesn't end."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)} | dict(env or {})
    environment = {name: value for name, value in environment.items() if value}
    # A session of its own: what a process that hangs has forked must not outlive it, nor hold the pipe.
    with subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, errors = process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{output}\n{errors}") from None
    if process.returncode:
        raise AssertionError(f"exit code {process.returncode}\n{output}\n{errors}")
    return output


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bits; starts no threads."""
    import hashlib

    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def os_threads() -> int:
    """Threads of this process, as Linux counts them."""
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Memory of this process that is in RAM (VmRSS)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def in_fork(function: Callable[[], Any]) -> Any:
    """What `function()` returns in a forked child of this process."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            with os.fdopen(send, "w") as file:
                json.dump(function(), file)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # not the way out of a test run
    os.close(send)
    with os.fdopen(receive) as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"wait status {status} of a forked child"
    return json.loads(answer)

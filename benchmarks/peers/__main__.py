"""`python -m benchmarks.peers`, or `python benchmarks/peers`."""

import sys
from pathlib import Path

# Not the repository's root, where `expertile` would be half a package, nor this folder: `peers` is imported from here.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers.cli import app  # noqa: E402

app(prog_name="python -m benchmarks.peers")

"""Decode and small batches of all shapes: the share of the read bandwidth at 1 to 64 tokens.

python benchmarks/decode.py [any option of `expertile bench`]
"""

import sys

import typer

from expertile._bench import bench

if __name__ == "__main__":
    sys.argv[1:1] = ["--tokens", "1,2,4,8,16,64", "--no-host", "--no-peers"]
    typer.run(bench)

"""What a fresh process pays before its first token."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from expertile._bench.implementations import ours
from expertile._bench.shapes import Shape
from expertile._bench.workload import Weights
from expertile.codegen.compiler import counters

Json = dict[str, Any]

NEW_ROWS = (2, 3, 8, 17, 32)
"""Tokens an expert; each number has kernels of its own."""

_CHILD = """
import json, time, torch
start = time.perf_counter()
import expertile
seconds = time.perf_counter() - start
from expertile._bench import first_calls
print(json.dumps({"import_s": seconds} | first_calls()))
"""


def first_calls() -> Json:
    """In a fresh process: seconds of the first call, of new row counts and of a tiny call."""
    shape = Shape("first calls", 2048, 768, 8, 8)
    weights, run = Weights.random(shape), ours(shape)

    def call(tokens: int) -> float:
        x = torch.randn(tokens, shape.hidden).bfloat16()
        ids = torch.arange(shape.experts).repeat(tokens, 1)
        router = torch.full(ids.shape, 0.125)
        start = time.perf_counter()
        run(weights, x, ids, router)
        return time.perf_counter() - start

    first = call(1)
    stalls = {str(rows): call(rows) for rows in NEW_ROWS}
    return {
        "first_call_s": first,
        "new_rows_s": stalls,
        "compiled": counters().llvm,
        "numba_loaded": "numba" in sys.modules,
        "overhead_us": _overhead(),
    }


def _overhead(batches: int = 50, size: int = 200) -> float:
    """Microseconds of a call that has next to nothing to compute."""
    shape = Shape("tiny", 32, 32, 4, 2)
    weights, run = Weights.random(shape), ours(shape)
    x, ids, router = (
        torch.randn(1, 32).bfloat16(),
        torch.tensor([[1, 3]]),
        torch.tensor([[0.5, 0.5]]),
    )
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(size):
            run(weights, x, ids, router)
        times.append((time.perf_counter() - start) / size * 1e6)
    return statistics.median(times)


def host() -> Json:
    """What a process pays before its first token: one with an empty cache, then three that find it filled."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"EXPERTILE_CACHE_DIR": directory}
        command = [sys.executable, "-c", _CHILD]
        cold, *warm = (
            json.loads(
                subprocess.run(command, env=environment, check=True, capture_output=True).stdout
            )
            for _ in range(4)
        )
    return {
        "import_s": statistics.median(child["import_s"] for child in (cold, *warm)),
        "first_call_cold_s": cold["first_call_s"],
        "first_call_warm_s": statistics.median(child["first_call_s"] for child in warm),
        "new_rows_cold_s": cold["new_rows_s"],
        "overhead_us": statistics.median(child["overhead_us"] for child in (cold, *warm)),
        "compiled_cold": cold["compiled"],
        "compiled_warm": max(child["compiled"] for child in warm),
        "numba_loaded": cold["numba_loaded"],
    }

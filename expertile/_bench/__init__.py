"""`expertile bench`: layer calls against what the machine can do at most, in the same rounds.

The protocol is described in benchmarks/README.md. `shapes` has the layers that are known by name, `workload` what is
computed (weights, routings), `implementations` who computes it, `protocol` how it is measured; `profiles`, `reuse` and
`fresh` are further questions asked in the same way. `tables` shows the answers, `command` is the command line.
"""

from expertile._bench.command import bench, machine, torch_threads
from expertile._bench.fresh import first_calls, host
from expertile._bench.implementations import peers
from expertile._bench.protocol import measure
from expertile._bench.shapes import DEFAULT_SHAPES, MODELS, SHAPES, W8A8, Shape, shape_from
from expertile._bench.workload import Call, Weights, numbers_from, schedule

__all__ = [
    "DEFAULT_SHAPES",
    "MODELS",
    "SHAPES",
    "W8A8",
    "Call",
    "Shape",
    "Weights",
    "bench",
    "first_calls",
    "host",
    "machine",
    "measure",
    "numbers_from",
    "peers",
    "schedule",
    "shape_from",
    "torch_threads",
]

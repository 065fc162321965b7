"""DistIR's simulator, reproduced with its mistakes, so that its results can be compared with ours; it needs no DistIR.

Its programs are lists of ops on devices, unrolled over layers, microbatches and replicas; that is the one
stream of timed actions beside programs. Reading order:

- `points`       `DistirModel`, `DistirPoint`: a configuration, and whether DistIR fails on it
- `machine`      `DistirMachine`: what an op costs, mistakes 1 to 5
- `graph`        a model as it lists it for one device of a tensor group and one microbatch
- `gpt`          one of its two models as such a graph; the other is in `entry`
- `program`      a graph cut over degrees: timed actions by block, bytes added and freed
- `replay`       clocks and live memory; the list of all actions, op by op
- `entry`        from a configuration to its result or its list

It is one entry: all that is asked of it is asked here, what `distir` returns and takes. The rest of the room neither
imports it nor is imported by it, and nobody imports its modules (a test counts).
"""

from shardplan.simulation.parity.entry import distir, distir_listing
from shardplan.simulation.parity.machine import DistirMachine
from shardplan.simulation.parity.points import DistirModel, DistirPoint
from shardplan.simulation.parity.replay import DistirResult, ListedAction

__all__ = [
    "DistirMachine",
    "DistirModel",
    "DistirPoint",
    "DistirResult",
    "ListedAction",
    "distir",
    "distir_listing",
]

"""shardplan plans, proves, predicts and runs how tensors are placed on, and moved across, a cluster of accelerators.

The vocabulary: a `Mesh` of named axes, a `TensorType` on it, a `Topology` of hardware levels and a `Placement` of the
mesh on it, a `Program` of typed ops, and the `Plan` with its `Certificate` that the verbs return. A name is imported
from its room when it is first used, so `import shardplan` costs next to nothing.

Rooms, each of which imports from those above it only:

- `errors`      what a user can cause, as exceptions
- `notebook`    what a notebook shows of a value: the room that draws it, `report`, is said here
- `core`        meshes, layouts, types, ops and programs, and what they mean
- `hardware`    topologies, placements, and what communication costs on them
- `plans`       a program with its certificate and its price, as a value and as a file
- `movement`    the verbs redistribute, reduce, place and refit
- `strategy`    models, as programs with names of their dims and parameters
- `launches`    where a job that exists put its mesh, and whether that is placed well
- `fused`       a collective fused into the kernel that feeds it: operators, and where they pay
- `simulation`  timelines: predicted from a program, measured, compared
- `execution`   programs run for real on torch, JAX and MPI, and on an emulated cluster
- `interop`     drop-ins for torch and JAX, checkpoints, exports
- `report`      results as text, as JSON and as pictures
- `cli`         the command line
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardplan.notebook import draw_with

if TYPE_CHECKING:
    from shardplan.core.layout import Layout
    from shardplan.core.mesh import Mesh
    from shardplan.core.program import Program
    from shardplan.core.reference import collect, distribute
    from shardplan.core.tensor import TensorType, same
    from shardplan.errors import (
        BackendError,
        CertificateError,
        Infeasible,
        LayoutError,
        ParseError,
        ScheduleError,
        ShardplanError,
        TimedOut,
        TopologyError,
        TypingError,
    )
    from shardplan.execution.run import run
    from shardplan.fused.deciding.fuse import fuse
    from shardplan.hardware.placement import Placement, placements
    from shardplan.hardware.topology import Topology
    from shardplan.interop.importers import load
    from shardplan.interop.start import start
    from shardplan.launches.audit import audit
    from shardplan.movement.placing.place import place
    from shardplan.movement.redistribute import redistribute
    from shardplan.movement.reductions.enumeration import reductions
    from shardplan.movement.reductions.reduce import reduce
    from shardplan.movement.weights.refit import refit
    from shardplan.movement.weights.weights import Weights
    from shardplan.plans.certificate import Certificate
    from shardplan.plans.plan import Plan
    from shardplan.simulation.inference.requests import Requests
    from shardplan.simulation.searching.search import search
    from shardplan.simulation.simulate import simulate
    from shardplan.simulation.timeline import Timeline
    from shardplan.simulation.why import why
    from shardplan.strategy.model import Model
    from shardplan.strategy.partition.job import Job
    from shardplan.strategy.partition.partition import partition
    from shardplan.strategy.partition.tables import Layouts
    from shardplan.strategy.schedules.schedule import Schedule
    from shardplan.strategy.strategy import Strategy

__all__ = [
    "BackendError",
    "Certificate",
    "CertificateError",
    "Infeasible",
    "Job",
    "Layout",
    "LayoutError",
    "Layouts",
    "Mesh",
    "Model",
    "ParseError",
    "Placement",
    "Plan",
    "Program",
    "Requests",
    "Schedule",
    "ScheduleError",
    "ShardplanError",
    "Strategy",
    "TensorType",
    "TimedOut",
    "Timeline",
    "Topology",
    "TopologyError",
    "TypingError",
    "Weights",
    "audit",
    "collect",
    "distribute",
    "fuse",
    "load",
    "partition",
    "place",
    "placements",
    "redistribute",
    "reduce",
    "reductions",
    "refit",
    "run",
    "same",
    "search",
    "simulate",
    "start",
    "why",
]
__version__ = "0.2.0"

_ROOMS = {
    "core.layout": ("Layout",),
    "core.mesh": ("Mesh",),
    "core.program": ("Program",),
    "core.reference": ("collect", "distribute"),
    "core.tensor": ("TensorType", "same"),
    "errors": tuple(name for name in __all__ if name.endswith("Error") or name in ("Infeasible", "TimedOut")),
    "execution.run": ("run",),
    "fused.deciding.fuse": ("fuse",),
    "hardware.placement": ("Placement", "placements"),
    "hardware.topology": ("Topology",),
    "interop.importers": ("load",),
    "interop.start": ("start",),
    "launches.audit": ("audit",),
    "movement.placing.place": ("place",),
    "movement.redistribute": ("redistribute",),
    "movement.reductions.reduce": ("reduce",),
    "movement.reductions.enumeration": ("reductions",),
    "movement.weights.refit": ("refit",),
    "movement.weights.weights": ("Weights",),
    "plans.certificate": ("Certificate",),
    "plans.plan": ("Plan",),
    "simulation.inference.requests": ("Requests",),
    "simulation.searching.search": ("search",),
    "simulation.simulate": ("simulate",),
    "simulation.timeline": ("Timeline",),
    "simulation.why": ("why",),
    "strategy.model": ("Model",),
    "strategy.partition.job": ("Job",),
    "strategy.partition.partition": ("partition",),
    "strategy.partition.tables": ("Layouts",),
    "strategy.schedules.schedule": ("Schedule",),
    "strategy.strategy": ("Strategy",),
}
_HOME = {name: f"shardplan.{room}" for room, names in _ROOMS.items() for name in names}


@atexit.register
def _tell_ranks() -> None:
    """Where an exception ends a rank of MPI before it has run a program, others may wait for it: they are told."""
    if hasattr(sys, "last_value") and "mpi4py.MPI" in sys.modules:
        import_module("shardplan.execution.mpi.run").end()


def _drawn(value: object) -> str | None:
    return import_module("shardplan.report.notebook").notebook_markup(value)


draw_with(_drawn)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardplan' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

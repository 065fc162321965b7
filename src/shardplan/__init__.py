"""shardplan plans, proves, predicts and runs how tensors are placed on, and moved across, a cluster of accelerators.

The vocabulary: a `Mesh` of named axes, a `TensorType` on it, a `Topology` of hardware levels and a `Placement` of the
mesh on it, a `Program` of typed ops, and the `Plan` with its `Certificate` that the verbs return.
"""

from __future__ import annotations

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
from shardplan.hardware.certificate import Certificate
from shardplan.hardware.placement import Placement, placements
from shardplan.hardware.plan import Plan
from shardplan.hardware.topology import Topology
from shardplan.movement.redistribute import redistribute

__all__ = [
    "BackendError",
    "Certificate",
    "CertificateError",
    "Infeasible",
    "Layout",
    "LayoutError",
    "Mesh",
    "ParseError",
    "Placement",
    "Plan",
    "Program",
    "ScheduleError",
    "ShardplanError",
    "TensorType",
    "TimedOut",
    "Topology",
    "TopologyError",
    "TypingError",
    "collect",
    "distribute",
    "placements",
    "redistribute",
    "run",
    "same",
]
__version__ = "0.1.0"

"""What the steps of a program bound to one device of MPI share: datatypes, and the groups of its all-to-alls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardplan.execution.mpi.wire import MpiWire, Types

Arrays = list[np.ndarray]
Bound = Callable[[Arrays, MpiWire], Arrays]  # a step bound to a rank


@dataclass(slots=True)
class Binding:
    """What the steps of a program share on one device: their datatypes, and the groups that need a communicator."""

    device: int  # its id
    types: Types = field(default_factory=Types)
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # device ids, in member order

"""What the steps of a program bound to one device of MPI share: datatypes, and the groups of its all-to-alls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import shape_of
from shardplan.execution.mpi.wire import MpiWire, Types

Arrays = list[np.ndarray]
Bound = Callable[[Arrays, MpiWire], Arrays]  # a step bound to a rank


@dataclass(slots=True)
class Binding:
    """What the steps of a program share on one device: their datatypes, and the groups that need a communicator."""

    device: int  # its id
    types: Types = field(default_factory=Types)
    groups: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # device ids, in member order


def maker(t: TensorType, device: int) -> Callable[[], np.ndarray]:
    """Return how the shard of a device, given by id, is allocated."""
    shape, dtype = shape_of(t, device), numpy_dtype(t.dtype)
    return lambda: np.empty(shape, dtype=dtype)

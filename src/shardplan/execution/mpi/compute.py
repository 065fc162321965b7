"""Ops that compute, bound to one rank of MPI: the reference's own arithmetic, on this device only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.messages import at_root
from shardplan.core.op import Op
from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import place_of, shape_of
from shardplan.execution.mpi.binding import Arrays, Binding, Bound
from shardplan.execution.mpi.wire import MpiWire


def compute(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding) -> Bound:
    """Return the step of the device of `binding`; raises `BackendError` for an op that MPI cannot run."""
    if not isinstance(op, Compute):
        raise BackendError(f"MPI cannot run {op.name}")
    (u,) = results
    place = place_of(u, binding.device)
    shape, dtype = shape_of(u, binding.device), numpy_dtype(u.dtype)
    held = place is not None and bool(at_root(u)[place])

    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        out = np.empty(shape, dtype)
        if held:
            with np.errstate(all="ignore"):
                out[...] = op.local(arrays, operands, dtype).astype(dtype, copy=False)
        return [out]

    return run

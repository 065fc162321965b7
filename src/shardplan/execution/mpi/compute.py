"""Ops that compute, bound to one rank of MPI: the reference's own arithmetic, on this device only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardplan.core.messages import at_root
from shardplan.core.namespace import NUMPY
from shardplan.core.op import Op
from shardplan.core.ops.compute import at_place, computing
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.lower import place_of
from shardplan.execution.mpi.binding import Arrays, Binding, Bound, maker
from shardplan.execution.mpi.wire import MpiWire
from shardplan.execution.rank_rounds import RankKernel


def compute(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], binding: Binding) -> Bound:
    """Return the step of the device of `binding`; raises `BackendError` for an op that MPI cannot run."""
    local = computing(op)
    if local is None:
        raise BackendError(f"MPI cannot run {op.name}")
    makers = [maker(u, binding.device) for u in results]
    place = place_of(results[0], binding.device)
    held = place is not None and bool(at_root(results[0])[place])
    bound = local.bind(operands, at_place(place)) if place is not None and held else None

    def run(arrays: Arrays, wire: MpiWire) -> Arrays:
        out = [make() for make in makers]
        if bound:
            with np.errstate(all="ignore"):
                for x, y in zip(out, bound(NUMPY, arrays), strict=True):
                    x[...] = y
        return out

    return run


def work(held: Mapping[str, np.ndarray], kernel: RankKernel) -> None:
    """Run what is computed between messages, on buffers."""
    with np.errstate(all="ignore"):
        found = kernel.target_elements(NUMPY, [block.flat(held) for block in kernel.sources])
    for block, y in zip(kernel.targets, found, strict=True):
        block.flat(held)[...] = y

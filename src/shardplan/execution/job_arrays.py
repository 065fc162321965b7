"""The arrays of a job's step: what is given, checked and in the order of its programs; and zeros in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import LayoutError, shown
from shardplan.strategy.partition.job import Job


def batch_dim(job: Job, name: str) -> int:
    """Return which dim of an input is the batch."""
    return job.model.dims[name].index("batch") if name in job.model.dims else 0


def checked(job: Job, arrays: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a step; raises `LayoutError` for one that is missing, too many, or of another type."""
    if not isinstance(arrays, Mapping):
        raise LayoutError(f"run of a job: {shown(arrays)}; legal are global arrays by name")
    given: Mapping[str, Any] = arrays
    types = job.model.program.types
    wanted = {name: list(types[name].shape) for name, _ in job.model.program.inputs}
    whole, rows = job.strategy.sequences, job.strategy.microbatches * job.strategy.data * job.strategy.microbatch
    for name in job.batch:
        if name in wanted:
            wanted[name][batch_dim(job, name)] = whole
    found: dict[str, np.ndarray] = {}
    dims, order = job.model.dims, job.order
    for name, shape in wanted.items():
        if name not in given:
            raise LayoutError(f"run of a job: no array {name}, {types[name]}; legal are arrays of {', '.join(wanted)}")
        x, dtype = np.asarray(given[name]), numpy_dtype(types[name].dtype)
        if x.shape != tuple(shape) or x.dtype != dtype:
            raise LayoutError(
                f"run of a job: {name} is of dtype {x.dtype} and shape {x.shape}; legal is {dtype} and {tuple(shape)}"
            )
        found[name] = (
            x if order is None or "sequence" not in dims[name] else x.take(order, dims[name].index("sequence"))
        )
    for name in job.batch if rows > whole else ():  # sequences that weigh nothing fill the last microbatch
        more = (
            [
                (0, rows - whole if name not in found or d == batch_dim(job, name) else 0)
                for d in range(found[name].ndim)
            ]
            if name in found
            else []
        )
        found[name] = np.pad(found[name], more) if more else np.pad(np.full(whole, 1 / whole), (0, rows - whole))
    if strange := sorted(map(str, given.keys() - wanted.keys())):
        raise LayoutError(f"run of a job: no input is called {strange[0]}; legal are {', '.join(wanted)}")
    return found


def zeros(job: Job) -> dict[str, np.ndarray]:
    """Return zeros for all inputs of a step, by name, as `checked` returns arrays."""
    found: dict[str, np.ndarray] = {}
    for name, t in job.model.program.inputs:
        shape = list(t.shape)
        if name in job.batch:
            shape[batch_dim(job, name)] = job.strategy.sequences
        found[name] = np.zeros(shape, numpy_dtype(t.dtype))
    return checked(job, found)

"""The arrays of a job's step: what is given, checked and in the order of its programs; and zeros in its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.ids import check_ids, id_ranges
from shardplan.core.ops.layers import IGNORED
from shardplan.core.target_counts import COUNT, counting, target_count
from shardplan.errors import BackendError, LayoutError, excerpt
from shardplan.strategy.partition.job import Job


def batch_dim(job: Job, name: str) -> int:
    """Return which dim of an input is the batch."""
    return job.model.dims[name].index("batch") if name in job.model.dims else 0


def check_step_arrays(
    job: Job, arrays: Any, held: Collection[str] = (), parts: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, np.ndarray]:
    """Return the arrays of a step, and what programs are told of them: how many targets count, what sequences weigh.

    Inputs that are `held` are not asked for; an array of the shape that `parts` has of it is this process's part, in
    the order of the programs, and its targets are counted alone.

    Raises `LayoutError` for one that is missing, too many, or of another type, and for an id that none is.
    """
    if not isinstance(arrays, Mapping):
        raise LayoutError(f"run of a job: {excerpt(arrays)}; legal are global arrays by name")
    given: Mapping[str, Any] = arrays
    types = job.model.program.types
    wanted = {name: list(types[name].shape) for name, _ in job.model.program.inputs if name not in held}
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
        if x.shape == parts.get(name) and x.dtype == dtype:
            found[name] = x
            continue
        if x.shape != tuple(shape) or x.dtype != dtype:
            raise LayoutError(
                f"run of a job: {name} is of dtype {x.dtype} and shape {x.shape}; legal is {dtype} and {tuple(shape)}"
                + (f", or this process's part of it, {parts[name]}" if name in parts else "")
            )
        found[name] = (
            x if order is None or "sequence" not in dims[name] else x.take(order, dims[name].index("sequence"))
        )
    ranges = id_ranges(job.model.program)
    for name in ranges.keys() & found.keys():
        check_ids(name, ranges[name], np.asarray(given[name]))
    counts = counting(job.model.program)
    if counts is not None:
        found[COUNT] = target_count(types[counts.value], found[counts.targets])
    for name in job.batch if rows > whole else ():  # sequences that count for nothing fill the last microbatch
        if name in found:
            more = [(0, (rows - whole) * (d == batch_dim(job, name))) for d in range(found[name].ndim)]
            ignored = counts is not None and name == counts.targets
            found[name] = np.pad(found[name], more, constant_values=IGNORED if ignored else 0)
        else:
            found[name] = np.pad(np.full(whole, 1 / whole), (0, rows - whole))
    if strange := sorted(map(str, given.keys() - wanted.keys())):
        raise LayoutError(f"run of a job: no input is called {strange[0]}; legal are {', '.join(wanted)}")
    return found


def zeros(job: Job) -> dict[str, np.ndarray]:
    """Return zeros for all inputs of a step, by name, as `check_step_arrays` returns arrays."""
    found: dict[str, np.ndarray] = {}
    for name, t in job.model.program.inputs:
        shape = list(t.shape)
        if name in job.batch:
            shape[batch_dim(job, name)] = job.strategy.sequences
        found[name] = np.zeros(shape, numpy_dtype(t.dtype))
    return check_step_arrays(job, found)


def check_bound(job: Job, results: Mapping[str, np.ndarray]) -> None:
    """Refuse, in every process alike, a step of a mixture that drops choices where its slots are said to be a bound.

    Raises `BackendError`.
    """
    for name, dropped in results.items() if job.model.fields.get("dropless") else ():
        if name.endswith("dropped") and (count := int(dropped.sum())):
            at, factor = np.argwhere(dropped)[0].tolist(), job.model.fields["capacity_factor"]
            raise BackendError(
                f"{job!r}: {count} choices of experts are above the bound of capacity_factor={factor:g}, the first in "
                f"{name}{at}; legal are as many as fit, or a larger bound"
            )

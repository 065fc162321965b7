"""What layers keep between steps beside parameters: caches of keys and values, as a strategy's tables store them."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.core.nested import as_nested
from shardplan.simulation.closed.work import Extent, HeldParameter, LocalValue
from shardplan.strategy.model import Model
from shardplan.strategy.partition.tables import LAYER, Layouts


def kept_values(model: Model, layouts: Layouts, axes: Sequence[str]) -> tuple[HeldParameter, ...]:
    """Return the caches of a model's layers, each as a layer of its run has it on a device."""
    loops = [step for step in model.program.steps if as_nested(step.op) is not None]
    found: list[HeldParameter] = []
    for name, dims in model.dims.items():
        of = name.rpartition(".")[0]
        if name in model.parameters or of in model.parameters or name not in model.replaced or dims[:1] != (LAYER,):
            continue
        run = next(k for k, step in enumerate(loops) if name in step.operands)
        line = next((one for one in layouts.stored if one.matches(name)), None)
        cut = {d: tuple(a for a in by if a in axes) for d, by in line.dims} if line else {}
        t = model.program.types[name]
        extents = tuple(Extent(n, cut.get(d, ()), d == "batch") for d, n in zip(dims[1:], t.shape[1:], strict=True))
        found.append(HeldParameter(name, run, LocalValue(t.itemsize, extents), ()))
    return tuple(found)

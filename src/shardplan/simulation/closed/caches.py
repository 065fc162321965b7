"""What is kept between steps beside parameters: caches of keys and values, as tables store them, and moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.core.nested import as_nested
from shardplan.simulation.closed.work import Extent, HeldParameter, LocalValue
from shardplan.strategy.model import Model
from shardplan.strategy.model_state import is_state_of
from shardplan.strategy.partition.tables import LAYER, Layouts
from shardplan.strategy.training import MASTER

ADAM = 2  # numbers that it keeps of each of a parameter


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


def moments_of(model: Model) -> float:
    """Return how much a model's optimizer keeps beside copies in f32, over what Adam does; 1 where there is none."""
    if not model.fields.get("optimizer"):
        return 1.0
    state = [n for n in model.dims if is_state_of(model, n) and not n.endswith(f".{MASTER}")]
    kept = sum(math.prod(model.program.types[n].shape) for n in state)
    return kept / (ADAM * sum(p.size for name, p in model.parameters.items() if name in model.gradients))

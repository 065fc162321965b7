"""Of a value the states in which it may be kept, and of a gradient how the addends lie that it is a sum of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.strategy.model import Model
from shardplan.strategy.partition.axis_propagation import PARTIAL, State


def no_larger(states: Sequence[State]) -> list[State]:
    """Return of the states of a value those besides the first that are no larger than that: it may be kept so."""
    cut = {axis for axis, dim in states[0].items() if dim != PARTIAL}
    return [one for one in states[1:] if one.keys() >= cut]


def addends(model: Model, forwards: int, held: Mapping[str, State]) -> dict[str, State]:
    """Return by value how the gradient of a parameter lies of which it is an addend: of a tied table there are two."""
    found = dict(held)
    for step in reversed(model.program.steps[forwards:]):
        op, wanted = computing(step.op), found.get(step.results[0])
        if op is not None and wanted is not None and as_nested(step.op) is None:
            types = [model.program.types[o] for o in step.operands]
            alike = {t.shape for t in types} == {model.program.types[step.results[0]].shape}
            if alike and op.passes(frozenset(range(len(types))), "sum", types):
                found |= dict.fromkeys(step.operands, wanted)
    return found

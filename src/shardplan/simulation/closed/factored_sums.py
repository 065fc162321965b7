"""`factored_sums`: what an update by means along the sides of a matrix, as Adafactor's, sums over devices.

A mean along dims that axes cut is whole over these, and so are the root mean squares of a parameter and of its update:
small all-reduces, one after another, of all layers of a stage at once. Where state is dealt out to replicas, the first
dim of a parameter that is none of layers is cut by them, too (as `partition.tables` chooses one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.simulation.closed.work import FactoredSum, HeldParameter, LocalValue
from shardplan.strategy.model import Model
from shardplan.strategy.partition.tables import LAYER
from shardplan.strategy.training import OPTIMIZERS

WIDTH = 4  # bytes of what is kept, in f32
STATES = ("whole", "dealt")  # whether replicas have state alike
UPDATE = "update"  # of the elements of a parameter whose update is several kernels
# What its kernels read and write of an element beside the gradient, twice, and the parameter in its own dtype: squares
# of the gradient, the update by the roots of its means, squares of the parameter and of the update, and the step.
IN_STEPS = 4 + 8 + 8 + 4 + 12


def factored_sums(model: Model, parameters: Sequence[HeldParameter]) -> tuple[FactoredSum, ...]:
    """Return the sums of a model's update; none where its optimizer keeps no means along sides.

    Of a parameter that has any there is its `UPDATE`, too: an update that waits for sums is several kernels.
    """
    rule = OPTIMIZERS.get(str(model.fields.get("optimizer")))
    if rule is None or not rule.factored:
        return ()
    return tuple(one for h in parameters for state in STATES for one in _sums_of(model, h, state))


def _sums_of(model: Model, h: HeldParameter, state: str) -> Iterator[FactoredSum]:
    layer = int(model.dims[h.name][:1] == (LAYER,))
    numbering, *sides = model.parameters[h.name].sides  # the last two are empty of what is no matrix
    rows, cols = ([d - layer for d in dims] for dims in sides)
    extents = h.value.extents
    first = next((d for d, e in enumerate(extents) if e.size > 1), -1) if state == "dealt" else -1

    def summed(dims: Sequence[int], kept: Sequence[int]) -> Iterator[FactoredSum]:
        tensor, replicas = any(extents[d].axes for d in dims), first in dims
        if tensor or replicas:
            over = "both" if tensor and replicas else "tensor" if tensor else "replicas"
            value = LocalValue(WIDTH, tuple(extents[d] for d in kept))
            yield FactoredSum(f"{over} {state}", h.run, value)

    own = list(range(numbering - layer))
    inside = [d for d in range(len(extents)) if d not in own]
    means = ((cols, [*own, *rows]), (rows, [*own, *cols]), (rows, own)) if rows else ()
    found = [one for dims, kept in (*means, (inside, own), (inside, own)) for one in summed(dims, kept)]
    yield from found
    if found:
        yield FactoredSum(f"{UPDATE} {state}", h.run, LocalValue(1, extents))

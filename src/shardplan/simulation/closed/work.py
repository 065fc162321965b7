"""What a device does in a step of a model: kernels, movements, parameters, saved values; sizes follow from degrees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.core.ops.compute import Compute
from shardplan.core.tensor import TensorType

FORWARD, BACKWARD, UPDATE = range(3)  # phases
Axes = Sequence[tuple[str, ...]]  # by dim


@lru_cache(maxsize=1 << 14)
def work_of(op: Compute, types: tuple[TensorType, ...]) -> tuple[float, float]:
    """Return the operations of an op on whole operands, and the bytes that it touches."""
    return op.flops(*types), op.touched_bytes(*types)


class Extent(NamedTuple):
    """A factor of a step: its size on one device, the axes that cut it, and whether it counts sequences.

    Of slots of experts `sharing` are the axes that cut these: of what is in them one device has more than another; with
    none of them a device has slots of all experts, and as much in them as any. None: it is of no slots.
    """

    size: int
    axes: tuple[str, ...] = ()
    batch: bool = False
    sharing: tuple[str, ...] | None = None


def slot_sharing(called: Sequence[Collection[str]], axes: Axes) -> tuple[str, ...] | None:
    """Return the axes that cut the experts of a value whose dims are called and cut so; None where it has no slots.

    Slots of experts have no tokens in order, as scores of a router do.
    """
    every = {name for names in called for name in names}
    if not {"experts", "batch"} <= every or "sequence" in every:
        return None
    return tuple(a for names, cut in zip(called, axes, strict=True) if "experts" in names for a in cut)


def with_slots(
    extents: Sequence[Extent], called: Sequence[Collection[str]], axes: Axes | None = None
) -> tuple[Extent, ...]:
    """Return the extents of a value's dims; of slots of experts those that count sequences say who shares.

    `axes` are those of each dim that say it, where they are others than cut the extents.
    """
    sharing = slot_sharing(called, axes or [e.axes for e in extents])
    return tuple(e._replace(sharing=sharing) if e.batch else e for e in extents)


def of_factors(
    factors: Sequence[str], extents: Mapping[str, Extent], names: Mapping[str, Collection[str]]
) -> tuple[Extent, ...]:
    """Return the extents of factors of a step, which are called so, as `with_slots` has them."""
    return with_slots([extents[f] for f in factors], [names.get(f, ()) for f in factors])


class LocalValue(NamedTuple):
    """What a device has of a value: bytes of an element, and its dims' extents."""

    itemsize: int
    extents: tuple[Extent, ...]


class LocalKernel(NamedTuple):
    """A kernel: operations at the sizes of the program; a device's are fewer as its extents are smaller."""

    phase: int
    run: int  # of layers; -1 before the first, -2 behind the last
    kind: str  # product, scores, loss, streamed
    dtype: str
    flops: float
    extents: tuple[Extent, ...]
    roles: tuple[tuple[int, ...], ...]  # of a product: which extents are of both operands, rows, columns, contracted
    values: tuple[LocalValue, ...]  # read and written
    touched: float  # what of their bytes is touched
    needed: bool  # whether what follows the forward pass reads what it makes, or what is made of that
    weighs: bool  # whether it reads a parameter, or makes the gradient of one
    gradient: bool  # whether it makes the gradient of a parameter
    joined: bool  # whether a product does it to its result before that is written: a bias that is added
    seen: float = 1.0  # of attention what part of the keys a query sees
    casts: tuple[int, ...] = ()  # which values kernels of their own cast before it, where the product is narrow
    joins: bool = False  # whether it adds up gradients that two readers of one parameter have made


class LocalMove(NamedTuple):
    """A movement of a value over axes, by the collective that does so.

    Summed and made whole it is all-reduced, only summed reduce-scattered, only made whole all-gathered, else exchanged.
    Of a backward pass `beside` are numbers of kernels that make gradients of parameters while what a product sums is on
    its way; and `early` says that it moves what the forward pass has kept, and waits for nothing. `attention` says
    that it is of keys and values, or of their cotangents, which a ring hands on beside attention instead; `gradient`
    that the gradient of a parameter is the first to want it. `made_of` is what a kernel that streams has made a larger
    value of, as slots of tokens: it may be gathered instead, and made on every device.
    """

    phase: int
    run: int
    summed: bool
    whole: bool
    axes: tuple[str, ...]
    value: LocalValue  # whole over these axes
    needed: bool
    beside: tuple[int, ...] = ()
    early: bool = False
    attention: bool = False
    gradient: bool = False
    made_of: LocalValue | None = None  # whole over these axes


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, of each layer of a run."""

    run: int
    value: LocalValue
    kind: str  # of the kernel that makes it
    into: str  # of a kernel that reads it


class LayerLife(NamedTuple):
    """What a layer of a run has on a device while it runs, forward or `back`, moment by moment; see `lifetimes`.

    `alive` says of each moment which of the `values` are there: int8 [moments, values]; `again` the same where layers
    are computed again, with what they move. `rows` are among the values what the forward pass left, and what each is:
    `input`, or the kernel that made it; they count where they are made again. `late` is what the gradients of
    parameters are made of, which may come later than the rest.
    """

    run: int
    back: bool
    values: tuple[LocalValue, ...]
    alive: np.ndarray
    again: np.ndarray
    rows: Mapping[int, str]
    late: tuple[LocalValue, ...]


class HeldParameter(NamedTuple):
    """A parameter: its extents on a device, layers of which run it has, and what its gradient is a sum over.

    `shared` says that it is of experts, or of tables, which devices have each whole.
    """

    name: str
    run: int
    value: LocalValue
    sums: tuple[str, ...]
    shared: bool = False


class FactoredSum(NamedTuple):
    """A value of a layer's update that is summed over devices: over whom, of which run, and the value."""

    over: str
    run: int
    value: LocalValue


@dataclass(frozen=True, slots=True, eq=False)
class StepProfile:
    """All of it; `layers` has the length of each run, `batch` the sequences of the program that was read."""

    kernels: tuple[LocalKernel, ...]
    moves: tuple[LocalMove, ...]
    saved: tuple[Saved, ...]
    parameters: tuple[HeldParameter, ...]
    layers: tuple[int, ...]
    batch: int
    carried: LocalValue  # what goes from layer to layer
    lives: tuple[LayerLife, ...] = ()
    second: tuple[tuple[int, LocalValue], ...] = ()  # by run what every second product makes, from the first on
    outside: tuple[Saved, ...] = ()  # what is saved outside of layers
    copies: tuple[HeldParameter, ...] = ()  # parameters that are before the layers, and are read behind them, too
    tables: tuple[HeldParameter, ...] = ()  # parameters of which rows are read: their gradients are made whole
    kept: tuple[HeldParameter, ...] = ()  # what layers keep between steps beside parameters: caches
    moments: float = 1.0  # what an optimizer keeps of parameters, over what Adam does: two numbers of each
    factored: tuple[FactoredSum, ...] = ()

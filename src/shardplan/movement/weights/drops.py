"""What a source stores and no parameter of a target takes: refused, unless it is said that it may be left out.

The counterpart of `coverage`, from the expressions alone, too: of every logical tensor the elements that the source's
devices hold, a product of intervals for each stored parameter, must lie in the union of those that the target's hold.
What the family says every framework recomputes may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.contents import merge_intervals
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import legal_coordinates
from shardplan.movement.weights.weights import Weights

_SHOWN = 4  # tensors that a message names
Box = list[tuple[np.ndarray, np.ndarray]]  # of every dim the intervals that are held


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A logical tensor of which no parameter of the target takes all: its first such element, and who stores it."""

    tensor: str
    element: tuple[int, ...]
    stored: tuple[str, ...]
    partly: bool

    def matches(self, pattern: str) -> bool:
        """Whether a pattern is one of its name, or of a stored parameter's."""
        return fnmatchcase(self.tensor, pattern) or any(fnmatchcase(name, pattern) for name in self.stored)

    def __str__(self) -> str:
        """Return it as a message shows it."""
        place = f", from element {list(self.element)} on" if self.partly else ""
        return f"{self.tensor} ({self.stored[0]}{place})"


def left_out(source: Weights, target: Weights, only: Iterable[str] | None = None) -> tuple[LeftOut, ...]:
    """Return what of the source the target does not take, in order of the source; `only` is as of `refit`."""
    patterns = None if only is None else tuple(only)
    out: list[LeftOut] = []
    for tensor in dict.fromkeys(t for f in source.families for t in f.tensors):
        mine, theirs = ([f for f in side.families if tensor in f.tensors] for side in (source, target))
        stored = tuple(dict.fromkeys(f.entry.name for f in mine))
        names = [tensor, *stored, *(f.entry.name for f in theirs)]
        if patterns is not None and not any(fnmatchcase(name, p) for name in names for p in patterns):
            continue
        if any(fnmatchcase(name, p) for name in (tensor, *stored) for p in source.table.recomputed):
            continue
        held, taken = ([_box(f, tensor) for f in families] for families in (mine, theirs))
        if (element := _first_apart(held, taken)) is not None:
            out.append(LeftOut(tensor, element, stored, bool(theirs)))
    return tuple(out)


def check_drops(
    source: Weights, target: Weights, only: Iterable[str] | None, drop: str | Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the tensors that are left out, each as a pattern in `drop` says.

    Raises `LayoutError` naming every other one, and for a pattern that nothing that is left out matches.
    """
    patterns = (drop,) if isinstance(drop, str) else tuple(drop)
    found = left_out(source, target, only)
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(f.matches(pattern) for f in found):  # pyright: ignore
            legal = ", ".join(f.tensor for f in found) or "none, since the target takes all"
            raise LayoutError(f"drop = {excerpt(pattern)} matches nothing that is left out; legal are {legal}")
    lost = [f for f in found if not any(f.matches(p) for p in patterns)]
    if lost:
        some = ", ".join(map(str, lost[:_SHOWN])) + (f", and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
        raise LayoutError(
            f"{source.table.name or 'the source'} stores what {target.table.name or 'the target'} does not take: {some}"
            f"; legal is a target that takes it, or drop = {', '.join(repr(f.tensor) for f in lost[:_SHOWN])} "
            f"({' '.join(f'--drop {f.tensor}' for f in lost[:_SHOWN])})"
        )
    return tuple(f.tensor for f in found)


def _box(family: StoredFamily, tensor: str) -> Box:
    """What the devices of a stored parameter hold of a tensor, together."""
    box: Box = []
    for runs in family.tensors[tensor]:
        there = legal_coordinates(family, runs)[np.repeat(np.arange(runs.coordinates), np.diff(runs.ptr))]
        box.append(merge_intervals(runs.start[there], (runs.start + runs.length)[there]))
    return box


def _first_apart(held: list[Box], taken: list[Box]) -> tuple[int, ...] | None:
    """Return the first element that some box of `held` has and none of `taken`."""
    dims = len(held[0])
    cuts: list[np.ndarray] = []
    for d in range(dims):
        ends = [x for box in (*held, *taken) for x in box[d]]
        cuts.append(np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *ends])))
    if any(len(c) < 2 for c in cuts):  # a dim of which nobody holds anything
        return None
    missing = _cells(held, cuts) & ~_cells(taken, cuts)
    if not missing.any():
        return None
    at = np.unravel_index(int(np.argmax(missing)), missing.shape)
    return tuple(int(c[i]) for c, i in zip(cuts, at, strict=True))


def _cells(boxes: list[Box], cuts: list[np.ndarray]) -> np.ndarray:
    """Which cells between cuts lie in some box: bool, an axis a dim; of no dims one cell."""
    found = np.zeros(tuple(len(c) - 1 for c in cuts), dtype=bool)
    for box in boxes:
        every = np.ones((), dtype=bool)
        for (start, stop), c in zip(box, cuts, strict=True):
            number = np.searchsorted(start, c[:-1], side="right") - 1
            reach = np.concatenate([stop, c[:1]])[number]  # of none the first cut, before which there is nothing
            every = every[..., None] & (c[:-1] < reach)
        found |= every
    return found

"""Replicas: which elements a side holds more than once, and where, from its expressions.

Of every element the first who holds it is the one that the others are compared with. Copies are those on several
devices, those in several stored parameters (a tied head), and those on one device that has an index twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardplan.core.box_table import region_view
from shardplan.errors import LayoutError
from shardplan.movement.weights.contents import DimContents
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.owners import FamilyMove, copies_of, family_cells, family_contents
from shardplan.movement.weights.regions import RefitRegions, RegionWriter, write_regions
from shardplan.movement.weights.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class CopyEnd:
    """One of two copies of a block: rank, parameter by its number there, where the block begins, and its strides."""

    rank: int
    number: int
    offset: int
    strides: np.ndarray


def copy_ends(found: RefitRegions, k: int) -> tuple[CopyEnd, CopyEnd]:
    """Return the two copies of row `k`: that of the rank, and that of who holds it before."""
    mine, other = (
        CopyEnd(int(rank[k]), int(number[k]), int(offset[k]), strides[k])
        for rank, number, offset, strides in (
            (found.target, found.target_parameter, found.target_offset, found.target_strides),
            (found.source, found.source_parameter, found.source_offset, found.source_strides),
        )
    )
    return mine, other


class WeightReplicas:
    """The copies of a side: for every rank the regions that others hold before it."""

    def __init__(self, weights: Weights) -> None:
        """Take how a side is stored."""
        self.weights = weights
        self._ids = np.array(weights.devices, dtype=np.int64)

    @cached_property
    def moves(self) -> tuple[FamilyMove, ...]:
        """From who holds an element first to everyone else who does, a row a pair; those without one left out."""
        return tuple(_copies(self.weights))

    @cached_property
    def _writer(self) -> RegionWriter:
        return RegionWriter(self.weights.families, self.weights.families)

    def regions(self, rank: int) -> RefitRegions:
        """Return what a rank holds that another, or itself elsewhere, holds before it: `source` is that one."""
        starts = self.weights.starts
        found = write_regions(self._writer, self.moves, (self._ids, self._ids), (starts, starts), rank)
        return found.select_regions(found.target == rank)

    def check(self, held: Mapping[int, list[np.ndarray]]) -> None:
        """Compare arrays, of every rank in order of its names; raises `LayoutError` with the first that differ."""
        for rank in self.weights.devices if self.moves else ():
            found = self.regions(rank)
            for k in range(len(found)):
                views = [
                    region_view(held[end.rank][end.number], end.offset, found.sizes[k], end.strides)
                    for end in copy_ends(found, k)
                ]
                if (at := first_unlike(*views)) is not None:
                    raise self.unlike(found, k, at, (views[0][at], views[1][at]))

    def unlike(
        self, found: RefitRegions, k: int, at: tuple[int, ...], values: tuple[Any, Any], more: str = ""
    ) -> LayoutError:
        """Return the error of copies that differ: row `k` of regions, at an index within its block."""
        said: list[str] = []
        for end, value in zip(copy_ends(found, k), values, strict=True):
            name, shape, _ = self.weights.parameters(end.rank)[end.number]
            flat = end.offset + int(np.dot(at, end.strides))
            index = [int(i) for i in np.unravel_index(flat, shape)] if shape else []
            said.append(f"{name}{index} of rank {end.rank} is {value}")
        tensor = self.moves[int(found.move[k])].tensor
        return LayoutError(
            f"copies of {tensor} differ in {self.weights.table.name or 'the source'}: {said[0]}, and {said[1]}; "
            f"legal are equal copies{more}"
        )


def first_unlike(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, ...] | None:
    """Return the first index, in C order, at which the bits of two arrays of one shape and dtype differ."""
    width = ours.dtype.itemsize
    bits = [np.ascontiguousarray(a).view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}") for a in (ours, theirs)]
    if np.array_equal(bits[0], bits[1]):
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bits[0] != bits[1])), ours.shape))


def _copies(weights: Weights) -> Iterator[FamilyMove]:
    families = weights.families
    for tensor in weights.tensors:
        numbers = [k for k, f in enumerate(families) if tensor in f.tensors]
        for at, second in enumerate(numbers):
            contents = family_contents(families[second], tensor)
            for first in numbers[: at + 1]:
                sides = (first, families[first]), (second, families[second])
                itself = first != second or _twice(families[second], tensor, contents)
                move = copies_of(tensor, sides, contents, family_cells(families[first], tensor), itself)
                if len(move.target):
                    yield move


def _twice(family: StoredFamily, tensor: str, contents: tuple[DimContents, ...]) -> bool:
    """Whether a device holds an index of a tensor twice, as a map of experts may say."""
    for runs, dim in zip(family.tensors[tensor], contents, strict=True):
        owner = np.repeat(np.arange(runs.coordinates), np.diff(runs.ptr))
        every = np.bincount(owner, weights=runs.length, minlength=runs.coordinates)
        once = np.add.reduceat(np.append(dim.stop - dim.start, 0), dim.ptr[:-1]) if len(dim.ptr) > 1 else np.zeros(0)
        if any(every[c] > once[number] for c, number in enumerate(dim.of.tolist()) if number >= 0):
            return True
    return False

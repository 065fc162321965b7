"""A refit on numpy arrays, region by region: the meaning that every other way to run one must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from shardplan.core.box_table import region_view
from shardplan.core.dtypes import numpy_dtype
from shardplan.movement.weights.owners import FamilyMove
from shardplan.movement.weights.regions import RefitRegions
from shardplan.movement.weights.weights import Weights


class Refitting(Protocol):
    """What is asked of a plan: its sides, its moves, and the regions of a rank."""

    @property
    def source(self) -> Weights:
        """What there is."""
        ...

    @property
    def target(self) -> Weights:
        """What is wanted."""
        ...

    @property
    def moves(self) -> tuple[FamilyMove, ...]:
        """What goes between families."""
        ...

    @property
    def relays(self) -> tuple[FamilyMove, ...]:
        """What is passed on inside nodes."""
        ...

    def passed_on(self, rank: int) -> RefitRegions:
        """Return what a rank passes on, and is passed."""
        ...

    def regions(self, rank: int) -> RefitRegions:
        """Return what a rank sends and receives."""
        ...


def convert_values(values: np.ndarray, dtype: np.dtype[Any], plus: int) -> np.ndarray:
    """Return values in a dtype, with a constant added in f32 or wider, and rounded once."""
    if plus:
        wide = np.result_type(np.float32, values.dtype) if values.dtype.kind == "f" else np.dtype(np.float32)
        values = values.astype(wide) + wide.type(plus)
    return values if values.dtype == dtype else values.astype(dtype)


def apply_refit(
    plan: Refitting, arrays: Mapping[int, Mapping[str, Any]], look: Callable[[Mapping[int, list[np.ndarray]]], None]
) -> dict[int, dict[str, np.ndarray]]:
    """Return the target's parameters by rank and name; see `RefitPlan.apply`. `look` sees the source's before."""
    held: dict[int, list[np.ndarray]] = {}
    for rank in plan.source.devices:
        named = {name: np.asarray(a) for name, a in arrays.get(rank, {}).items()}
        plan.source.check(named, rank)
        held[rank] = [np.ascontiguousarray(named[name]) for name in plan.source.names(rank)]
    look(held)
    out: dict[int, dict[str, np.ndarray]] = {}
    filled: dict[int, list[np.ndarray]] = {}
    for rank in plan.target.devices:
        legal = plan.target.parameters(rank)
        made = [np.zeros(shape, numpy_dtype(dtype)) for _, shape, dtype in legal]
        found = plan.regions(rank)
        copy_regions(plan, found.select_regions(found.target == rank), held, made)
        filled[rank] = made
        out[rank] = {name: array for (name, _, _), array in zip(legal, made, strict=True)}
    for rank in plan.target.devices if plan.relays else ():
        passed_on(plan.passed_on(rank), rank, filled)
    return out


def passed_on(found: RefitRegions, rank: int, filled: Mapping[int, list[np.ndarray]]) -> None:
    """Copy what others pass on to a rank, out of their parameters into its own."""
    for k in np.flatnonzero(found.target == rank).tolist():
        source = filled[int(found.source[k])][int(found.source_parameter[k])]
        target = filled[rank][int(found.target_parameter[k])]
        values = region_view(source, int(found.source_offset[k]), found.sizes[k], found.source_strides[k])
        region_view(target, int(found.target_offset[k]), found.sizes[k], found.target_strides[k])[...] = values


def copy_regions(
    plan: Refitting, found: RefitRegions, held: Mapping[int, list[np.ndarray]], made: list[np.ndarray]
) -> None:
    """Copy what regions say from the sources' arrays, by rank and number, to one target's."""
    for k in range(len(found)):
        move = plan.moves[int(found.move[k])]
        source = held[int(found.source[k])][int(found.source_parameter[k])]
        target = made[int(found.target_parameter[k])]
        plus = plan.target.families[move.target_family].entry.plus - plan.source.families[move.source_family].entry.plus
        values = region_view(source, int(found.source_offset[k]), found.sizes[k], found.source_strides[k])
        place = region_view(target, int(found.target_offset[k]), found.sizes[k], found.target_strides[k])
        place[...] = convert_values(values, target.dtype, -plus)

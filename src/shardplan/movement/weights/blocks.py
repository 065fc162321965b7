"""Block scales: a device that holds a part of a weight holds the scales of exactly the blocks that it is made of.

A scale stands for a block of the weight's elements, a size a dim; the last block of a dim may be partial. A cut inside
a block would leave both sides without its scale, or make two of it, and is refused with the nearest degree that is
legal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardplan.errors import LayoutError
from shardplan.movement.weights.arithmetic import evaluate_whole_number
from shardplan.movement.weights.contents import merge_intervals
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.weights import Weights, make_weights

_MOST_DEGREE = 4096  # degrees further than this from the one that was asked for are not looked at


def check_blocks(weights: Weights) -> None:
    """Raise `LayoutError` where a device's part of a weight is not made of whole blocks whose scales it has."""
    for message, axes in _cut_inside(weights):
        raise LayoutError(f"{message}; legal is {_nearest(weights, axes)}")


def check_scaled(source: Weights, target: Weights) -> None:
    """Raise `LayoutError` where one side scales a tensor in blocks and the other does not: values would differ."""
    sides = ((source, target), (target, source))
    for has, lacks in sides:
        stored = {t for f in lacks.families for t in f.tensors}
        for scale, tensor, _ in has.table.scales:
            if scale in has.tensors and tensor in stored and scale not in stored:
                raise LayoutError(
                    f"{tensor} is {_dtype(has, tensor)} with block scales ({scale}) in {has.table.name or 'one side'} "
                    f"and {_dtype(lacks, tensor)} without in {lacks.table.name or 'the other'}; legal are two sides "
                    "with scales, or two without: quantise or dequantise on one side first"
                )


def _dtype(weights: Weights, tensor: str) -> str:
    return next(f.dtype for f in weights.families if tensor in f.tensors)


def _cut_inside(weights: Weights) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is cut inside a block, and the axes that cut it."""
    for scale, tensor, blocks in weights.table.scales:
        if scale not in weights.tensors or tensor not in weights.tensors:
            continue
        sizes = [evaluate_whole_number(b, weights.sizing.look, f"a block of {tensor}") for b in blocks]
        if len(sizes) != len(weights.tensors[tensor].dims):
            raise LayoutError(f"{scale} says blocks of {len(sizes)} dims of {tensor}; legal is a size for each")
        holders = [f for f in weights.families if scale in f.tensors]
        for family in (f for f in weights.families if tensor in f.tensors):
            yield from _of_family(weights, family, holders, (scale, tensor), sizes)


def _of_family(
    weights: Weights, family: StoredFamily, holders: list[StoredFamily], names: tuple[str, str], sizes: list[int]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    scale, tensor = names
    logical = weights.tensors[tensor]
    for d, size in enumerate(sizes):
        runs = family.tensors[tensor][d]
        where = family.coordinate(runs.axes)
        for holder in holders:
            other = holder.tensors[scale][d]
            pairs = np.stack([where, holder.coordinate(other.axes)], axis=1)[family.present & holder.present]
            for a, b in np.unique(pairs, axis=0).tolist():
                mine = _intervals(runs.start[runs.rows(a)], runs.length[runs.rows(a)], 1, logical.sizes[d])
                scales = _intervals(other.start[other.rows(b)], other.length[other.rows(b)], size, logical.sizes[d])
                if mine != scales:
                    axes = tuple(dict.fromkeys(runs.axes + other.axes))
                    yield (
                        f"{family.entry.name} = {family}: a device has {_format_intervals(mine)} of {logical.dims[d]} "
                        f"of {tensor}, and {holder.entry.name} = {holder} has scales of {_format_intervals(scales)}, "
                        f"in blocks of {size}",
                        axes,
                    )
                    return


def _intervals(start: np.ndarray, length: np.ndarray, size: int, most: int) -> list[tuple[int, int]]:
    low, high = merge_intervals(start * size, np.minimum((start + length) * size, most))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _format_intervals(intervals: list[tuple[int, int]]) -> str:
    """The first two, as a message shows them."""
    return ", ".join(f"{a}:{b}" for a, b in intervals[:2]) + (", ..." if len(intervals) > 2 else "") or "nothing"


def _nearest(weights: Weights, axes: tuple[str, ...]) -> str:
    """The nearest degree of the axes that cut, one alone, at which all blocks are whole."""
    found: list[tuple[int, str, int]] = []
    for axis in axes:
        if axis not in dict(weights.given):
            continue
        asked = weights.degrees[axis]
        for by in range(1, min(asked, _MOST_DEGREE) + 1):
            hit = [n for n in (asked - by, asked + by) if n > 0 and _legal(weights, axis, n)]
            if hit:
                found.append((by, axis, hit[0]))
                break
    if not found:
        return "a degree that cuts between blocks"
    _, axis, degree = min(found)
    return f"{axis} = {degree}, the nearest that cuts between blocks"


def _legal(weights: Weights, axis: str, degree: int) -> bool:
    given = dict(weights.given) | {axis: degree}
    try:
        other = make_weights(weights.table, dict(weights.config), given, None, weights.dtype)
        return not any(True for _ in _cut_inside(other))
    except LayoutError:
        return False

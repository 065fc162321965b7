"""What of every whole tensor a device holds, as a box: the chunks of a folder of torch.distributed.checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardplan.core.dtypes import itemsize
from shardplan.errors import LayoutError
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.regions import RefitRegions
from shardplan.movement.weights.weights import Weights, make_weights


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A stored parameter of a device as a box of a whole tensor: `sizes` are without what lies beyond the tensor.

    `number` is that of the parameter in `names(rank)`, `shape` its own shape, `whole` that of the whole tensor.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole_of(weights: Weights) -> Weights:
    """Return the same table on one device, which holds every parameter whole: no axis cuts it."""
    if len(weights.devices) == 1:
        return weights
    axes = {axis for _, found in weights.table.meshes for axis in found}
    given = {name: value for name, value in weights.given if isinstance(value, int) and name not in axes}
    return make_weights(weights.table, dict(weights.config), {**given, **dict.fromkeys(axes, 1)}, None, weights.dtype)


def held_boxes(weights: Weights) -> dict[int, list[ShardBox]]:
    """Return for every device the boxes that it writes; of devices that hold the same one, who writes least by then.

    Raises `LayoutError` where a parameter is no box of a whole tensor, or the boxes do not cover one once.
    """
    if len(weights.devices) == 1:
        (rank,) = weights.devices
        rows = enumerate(weights.parameters(rank))
        return {rank: [ShardBox(k, n, shape, d, shape, (0,) * len(shape), shape) for k, (n, shape, d) in rows]}
    whole = whole_of(weights)
    (only,) = whole.devices
    shapes = {name: shape for name, shape, _ in whole.parameters(only)}
    names = list(shapes)
    stands_in = {n: f.entry.name for f in whole.families if f.present[0] for n in f.device_names(0)}
    plan = refit(whole, weights)
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, ShardBox]]] = {}
    reach = dict.fromkeys(names, 0)  # rows of each that are placed, for parameters that are padding alone
    waiting: list[tuple[int, int, str, tuple[int, ...], str]] = []
    for rank in weights.devices:
        every = plan.regions(rank)
        found = every.select_regions(every.target == rank)
        found = found.select_regions(np.argsort(found.target_parameter, kind="stable"))
        ends = np.searchsorted(found.target_parameter, np.arange(len(weights.parameters(rank)) + 1))
        for number, (name, shape, dtype) in enumerate(weights.parameters(rank)):
            if not math.prod(shape):
                continue
            mine = found.select_regions(np.arange(ends[number], ends[number + 1]))
            if not len(mine):
                waiting.append((rank, number, name, shape, dtype))
                continue
            own = names[int(mine.source_parameter[0])]
            if stands_in.get(name, stands_in[own]) != stands_in[own]:
                own = name  # of parameters that hold one tensor, such as a count of steps, each is its own
            at = _offsets(mine, shape, shapes[own])
            if at is None:
                raise LayoutError(
                    f"form = 'distributed' for {weights.table.name or 'the table'}: {name} of rank {rank} is no box of "
                    f"{own}; legal are devices and ranks, or a table whose cuts are the last thing done to a dim"
                )
            _hold(
                holders, rank, ShardBox(number, own, shape, dtype, shapes[own], at, _clip_shape(shape, shapes[own], at))
            )
            reach[own] = max(reach[own], at[0] + shape[0] if at else 0)
    for rank, number, name, shape, dtype in waiting:
        at = (reach.get(name, 0), *(0 for _ in shape[1:]))
        if name in shapes and at[0] < shapes[name][0]:
            box = ShardBox(number, name, shape, dtype, shapes[name], at, _clip_shape(shape, shapes[name], at))
            _hold(holders, rank, box)
            reach[name] += shape[0]
    return _assign_writers(weights, shapes, holders)


def _hold(
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, ShardBox]]], rank: int, box: ShardBox
) -> None:
    if all(box.sizes):
        holders.setdefault((box.name, box.offsets, box.sizes), []).append((rank, box))


def _clip_shape(shape: tuple[int, ...], whole: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(min(n, w - o), 0) for n, w, o in zip(shape, whole, at, strict=True))


def _offsets(found: RefitRegions, shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return where a parameter lies in the whole one, None where its elements are not at one distance of theirs."""
    if len(shape) != len(whole) or len(set(found.source_parameter.tolist())) > 1:
        return None
    if not shape:
        return ()
    last = found.sizes - 1
    steps = [np.zeros_like(last), last]  # the first element of every region, the last, and along every dim
    for level in range(last.shape[1]):
        for most in (np.minimum(last[:, level], 1), last[:, level]):
            step = np.zeros_like(last)
            step[:, level] = most
            steps.append(step)
    at = np.stack(steps)
    own = np.unravel_index(found.target_offset + (at * found.target_strides).sum(axis=2), shape)
    theirs = np.unravel_index(found.source_offset + (at * found.source_strides).sum(axis=2), whole)
    apart = [np.unique(b - a) for a, b in zip(own, theirs, strict=True)]
    return tuple(int(d[0]) for d in apart) if all(len(d) == 1 and d[0] >= 0 for d in apart) else None


def _assign_writers(
    weights: Weights,
    shapes: dict[str, tuple[int, ...]],
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, ShardBox]]],
) -> dict[int, list[ShardBox]]:
    load = dict.fromkeys(weights.devices, 0)
    out: dict[int, list[ShardBox]] = {rank: [] for rank in weights.devices}
    covered = dict.fromkeys(shapes, 0)
    for (name, _, sizes), held in holders.items():
        rank, box = min(held, key=lambda x: load[x[0]])
        load[rank] += math.prod(sizes) * itemsize(box.dtype)
        covered[name] += math.prod(sizes)
        out[rank].append(box)
    for name, shape in shapes.items():
        if covered[name] != math.prod(shape):
            raise LayoutError(
                f"form = 'distributed' for {weights.table.name or 'the table'}: the devices hold {covered[name]} "
                f"elements of {name}, and it has {math.prod(shape)}; legal are devices and ranks"
            )
    return out

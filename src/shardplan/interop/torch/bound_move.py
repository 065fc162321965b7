"""A move of one DTensor bound to this rank: planned within the memory limit, run as one step from shard to shard."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible
from shardplan.execution.drive import Running
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.run import Need, TorchExecutable, executable
from shardplan.execution.torch.wire import TorchWire
from shardplan.hardware.units import limit_of
from shardplan.interop.torch.boxes import BoxMove
from shardplan.interop.torch.ends import Ends
from shardplan.interop.torch.layout import holdings
from shardplan.movement.redistribution.choice import too_little
from shardplan.movement.redistribution.single_move import best_program
from shardplan.plans.pricing import where_of


class BoundMove:
    """A program, or an exchange of boxes, with what is done to the shard around it; used as a `TorchExecutable` is."""

    input_name = "0"

    def __init__(self, ends: Ends, rank: int, limit: int | None, topology: Any) -> None:
        """Plan; raises `Infeasible` where `limit`, which counts the caller's own shard to the end, is too small.

        It is in bytes a device, None without one; `topology` is as of `redistribute`.
        """
        self.ends = ends
        self.moving = _plan_bound_move(ends, rank, limit, topology)
        self.ranks, self.device = self.moving.ranks, rank
        self.name, self.texts = self.moving.name, self.moving.texts
        self.result_shape = self.moving.result_shape
        need = self.moving.needs[self.moving.input_name]
        self.needs: dict[str, Need | None] = {
            self.input_name: None if need is None else need._replace(dtype=ends.given),
        }
        self.digest = hashlib.sha256(f"{self.moving.digest} {ends.text}".encode()).hexdigest()

    def apply_masks(self, local: torch.Tensor) -> torch.Tensor:
        """Apply the masks of the source, see `Ends.masked`; a shard of another shape is left for `launch` to refuse."""
        need = self.needs[self.input_name]
        return self.ends.apply_masks(local) if need is not None and local.shape == need.shape else local

    def drive(self, values: dict[str, torch.Tensor], wire: TorchWire, watch: TorchWatch, record: Any = None) -> Running:
        """Move; see `TorchExecutable.drive`."""
        values[self.moving.input_name] = self.ends.prepare_shard(values.pop(self.input_name))
        results = yield from self.moving.drive(values, wire, watch, record)
        moved = results[0]
        del results  # under a limit the source is among them
        return [self.ends.finish_shard(moved)]


def _plan_bound_move(ends: Ends, rank: int, limit: int | None, topology: Any) -> TorchExecutable | BoxMove:
    """Plan what moves; what the caller holds beside it, and what is made after it, counts within `limit`."""
    sizes = [_largest(spec, t) for spec, t in zip((ends.source, ends.target), ends.types or (None, None), strict=True)]
    beside = sizes[0] * ends.given.itemsize if ends.copies else 0
    room = None if limit is None else max(min(limit, 1), limit - beside)
    least = absolute = 0
    moving: TorchExecutable | BoxMove | None = None
    try:
        if ends.types is None:
            moving = BoxMove(ends.source, ends.target, rank, room)
        else:
            where, within = where_of("topology", topology), limit_of("memory limit", room)
            # The program of `plan_kept`, whose certificate nobody asks for here.
            chosen = best_program(*ends.types, where, within, portable=False, keep=not ends.copies)
            moving = executable(chosen.program, rank)
    except Infeasible as error:
        if error.least_bytes is None:
            raise
        least = error.least_bytes + beside
        absolute = least if error.absolute_least_bytes is None else error.absolute_least_bytes + beside
        if not beside and not ends.remakes:
            raise
    masks = ends.travels.itemsize + 1 if ends.masking else 0  # a copy, and what is masked
    last = sizes[0] * ends.given.itemsize
    last += sizes[1] * (
        masks + ends.travels.itemsize * (ends.fresh or ends.copies) + ends.result.itemsize * ends.remakes
    )
    if moving is None or (limit is not None and limit < last):
        assert limit is not None
        asked = (
            f"move {ends.given} {tuple(ends.source.shape)} from {ends.source.placements} to {ends.target.placements}"
        )
        raise too_little(asked, limit, max(least, last), max(absolute, last))
    return moving


def _largest(spec: DTensorSpec, t: TensorType | None) -> int:
    """Return the elements of the largest shard."""
    if t is not None:
        return int(t.elements().max())
    held = holdings(spec.shape, spec.placements, spec.mesh, spec.shard_order)
    return max(math.prod(here.shape) for here in held.values())

"""A move of one DTensor bound to this rank: planned within the memory limit, run as one step from shard to shard.

It is a program. Where no layout says what an end means, that end is a table of boxes, beside which nothing may be
partial: then the ranks that hold addends of one shard reduce it first, by a program of their own, as an array of one
dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible
from shardplan.execution.async_executor import Running
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.run import Need, TorchExecutable, executable
from shardplan.execution.torch.wire import TorchWire
from shardplan.hardware.units import limit_of
from shardplan.interop.torch.ends import Ends
from shardplan.movement.redistribution.choice import too_little
from shardplan.movement.redistribution.single_move import best_program
from shardplan.plans.pricing import Where, where_of


class BoundMove:
    """The programs of a move, with what is done to the shard around them; used as a `TorchExecutable` is."""

    input_name = "0"

    def __init__(self, ends: Ends, rank: int, limit: int | None, topology: Any) -> None:
        """Plan; raises `Infeasible` where `limit`, which counts the caller's own shard to the end, is too small.

        It is in bytes a device, None without one; `topology` is as of `redistribute`.
        """
        self.ends = ends
        self.programs = _plan_programs(ends, rank, limit, topology)
        self.ranks, self.device = ends.ranks, rank
        self.name = self.programs[-1].name if self.programs else "move of a tensor without elements"
        self.texts = [text for program in self.programs for text in program.texts]
        shape, made = ends.shapes
        self.result_shape = (0,) if made is None else made
        text = f"{ends.source.placements} of {tuple(ends.source.shape)}"
        self.needs = {self.input_name: None if shape is None else Need(shape, ends.given, text)}
        moves = self.programs[-1].digest if self.programs else ""  # of the reductions every rank has its own
        self.digest = hashlib.sha256(f"{moves} {ends.text}".encode()).hexdigest()

    def apply_masks(self, local: torch.Tensor) -> torch.Tensor:
        """Apply the masks of the source, see `Ends.masked`; a shard of another shape is left for `launch` to refuse."""
        need = self.needs[self.input_name]
        return self.ends.apply_masks(local) if need is not None and local.shape == need.shape else local

    def drive(self, values: dict[str, torch.Tensor], wire: TorchWire, watch: TorchWatch, record: Any = None) -> Running:
        """Move; see `TorchExecutable.drive`."""
        x, first = self.ends.prepare_shard(values.pop(self.input_name)), 0
        for program in self.programs if self.ends.fresh else ():
            need = program.needs[program.input_name]
            values = {program.input_name: x if need is None else x.view(need.shape)}
            del x
            results = yield from program.drive(values, wire, watch, record, first)
            x, first = results[0], first + len(program.texts)
            del results  # under a limit the source is among them
        if not self.programs:
            x = x.new_empty(self.result_shape)
        return [self.ends.finish_shard(x.view(self.result_shape) if x.shape != self.result_shape else x)]


class _Asked(NamedTuple):
    """A program to be planned."""

    source: TensorType
    target: TensorType
    where: Where | None
    beside: int  # bytes that the caller holds beside it
    keep: bool  # whether its source is the caller's


def _asked_programs(ends: Ends, where: Where | None, own: int) -> Iterator[_Asked]:
    """Yield what is planned: the reduction of every group of ranks that hold addends of one shard, then the move.

    `own` is the bytes of the caller's shard.
    """
    if ends.types is None:
        return
    (source, target), beside = ends.types, own if ends.copies else 0
    for places in source.mesh.group_places(tuple(ends.reduced)) if ends.reduced else ():
        shape = source.elements()[places[:1]].tolist()
        mesh = Mesh({a: source.mesh.span(a).size for a in ends.reduced}, devices=source.mesh.ids[places].tolist())
        if shape[0]:
            addends, whole = (TensorType(source.dtype, shape, (), mesh, partial=p) for p in (ends.reduced, None))
            yield _Asked(addends, whole, None, beside, not ends.copies)
    yield _Asked(source, target, where, own if ends.reduced else beside, not (ends.reduced or ends.copies))


def _plan_programs(ends: Ends, rank: int, limit: int | None, topology: Any) -> list[TorchExecutable]:
    """Plan what moves; what the caller holds beside it, and what is made after it, counts within `limit`."""
    where, within = where_of("topology", topology), limit_of("memory limit", limit)
    sizes = [0, 0] if ends.types is None else [int(t.elements().max()) for t in ends.types]
    last = sizes[0] * ends.given.itemsize
    asked = list(_asked_programs(ends, where, last))
    masks = ends.travels.itemsize + 1 if ends.masking else 0  # a copy, and what is masked
    last += sizes[1] * (
        masks + ends.travels.itemsize * (ends.fresh or ends.copies) + ends.result.itemsize * ends.remakes
    )
    least, absolute, found = last, last, list[TorchExecutable]()
    for one in asked:
        mine = rank in one.source.mesh.devices or one is asked[-1]
        if not mine and within is None:  # a limit is refused by all ranks alike
            continue
        room = None if within is None else max(min(within, 1), within - one.beside)
        try:
            # The program of `plan_kept`, whose certificate nobody asks for here.
            chosen = best_program(one.source, one.target, one.where, room, portable=False, keep=one.keep)
            found += [executable(chosen.program, rank)] if mine else []
        except Infeasible as error:
            if error.least_bytes is None or (len(asked) == 1 and not one.beside and not ends.remakes):
                raise
            least = max(least, error.least_bytes + one.beside)
            absolute = max(absolute, (error.absolute_least_bytes or error.least_bytes) + one.beside)
    if within is not None and within < absolute:
        ways = f"from {ends.source.placements} to {ends.target.placements}"
        raise too_little(f"move {ends.given} {tuple(ends.source.shape)} {ways}", within, least, absolute)
    return found

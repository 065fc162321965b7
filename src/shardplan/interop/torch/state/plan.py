"""The programs of a state's moves: one batch for all that has types, one move for each tensor that goes alone.

Alone go the tensors whose values are computed on the way (an average, a mask, addends beside a table of boxes).
The memory limit holds over all of them: what the others keep alive at the time is taken off it first. Where none is
said, the batch has room for its shards and a little more: what packs all tensors into one transfer holds them up to
two and a half times, and is no quicker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardplan.core.dtypes import itemsize
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible, LayoutError, ShardplanError
from shardplan.execution.async_executor import finish
from shardplan.execution.torch.run import TorchExecutable, executable, launch
from shardplan.interop.torch.bound_move import BoundMove
from shardplan.interop.torch.ends import Ends
from shardplan.interop.torch.layout import holdings
from shardplan.interop.torch.state.view import MovedTensor
from shardplan.movement.redistribute import plan_kept
from shardplan.plans.pricing import Where

STAGED_SHARE, STAGED_BYTES = 0.1, 64 * 2**20  # of its results, and beside, that a rank stages where no limit is said


@dataclass(frozen=True, slots=True)
class Moves:
    """What a state's moves run."""

    alone: tuple[tuple[int, BoundMove], ...]  # index in the list of items, and what moves it
    typed: dict[int, Ends]  # by index, the others
    batch: Program | None  # of the typed ones; its outputs begin with theirs
    kind: str  # of the devices that it ends on

    def run(self, sources: list[torch.Tensor], timeout: float) -> list[torch.Tensor]:
        """Move this rank's shards, one an item; the list is emptied on the way, so that what is not kept is freed."""
        rank, results = dist.get_rank(), list(sources)
        for k, _ in self.alone:
            results[k] = _NOTHING
        for k in self.typed:
            results[k] = _NOTHING
        for k, move in self.alone:
            values = {move.input_name: sources[k]}
            sources[k] = _NOTHING
            kind = move.ends.target.mesh.device_type
            (results[k],) = _run_bound(move, move.ranks, values, timeout, kind)
        if self.batch is not None:
            ranks, found = self.batch.devices, [sources[k].contiguous() for k in self.typed]
            sources.clear()
            if rank in ranks:
                bound = executable(self.batch, rank)
                values = {name: found.pop(0) for name in bound.needs}
                for name, need in bound.needs.items():
                    values[name] = values[name] if need is None else values[name].view(need.shape)
                found = _run_bound(bound, ranks, values, timeout, self.kind)
            for (k, ends), y in zip(self.typed.items(), found, strict=False):  # kept inputs come after the results
                results[k] = y if ends.shapes[1] is None else y.view(ends.shapes[1])
        return results


_NOTHING = torch.empty(0)  # stands for a shard that has been moved, or has yet to come


def _run_bound(
    bound: TorchExecutable | BoundMove,
    ranks: Sequence[int],
    values: dict[str, torch.Tensor],
    timeout: float,
    kind: str,
) -> list[torch.Tensor]:
    """Run on this rank's shards, which are emptied on the way; ranks without a part keep what they have."""
    if bound.device not in ranks:
        return list(values.values())
    return finish(launch(bound, values, timeout, kind=kind))


def plan_moves(items: Sequence[MovedTensor], limit: int | None, spare: int, topology: Where | None) -> Moves:
    """Return the moves of these items, the same on every rank.

    `limit` is in bytes on every device over all of the moves, of which `spare` are taken all the time, by storages
    larger than their shards; `topology` is as of `redistribute`.

    Raises:
        LayoutError: An item without a plan; it is named.
        Infeasible: No plan within the limit; `least_bytes` is that of the first step that does not fit.
    """
    typed: dict[int, Ends] = {}
    strange: dict[int, Ends] = {}
    alone: list[tuple[int, BoundMove]] = []
    for k, item in enumerate(items):
        try:
            ends = Ends.of(item.source, item.target)
        except ShardplanError as error:
            raise LayoutError(f"{item.name}: {error}") from None
        plain = ends.source.tensor_meta == item.source.tensor_meta and not (ends.divisors)
        together = plain and ends.types is not None and not ends.reduced
        (typed if together else strange)[k] = ends
    live: Counter[int] = Counter()  # bytes by rank
    if limit is not None and strange:
        for item in items:
            live += _bytes(item.source)
    for k, ends in strange.items():
        item = items[k]
        source = Counter[int]() if limit is None else _bytes(item.source)
        taken = spare + _worst(live - source)
        try:
            alone.append((k, BoundMove(ends, dist.get_rank(), _remaining_limit(limit, taken), topology)))
        except LayoutError as error:
            raise LayoutError(f"{item.name}: {error}") from None
        except Infeasible as error:
            raise _with(error, f"{item.name}: ", taken) from None
        if limit is not None:
            live = live + _bytes(item.target) - (Counter() if item.kept else source)
    types = [ends.types for ends in typed.values() if ends.types is not None]
    if not types:
        return Moves(tuple(alone), {}, None, "")
    if strange:
        for k in typed:
            live -= _bytes(items[k].source)
    taken = spare + _worst(live)
    try:
        keep = [items[k].kept for k in typed]
        batch = _plan_batch(types, topology, _remaining_limit(limit, taken), keep)
    except Infeasible as error:
        raise _with(error, "", taken) from None
    return Moves(tuple(alone), typed, batch, items[next(iter(typed))].target.mesh.device_type)


def _plan_batch(
    types: Sequence[tuple[TensorType, TensorType]], topology: Where | None, limit: int | None, keep: Sequence[bool]
) -> Program:
    """Return the program of what has types; without a limit it stages a little, or the least that works."""
    sources, targets = zip(*types, strict=True)
    try:
        room = _usual_room(types) if limit is None else limit
        return plan_kept(sources, targets, topology, room, keep=keep).program
    except Infeasible as error:
        if limit is not None:
            raise
        return plan_kept(sources, targets, topology, error.least_bytes, keep=keep).program


def _usual_room(types: Sequence[tuple[TensorType, TensorType]]) -> int:
    """The bytes of the worst rank's shards, before and after, and of what it may stage where no limit is said."""
    room: Counter[int] = Counter()
    for ends in types:
        for t, share in zip(ends, (1, 1 + STAGED_SHARE), strict=True):
            sizes = (int(n * itemsize(t.dtype) * share) for n in t.elements())
            room.update(dict(zip(t.mesh.devices, sizes, strict=True)))
    return _worst(room) + STAGED_BYTES


def _remaining_limit(limit: int | None, taken: int) -> int | None:
    """What is left of a limit: at least 1, within which a plan is refused with the least that works."""
    return None if limit is None else max(1, limit - taken)


def _with(error: Infeasible, name: str, taken: int) -> Infeasible:
    """Return the error in bytes of the whole state's limit."""
    if not taken or error.least_bytes is None:
        return Infeasible(f"{name}{error}", error.least_bytes, error.absolute_least_bytes)
    least = error.least_bytes + taken
    return Infeasible(
        f"{name}{error}, beside {taken} bytes that the rest of the state keeps; the least limit that works for both is "
        f"{least} bytes",
        least,
        None if error.absolute_least_bytes is None else error.absolute_least_bytes + taken,
    )


def _bytes(spec: DTensorSpec) -> Counter[int]:
    """Return the bytes that every rank holds of a tensor."""
    assert spec.tensor_meta is not None
    held = holdings(tuple(spec.tensor_meta.shape), spec.placements, spec.mesh, spec.shard_order)
    return Counter({r: math.prod(h.shape) * spec.tensor_meta.dtype.itemsize for r, h in held.items()})


def _worst(live: Counter[int]) -> int:
    """The most bytes on a rank."""
    return max(live.values(), default=0)

"""Moves between placements that no layout describes: an all-to-all-v on boxes, whose indices DTensor itself says.

An uneven `_StridedShard` leaves on some devices other elements than nested ceilings would, and at times several runs
of them. There is no type, hence no program and no certificate; the bytes are those of the direct exchange. A partial
source is reduced before, by a program on the shards of every group of ranks that hold the same indices.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardplan.core.mesh import Mesh
from shardplan.core.tensor import Box, TensorType
from shardplan.errors import Infeasible
from shardplan.execution.drive import Running
from shardplan.execution.lower import View, box_elements, view_of
from shardplan.execution.rank_names import NAME_DIGITS
from shardplan.execution.torch.dtypes import short_name_of
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.pack import view_at
from shardplan.execution.torch.run import Need, TorchExecutable, executable
from shardplan.execution.torch.wire import TorchWire
from shardplan.interop.torch.layout import Holding, Run, holdings, reduction_of
from shardplan.movement.redistribute import plan_kept

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The parts of one array that one peer gets or gives, packed one after another."""

    peer: int  # rank
    views: tuple[View, ...]
    elements: int  # of all of them


Piece = tuple[Run, ...]  # per dim a run of indices: where it begins in the tensor and in a rank's array, its length
Taken = tuple[int, Box, Box]  # the rank that gives it, its box in that one's array, and in the receiver's


class BoxMove:
    """A move between two specs of one tensor, bound to a rank; it has the interface of a `TorchExecutable`."""

    input_name = "0"

    def __init__(self, source: DTensorSpec, target: DTensorSpec, rank: int, limit: int | None = None) -> None:
        """Work out who sends what to whom; raises `Infeasible` over the limit. No value becomes partial in the move."""
        assert source.tensor_meta is not None
        shape, dtype = tuple(source.tensor_meta.shape), source.tensor_meta.dtype
        before, after = (holdings(shape, end.placements, end.mesh, end.shard_order) for end in (source, target))
        self.ranks = tuple(sorted({*before, *after}))
        self.device = rank
        ends = [f"{end.placements} {end.shard_order} {end.mesh.mesh.tolist()}" for end in (source, target)]
        text = f"{shape} {dtype} {ends}"
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.name = f"move of boxes {self.digest[:NAME_DIGITS]}"
        partial = [k for k, p in enumerate(source.placements) if isinstance(p, Partial)]
        kept = [k for k in partial if source.mesh == target.mesh and source.placements[k] == target.placements[k]]
        ends_here = [k for k in partial if k not in kept]
        self.reduction, least = _reduction(source, before, ends_here, rank, limit)
        self.texts = [*(() if self.reduction is None else self.reduction.texts), "exchange of boxes"]
        mine, ours = before.get(rank), after.get(rank)
        need = None if mine is None else Need(mine.shape, dtype, f"{source.placements} of {shape}")
        self.needs: dict[str, Need | None] = {self.input_name: need}
        self.result_shape: tuple[int, ...] = (0,) if ours is None else ours.shape
        self.copies: list[tuple[View, View]] = []
        sends: dict[int, list[View]] = {}
        receives: dict[int, list[View]] = {}
        sides = (before, before, after) if ends_here else (before, after)  # the reduced shard lies beside the source
        held = {r: sum(math.prod(end[r].shape) for end in sides if r in end) for r in self.ranks}
        apart = _coordinates(source.mesh, kept)
        for r, wanted in after.items():
            for s, a, b in _sources({s: x for s, x in before.items() if not kept or apart[s] == apart[r]}, wanted, r):
                if s != r:  # staged on both sides
                    held[r] += box_elements(b)
                    held[s] += box_elements(a)
                if s == r == rank:
                    assert mine is not None and ours is not None
                    self.copies.append((view_of(mine.shape, a), view_of(ours.shape, b)))
                elif s == rank and mine is not None:
                    sends.setdefault(r, []).append(view_of(mine.shape, a))
                elif r == rank and ours is not None:
                    receives.setdefault(s, []).append(view_of(ours.shape, b))
        least = max(least, max(held.values()) * dtype.itemsize)
        if limit is not None and least > limit:
            raise Infeasible(
                f"move {dtype} {shape} from {source.placements} to {target.placements} within {limit} bytes a device: "
                f"a _StridedShard of an uneven dim moves in one exchange; the least that works is {least} bytes",
                least,
            )
        self.sends, self.receives = (
            [_Traffic(p, tuple(v), sum(x.elements for x in v)) for p, v in sorted(side.items())]
            for side in (sends, receives)
        )

    def drive(self, values: dict[str, torch.Tensor], wire: TorchWire, watch: TorchWatch, record: Any = None) -> Running:
        """Move; see `TorchExecutable.drive`."""
        x = values.pop(self.input_name)
        if self.reduction is not None:
            flat = {self.reduction.input_name: x.view(-1)}
            x = (yield from self.reduction.drive(flat, wire, watch, record))[0].view(x.shape)
        watch.begin_step(len(self.texts) - 1)
        out = torch.empty(self.result_shape, dtype=x.dtype, device=x.device)
        stages = [wire.empty(t.elements, x.dtype) for t in self.receives]
        packed = [_pack_message(x, t, wire) for t in self.sends]
        ins, outs = wire.post(
            [(t.peer, y) for t, y in zip(self.receives, stages, strict=True)],
            [(t.peer, y) for t, y in zip(self.sends, packed, strict=True)],
        )
        for a, b in self.copies:
            view_at(out, b).copy_(view_at(x, a))
        yield  # one message to and from each peer is under way, and what stays is copied; next they are waited for
        wire.wait(ins)
        for t, y in zip(self.receives, stages, strict=True):
            start = 0
            for v in t.views:
                view_at(out, v).copy_(y[start : start + v.elements].view(v.size))
                start += v.elements
        wire.wait(outs)
        return [out]


def _coordinates(mesh: DeviceMesh, dims: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return by rank its coordinates on some dims of a mesh."""
    everywhere = itertools.product(*(range(n) for n in mesh.mesh.shape))
    return {
        rank: tuple(coordinate[k] for k in dims)
        for rank, coordinate in zip(mesh.mesh.flatten().tolist(), everywhere, strict=True)
    }


def _reduction(
    source: DTensorSpec, before: dict[int, Holding], dims: Sequence[int], rank: int, limit: int | None
) -> tuple[TorchExecutable | None, int]:
    """Plan how the ranks that differ in some mesh dims reduce their shards, which are arrays of one dim for it.

    Returns:
        The program of this rank's group, None where there is nothing to reduce; and the least bytes with which every
        group can do it, as far as they exceed the limit.
    """
    meta, least = source.tensor_meta, 0
    if not dims or meta is None:
        return None, least
    others = [k for k in range(source.mesh.ndim) if k not in dims]
    groups: dict[tuple[int, ...], list[int]] = {}  # ranks that are alike in the other mesh dims
    for r, coordinate in _coordinates(source.mesh, others).items():
        groups.setdefault(coordinate, []).append(r)
    axes = {f"d{k}": source.mesh.size(k) for k in dims}
    reduction = {f"d{k}": reduction_of(p, meta.dtype) for k in dims if isinstance(p := source.placements[k], Partial)}
    mine: TorchExecutable | None = None
    for ranks in groups.values():
        n = math.prod(before[ranks[0]].shape)
        if n and (rank in ranks or limit is not None):  # a limit is refused by all ranks alike
            mesh = Mesh(axes, devices=ranks)
            name = short_name_of(meta.dtype)
            addends, whole = TensorType(name, (n,), ((),), mesh, partial=reduction), TensorType(name, (n,), ((),), mesh)
            try:
                plan = plan_kept(addends, whole, None, limit)
            except Infeasible as error:
                least = max(least, error.least_bytes or 0)
            else:
                mine = executable(plan.program, rank) if rank in ranks else mine
    return mine, least


def _pack_message(x: torch.Tensor, traffic: _Traffic, wire: TorchWire) -> torch.Tensor:
    """Return the parts for a peer, one after another; nothing but the message itself is allocated."""
    out, start = wire.empty(traffic.elements, x.dtype), 0
    for v in traffic.views:
        out[start : start + v.elements].view(v.size).copy_(view_at(x, v))
        start += v.elements
    return out


def _sources(before: dict[int, Holding], wanted: Holding, receiver: int) -> list[Taken]:
    """Who gives `receiver` which part; what it has it gives to itself.

    Of several holders of a run of indices the receiver itself comes first, then the next in the order of ranks.
    """
    ranks = sorted(before, key=lambda s: ((s - receiver) % (max(before) + 1), s))
    out: list[Taken] = []
    missing: list[Piece] = list(itertools.product(*wanted.runs))
    for s in ranks:
        left: list[tuple[tuple[int, int, int], ...]] = []
        for piece in missing:
            left += _take(before[s], s, piece, out)
        missing = left
        if not missing:
            break
    return out


def _take(held: Holding, sender: int, piece: Piece, out: list[Taken]) -> list[Piece]:
    """Cut from a wanted piece what `sender` holds of it, into `out`; returns what is still missing."""
    missing = [piece]
    for runs in itertools.product(*held.runs):
        rest: list[Piece] = []
        for want in missing:
            low = [max(w[0], h[0]) for w, h in zip(want, runs, strict=True)]
            high = [min(w[0] + w[2], h[0] + h[2]) for w, h in zip(want, runs, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                rest.append(want)
                continue
            spans = list(zip(low, high, strict=True))
            theirs = tuple((a - h[0] + h[1], b - h[0] + h[1]) for (a, b), h in zip(spans, runs, strict=True))
            own = tuple((a - w[0] + w[1], b - w[0] + w[1]) for (a, b), w in zip(spans, want, strict=True))
            out.append((sender, theirs, own))
            rest += _remaining_pieces(want, spans)
        missing = rest
    return missing


def _remaining_pieces(want: Piece, taken: list[tuple[int, int]]) -> list[Piece]:
    """What is left of a piece around the part that was taken, as disjoint pieces."""
    out: list[Piece] = []
    here = list(want)
    for d, (a, b) in enumerate(taken):
        start, local, length = here[d]
        for lo, hi in ((start, a), (b, start + length)):
            if lo < hi:
                out.append((*here[:d], (lo, local + lo - start, hi - lo), *here[d + 1 :]))
        here[d] = (a, local + a - start, b - a)
    return out

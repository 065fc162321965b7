"""DTensor's redistribution on real processes, as it is and with a real all-to-all; and a one-shot all-to-all.

On CPU meshes torch 2.13 hard-codes the all-to-all between two dims as an all-gather and a cut; `real_all_to_all` puts
one over gloo in its place, which makes DTensor the fair peer. DTensor keys its cache of plans on the specs only, so a
plan of one planner would be replayed by the other: `cached_by` keeps one cache a planner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.distributed.tensor import _redistribute as planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from shardplan.core.ops import Exchange
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import View
from shardplan.execution.rank_rounds import rank_rounds

_plans: dict[tuple[str, Any, Any], Any] = {}


def placements_of(t: TensorType, mesh: Any) -> tuple[Any, ...]:
    """The placements that say `t` on the DeviceMesh of its axes, `_StridedShard` where the order is not the mesh's."""
    axes = list(t.mesh.axes)
    where = {a: d for d, names in enumerate(t.layout.dims) for a in names}
    plain = tuple(Shard(where[a]) if a in where else Replicate() for a in axes)
    order = tuple(
        ShardOrderEntry(d, tuple(axes.index(a) for a in names)) for d, names in enumerate(t.layout.dims) if names
    )
    return tuple(DTensorSpec._convert_shard_order_to_StridedShard(order, plain, mesh))


def _all_to_all(x: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
    q = mesh.size(mesh_dim)
    packed = torch.cat([piece.contiguous().view(-1) for piece in x.chunk(q, dim=shard_dim)])
    out = torch.empty_like(packed)
    dist.all_to_all_single(out, packed, group=mesh.get_group(mesh_dim))
    shape = list(x.shape)
    shape[shard_dim] //= q
    return torch.cat([piece.view(shape) for piece in out.chunk(q)], dim=gather_dim)


@contextlib.contextmanager
def real_all_to_all(enabled: bool) -> Iterator[None]:
    """Replace the all-gather that stands for an all-to-all on CPU meshes (even dims only)."""
    before = placement_types.shard_dim_alltoall
    if enabled:
        placement_types.shard_dim_alltoall = _all_to_all
    try:
        yield
    finally:
        placement_types.shard_dim_alltoall = before


@contextlib.contextmanager
def cached_by(name: str, min_cost: bool) -> Iterator[None]:
    """Plan greedily or at least cost, with a cache of its own (DTensor's is keyed on the specs only)."""
    before = planner._gen_transform_infos

    def cached(source: Any, target: Any, use_graph_based_transform: bool | None = None) -> Any:
        key = (name, source, target)
        if key not in _plans:
            with planner.use_min_cost_redistribution_plan(min_cost):
                _plans[key] = planner._gen_transform_infos_non_cached(source, target, use_graph_based_transform)
        return _plans[key]

    planner._gen_transform_infos = cached
    try:
        yield
    finally:
        planner._gen_transform_infos = before


def one_shot(s: TensorType, t: TensorType, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One `all_to_all_single` over all ranks on box intersections: packed, moved, unpacked."""
    found = rank_rounds(Exchange(t.layout), [s], [t], rank)
    assert found is not None  # an exchange has a lowering
    (only,) = found.rounds()
    world, after = dist.get_world_size(), t.local_shape(rank)
    outgoing: list[list[View]] = [[] for _ in range(world)]
    incoming: list[list[View]] = [[] for _ in range(world)]
    for side, moves in ((outgoing, only.puts), (incoming, only.takes)):
        for peer, piece in moves:
            side[peer] += piece.views
    copies = [pair for c in only.meanwhile if c.source for pair in zip(c.source.views, c.target.views, strict=True)]
    sizes = [[sum(v.elements for v in views) for views in side] for side in (outgoing, incoming)]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(after, dtype=x.dtype)
        send, receive = torch.empty(sum(sizes[0]), dtype=x.dtype), torch.empty(sum(sizes[1]), dtype=x.dtype)
        _copy(outgoing, send, x, into=False)
        dist.all_to_all_single(receive, send, sizes[1], sizes[0])
        _copy(incoming, receive, out, into=True)
        for a, b in copies:
            _at(out, b).copy_(_at(x, a))
        return out

    return run


def _copy(side: Sequence[Sequence[View]], buffer: torch.Tensor, x: torch.Tensor, into: bool) -> None:
    start = 0
    for views in side:
        for v in views:
            piece = buffer[start : start + v.elements].view(v.size)
            if into:
                _at(x, v).copy_(piece)
            else:
                piece.copy_(_at(x, v))
            start += v.elements


def _at(x: torch.Tensor, v: View) -> torch.Tensor:
    return x.as_strided(v.size, v.stride, x.storage_offset() + v.offset)


def dtensor(x: DTensor, placements: Sequence[Any]) -> torch.Tensor:
    """The local tensor after DTensor's own redistribution."""
    return x.redistribute(x.device_mesh, placements).to_local()

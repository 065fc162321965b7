"""Moves of this rank's shard of a DTensor: found for a request, planned once, kept, and run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError
from shardplan.execution.async_executor import Running, finish
from shardplan.execution.torch.refusal import refuse, refusing
from shardplan.execution.torch.run import has_agreed, launch
from shardplan.interop.torch.bound_move import BoundMove
from shardplan.interop.torch.ends import Ends, ranks_of
from shardplan.interop.torch.layout import normal, parse_shard_order, respec
from shardplan.interop.torch.pending_moves import settle, start_move, under_way, wait_for_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "redistribute"  # for messages, where a rank has no program yet
MOST_MOVES = 4096  # moves kept, more than a model makes; beyond them all are forgotten


class TorchMove:
    """A redistribution bound to this rank: from a spec to a spec, planned once."""

    __slots__ = ("bound", "inside", "options", "target", "timeout")

    def __init__(
        self,
        source: DTensorSpec,
        target: DTensorSpec,
        limit: int | None,
        topology: Any,
        timeout: float,
        travels: torch.dtype | None = None,
    ):
        """Plan, the messages being of dtype `travels` (by default the target's); raises as `redistribute`."""
        rank = dist.get_rank()
        self.target = target
        self.timeout = timeout
        self.options = (limit, topology, timeout)
        with refusing(ranks_of(source.mesh, target.mesh), NAME):
            ends = Ends.of(source, target, travels)
        with refusing(ends.ranks, NAME):
            self.bound = BoundMove(ends, rank, limit, topology)
        self.inside = rank in self.bound.ranks

    def start(self, local: torch.Tensor) -> Running:
        """Start the move of this rank's shard; the result is the generator's value, in a list."""
        values, kind = {self.bound.input_name: local}, self.target.mesh.device_type
        if not has_agreed(self.bound, values, kind):
            settle()  # comparing programs waits for all ranks, and some may wait for those moves
        return launch(self.bound, values, self.timeout, kind=kind)


Options = tuple[int | None, Any, float]  # memory limit in bytes, topology, timeout in seconds
# By what a caller asked for (which is never taken apart again, and compared at every call) and by specs; None: nothing
# changes.
_moves: dict[Any, TorchMove | None] = {}


def plan_dtensor_move(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    shard_order: Any,
    dtype: torch.dtype | None,
    options: Options,
) -> TorchMove | None:
    """Return the planned move, or None when nothing changes."""
    key: Any = None
    try:
        spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
        mesh = spec.mesh if device_mesh is None else device_mesh
        key = (spec, tuple(placements), mesh, shard_order, dtype, options)
        return _moves[key]
    except (AttributeError, KeyError, TypeError):  # none yet, or no such request
        pass
    given: Any = dtensor
    if not isinstance(given, DTensor):
        kind = type(given).__name__
        raise LayoutError(f"redistribute takes a DTensor, not a {kind}; legal is what DTensor.from_local makes of it")
    spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
    with refusing(ranks_of(spec.mesh, spec.mesh if device_mesh is None else device_mesh), NAME):
        target = target_of(spec, placements, device_mesh, shard_order, dtype)
    move = move_between(spec, target, None, options)
    with contextlib.suppress(TypeError):  # an order of lists: read anew at every call
        _moves[key] = move
    return move


def target_of(
    spec: DTensorSpec,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    shard_order: Any,
    dtype: torch.dtype | None,
) -> DTensorSpec:
    """Return the spec that is asked for; raises `LayoutError` for placements or an order that make no sense."""
    if spec.tensor_meta is None:
        raise LayoutError("the DTensor's spec has no global shape")
    mesh = spec.mesh if device_mesh is None else device_mesh
    wanted = normal(placements, spec.ndim, mesh)
    order = parse_shard_order(shard_order, wanted)
    meta = spec.tensor_meta if dtype is None else spec.tensor_meta._replace(dtype=dtype)
    if order is None and mesh == spec.mesh and wanted == spec.placements:
        return respec(spec, wanted, meta)
    return DTensorSpec(mesh, wanted, tensor_meta=meta, shard_order=order)  # pyright: ignore[reportArgumentType]


def move_between(
    source: DTensorSpec, target: DTensorSpec, travels: torch.dtype | None, options: Options
) -> TorchMove | None:
    """Return the move from a spec to another, or None when nothing changes."""
    key = (source, target, travels, options)
    if key not in _moves:
        if len(_moves) >= MOST_MOVES:
            _moves.clear()
        rounded = travels is not None and source.tensor_meta is not None and travels != source.tensor_meta.dtype
        _moves[key] = None if source == target and not rounded else TorchMove(source, target, *options, travels)
    return _moves[key]


def move_shard(local: torch.Tensor, move: TorchMove, async_op: bool) -> torch.Tensor:
    """Return this rank's shard after the move; with `async_op`, a tensor that waits for it on first use."""
    if type(local) is not torch.Tensor:
        local = wait_for_tensor(local)
    if local.requires_grad:
        local = local.detach()
    try:
        local = move.bound.apply_masks(local)
    except LayoutError as error:
        refuse(move.bound.ranks, NAME, error)
        raise
    return run_move(local, move, async_op)


def run_move(local: torch.Tensor, move: TorchMove, async_op: bool) -> torch.Tensor:
    """Return this rank's shard after the move of a plain tensor that is masked already; see `move_shard`."""
    if not move.inside:
        return local.to(move.bound.ends.result)
    if local.is_meta:  # shapes alone: nothing is sent, and no rank is waited for
        return torch.empty(move.bound.result_shape, dtype=move.bound.ends.result, device=local.device)
    running = move.start(local)
    if async_op:
        return start_move(running, move.bound.result_shape, move.bound.ends.result, local.device)
    if under_way:
        settle()
    (result,) = finish(running)
    return result


def wrap_shard(local: torch.Tensor, move: TorchMove, requires_grad: bool) -> DTensor:
    """Return the DTensor of a shard after the move."""
    return DTensor(local, move.target, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


def gradient_of(spec: DTensorSpec, grad: DTensorSpec) -> DTensorSpec:
    """Return where the gradient of a tensor belongs: as the tensor, replicated where only the tensor is partial.

    It comes in the default order, as DTensor's does: autograd's own ops on a DTensor forget any other.
    """
    have = grad.placements if grad.mesh == spec.mesh else (Replicate(),) * spec.mesh.ndim
    back = tuple(
        Replicate() if isinstance(p, Partial) and not isinstance(g, Partial) else p
        for p, g in zip(spec.placements, have, strict=True)
    )
    assert grad.tensor_meta is not None and spec.tensor_meta is not None
    meta = grad.tensor_meta._replace(dtype=spec.tensor_meta.dtype)
    strided = spec.use_strided_shard_as_shard_order
    return DTensorSpec(spec.mesh, back, tensor_meta=meta, use_strided_shard_as_shard_order=strided)

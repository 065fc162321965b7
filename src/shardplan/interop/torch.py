"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

Results are bit for bit those of DTensor (sums of floats up to rounding: they are taken in the order of the ranks), in
the bytes and the memory of a certified plan. A plan is made on the first call and kept with everything that follows
from it; the ranks compare their programs then, once. Gradients flow back along a plan of their own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch import Executable, executable, finish, wire_for
from shardplan.execution.torch_faults import Watch
from shardplan.interop.torch_boxes import BoxMove
from shardplan.interop.torch_layout import normal, type_of
from shardplan.movement.redistribute import redistribute as plan_move

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Running = Generator[None, None, list[torch.Tensor]]
MOST_MOVES = 4096  # moves kept; beyond them all are forgotten


class Move:
    """A redistribution bound to this rank: from a spec to a spec, planned once."""

    __slots__ = ("agreed", "bound", "device", "inside", "name", "ranks", "shape", "target", "timeout")

    def __init__(self, source: DTensorSpec, target: DTensorSpec, limit: int | None, topology: Any, timeout: float):
        """Plan; see `redistribute` for what may be raised."""
        if source.tensor_meta is None:
            raise LayoutError("the DTensor's spec has no global shape")
        shape, dtype = source.tensor_meta.shape, source.tensor_meta.dtype
        rank = dist.get_rank()
        ends = [
            type_of(shape, dtype, s.placements, s.mesh, bool(s.use_strided_shard_as_shard_order) or s is target)
            for s in (source, target)
        ]
        self.target = target
        self.timeout = timeout
        self.bound: Executable | BoxMove
        if isinstance(ends[0], TensorType) and isinstance(ends[1], TensorType):
            plan = plan_move(ends[0], ends[1], topology=topology, memory_limit=limit)
            self.bound = executable(plan.program, rank)
        else:
            self.bound = BoxMove(tuple(shape), dtype, source, target, rank)
        self.ranks: tuple[int, ...] = self.bound.ranks
        self.inside = rank in self.ranks
        self.agreed = False
        self.device = torch.device("cpu")

    def start(self, local: torch.Tensor) -> Running:
        """Start the move of this rank's shard; the result is the generator's value, in a list."""
        bound = self.bound
        watch = Watch(bound.ranks, bound.device, bound.name, bound.texts, self.timeout, posts=False)
        try:
            if not self.agreed:
                watch.agree(bound.digest)
                self.agreed = True
            wire = wire_for(watch, local.device, self.timeout)
            values = {bound.input_name: local if local.is_contiguous() else local.contiguous()}
            return (yield from bound.drive(values, wire, watch))
        except BaseException as error:
            watch.broke(error)
            raise


_moves: dict[Any, Move] = {}


def redistribute(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None = None,
    memory_limit: int | None = None,
    async_op: bool = False,
    *,
    topology: Any = None,
    timeout: float = TIMEOUT,
) -> DTensor:
    """Return the DTensor with other placements, on its own mesh or on another.

    Args:
        dtensor: The tensor. With another `device_mesh`, ranks outside its mesh pass it too, with an empty local tensor.
        placements: One a dim of the destination's mesh: `Shard`, `Replicate`, `_StridedShard`, or the `Partial` that
            the tensor has there already.
        device_mesh: The destination's mesh, if it is another; every rank of both meshes calls.
        memory_limit: Bytes of workspace on every device (source, result and staging), see `shardplan.redistribute`.
        async_op: Return before the move is done; the first use of the local tensor waits for it.
        topology: A `Topology` or `Placement` on which to choose the plan.
        timeout: Seconds that any wait for other ranks may take.

    Returns:
        A DTensor; the input itself when nothing changes. It is differentiable: the gradient moves back to the source's
        placements, replicated where the source is partial (as DTensor has it).

    Raises:
        LayoutError: Placements that make no sense for the tensor, or that are not supported; they are named.
        Infeasible: No plan within `memory_limit`; `least_bytes` is the smallest that works.
        BackendError, TimedOut: Another program on another rank, a peer that failed or did not arrive in time.
    """
    if torch.compiler.is_compiling():
        from shardplan.interop.torch_compile import traced

        return traced(dtensor, placements, device_mesh, memory_limit, topology, timeout)
    move = _move(dtensor, placements, device_mesh, memory_limit, topology, timeout)
    if move is None:
        return dtensor
    if dtensor.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(dtensor, move, async_op, memory_limit)  # pyright: ignore[reportReturnType]
    return _wrapped(_moved(dtensor._local_tensor, move, async_op), move, False)  # pyright: ignore[reportPrivateUsage]


def _move(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    limit: int | None,
    topology: Any,
    timeout: float,
) -> Move | None:
    """Return the planned move, or None when nothing changes."""
    spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
    mesh = spec.mesh if device_mesh is None else device_mesh
    key = (spec, tuple(placements), mesh, limit, topology, timeout)
    found = _moves.get(key)
    if found is not None:
        return found
    if not isinstance(dtensor, DTensor):
        raise LayoutError(f"redistribute takes a DTensor, not {type(dtensor).__name__}")
    wanted = normal(placements, dtensor.ndim, mesh)
    if mesh == spec.mesh and wanted == spec.placements:
        return None
    for k, p in enumerate(wanted):
        if isinstance(p, Partial) and (mesh != spec.mesh or spec.placements[k] != p):
            have = spec.placements[k] if mesh == spec.mesh else "another mesh"
            raise LayoutError(f"cannot redistribute from {have} to {p}; legal is a Partial that the tensor has already")
    target = DTensorSpec(mesh, wanted, tensor_meta=spec.tensor_meta)
    if len(_moves) >= MOST_MOVES:
        _moves.clear()
    move = _moves[key] = Move(spec, target, limit, topology, timeout)
    return move


def _moved(local: torch.Tensor, move: Move, async_op: bool) -> torch.Tensor:
    if not move.inside:
        return local
    running = move.start(local.detach() if local.requires_grad else local)
    if async_op:
        from shardplan.interop.torch_async import later

        return later(running, move.bound.result_shape, local.dtype, local.device)
    (result,) = finish(running)
    return result


def _wrapped(local: torch.Tensor, move: Move, requires_grad: bool) -> DTensor:
    return DTensor(local, move.target, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


class _Redistribute(torch.autograd.Function):
    """The move and, backwards, the move of the gradient; the latter is differentiable again."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, move: Move, async_op: bool, limit: int | None) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.async_op, ctx.limit, ctx.timeout = dtensor._spec, async_op, limit, move.timeout  # pyright: ignore
        return _wrapped(_moved(dtensor._local_tensor, move, async_op), move, dtensor.requires_grad)  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the gradient back: replicated where the source is partial and the gradient is not."""
        back = tuple(Replicate() if isinstance(p, Partial) else p for p in ctx.spec.placements)
        same = grad._spec.mesh == ctx.spec.mesh  # pyright: ignore[reportPrivateUsage]
        if same:
            have = grad.placements
            back = tuple(
                p if isinstance(p, Partial) and isinstance(g, Partial) else b
                for p, g, b in zip(ctx.spec.placements, have, back, strict=True)
            )
        moved = redistribute(
            grad, back, None if same else ctx.spec.mesh, ctx.limit, ctx.async_op, timeout=ctx.timeout
        )
        return moved, None, None, None


def redistribute_state(
    state: Mapping[str, Any],
    layouts: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh | None = None,
    memory_limit: int | None = None,
    *,
    donate: bool = False,
    topology: Any = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Move all tensors of a model as one batch plan, equal moves packed into one transfer.

    Args:
        state: DTensors by name; anything else is passed on as it is.
        layouts: Placements by name or pattern (as `*.weight`); the first that matches holds, without one a tensor is
            replicated.
        device_mesh: The destination's mesh for all of them, if it is another.
        memory_limit: Bytes of workspace on every device for the whole move (sources, results, staging).
        donate: Free every source as soon as it is not needed: `state`, which must be a dict then, is emptied of what
            was moved, and the sources must not be used again.
        topology: As of `redistribute`.
        timeout: As of `redistribute`.

    Returns:
        The state with the moved tensors, in the order of `state`.

    Raises:
        LayoutError: As `redistribute`, naming the tensor.
        Infeasible: No plan within the limit.
    """
    if donate and not isinstance(state, dict):
        raise LayoutError(f"donate=True frees the tensors of a dict; the state is a {type(state).__name__}")
    out: dict[str, Any] = dict.fromkeys(state)
    names: list[str] = []
    sources: list[TensorType] = []
    targets: list[TensorType] = []
    specs: list[DTensorSpec] = []
    for name, value in state.items():
        if not isinstance(value, DTensor):
            out[name] = value
            continue
        spec = value._spec  # pyright: ignore[reportPrivateUsage]
        mesh = device_mesh or spec.mesh
        try:
            wanted = normal(_chosen(name, layouts, mesh), value.ndim, mesh)
            for p in wanted:
                if isinstance(p, Partial):
                    raise LayoutError(f"the destination {p} is no layout to keep a tensor in")
            ends = [type_of(value.shape, value.dtype, p, m) for p, m in ((spec.placements, spec.mesh), (wanted, mesh))]
        except ShardplanError as error:
            raise type(error)(f"{name}: {error}") from None
        s, t = ends
        if s is None or t is None:  # boxes: moved by itself
            out[name] = redistribute(value, wanted, device_mesh, timeout=timeout)
            continue
        names.append(name)
        sources.append(s)
        targets.append(t)
        specs.append(DTensorSpec(mesh, wanted, tensor_meta=spec.tensor_meta))
    if not names:
        return out
    plan = plan_move(sources, targets, topology=topology, memory_limit=memory_limit)
    rank = dist.get_rank()
    bound = executable(plan.program, rank) if rank in plan.program.devices else None
    values = {
        key: state[name]._local_tensor.detach().contiguous()
        for (key, _), name in zip(plan.program.inputs, names, strict=True)
    }
    if donate and isinstance(state, dict):
        for name in names:
            del state[name]
    if bound is None:
        results = [values[key] for key, _ in plan.program.inputs]
    else:
        watch = Watch(bound.ranks, rank, bound.name, bound.texts, timeout)
        watch.agree(bound.digest)
        device = next(iter(values.values())).device
        try:
            results = finish(bound.drive(values, wire_for(watch, device, timeout), watch))
        except BaseException as error:
            watch.broke(error)
            raise
    for name, local, spec in zip(names, results, specs, strict=True):
        out[name] = DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
    return out


def _chosen(name: str, layouts: Mapping[str, Sequence[Placement]], mesh: DeviceMesh) -> Sequence[Placement]:
    for pattern, placements in layouts.items():
        if fnmatch.fnmatchcase(name, pattern):
            return placements
    return [Replicate()] * mesh.ndim


__all__ = ["redistribute", "redistribute_state"]

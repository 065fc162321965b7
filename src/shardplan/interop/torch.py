"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

Results are bit for bit those of DTensor (sums of floats up to rounding: they are taken in the order of the ranks), in
the bytes and the memory of a certified plan. A plan is made on the first call and kept with everything that follows
from it; the ranks compare their programs then, once. Gradients flow back along a plan of their own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch import Executable, executable, finish, wire_for
from shardplan.execution.torch_faults import Watch
from shardplan.interop.torch_async import later, settle, under_way, waited
from shardplan.interop.torch_boxes import BoxMove
from shardplan.interop.torch_layout import ends, normal
from shardplan.interop.torch_state import redistribute_state
from shardplan.movement.redistribute import redistribute as plan_move

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Running = Generator[None, None, list[torch.Tensor]]
MOST_MOVES = 4096  # moves kept; beyond them all are forgotten


class Move:
    """A redistribution bound to this rank: from a spec to a spec, planned once."""

    __slots__ = ("agreed", "bound", "inside", "options", "target", "timeout")

    def __init__(self, source: DTensorSpec, target: DTensorSpec, limit: int | None, topology: Any, timeout: float):
        """Plan; see `redistribute` for what may be raised."""
        rank = dist.get_rank()
        before, after = ends(source, target)
        self.target = target
        self.timeout = timeout
        self.options = (limit, topology, timeout)
        self.bound: Executable | BoxMove
        if before is not None and after is not None:
            plan = plan_move(before, after, topology=topology, memory_limit=limit)
            self.bound = executable(plan.program, rank)
        else:
            self.bound = BoxMove(source, target, rank, limit)
        self.inside = rank in self.bound.ranks
        self.agreed = False

    def start(self, local: torch.Tensor) -> Running:
        """Start the move of this rank's shard; the result is the generator's value, in a list."""
        bound = self.bound
        watch = Watch(bound.ranks, bound.device, bound.name, bound.texts, self.timeout, posts=False)
        try:
            if not self.agreed:
                settle()  # comparing programs waits for all ranks, and some may wait for those moves
                watch.agree(bound.digest)
                self.agreed = True
            wire = wire_for(watch, local.device, self.timeout)
            values = {bound.input_name: local if local.is_contiguous() else local.contiguous()}
            return (yield from bound.drive(values, wire, watch))
        except GeneratorExit:  # never finished: the process group was destroyed before the process ended
            raise
        except BaseException as error:
            watch.broke(error)
            raise


_moves: dict[Any, Move | None] = {}  # None: nothing changes


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
        async_op: Return before the move is done; the first use of the local tensor waits for it. Ranks start such moves
            in one order, wait in any, and finish what nobody uses at the next call without it, or at exit. Under
            torch.compile it has no effect.
        topology: A `Topology` or `Placement` on which to choose the plan.
        timeout: Seconds that any wait for other ranks may take.

    Returns:
        A DTensor; the input itself when nothing changes and no gradient is asked for. It is differentiable: the
        gradient moves back to the source's placements, replicated where the source is partial (as DTensor has it), and
        so it does when nothing else changes (but not under torch.compile).

    Raises:
        LayoutError: Placements that make no sense for the tensor, or that are not supported; they are named.
        Infeasible: No plan within `memory_limit`; `least_bytes` is the smallest that works.
        BackendError, TimedOut: Another program on another rank, a peer that failed or did not arrive in time.
    """
    if torch.compiler.is_compiling():
        from shardplan.interop.torch_compile import traced

        return traced(dtensor, placements, device_mesh, memory_limit, topology, timeout)
    move = planned(dtensor, placements, device_mesh, memory_limit, topology, timeout)
    if move is None and not (dtensor.requires_grad and torch.is_grad_enabled()):
        return dtensor
    if move is None:
        return _Same.apply(dtensor, (memory_limit, topology, timeout))  # pyright: ignore[reportReturnType]
    if dtensor.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(dtensor, move, async_op)  # pyright: ignore[reportReturnType]
    return wrapped(moved(dtensor._local_tensor, move, async_op), move, False)  # pyright: ignore[reportPrivateUsage]


def planned(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    limit: int | None,
    topology: Any,
    timeout: float,
) -> Move | None:
    """Return the planned move, or None when nothing changes."""
    try:
        spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
        key = (spec, tuple(placements), spec.mesh if device_mesh is None else device_mesh, limit, topology, timeout)
        return _moves[key]
    except (AttributeError, KeyError, TypeError):  # none yet, or no such request
        pass
    given: Any = dtensor
    if not isinstance(given, DTensor):
        kind = type(given).__name__
        raise LayoutError(f"redistribute takes a DTensor, not a {kind}; legal is what DTensor.from_local makes of it")
    spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
    mesh = spec.mesh if device_mesh is None else device_mesh
    wanted = normal(placements, dtensor.ndim, mesh)
    if len(_moves) >= MOST_MOVES:
        _moves.clear()
    key = (spec, tuple(placements), mesh, limit, topology, timeout)
    if mesh == spec.mesh and wanted == spec.placements:
        _moves[key] = None
        return None
    for k, p in enumerate(wanted):
        if isinstance(p, Partial) and (mesh != spec.mesh or spec.placements[k] != p):
            have = repr(spec.placements[k]) if mesh == spec.mesh else "another mesh"
            raise LayoutError(
                f"cannot redistribute from {have} to {p!r}, mesh dim {k} of {wanted}; legal are Shard, Replicate and "
                "the Partial that the tensor has there already"
            )
    target = DTensorSpec(mesh, wanted, tensor_meta=spec.tensor_meta)
    move = _moves[key] = Move(spec, target, limit, topology, timeout)
    return move


def moved(local: torch.Tensor, move: Move, async_op: bool) -> torch.Tensor:
    """Return this rank's shard after the move; with `async_op`, a tensor that waits for it on first use."""
    if not move.inside:
        return local
    if type(local) is not torch.Tensor:
        local = waited(local)
    running = move.start(local.detach() if local.requires_grad else local)
    if async_op:
        return later(running, move.bound.result_shape, local.dtype, local.device)
    if under_way:
        settle()
    (result,) = finish(running)
    return result


def wrapped(local: torch.Tensor, move: Move, requires_grad: bool) -> DTensor:
    """Return the DTensor of a shard after the move."""
    return DTensor(local, move.target, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


class _Redistribute(torch.autograd.Function):
    """The move and, backwards, the move of the gradient; the latter is differentiable again."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, move: Move, async_op: bool) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.async_op, ctx.options = dtensor._spec, async_op, move.options  # pyright: ignore
        ctx.set_materialize_grads(False)  # zeros would come as a plain tensor
        return wrapped(moved(dtensor._local_tensor, move, async_op), move, dtensor.requires_grad)  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the gradient back."""
        return None if grad is None else _back(ctx.spec, grad, ctx.options, ctx.async_op), None, None


class _Same(torch.autograd.Function):
    """The tensor as it is; a gradient with other placements (a partial one, say) moves to the tensor's."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, options: tuple[Any, ...]) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.options = dtensor._spec, options  # pyright: ignore[reportPrivateUsage]
        ctx.set_materialize_grads(False)
        return DTensor(dtensor._local_tensor, dtensor._spec, requires_grad=dtensor.requires_grad)  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the gradient to the placements of the tensor."""
        return None if grad is None else _back(ctx.spec, grad, ctx.options, False), None


def _back(spec: DTensorSpec, grad: DTensor, options: tuple[Any, ...], async_op: bool) -> DTensor:
    limit, topology, timeout = options
    back, mesh = gradient_of(spec, grad)
    return redistribute(grad, back, mesh, limit, async_op, topology=topology, timeout=timeout)


def gradient_of(spec: DTensorSpec, grad: DTensor) -> tuple[tuple[Placement, ...], DeviceMesh]:
    """Return where the gradient of a tensor belongs: as the tensor, replicated where only the tensor is partial."""
    have = grad.placements if grad.device_mesh == spec.mesh else (Replicate(),) * spec.mesh.ndim
    back = tuple(
        Replicate() if isinstance(p, Partial) and not isinstance(g, Partial) else p
        for p, g in zip(spec.placements, have, strict=True)
    )
    return back, spec.mesh


__all__ = ["redistribute", "redistribute_state"]

"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

Results are bit for bit those of DTensor (sums of floats up to rounding: they are taken in the order of the ranks), in
the bytes and the memory of a certified plan. A plan is made on the first call and kept with everything that follows
from it; the ranks compare their programs then, once. Gradients flow back along a plan of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from shardplan.errors import missing

try:
    import torch
except ModuleNotFoundError as error:
    raise missing(error, "torch") from None
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch.run import agreed, finish, launch
from shardplan.interop.torch_async import later, settle, under_way, waited
from shardplan.interop.torch_bound import Bound
from shardplan.interop.torch_ends import Ends
from shardplan.interop.torch_layout import normal, ordered, respec
from shardplan.interop.torch_state import redistribute_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Running = Generator[None, None, list[torch.Tensor]]
MOST_MOVES = 4096  # moves kept; beyond them all are forgotten


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
        """Plan, the messages being of dtype `travels` (the target's); see `redistribute` for what may be raised."""
        rank = dist.get_rank()
        self.target = target
        self.timeout = timeout
        self.options = (limit, topology, timeout)
        self.bound = Bound(Ends.of(source, target, travels), rank, limit, topology)
        self.inside = rank in self.bound.ranks

    def start(self, local: torch.Tensor) -> Running:
        """Start the move of this rank's shard; the result is the generator's value, in a list."""
        if not agreed(self.bound):
            settle()  # comparing programs waits for all ranks, and some may wait for those moves
        return launch(self.bound, {self.bound.input_name: local}, self.timeout)


Options = tuple[int | None, Any, float]  # memory limit, topology, timeout
_moves: dict[Any, TorchMove | None] = {}  # by request and by specs; None: nothing changes


def redistribute(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None = None,
    memory_limit: int | None = None,
    async_op: bool = False,
    *,
    shard_order: Sequence[tuple[int, Sequence[int]]] | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    topology: Any = None,
    timeout: float = TIMEOUT,
) -> DTensor:
    """Return the DTensor with other placements, on its own mesh or on another.

    Args:
        dtensor: The tensor. With another `device_mesh`, ranks outside its mesh pass it too, with an empty local tensor.
        placements: One a dim of the destination's mesh: `Shard`, `Replicate`, `_StridedShard`, `Partial`. A value
            becomes partial as inside DTensor: divided for a sum, left as it is for avg, max and min; what is not
            divided (integers, products) is kept at coordinate 0, and the identity elsewhere.
        device_mesh: The destination's mesh, if it is another; every rank of both meshes calls.
        memory_limit: Bytes of workspace on every device (source, result and staging), see `shardplan.redistribute`. The
            caller's shard counts to the end.
        async_op: Return before the move is done; the first use of the local tensor waits for it. Ranks start such moves
            in one order, wait in any, and finish what nobody uses at the next call without it, or at exit. Under
            torch.compile it has no effect.
        shard_order: For every dim that is cut, the mesh dims that cut it, the first one first, as `ShardOrderEntry` or
            a pair; by default mesh dims cut in their own order, and what has the placements already stays as it is.
        forward_dtype: The dtype in which the tensor moves, and that of the result; by default the tensor's.
        backward_dtype: The dtype in which the gradient moves; by default the tensor's, which it has in the end.
        topology: A `Topology` or `Placement` on which to choose the plan.
        timeout: Seconds that any wait for other ranks may take.

    Returns:
        A DTensor; the input itself when nothing changes and no gradient is asked for. It is differentiable: the
        gradient moves back to the source's placements, replicated where the source is partial (as DTensor has it),
        and so it does when nothing else changes (but not under torch.compile).

    Raises:
        LayoutError: Placements that make no sense for the tensor, or that are not supported; they are named.
        Infeasible: No plan within `memory_limit`; `least_bytes` is the smallest that works.
        BackendError, TimedOut: Another program on another rank, a peer that failed or did not arrive in time.
    """
    options = memory_limit, topology, timeout
    if torch.compiler.is_compiling():
        from shardplan.interop.torch_compile import traced

        return traced(dtensor, placements, device_mesh, shard_order, forward_dtype, backward_dtype, options)
    move = planned(dtensor, placements, device_mesh, shard_order, forward_dtype, options)
    return _applied(dtensor, move, async_op, options, backward_dtype)


def planned(
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
    target = target_of(spec, placements, device_mesh, shard_order, dtype)
    move = between(spec, target, None, options)
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
    order = ordered(shard_order, wanted)
    meta = spec.tensor_meta if dtype is None else spec.tensor_meta._replace(dtype=dtype)
    if order is None and mesh == spec.mesh and wanted == spec.placements:
        return respec(spec, wanted, meta)
    return DTensorSpec(mesh, wanted, tensor_meta=meta, shard_order=order)  # pyright: ignore[reportArgumentType]


def between(
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


def _applied(
    dtensor: DTensor, move: TorchMove | None, async_op: bool, options: Options, backward_dtype: torch.dtype | None
) -> DTensor:
    """Return the DTensor after a move, differentiable where a gradient is asked for."""
    if dtensor.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(dtensor, move, async_op, options, backward_dtype)  # pyright: ignore
    if move is None:
        return dtensor
    return wrapped(moved(dtensor._local_tensor, move, async_op), move, False)  # pyright: ignore[reportPrivateUsage]


def moved(local: torch.Tensor, move: TorchMove, async_op: bool) -> torch.Tensor:
    """Return this rank's shard after the move; with `async_op`, a tensor that waits for it on first use."""
    if type(local) is not torch.Tensor:
        local = waited(local)
    if local.requires_grad:
        local = local.detach()
    return ran(move.bound.masked(local), move, async_op)


def ran(local: torch.Tensor, move: TorchMove, async_op: bool) -> torch.Tensor:
    """Return this rank's shard after the move of a plain tensor that is masked already; see `moved`."""
    if not move.inside:
        return local.to(move.bound.ends.result)
    running = move.start(local)
    if async_op:
        return later(running, move.bound.result_shape, move.bound.ends.result, local.device)
    if under_way:
        settle()
    (result,) = finish(running)
    return result


def wrapped(local: torch.Tensor, move: TorchMove, requires_grad: bool) -> DTensor:
    """Return the DTensor of a shard after the move."""
    return DTensor(local, move.target, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue]


class _Redistribute(torch.autograd.Function):
    """The move, if there is one, and backwards the move of the gradient; the latter is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        move: TorchMove | None,
        async_op: bool,
        options: Options,
        dtype: torch.dtype | None,
    ) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.dtype = dtensor._spec, dtype  # pyright: ignore[reportPrivateUsage]
        ctx.async_op, ctx.options = async_op and move is not None, options
        ctx.set_materialize_grads(False)  # zeros would come as a plain tensor
        local = dtensor._local_tensor  # pyright: ignore[reportPrivateUsage]
        if move is None:
            return DTensor(local, dtensor._spec, requires_grad=dtensor.requires_grad)  # pyright: ignore
        return wrapped(moved(local, move, async_op), move, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the gradient to where the tensor is, in its own dtype."""
        if grad is None:
            return (None,) * 5
        travels = ctx.spec.tensor_meta.dtype if ctx.dtype is None else ctx.dtype
        have = grad._spec  # pyright: ignore[reportPrivateUsage]
        move = between(have, gradient_of(ctx.spec, have), travels, ctx.options)
        return _applied(grad, move, ctx.async_op, ctx.options, travels), None, None, None, None


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


__all__ = ["redistribute", "redistribute_state"]

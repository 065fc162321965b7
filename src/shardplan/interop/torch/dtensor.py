"""`redistribute` in place of `DTensor.redistribute`.

Results are bit for bit those of DTensor (sums of floats up to rounding: they are taken in the order of the ranks), in
the bytes and the memory of a certified plan. A plan is made on the first call and kept with everything that follows
from it; the ranks compare their programs then, once. Gradients flow back along a plan of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardplan.execution.run import TIMEOUT
from shardplan.interop.torch.moves import (
    Options,
    TorchMove,
    gradient_of,
    move_between,
    move_shard,
    plan_dtensor_move,
    wrap_shard,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        from shardplan.interop.torch.compile import trace_move

        return trace_move(dtensor, placements, device_mesh, shard_order, forward_dtype, backward_dtype, options)
    move = plan_dtensor_move(dtensor, placements, device_mesh, shard_order, forward_dtype, options)
    return _apply_move(dtensor, move, async_op, options, backward_dtype)


def _apply_move(
    dtensor: DTensor, move: TorchMove | None, async_op: bool, options: Options, backward_dtype: torch.dtype | None
) -> DTensor:
    """Return the DTensor after a move, differentiable where a gradient is asked for."""
    if dtensor.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(dtensor, move, async_op, options, backward_dtype)  # pyright: ignore
    if move is None:
        return dtensor
    return wrap_shard(move_shard(dtensor._local_tensor, move, async_op), move, False)  # pyright: ignore[reportPrivateUsage]


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
        return wrap_shard(move_shard(local, move, async_op), move, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the gradient to where the tensor is, in its own dtype."""
        if grad is None:
            return (None,) * 5  # one an argument of `forward`
        travels = ctx.spec.tensor_meta.dtype if ctx.dtype is None else ctx.dtype
        have = grad._spec  # pyright: ignore[reportPrivateUsage]
        move = move_between(have, gradient_of(ctx.spec, have), travels, ctx.options)
        return _apply_move(grad, move, ctx.async_op, ctx.options, travels), None, None, None, None

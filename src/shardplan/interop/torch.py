"""Drop-ins for DTensor: `redistribute` in place of `DTensor.redistribute`, `redistribute_state` for a whole model.

Results are bit for bit those of DTensor (sums of floats up to rounding: they are taken in the order of the ranks), in
the bytes and the memory of a certified plan. A plan is made on the first call and kept with everything that follows
from it; the ranks compare their programs then, once. Gradients flow back along a plan of their own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Mapping, Sequence
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

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch import Executable, agreed, executable, finish, launch
from shardplan.interop.torch_async import later, settle, under_way, waited
from shardplan.interop.torch_boxes import BoxMove
from shardplan.interop.torch_layout import normal, type_of
from shardplan.movement.redistribute import redistribute as plan_move

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Running = Generator[None, None, list[torch.Tensor]]
MOST_MOVES = 4096  # moves kept; beyond them all are forgotten


class Move:
    """A redistribution bound to this rank: from a spec to a spec, planned once."""

    __slots__ = ("bound", "inside", "options", "target", "timeout")

    def __init__(self, source: DTensorSpec, target: DTensorSpec, limit: int | None, topology: Any, timeout: float):
        """Plan; see `redistribute` for what may be raised."""
        rank = dist.get_rank()
        ends = _ends(source, target)
        self.target = target
        self.timeout = timeout
        self.options = (limit, topology, timeout)
        self.bound: Executable | BoxMove
        if ends[0] is not None and ends[1] is not None:
            plan = plan_move(ends[0], ends[1], topology=topology, memory_limit=limit)
            self.bound = executable(plan.program, rank)
        else:
            self.bound = BoxMove(source, target, rank, limit)
        self.inside = rank in self.bound.ranks

    def start(self, local: torch.Tensor) -> Running:
        """Start the move of this rank's shard; the result is the generator's value, in a list."""
        if not agreed(self.bound):
            settle()  # comparing programs waits for all ranks, and some may wait for those moves
        return launch(self.bound, {self.bound.input_name: local}, self.timeout)


def _ends(source: DTensorSpec, target: DTensorSpec) -> tuple[TensorType | None, TensorType | None]:
    """Return the types of both ends; None for one that only runs of indices describe."""
    meta = source.tensor_meta
    if meta is None:
        raise LayoutError("the DTensor's spec has no global shape")
    ordered = bool(source.use_strided_shard_as_shard_order)
    return (
        type_of(meta.shape, meta.dtype, source.placements, source.mesh, ordered),
        type_of(meta.shape, meta.dtype, target.placements, target.mesh),
    )


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
        memory_limit: Bytes of workspace on every device for the whole move (sources, results, staging). Tensors that no
            layout describes (an uneven `_StridedShard`) are moved first, each by itself within the limit.
        donate: Free every source as soon as it is not needed: `state`, which must be a dict then, is emptied of what
            was moved, and the sources must not be used again.
        topology: As of `redistribute`.
        timeout: As of `redistribute`.

    Returns:
        The state with the moved tensors, in the order of `state`; a tensor that is where it belongs is passed on.

    Raises:
        LayoutError: As `redistribute`, naming the tensor.
        Infeasible: No plan within the limit.
    """
    if donate and not isinstance(state, dict):
        raise LayoutError(f"donate=True empties the state on the way, a {type(state).__name__}; legal is a dict")
    wanted = _targets(state, layouts, device_mesh)
    out: dict[str, Any] = {name: None if name in wanted else value for name, value in state.items()}
    typed: dict[str, tuple[TensorType, TensorType]] = {}
    for name, target in wanted.items():
        try:
            s, t = _ends(state[name]._spec, target)
        except ShardplanError as error:
            raise LayoutError(f"{name}: {error}") from None
        if s is not None and t is not None:
            typed[name] = (s, t)
            continue
        with torch.no_grad():
            out[name] = redistribute(state[name], target.placements, target.mesh, memory_limit, timeout=timeout)
        if donate and isinstance(state, dict):
            del state[name]
    if not typed:
        return out
    sources, targets = zip(*typed.values(), strict=True)
    plan = plan_move(sources, targets, topology=topology, memory_limit=memory_limit)
    keys = [key for key, _ in plan.program.inputs]
    locals_ = (waited(state[name]._local_tensor.detach()).contiguous() for name in typed)
    values = dict(zip(keys, locals_, strict=True))
    if donate and isinstance(state, dict):
        for name in typed:
            del state[name]
    results = _batch(plan.program, keys, values, timeout)
    for name, local in zip(typed, results, strict=True):
        out[name] = DTensor(local, wanted[name], requires_grad=False)  # pyright: ignore[reportCallIssue]
    return out


def _batch(program: Program, keys: list[str], values: dict[str, torch.Tensor], timeout: float) -> list[torch.Tensor]:
    """Run a batch on this rank's shards, which is emptied on the way; ranks without a part keep what they have."""
    rank = dist.get_rank()
    if rank not in program.devices:
        return [values[key] for key in keys]
    settle()
    return finish(launch(executable(program, rank), values, timeout))


def _targets(
    state: Mapping[str, Any], layouts: Mapping[str, Sequence[Placement]], device_mesh: DeviceMesh | None
) -> dict[str, DTensorSpec]:
    """Return the spec that every tensor that has to move is to have, by name, in the order of the state."""
    out: dict[str, DTensorSpec] = {}
    for name, value in state.items():
        if not isinstance(value, DTensor):
            continue
        spec = value._spec  # pyright: ignore[reportPrivateUsage]
        mesh = device_mesh or spec.mesh
        found = next((p for pattern, p in layouts.items() if fnmatch.fnmatchcase(name, pattern)), None)
        try:
            wanted = normal([Replicate()] * mesh.ndim if found is None else found, value.ndim, mesh)
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from None
        if mesh == spec.mesh and wanted == spec.placements:
            continue
        strange = next((p for p in wanted if isinstance(p, Partial)), None)
        if strange is not None:
            raise LayoutError(f"{name}: cannot move a tensor of a state to {strange!r}; legal are Shard and Replicate")
        out[name] = DTensorSpec(mesh, wanted, tensor_meta=spec.tensor_meta)
    return out


__all__ = ["redistribute", "redistribute_state"]

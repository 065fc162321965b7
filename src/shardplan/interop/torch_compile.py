"""`redistribute` under torch.compile: planned while it is traced, and one opaque op in the graph that is left.

Dynamo keeps the whole call as one node. When that node is traced with the tensors' specs and shapes, which must be
known numbers, the move is planned, put into an explicit table, and the op `shardplan::move` is recorded with its key;
the move of the gradient likewise. The op runs the plan as the eager call does, and is never async.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._library.effects import EffectType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from shardplan.errors import LayoutError
from shardplan.interop import torch as eager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_table: dict[str, eager.Move] = {}  # what graphs refer to; kept as long as the process, as graphs are
_keys: dict[int, str] = {}  # by the identity of a move
_topologies: list[Any] = []


def traced(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    memory_limit: int | None,
    topology: Any,
    timeout: float,
) -> DTensor:
    """Return the moved DTensor while `torch.compile` traces; see `interop.torch.redistribute`.

    Raises what that raises, and `LayoutError` for a shape that is not known; torch wraps it in an error of its own.
    """
    chosen = -1 if topology is None else _numbered(topology)
    return _node(dtensor, tuple(placements), device_mesh, memory_limit, chosen, timeout)


@torch.compiler.assume_constant_result
def _numbered(topology: Any) -> int:
    """Return the place of a topology in a list, since it cannot be an argument of a node."""
    if topology not in _topologies:
        _topologies.append(topology)
    return _topologies.index(topology)


@torch.compiler.allow_in_graph
def _node(
    dtensor: DTensor,
    placements: tuple[Placement, ...],
    mesh: DeviceMesh | None,
    limit: int | None,
    chosen: int,
    timeout: float,
) -> DTensor:
    """The whole call, opaque to dynamo; AOTAutograd traces through it with tensors that have shapes only."""
    given: Any = dtensor
    if not isinstance(given, DTensor):
        raise LayoutError("redistribute takes a DTensor, not a Tensor; legal is what DTensor.from_local makes of it")
    symbols = [f"dim {d} is {n}" for d, n in enumerate(given.shape) if isinstance(n, torch.SymInt)]  # pyright: ignore
    if symbols:
        raise LayoutError(
            f"cannot plan a move of a tensor of symbolic shape: {', '.join(symbols)}; legal under torch.compile are "
            "static shapes: torch.compile(..., dynamic=False), or torch._dynamo.mark_static for the tensor"
        )
    topology = None if chosen < 0 else _topologies[chosen]
    move = _planned(dtensor, placements, mesh, (None if limit is None else int(limit), topology, float(timeout)))
    return dtensor if move is None else _Traced.apply(dtensor, move)


class _Traced(torch.autograd.Function):
    """The move as an op, and backwards the move of the gradient."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, move: eager.Move) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.options = dtensor._spec, move.options  # pyright: ignore[reportPrivateUsage]
        ctx.set_materialize_grads(False)
        local = torch.ops.shardplan.move(dtensor._local_tensor, _entered(move))  # pyright: ignore
        return eager.wrapped(local, move, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None
        placements, mesh = eager.gradient_of(ctx.spec, grad)
        move = _planned(grad, placements, mesh, ctx.options)
        return grad if move is None else _Traced.apply(grad, move), None


def _planned(
    dtensor: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None, options: Any
) -> eager.Move | None:
    with _disable_current_modes():  # planning reads real tensors: the ranks of the mesh
        return eager.planned(dtensor, placements, mesh, *options)


def _entered(move: eager.Move) -> str:
    """Return the key of a move in the table: readable in a graph, the same in every run of the same calls."""
    found = _keys.get(id(move))
    if found is None:
        found = _keys[id(move)] = f"{len(_table)}: {move.bound.name}"
        _table[found] = move
    return found


@torch.library.custom_op("shardplan::move", mutates_args=())
def _run(local: torch.Tensor, key: str) -> torch.Tensor:
    """Run a move of the table on the local tensor."""
    result = eager.moved(local, _table[key], False)
    return result.clone() if result is local else result  # an op's result is no alias


@_run.register_fake
def _(local: torch.Tensor, key: str) -> torch.Tensor:
    move = _table[key]
    return local.new_empty(move.bound.result_shape if move.inside else local.shape)


# Ranks must run moves in one order, whatever order a compiler likes best for the shapes of each.
_run.register_effect(EffectType.ORDERED)

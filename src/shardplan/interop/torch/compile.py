"""`redistribute` under torch.compile: planned while it is traced, and one opaque op in the graph that is left.

Dynamo keeps the whole call as one node. When that node is traced with the tensors' specs and shapes, the move is
planned, put into an explicit table, and the op `shardplan::move` is recorded with its key; the move of the gradient
likewise. A plan is of one shape: where dynamo would have a size stand for any, it is guarded to be the one at hand, so
that another batch size is compiled anew, also on ranks whose shards keep their size. The op runs the plan as the eager
call does, and is never async.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._guards import TracingContext, detect_fake_mode
from torch._library.effects import EffectType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from shardplan.errors import LayoutError
from shardplan.interop.torch.layout import respec
from shardplan.interop.torch.moves import Options, TorchMove, gradient_of, move_between, run_move, target_of, wrap_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_table: dict[str, TorchMove] = {}  # what graphs refer to; kept as long as the process, as graphs are
_keys: dict[int, str] = {}  # by the identity of a move, which the table keeps alive
_topologies: list[Any] = []  # by the number that a node has for each


def trace_move(
    dtensor: DTensor,
    placements: Sequence[Placement],
    device_mesh: DeviceMesh | None,
    shard_order: Any,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    options: Options,
) -> DTensor:
    """Return the moved DTensor while `torch.compile` traces; see `interop.torch.redistribute`.

    Raises what that raises; torch wraps it in an error of its own.
    """
    limit, topology, timeout = options
    chosen = -1 if topology is None else _topology_number(topology)
    order = None if shard_order is None else tuple((d, tuple(dims)) for d, dims in shard_order)
    dtypes = forward_dtype, backward_dtype
    return _node(dtensor, tuple(placements), device_mesh, order, dtypes, limit, chosen, timeout)


@torch.compiler.assume_constant_result
def _topology_number(topology: Any) -> int:
    """Return the number of a topology in a list, since it cannot be an argument of a node itself."""
    if topology not in _topologies:
        _topologies.append(topology)
    return _topologies.index(topology)


@torch.compiler.allow_in_graph
def _node(
    dtensor: DTensor,
    placements: tuple[Placement, ...],
    mesh: DeviceMesh | None,
    order: Any,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    limit: int | None,
    chosen: int,
    timeout: float,
) -> DTensor:
    """The whole call, opaque to dynamo; AOTAutograd traces through it with tensors that have shapes only."""
    given: Any = dtensor
    if not isinstance(given, DTensor):
        raise LayoutError("redistribute takes a DTensor, not a Tensor; legal is what DTensor.from_local makes of it")
    options = (None if limit is None else int(limit), None if chosen < 0 else _topologies[chosen], float(timeout))
    spec = _concrete_spec(dtensor)
    _guard_global_sizes(dtensor)
    move = _plan_traced_move(spec, target_of(spec, placements, mesh, order, dtypes[0]), None, options)
    return dtensor if move is None else _Traced.apply(dtensor, spec, move, dtypes[1])


class _Traced(torch.autograd.Function):
    """The move as an op, and backwards the move of the gradient."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, spec: DTensorSpec, move: TorchMove, dtype: Any) -> DTensor:  # pyright: ignore
        ctx.spec, ctx.options, ctx.dtype = spec, move.options, dtype
        ctx.set_materialize_grads(False)
        local = move.bound.apply_masks(dtensor._local_tensor)  # pyright: ignore[reportPrivateUsage]
        local = torch.ops.shardplan.move(local, _move_key(move))  # pyright: ignore
        return wrap_shard(local, move, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return (None,) * 4  # one an argument of `forward`
        travels = ctx.spec.tensor_meta.dtype if ctx.dtype is None else ctx.dtype
        spec = _concrete_spec(grad)
        move = _plan_traced_move(spec, gradient_of(ctx.spec, spec), travels, ctx.options)
        return grad if move is None else _Traced.apply(grad, spec, move, travels), None, None, None


def _concrete_spec(dtensor: DTensor) -> DTensorSpec:
    """Return the tensor's spec with sizes that are numbers: reading a symbol guards the graph to its value."""
    spec = dtensor._spec  # pyright: ignore[reportPrivateUsage]
    meta = spec.tensor_meta
    if meta is None:
        raise LayoutError("the DTensor's spec has no global shape")
    for n in dtensor._local_tensor.shape:  # pyright: ignore[reportPrivateUsage]
        int(n)
    sizes = torch.Size([int(n) for n in meta.shape])
    return respec(spec, spec.placements, TensorMeta(sizes, tuple(int(n) for n in meta.stride), meta.dtype))


def _guard_global_sizes(dtensor: DTensor) -> None:
    """Guard the global sizes of the graph's DTensors, where they are numbers.

    Dynamo leaves such guards to the check of a tensor's own sizes, and of a DTensor it checks the shard: a rank whose
    shard is as large as before would run the plan of another global size.
    """
    mode: Any = detect_fake_mode(dtensor)
    if mode is None or TracingContext.try_get() is None:
        return
    for known in mode.shape_env.tracked_fakes or ():
        if isinstance(known.fake, DTensor):
            for d, n in enumerate(known.fake.shape):
                if is_concrete_int(n):
                    size = TensorPropertySource(known.source, TensorProperty.SIZE, d)
                    install_guard(size.make_guard(GuardBuilder.EQUALS_MATCH))


def _plan_traced_move(
    source: DTensorSpec, target: DTensorSpec, travels: torch.dtype | None, options: Options
) -> TorchMove | None:
    with _disable_current_modes():  # planning reads real tensors: the ranks of the mesh
        return move_between(source, target, travels, options)


def _move_key(move: TorchMove) -> str:
    """Return the key of a move in the table: readable in a graph, the same in every run of the same calls."""
    found = _keys.get(id(move))
    if found is None:
        found = _keys[id(move)] = f"{len(_table)}: {move.bound.name}"
        _table[found] = move
    return found


@torch.library.custom_op("shardplan::move", mutates_args=())
def _run(local: torch.Tensor, key: str) -> torch.Tensor:
    """Run a move of the table on the local tensor."""
    result = run_move(local, _table[key], False)
    return result.clone() if result is local else result  # an op's result is no alias


@_run.register_fake
def _(local: torch.Tensor, key: str) -> torch.Tensor:
    move = _table[key]
    shape = move.bound.result_shape if move.inside else local.shape
    return local.new_empty(shape, dtype=move.bound.ends.result)


# Ranks must run moves in one order, whatever order a compiler likes best for the shapes of each.
_run.register_effect(EffectType.ORDERED)

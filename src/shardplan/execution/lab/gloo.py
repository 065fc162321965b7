"""The gloo engine: gloo's own collectives on real process groups, and the torch backend for everything else.

gloo has algorithms of its own: its reduce_scatter moves the traffic of an all-reduce, its reduce and broadcast are no
chains. Its messages are not ours to count or to predict. A group is made once for a process, by all ranks in one order,
with its members in member order where torch can (`sort_ranks=False`); where it cannot, groups in another order than
ascending are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.ops.collective import Collective
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.errors import BackendError
from shardplan.execution.lower import View, group_of, members_of, parts, place_of, shape_of, view_of
from shardplan.execution.torch.pack import at, maker
from shardplan.execution.torch.steps import bind as bind_direct
from shardplan.execution.torch.sums import Bound, One, one_by_one
from shardplan.execution.torch.wire import TorchWire

Own = (AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter)  # ops for which gloo has a collective
SUMMED = ("f16", "bf16", "f32", "f64", "i8", "u8", "i32", "i64")  # dtypes that gloo reduces
_groups: dict[tuple[int, ...], Any] = {}  # process groups by ranks in member order, for the life of the process


def make_groups(program: Program, ranks: Mapping[int, int], timeout: float) -> None:
    """Make the process groups of a program's collectives; every rank calls this, with the same arguments.

    `ranks` says which rank stands in for a device id. Raises `BackendError` where torch cannot keep the member order.
    """
    ordered = "sort_ranks" in inspect.signature(dist.new_group).parameters
    options: dict[str, Any] = {"sort_ranks": False} if ordered else {}
    for _, op, operands in program_leaves(program):
        if not isinstance(op, Own):
            continue
        operand = operands[0]
        for places in operand.mesh.group_places(op.members(operand)).tolist():
            members = tuple(ranks[operand.mesh.devices[p]] for p in places)
            if len(members) < 2 or members in _groups:
                continue
            if not ordered and list(members) != sorted(members):
                raise BackendError(
                    f"{op.name}: this torch sorts the ranks of a group, so the member order {list(members)} is "
                    "not to be had with engine='gloo'; use engine='ring'"
                )
            _groups[members] = dist.new_group(
                list(members), timeout=timedelta(seconds=timeout), backend="gloo", **options
            )


def binder(ranks: Mapping[int, int], timeout: float) -> Callable[..., Bound]:
    """Return what binds steps to gloo's collectives; `ranks` by device id, waits of `timeout` seconds at most."""

    def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound:
        if not isinstance(op, Own):
            return bind_direct(op, operands, results, device)
        return one_by_one([_one(op, t, u, device, ranks, timeout) for t, u in zip(operands, results, strict=True)])

    return bind


def _one(op: Collective, t: TensorType, u: TensorType, device: int, ranks: Mapping[int, int], timeout: float) -> One:
    """The step of one operand; a group of one is left to the torch backend."""
    make = maker(u, device)
    members = members_of(op, u if isinstance(op, Broadcast) else t, device)
    if len(members) < 2:
        return _alone(bind_direct(op, [t], [u], device))
    if isinstance(op, AllReduce | Reduce | ReduceScatter) and t.dtype not in SUMMED:
        raise BackendError(f"{op.name} of {t}: gloo reduces {', '.join(SUMMED)} only; use engine='ring'")
    ids = tuple(ranks[d] for d in members)
    group, me = _groups[ids], members.index(device)
    before, after = shape_of(t, device), shape_of(u, device)
    p = parts(op, t, u, device) if isinstance(op, AllGather | AllToAll | ReduceScatter) else None
    gives, takes = _views(p.sends if p else (), members, before), _views(p.receives if p else (), members, after)
    for old, new in p.keeps if p else ():
        gives[me], takes[me] = view_of(before, old), view_of(after, new)
    largest = _largest(op, t, u, group_of(op, t, place) if (place := place_of(t, device)) is not None else [])

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        match op:
            case AllReduce():
                out.copy_(x)
                _wait(dist.all_reduce(out, _reduction(op.reduction), group, async_op=True), timeout)
            case Reduce():
                out.copy_(x)
                _wait(dist.reduce(out, ids[0], _reduction(op.reduction), group, async_op=True), timeout)
            case Broadcast():
                if me == 0:
                    out.copy_(x)
                _wait(dist.broadcast(_bytes(out), ids[0], group, async_op=True), timeout)
            case AllGather():
                blocks = [torch.zeros(largest, dtype=x.dtype) for _ in ids]
                mine = torch.zeros(largest, dtype=x.dtype)
                mine[: x.numel()] = x.view(-1)
                _wait(dist.all_gather([_bytes(b) for b in blocks], _bytes(mine), group, async_op=True), timeout)
                _unpack(blocks, takes, out)
            case ReduceScatter():
                addends = [torch.zeros(largest, dtype=x.dtype) for _ in ids]
                for addend, view in zip(addends, gives, strict=True):
                    if view is not None:
                        addend[: view.elements] = at(x, view).reshape(-1)
                total = torch.zeros(largest, dtype=x.dtype)
                _wait(dist.reduce_scatter(total, addends, _reduction(op.reduction), group, async_op=True), timeout)
                out.view(-1).copy_(total[: out.numel()])
            case _:
                width = x.itemsize
                sent = torch.cat([at(x, v).reshape(-1) if v else x.view(-1)[:0] for v in gives])
                came = torch.empty(sum(v.elements for v in takes if v), dtype=x.dtype)
                ins, outs = ([(v.elements if v else 0) * width for v in side] for side in (takes, gives))
                _wait(dist.all_to_all_single(_bytes(came), _bytes(sent), ins, outs, group, async_op=True), timeout)
                _unpack(came.split([n // width for n in ins]), takes, out)

    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        out = make(wire)
        yield  # before anything is sent: gloo's collective is started and waited for in one go
        call(x, out)
        return out

    return run


def _views(found: Sequence[tuple[int, Any]], members: Sequence[int], shape: tuple[int, ...]) -> list[View | None]:
    """By member, the part of an array of `shape` that goes to it or comes from it; None where there is none."""
    by_peer = dict(found)
    return [view_of(shape, by_peer[d]) if d in by_peer else None for d in members]


def _largest(op: Collective, t: TensorType, u: TensorType, places: Sequence[int]) -> int:
    """Elements of the largest block: gloo wants equal ones."""
    of = u if isinstance(op, ReduceScatter) else t
    return max((int(of.elements()[m]) for m in places), default=0)


def _alone(bound: Bound) -> One:
    def run(x: torch.Tensor, wire: TorchWire) -> Generator[None, None, torch.Tensor]:
        return (yield from bound([x], wire))[0]

    return run


def _unpack(blocks: Sequence[torch.Tensor], views: Sequence[View | None], out: torch.Tensor) -> None:
    for block, view in zip(blocks, views, strict=True):
        if view is not None:
            at(out, view).copy_(block[: view.elements].view(view.size))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _wait(work: Any, timeout: float) -> None:
    work.wait(timedelta(seconds=timeout))

"""The gloo engine: gloo's own collectives on real process groups, and the torch backend for everything else.

gloo has algorithms of its own: its reduce_scatter moves the traffic of an all-reduce, its reduce and broadcast are no
chains. Its messages are not ours to count or to predict. A group is made once for a process, by all ranks in one order,
with its members in member order where torch can (`sort_ranks=False`); where it cannot, groups in another order than
ascending are refused.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from shardplan.core.ops.collective import LIBRARY_DTYPES, Collective, moving
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.walk import program_leaves
from shardplan.errors import BackendError
from shardplan.execution.drive import Bound, Running
from shardplan.execution.lower import View, members_of, shape_of
from shardplan.execution.rank_rounds import rank_rounds
from shardplan.execution.torch.pack import at, maker
from shardplan.execution.torch.steps import bind as bind_direct
from shardplan.execution.torch.wire import TorchWire

_groups: dict[tuple[int, ...], Any] = {}  # process groups by ranks in member order, for the life of the process


@dataclass(frozen=True, slots=True)
class GlooCall:
    """One operand of a collective on one rank: its group, and by member what goes to it and comes from it."""

    group: Any
    ranks: tuple[int, ...]  # in member order
    me: int  # index of this rank among them
    reduction: Any  # of torch
    gives: list[View | None]  # parts of the operand
    takes: list[View | None]  # parts of the result
    largest: int  # elements of the largest part of a member: gloo wants equal ones
    timeout: timedelta

    def wait(self, work: Any) -> None:
        """Wait for a collective."""
        work.wait(self.timeout)


Do = Callable[[GlooCall, torch.Tensor, torch.Tensor], None]  # of an operand, into the result


class GlooCollective(NamedTuple):
    """A collective of gloo."""

    do: Do
    reduces: bool = False


def _all_reduce(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    c.wait(dist.all_reduce(out, c.reduction, c.group, async_op=True))


def _reduce(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    c.wait(dist.reduce(out, c.ranks[0], c.reduction, c.group, async_op=True))


def _broadcast(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    if c.me == 0:
        out.copy_(x)
    c.wait(dist.broadcast(_bytes(out), c.ranks[0], c.group, async_op=True))


def _all_gather(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    blocks = [torch.zeros(c.largest, dtype=x.dtype) for _ in c.ranks]
    mine = torch.zeros(c.largest, dtype=x.dtype)
    mine[: x.numel()] = x.view(-1)
    c.wait(dist.all_gather([_bytes(b) for b in blocks], _bytes(mine), c.group, async_op=True))
    _unpack(blocks, c.takes, out)


def _reduce_scatter(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    addends = [torch.zeros(c.largest, dtype=x.dtype) for _ in c.ranks]
    for addend, view in zip(addends, c.gives, strict=True):
        if view is not None:
            addend[: view.elements] = at(x, view).reshape(-1)
    total = torch.zeros(c.largest, dtype=x.dtype)
    c.wait(dist.reduce_scatter(total, addends, c.reduction, c.group, async_op=True))
    out.view(-1).copy_(total[: out.numel()])


def _all_to_all(c: GlooCall, x: torch.Tensor, out: torch.Tensor) -> None:
    width = x.itemsize
    sent = torch.cat([at(x, v).reshape(-1) if v else x.view(-1)[:0] for v in c.gives])
    came = torch.empty(sum(v.elements for v in c.takes if v), dtype=x.dtype)
    ins, outs = ([(v.elements if v else 0) * width for v in side] for side in (c.takes, c.gives))
    c.wait(dist.all_to_all_single(_bytes(came), _bytes(sent), ins, outs, c.group, async_op=True))
    _unpack(came.split([n // width for n in ins]), c.takes, out)


NATIVE: dict[type[Op], GlooCollective] = {  # all else goes as its lowering says
    AllReduce: GlooCollective(_all_reduce, reduces=True),
    Reduce: GlooCollective(_reduce, reduces=True),
    Broadcast: GlooCollective(_broadcast),
    AllGather: GlooCollective(_all_gather),
    ReduceScatter: GlooCollective(_reduce_scatter, reduces=True),
    AllToAll: GlooCollective(_all_to_all),
}


def _native(op: Op, t: TensorType) -> GlooCollective | None:
    """The collective of gloo for an operand, where it has one for its dtype."""
    found = NATIVE.get(type(op))
    return None if found is None or (found.reduces and t.dtype not in LIBRARY_DTYPES) else found


def make_groups(program: Program, ranks: Mapping[int, int], timeout: float) -> None:
    """Make the process groups of a program's collectives; every rank calls this, with the same arguments.

    `ranks` says which rank stands in for a device id. Raises `BackendError` where torch cannot keep the member order.
    """
    ordered = "sort_ranks" in inspect.signature(dist.new_group).parameters
    options: dict[str, Any] = {"sort_ranks": False} if ordered else {}
    for _, leaf, operands in program_leaves(program):
        op = moving(leaf)
        if op is None or type(op) not in NATIVE:
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


def binder(ranks: Mapping[int, int], timeout: float) -> Callable[..., Bound[TorchWire]]:
    """Return what binds steps to gloo's collectives; `ranks` by device id, waits of `timeout` seconds at most."""

    def bind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int) -> Bound[TorchWire]:
        found = moving(op)
        if found is None or type(op) not in NATIVE:
            return bind_direct(op, operands, results, device)
        steps = [_one(found, t, u, device, ranks, timeout) for t, u in zip(operands, results, strict=True)]

        def run(arrays: list[torch.Tensor], wire: TorchWire) -> Running:
            out: list[torch.Tensor] = []
            for step, x in zip(steps, arrays, strict=True):
                out += yield from step([x], wire)
            return out

        return run

    return bind


def _one(
    op: Collective, t: TensorType, u: TensorType, device: int, ranks: Mapping[int, int], timeout: float
) -> Bound[TorchWire]:
    """The step of one operand; a group of one, and what gloo has no collective for, go as the lowering says."""
    native = _native(op, t)
    members = members_of(op, t, device) or members_of(op, u, device)
    if native is None or len(members) < 2:
        return bind_direct(op, [t], [u], device)
    make, ids = maker(u, device), tuple(ranks[d] for d in members)
    gives, takes = _parts(replace(op, chunks=1), t, u, device)  # pyright: ignore[reportCallIssue]
    blocks = u if native.reduces else t
    call = GlooCall(
        _groups[ids],
        ids,
        members.index(device),
        getattr(dist.ReduceOp, getattr(op, "reduction", "sum").upper()),
        [gives.get(d) for d in members],
        [takes.get(d) for d in members],
        max(math.prod(shape_of(blocks, d)) for d in members),
        timedelta(seconds=timeout),
    )

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Generator[None, None, list[torch.Tensor]]:
        out = make(wire)
        yield  # before anything is sent: gloo's collective is started and waited for in one go
        native.do(call, arrays[0], out)
        return [out]

    return run


def _parts(op: Collective, t: TensorType, u: TensorType, device: int) -> tuple[dict[int, View], dict[int, View]]:
    """By device id, what the first round gives of the operand, and takes of the result; the own part is copied."""
    gives: dict[int, View] = {}
    takes: dict[int, View] = {}
    found = rank_rounds(op, [t], [u], device)
    for one in itertools.islice(found.rounds(), 1) if found else ():
        copies = [(c.source, c.target) for c in (*one.meanwhile, *one.then) if c.source and c.source.buffer == "x0"]
        gives |= {peer: piece.views[0] for peer, piece in (*one.puts, *((device, x) for x, _ in copies))}
        takes |= {peer: piece.views[0] for peer, piece in (*one.takes, *((device, y) for _, y in copies))}
    return gives, takes


def _unpack(blocks: Sequence[torch.Tensor], views: Sequence[View | None], out: torch.Tensor) -> None:
    for block, view in zip(blocks, views, strict=True):
        if view is not None:
            at(out, view).copy_(block[: view.elements].view(view.size))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)

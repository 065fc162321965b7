"""Collectives that the library of a process group runs itself: on which steps, in which groups, and what is packed.

Which steps these are, and how many calls, `core.library_call` says. A call runs in a process group of the members in
member order; such groups are made once (`group_state`). All else is point-to-point messages: `steps.bind`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardplan.core.library_call import LibraryCall, library_call
from shardplan.core.messages import at_root
from shardplan.core.op import Op
from shardplan.core.tensor import Box, TensorType
from shardplan.execution.async_executor import Bound, Running
from shardplan.execution.lower import View, box_elements, chunk_of, flat_boxes, group_of, place_of, view_of
from shardplan.execution.record import NativeCall
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.execution.torch.pack import Spot, SpotCopy, copy, cut_spot, flat, maker, merge_copies, spot_view
from shardplan.execution.torch.wire import TorchWire

Call = Callable[[torch.Tensor, torch.Tensor, Any, Any], Any]  # of output, input, reduction and group; returns the work


def _first_rank(group: Any) -> int:
    return dist.get_process_group_ranks(group)[0]


# Newer releases call these by other names, and warn of the old ones.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]

NATIVE: dict[str, Call] = {  # by the kind of a `LibraryCall`
    "all_gather": lambda y, x, r, g: _GATHER(y, x, group=g, async_op=True),
    "all_to_all": lambda y, x, r, g: dist.all_to_all_single(y, x, group=g, async_op=True),
    "reduce_scatter": lambda y, x, r, g: _SCATTER(y, x, r, group=g, async_op=True),
    "all_reduce": lambda y, x, r, g: dist.all_reduce(y, r, group=g, async_op=True),
    "reduce": lambda y, x, r, g: dist.reduce(y, _first_rank(g), r, group=g, async_op=True),
    "broadcast": lambda y, x, r, g: dist.broadcast(y, _first_rank(g), group=g, async_op=True),
}


class GroupCall(NamedTuple):
    """One call on one rank: the runs that go in and come out, what is packed before, and what is unpacked after."""

    into: Spot
    out: Spot
    packs: tuple[SpotCopy, ...]
    unpacks: tuple[SpotCopy, ...]


def bind_native(
    op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int
) -> Bound[TorchWire] | None:
    """Return the step of the device of that id as calls of the library, or None where no collective of it fits.

    All members find the same, since all look at the types alone.
    """
    native = library_call(op, operands)
    if native is None:
        return None
    t, makers = operands[0], [maker(u, device) for u in results]
    place = place_of(t, device)
    places = [] if place is None else group_of(op, t, place)
    if place is None or not at_root(t)[places].any():  # nobody of its group has anything
        return _make_results(makers)
    ranks = tuple(t.mesh.devices[m] for m in places)
    if native.in_result:
        makers = [maker(results[0], device, len(places) * int(native.slots[0][place]))]
    calls = list(_calls(native, op.chunks, operands, results, places, place))
    room: dict[str, tuple[int, torch.dtype]] = {}
    for spot in (spot for one in calls for spot in (one.into, one.out) if spot.buffer[0] not in "xy"):
        n = spot.view.elements
        room[spot.buffer] = max(n, room.get(spot.buffer, (0,))[0]), torch_dtype(spot.dtype)
    starts: list[SpotCopy] = []
    if native.in_place:
        for k, u in enumerate(results):
            whole = Spot(f"x{k}", u.dtype, view_of(u.local_shape(place), tuple((0, n) for n in u.local_shape(place))))
            starts.append(SpotCopy(whole, whole._replace(buffer=f"y{k}")))
    call = NATIVE[native.kind]
    reduction = getattr(dist.ReduceOp, (operands[0].layout.reduction or "sum").upper())
    received, sent = (int(x[place]) for x in (op.received_bytes(*operands), op.sent_bytes(*operands)[1]))

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Running:
        out = [make(wire) for make in makers]
        held = {f"x{k}": x for k, x in enumerate(arrays)} | {f"y{k}": y for k, y in enumerate(out)}
        held |= {name: wire.empty(n, dtype) for name, (n, dtype) in room.items()}
        copy(held, starts)
        group = wire.group_of(ranks)
        for number, one in enumerate(calls):
            copy(held, one.packs)
            y, x = spot_view(held, one.out), spot_view(held, one.into)
            if not native.folds:  # bytes are bytes
                y, x = y.view(torch.uint8), x.view(torch.uint8)
            wire.calls.append(NativeCall(native.kind, ranks, x.nbytes))
            work = call(y, x, reduction, group)
            if not number:
                yield  # the first call is under way; next it is waited for
            wire.wait_call(ranks, work)
            copy(held, one.unpacks)
        wire.received += received
        wire.sent += sent
        return out

    return run


def _make_results(makers: Sequence[Callable[[TorchWire], torch.Tensor]]) -> Bound[TorchWire]:
    """A step of which a device has only its results, without meaning."""

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Running:
        yield from ()
        return [make(wire) for make in makers]

    return run


def _calls(
    native: LibraryCall,
    chunks: int,
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    places: Sequence[int],
    me: int,
) -> Iterator[GroupCall]:
    """Yield the calls of the member at place `me`: for the operands that one can take, and for a chunk of each part."""
    before, after = (_Side("x", operands, results, me), _Side("y", results, operands, me))
    if native.in_place:
        before = after
    for numbers, chunk in itertools.product(native.packs(operands), range(chunks)):
        # Where there are slots, whoever has no part of an array goes through the call too.
        given, taken = (
            [
                Slot(
                    side.spots(k, m, (chunk, chunks)), int(native.slots[k][me]) if native.slots else None, side.dtype(k)
                )
                for m in (places if each else (None,))
                for k in numbers
            ]
            for side, each in ((before, native.gives), (after, native.gets))
        )
        if any(one.elements for one in given):
            into, packs = _run("in", given)
            # What runs in place comes out of the buffer that it goes into.
            out, unpacks = _run("in" if native.in_place else "out", taken, back=True)
            if native.in_result:
                out, unpacks = out._replace(buffer="y0"), ()
            yield GroupCall(into, out, packs, unpacks)


class _Side(NamedTuple):
    """The shards of a device at place `me` before, or after, a step, and the types on the other side of it."""

    letter: str
    own: Sequence[TensorType]
    other: Sequence[TensorType]
    me: int

    def dtype(self, k: int) -> str:
        """Return the dtype of a shard."""
        return self.own[k].dtype

    def spots(self, k: int, member: int | None, chunk: tuple[int, int]) -> list[Spot]:
        """Return a chunk of the part of shard `k` that a member has on the other side; of all of it without one."""
        t = self.own[k]
        low, high = t.boxes()[self.me].T
        start, stop = low, high
        if member is not None:
            there = self.other[k].boxes()[member].T
            start, stop = np.maximum(low, there[0]), np.minimum(high, there[1])
        box: Box = tuple(zip((start - low).tolist(), (stop - low).tolist(), strict=True))
        parts = flat_boxes(box, *chunk_of(box_elements(box), *chunk))
        return [Spot(f"{self.letter}{k}", t.dtype, view_of(t.local_shape(self.me), part)) for part in parts]


class Slot(NamedTuple):
    """Parts that lie one behind the other in a call, and the elements that are theirs; None for what they have."""

    parts: Sequence[Spot]
    asked: int | None
    dtype: str

    @property
    def elements(self) -> int:
        """The elements of the slot."""
        return sum(part.view.elements for part in self.parts) if self.asked is None else self.asked


def _run(name: str, slots: Sequence[Slot], *, back: bool = False) -> tuple[Spot, tuple[SpotCopy, ...]]:
    """The run of the slots as they stand, or of a staging buffer into which, or `back` from which, parts are copied."""
    parts = [part for one in slots for part in one.parts]
    filled = all(one.elements == sum(part.view.elements for part in one.parts) for one in slots)
    at = parts[0].view.offset if filled else 0
    for part in parts if filled else ():
        if part.buffer != parts[0].buffer or not part.view.contiguous or part.view.offset != at:
            break
        at += part.view.elements
    else:
        if filled:
            return flat(parts[0], at - parts[0].view.offset), ()
    dtype = slots[0].dtype
    copies: list[SpotCopy] = []
    at = 0
    for one in slots:
        ends = cut_spot(Spot(f"{name} {dtype}", dtype, View((one.elements,), (1,), at)), one.parts)
        copies += map(SpotCopy, *((ends, one.parts) if back else (one.parts, ends)))
        at += one.elements
    return Spot(f"{name} {dtype}", dtype, View((at,), (1,), 0)), merge_copies(copies)

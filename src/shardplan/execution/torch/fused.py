"""Fused ops of a program on CPUs: the operators of `shardplan.fused`, and the heaps of the groups that run them.

A heap is made when ranks first come to a fused op together, and another one where the first has no room left; its
memory has no name any more once all have mapped it, so that nothing is left of it behind the process.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardplan.core.nested import Nested
from shardplan.core.ops.fused import as_fused
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.async_executor import Bound, wrap_blocking
from shardplan.execution.lower import members_of
from shardplan.execution.torch.group_state import GroupState
from shardplan.execution.torch.wire import TorchWire
from shardplan.fused.deciding.kernels import FusedCall, fused_call
from shardplan.fused.heap.symmetric import SymmetricHeap

LEAST_HEAP = 16 << 20  # bytes
WORDS = 1 << 16  # bytes of a heap that are its own


@dataclass(slots=True)
class GroupHeap:
    """A heap of a group of ranks, and how much of it is promised to ops."""

    heap: SymmetricHeap
    promised: int = 0


_heaps: dict[tuple[Any, tuple[int, ...]], GroupHeap] = {}  # by process group, and ranks in member order


def bind_fused(
    op: Nested, operands: Sequence[TensorType], results: Sequence[TensorType], device: int
) -> Bound[TorchWire] | None:
    """Return the step of the device of that id as one kernel; None where there is nobody to send to."""
    one = as_fused(op)
    ranks = members_of(op, operands[0], device) if one is not None else ()
    if one is None or len(ranks) < 2:
        return None
    call, me = fused_call(one, len(ranks)), ranks.index(device)
    known: dict[Any, SymmetricHeap] = {}

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> list[torch.Tensor]:
        if wire.device.type != "cpu":
            raise BackendError(f"{one.name} on {wire.device}; legal here are CPUs, or the program's decomposition")
        group = wire.watch.state.group
        if group not in known or known[group].closed or (group, ranks) not in _heaps:
            known.clear()
            known[group] = _heap(wire.watch.state, ranks, call)
        try:
            y = call.run(known[group], wire.watch.timeout, arrays)
        except BaseException:  # on all ranks: a heap that failed is of no use, and the next run makes another
            _heaps.pop((group, ranks), None)
            raise
        wire.received += call.received[me]
        wire.sent += call.received[me]
        return [y]

    return wrap_blocking(run)


def group_heaps() -> list[SymmetricHeap]:
    """Return the heaps that are open: what their operators keep says how often they ran."""
    return [one.heap for one in _heaps.values() if not one.heap.closed]


def _heap(state: GroupState, ranks: tuple[int, ...], call: FusedCall) -> SymmetricHeap:
    """A heap of some ranks with room for an op; collective where there is none yet."""
    key = state.group, ranks
    found = _heaps.get(key)
    if found is None or found.heap.closed or found.promised + call.nbytes > found.heap.nbytes:
        group = state.members(ranks)

        def exchange(mine: bytes) -> list[bytes]:
            said: list[bytes] = [b""] * len(ranks)
            dist.all_gather_object(said, mine, group)
            return said

        name = f"shardplan {state.group.group_name} {' '.join(map(str, ranks))}"
        found = _heaps[key] = GroupHeap(
            SymmetricHeap.create(max(LEAST_HEAP, 2 * call.nbytes), "shm", exchange, name), WORDS
        )
    found.promised += call.nbytes
    return found.heap


@atexit.register
def _leave() -> None:
    for one in _heaps.values():
        with contextlib.suppress(Exception):
            one.heap.close()

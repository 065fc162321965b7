"""The ops of a program bound to one rank of torch.distributed: the interpreter of lowerings, and compute ops.

Everything about a step that follows from types is worked out once, in `bind_step`; a run only makes views, posts
messages and waits. A bound step is a generator: it yields nothing, once its first messages are under way, so that a
caller may do something else before it goes on; whoever resumes it is then blocked in its waits. Collectives are
composed from point-to-point messages, so every rank receives what the op says.

Messages between two ranks meet in the order in which they are posted: there is one tag for a run. So all ranks go
through the rounds and element widths of a step in one order, which follows from its lowering. Entering a stage, the
rounds up to one that closes, a rank posts the receives of all its rounds; leaving it, it waits for all its sends. Where
messages go in batches, which end as a whole, a round posts its own receives and sends as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from shardplan.core.library_call import library_call
from shardplan.core.op import Op
from shardplan.core.tensor import TensorType
from shardplan.execution.async_executor import Bound, Running
from shardplan.execution.rank_rounds import RankKernel, RankRound, RankRounds, rank_rounds
from shardplan.execution.torch.compute import bind_compute, work
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.execution.torch.native import bind_native
from shardplan.execution.torch.pack import Packing, SpotRound, copy, landings, maker, spot_view
from shardplan.execution.torch.wire import Pending, TorchWire

KernelRun = Callable[[Mapping[str, torch.Tensor], RankKernel, torch.device], None]
MOST_KEPT = 256  # stages of a step that are worked out in advance; of more, each is made when its turn comes


def bind_step(
    op: Op,
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    device: int,
    algorithm: str = "",
    kernel: KernelRun = work,
) -> Bound[TorchWire]:
    """Return the step of the device of that id, a movement op by that algorithm where it has it.

    `kernel` runs what is computed between messages.
    """
    found = rank_rounds(op, operands, results, device, algorithm)
    if found is None:
        return bind_compute(op, operands, results, device)
    makers = [maker(u, device) for u in results]
    native = cache(lambda: bind_native(op, operands, results, device))
    messages = cache(lambda: _bind_messages(found, len(operands), len(results)))
    if library_call(op, operands) is None:  # else no message is ever needed, perhaps
        messages()

    def run(arrays: list[torch.Tensor], wire: TorchWire) -> Running:
        if wire.native and (called := native()) is not None:
            return (yield from called(arrays, wire))
        bound = messages()
        out = [make(wire) for make in makers]
        held = {f"x{k}": x for k, x in enumerate(arrays)} | {f"y{k}": y for k, y in enumerate(out)}
        held |= {name: wire.empty(n, dtype) for name, n, dtype in bound.staging}
        started = False
        for stage in bound.stages():
            ahead = () if wire.batched else tuple(m for one in stage for m in one.takes)
            ins: deque[tuple[int, Any]] = deque()
            outs: Pending = []
            for one in stage:
                copy(held, one.packs)
                coming = one.takes if wire.batched else ahead
                ahead = ()
                posted = wire.post(
                    [(m.peer, spot_view(held, m.run)) for m in coming],
                    [(m.peer, spot_view(held, m.run)) for m in one.sends],
                )
                ins += posted[0]
                outs += posted[1]
                copy(held, one.meanwhile)
                for computed in one.kernels:
                    kernel(held, computed, wire.device)
                if not started and (ins or outs):
                    started = True
                    yield  # the first messages are under way in both directions; next they are waited for
                for m in one.takes:
                    wire.wait_one(*ins.popleft())
                    copy(held, () if wire.batched else m.copies)
                copy(held, (*(one.unpacks if wire.batched else ()), *one.then))
            wire.wait(outs)
        return out

    return run


class _BoundMessages(NamedTuple):
    """What a step sends and receives: its stages, in order, and the staging buffers by name."""

    stages: Callable[[], Iterable[tuple[SpotRound, ...]]]
    staging: list[tuple[str, int, torch.dtype]]


def _bind_messages(found: RankRounds, operands: int, results: int) -> _BoundMessages:
    """Work out the messages of a step of so many operands and results: where they are, since a library may do it."""
    few = list(islice(_stages(found.rounds()), MOST_KEPT + 1))

    def again() -> Iterable[list[RankRound]]:
        return few if len(few) <= MOST_KEPT else _stages(found.rounds())

    ends = {f"{letter}{k}" for letter, side in (("x", operands), ("y", results)) for k in range(side)}
    staged = {name: shape for name, shape in found.shapes.items() if name not in ends}
    packing = Packing(staged, found.dtypes, landings(again(), staged))
    stages = map(packing.stage, again())
    kept = tuple(stages) if len(few) <= MOST_KEPT else ()
    deque(stages, maxlen=0)  # those that are not kept are made once, too: the largest says how much is staged
    staging = [(name, n, torch_dtype(packing.dtypes[name])) for name, n in packing.room.items()]
    return _BoundMessages(lambda: kept or map(packing.stage, again()), staging)


def _stages(rounds: Iterable[RankRound]) -> Iterator[list[RankRound]]:
    """The rounds up to, and with, each that closes."""
    stage: list[RankRound] = []
    for one in rounds:
        stage.append(one)
        if one.closes:
            yield stage
            stage = []
    if stage:
        yield stage

"""One value made of the values of all ranks: up a binomial tree, joined on the way, and down again.

Every rank sends and receives at most log2(ranks) messages each way, over the wire of a run, and none of them through
the store. The values are pickled, as `torch.distributed.all_gather_object` does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardplan.execution.torch.clock import get, put
from shardplan.execution.torch.wire import TorchWire

T = TypeVar("T")


def united(wire: TorchWire, ranks: Sequence[int], rank: int, value: T, join: Callable[[T, T], T]) -> T:
    """Return the values of all ranks joined in the order of `ranks`, the same on each of them.

    Args:
        wire: The wire of this run; its waits are bounded.
        ranks: Every rank that calls, in one order.
        rank: This one.
        value: What this rank brings; it must pickle.
        join: Makes one of two, associatively; the first is that of the ranks before.

    Raises:
        ShardplanError: What `wire` makes of a rank that does not come.
    """
    place, step = ranks.index(rank), 1
    while step < len(ranks) and not place & step:
        if place + step < len(ranks):
            value = join(value, pickle.loads(get(wire, ranks[place + step])))
        step *= 2
    if place:
        parent = ranks[place - step]
        put(wire, parent, pickle.dumps(value))
        value = pickle.loads(get(wire, parent))
    data = b""
    while step > 1:
        step //= 2
        if place + step < len(ranks):
            data = data or pickle.dumps(value)
            put(wire, ranks[place + step], data)
    return value

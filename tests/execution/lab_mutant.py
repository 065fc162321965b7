"""The lab's host with a changed engine: `python lab_mutant.py MUTATION FD`."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shardplan.core.group_rounds import Of, gather
from shardplan.core.lowering import Group, Region, Round
from shardplan.core.ops import movement, reduction
from shardplan.execution.lab import host
from shardplan.execution.torch import pack


def gathers(changed: Callable[[Group, Region, Of], tuple[Group, Region, Of]]) -> None:
    """Let every gather be another one."""

    def broken(group: Group, own: Region, block: Of, chunks: int, algorithm: str) -> Iterator[Round]:
        yield from gather(*changed(group, own, block), chunks, algorithm)

    for room in (movement, reduction):
        room.gather = broken


def drop_chunk(group: Group, own: Region, block: Of) -> tuple[Group, Region, Of]:
    """The last block of a ring never travels."""
    last = group.size - 1
    return group, own.restrict(group.me != last), lambda k: block(k).restrict(np.asarray(k) % group.size != last)


def swap_order(group: Group, own: Region, block: Of) -> tuple[Group, Region, Of]:
    """A ring whose members stand in another order than the group's: the result is right, its way is not."""
    order = np.arange(group.size)
    order[1:3] = order[1:3][::-1]
    swapped: Any = copy.copy(group)
    swapped.me = order[group.me]
    swapped.place = lambda k: group.place(order[np.asarray(k) % group.size])
    return swapped, own, lambda k: block(order[np.asarray(k) % group.size])


def add_twice() -> None:
    """An addend counts twice."""
    fold = pack.fold

    def twice(total: torch.Tensor, addend: torch.Tensor, how: str) -> None:
        fold(total, addend, how)
        fold(total, addend, how)

    pack.fold = twice


if __name__ == "__main__":
    {
        "drop": lambda: gathers(drop_chunk),
        "swap": lambda: gathers(swap_order),
        "twice": add_twice,
    }[sys.argv.pop(1)]()
    host.main()

"""The lab's host with a broken engine: `python lab_mutant.py MUTATION FD`."""

import sys

import torch

from shardplan.execution.lab import host, ring


def drop_chunk() -> None:
    """The last block of a ring never travels."""
    whole = ring.pass_on

    def pass_on(blocks, members, me, wire):  # noqa: ANN
        last = len(blocks) - 1
        short = [b[:0] if k == last else b for k, b in enumerate(blocks)]
        yield from whole(short, members, me, wire)

    ring.pass_on = pass_on


def swap_order() -> None:
    """A ring whose members stand in another order than the group's: the result is right, its way is not."""
    whole = ring.pass_on

    def pass_on(blocks, members, me, wire):  # noqa: ANN
        order = [0, 2, 1, *range(3, len(members))] if len(members) > 2 else list(range(len(members)))
        yield from whole([blocks[k] for k in order], [members[k] for k in order], order.index(me), wire)

    ring.pass_on = pass_on


def add_twice() -> None:
    """An addend counts twice."""
    fold = ring.fold

    def twice(total: torch.Tensor, addend: torch.Tensor, reduction: str) -> None:
        fold(total, addend, reduction)
        fold(total, addend, reduction)

    ring.fold = twice


if __name__ == "__main__":
    {"drop": drop_chunk, "swap": swap_order, "twice": add_twice}[sys.argv.pop(1)]()
    host.main()

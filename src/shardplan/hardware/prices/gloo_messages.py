"""The messages of which gloo's collectives are made, as torch calls them: who sends how many bytes to whom, and when.

Members are numbered in the order of the group; a reduction's root and a broadcast's is member 0.

Source: pytorch/gloo 70dc360, `gloo/{allgather,allreduce,alltoall,broadcast,reduce}.cc`; pytorch/pytorch
`torch/csrc/distributed/c10d/ProcessGroupGloo.cpp`, by which a reduce_scatter is an all_reduce of all its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Ints = np.ndarray
SEGMENT = 2**20  # bytes that a ring passes on at once, at most
IN_FLIGHT = 2  # rounds of a ring that are under way at once


class GlooPart(NamedTuple):
    """Rounds of messages, after which a member waits for all it has sent; int64 [n, 3]: sender, receiver, bytes."""

    rounds: list[Ints]
    in_flight: int = 1  # before a round, what came with the one so many rounds before is waited for


def _round(sender: Ints, receiver: Ints, nbytes: Ints | int) -> Ints:
    found = np.stack(np.broadcast_arrays(sender, receiver, nbytes), axis=1)
    return found[found[:, 2] > 0]


def _ring(q: int, nbytes: int, size: int, each: int, start: int, rounds: int) -> GlooPart:
    """Segments, `each` a member, passed on from every member to the one before, from that of member `start` on."""
    me = np.arange(q)
    begins = (((me + start) * each + i) % (q * each) * size for i in range(rounds))
    return GlooPart([_round(me, (me - 1) % q, np.minimum(size, nbytes - at)) for at in begins], IN_FLIGHT)


def _all_reduce(q: int, nbytes: int, width: int) -> Iterator[GlooPart]:
    """A ring that adds, then one that passes the sums on."""
    most = width * max(1, SEGMENT // width)
    each = max(-(-nbytes // (most * q)), 2)
    size = -(-nbytes // (q * each * width)) * width
    for start in (1, 0):
        yield _ring(q, nbytes, size, each, start, (q - 1) * each)


def _reduce(q: int, nbytes: int, width: int) -> Iterator[GlooPart]:
    """A ring that adds, which goes on for a few segments too many; then the sums, all at once, to the root."""
    size = -(-min(-(-nbytes // (2 * q)), width * (SEGMENT // width)) // width) * width
    each = max(-(-nbytes // (size * q)), 2)
    yield _ring(q, nbytes, size, each, 1, q * each - 2)
    me = np.arange(1, q)
    yield GlooPart([_round(me, np.zeros_like(me), np.minimum(each * size, nbytes - me * each * size))])


def _all_gather(q: int, nbytes: int, width: int) -> Iterator[GlooPart]:
    """A ring in which every piece goes on in two halves."""
    me, halves = np.arange(q), (nbytes // 2, nbytes - nbytes // 2)
    yield GlooPart([_round(me, (me + 1) % q, halves[i % 2]) for i in range(2 * (q - 1))], IN_FLIGHT)


def _all_to_all(q: int, nbytes: int, width: int) -> Iterator[GlooPart]:
    """Everything at once."""
    me, there = np.tile(np.arange(q), q - 1), np.repeat(np.arange(1, q), q)
    yield GlooPart([_round(me, (me + there) % q, nbytes // q)])


def _broadcast(q: int, nbytes: int, width: int) -> Iterator[GlooPart]:
    """A binomial tree: who has it sends it on, without waiting, to one member after another twice as far."""
    doubled = [np.arange(min(1 << k, q - (1 << k))) for k in range((q - 1).bit_length())]
    yield GlooPart([_round(me, me + (1 << k), nbytes) for k, me in enumerate(doubled)])


# By the kind of a collective, for `q` members that put in so many bytes of elements of so many bytes each.
GLOO_MESSAGES: dict[str, Callable[[int, int, int], Iterator[GlooPart]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}

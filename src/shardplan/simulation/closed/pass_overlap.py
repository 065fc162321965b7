"""What a pass takes while parameters are gathered, and gradients reduced, on a stream beside that of kernels.

Both streams run in the order of issue, and no host waits: a part's parameters are gathered as soon as the stream is
free, its kernels start once they are there, and its gradients are reduced once they are made. The next layer's gather
is issued before the gradients of the layer before it are reduced (PyTorch FSDP, arXiv 2304.11277, section 3.3.2; and so
are the loops of jobs, `strategy.partition`). Layers of a run are alike, so that the last of them ends on one of a few
paths: all kernels behind the first gather, or everything that moves and one layer's kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Floats = np.ndarray


class PassWork(NamedTuple):
    """Seconds of each part of a pass, [runs + 2, n]: of its kernels, and of what moves before and behind them.

    `unread` are of those of its kernels that come first and read no parameter: a loss has its own gradient while those
    of the head are gathered.
    """

    kernels: Floats
    gathered: Floats
    reduced: Floats
    unread: Floats = np.zeros((1, 1))


# Processors that a collective's kernel keeps while it runs: a block each for so many channels (NCCL's logs of nodes
# with switches, "Channel 23/24", NVIDIA/nccl-tests issue 100). No block of a product or of attention fits beside one;
# what only streams loses nothing. DeepSeek-V3 (arXiv 2412.19437, section 3.2.2) gives messages 20 of 132. Of a device
# with few of them collectives take half at most: kernels beside them go on.
CHANNELS = 24


def beside_moves(work: PassWork, slowed: Floats, processors: int, keeps: int = CHANNELS) -> PassWork:
    """Return a pass whose kernels have fewer processors for as long as a collective runs beside them.

    Args:
        work: What each part takes by itself.
        slowed: Of its kernels' seconds those that all processors are needed for, [runs + 2, n].
        processors: Those of a device; 0 where they are not known, and nothing is lost.
        keeps: Those that a collective keeps.

    >>> row = np.array([[1.0]])
    >>> found = beside_moves(PassWork(row, row / 2, row * 0), row, 96)
    >>> float(found.kernels[0, 0])
    1.125
    """
    kept = min(keeps / processors, 0.5) if processors else 0.0
    lost = np.divide(kept * slowed, work.kernels, out=np.zeros_like(work.kernels), where=work.kernels > 0)
    busy = np.minimum(work.gathered + work.reduced, work.kernels / (1 - lost))
    return work._replace(kernels=work.kernels + lost * busy)


def pass_seconds(counts: Floats, work: PassWork, lag: Floats, *, backward: bool) -> tuple[Floats, Floats]:
    """Return the seconds of a pass's kernels in each kind of chunk, and how much later its moves end, [kinds, n] each.

    Args:
        counts: Layers of each run of a kind, what is before all of them, and behind, [runs + 2, kinds, n].
        work: What each takes.
        lag: How long after the pass begins the stream of moves is free, below 0 where it was before, [kinds, n].
        backward: Whether the pass goes from the last part to the first.

    >>> layers = np.array([[[3.0]], [[0.0]], [[0.0]]])
    >>> rows = [np.array([[x], [0.0], [0.0]]) for x in (2.0, 1.0, 1.5)]
    >>> found = pass_seconds(layers, PassWork(*rows), np.zeros((1, 1)), backward=True)
    >>> [float(x[0, 0]) for x in found]
    [7.5, 1.5]
    """
    runs = len(counts) - 2
    parts = [runs, *range(runs), runs + 1]  # what is before the layers stands behind them in arrays
    done, free = np.zeros_like(lag), lag
    for part in reversed(parts) if backward else parts:
        count, (kernels, gathered, reduced) = counts[part], (x[part] for x in work[:3])
        moves, reduces, unread = gathered > 0, reduced > 0, work.unread[part % len(work.unread)]
        there = free + gathered
        first = np.where(moves, np.maximum(done, there - unread), done) + kernels
        # Behind the second gather comes what the first layer left to reduce, and then what the others move.
        second = np.where(reduces, np.maximum(there + gathered, first), there + gathered)
        between = np.maximum(count - 2, 0) * (gathered + reduced)
        last = first + np.maximum(count - 1, 0) * kernels
        last = np.where(moves & (count > 1), np.maximum(last, second + between + kernels), last)
        before = np.where(count > 1, second + between + reduced, there)
        moved = np.where(reduces, np.maximum(last, before) + reduced, there + np.maximum(count - 1, 0) * gathered)
        done, free = np.where(count > 0, last, done), np.where(count > 0, moved, free)
    return done, free - done


def waiting_seconds(
    counts: Floats, forward: PassWork, backward: PassWork, taken: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Return what each pass takes less than `taken` on a rank that waits for it, forward and back, [kinds, n] each.

    A rank that waits for another has gathered the first layer's parameters by then, and what moved behind the pass
    before has ended.
    """
    found: list[Floats] = []
    for work, back, seconds in zip((forward, backward), (False, True), taken, strict=True):
        ahead = pass_seconds(counts, work, -work.gathered.max(axis=0) + np.zeros(counts.shape[1:]), backward=back)[0]
        found.append(np.maximum(0.0, seconds - ahead))
    return found[0], found[1]


class PassOrder(NamedTuple):
    """Which pass comes behind which, [n] each.

    A backward pass follows its forward pass, what it leaves for later follows that, then comes the next microbatch;
    with `at_once` all forward passes are before all that is backward; `apart` is the part of microbatches of which what
    is for later follows its like, and so do forward passes. Where not `steady` a rank waits for others, and nothing is
    in the way of another microbatch.
    """

    at_once: Floats
    apart: Floats
    steady: Floats


def settled_seconds(
    counts: Floats, forward: PassWork, backward: PassWork, later: PassWork, order: PassOrder
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return what the passes of a microbatch take where one follows another, [kinds, n] each; and what is left, [n].

    What `later` does are gradients of parameters, where a schedule has them apart. Moves that take longer than kernels,
    pass after pass, are what a pass takes; left is how long they go on behind the last, less what is in the way of no
    first one.
    """
    passes = forward, backward, later
    by_turns = _settled(counts, passes, order, apart=False)
    if not order.apart.any():
        return by_turns
    behind_like = _settled(counts, passes, order, apart=True)
    taken, back, weight, left = (x + order.apart * (y - x) for x, y in zip(by_turns, behind_like, strict=True))
    return taken, back, weight, left


def _settled(
    counts: Floats, passes: tuple[PassWork, PassWork, PassWork], order: PassOrder, *, apart: bool
) -> tuple[Floats, Floats, Floats, Floats]:
    """The same where all passes are apart, or none."""
    (forward, backward, later), (at_once, _, steady) = passes, order
    ahead = made = end = np.zeros(counts.shape[1:])
    taken = back = weight = alone = behind = ahead
    for microbatch in range(2):
        before = ahead * steady, made * steady, end * steady
        taken, ahead = pass_seconds(counts, forward, np.where(at_once | apart, before[0], before[2]), backward=False)
        back, made = pass_seconds(counts, backward, np.where(at_once, before[1], ahead), backward=True)
        weight, end = pass_seconds(counts, later, np.where(apart, before[2], made), backward=True)
        if microbatch == 0:
            alone, behind = taken + back + weight, np.maximum(0.0, end)
        else:
            grown = [steady * np.maximum(0.0, now - was) for now, was in zip((made, end), before[1:], strict=True)]
            back, weight = back + grown[0] * at_once, weight + grown[1] * ~at_once
    return taken, back, weight, (behind + alone - (taken + back + weight)).max(axis=0)

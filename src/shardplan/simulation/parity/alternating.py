"""The pipeline schedule of DistIR, which it calls 1F1B: forward and backward blocks in turn, wherever both are ready.

Time goes in steps, in which each place of the pipeline runs at most one block; a block is ready from the step after the
last that it waits for. A place whose last block was a forward one takes a backward one if any is ready, and the other
way round; of those it takes the least microbatch. Where nothing of the kind is ready it runs the other kind, so that a
first place runs forward blocks while it waits: in flight are more microbatches than 1F1B has (mistake 8).

Source: microsoft/dist-ir 7cfa1b0, `transforms/pipedream_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


def alternating(
    places: Sequence[int], backward: Sequence[bool], waits: Sequence[Sequence[int]], microbatches: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the steps: for each, the places that run something, ascending, as (place, block, microbatch).

    Args:
        places: The place of each block.
        backward: Whether it is one of the backward pass.
        waits: The blocks that it waits for, of the same microbatch.
        microbatches: How many there are.

    Source: microsoft/dist-ir 7cfa1b0, `transforms/pipedream_scheduler.py`.

    >>> alternating((0, 1, 1, 0), (False, False, True, True), ((), (0,), (1,), (2, 0)), 1)
    (((0, 0, 0),), ((1, 1, 0),), ((1, 2, 0),), ((0, 3, 0),))
    """
    missing = {(b, m): len(set(waits[b])) for b in range(len(places)) for m in range(microbatches)}
    followers: list[list[int]] = [[] for _ in places]
    for block, before in enumerate(waits):
        for one in set(before):
            followers[one].append(block)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(max(places) + 1)]
    for (block, microbatch), count in missing.items():
        if not count:
            ready[places[block]].append((block, microbatch))
    last = [True] * len(ready)  # whether a place's last block was a backward one
    steps: list[tuple[tuple[int, int, int], ...]] = []
    left = len(missing)
    while left:
        step: list[tuple[int, int, int]] = []
        for place, waiting in enumerate(ready):
            if not waiting:
                continue
            kinds = [x for x in waiting if backward[x[0]] is not last[place]] or waiting
            # `min` keeps the order in which blocks became ready.
            block, microbatch = min(kinds, key=lambda x: x[1])
            last[place] = backward[block]
            waiting.remove((block, microbatch))
            step.append((place, block, microbatch))
        for _, block, microbatch in step:
            for after in followers[block]:
                missing[after, microbatch] -= 1
                if not missing[after, microbatch]:
                    ready[places[after]].append((after, microbatch))
        left -= len(step)
        steps.append(tuple(step))
    return tuple(steps)

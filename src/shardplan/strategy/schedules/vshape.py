"""Schedules of two stages a rank whose chain turns at the last rank: rank r has the stages r and 2p-1-r.

ZB-V (arXiv 2401.10241, section 6) in the order of `torch.distributed.pipelining`; V-Half and V-Min (arXiv 2405.15362):
one microbatch's passes form a building block, repeated every six slots.
"""

from __future__ import annotations

from itertools import product

from shardplan.strategy.schedules.action import Action

Row = list[Action]
PERIOD = 6  # passes of a microbatch on a rank: F, I and W of two stages


def zb_v(ranks: int, microbatches: int) -> list[Row]:
    """Zero bubble at F = I = W with the memory of 1F1B; for fewer than 2p-1 microbatches, a longer one's part."""
    return [_zb_v(ranks, r, microbatches) for r in range(ranks)]


def _zb_v(p: int, r: int, microbatches: int) -> Row:
    total, stages = max(2 * p - 1, microbatches), (r, 2 * p - 1 - r)
    counts: dict[tuple[int, str], int] = {}
    row: Row = []

    def add(*passes: str) -> None:
        for chunk, kind in passes:
            m = counts.get((int(chunk), kind), 0)
            counts[int(chunk), kind] = m + 1
            row.append(Action(stages[int(chunk)], kind, m))

    add(*["0F"] * (2 * (p - r) - 1), *["1F", "0F"] * r, *["1F", "1I", "1W"] * (p - r))
    while counts[1, "F"] < counts[0, "F"] or counts[0, "F"] < total:
        if counts[0, "F"] < total:
            add("0F")
        add("0I", "0W", "1F", "1I", "1W")
    add(*["0I", "1I"] * r, *["0I", "0W"] * (p - r))
    add(*["1W"] * (total - counts[1, "W"]))
    add(*["0W"] * (total - counts[0, "W"]))
    return [a for a in row if a.microbatch is not None and a.microbatch < microbatches]


def v_half(ranks: int, microbatches: int) -> list[Row]:
    """Half the memory of 1F1B and about half its bubble."""
    return _weave_blocks(ranks, microbatches, (1, 2, 1, 2))


def v_min(ranks: int, microbatches: int) -> list[Row]:
    """A third of the memory of 1F1B and about two thirds of its bubble."""
    return _weave_blocks(ranks, microbatches, (1, 1, 1, 1))


def _weave_blocks(p: int, microbatches: int, slopes: tuple[int, int, int, int]) -> list[Row]:
    """Weave blocks: `slopes` are the slots from rank to rank of the four ways of a microbatch, down, up, down, up.

    Where a way turns it waits so long that no rank has two passes in one slot; of such blocks the one that holds the
    fewest microbatches at once, then the shortest.
    """
    blocks = (_block(p, slopes, gaps) for gaps in product(range(1, PERIOD + 1), repeat=3))
    fitting = (block for block in blocks if block is not None)
    best = min(fitting, key=lambda block: (max(map(_most_held, block)), max(row[-1][0] for row in block)))
    rows: list[Row] = []
    for row in best:
        timed = [(t + PERIOD * m, Action(s, kind, m)) for m in range(microbatches) for t, s, kind in row]
        rows.append([a for _, a in sorted(timed, key=lambda each: each[0])])
    return rows


_Block = list[tuple[int, int, str]]  # slot, stage, kind of a rank's passes, in order


def _block(p: int, slopes: tuple[int, int, int, int], gaps: tuple[int, ...]) -> list[_Block] | None:
    """Return the passes of each rank for one microbatch, or None where two blocks would meet in a slot."""
    turns = [0]
    for slope, gap in zip(slopes, gaps, strict=False):
        turns.append(turns[-1] + slope * (p - 1) + gap)
    block: list[_Block] = []
    for r in range(p):
        slots = [t + slope * way for t, slope, way in zip(turns, slopes, (r, p - 1 - r) * 2, strict=True)]
        free = [t for t in range(PERIOD) if t not in {slot % PERIOD for slot in slots}]
        if len(free) > 2:
            return None
        first, last = r, 2 * p - 1 - r
        passes = list(zip(slots, (first, last, last, first), "FFII", strict=True))
        ways = [
            [*passes, *zip(_next_slots(slots[2:], w), (last, first), "WW", strict=True)] for w in (free, free[::-1])
        ]
        block.append(sorted(min(ways, key=_most_held)))
    return block


def _next_slots(slots: list[int], free: list[int]) -> list[int]:
    """The first slot behind each that has a certain place in the period."""
    return [slot + (w - slot) % PERIOD for slot, w in zip(slots, free, strict=True)]


def _most_held(row: _Block) -> int:
    """How many forwards of a rank wait for their W at once, where its block is repeated for ever."""
    lives = [(next(t for t, s, k in row if (s, k) == (stage, "F")), end) for end, stage, kind in row if kind == "W"]
    return max(sum((end - 1 - t) // PERIOD - (begin - 1 - t) // PERIOD for begin, end in lives) for t in range(PERIOD))

"""The rounds of which the lowerings of collectives in groups are made: gathers, scatters of sums, chains.

`direct`: every member exchanges with every other at once. `ring`: member k passes on to k + 1 what it got from k - 1.
`doubling`: digit by digit of the members' indices, so that what a member has, or sums up, grows; far members come while
that is one part. `chain`: one after another in segments, which are passed on while the next ones come in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardplan.core.lowering import SEGMENT, Action, Buffer, Copy, Group, Ints, Region, Round, run_of

FILLED = 8  # how often a chain is filled: its start and end then take an eighth of its time, and no more segments pay
Of = Callable[[Ints | int], Region]  # of members, given by their index in each device's group


def prepend_actions(actions: Iterable[Action], rounds: Iterator[Round]) -> Iterator[Round]:
    """Yield the rounds, the first one with these actions before its own."""
    first = next(rounds, Round())
    yield Round.of((*actions, *first.actions), first.closes)
    yield from rounds


def gather(group: Group, own: Region, block: Of, chunks: int, algorithm: str) -> Iterator[Round]:
    """Yield the rounds in which every member's piece `own` gets to all others, where it is `block` of that member."""
    for c in range(chunks):
        if algorithm == "ring":
            for s in range(group.size - 1):
                given = own if s == 0 else block(group.me - s)
                yield Round.of(
                    (
                        group.put(group.me + 1, given.cut(c, chunks)),
                        group.take(group.me - 1, block(group.me - s - 1).cut(c, chunks)),
                    ),
                    closes=s == group.size - 2,
                )
        elif algorithm == "doubling":
            yield from _recursive_doubling(group, own, block, c, chunks)
        else:
            yield exchange(group, lambda k: own, block, c, chunks)


def _digit_peers(group: Group, stride: int, digit: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the members to give to, and those to take from, over one digit of the members' indices."""
    mine = group.me // stride % digit
    for turn in range(1, digit):
        there, back = ((mine + way) % digit - mine for way in (turn, -turn))
        yield group.me + there * stride, group.me + back * stride


def _recursive_doubling(group: Group, own: Region, block: Of, chunk: int, chunks: int) -> Iterator[Round]:
    """Yield the rounds of a gather, major digit first: a member passes on all parts that it has."""
    span = group.size
    for digit in group.digits:
        actions: list[Action] = []
        for there, back in _digit_peers(group, span // digit, digit):
            for more in range(0, group.size, span):
                given = block(group.me % span + more) if span < group.size else own
                actions.append(group.put(there, given.cut(chunk, chunks)))
                actions.append(group.take(back, block(back % span + more).cut(chunk, chunks)))
        yield Round.of(actions)
        span //= digit


def exchanges(group: Group, given: Of, taken: Of, chunks: int, algorithm: str) -> Iterator[Round]:
    """Yield the rounds in which every member gives every other a part, and takes one."""
    for c in range(chunks):
        if algorithm == "ring":
            for r in range(1, group.size):
                there, back = group.me + r, group.me - r
                yield Round.of(
                    (group.put(there, given(there).cut(c, chunks)), group.take(back, taken(back).cut(c, chunks)))
                )
        else:
            yield exchange(group, given, taken, c, chunks)


def exchange(group: Group, given: Of, taken: Of, chunk: int, chunks: int) -> Round:
    """Return the round in which every member gives every other a part, and takes one."""
    actions: list[Action] = []
    for k in range(group.size):
        others = group.me != k
        actions.append(group.put(k, given(k).restrict(others).cut(chunk, chunks)))
        actions.append(group.take(k, taken(k).restrict(others).cut(chunk, chunks)))
    return Round.of(actions)


def scatter_sums(
    group: Group, addend: Of, total: Region, reduction: str, chunks: int, algorithm: str
) -> Iterator[Round]:
    """Yield the rounds in which every member gets the reduction of its part; `addend` is a part of what one holds.

    Directly, the addends are taken in member order; in a ring, from the member after the part's owner on. They are
    staged in the buffer "t", sums of many parts in "s"; see `addends`.
    """
    q, me, own = group.size, group.me, addend(group.me)
    if q == 1:
        yield Round.of([Copy(own, total)])
        return
    for c in range(chunks):
        here = total.cut(c, chunks)
        if algorithm == "ring":
            room = _largest(group, addend, chunks)
            given = addend(me - 1).cut(c, chunks)
            for s in range(q - 1):
                mine = addend(me - s - 2).cut(c, chunks)
                target = here if s == q - 2 else run_of("t", s * room, mine.elements())
                yield Round.of(
                    (group.put(me + 1, given), group.take(me - 1, target), Copy(mine, target, reduction)),
                    closes=s == q - 2,
                )
                given = target
        elif algorithm == "doubling":
            yield from _recursive_halving(group, addend, here, reduction, c, chunks)
        else:
            n = here.elements()
            actions: list[Action] = []
            sums: list[Action] = []
            for k in range(q):
                others, fold = me != k, reduction if k else None
                slot = run_of("t", (k - (me < k)) * _room(total, chunks), n).restrict(others)
                actions.append(group.put(k, addend(k).restrict(others).cut(c, chunks)))
                actions.append(group.take(k, slot))
                sums.append(Copy(own.restrict(~others).cut(c, chunks), here.restrict(~others), fold))
                sums.append(Copy(slot, here.restrict(others), fold))
            yield Round.of([*actions, *sums])


def _recursive_halving(
    group: Group, addend: Of, total: Region, reduction: str, chunk: int, chunks: int
) -> Iterator[Round]:
    """Yield the rounds of a scatter of sums, minor digit first: a member gives what is for others, and sums up its own.

    The sums of every round lie behind those of the round before, from which they are made.
    """
    room, stride, before, made = _largest(group, addend, chunks), 1, 0, 0

    def held(member: Ints) -> Region:
        """What was summed up so far for a member."""
        part = addend(member).cut(chunk, chunks)
        return part if stride == 1 else run_of("s", (before + member // stride) * room, part.elements())

    for digit in reversed(group.digits):
        span = stride * digit
        left = group.size // span
        actions: list[Action] = []
        sums: list[Action] = []
        into = [
            total if left == 1 else run_of("s", (made + k) * room, held(group.me % span + k * span).elements())
            for k in range(left)
        ]
        for turn, (there, back) in enumerate(_digit_peers(group, stride, digit)):
            for k in range(left):
                slot = run_of("t", (turn * left + k) * room, into[k].elements())
                actions.append(group.put(there, held(there % span + k * span)))
                actions.append(group.take(back, slot))
                sums += [Copy(held(group.me % span + k * span), into[k])] if turn == 0 else []
                sums.append(Copy(slot, into[k], reduction))
        yield Round.of([*actions, *sums])
        stride, before, made = span, made, made + left


def addends(group: Group, addend: Of, total: Region, dtype: str, chunks: int, algorithm: str) -> dict[str, Buffer]:
    """Return the staging of `scatter_sums`."""
    if algorithm == "ring":
        n = max(group.size - 2, 0) * _largest(group, addend, chunks)
    elif algorithm == "doubling":
        left = [math.prod(group.digits[:k]) for k in range(len(group.digits))]
        most = max((n * (digit - 1) for n, digit in zip(left, group.digits, strict=True)), default=0)
        room = _largest(group, addend, chunks)
        return {"t": Buffer(most * room, dtype), "s": Buffer(sum(left[1:]) * room, dtype)}
    else:
        n = (group.size - 1) * _room(total, chunks)
    return {"t": Buffer(n, dtype)}


def _room(region: Region, chunks: int) -> Ints:
    return -(-region.elements() // chunks)


def _largest(group: Group, addend: Of, chunks: int) -> Ints:
    return np.max([_room(addend(k), chunks) for k in range(group.size)], axis=0)


def passed_on(
    group: Group, step: int, x: Region, y: Region, itemsize: int, chunks: int, fold: str | None
) -> Iterator[Round]:
    """Yield the rounds of a chain in which `x` of the member it begins at is passed on, or added up, into `y`.

    `step` is 1 for a chain from the first member to the last, -1 for the other way. It goes in segments: at least
    `chunks`, and so many that none is above `SEGMENT` bytes, but no more than fill the chain `FILLED` times.
    """
    q, n = group.size, x.elements()
    nth = group.me if step > 0 else q - 1 - group.me
    wanted = np.maximum(chunks, np.minimum(-(-n * itemsize // SEGMENT), FILLED * q))
    segments = np.where(group.live, np.minimum(wanted, n), 0)

    def segment(region: Region, k: Ints, rows: Ints) -> Region:
        rows = rows & (k >= 0) & (k < segments)
        start, stop = (n * at // np.maximum(segments, 1) for at in (k, k + 1))
        return run_of(region.buffer, start, np.where(rows, stop - start, 0))

    kept = Copy(x.restrict(nth == 0), y.restrict(nth == 0))
    if q == 1:
        yield Round.of([kept])
    count = int(segments.max(initial=0)) + q - 2 if q > 1 else 0
    for r in range(count):
        got, given = r - nth + 1, r - nth
        target = segment(y, got, nth > 0)
        last = r == count - 1
        actions: list[Action] = [
            *([kept] if last and fold is None else []),  # what the member it begins at keeps: nobody waits for it
            group.put(group.me + step, segment(x, given, (nth == 0) & (nth < q - 1))),
            group.put(group.me + step, segment(y, given, (nth > 0) & (nth < q - 1))),
            group.take(group.me - step, target),
        ]
        if fold is not None:
            actions.append(Copy(segment(x, got, nth > 0), target, fold))
        yield Round.of(actions, closes=last)


def binomial(group: Group, step: int, x: Region, y: Region, fold: str | None) -> Iterator[Round]:
    """Yield the rounds of a binomial tree in which `x` is added up in `y` at the first member, or spread from there.

    With `step` -1 it goes to the root: neighbours come first, then members twice as far; with 1 from it, the other way.
    What is added up is staged in "t", as large as a shard.
    """
    me, q = group.me, group.size
    distances = [1 << k for k in range((q - 1).bit_length())]
    if fold is None:
        yield Round.of([Copy(x.restrict(me == 0), y.restrict(me == 0))], closes=False)
    else:
        yield Round.of(
            [Copy(x.restrict(me % 2 == 0), y.restrict(me % 2 == 0))], closes=False
        )  # the others only pass theirs on
    for distance in distances[::-step]:
        near = group.live & (me % (2 * distance) == 0) & (me + distance < q)
        far = group.live & (me % (2 * distance) == distance)
        if fold is None:
            yield Round.of([group.put(me + distance, y.restrict(near)), group.take(me - distance, y.restrict(far))])
        else:
            given = x if distance == 1 else y
            staged = run_of("t", np.zeros_like(me), np.where(near, y.elements(), 0))
            yield Round.of(
                [
                    group.put(me - distance, given.restrict(far)),
                    group.take(me + distance, staged),
                    Copy(staged, y.restrict(near), fold),
                ]
            )


def tree_parents(node: Ints, count: Ints | int, mirrored: bool) -> Ints:
    """Return the parents of members in one of the two binary trees over `count` members, -1 at the root.

    The parent of a member has its lowest bit cleared and the next one set; where that is beyond the end, the bit is
    only cleared. The second tree is the first one mirrored where the count is even, else shifted by one, so that the
    leaves of one are inside the other and everybody's two directions are used.

    Source: NVIDIA/nccl `src/graph/trees.cc`.

    >>> tree_parents(np.arange(6), 6, False).tolist(), tree_parents(np.arange(6), 6, True).tolist()
    ([-1, 2, 4, 2, 0, 4], [1, 5, 3, 1, 3, -1])
    """
    even = np.asarray(count) % 2 == 0
    own = np.where(even, count - 1 - node, (node - 1) % count) if mirrored else node
    low = own & -own
    up = (own ^ low) | (low << 1)
    up = np.where(own == 0, -1, np.where(up >= count, own ^ low, up))
    return np.where(up < 0, -1, np.where(even, count - 1 - up, (up + 1) % count)) if mirrored else up


def double_tree(group: Group, x: Region, y: Region, itemsize: int, chunks: int, fold: str) -> Iterator[Round]:
    """Yield the rounds in which two binary trees each add up one half of `x` in `y`, upwards, and spread it again.

    In segments, which go up and down one behind the other; what comes from a child is staged in "t", see `tree_room`.
    """
    me, q = np.maximum(group.me, 0), group.size
    n = np.where(group.live, x.elements(), 0)
    if q == 1:
        yield Round.of([Copy(x, y)])
        return
    count = tree_segments(n, itemsize, chunks)
    yield Round.of([Copy(x, y)], closes=False)
    plans: list[_Tree] = [_Tree.of(tree_parents(np.arange(q), q, mirrored)) for mirrored in (False, True)]
    last = int(count.max()) + 2 * max(p.top for p in plans) - 1
    room = -(-n // (2 * count)) + 1
    for r in range(last + 1):
        actions: list[Action] = []
        folds: list[Action] = []
        for half, tree in enumerate(plans):
            start, stop = n * half // 2, n * (half + 1) // 2

            def segment(c: Ints, rows: Ints, start: Ints = start, stop: Ints = stop) -> Region:
                lo, hi = (start + (stop - start) * k // count for k in (c, c + 1))
                return run_of("y", lo, np.where(rows & (c >= 0) & (c < count), hi - lo, 0))

            parent, down = tree.parent[me], r - tree.top - tree.depth[me]
            actions.append(group.put(parent, segment(r - tree.height[me], parent >= 0)))
            actions.append(group.take(parent, segment(down + 1, parent >= 0)))
            for k, child in enumerate(tree.children[:, me]):
                here = segment(r - tree.height[child], child >= 0)
                staged = run_of("t", (2 * half + k) * room, here.elements())
                actions += [group.put(child, segment(down, child >= 0)), group.take(child, staged)]
                folds.append(Copy(staged, here, fold))
        yield Round.of([*actions, *folds], closes=r == last)


class _Tree(NamedTuple):
    """A tree over the members of a group: int64 [members], of children two rows, -1 for none."""

    parent: Ints
    children: Ints
    depth: Ints
    height: Ints
    top: int  # the height of the root

    @staticmethod
    def of(parent: Ints) -> _Tree:
        """Derive the rest."""
        q = len(parent)
        children, depth, height = np.full((2, q), -1), np.zeros(q, dtype=np.int64), np.zeros(q, dtype=np.int64)
        for k in range(q):
            if parent[k] >= 0:
                children[int(children[0, parent[k]] >= 0), parent[k]] = k
            above, steps = parent[k], 0
            while above >= 0:
                steps += 1
                height[above] = max(height[above], steps)
                above = parent[above]
            depth[k] = steps
        return _Tree(parent, children, depth, height, int(height.max()))


def tree_segments(n: Ints, itemsize: int, chunks: int) -> Ints:
    """Return how many segments `double_tree` cuts each half of `n` elements into."""
    return np.maximum(chunks, -(-n * itemsize // (2 * SEGMENT)))


def tree_room(n: Ints, itemsize: int, chunks: int) -> Ints:
    """Return the elements that `double_tree` stages: a segment of each of two children in each of two trees."""
    return 4 * (-(-n // (2 * tree_segments(n, itemsize, chunks))) + 1)

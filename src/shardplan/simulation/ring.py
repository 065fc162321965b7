"""The ring engine's script: which messages its collectives are made of, from types alone.

Groups are in member order, and member k sits between its neighbours k - 1 and k + 1 (mod q):

- all_gather: in round s a member passes on the block of member k - s; q - 1 rounds;
- reduce_scatter: in round s it passes on the partial sum of the part of member k - s - 1, so that each part ends at its
  owner; q - 1 rounds;
- all_reduce: the two, on the flat shard cut by the tiling rule;
- reduce, broadcast: a pipelined chain towards, or from, member 0, in segments of at most `SEGMENT` bytes;
- all_to_all: q - 1 stages, in the r-th of which it sends to member k + r and receives from k - r;
- permute, exchange, send: every message at once, one stage a chunk.

The operands of all_gather, permute, exchange and send travel as one message, those of the others one after another.
The engine that does this on real processes is `execution.lab.ring`; the two are written apart, their bytes compared.

What yields here yields stages, in the order in which every device goes through them; `number` is that of their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardplan.core.messages import at_root, messages, permutation
from shardplan.core.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Permute,
    Reduce,
    ReduceScatter,
    Send,
    Slice,
    ToPartial,
)
from shardplan.core.ops.collective import Collective, meet, typed
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.core.walk import turns
from shardplan.errors import BackendError
from shardplan.simulation.predict import step_names
from shardplan.simulation.script import Message, Script, ScriptRound, Stage, merged

SEGMENT = 128 * 2**10  # bytes that a chain passes on at once: small beside a shard, so that all its links are busy
Part = dict[int, tuple[ScriptRound, ...]]  # of one group in one stage: what each device does, by id
Sizes = Sequence[int] | np.ndarray


def script_of(program: Program, title: str = "") -> Script:
    """Return what the ring engine sends when it runs a program; ops that communicate are collectives.

    Raises `BackendError` for a collective whose messages are not known here.
    """
    stages: list[Stage] = []
    for number, visit in turns(program):
        if isinstance(visit.step.op, Collective) and not visit.relabels:
            stages += _stages(number, visit.step, visit.operands)
    return Script(tuple(stages), step_names(program), tuple(s.op.name for s in program.steps), title)


def _stages(number: int, step: Step, operands: Sequence[TensorType]) -> Iterator[Stage]:
    """Yield the stages of a step: operand by operand, unless they travel together, and of each chunk by chunk."""
    op: Any = step.op
    match op:
        case AllGather():
            yield from _gathers(number, op, operands)
        case ReduceScatter():
            for t in operands:
                u = typed(op, t)
                parts = [(_ids(t, g), _elements(u)[g], t.itemsize) for g in _groups(op, t)]
                for c in range(op.chunks):
                    yield from merged((scatter(m, _chunk(n, c, op.chunks) * w) for m, n, w in parts), number)
        case AllReduce():  # of each chunk the parts are reduced in one stage and gathered in the next
            for t in operands:
                groups = [(_ids(t, g), owned(int(_elements(t)[g[0]]), len(g))) for g in _groups(op, t)]
                for c in range(op.chunks):
                    sizes = [(m, _chunk(n, c, op.chunks) * t.itemsize) for m, n in groups]
                    yield from merged((scatter(m, n) for m, n in sizes), number)
                    yield from merged((gather(m, n) for m, n in sizes), number)
        case Reduce():
            for t in operands:
                parts = [(_ids(t, g)[::-1], segments(int(_elements(t)[g[0]]), t.itemsize, op.chunks)) for g in
                         _groups(op, t)]  # fmt: skip
                yield from merged((chain(m, n) for m, n in parts), number)
        case Broadcast():
            for t in operands:
                u = typed(op, t)
                parts = [(_ids(u, g), segments(int(_elements(u)[g[0]]), t.itemsize, op.chunks)) for g in _groups(op, u)]
                yield from merged((chain(m, n) for m, n in parts), number)
        case AllToAll():
            yield from _exchanges(number, op, operands)
        case Permute() | Exchange() | Send():
            yield from _moves(number, op, operands)
        case Slice() | ToPartial():  # local
            return
        case _:
            raise BackendError(f"step {number}: the ring engine's script has no messages for {op.name}")


def gather(members: Sequence[int], sizes: Sizes) -> Part:
    """Return the ring in which every member gets the block of every other; `sizes` in bytes, by member."""
    return _ring(members, sizes, 0)


def scatter(members: Sequence[int], sizes: Sizes) -> Part:
    """Return the ring in which every member gets the sum of its part; `sizes` of the parts in bytes, by member."""
    return _ring(members, sizes, 1)


def _ring(members: Sequence[int], sizes: Sizes, lag: int) -> Part:
    """The ring in which round s of member k sends block k - s - lag, and so receives the one that its sender has."""
    q = len(members)
    out: Part = {}
    for k in range(q):
        after, before = members[(k + 1) % q], members[(k - 1) % q]
        blocks = [(int(sizes[(k - s - lag) % q]), int(sizes[(k - s - lag - 1) % q])) for s in range(q - 1)]
        out[members[k]] = tuple(ScriptRound(_one(after, a), _one(before, b)) for a, b in blocks)
    return out


def chain(members: Sequence[int], sizes: Sequence[int]) -> Part:
    """Return the pipelined chain from the first member to the last; `sizes` of the segments in bytes."""
    out: Part = {}
    for k, device in enumerate(members):
        rounds: list[ScriptRound] = []
        if k + 1 < len(members) and k == 0:
            rounds = [ScriptRound(_one(members[1], n), ()) for n in sizes]
        elif k:
            passed = 0  # bytes of the segment before: it is passed on while the next one comes in
            for n in sizes:
                on = _one(members[k + 1], passed) if k + 1 < len(members) else ()
                rounds.append(ScriptRound(on, _one(members[k - 1], n)))
                passed = n
            if k + 1 < len(members):
                rounds.append(ScriptRound(_one(members[k + 1], passed), ()))
        out[device] = tuple(rounds)
    return out


def pairwise(members: Sequence[int], size: Callable[[int, int], int]) -> list[Part]:
    """Return the q - 1 stages of an all-to-all; `size(a, b)` is the bytes from member a to member b."""
    q = len(members)
    return [
        {
            members[k]: (
                ScriptRound(
                    _one(members[(k + r) % q], size(k, (k + r) % q)), _one(members[(k - r) % q], size((k - r) % q, k))
                ),
            )
            for k in range(q)
        }
        for r in range(1, q)
    ]


def together(sizes: Mapping[tuple[int, int], int]) -> Part:
    """Return the stage of messages that are posted at once; `sizes` in bytes, by (sender, receiver)."""
    sends: dict[int, list[Message]] = {}
    receives: dict[int, list[Message]] = {}
    for (sender, receiver), nbytes in sizes.items():
        if nbytes:
            sends.setdefault(sender, []).append((receiver, nbytes))
            receives.setdefault(receiver, []).append((sender, nbytes))
    return {d: (ScriptRound(tuple(sends.get(d, ())), tuple(receives.get(d, ()))),) for d in sorted({*sends, *receives})}


def owned(n: int, members: int) -> np.ndarray:
    """Return how many of n elements each of `members` owns by the tiling rule.

    >>> owned(10, 4).tolist()
    [3, 3, 3, 1]
    """
    size = -(-n // members)
    return np.clip(n - np.arange(members) * size, 0, size)


def segments(n: int, itemsize: int, chunks: int = 1) -> list[int]:
    """Return the bytes of the segments of n elements: at least `chunks`, none above `SEGMENT`."""
    count = max(chunks, -(-n * itemsize // SEGMENT))
    sizes = [int(_chunk(np.array(n), c, count)) * itemsize for c in range(count)]
    return [size for size in sizes if size]


def _one(peer: int, nbytes: int) -> tuple[Message, ...]:
    return ((peer, int(nbytes)),) if nbytes else ()


def _chunk(n: np.ndarray, c: int, chunks: int) -> np.ndarray:
    """How much of n is in chunk c: as even as whole numbers can be, all chunks together n."""
    return n * (c + 1) // chunks - n * c // chunks


def _ids(t: TensorType, places: np.ndarray) -> list[int]:
    return t.mesh.ids[places].tolist()


def _elements(t: TensorType) -> np.ndarray:
    return np.asarray(t.elements())


def _groups(op: Collective, t: TensorType) -> list[np.ndarray]:
    """The places of the groups that hold the value, in member order."""
    held = at_root(t)
    return [g for g in t.mesh.group_places(op.members(t)) if len(g) > 1 and held[g].all()]


def _gathers(number: int, op: AllGather, operands: Sequence[TensorType]) -> Iterator[Stage]:
    """Yield a stage a chunk: the rings of all groups, the operands packed into one block."""
    first = operands[0]
    # Operands may differ in their root axes: a block is what its member holds of all of them.
    held = sum((np.where(at_root(t), t.elements() * t.itemsize, 0) for t in operands), np.zeros(1, dtype=np.int64))
    parts = [(_ids(first, g), held[g]) for g in first.mesh.group_places(op.members(first))]
    for c in range(op.chunks):
        yield from merged((gather(m, _chunk(n, c, op.chunks)) for m, n in parts), number)


def _exchanges(number: int, op: AllToAll, operands: Sequence[TensorType]) -> Iterator[Stage]:
    """Yield, operand by operand and chunk by chunk, q - 1 stages: in the r-th all members send r further."""
    for t in operands:
        u = typed(op, t)
        before, after = t.boxes(), u.boxes()

        def elements(a: int, b: int, before: np.ndarray = before, after: np.ndarray = after) -> int:
            part = meet(before[a], after[b])
            return 0 if part is None else int(np.prod(part[:, 1] - part[:, 0]))

        groups = _groups(op, t)
        for c in range(op.chunks):

            def size(g: np.ndarray, a: int, b: int, c: int = c, width: int = t.itemsize) -> int:
                return int(_chunk(np.array(elements(int(g[a]), int(g[b]))), c, op.chunks)) * width

            staged = [pairwise(_ids(t, g), lambda a, b, g=g: size(g, a, b)) for g in groups]
            for parts in zip(*staged, strict=True):
                yield from merged(parts, number)


def _moves(number: int, op: Permute | Exchange | Send, operands: Sequence[TensorType]) -> Iterator[Stage]:
    """Yield a stage a chunk: the messages of all operands between two devices are one."""
    for c in range(op.chunks):
        sizes: dict[tuple[int, int], int] = {}
        for t in operands:
            u = typed(op, t)
            if isinstance(op, Permute):
                senders, receivers = permutation(t, u) or (np.zeros(0, dtype=np.int64),) * 2
                elements = _elements(u)[receivers]
            else:
                senders, receivers, elements = messages(t, u)
            for s, r, n in zip(senders.tolist(), receivers.tolist(), _chunk(elements, c, op.chunks), strict=True):
                key = (t.mesh.devices[s], u.mesh.devices[r])
                sizes[key] = sizes.get(key, 0) + int(n) * t.itemsize
        yield from merged([together(sizes)], number)

"""Many tensors as one plan: shrinking tensors first, growing ones last, equal plans packed into one collective.

Where that order does not keep the bound (devices that hold unequal sizes: stages that swap their tensors), or the
limit, tensors move one by one in the order of least peak that `order` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, account, bound_bytes, holds
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Op, Send
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.movement.order import OrderedMove, least_order
from shardplan.movement.redistribution.choice import Rules, chain, keeping, price, too_little
from shardplan.movement.redistribution.cuts import Cuts
from shardplan.movement.redistribution.emit import direct
from shardplan.movement.redistribution.single import best_program, priced_on
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import Where, fabric_of

# The room for a pack's largest shards, as parts of the limit and of what the limit leaves above the bound. A pack holds
# its operands and its results at once, so more than half of the limit cannot serve; beside tensors that fill the bound
# there is only the spare. How much of it staging takes depends on the ops, so smaller rooms are tried too; each more is
# a program to assemble and to price.
_PARTS_OF_LIMIT, _PARTS_OF_SPARE = (2, 8), (1, 2, 4)


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor: its ends, and the ops planned for it alone."""

    index: int  # in the caller's lists
    source: TensorType
    target: TensorType
    ops: tuple[Op, ...]
    exact: bool
    keep: bool  # the source is the caller's: it counts to the end

    @property
    def growth(self) -> int:
        """Bytes that the largest shard adds to what is live."""
        return self.target.local_bytes() - self.source.local_bytes() * (not self.keep)

    @property
    def program(self) -> Program:
        """This tensor's part of the plan."""
        alone = chain(self.ops, self.source)
        return keeping(alone, (alone.inputs[0][0],)) if self.keep else alone


@dataclass(frozen=True, slots=True)
class _Batch:
    """The tensors with the moves planned for each, and what the plan must satisfy."""

    items: tuple[_Item, ...]
    rules: Rules

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids of all tensors, ascending."""
        return tuple(sorted({d for i in self.items for t in (i.source, i.target) for d in t.mesh.devices}))

    @property
    def moving(self) -> list[_Item]:
        """The tensors that have steps."""
        return [i for i in self.items if i.ops]

    @property
    def ordered(self) -> list[_Item]:
        """Shrinking tensors first, large ones before small ones, then growing ones, small before large.

        So that live bytes fall as early and rise as late as they can.
        """

        def turn(i: _Item) -> tuple[bool, int, int]:
            return i.growth > 0, i.growth if i.growth > 0 else -i.source.local_bytes(), i.index

        return sorted(self.moving, key=turn)


def plan_batch(
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    where: Where | None,
    limit: int | None,
    portable: bool,
    keep: tuple[bool, ...],
) -> Plan:
    """Return one plan for all tensors; see `redistribute`."""
    where = _one_place(sources, destinations, where)
    items: list[_Item] = []
    for k, (s, t, kept) in enumerate(zip(sources, destinations, keep, strict=True)):
        chosen, _ = best_program(s, t, where, None, portable)
        ops = tuple(step.op for step in chosen.program.steps)
        items.append(_Item(k, s, t, ops, chosen.exact, kept))
    fabric = None if where is None else fabric_of(where, _meshes(sources, destinations))
    batch = _Batch(tuple(items), Rules(bound_bytes(sources, destinations), portable, fabric))
    program = _unlimited(batch) if limit is None else _within(batch, limit)
    exact = limit is None and len(items) == 1 and items[0].exact
    return Plan(program, issue(program, sources, destinations, where, limit, exact))


def _unlimited(batch: _Batch) -> Program:
    """The packed program if it keeps the bound, else the one with the least peak found."""
    packed = _assemble(_packs(batch.ordered, None), batch.items)
    if account(packed).peak_bytes <= batch.rules.bound:
        return packed
    ways = [packed, *(_one_by_one(way, None) for way in _ways(batch))]
    return min(ways, key=lambda program: account(program).peak_bytes)


def _within(batch: _Batch, limit: int) -> Program:
    """The cheapest program that keeps the limit, with at most 64 chunks a step if that can be."""
    least: list[tuple[int, Program]] = []
    for most in (MANY_CHUNKS, math.inf):
        best: tuple[float, Program] | None = None
        for cuts in _candidates(batch, limit, most):
            chunks = cuts.chunks(limit, most)
            if cuts.workspace(chunks) > limit:
                continue
            program = cuts.cut(chunks)
            cost = price(program, account(program), batch.rules)
            if best is None or cost < best[0]:
                best = cost, program
        if best is not None:
            return best[1]
        least.append(_least(batch, most))
        if least[-1][0] <= limit:
            return least[-1][1]
    raise too_little(f"redistribute {len(batch.items)} tensors", limit, *(low for low, _ in least))


def _least(batch: _Batch, most: float) -> tuple[int, Program]:
    """The least workspace of any candidate, and its program.

    A limit decides how tensors are packed, so each limit found is tried again just below, until nothing is left.
    """
    low: tuple[int, Program] | None = None
    limit = 1
    while True:
        found = [(cuts, cuts.chunks(0, most)) for cuts in _candidates(batch, limit, most)]
        cuts, chunks = min(found, key=lambda way: way[0].workspace(way[1]))
        least = cuts.workspace(chunks)
        if low is not None and least >= low[0]:
            return low
        low = least, cuts.cut(chunks)
        limit = max(1, least - 1)


def _candidates(batch: _Batch, limit: int, most: float) -> Iterator[Cuts]:
    """Yield programs of packs, from one per plan to one per tensor, then of tensors one by one in the best order.

    Each program once. Of equal prices the first is taken, so what needs the fewest collectives comes first.
    """
    spare = max(0, limit - batch.rules.bound)
    rooms = (*(limit // k for k in _PARTS_OF_LIMIT), *(spare // k for k in _PARTS_OF_SPARE))
    seen: set[Program] = set()
    for room in (None, *rooms, 0):
        program = _assemble(_packs(batch.ordered, room), batch.items)
        if program not in seen:
            seen.add(program)
            yield Cuts.of(program, account(program))
    for way in _ways(batch):
        program = _one_by_one(way, most)
        if program not in seen:
            seen.add(program)
            yield Cuts.of(program, account(program))


def _ways(batch: _Batch) -> Iterator[_Batch]:
    """The batch as planned, and then, where that is allowed, with one direct move for every tensor.

    A plan of several steps is cheapest for its tensor alone; one step holds least beside the other tensors.
    """
    yield batch
    partial = any(i.source.layout.partial or i.target.layout.partial for i in batch.items)
    if not (batch.rules.portable or partial):
        yield replace(batch, items=tuple(replace(i, ops=_straight(i), exact=False) for i in batch.items))


def _straight(item: _Item) -> tuple[Op, ...]:
    """One direct move, of a tensor that is partial at neither end."""
    if not item.ops:
        return ()
    if item.source.mesh != item.target.mesh:
        return (Send(item.target.layout, item.target.mesh),)
    return tuple(direct(item.source, item.target))


def _one_by_one(batch: _Batch, most: float | None) -> Program:
    """Single tensors in the order of the least peak found, or of the least workspace with `most` chunks a step."""
    moving, devices = batch.moving, batch.devices
    base = np.zeros(len(devices), dtype=np.int64)
    for item in batch.items:
        if not item.ops:
            base = base + holds(item.program, devices)[0]
    order = least_order([_move(i, devices, most) for i in moving], base)
    return _assemble([[moving[k]] for k in order], batch.items)


def _move(item: _Item, devices: tuple[int, ...], most: float | None) -> OrderedMove:
    """What the move of one tensor holds on each device: between its steps, or, with staging, in them."""
    program = item.program
    start, found = holds(program, devices)
    after = found[-1].after
    held = [start, after]
    if most is None:
        held += [h.after for h in found]
    else:
        cuts = Cuts.of(program, account(program))
        staged = (x.staged(k) for x, k in zip(cuts.stages, cuts.chunks(0, most), strict=True))
        held += [h.during + n for h, n in zip(found, staged, strict=True)]
    rows = [np.broadcast_to(np.asarray(x, dtype=np.int64), (len(devices),)) for x in held]
    return OrderedMove(rows[0], np.max(rows, axis=0), rows[1])


def _meshes(sources: Sequence[TensorType], destinations: Sequence[TensorType]) -> tuple[Mesh, ...]:
    return tuple(dict.fromkeys(t.mesh for t in (*sources, *destinations)))


def _one_place(
    sources: tuple[TensorType, ...], destinations: tuple[TensorType, ...], where: Where | None
) -> Where | None:
    """The best placement for the largest tensor: a batch runs on one placement, and the largest costs most."""
    if where is None or not sources:
        return where
    if len(list(priced_on(where, sources[0], destinations[0]))) == 1:
        return where
    largest = max(range(len(sources)), key=lambda k: sources[k].nbytes)
    return best_program(sources[largest], destinations[largest], where, None, False)[1]


class _PackKey(NamedTuple):
    """What tensors have in common that are moved by the same collectives."""

    ops: tuple[Op, ...]
    dtype: str
    ndim: int
    source_mesh: Mesh
    target_mesh: Mesh
    grows: bool  # shrinking tensors go first: no pack holds both


def _packs(ordered: Sequence[_Item], room: int | None) -> list[list[_Item]]:
    """Group tensors that can share collectives, in their order each into the first pack that has room for it.

    `room` bounds the bytes of a pack's largest shards; None: no bound.
    """
    packs: list[list[_Item]] = []
    index: dict[_PackKey, list[int]] = {}
    sizes: list[int] = []
    for item in ordered:
        source, target = item.source, item.target
        key = _PackKey(item.ops, source.dtype, source.ndim, source.mesh, target.mesh, item.growth > 0)
        size = max(source.local_bytes(), target.local_bytes())
        for k in index.get(key, []):
            if room is None or sizes[k] + size <= room:
                packs[k].append(item)
                sizes[k] += size
                break
        else:
            index.setdefault(key, []).append(len(packs))
            packs.append([item])
            sizes.append(size)
    return packs


def _assemble(packs: Sequence[Sequence[_Item]], items: Sequence[_Item]) -> Program:
    """One program: every pack runs its ops on all of its tensors."""
    current = {i.index: f"in{i.index}" for i in items}
    steps: list[Step] = []
    for pack in packs:
        for number, op in enumerate(pack[0].ops):
            results = tuple(f"t{i.index}.{number}" for i in pack)
            steps.append(Step(op, tuple(current[i.index] for i in pack), results))
            for item, name in zip(pack, results, strict=True):
                current[item.index] = name
    order = sorted(items, key=lambda i: i.index)
    program = Program([(f"in{i.index}", i.source) for i in order], steps, [current[i.index] for i in order])
    return keeping(program, (f"in{i.index}" for i in order if i.keep))

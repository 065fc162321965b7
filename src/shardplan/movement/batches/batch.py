"""Many tensors as one plan: equal plans packed into one collective, and packs posted together where that is cheaper.

Packs run one after another, shrinking tensors first and growing ones last; or side by side, the first steps of all in
one `together`, then the second ones; or in waves, the second steps of a wave beside the first of the next, where one
loads the links between nodes and the other those inside. Where none of these keeps the bound, or the limit, tensors
move one by one in the order of least peak that `order` finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, Account, account, bound_bytes, live_bytes
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Op, Send
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.batches.packing import BatchItem, Group, group_packs, pack_tensors, shard_bytes
from shardplan.movement.batches.schedules import FEW_PACKS, assemble_program, schedules, sharing, side_by_side, waves
from shardplan.movement.batches.tiles import tiles
from shardplan.movement.order import OrderedMove, least_order
from shardplan.movement.redistribution.choice import TIE, Rules, chain, price, too_little
from shardplan.movement.redistribution.cuts import Cuts
from shardplan.movement.redistribution.emit import direct, retyping
from shardplan.movement.redistribution.single_move import best_program, narrowest
from shardplan.plans.certificate import issue
from shardplan.plans.plan import Plan
from shardplan.plans.pricing import Where, occupied_fabric

# The room for a pack's largest shards, as parts of the limit and of what the limit leaves above the bound. A pack holds
# its operands and its results at once, so more than half of the limit cannot serve; beside tensors that fill the bound
# there is only the spare. How much of it staging takes depends on the ops, so smaller rooms are tried too; each more is
# a program to assemble and to price.
_PARTS_OF_LIMIT, _PARTS_OF_SPARE = (2, 3, 4, 6, 8), (1, 2, 4)
# Tensors that are tried side by side, and in the best order, for every room under a limit; of more the cheapest of the
# first that fit is taken.
_FEW_TENSORS, _MOST_FITTING = 256, 3
# Ways to cut the tiles of all tensors of which every schedule is priced: the best side by side.
_MOST_WAYS = 2
Booked = tuple[Program, Account]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The tensors with the moves planned for each, and what the plan must satisfy."""

    items: tuple[BatchItem, ...]
    rules: Rules
    where: Where | None

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ids of all tensors, ascending."""
        return Mesh.devices_of(t.mesh for i in self.items for t in (i.source, i.target))

    @property
    def moving(self) -> list[BatchItem]:
        """The tensors that have steps."""
        return [i for i in self.items if i.ops]

    @property
    def items_in_order(self) -> list[BatchItem]:
        """Shrinking tensors first, large ones before small ones, then growing ones, small before large.

        So that live bytes fall as early and rise as late as they can.
        """

        def sort_key(i: BatchItem) -> tuple[bool, int, int]:
            return i.growth > 0, i.growth if i.growth > 0 else -shard_bytes(i.source, i.target)[0], i.index

        return sorted(self.moving, key=sort_key)


def plan_batch(
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    where: Where | None,
    limit: int | None,
    portable: bool,
    keep: tuple[bool, ...],
    even: bool = False,
) -> Plan:
    """Return one plan for all tensors; see `redistribute`."""
    items = list[BatchItem]()
    for k, (s, t, kept) in enumerate(zip(sources, destinations, keep, strict=True)):
        chosen = best_program(s, t, where, None, portable, False, even)
        ops = tuple(step.op for step in chosen.program.steps)
        items.append(BatchItem(k, s, t, ops, kept))
    fabric = None if where is None else occupied_fabric(where, _meshes(sources, destinations))
    batch = _Batch(tuple(items), Rules(bound_bytes(sources, destinations), portable, even, fabric), where)
    program, books = _plan_unlimited(batch) if limit is None else _plan_within(batch, limit)
    return Plan(program, issue(program, sources, destinations, where, limit, False, books))


@dataclass(slots=True)
class _Best:
    """The cheapest program that keeps the bound so far, and the one with the least peak."""

    rules: Rules
    price: float = math.inf
    cheapest: Booked | None = None
    least: Booked | None = None

    def offer(self, program: Program, *, priced: bool = True) -> float:
        """Keep a program if it is better; return its price, which is infinite above the bound."""
        books = account(program)
        if self.least is None or books.peak_bytes < self.least[1].peak_bytes:
            self.least = program, books
        if books.peak_bytes > self.rules.bound:
            return math.inf
        cost = price(program, books, self.rules) if priced else 0.0
        if cost < self.price * (1 - TIE):
            self.price, self.cheapest = cost, (program, books)
        return cost


def _plan_unlimited(batch: _Batch) -> Booked:
    """The cheapest of the programs that keep the bound, else the one with the least peak found."""
    best = _Best(batch.rules)
    ways = [(way, pack_tensors(way.items_in_order, None)) for way in _tile_choices(batch)]
    packs = ways[0][1]
    if len(packs) > FEW_PACKS or (batch.rules.fabric is None and len(batch.items) > _FEW_TENSORS):
        for late in (False, True):
            slots = side_by_side(sharing(packs), late=late)
            best.offer(assemble_program(slots, batch.items), priced=len(packs) <= FEW_PACKS)
        ways = [] if best.cheapest else ways
    if len(ways) > 1:
        costs = [best.offer(assemble_program(side_by_side([packs]), way.items)) for way, packs in ways]
        ways = [ways[k] for k in sorted(range(len(ways)), key=lambda k: costs[k])[:_MOST_WAYS]]
    for way, packs in ways:
        for slots in schedules(packs):
            best.offer(assemble_program(slots, way.items))
        last = math.inf
        for slots in waves(packs, batch.rules.fabric):
            cost = best.offer(assemble_program(slots, way.items))
            if cost >= last:  # more waves mean more rounds
                break
            last = cost
    if best.cheapest is None:
        for way in _direct_moves(batch):
            best.offer(assemble_program(side_by_side([pack_tensors(way.items_in_order, None)]), way.items))
    found = best.cheapest or best.least
    assert found is not None  # the first is offered whatever there is
    return found


def _plan_within(batch: _Batch, limit: int) -> Booked:
    """The cheapest program that keeps the limit, with at most 64 chunks a step if that can be.

    That without a limit, if it keeps it; else it is one of the programs that are cut into chunks.
    """
    free = _plan_unlimited(batch)
    if free[1].workspace_bytes <= limit:
        return free
    least: list[tuple[int, Program]] = []
    for most in (MANY_CHUNKS, math.inf):
        best: tuple[float, Booked] | None = None
        fitting = 0
        for cuts in _candidates(batch, limit, most, free):
            chunks = cuts.chunks(limit, most)
            if cuts.workspace(chunks) > limit:
                continue
            program = cuts.cut(chunks)
            books = account(program)
            cost = price(program, books, batch.rules)
            if best is None or cost < best[0] * (1 - TIE):
                best = cost, (program, books)
            fitting += 1
            if fitting == _MOST_FITTING and len(program.inputs) > _FEW_TENSORS:  # what has more room comes first
                break
        if best is not None:
            return best[1]
        least.append(_least_workspace(batch, most, free))
        if least[-1][0] <= limit:
            return least[-1][1], account(least[-1][1])
    raise too_little(f"redistribute {len(batch.items)} tensors", limit, *(low for low, _ in least))


def _least_workspace(batch: _Batch, most: float, free: Booked) -> tuple[int, Program]:
    """The least workspace of any candidate, and its program.

    A limit decides how tensors are packed, so each limit found is tried again just below, until nothing is left.
    """
    low: tuple[int, Program] | None = None
    limit = 1
    while True:
        found = [(cuts, cuts.chunks(0, most)) for cuts in _candidates(batch, limit, most, free)]
        cuts, chunks = min(found, key=lambda way: way[0].workspace(way[1]))
        least = cuts.workspace(chunks)
        if low is not None and least >= low[0]:
            return low
        low = least, cuts.cut(chunks)
        limit = max(1, least - 1)


def _candidates(batch: _Batch, limit: int, most: float, free: Booked) -> Iterator[Cuts]:
    """Yield the program without a limit, then those of packs, from one per plan to one per tensor.

    Last those of tensors one by one in the best order. Each program once. Of equal prices the first is taken, so what
    needs the fewest collectives comes first.
    """
    yield Cuts.of(*free)
    seen = {free[0]}
    for way, groups in _groups_within(batch, limit, most):
        program = assemble_program(side_by_side(groups), way.items)
        if program not in seen:
            seen.add(program)
            yield Cuts.of(program, account(program))


def _groups_within(batch: _Batch, limit: int, most: float) -> Iterator[tuple[_Batch, Sequence[Group]]]:
    """Yield groups for every room: of packs alone, of packs and of tensors as far as there is room; each in two orders.

    Tensors side by side need the rounds of a pack, and none of its buffers.
    """
    spare = max(0, limit - batch.rules.bound)
    rooms = (*(limit // k for k in _PARTS_OF_LIMIT), *(spare // k for k in _PARTS_OF_SPARE))
    ordered = batch.items_in_order
    few, known = len(ordered) <= _FEW_TENSORS, set[tuple[tuple[tuple[int, ...], ...], ...]]()
    alone, beside, single = (
        lambda room: [[pack] for pack in pack_tensors(ordered, room)],
        lambda room: group_packs(pack_tensors(ordered, room), room),
        lambda room: group_packs([[i] for i in ordered], room),
    )
    for way, room in itertools.product((alone, beside, single) if few else (beside, alone), (None, *rooms, 0)):
        groups = way(room)
        members = tuple(tuple(tuple(i.index for i in pack) for pack in group) for group in groups)
        if members not in known:
            known.add(members)
            yield batch, groups
            if few:
                yield from ((batch, _least_first(batch, chunks, groups)) for chunks in (1, most))
    for way in itertools.chain(_direct_moves(batch), _narrowest_moves(batch)):
        yield way, _least_first(way, most, [[[i]] for i in way.moving])


def _direct_moves(batch: _Batch) -> Iterator[_Batch]:
    """The batch as planned, and then, where that is allowed, with one direct move for every tensor.

    A plan of several steps is cheapest for its tensor alone; one step holds least beside the other tensors.
    """
    yield batch
    if not batch.rules.portable:
        yield from _otherwise(batch, (replace(i, ops=_straight(i)) for i in batch.items))


def _narrowest_moves(batch: _Batch) -> Iterator[_Batch]:
    """The batch with the moves of every tensor that need the least by themselves, where these are others."""
    given = batch.where, batch.rules.portable
    kinds = dict.fromkeys((i.source, i.target, i.keep) for i in batch.moving)
    least = {(s, t, keep): narrowest(s, t, *given, keep, batch.rules.even) for s, t, keep in kinds}
    yield from _otherwise(batch, (replace(i, ops=least.get((i.source, i.target, i.keep), i.ops)) for i in batch.items))


def _otherwise(batch: _Batch, items: Iterable[BatchItem]) -> Iterator[_Batch]:
    """The batch with other moves of its tensors, where any is another."""
    found = tuple(items)
    if found != batch.items:
        yield replace(batch, items=found)


def _tile_choices(batch: _Batch) -> Iterator[_Batch]:
    """The batch as planned, then with the best tiles of every tensor that changes its mesh, with the second best, ...

    What is cheapest for a tensor alone spares its senders, and where several meshes send to one, receivers wait.
    """
    yield batch
    yield from _planned_as_large(batch)
    ends = {(i.source, i.target) for i in batch.items if i.ops and i.source.mesh != i.target.mesh}
    marks = (s.layout.partial + s.layout.root + t.layout.partial + t.layout.root for s, t in ends)
    if not 0 < len(ends) <= FEW_PACKS or any(marks):
        return
    ways = {(s, t): _sends(s, t, batch.rules.fabric) for s, t in ends}
    for rank in range(max(map(len, ways.values()))):
        items: list[BatchItem] = []
        for i in batch.items:
            found = ways.get((i.source, i.target), [i.ops])
            items.append(replace(i, ops=found[min(rank, len(found) - 1)]))
        yield replace(batch, items=tuple(items))


def _planned_as_large(batch: _Batch) -> Iterator[_Batch]:
    """The batch with the moves that each tensor would have as large as all of them are, where there are times.

    What is cheapest for a tensor alone spares rounds, which the tensors of a batch share.
    """
    kinds = dict.fromkeys((i.source, i.target, i.ops) for i in batch.moving)
    if batch.where is None or len(batch.moving) < 2 or len(kinds) > FEW_PACKS:
        return
    whole = sum(i.size for i in batch.moving)
    rules = batch.rules
    found = {kind: _moves_of_size(*kind, whole, batch.where, rules.portable, rules.even) for kind in kinds}
    yield from _otherwise(batch, (replace(i, ops=found.get((i.source, i.target, i.ops), i.ops)) for i in batch.items))


@lru_cache(maxsize=1024)
def _moves_of_size(
    s: TensorType, t: TensorType, ops: tuple[Op, ...], nbytes: int, where: Where, portable: bool, even: bool
) -> tuple[Op, ...]:
    """The moves of a tensor so many times as large that a shard has some bytes; its own where they do not type."""
    times = nbytes // max(1, *shard_bytes(s, t))
    if times < 2 or not s.ndim or s.mesh != t.mesh or s.layout.boxes or t.layout.boxes:
        return ops
    d = next((d for d in range(s.ndim) if not s.atoms[d] and not t.atoms[d]), 0)
    shape = (*s.shape[:d], s.shape[d] * times, *s.shape[d + 1 :])
    large, wanted = (TensorType(x.dtype, shape, x.layout, x.mesh) for x in (s, t))
    try:
        program = best_program(large, wanted, where, None, portable, False, even).program
        moves = tuple(step.op for step in program.steps)
        return moves if chain(moves, s).output_types == (t,) else ops
    except ShardplanError:
        return ops


def _sends(s: TensorType, t: TensorType, fabric: Fabric | None) -> list[tuple[Op, ...]]:
    """The sends of the tiles worth a price, from near holders, with the gathers behind."""
    blocks = () if fabric is None else fabric.blocks(np.union1d(s.mesh.ids, t.mesh.ids))
    found = ((Send(tile.type.layout, t.mesh), *tile.gathers) for tile in tiles(s, t, fabric))
    ends = ((*ops, *retyping(chain(ops, s).output_types[0], t)) for ops in found)
    return [tuple(op.nearest(blocks) for op in ops) for ops in ends]


def _straight(item: BatchItem) -> tuple[Op, ...]:
    """One direct move, of a tensor that is neither partial nor at a root at either end; else what is planned."""
    ends = item.source.layout, item.target.layout
    if not item.ops or any(end.partial or end.root for end in ends):
        return item.ops
    if item.source.mesh != item.target.mesh:
        return (Send(item.target.layout, item.target.mesh),)
    return tuple(direct(item.source, item.target))


def _least_first(batch: _Batch, most: float, groups: Sequence[Group]) -> list[Group]:
    """The groups in the order of the least workspace found with `most` chunks a step."""
    devices = batch.devices
    base = np.zeros(len(devices), dtype=np.int64)
    for item in batch.items:
        if not item.ops:
            base = base + live_bytes(assemble_program([], [item]), devices)[0]
    known: dict[Hashable, OrderedMove] = {}
    moves: list[OrderedMove] = []
    for group in groups:
        key = tuple(tuple(i.kind for i in pack) for pack in group)
        if key not in known:
            known[key] = _move(group, devices, most)
        moves.append(known[key])
    return [groups[k] for k in least_order(moves, base)]


def _move(group: Group, devices: tuple[int, ...], most: float) -> OrderedMove:
    """What the move of a group holds on each device, with the staging of its steps."""
    program = assemble_program(side_by_side([group]), [i for pack in group for i in pack])
    start, found = live_bytes(program, devices)
    cuts = Cuts.of(program, account(program))
    staged = (x.staged(k) for x, k in zip(cuts.stages, cuts.chunks(0, most), strict=True))
    held = [start, found[-1].after, *(h.during + n for h, n in zip(found, staged, strict=True))]
    rows = [np.broadcast_to(np.asarray(x, dtype=np.int64), (len(devices),)) for x in held]
    return OrderedMove(rows[0], np.max(rows, axis=0), rows[1])


def _meshes(sources: Sequence[TensorType], destinations: Sequence[TensorType]) -> tuple[Mesh, ...]:
    return tuple(dict.fromkeys(t.mesh for t in (*sources, *destinations)))

"""Many tensors as one plan: equal plans packed into one collective, and packs posted together where that is cheaper.

Packs run one after another, shrinking tensors first and growing ones last; or side by side, the first steps of all in
one `together`, then the second ones; or in waves, the second steps of a wave beside the first of the next, where one
loads the links between nodes and the other those inside. Where none of these keeps the bound, or the limit, tensors
move one by one in the order of least peak that `order` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from shardplan.core.accounting import MANY_CHUNKS, account, bound_bytes, holds
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Op, Send, Together
from shardplan.core.ops.collective import moving
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware.prices.fabric import Fabric
from shardplan.movement.batches.tiles import tiles
from shardplan.movement.order import OrderedMove, least_order
from shardplan.movement.redistribution.choice import TIE, Rules, keeping, price, too_little
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
_PARTS_OF_LIMIT, _PARTS_OF_SPARE = (2, 3, 4, 6, 8), (1, 2, 4)
# In how many waves packs may run: beside the last of them runs nothing, which of eight is an eighth. Each number is a
# program to price.
_WAVES = (2, 4, 8, 16)
# Packs of which every schedule, and other tiles, are priced: a program of more takes some 0.1 s to price.
_FEW_PACKS = 64
# Tensors that are tried side by side, and in the best order, for every room under a limit.
_FEW_TENSORS = 256
# Ways to cut the tiles of all tensors of which every schedule is priced: the best side by side.
_MOST_WAYS = 2
Thing = TypeVar("Thing")


@lru_cache(maxsize=1 << 14)  # asked for again for every room
def _shards(s: TensorType, t: TensorType) -> tuple[int, int]:
    return s.local_bytes(), t.local_bytes()


@dataclass(frozen=True, slots=True)
class _Item:
    """One tensor: its ends, and the ops planned for it alone."""

    index: int  # in the caller's lists
    source: TensorType
    target: TensorType
    ops: tuple[Op, ...]
    keep: bool  # the source is the caller's: it counts to the end

    @property
    def kind(self) -> tuple[TensorType, tuple[Op, ...], bool]:
        """What decides what it holds: equal for tensors that are interchangeable."""
        return self.source, self.ops, self.keep

    @property
    def growth(self) -> int:
        """Bytes that the largest shard adds to what is live."""
        before, after = _shards(self.source, self.target)
        return after - before * (not self.keep)

    @property
    def size(self) -> int:
        """Bytes of the larger of its two shards."""
        return max(_shards(self.source, self.target))


_Pack = Sequence[_Item]  # tensors that the same collectives move
_Group = Sequence[_Pack]  # packs that run side by side
_Slot = Sequence[tuple[_Pack, int]]  # steps that are posted together: of which packs, and their numbers there


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
            return i.growth > 0, i.growth if i.growth > 0 else -_shards(i.source, i.target)[0], i.index

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
    items, exact = list[_Item](), limit is None and len(sources) == 1
    for k, (s, t, kept) in enumerate(zip(sources, destinations, keep, strict=True)):
        chosen, _ = best_program(s, t, where, None, portable)
        ops = tuple(step.op for step in chosen.program.steps)
        exact = exact and chosen.exact
        items.append(_Item(k, s, t, ops, kept))
    fabric = None if where is None else fabric_of(where, _meshes(sources, destinations))
    batch = _Batch(tuple(items), Rules(bound_bytes(sources, destinations), portable, fabric))
    program = _unlimited(batch) if limit is None else _within(batch, limit)
    return Plan(program, issue(program, sources, destinations, where, limit, exact))


@dataclass(slots=True)
class _Best:
    """The cheapest program that keeps the bound so far, and the one with the least peak."""

    rules: Rules
    price: float = math.inf
    program: Program | None = None
    peak: float = math.inf
    least: Program | None = None

    def offer(self, program: Program) -> float:
        """Keep a program if it is better; return its price, which is infinite above the bound."""
        books = account(program)
        if books.peak_bytes < self.peak:
            self.peak, self.least = books.peak_bytes, program
        if books.peak_bytes > self.rules.bound:
            return math.inf
        cost = price(program, books, self.rules)
        if cost < self.price * (1 - TIE):
            self.price, self.program = cost, program
        return cost


def _unlimited(batch: _Batch) -> Program:
    """The cheapest of the programs that keep the bound, else the one with the least peak found."""
    best = _Best(batch.rules)
    ways = [(way, _packs(way.ordered, None)) for way in _tiled(batch)]
    if len(ways) > 1:
        costs = [best.offer(_assemble(_side_by_side([packs]), way.items)) for way, packs in ways]
        ways = [ways[k] for k in sorted(range(len(ways)), key=lambda k: costs[k])[:_MOST_WAYS]]
    for way, packs in ways:
        for slots in _schedules(packs):
            best.offer(_assemble(slots, way.items))
        last = math.inf
        for slots in _waves(packs, batch.rules.fabric):
            cost = best.offer(_assemble(slots, way.items))
            if cost >= last:  # more waves mean more rounds
                break
            last = cost
    if best.program is None:
        for way in _straightened(batch):
            best.offer(_assemble(_side_by_side([_packs(way.ordered, None)]), way.items))
    found = best.program or best.least
    assert found is not None  # the first is offered whatever there is
    return found


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
            if best is None or cost < best[0] * (1 - TIE):
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
    seen: set[Program] = set()
    for way, groups in _limited(batch, limit, most):
        program = _assemble(_side_by_side(groups), way.items)
        if program not in seen:
            seen.add(program)
            yield Cuts.of(program, account(program))


def _limited(batch: _Batch, limit: int, most: float) -> Iterator[tuple[_Batch, Sequence[_Group]]]:
    """Yield groups for every room: of packs alone, of packs and of tensors as far as there is room; each in two orders.

    Tensors side by side need the rounds of a pack, and none of its buffers.
    """
    spare = max(0, limit - batch.rules.bound)
    rooms = (*(limit // k for k in _PARTS_OF_LIMIT), *(spare // k for k in _PARTS_OF_SPARE))
    ordered = batch.ordered
    few, known = len(ordered) <= _FEW_TENSORS, set[tuple[tuple[tuple[int, ...], ...], ...]]()
    for room in (None, *rooms, 0):
        packs = _packs(ordered, room)
        found = [[[pack] for pack in packs], _groups(packs, room)]
        if few:
            found.append(_groups([[i] for i in ordered], room))
        for groups in found:
            members = tuple(tuple(tuple(i.index for i in pack) for pack in group) for group in groups)
            if members not in known:
                known.add(members)
                yield batch, groups
                if few:
                    yield batch, _least_first(batch, most, groups)
    for way in _straightened(batch):
        yield way, _least_first(way, most, [[[i]] for i in way.moving])


def _straightened(batch: _Batch) -> Iterator[_Batch]:
    """The batch as planned, and then, where that is allowed, with one direct move for every tensor.

    A plan of several steps is cheapest for its tensor alone; one step holds least beside the other tensors.
    """
    yield batch
    partial = any(i.source.layout.partial or i.target.layout.partial for i in batch.items)
    if not (batch.rules.portable or partial):
        yield replace(batch, items=tuple(replace(i, ops=_straight(i)) for i in batch.items))


def _tiled(batch: _Batch) -> Iterator[_Batch]:
    """The batch as planned, then with the best tiles of every tensor that changes its mesh, with the second best, ...

    What is cheapest for a tensor alone spares its senders, and where several meshes send to one, receivers wait.
    """
    yield batch
    ends = {(i.source, i.target) for i in batch.items if i.ops and i.source.mesh != i.target.mesh}
    marks = (s.layout.partial + s.layout.root + t.layout.partial + t.layout.root for s, t in ends)
    if not 0 < len(ends) <= _FEW_PACKS or any(marks):
        return
    ways = {(s, t): _sends(s, t, batch.rules.fabric) for s, t in ends}
    for rank in range(max(map(len, ways.values()))):
        items: list[_Item] = []
        for i in batch.items:
            found = ways.get((i.source, i.target), [i.ops])
            items.append(replace(i, ops=found[min(rank, len(found) - 1)]))
        yield replace(batch, items=tuple(items))


def _sends(s: TensorType, t: TensorType, fabric: Fabric | None) -> list[tuple[Op, ...]]:
    """The sends of the tiles worth a price, from near holders, with the gathers behind."""
    blocks = () if fabric is None else fabric.blocks(np.union1d(s.mesh.ids, t.mesh.ids))
    found = ((Send(tile.type.layout, t.mesh), *tile.gathers) for tile in tiles(s, t, fabric))
    return [tuple(op.nearest(blocks) for op in ops) for ops in found]


def _straight(item: _Item) -> tuple[Op, ...]:
    """One direct move, of a tensor that is partial at neither end."""
    if not item.ops:
        return ()
    if item.source.mesh != item.target.mesh:
        return (Send(item.target.layout, item.target.mesh),)
    return tuple(direct(item.source, item.target))


def _least_first(batch: _Batch, most: float, groups: Sequence[_Group]) -> list[_Group]:
    """The groups in the order of the least workspace found with `most` chunks a step."""
    devices = batch.devices
    base = np.zeros(len(devices), dtype=np.int64)
    for item in batch.items:
        if not item.ops:
            base = base + holds(_assemble([], [item]), devices)[0]
    known: dict[Hashable, OrderedMove] = {}
    moves: list[OrderedMove] = []
    for group in groups:
        key = tuple(tuple(i.kind for i in pack) for pack in group)
        if key not in known:
            known[key] = _move(group, devices, most)
        moves.append(known[key])
    return [groups[k] for k in least_order(moves, base)]


def _move(group: _Group, devices: tuple[int, ...], most: float) -> OrderedMove:
    """What the move of a group holds on each device, with the staging of its steps."""
    program = _assemble(_side_by_side([group]), [i for pack in group for i in pack])
    start, found = holds(program, devices)
    cuts = Cuts.of(program, account(program))
    staged = (x.staged(k) for x, k in zip(cuts.stages, cuts.chunks(0, most), strict=True))
    held = [start, found[-1].after, *(h.during + n for h, n in zip(found, staged, strict=True))]
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
    """Group tensors that can share collectives, for their largest shards."""

    def key(i: _Item) -> _PackKey:
        return _PackKey(i.ops, i.source.dtype, i.source.ndim, i.source.mesh, i.target.mesh, i.growth > 0)

    return _first_fit(ordered, room, key, lambda i: i.size)


def _groups(packs: Sequence[_Pack], room: int | None) -> list[_Group]:
    """Group packs that may run side by side: shrinking ones, and growing ones behind them."""
    return [*_first_fit(packs, room, lambda pack: pack[0].growth > 0, lambda pack: sum(i.size for i in pack))]


def _first_fit(
    things: Iterable[Thing], room: int | None, key: Callable[[Thing], Hashable], size: Callable[[Thing], int]
) -> list[list[Thing]]:
    """Group things of equal key, in their order each into the first group with room for it; None: room for all."""
    groups: list[list[Thing]] = []
    index: dict[Hashable, list[int]] = {}
    sizes: list[int] = []
    for thing in things:
        mine, bytes_ = index.setdefault(key(thing), []), size(thing)
        for k in mine:
            if room is None or sizes[k] + bytes_ <= room:
                groups[k].append(thing)
                sizes[k] += bytes_
                break
        else:
            mine.append(len(groups))
            groups.append([thing])
            sizes.append(bytes_)
    return groups


def _schedules(packs: Sequence[_Pack]) -> Iterator[list[_Slot]]:
    """Yield when the steps of packs may run, the simplest first: of equal prices the first is taken."""
    yield _one_after_another(packs)
    if len(packs) > 1:
        yield _side_by_side([packs])
    if len(packs) > _FEW_PACKS:
        return
    lengths = _first_fit(packs, None, lambda pack: len(pack[0].ops), len)
    if len(lengths) > 1:
        yield _side_by_side([packs], late=True)
    for groups in (lengths, _sharing(packs)):
        if 1 < len(groups) < len(packs):
            yield _side_by_side(groups)


def _waves(packs: Sequence[_Pack], fabric: Fabric | None) -> Iterator[list[_Slot]]:
    """Yield ever more waves, where steps of one tensor may load links of several levels."""
    if fabric is not None and len(fabric.wires) > 1 and any(len(pack[0].ops) > 1 for pack in packs):
        longest = max(map(len, packs))
        yield from (_in_waves(packs, count) for count in _WAVES if count <= longest)


def _sharing(packs: Sequence[_Pack]) -> list[list[_Pack]]:
    """Group packs that share devices, also by way of others: the groups do not wait for each other."""
    groups: list[tuple[set[int], list[_Pack]]] = []
    for pack in packs:
        devices, mine = {d for t in (pack[0].source, pack[0].target) for d in t.mesh.devices}, [pack]
        for other in [g for g in groups if not devices.isdisjoint(g[0])]:
            groups.remove(other)
            devices, mine = devices | other[0], [*other[1], *mine]
        groups.append((devices, mine))
    return [mine for _, mine in groups]


def _one_after_another(packs: Iterable[_Pack]) -> list[_Slot]:
    return _side_by_side([[pack] for pack in packs])


def _side_by_side(groups: Iterable[_Group], *, late: bool = False) -> list[_Slot]:
    """Group after group, the first steps of its packs in one slot, then the second ones; `late`: the last in one."""
    slots: list[_Slot] = []
    for group in groups:
        longest = max(len(pack[0].ops) for pack in group)
        starts = [longest - len(pack[0].ops) if late else 0 for pack in group]
        for k in range(longest):
            here = zip(group, starts, strict=True)
            slots.append([(pack, k - start) for pack, start in here if 0 <= k - start < len(pack[0].ops)])
    return slots


def _in_waves(packs: Sequence[_Pack], count: int) -> list[_Slot]:
    """Every pack in so many parts, each of which starts a slot after the one before."""
    slots: list[list[tuple[_Pack, int]]] = [[] for _ in range(count + max(len(pack[0].ops) for pack in packs) - 1)]
    for pack in packs:
        for wave in range(count):
            if part := pack[wave * len(pack) // count : (wave + 1) * len(pack) // count]:
                for k in range(len(pack[0].ops)):
                    slots[wave + k].append((part, k))
    return [slot for slot in slots if slot]


def _assemble(slots: Iterable[_Slot], items: Sequence[_Item]) -> Program:
    """One program: in every slot each pack runs one of its ops on all of its tensors."""
    current = {i.index: f"in{i.index}" for i in items}
    types = {f"in{i.index}": i.source for i in items}
    steps: list[Step] = []
    slots = list(slots)
    several = any(len(slot) > 1 for slot in slots)
    for slot in slots:
        found: list[Step] = []
        for pack, number in slot:
            results = tuple(f"t{i.index}.{number}" for i in pack)
            step = Step(pack[0].ops[number], tuple(current[i.index] for i in pack), results)
            found.append(step)
            if several:
                types |= zip(results, step.op.infer(*(types[o] for o in step.operands)), strict=True)
            current |= zip((i.index for i in pack), results, strict=True)
        steps += found if len(found) == 1 else _together(found, types)
    order = sorted(items, key=lambda i: i.index)
    program = Program([(f"in{i.index}", i.source) for i in order], steps, [current[i.index] for i in order])
    return keeping(program, (f"in{i.index}" for i in order if i.keep))


def _together(steps: list[Step], types: dict[str, TensorType]) -> list[Step]:
    """Steps that do not depend on each other, those that send in one."""
    sending = [s for s in steps if moving(s.op) is not None and s.op.rounds(*(types[o] for o in s.operands))]
    if len(sending) < 2:
        return steps
    given = tuple(o for s in sending for o in s.operands)
    made = tuple(r for s in sending for r in s.results)
    body = Program([(o, types[o]) for o in given], sending, made)
    return [*(s for s in steps if s not in sending), Step(Together(body), given, made)]

"""A program replayed as flows, by plain loops: what every port carries, and who waits for whom.

It shares nothing with the price but the groups of collectives and the tables of libraries: messages are those that
lowerings put, routes are those of `hardware.topologies`, rings, trees and switches are written out here, and time is a
clock for each device, each port and each value.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hardware.topologies import outermost, route
from shardplan.core.nested import Nested
from shardplan.core.pattern import Groups, InTurn, Local, Messages, Work
from shardplan.core.program import Program
from shardplan.hardware import Topology
from shardplan.hardware.prices.library import Library, LibraryRow, library

PASSES = {"all_reduce": 2}
SWITCHED = ("nvls", "nvls_tree")


class Weight(NamedTuple):
    """What a step takes: seconds that start it, those of its busiest port, and of every port; who takes part."""

    alpha: float
    transfer: float
    load: dict[Any, float]
    devices: set[int]
    own: float = 0.0  # of `transfer` what no port carries

    @property
    def seconds(self) -> float:
        return self.alpha + self.transfer


def messages_of(op: Any, operands: Any, results: Any) -> Counter[tuple[int, int]]:
    """The bytes from device to device that an op's lowering puts."""
    return sum(rounds_of(op, operands, results), Counter())


def copied(op: Any, operands: Any, results: Any) -> float:
    """The most bytes that a device copies of what it holds and is not folded, where its box does not stay."""
    total = 0.0
    for t, u in zip(operands, results, strict=True):
        if t.layout.partial != u.layout.partial:
            continue
        ids = np.array(sorted({*t.mesh.devices, *u.mesh.devices}))
        amount: Counter[int] = Counter()
        for one in op.in_chunks(1).lowering((t,), ids).rounds():
            for copy in (*one.meanwhile, *one.then):
                amount.update(dict(zip(ids.tolist(), copy.target.elements().tolist(), strict=True)))
        if t.layout.boxes is None and u.layout.boxes is None:
            boxes = [dict(zip(x.mesh.devices, x.boxes().tolist(), strict=True)) for x in (t, u)]
            amount = Counter({d: n for d, n in amount.items() if boxes[0].get(d) != boxes[1].get(d)})
        total += max(amount.values(), default=0) * t.itemsize
    return total


def rounds_of(op: Any, operands: Any, results: Any) -> Iterator[Counter[tuple[int, int]]]:
    """The same of every round."""
    types = (*operands, *results)
    ids = np.array(sorted({d for t in types for d in t.mesh.devices}))
    sizes = {f"x{k}": t.itemsize for k, t in enumerate(operands)} | {f"y{k}": t.itemsize for k, t in enumerate(results)}
    sizes |= {"x": operands[0].itemsize, "y": results[0].itemsize}
    for one in op.lowering(operands, ids).rounds():
        sent: Counter[tuple[int, int]] = Counter()
        for put in one.puts:
            size = sizes.get(put.source.buffer, operands[0].itemsize)
            for a, b, n in zip(ids.tolist(), put.peer.tolist(), put.source.elements().tolist(), strict=True):
                if n:
                    sent[a, b] += n * size
        yield sent


def runs_natively(op: Any, operands: Any, results: Any) -> bool:
    """Whether a library that takes equal parts only runs a collective: all of a group have as many elements."""
    for t in (*operands, *results):
        for group in operands[0].mesh.group_places(op.members(operands[0])).tolist():
            if len({math.prod(t.local_shape(m)) for m in group}) > 1:
                return False
    reduced = operands[0].layout.partial != results[0].layout.partial
    kinds = {t.layout.reduction for t in operands} <= {"sum", "product", "min", "max"}
    known = {t.dtype for t in operands} <= {"i8", "u8", "i32", "i64", "f16", "bf16", "f32", "f64"}
    return not op.algorithm and (not reduced or (kinds and known))


def slots_of(op: Any, t: Any, u: Any) -> tuple[list[float], int]:
    """What a member of each group puts into a padded collective, and the bytes that are copied for padding's sake.

    The elements of arrays are numbered, and slots written out: -1 is padding.
    """
    numbers = np.arange(math.prod(t.shape)).reshape(t.shape)

    def seen(x: Any, place: int) -> np.ndarray:
        return numbers[tuple(slice(a, b) for a, b in x.boxes()[place].tolist())].reshape(-1)

    held: list[float] = []
    copied = 0
    for group in t.mesh.group_places(op.members(t)).tolist():
        whole, cut = (u, t) if op.name == "all_gather" else (t, u)  # of an all-to-all, what is given
        parts = [[np.intersect1d(seen(t, a), seen(u, b)) for b in group] for a in group]
        slot = max(len(part) for row in parts for part in row)
        if op.name != "all_to_all":
            slot = max(len(seen(cut, a)) for a in group)
        held.append(slot * t.itemsize * (1 if op.name == "all_gather" else len(group)))
        for a in group if op.name != "all_to_all" else ():
            flat = np.concatenate(
                [np.pad(seen(cut, b), (0, slot - len(seen(cut, b))), constant_values=-1) for b in group]
            )
            inside = flat[: len(seen(whole, a))]
            if not np.array_equal(flat[flat >= 0], seen(whole, a)):
                continue  # of even parts it would be copied as well
            in_place = (
                np.array_equal(inside, seen(whole, a))
                and 8 * (len(flat) - len(inside)) <= whole.local_bytes() / t.itemsize
            )
            if op.name == "reduce_scatter" or not in_place:
                copied = whole.local_bytes()
    return held, copied


class Replay:
    """A topology, and the topology id of each device id."""

    def __init__(self, topology: Topology, place: list[int]) -> None:
        self.topology, self.place = topology, place
        self.library: Library = library(topology.library)
        names = [level.name for level in topology.levels]
        self.far = names.index("node") + 1 if "node" in names else len(names) - 1

    def seconds(self, program: Program) -> float:
        """When the last step ends."""
        return self._walk(program)[0]

    def _walk(self, program: Program) -> tuple[float, dict[Any, float], set[int]]:
        """The makespan, the load of every port, and all devices that take part."""
        clock: dict[Any, float] = defaultdict(float)
        load: Counter[Any] = Counter()
        devices: set[int] = set()
        for step in program.steps:
            operands, results = program.step_types(step)
            weight = self._weigh(step.op, operands, results)
            uses = [("device", d) for d in weight.devices] + [("port", r) for r, busy in weight.load.items() if busy]
            waits = [*uses, *(("value", o) for o in step.operands)]
            end = max((clock[w] for w in waits), default=0.0) + weight.seconds
            clock |= dict.fromkeys([*uses, *(("value", r) for r in step.results)], end)
            load.update(weight.load)
            devices |= weight.devices
        return max(clock.values(), default=0.0), load, devices

    def _weigh(self, op: Any, operands: Any, results: Any) -> Weight:
        everyone = {int(d) for d in op.devices(*results)}
        if isinstance(op, Nested):
            if op.at_once:
                body = op.body
                moves = [self._weigh(s.op, *body.step_types(s)) for s in body.steps]
                load: Counter[Any] = Counter()
                for move in moves:
                    load.update(move.load)
                own = max(m.own for m in moves)
                transfer = max([max(load.values(), default=0.0) + own, *(m.transfer for m in moves)])
                return Weight(max(m.alpha for m in moves), transfer, load, set().union(*(m.devices for m in moves)))
            once, load, devices = self._walk(op.body)
            if not op.times:
                return Weight(0.0, 0.0, {}, everyone)
            return Weight(0.0, op.times * once, load, devices or everyone)
        pattern = op.pattern(*operands)
        device = self.topology.device
        if isinstance(pattern, Local):
            return Weight(0.0, busy := 2 * pattern.nbytes / device.memory_bandwidth, {}, everyone, busy)
        if isinstance(pattern, Work):
            flops = dict(device.flops).get("*", math.inf)
            busy = max(pattern.flops / flops, pattern.nbytes / device.memory_bandwidth)
            return Weight(0.0, busy, {}, everyone, busy)
        if op.algorithm == "padded":
            assert isinstance(pattern, Groups)
            found = [slots_of(op, t, u) for t, u in zip(operands, results, strict=True)]
            assert np.allclose(pattern.nbytes, np.sum([held for held, _ in found], axis=0))
            copied_too = found[0][1] if len(found) == 1 and op.chunks == 1 else 0
            copied_too = pattern.copied if op.name == "all_to_all" else copied_too
            weight, busy = self._groups(pattern), 2 * copied_too / device.memory_bandwidth
            return weight._replace(transfer=weight.transfer + busy, own=weight.own + busy)
        if (isinstance(pattern, Groups | InTurn) and self.library.even_only) or op.algorithm:
            if not runs_natively(op, operands, results):
                return self._composed(op, operands, results)
        if isinstance(pattern, Messages):
            sent = messages_of(op, operands, results)
            if not sent:
                return Weight(0.0, 0.0, {}, everyone)
            placed = [(self.place[a], self.place[b], n) for (a, b), n in sent.items()]
            own = copied(op, operands, results)
            return self._messages(placed, pattern, {d for pair in sent for d in pair}, own)
        return self._groups(pattern)

    def _messages(
        self, sent: list[tuple[int, int, float]], pattern: Messages, devices: set[int], own: float = 0.0
    ) -> Weight:
        hops = self._message_hops([(a, b) for a, b, _ in sent])
        loads = {row: self._loaded(sent, row) for row in self.library.serving("messages")}
        return self._best("messages", hops, loads, pattern.chunks, devices, own)

    def _composed(self, op: Any, operands: Any, results: Any) -> Weight:
        """One round of messages after the other."""
        times = 1 if op.algorithm in ("chain", "tree") or op.name in ("reduce", "broadcast") else op.chunks
        found: list[Weight] = []
        for sent in rounds_of(op.in_chunks(op.chunks // times), operands, results):
            if sent:
                placed = [(self.place[a], self.place[b], n / times) for (a, b), n in sent.items()]
                ends = {d for pair in sent for d in pair}
                own = copied(op, operands, results) / times if not found else 0.0
                found.append(self._messages(placed, Messages(*np.zeros((3, 0))), ends, own))
        load: Counter[Any] = Counter()
        for one in found * times:
            load.update(one.load)
        parts = zip(*((w.alpha, w.transfer, w.own) for w in found), strict=True)
        alpha, transfer, own = (times * sum(part) for part in parts)
        return Weight(alpha, transfer, load, set().union(*(w.devices for w in found)), own)

    def _groups(self, pattern: Groups) -> Weight:
        groups = [[self.place[d] for d in row] for row in pattern.members.tolist()]
        nbytes, kind = pattern.nbytes.tolist(), pattern.kind
        devices = {int(d) for d in pattern.members.reshape(-1)}
        if not groups or len(groups[0]) == 1 or not any(nbytes):
            return Weight(0.0, 0.0, {}, devices)
        k = len(groups[0])
        own = max(nbytes) / (1 if kind == "all_gather" else k)
        found: list[Weight] = []
        for row in self.library.serving(kind):
            if row.algorithm == "p2p":
                sent = [(a, b, n / k) for g, n in zip(groups, nbytes, strict=True) for a in g for b in g if a != b]
                hops, load = self._message_hops([(a, b) for a, b, _ in sent]), self._loaded(sent, row)
            elif row.algorithm == "ring":
                hops = [[PASSES.get(kind, 1) * n for n in self._ring_hops(g)] for g in groups]
                load = self._ring(kind, groups, nbytes, row)
            elif row.algorithm == "tree":
                hops = [self._tree_hops(g) for g in groups]
                chained = 2 * (k - 1) / k  # no member sends less
                shares = [(max(chained, min(2.0, max(self._inside(g).values()) - 1)), self._double(g)) for g in groups]
                load = self._spread(groups, shares, nbytes, row)
            elif row.algorithm in SWITCHED and all(self._reduces(g, row) for g in groups):
                hops = [self._switch_hops(g) for g in groups]
                shares = [(self._switch_share(g, row), self._double(g)) for g in groups]
                load = self._spread(groups, shares, nbytes, row)
            else:
                continue
            copied = 0.0 if row.algorithm in ("tree", *SWITCHED) else own
            if (weight := self._row(row, hops, load, pattern.chunks, devices, copied)) is not None:
                found.append(weight)
        return min(found, key=lambda w: w.seconds)

    def _best(self, op: str, hops: Any, loads: Any, chunks: int, devices: set[int], own: float) -> Weight:
        found = [self._row(row, hops, loads[row], chunks, devices, own) for row in self.library.serving(op)]
        return min((w for w in found if w is not None), key=lambda w: w.seconds)

    def _row(self, row: LibraryRow, hops: Any, load: Any, chunks: int, devices: set[int], own: float) -> Weight | None:
        """Seconds under a row; None where it does not serve: hops by group or device, one number a level."""
        base = row.base_far if any(any(one[: self.far]) for one in hops) else row.base
        if base is None:
            return None
        levels = self.topology.levels
        each = [v.latency + row.far if j < self.far else v.latency * row.near for j, v in enumerate(levels)]
        alpha = self.topology.device.launch + base + max(sum(map(float.__mul__, each, map(float, h))) for h in hops)
        inner = levels[-1]
        copied = self.library.own_copy * own / (inner.bandwidth * inner.efficiency * inner.uplinks * row.near_share)
        return Weight(chunks * alpha, max(load.values()) + copied, load, devices, copied)

    def _share(self, level: int, row: LibraryRow) -> float:
        return self.topology.levels[level].efficiency * (row.far_share if level < self.far else row.near_share)

    def _loaded(self, sent: list[tuple[int, int, float]], row: LibraryRow) -> dict[Any, float]:
        load: Counter[Any] = Counter()
        for a, b, n in sent:
            for resource, rate in route(self.topology, a, b):
                load[resource] += n / (rate * self._share(resource[0], row))
        return load

    def _crossed(self, a: int, b: int) -> int:
        return outermost(self.topology, a, b)

    def _message_hops(self, pairs: list[tuple[int, int]]) -> list[list[int]]:
        """Of every sender and every receiver, over each level: one after another."""
        found: dict[Any, list[int]] = defaultdict(lambda: [0] * len(self.topology.levels))
        seen: set[Any] = set()
        for a, b in pairs:
            for end, device, other in (("out", a, b), ("in", b, a)):
                hops, j = found[end, device], self._crossed(a, b)
                if self.library.member_order or j >= self.far:
                    hops[j] += 1
                    continue
                # A message starts inside; each other node is waited for once.
                hops[-1] += 1
                node = (end, device, other // self.topology.strides[self.far - 1])
                hops[j] += node not in seen
                seen.add(node)
        return list(found.values())

    def _units(self, group: list[int]) -> list[int]:
        return [1, *(len({d // s for d in group}) for s in self.topology.strides)]

    def _ring_hops(self, group: list[int]) -> list[int]:
        units = self._units(group)
        return [b - a for a, b in zip(units, units[1:], strict=False)]

    def _ring(self, kind: str, groups: list[list[int]], nbytes: list[float], row: LibraryRow) -> dict[Any, float]:
        k = len(groups[0])
        volume = {"all_reduce": 2 * (k - 1) / k, "reduce_scatter": (k - 1) / k, "all_gather": k - 1}.get(kind, 1)
        if not self.library.member_order:
            return self._spread(groups, [(volume, volume)] * len(groups), nbytes, row)
        sent: list[tuple[int, int, float]] = []
        for group, n in zip(groups, nbytes, strict=True):
            edges = list(zip(group, group[1:], strict=False))
            if kind == "reduce":
                edges = [(b, a) for a, b in edges]
            elif kind != "broadcast":
                edges.append((group[-1], group[0]))
            sent += [(a, b, n * volume) for a, b in edges]
        return self._loaded(sent, row)

    def _tree_hops(self, group: list[int]) -> list[int]:
        """Two passes over the chain inside a node, and up and down a binary tree of nodes; one level each."""
        _, nodes, members = self._units(group)
        return [2 * math.ceil(math.log2(nodes)) if nodes > 1 else 0, 2 * (math.ceil(members / nodes) - 1)]

    def _inside(self, group: list[int]) -> Counter[int]:
        return Counter(d // self.topology.strides[self.far - 1] for d in group)

    def _reduces(self, group: list[int], row: LibraryRow) -> bool:
        """Whether switches reduce inside nodes, and the group has enough members in each of its own."""
        reduces = all(level.reduces for level in self.topology.levels[self.far :])
        return reduces and min(self._inside(group).values()) >= row.members

    def _switch_share(self, group: list[int], row: LibraryRow) -> float:
        """What a member sends its switch: all of it once, its part of the sum, and something for every member."""
        inside = self._inside(group).values()
        return 1 + 1 / min(inside) + row.per_member * max(inside)

    def _switch_hops(self, group: list[int]) -> list[int]:
        _, nodes, members = self._units(group)
        return [2 * math.ceil(math.log2(nodes)) if nodes > 1 else 0, math.ceil(members / nodes) - 1]

    def _double(self, group: list[int]) -> float:
        """What the busiest node of two mirrored binary trees sends, each with half of the bytes up and down."""
        nodes = self._units(group)[self.far]
        if nodes < 2:
            return 0.0
        sent = [0.0] * nodes
        for mirrored in (False, True):
            for node in range(nodes):
                at = nodes - 1 - node if mirrored and nodes % 2 == 0 else (node - 1) % nodes if mirrored else node
                bit = 1
                while not at & bit and bit < nodes:
                    bit *= 2
                if at == 0:
                    continue
                up = (at ^ bit) | (bit * 2)
                up = at ^ bit if up >= nodes else up
                parent = nodes - 1 - up if mirrored and nodes % 2 == 0 else (up + 1) % nodes if mirrored else up
                sent[node] += 0.5
                sent[parent] += 0.5
        return max(sent)

    def _spread(self, groups: Any, shares: Any, nbytes: list[float], row: LibraryRow) -> dict[Any, float]:
        """Nodes of one switch, devices of another: what a unit sends is dealt out to its members, each on its rail."""
        load: Counter[Any] = Counter()
        levels, strides = self.topology.levels, self.topology.strides
        for group, (near, far), n in zip(groups, shares, nbytes, strict=True):
            for j, (level, stride) in enumerate(zip(levels, strides, strict=True)):
                if len({d // stride for d in group}) < 2 or (j >= self.far and len(group) < 2):
                    continue
                ways = min(level.uplinks, stride)
                for d in group:
                    inside = sum(e // stride == d // stride for e in group)
                    bytes_out = (far if j < self.far else near) * n / inside
                    rate = level.bandwidth * level.uplinks / ways * dict(level.degraded).get(d // stride, 1.0)
                    for end in ("out", "in"):
                        port = (j, d // stride, end, d % stride * ways // stride)
                        load[port] += bytes_out / (rate * self._share(j, row))
        return load


def replayed(program: Program, topology: Topology, place: np.ndarray | None = None) -> float:
    """The seconds of a program whose device ids lie at these topology ids; by default their own."""
    return Replay(topology, list(range(topology.size)) if place is None else place.tolist()).seconds(program)

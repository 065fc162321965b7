"""Many tensors as one plan: shrinking tensors first, growing ones last, equal plans packed into one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.core.accounting import account, bound_bytes
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Op
from shardplan.core.program import Program, Step
from shardplan.core.tensor import TensorType
from shardplan.errors import Infeasible
from shardplan.hardware.certificate import issue
from shardplan.hardware.plan import Plan
from shardplan.hardware.where import Where, fabric_of
from shardplan.movement.fit import Rules, fitted, price


@dataclass(frozen=True, slots=True)
class _Item:
    index: int
    source: TensorType
    target: TensorType
    ops: tuple[Op, ...]
    exact: bool
    growth: int


def plan_batch(
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    where: Where | None,
    limit: int | None,
    portable: bool,
) -> Plan:
    """Return one plan for all tensors; see `redistribute`."""
    from shardplan.movement.redistribute import best_program

    place = _one_place(sources, destinations, where)
    items: list[_Item] = []
    for k, (s, t) in enumerate(zip(sources, destinations, strict=True)):
        chosen, _ = best_program(s, t, place, None, portable)
        ops = tuple(step.op for step in chosen.program.steps)
        items.append(_Item(k, s, t, ops, chosen.exact, t.local_bytes() - s.local_bytes()))
    bound = bound_bytes(sources, destinations)
    fabric = None if place is None else fabric_of(place, _meshes(sources, destinations))
    ordered = sorted(
        items, key=lambda i: (i.growth > 0, i.growth if i.growth > 0 else -i.source.local_bytes(), i.index)
    )
    exact = all(i.exact for i in items)
    if limit is None:
        packs = _packs(ordered, None)
        program = _assemble(packs, items)
        if account(program).peak_bytes > bound:
            program = _assemble(_careful(items, bound), items)
        if (peak := account(program).peak_bytes) > bound:
            raise Infeasible(
                f"redistribute {len(items)} tensors: no order found keeps {bound} bytes a device, only {peak}"
            )
        return Plan(program, issue(program, sources, destinations, place, None, exact and len(items) == 1))
    return _within(ordered, items, sources, destinations, place, limit, portable, Rules(bound, limit, portable, fabric))


def _within(
    ordered: list[_Item],
    items: list[_Item],
    sources: tuple[TensorType, ...],
    destinations: tuple[TensorType, ...],
    place: Where | None,
    limit: int,
    portable: bool,
    rules: Rules,
) -> Plan:
    """Try packs from one per plan to one per tensor; the cheapest that fits, chunked as needed."""
    least = float("inf")
    best: tuple[float, Program] | None = None
    spare = max(0, limit - rules.bound)
    for room in (None, limit // 2, limit // 8, spare, spare // 2, spare // 4, 0):
        program = _assemble(_packs(ordered, room), items)
        books = account(program)
        if books.workspace_bytes > limit:
            program = fitted(program, books, limit)
            books = account(program)
        if books.workspace_bytes <= limit:
            cost = price(program, books, rules)
            if best is None or cost < best[0]:
                best = cost, program
    if best is None:
        for program in (_assemble(_packs(ordered, 0), items), _direct_one_by_one(ordered, items, portable)):
            if program is None:
                continue
            books = account(program)
            for target in (limit, 0):
                smaller = fitted(program, books, target)
                used = account(smaller).workspace_bytes
                least = min(least, used)
                if used <= limit and best is None:
                    best = 0.0, smaller
    if best is None:
        raise Infeasible(
            f"redistribute {len(items)} tensors within {limit} bytes a device: no plan; the least that works is "
            f"{int(least)} bytes",
            int(least),
        )
    return Plan(best[1], issue(best[1], sources, destinations, place, limit, False))


def _meshes(sources: Sequence[TensorType], destinations: Sequence[TensorType]) -> tuple[Mesh, ...]:
    return tuple(dict.fromkeys(t.mesh for t in (*sources, *destinations)))


def _one_place(
    sources: tuple[TensorType, ...], destinations: tuple[TensorType, ...], where: Where | None
) -> Where | None:
    """The placement of the largest tensor: a batch runs on one placement."""
    from shardplan.movement.redistribute import best_program, spots

    if where is None or not sources:
        return where
    if len(list(spots(where, sources[0], destinations[0]))) == 1:
        return where
    largest = max(range(len(sources)), key=lambda k: sources[k].nbytes)
    return best_program(sources[largest], destinations[largest], where, None, False)[1]


def _packs(ordered: Sequence[_Item], room: int | None) -> list[list[_Item]]:
    """Group tensors of equal ops, dtype and direction, first fit decreasing under `room` bytes (None: no bound)."""
    packs: list[list[_Item]] = []
    index: dict[tuple[object, ...], list[int]] = {}
    sizes: list[int] = []
    for item in ordered:
        if not item.ops:
            continue
        key = (item.ops, item.source.dtype, item.source.mesh, item.target.mesh, item.growth > 0, item.source.ndim)
        size = max(item.source.local_bytes(), item.target.local_bytes())
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


def _careful(items: Sequence[_Item], bound: int) -> list[list[_Item]]:
    """Order single tensors so that the sum of live shards stays within `bound` on every device, if a greedy order can.

    For devices that hold unequal sizes: next comes the tensor that leaves the least on the fullest device.
    """
    devices = np.array(sorted({d for i in items for t in (i.source, i.target) for d in t.mesh.devices}))

    def held(t: TensorType) -> np.ndarray:
        out = np.zeros(len(devices), dtype=np.int64)
        out[np.searchsorted(devices, t.mesh.ids)] = t.elements() * t.itemsize
        return out

    before = {i.index: held(i.source) for i in items}
    after = {i.index: held(i.target) for i in items}
    live = np.sum([before[i.index] for i in items], axis=0)
    left = [i for i in items if i.ops]
    order: list[list[_Item]] = []
    while left:
        worst = [int((live - before[i.index] + after[i.index]).max()) for i in left]
        fits = [k for k, w in enumerate(worst) if w <= bound] or list(range(len(left)))
        k = min(fits, key=lambda k: (int((after[left[k].index] - before[left[k].index]).sum()), worst[k], k))
        chosen = left.pop(k)
        live = live - before[chosen.index] + after[chosen.index]
        order.append([chosen])
    return order


def _direct_one_by_one(ordered: Sequence[_Item], items: list[_Item], portable: bool) -> Program | None:
    from shardplan.core.ops import Send
    from shardplan.movement.emit import direct

    if portable or any(i.source.layout.partial or i.target.layout.partial for i in items):
        return None
    changed: list[_Item] = []
    for i in ordered:
        cross = i.source.mesh != i.target.mesh
        ops: list[Op] = [Send(i.target.layout, i.target.mesh)] if cross else direct(i.source, i.target)
        changed.append(_Item(i.index, i.source, i.target, tuple(ops) if i.ops else (), False, i.growth))
    return _assemble([[i] for i in sorted(changed, key=lambda i: (i.growth, i.index)) if i.ops], changed)


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
    return Program([(f"in{i.index}", i.source) for i in order], steps, [current[i.index] for i in order])

"""The price of a communication pattern on a fabric: seconds, bytes for each level, and the algorithm chosen.

`seconds = chunks * alpha + largest load / rate`, all groups of the pattern on the resources at once. Which algorithms
there are, when they start and what they reach of the rates is the library's (`library`); everyone who prices, planner,
certificate, placement, audit and simulation, asks `price`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np

from shardplan.core.pattern import (
    AtOnce,
    Groups,
    InTurn,
    Local,
    Messages,
    Overlap,
    Pattern,
    StepPattern,
    Work,
    computes,
)
from shardplan.errors import TopologyError, excerpt
from shardplan.hardware.prices.aggregate import GroupLayout
from shardplan.hardware.prices.critical_path import critical, windows
from shardplan.hardware.prices.fabric import Fabric, Floats, Flows, Ints, Load, add_loads, busiest, scale_load
from shardplan.hardware.prices.fused import FusedConstants, FusedVariant, FusedWork, variant_seconds, variants
from shardplan.hardware.prices.kernels import kernel_seconds
from shardplan.hardware.prices.library import KINDS, Library, LibraryRow
from shardplan.hardware.prices.traffic import ALGORITHMS, Traffic, message_totals, messages

PRICED = (*KINDS, "permute")  # what traffic may name; a permute sends to the next member


@dataclass(frozen=True, slots=True)
class Price:
    """What a pattern costs under the library's cheapest row, or that of the algorithm asked for."""

    algorithm: str
    alpha: float  # seconds that do not depend on bytes, for all chunks
    transfer: float  # seconds of the busiest resource, round by round, and of a member's copy of its own part
    level_bytes: tuple[float, ...]  # whose sender and receiver first differ at each level, outermost first, all devices
    load: Load = field(default=(), compare=False, repr=False)  # of all rounds on every resource
    own: float = 0.0  # of `transfer` what is no communication
    # The row that is paid; None where there are several, or none.
    row: LibraryRow | None = field(default=None, compare=False, repr=False)

    @property
    def seconds(self) -> float:
        """Alpha and transfer together."""
        return self.alpha + self.transfer


def price(pattern: Pattern, fabric: Fabric, algorithm: str = "auto") -> Price:
    """Return the price of a communication pattern.

    `algorithm` is `auto` for the library's cheapest row, or the name of an algorithm or row of the library; where it
    does not serve the collective or the groups, the cheapest that does is taken (NCCL's trees are all_reduce only).

    Raises `TopologyError` for an unknown algorithm or collective, and a device that is not on the topology.

    Source: arXiv 2110.10548; `library` for rows.

    >>> from shardplan.hardware.topology import Topology
    >>> fabric = Fabric(Topology.load("nominal", devices=4))
    >>> price(Groups("all_gather", np.array([[0, 1, 2, 3]]), np.array([1e6])), fabric, "ring").transfer
    6e-05
    """
    checked_algorithm(algorithm, fabric.library)
    pattern = as_messages(pattern, fabric.library)
    match pattern:
        case Local():
            return Price("copy", 0.0, copied := _copy_seconds(pattern.nbytes, fabric), _no_bytes(fabric), own=copied)
        case Work():
            busy = float(kernel_seconds(pattern, fabric.topology.device))
            return Price("kernel", 0.0, busy, _no_bytes(fabric), own=busy)
        case Messages():
            return _messages(pattern, fabric, algorithm)
        case Groups():
            return _groups(pattern, fabric, algorithm)
        case InTurn():
            return _in_turn(pattern, fabric, algorithm)
        case AtOnce():
            return _at_once(pattern, fabric, algorithm)
        case Overlap():
            return _overlap(pattern, fabric, algorithm)
        case _:
            assert_never(pattern)


def as_messages(pattern: Pattern, library: Library) -> Pattern:
    """Return what runs: of a collective that the library does not have its messages, else the pattern itself."""
    if isinstance(pattern, Groups) and pattern.composed is not None and library.even_only:
        return pattern.composed()
    return pattern


def prices(steps: Sequence[StepPattern], fabric: Fabric, algorithm: str = "auto") -> list[Price]:
    """Return the price of every step; arguments and errors as for `price`. Steps of one pattern are priced once."""
    found = {pattern: price(pattern, fabric, algorithm) for pattern in {step.pattern: None for step in steps}}
    return [found[step.pattern] for step in steps]


def checked_algorithm(algorithm: object, library: Library) -> str:
    """Return an algorithm; raises `TopologyError` for one that the library does not have."""
    legal = ("auto", *library.algorithms())
    if not isinstance(algorithm, str) or algorithm not in legal:
        raise TopologyError(
            f"algorithm {excerpt(algorithm)} is unknown to library {library.name}; legal: {', '.join(legal)}"
        )
    return algorithm


def seconds(pattern: Pattern, fabric: Fabric, algorithm: str = "auto") -> float:
    """Return the seconds of a pattern; arguments and errors as for `price`."""
    return price(pattern, fabric, algorithm).seconds


def _no_bytes(fabric: Fabric) -> tuple[float, ...]:
    return (0.0,) * len(fabric.wires)


def _in_turn(pattern: InTurn, fabric: Fabric, algorithm: str) -> Price:
    """The longest path through the parts, `times` times; all of them load the resources."""
    times, parts = pattern.times, prices(pattern.steps, fabric, algorithm)
    path = [parts[k] for k in critical(windows(pattern.steps, [p.seconds for p in parts], [p.load for p in parts]))]
    moved = times * np.sum([_no_bytes(fabric), *(part.level_bytes for part in parts)], axis=0)
    names = [part.algorithm for part in parts if part.row is not None]
    return Price(
        " and ".join(dict.fromkeys(names)) if parts and len(names) == len(parts) else "in turn",
        times * sum(part.alpha for part in path),
        times * sum(part.transfer for part in path),
        tuple(moved.tolist()),
        scale_load(_total_load(parts, fabric), [times] * len(fabric.wires)),
        times * sum(part.own for part in path),
    )


def _total_load(parts: Sequence[Price], fabric: Fabric) -> Load:
    return add_loads([(None,) * len(fabric.wires), *(part.load for part in parts)])


def _at_once(pattern: AtOnce, fabric: Fabric, algorithm: str) -> Price:
    """Loads add; the largest alpha and the longest copy count once; no part ends before it would alone.

    Kernels run beside messages: what takes longer counts.
    """
    alone = prices(pattern.steps, fabric, algorithm)
    ways = [alone, _priced_as_one(pattern, alone, fabric)] if algorithm == "auto" else [alone]
    return min((_beside(pattern.steps, way, fabric) for way in ways), key=lambda one: one.seconds)


def _priced_as_one(pattern: AtOnce, alone: Sequence[Price], fabric: Fabric) -> list[Price]:
    """The prices of steps of which collectives alike, over the same groups, take the row that is best for all of them.

    A library chooses for all that are issued in one group by their bytes together (NCCL's `ncclPrepareTasks`): each by
    itself would spare rounds, which they share, and load links with more bytes.
    """
    found = list(alone)
    alike: dict[Hashable, dict[int, Groups]] = {}
    for k, step in enumerate(pattern.steps):
        one = step.pattern
        if isinstance(one, Groups) and alone[k].row is not None:
            key = one.kind, one.chunks, one.members.shape, one.members.tobytes()
            alike.setdefault(key, {})[k] = one
    for places in alike.values():
        first, *others = places.values()
        if others:
            whole = replace(first, nbytes=np.sum([one.nbytes for one in places.values()], axis=0), copied=0.0)
            row = _groups(whole, fabric, "auto").algorithm
            found = [price(places[k], fabric, row) if k in places else one for k, one in enumerate(found)]
    return found


def _beside(steps: Sequence[StepPattern], found: Sequence[Price], fabric: Fabric) -> Price:
    """The price of steps at once, of their prices."""
    kernels = [computes(step.pattern) for step in steps]
    parts = [part for part, alone in zip(found, kernels, strict=True) if not alone]
    busy = max((part.seconds for part, alone in zip(found, kernels, strict=True) if alone), default=0.0)
    moved = np.sum([_no_bytes(fabric), *(part.level_bytes for part in parts)], axis=0)
    load = _total_load(parts, fabric)
    own = max((part.own for part in parts), default=0.0)
    transfer = max([busiest(load) + own, *(part.transfer for part in parts)])
    alpha = max((p.alpha for p in parts), default=0.0)
    if busy > alpha + transfer:
        alpha, transfer, own = 0.0, busy, busy
    return Price("at once", alpha, transfer, tuple(moved.tolist()), load, own)


def _overlap(pattern: Overlap, fabric: Fabric, algorithm: str) -> Price:
    """Kernels whose result goes out tile by tile; where it does not say in how many, in the number that is fastest."""
    work, constants, moved = price_overlap(pattern, fabric, algorithm)
    if work is None:
        return moved
    assert constants is not None
    ways = [FusedVariant("one_shot" if pattern.one_shot else "fused", n) for n in (pattern.tiles,) if n]
    ways = ways or [way for way in variants(work.reduces)[1:] if (way.kind == "one_shot") == pattern.one_shot]
    found = {way: float(variant_seconds(work, way, constants)) for way in ways}
    best = min(found, key=lambda way: found[way])
    return Price(str(best), 0.0, found[best], moved.level_bytes, moved.load, found[best])


def price_overlap(
    pattern: Overlap, fabric: Fabric, algorithm: str = "auto", measured: FusedConstants | None = None
) -> tuple[FusedWork | None, FusedConstants | None, Price]:
    """Return the work of kernels and their move, what the transport takes, and the price of the move, or of all of it.

    Without `measured` constants the transport is as fast as the library says that the move is, a signal takes the
    latency of the outermost level that it crosses, and tiles are free. There is no work where nothing moves.
    """
    busy, own = _busy(pattern, fabric, algorithm, measured)
    moved = price(pattern.move.pattern, fabric, algorithm)
    ran_as = pattern.move.pattern
    if not isinstance(ran_as, Groups) or ran_as.members.shape[1] < 2 or not pattern.nbytes:
        total = busy + moved.seconds
        return None, None, Price("kernel", 0.0, total, moved.level_bytes, moved.load, total)
    ranks = int(ran_as.members.shape[1])
    work = FusedWork(
        busy, float(pattern.nbytes), ranks, bool(pattern.whole), float(pattern.whole), own, pattern.addends
    )
    if measured is None:
        crossed = [j for j, n in enumerate(moved.level_bytes) if n > 0]
        latency = float(fabric.latencies()[crossed[0] if crossed else -1])
        sent = float(pattern.nbytes + pattern.whole) * (ranks - 1) / ranks
        measured = FusedConstants(
            fabric.topology.name or "topology",
            latency=moved.alpha / (2 if pattern.whole else 1),
            bandwidth=sent / max(moved.transfer - moved.own, 1e-30),
            copy_bandwidth=fabric.topology.device.memory_bandwidth * fabric.topology.device.kernels.stream / 2,
            signal=latency,
            source="the topology's figures",
        )
    return work, measured.of_kind(pattern.kind), moved


def _busy(
    pattern: Overlap, fabric: Fabric, algorithm: str, measured: FusedConstants | None
) -> tuple[float, float | None]:
    """The seconds of its kernels by the library, and by fused ones: as measured of their kind where that was done."""
    kernel = None if measured is None else measured.kernel(pattern.kind)
    if kernel is None:
        return sum(price(step.pattern, fabric, algorithm).seconds for step in pattern.kernels), None
    return kernel.step_seconds(pattern.kernels, pattern.written)


def _messages(pattern: Messages, fabric: Fabric, algorithm: str) -> Price:
    if pattern.totals is not None and (found := message_totals(pattern.totals, fabric)) is not None:
        found = replace(found, own=pattern.own)
        return min(message_row_prices(found, pattern.chunks, fabric, algorithm), key=lambda one: one.seconds)
    keep = (pattern.nbytes > 0) & (pattern.sender != pattern.receiver)
    if not bool(keep.any()):
        return Price("none", 0.0, 0.0, _no_bytes(fabric))
    sender, receiver = fabric.topology_ids(pattern.sender[keep]), fabric.topology_ids(pattern.receiver[keep])
    flows = Flows(sender, receiver, pattern.nbytes[keep])
    rows = message_row_prices(replace(messages(flows, fabric), own=pattern.own), pattern.chunks, fabric, algorithm)
    return min(rows, key=lambda one: one.seconds)


def message_row_prices(found: Traffic, chunks: int, fabric: Fabric, algorithm: str) -> list[Price]:
    """The price of messages under each row that serves them."""
    for asked in (algorithm, "auto"):
        priced = [_price_row(row, [found], chunks, fabric) for row in fabric.library.serving("messages", asked)]
        if served := [one for one in priced if one is not None]:
            return served
    raise TopologyError(f"library {fabric.library.name} has no row for these messages")


def _groups(pattern: Groups, fabric: Fabric, algorithm: str) -> Price:
    if pattern.kind not in KINDS:
        raise TopologyError(f"collective {pattern.kind!r} is unknown; legal: {', '.join(KINDS)}")
    members = fabric.topology_ids(pattern.members)
    nbytes = np.asarray(pattern.nbytes, dtype=np.float64)
    if members.ndim != 2 or nbytes.shape != members.shape[:1]:
        raise TopologyError(
            f"{pattern.kind} over members of shape {list(members.shape)} with nbytes of shape {list(nbytes.shape)}: "
            "members are [groups, k], nbytes [groups]"
        )
    if members.size == 0 or members.shape[1] == 1 or not bool((nbytes > 0).any()):
        return Price("none", 0.0, 0.0, _no_bytes(fabric))
    found = min(row_prices(pattern, lay_groups(members, fabric), nbytes, algorithm), key=lambda one: one.seconds)
    copied = _copy_seconds(pattern.copied, fabric)
    return replace(found, transfer=found.transfer + copied, own=found.own + copied) if copied else found


def _copy_seconds(nbytes: float, fabric: Fabric) -> float:
    device = fabric.topology.device  # a copy reads and writes
    return 2 * nbytes / (device.memory_bandwidth * device.kernels.stream)


def lay_groups(members: Ints, fabric: Fabric) -> tuple[GroupLayout, Ints]:
    """Lay groups on a topology in the order of the numbers returned: heads of trees go in the order of the devices."""
    order = np.argsort(members.min(axis=1), kind="stable")
    return GroupLayout(members[order], fabric), order


def row_prices(pattern: Groups, placed: tuple[GroupLayout, Ints], nbytes: Floats, algorithm: str) -> list[Price]:
    """The price under each row that serves a collective over these groups; an algorithm's traffic is found once."""
    laid, order = placed
    fabric, nbytes = laid.fabric, nbytes[order]
    found: dict[tuple[str, int, float], list[Traffic] | None] = {}
    made: list[Price] = []
    for asked in dict.fromkeys((algorithm, "auto")):
        for row in fabric.library.serving(pattern.kind, asked):
            key = row.algorithm, row.members, row.per_member
            if key not in found:
                found[key] = ALGORITHMS[row.algorithm](pattern.kind, laid, nbytes, row)
            rounds = found[key]
            if rounds is not None:
                priced = _price_row(row, rounds, pattern.chunks, fabric)
                made += [] if priced is None else [priced]
        if made:
            return made
    raise TopologyError(f"library {fabric.library.name} has no row for {pattern.kind} over these groups")


def _price_row(row: LibraryRow, rounds: list[Traffic], chunks: int, fabric: Fabric) -> Price | None:
    far = fabric.far
    # Levels that no group of a round spans have no hops.
    base = row.base_far if any(bool(one.hops[:far].any()) for one in rounds) else row.base
    if base is None:
        return None
    latency = fabric.latencies()
    latency[:far] += row.far
    latency[far:] *= row.near
    alpha = fabric.launch + base + sum(float((latency @ one.hops).max()) for one in rounds)
    loads = [scale_load(one.load, row_shares(row, fabric)) for one in rounds]
    copied = sum(one.own for one in rounds) / (fabric.near_rate * row.near_share)
    own = fabric.library.own_copy * copied
    moved = np.sum([one.moved for one in rounds], axis=0)
    transfer = sum(map(busiest, loads)) + own
    return Price(row.name, chunks * alpha, transfer, tuple(moved.tolist()), add_loads(loads), own, row)


def row_shares(row: LibraryRow, fabric: Fabric) -> list[float]:
    """Return by level how many times longer a row is on its resources than at their whole rate."""
    return [1 / row.share(j < fabric.far) for j in range(len(fabric.wires))]

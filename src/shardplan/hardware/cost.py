"""The price of a communication pattern on a fabric: seconds, bytes for each level, and the algorithm chosen.

`seconds = chunks * alpha + largest load / bandwidth`, all groups of the pattern on the resources at once. Alpha is the
launch plus the latencies of the algorithm's rounds (arXiv 2110.10548; NCCL tuning.cc for latencies); `auto`
takes the cheapest algorithm for the pattern's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np

from shardplan.core.pattern import Groups, InTurn, Local, Messages, Pattern, Work
from shardplan.errors import TopologyError
from shardplan.hardware.aggregate import all_to_all, in_network, in_network_legal
from shardplan.hardware.algorithms import ALGORITHMS, FlowRound
from shardplan.hardware.fabric import Fabric, Floats, Flows, Ints

# What may be asked for (the first five; the others are what prices of other patterns say).
ALGORITHM_NAMES = ("auto", "ring", "tree", "halving-doubling", "network", "pairwise", "direct", "copy")


@dataclass(frozen=True, slots=True)
class Price:
    """What a pattern costs under one algorithm."""

    algorithm: str
    alpha: float  # seconds that do not depend on bytes, for all chunks
    transfer: float  # seconds of the busiest resource
    level_bytes: tuple[float, ...]  # whose sender and receiver first differ at each level, outermost first, all devices

    @property
    def seconds(self) -> float:
        """Alpha and transfer together."""
        return self.alpha + self.transfer


def price(pattern: Pattern, fabric: Fabric, algorithm: str = "auto") -> Price:
    """Return the price of a communication pattern.

    `algorithm` is `auto` for the cheapest, or `ring`, `tree`, `halving-doubling` or `network`; where it does not serve
    the collective or the group size, the ring does (NCCL's tree is all_reduce only).

    Raises `TopologyError` for an unknown algorithm or collective, and a device that is not on the topology.

    Source: arXiv 2110.10548; NCCL tuning.cc for latencies.

    >>> from shardplan.hardware.topology import Topology
    >>> fabric = Fabric(Topology.load("nominal", devices=4))
    >>> price(Groups("all_gather", np.array([[0, 1, 2, 3]]), np.array([1e6])), fabric, "ring").transfer
    6e-05
    """
    if algorithm not in ALGORITHM_NAMES:
        raise TopologyError(f"algorithm {algorithm!r} is unknown; legal: {', '.join(ALGORITHM_NAMES)}")
    match pattern:
        case Local():
            # A copy reads and writes.
            return Price("copy", 0.0, 2 * pattern.nbytes / fabric.topology.device.memory_bandwidth, _none(fabric))
        case Work():
            busy = fabric.topology.device.kernel_seconds(pattern.flops, pattern.dtype, pattern.nbytes)
            return Price("kernel", 0.0, busy, _none(fabric))
        case Messages():
            return _messages(pattern, fabric)
        case Groups():
            return _groups(pattern, fabric, algorithm)
        case InTurn():
            return _in_turn(pattern.times, [price(part, fabric, algorithm) for part in pattern.parts], fabric)
        case _:
            assert_never(pattern)


def seconds(pattern: Pattern, fabric: Fabric, algorithm: str = "auto") -> float:
    """Return the seconds of a pattern; arguments and errors as for `price`."""
    return price(pattern, fabric, algorithm).seconds


def level_bytes(pattern: Pattern, fabric: Fabric, algorithm: str = "auto") -> tuple[float, ...]:
    """Return the bytes whose two ends first differ at each level, outermost first; the rest as for `price`."""
    return price(pattern, fabric, algorithm).level_bytes


def chosen(pattern: Pattern, fabric: Fabric) -> str:
    """Return the name of the cheapest algorithm for a pattern; arguments and errors as for `price`."""
    return price(pattern, fabric).algorithm


def offers(kind: str, members: Ints, fabric: Fabric, algorithm: str = "auto") -> tuple[tuple[float, float], ...]:
    """Return the cost of a collective as affine functions of bytes, one for each algorithm; the least of them is paid.

    Args:
        kind: As in `Groups.kind`, but no all_to_all.
        members: Topology ids, int64 [G, k], in member order, groups in the order of their least id.
        fabric: The resources.
        algorithm: As for `price`.

    Returns:
        Pairs of seconds at 0 bytes and seconds per byte that a member holds before the op.
    """
    byte = Groups(kind, members, np.ones(len(members)))  # seconds are linear in bytes: those of one are the slope
    found = (_one(name, byte, members, byte.nbytes, fabric) for name in _algorithms(kind, members, fabric, algorithm))
    return tuple((one.alpha, one.transfer) for one in found)


def linear_cost(kind: str, members: Ints, fabric: Fabric) -> tuple[float, float]:
    """Return the ring's cost of a collective as an affine function of bytes; errors as for `price`.

    `members` are device ids, int64 [G, k], in member order.

    Returns:
        Seconds at 0 bytes, and seconds per byte that a member holds before the op.
    """
    byte = price(Groups(kind, members, np.ones(len(members))), fabric, "ring")
    return byte.alpha, byte.transfer


def _none(fabric: Fabric) -> tuple[float, ...]:
    return (0.0,) * len(fabric.wires)


def _in_turn(times: int, parts: list[Price], fabric: Fabric) -> Price:
    moved = np.sum([_none(fabric), *(part.level_bytes for part in parts)], axis=0)
    alpha, transfer = sum(part.alpha for part in parts), sum(part.transfer for part in parts)
    return Price("in turn", times * alpha, times * transfer, tuple((times * moved).tolist()))


def _messages(pattern: Messages, fabric: Fabric) -> Price:
    keep = (pattern.nbytes > 0) & (pattern.sender != pattern.receiver)
    if not bool(keep.any()):
        return Price("direct", 0.0, 0.0, _none(fabric))
    sender, receiver = fabric.topology_ids(pattern.sender[keep]), fabric.topology_ids(pattern.receiver[keep])
    flows = Flows(sender, receiver, pattern.nbytes[keep])
    moved = fabric.level_bytes(flows)
    most = max(int(np.bincount(ids).max()) for ids in (flows.sender, flows.receiver))
    # A device starts and takes in its messages one after another, which costs a latency each.
    alpha = pattern.chunks * (fabric.launch + most * _outermost_latency(moved, fabric))
    return Price("direct", alpha, fabric.transfer_seconds(flows), tuple(moved.tolist()))


def _outermost_latency(moved: Floats, fabric: Fabric) -> float:
    crossed = np.flatnonzero(moved)
    return fabric.wires[int(crossed[0])].level.latency if crossed.size else 0.0


def _groups(pattern: Groups, fabric: Fabric, algorithm: str) -> Price:
    legal = ALGORITHMS.get(pattern.kind, {})
    default = "pairwise" if pattern.kind == "all_to_all" else "ring"
    if not legal and pattern.kind != "all_to_all":
        raise TopologyError(f"collective {pattern.kind!r} is unknown; legal: {', '.join([*ALGORITHMS, 'all_to_all'])}")
    members = fabric.topology_ids(pattern.members)
    nbytes = np.asarray(pattern.nbytes, dtype=np.float64)
    if members.ndim != 2 or nbytes.shape != members.shape[:1]:
        raise TopologyError(
            f"{pattern.kind} over members of shape {list(members.shape)} with nbytes of shape {list(nbytes.shape)}: "
            "members are [groups, k], nbytes [groups]"
        )
    if members.size == 0 or members.shape[1] == 1 or not bool((nbytes > 0).any()):
        return Price(default, 0.0, 0.0, _none(fabric))
    if default == "pairwise":
        return _aggregate("pairwise", *all_to_all(members, nbytes, fabric), pattern.chunks, fabric)
    # The order in which groups are listed means nothing: ports and heads are given in the order of the devices.
    order = np.argsort(members.min(axis=1), kind="stable")
    members, nbytes = members[order], nbytes[order]
    names = _algorithms(pattern.kind, members, fabric, algorithm)
    return min((_one(name, pattern, members, nbytes, fabric) for name in names), key=lambda one: one.seconds)


def _algorithms(kind: str, members: Ints, fabric: Fabric, algorithm: str) -> list[str]:
    """The algorithms that serve a collective over these groups, or the one asked for."""
    k = members.shape[1]
    names = [name for name in ALGORITHMS[kind] if name != "halving-doubling" or k & (k - 1) == 0]
    if kind == "all_reduce" and algorithm in ("auto", "network") and in_network_legal(members, fabric):
        names.append("network")
    if algorithm != "auto":
        return [algorithm if algorithm in names else "ring"]
    if k == 2 and "halving-doubling" in names:
        # With two members it is the ring's exchange, in the ring's order.
        names.remove("halving-doubling")
    return names


def _one(name: str, pattern: Groups, members: Ints, nbytes: Floats, fabric: Fabric) -> Price:
    """The price under one algorithm; a round that is yielded twice in a row is priced once."""
    if name == "network":
        return _aggregate(name, *in_network(members, nbytes, fabric), pattern.chunks, fabric)
    alpha, transfer, moved = fabric.launch, 0.0, np.zeros(len(fabric.wires))
    last: FlowRound | None = None
    last_transfer, last_moved = 0.0, moved
    for one in ALGORITHMS[pattern.kind][name](pattern.kind, members, nbytes, fabric):
        if one is not last:
            last, last_transfer, last_moved = one, fabric.transfer_seconds(one.flows), fabric.level_bytes(one.flows)
        alpha += _outermost_latency(last_moved, fabric) if one.latency is None else one.latency
        transfer += last_transfer
        moved = moved + last_moved
    return Price(name, pattern.chunks * alpha, transfer, tuple(moved.tolist()))


def _aggregate(name: str, latency: float, transfer: float, moved: Floats, chunks: int, fabric: Fabric) -> Price:
    return Price(name, chunks * (fabric.launch + latency), transfer, tuple(moved.tolist()))

"""Algorithms in member order, as hops and flows: ring, double tree, binomial tree; what an engine of our own runs.

They are as in `traffic`, but yield flows: of all groups that run together, and the hops over each level that the round
waits for. The lowerings of the same name send the same bytes between the same devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.core.group_rounds import tree_parents
from shardplan.hardware.prices.aggregate import units_spanned
from shardplan.hardware.prices.fabric import Fabric, Floats, Flows, Ints


@dataclass(frozen=True, slots=True, eq=False)
class FlowRound:
    """Flows that run together, and how many hops over each level of each group they wait for, [L, G]."""

    flows: Flows
    hops: Floats


Rounds = Iterator[FlowRound]


def edge_volume(kind: str, k: int) -> float:
    """Return what passes every edge of a ring of k members, or of a chain, over what a member holds before."""
    return {"all_reduce": 2 * (k - 1) / k, "reduce_scatter": (k - 1) / k, "all_gather": k - 1.0}.get(kind, 1.0)


def passes(kind: str) -> int:
    """Return how often a collective goes round its ring."""
    return 2 if kind == "all_reduce" else 1


def own_share(kind: str, k: int) -> float:
    """Return the share of what a member holds before that is its own part of the result: all of it in an all-gather."""
    return 1.0 if kind == "all_gather" else 1 / k


def ring(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> Rounds:
    """Run a collective on a ring in member order; reduce and broadcast on the chain to, or from, member 0.

    Yields one round: 2(k-1)/k B (all_reduce), (k-1)/k B (reduce_scatter) or (k-1) B (all_gather) an edge of the ring, B
    an edge of the chain. Its hops over level l are r (u_l - u_(l-1)), where u_l counts the distinct units of a group
    and r is 2 for all_reduce, which passes the ring twice, else 1 (NCCL tuning.cc).
    """
    volume = edge_volume(kind, members.shape[1]) * nbytes
    hops = passes(kind) * np.diff(units_spanned(members, fabric.topology), axis=0, prepend=1).astype(np.float64)
    if kind == "broadcast":
        flows = _flows(members[:, :-1], members[:, 1:], volume)
    elif kind == "reduce":
        flows = _flows(members[:, 1:], members[:, :-1], volume)
    else:
        flows = _flows(members, np.roll(members, -1, axis=1), volume)
    # All steps of the ring in one: they are alike, and each starts when its predecessor's first bytes are there.
    yield FlowRound(flows, hops)


def _flows(sender: Ints, receiver: Ints, nbytes: Floats) -> Flows:
    """The flows of all groups, from senders to receivers [G, m]."""
    return Flows(sender.reshape(-1), receiver.reshape(-1), np.repeat(nbytes, sender.shape[1]))


def tree(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> Rounds:
    """Run all_reduce on the double binary tree, reduce and broadcast on a binomial tree.

    Inside a unit the members form a chain; the chains' heads form a double tree over the outermost level that the group
    spans, each tree carrying B/2 up and B/2 down. Order and heads rotate from group to group, which spreads them.

    Yields one round for all_reduce; for the others ceil(log2 k), with B an edge each.

    Source: NVIDIA/nccl `src/graph/trees.cc` (shape) and `tuning.cc` (latency).
    """
    if kind == "all_reduce":
        yield _double_tree(members, nbytes, fabric)
        return
    k = members.shape[1]
    distances = [1 << t for t in range((k - 1).bit_length())]
    for distance in reversed(distances) if kind == "broadcast" else distances:
        parents = np.arange(0, k - distance, 2 * distance)
        upper, lower = members[:, parents], members[:, parents + distance]
        pair = (upper, lower) if kind == "broadcast" else (lower, upper)
        # Towards the root from neighbours to far members, from it the other way: a member has all before it passes on.
        flows = _flows(*pair, nbytes)
        crossed = fabric.outermost_level(flows.sender, flows.receiver)
        yield FlowRound(flows, (crossed == np.arange(len(fabric.wires))[:, None]).astype(np.float64))


def _double_tree(members: Ints, nbytes: Floats, fabric: Fabric) -> FlowRound:
    """The flows and the latency of an all_reduce, from the innermost level out: heads go on to the next level."""
    groups, k = members.shape
    spanned = units_spanned(members, fabric.topology)
    # The outermost level a group spans; further in its members form chains.
    top = (spanned > 1).argmax(axis=0)
    sender: list[Ints] = []
    receiver: list[Ints] = []
    lanes: list[Ints] = []
    # In order of ids the members of every unit stand side by side, at all levels.
    device = np.sort(members, axis=1).reshape(-1)
    turn = _turns(top, device[::k], fabric)
    lane = np.repeat(np.arange(groups), k)
    for j in range(len(fabric.wires) - 1, -1, -1):
        parent = device // (fabric.wires[j].stride * fabric.wires[j].level.size)
        starts = np.flatnonzero(np.concatenate([[True], (lane[1:] != lane[:-1]) | (parent[1:] != parent[:-1])]))
        size = np.diff(np.concatenate([starts, [len(device)]]))
        first, width = np.repeat(starts, size), np.repeat(size, size)
        node = np.arange(len(device)) - first
        # Rotation by group: node n of the chain or tree is the member at (n + turn) mod width.
        held = first + (node + turn[lane]) % width
        at_top = top[lane] == j
        chain = np.flatnonzero(~at_top & (node > 0))
        # A chain edge carries both trees' halves, each way.
        for _ in range(2):
            sender.append(device[held[chain]])
            receiver.append(device[held[chain - 1]])
            lanes.append(lane[chain])
        for mirrored in (False, True):
            child = np.flatnonzero(at_top)
            up = tree_parents(node[child], width[child], mirrored)
            child, up = child[up >= 0], up[up >= 0]  # without the root
            sender.append(device[held[child]])
            receiver.append(device[held[first[child] + up]])
            lanes.append(lane[child])
        keep = ~at_top & (node == 0)
        device, lane = device[held[keep]], lane[keep]
    # What was reduced upwards comes down the same edges.
    up_from, up_to, group = np.concatenate(sender), np.concatenate(receiver), np.concatenate(lanes)
    flows = Flows(
        np.concatenate([up_from, up_to]),
        np.concatenate([up_to, up_from]),
        np.tile(nbytes[group] / 2, 2),
    )
    hops = np.diff(spanned, axis=0, prepend=1).astype(np.float64)
    depth = np.ceil(np.log2(np.maximum(spanned[top, np.arange(groups)], 1)))
    hops[top, np.arange(groups)] = depth  # a tree is as slow as it is deep
    below = np.arange(len(fabric.wires))[:, None] > top[None, :]
    # Chains of one level run side by side in all units: what counts is a unit's members, not their sum.
    inner = np.ceil(spanned / np.concatenate([np.ones((1, groups)), spanned[:-1]])) - 1
    return FlowRound(flows, 2 * np.where(below, inner, hops))


def _turns(top: Ints, first: Ints, fabric: Fabric) -> Ints:
    """Number the groups that start in one unit of their outermost level, which spreads heads over their units."""
    key = top * fabric.topology.size + first % fabric.period // np.array([wires.stride for wires in fabric.wires])[top]
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    start = np.flatnonzero(np.diff(ordered, prepend=-1))
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.repeat(start, np.diff(start, append=len(order)))
    return turn

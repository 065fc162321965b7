"""What an algorithm makes of a collective: the hops that it waits for, and the load that it puts on the resources.

An algorithm takes the collective's kind, the groups as they are laid on the topology, and the bytes B that a member
holds before the op, float64 [G]; it gives rounds that run one after another, or None where it
does not serve these groups. One that pipelines (a ring, a tree) is one round with all its bytes.

A library that orders members itself (`Library.member_order` false) groups a communicator's ranks by node and walks the
nodes by their first rank; inside a node order is its own, and channels use all NICs of the members. Volumes a member,
or a node, sends:

| algorithm | near | far |
|---|---|---|
| ring | 2(k-1)/k B all_reduce, (k-1)/k B reduce_scatter, (k-1) B all_gather, B reduce and broadcast | the same |
| tree | 2 B, B for two members | double binary tree: B for two nodes, at most 2 B |
| nvls, nvls_tree | (1 + 1/g + per_member g) B for g members of a node | as tree |
| collnet | as nvls | B |

Source: NCCL `src/graph/tuning.cc`, `src/graph/trees.cc`, `src/graph/connect.cc`; arXiv 2110.10548 for rings in member
order. `p2p` are messages from everyone to everyone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardplan.core.group_rounds import tree_parents
from shardplan.core.pattern import MessageTotals
from shardplan.hardware.prices.aggregate import GroupLayout, all_to_all, in_network, other_nodes, unit_load
from shardplan.hardware.prices.algorithms import FlowRound, edge_volume, own_share, passes, ring, tree
from shardplan.hardware.prices.fabric import Fabric, Floats, Flows, Load
from shardplan.hardware.prices.library import LibraryRow


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """One round of all groups."""

    hops: Floats  # over each level, one after another: of every group, or of every device that sends or receives [L, n]
    load: Load
    moved: Floats  # bytes whose two ends first differ at each level [L]
    own: float = 0.0  # bytes that a member copies from its own part to its result


Algorithm = Callable[[str, GroupLayout, Floats, LibraryRow], "list[Traffic] | None"]


def _flows(found: list[FlowRound], fabric: Fabric) -> list[Traffic]:
    return [Traffic(one.hops, fabric.load(one.flows), fabric.level_bytes(one.flows)) for one in found]


def _ring(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic] | None:
    if laid.fabric.library.member_order:
        return _flows(list(ring(kind, laid.members, nbytes, laid.fabric)), laid.fabric)
    volume = edge_volume(kind, laid.k) * nbytes
    hops = passes(kind) * laid.fresh.astype(np.float64)
    return [Traffic(hops, unit_load(laid, volume, volume), laid.walk_bytes(volume), _own_bytes(kind, laid, nbytes))]


def _own_bytes(kind: str, laid: GroupLayout, nbytes: Floats) -> float:
    """The bytes of a member's own part of the result."""
    return float(nbytes.max()) * own_share(kind, laid.k)


def _tree(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic] | None:
    if laid.fabric.library.member_order:
        return _flows(list(tree(kind, laid.members, nbytes, laid.fabric)), laid.fabric)
    most = laid.members_per_node[1]
    # No less than the bound of any all-reduce, also where a node holds one member.
    near = np.maximum(np.minimum(2.0, most - 1), 2 * (laid.k - 1) / laid.k)
    return _in_nodes(laid, nbytes, near, 2, _double)


def _nvls(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic] | None:
    return _in_switches(laid, nbytes, row, _double)


def _collnet(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic] | None:
    if laid.nodes.max() == 1 or not all(laid.reduces[0]):
        return None
    return _in_switches(laid, nbytes, row, lambda n: 1.0)


def _in_switches(
    laid: GroupLayout, nbytes: Floats, row: LibraryRow, far: Callable[[int], float]
) -> list[Traffic] | None:
    """Nodes whose switches reduce; None where they do not, or are too small."""
    inner = laid.reduces[1]
    least, most = laid.members_per_node
    if not inner or not all(inner) or least.min() < row.members:
        return None
    return _in_nodes(laid, nbytes, 1 + 1 / least + row.per_member * most, 1, far)


def _in_nodes(
    laid: GroupLayout, nbytes: Floats, near: Floats, passes: int, far: Callable[[int], float]
) -> list[Traffic]:
    """Reduce inside every node and over the nodes between; `near` and `far` times B are what members, nodes send."""
    spanned, nodes, inner = laid.spanned, laid.nodes, laid.fabric.far
    hops = np.zeros(spanned.shape)
    width = np.ceil(spanned / np.concatenate([np.ones((1, len(nodes))), spanned[:-1]]))
    hops[inner:] = passes * (width[inner:] - 1)
    over = nodes > 1
    top = (spanned > 1).argmax(axis=0)  # the outermost level a group spans
    hops[top[over], np.flatnonzero(over)] = 2 * np.ceil(np.log2(nodes[over]))  # a tree is as slow as it is deep
    factor = np.array([far(int(n)) for n in nodes])
    moved = (laid.fresh * 2 * nbytes).sum(axis=1)
    return [Traffic(hops, unit_load(laid, near * nbytes, factor * nbytes), moved)]


@lru_cache(maxsize=1024)
def _double(nodes: int) -> float:
    """What the busiest of some nodes sends in a double binary tree that combines and hands out, over B."""
    if nodes < 2:
        return 0.0
    place = np.arange(nodes)
    sent = np.zeros(nodes)
    for mirrored in (False, True):
        parents = tree_parents(place, np.full(nodes, nodes), mirrored)
        child = parents >= 0
        sent += 0.5 * child + 0.5 * np.bincount(parents[child], minlength=nodes)
    return float(sent.max())


def _network(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic] | None:
    outer, inner = laid.reduces
    return [Traffic(*in_network(laid, nbytes))] if all(outer) and all(inner) else None


def _p2p(kind: str, laid: GroupLayout, nbytes: Floats, row: LibraryRow) -> list[Traffic]:
    far = laid.fabric.far
    hops, load, moved = all_to_all(laid, nbytes)
    if _starts_inside(laid.fabric):
        hops[-1] += hops[:far].sum(axis=0)
        hops[:far] = other_nodes(laid)
    return [Traffic(hops, load, moved, _own_bytes(kind, laid, nbytes))]


def messages(flows: Flows, fabric: Fabric) -> Traffic:
    """Return what messages make: a device starts and takes in its own one after another, as in an all-to-all."""
    depth, far = len(fabric.wires), fabric.far
    counts: list[Floats] = []
    for end, other in ((flows.sender, flows.receiver), (flows.receiver, flows.sender)):
        device = np.flatnonzero(np.bincount(end, minlength=1))
        place = np.zeros(1 + int(end.max(initial=0)), dtype=np.int64)
        place[device] = np.arange(len(device))
        at, width = place[end], len(device)
        level = fabric.outermost_level(end, other)
        inner = np.zeros(width, dtype=np.int64)
        keep = np.ones(len(level), dtype=bool)
        if far and _starts_inside(fabric):
            out = np.flatnonzero(level < far)
            node = fabric.wires[far - 1]
            keep[out] = False
            if any(wires.level.rails for wires in fabric.wires):
                out = out[np.argsort(level[out], kind="stable")]  # of a node the outermost level is waited for
            keep[out[np.unique(at[out] * node.units + other[out] // node.stride, return_index=True)[1]]] = True
            inner = np.bincount(at[out], minlength=width)
        hops = np.bincount(level[keep] * width + at[keep], minlength=depth * width).reshape(depth, width)
        hops[-1] += inner
        counts.append(hops.astype(np.float64))
    return Traffic(np.concatenate(counts, axis=1), fabric.load(flows), fabric.level_bytes(flows))


def message_totals(totals: MessageTotals, fabric: Fabric) -> Traffic | None:
    """Return what messages make of which only totals are known; None where it matters between whom they go.

    It does not on one switch: whoever is at the other end, a message crosses the port of a device.
    """
    outermost = fabric.wires[0].level
    if len(fabric.wires) > 1 or outermost.link != "switch":
        return None
    at = fabric.topology_ids(totals.devices)
    load = fabric.port_load(0, (at, totals.sent_bytes), (at, totals.received_bytes))
    hops = np.concatenate([totals.sent, totals.received]).reshape(1, -1)
    return Traffic(hops, (load,), np.array([totals.sent_bytes.sum()]))


def _starts_inside(fabric: Fabric) -> bool:
    """Whether what leaves a node starts as a message inside it, and waits for each other node once."""
    return not fabric.library.member_order and fabric.far < len(fabric.wires)


# Open set: an algorithm is one function here, and rows in the tables of the libraries that have it.
ALGORITHMS: dict[str, Algorithm] = {
    "ring": _ring,
    "tree": _tree,
    "nvls": _nvls,
    "nvls_tree": _nvls,
    "collnet": _collnet,
    "network": _network,
    "p2p": _p2p,
}

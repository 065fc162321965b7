"""What an algorithm makes of a collective: the hops that it waits for, and the load that it puts on the resources.

An algorithm takes the collective's kind, the groups' members as topology ids, int64 [G, k] in member order, and the
bytes B that a member holds before the op, float64 [G]; it gives rounds that run one after another, or None where it
does not serve these groups. One that pipelines (a ring, a tree) is one round with all its bytes.

A library that orders members itself (`Library.member_order` false) groups a communicator's ranks by node and walks the
nodes by their first rank; inside a node order is its own, and channels use all NICs of the members. Volumes a member,
or a node, sends:

| algorithm | near | far |
|---|---|---|
| ring | 2(k-1)/k B all_reduce, (k-1)/k B reduce_scatter, (k-1) B all_gather, B reduce and broadcast | the same |
| tree | 2 B, B for two members | double binary tree: B for two nodes, at most 2 B |
| nvls | (1 + 1/g) B for g members of a node | - |
| nvls_tree | as nvls | as tree |
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
from shardplan.hardware.aggregate import all_to_all, in_network, in_network_legal, spread, units_spanned, walked
from shardplan.hardware.algorithms import FlowRound, ring, tree
from shardplan.hardware.fabric import Fabric, Floats, Flows, Ints, Load


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """One round of all groups."""

    hops: Floats  # over each level, one after another: of every group, or of every device that sends or receives [L, n]
    load: Load
    moved: Floats  # bytes whose two ends first differ at each level [L]


Algorithm = Callable[[str, Ints, Floats, Fabric], "list[Traffic] | None"]


def _flows(found: list[FlowRound], fabric: Fabric) -> list[Traffic]:
    return [Traffic(one.hops, fabric.load(one.flows), fabric.level_bytes(one.flows)) for one in found]


def _volume(kind: str, k: int) -> float:
    """What passes every edge of a ring or chain, over what a member holds before."""
    return {"all_reduce": 2 * (k - 1) / k, "reduce_scatter": (k - 1) / k, "all_gather": k - 1.0}.get(kind, 1.0)


def _ring(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if fabric.library.member_order:
        return _flows(list(ring(kind, members, nbytes, fabric)), fabric)
    volume = _volume(kind, members.shape[1]) * nbytes
    crossings = walked(members, fabric)
    hops = (2 if kind == "all_reduce" else 1) * np.diff(units_spanned(members, fabric), axis=0, prepend=1)
    edges = crossings.sum_edges(volume)
    return [Traffic(hops.astype(np.float64), spread(members, volume, volume, fabric, crossings), edges)]


def _tree(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if fabric.library.member_order:
        return _flows(list(tree(kind, members, nbytes, fabric)), fabric)
    return _in_nodes(kind, members, nbytes, fabric, 2.0, _double)


def _nvls(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if _nodes(members, fabric).max() > 1 or not _reduces(members, fabric, near=True):
        return None
    return _in_nodes(kind, members, nbytes, fabric, 1.0, _double)


def _nvls_tree(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if _nodes(members, fabric).max() < 2 or not _reduces(members, fabric, near=True):
        return None
    return _in_nodes(kind, members, nbytes, fabric, 1.0, _double)


def _collnet(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if _nodes(members, fabric).max() < 2 or not _reduces(members, fabric, near=False):
        return None
    return _in_nodes(kind, members, nbytes, fabric, 1.0, lambda n: 1.0)


def _nodes(members: Ints, fabric: Fabric) -> Ints:
    """How many nodes every group spans, [G]."""
    spanned = units_spanned(members, fabric)
    return spanned[fabric.far - 1] if fabric.far else np.ones(len(members), dtype=np.int64)


def _reduces(members: Ints, fabric: Fabric, near: bool) -> bool:
    """Whether the levels spanned, or those of them inside a node, all reduce; some level inside a node is spanned."""
    spans = [bool(row.any()) for row in np.diff(units_spanned(members, fabric), axis=0, prepend=1) > 0]
    levels = [w.level.reduces for w, s in zip(fabric.wires, spans, strict=True) if s]
    inner = levels[sum(spans[: fabric.far]) :]
    return bool(inner) and all(inner if near else levels)


def _in_nodes(
    kind: str, members: Ints, nbytes: Floats, fabric: Fabric, chained: float, far: Callable[[int], float]
) -> list[Traffic]:
    """Reduce inside every node and over the nodes between: near by a chain (2 B) or by the switch (1 + 1/g)."""
    k = members.shape[1]
    spanned = units_spanned(members, fabric)
    nodes = _nodes(members, fabric)
    inside = k / nodes
    near = np.minimum(2.0, inside - 1) if chained > 1 else 1 + 1 / inside
    hops = np.zeros(spanned.shape)
    hops[fabric.far :] = np.ceil(spanned / np.concatenate([np.ones((1, len(members))), spanned[:-1]]))[fabric.far :] - 1
    if chained == 1:
        hops[fabric.far :] = np.minimum(hops[fabric.far :], 1)
    top = (spanned > 1).argmax(axis=0)  # the outermost level a group spans
    groups = np.arange(len(members))
    over = nodes > 1
    hops[top[over], groups[over]] = np.ceil(np.log2(nodes[over]))  # a tree is as slow as it is deep
    factor = np.array([far(int(n)) for n in nodes])
    moved = (np.diff(spanned, axis=0, prepend=1) * 2 * nbytes).sum(axis=1)
    return [Traffic(2 * hops, spread(members, near * nbytes, factor * nbytes, fabric, walked(members, fabric)), moved)]


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


def _network(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic] | None:
    if not in_network_legal(members, fabric):
        return None
    return [Traffic(*in_network(members, nbytes, fabric))]


def _p2p(kind: str, members: Ints, nbytes: Floats, fabric: Fabric) -> list[Traffic]:
    return [Traffic(*all_to_all(members, nbytes, fabric))]


def messages(flows: Flows, fabric: Fabric) -> Traffic:
    """Return what messages make: a device starts and takes in its own one after another, each a hop."""
    depth = len(fabric.wires)
    level = fabric.crossed(flows.sender, flows.receiver)
    counts: list[Floats] = []
    for end in (flows.sender, flows.receiver):
        device, at = np.unique(end, return_inverse=True)
        table = np.bincount(level * len(device) + at.reshape(-1), minlength=depth * len(device))
        counts.append(table.reshape(depth, len(device)).astype(np.float64))
    return Traffic(np.concatenate(counts, axis=1), fabric.load(flows), fabric.level_bytes(flows))


# Open set: an algorithm is one function here, and rows in the tables of the libraries that have it.
ALGORITHMS: dict[str, Algorithm] = {
    "ring": _ring,
    "tree": _tree,
    "nvls": _nvls,
    "nvls_tree": _nvls_tree,
    "collnet": _collnet,
    "network": _network,
    "p2p": _p2p,
}

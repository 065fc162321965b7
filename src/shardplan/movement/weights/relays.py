"""Relays: receivers of one content on one node are fed once between them, and pass it on inside.

Of k receivers on a node each gets one k-th from outside, and gives it to the k - 1 others, straight out of its own
parameter. So a node takes in each element once, over the ways of all its receivers. Source: the hierarchical transfer
of NCCL M2N (NVIDIA/nccl-extensions 44d2de0, nccl_m2n/README.md), for any layout.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.movement.weights.spreading import SMALL, Shares, cut_dim


def relay_within_node(
    combos: np.ndarray,
    to: np.ndarray,
    by: np.ndarray,
    node: np.ndarray,
    length: np.ndarray,
    size: np.ndarray,
    turn: int,
) -> tuple[Shares, Shares, np.ndarray]:
    """Return shares from owners, shares between receivers, and which of the combinations they serve (bool).

    `to` [combos, D] and `by` [combos, S] are places, `node` [combos, D] where receivers are; `length` and `size`
    (bytes) are of all combinations. Served are those whose nodes have equally many receivers, more than one.
    """
    order = np.argsort(node, axis=1, kind="stable")
    to, node = np.take_along_axis(to, order, axis=1), np.take_along_axis(node, order, axis=1)
    d = to.shape[1]
    most = (node == node[:, :1]).sum(axis=1)
    k = int(most[0]) if len(most) else 1
    served = np.zeros(len(combos), dtype=bool)
    if k > 1 and d % k == 0:
        rows = node.reshape(len(node), d // k, k)
        served = (rows == rows[:, :, :1]).all(axis=(1, 2)) & (most == k)
        served &= (np.diff(rows[:, :, 0], axis=1) != 0).all(axis=1)
    outside: list[Shares] = []
    inside: list[Shares] = []
    if served.any():
        copies, s = d // k, by.shape[1]
        parts = math.lcm(k, s // math.gcd(copies, s))
        small = size[combos] < parts * SMALL if length.shape[1] else np.ones(len(combos), dtype=bool)
        for some, pieces in ((served & small, 1), (served & ~small, parts)):
            if some.any():
                given = combos[some], to[some], by[some]
                outside.append(_shares_from_owners(*given, length, (copies, k, s, pieces), turn))
                inside.append(_shares_between_receivers(*given[:2], length, (copies, k, pieces), turn))
    return _concatenate_shares(outside), _concatenate_shares(inside), served


def _concatenate_shares(found: list[Shares]) -> Shares:
    none = np.zeros(0, dtype=np.int64)
    columns = zip(*found, strict=True) if found else ((none,) for _ in range(7))
    return tuple(np.concatenate(c) for c in columns)  # pyright: ignore[reportReturnType]


def _shares_from_owners(
    combos: np.ndarray, to: np.ndarray, by: np.ndarray, length: np.ndarray, sizes: tuple[int, int, int, int], turn: int
) -> Shares:
    copies, k, s, pieces = sizes
    copy, part = (x.reshape(-1) for x in np.meshgrid(np.arange(copies), np.arange(pieces), indexing="ij"))
    member = part * k // pieces
    owner = (copy * pieces + part) * s // (copies * pieces)
    n, rows = len(combos), len(copy)
    shift = (combos + turn) % s
    turned = (combos + turn) % k if pieces == 1 else np.zeros(n, dtype=np.int64)  # what is small goes to each in turn
    chosen = np.take_along_axis(by, (owner[None] + shift[:, None]) % s, axis=1)
    at = copy[None] * k + (member[None] + turned[:, None]) % k
    receiver = np.take_along_axis(to, at, axis=1)
    cut = np.repeat(cut_dim(length[combos], pieces), rows)
    first = np.tile(part, n)
    flat = np.repeat(combos, rows), receiver.reshape(-1), chosen.reshape(-1)
    return (*flat, cut, first, first + 1, np.full(n * rows, pieces, dtype=np.int64))


def _shares_between_receivers(
    combos: np.ndarray, to: np.ndarray, length: np.ndarray, sizes: tuple[int, int, int], turn: int
) -> Shares:
    copies, k, pieces = sizes
    n = len(combos)
    holders = k if pieces > 1 else 1
    grid = np.meshgrid(np.arange(copies), np.arange(holders), np.arange(1, k), indexing="ij")
    copy, holder, other = (x.reshape(-1) for x in grid)
    rows = len(copy)
    turned = (combos + turn) % k if pieces == 1 else np.zeros(n, dtype=np.int64)
    mine = (holder[None] + turned[:, None]) % k
    sender = np.take_along_axis(to, copy[None] * k + mine, axis=1)
    receiver = np.take_along_axis(to, copy[None] * k + (mine + other[None]) % k, axis=1)
    each = pieces // holders
    cut = np.repeat(cut_dim(length[combos], pieces), rows)
    first = np.tile(holder * each, n)
    flat = np.repeat(combos, rows), receiver.reshape(-1), sender.reshape(-1)
    return (*flat, cut, first, first + each, np.full(n * rows, pieces, dtype=np.int64))

"""`Routing`: which experts tokens go to, on how many nodes these are, and how full the fullest device of them is.

A router takes `taken` of `experts`, all of them as likely; where experts are in groups, of the experts of `kept` groups
alone, as DeepSeek-V3 has it so that a token goes to four nodes at most (arXiv 2412.19437, section 2.1.2). Nodes have as
many experts each, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.strategy.sizes import expert_slots

Floats = np.ndarray


class Routing(NamedTuple):
    """The experts of a mixture, those of a token, groups of them, those kept, and what `Software.dispatch` says."""

    experts: int = 0
    taken: int = 0
    groups: int = 1
    kept: int = 1
    dispatch: str | None = None

    @staticmethod
    def of(fields: Mapping[str, object], dispatch: str | None) -> Routing:
        """Read the fields of a model; nobody has experts where it has none."""
        names = ("experts", "experts_per_token", "router_groups", "router_groups_kept")
        experts, taken, groups, kept = (int(str(fields.get(name) or 0)) for name in names)
        return Routing(experts, taken, max(groups, 1), max(kept, 1), dispatch)

    def copies(self, nodes: Floats) -> Floats:
        """Return on how many of so many nodes a token has experts, in the mean, [n]."""
        found, back = np.unique(nodes, return_inverse=True)
        each = np.array([expected_nodes(self._replace(dispatch=None), int(n)) for n in found])
        return each[back.reshape(-1)].reshape(np.shape(nodes))


@lru_cache(maxsize=4096)
def expected_nodes(routing: Routing, nodes: int) -> float:
    """Return on how many of so many nodes a token has experts, in the mean.

    A node has none of them where all that are taken are among the others of the groups kept. How many of its experts
    are in groups kept, and with how many ways to keep these, is counted group by group.

    >>> round(expected_nodes(Routing(256, 8), 8), 3), round(expected_nodes(Routing(256, 8, 8, 4), 8), 3)
    (5.295, 3.629)
    """
    experts, taken, groups, kept, _ = routing
    nodes = min(nodes, experts)
    size, mine = experts // groups, -(-experts // nodes)
    among = kept * size  # experts that a token may go to
    hit = 0.0
    for node in range(nodes):
        first, last = min(node * mine, experts), min((node + 1) * mine, experts)
        here = {g: min(last, (g + 1) * size) - max(first, g * size) for g in range(first // size, -(-last // size))}
        ways = {(0, 0): 1}  # by groups kept of those that the node has experts of, and how many these are
        for count in here.values():
            more = {(k + 1, n + count): w for (k, n), w in ways.items()}
            ways = {key: ways.get(key, 0) + more.get(key, 0) for key in {**ways, **more}}
        for (k, n), w in ways.items():
            if k <= kept and kept - k <= groups - len(here):
                some = w * math.comb(groups - len(here), kept - k) / math.comb(groups, kept)
                hit += some * (1 - math.comb(among - n, taken) / math.comb(among, taken))
    return hit


def slots_over_mean(fields: Mapping[str, object]) -> float:
    """Return how many slots an expert has over the tokens that come in the mean; 1 where there are no experts."""
    seq, taken, experts = (int(str(fields.get(name) or 0)) for name in ("seq", "experts_per_token", "experts"))
    if not experts:
        return 1.0
    factor = float(str(fields.get("capacity_factor") or 0))
    return expert_slots(factor, seq, taken, experts) / (seq * taken / experts)


def tokens_of_slots(fields: Mapping[str, object], imbalance: np.ndarray) -> Floats:
    """Return what part of slots tokens are in, [2, n]: in the mean, and on the fullest of devices that share experts.

    Where `imbalance` is 0 all slots are taken for full.
    """
    return np.stack([np.where(imbalance > 0, x / slots_over_mean(fields), 1.0) for x in (1.0, imbalance)])

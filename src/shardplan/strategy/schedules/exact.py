"""The exact solver: the least makespan of a small shop, as an oracle.

For makespans from a lower bound on, one after the other, the tree of all active orders is searched depth first. A node
is cut where what is left on some rank cannot end in time, and where another with the same passes begun was as good. So
the first makespan that is reached is the least: a lower bound is met, or the trees of all smaller ones were exhausted.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core import validation
from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.listing import list_schedule
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.shop import Orders, Shop
from shardplan.strategy.schedules.shop_tree import Key, ShopTree

NODES = 1_000_000  # of the trees: about a minute


@dataclass(frozen=True, slots=True)
class Solved:
    """The best schedule found, its makespan, and a lower bound; they are equal where it is `proved` to be the least."""

    schedule: Schedule
    makespan: int
    least: int
    nodes: int

    @property
    def proved(self) -> bool:
        """Whether no order is shorter."""
        return self.makespan == self.least


def solve(shop: Shop, nodes: int = NODES, known: Schedule | None = None) -> Solved:
    """Return the schedule of least makespan; times must be whole numbers.

    At most so many `nodes` are visited. Where that does not do, the best schedule known and a lower bound come back.
    `known` is a schedule of the shop to be improved on, by default the list scheduler's.
    """
    for time in (t for times in shop.times for t in times):
        validation.whole_number("solve: a time", time, 1, kind=ScheduleError)
    best = known or list_schedule(shop)
    makespan = int(max(shop.ends(shop.orders(best))))
    search = Search(shop, nodes)
    least = int(search.tree.lower_bound(search.tree.root))
    while least < makespan:
        found = search.order_within(least)
        if search.left <= 0:
            break
        if found is not None:
            best, makespan = shop.schedule(found, "exact"), least
            break
        least += 1
    return Solved(best, makespan, least, nodes - max(search.left, 0))


class Search:
    """The tree of a shop, with the number of nodes that are left to be visited."""

    def __init__(self, shop: Shop, nodes: int) -> None:
        self.tree, self.left = ShopTree(shop), nodes

    def order_within(self, makespan: int) -> Orders | None:
        """Return an order that is done by then, or None where there is none (or no nodes are left)."""
        seen: dict[Key, list[tuple[float, ...]]] = {}
        stack = [self.tree.root]
        while stack and self.left > 0:
            node = stack.pop()
            self.left -= 1
            if node.path and sum(map(len, node.done)) == self.tree.passes:  # its bound holds the ends of all
                return self.tree.orders(node)
            children = [child for child in self.tree.children(node) if self.tree.lower_bound(child) <= makespan]
            for child in reversed(children):
                times, known = self.tree.times_of(child), seen.setdefault(child.key, [])
                if any(all(a <= b for a, b in zip(one, times, strict=True)) for one in known):
                    continue
                known[:] = [one for one in known if not all(a <= b for a, b in zip(times, one, strict=True))]
                known.append(times)
                stack.append(child)
        return None

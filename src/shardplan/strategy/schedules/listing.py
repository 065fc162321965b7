"""The list scheduler: an order for any stage times under bounds of memory.

Each rank that is free does what is ready: I before F before W, as others wait for an I most and for a W never. W fill
idle slots, and are done at the bound of memory. Of a few rules of this kind, the generators' orders and a beam through
the tree of all orders the best is improved by moving single passes.
"""

from __future__ import annotations

import math
from itertools import islice, product
from random import Random

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules.action_lists import F, I, W
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.shop import Orders, Pass, Shop
from shardplan.strategy.schedules.shop_tree import Key, ShopNode, ShopTree
from shardplan.strategy.schedules.table import GENERATORS, schedule

PASSES = 2_000_000  # run by the local search: a second or two
NODES = 15_000  # of the beam: the same
WIDTH = 64


def list_schedule(shop: Shop, moves: int | None = None) -> Schedule:
    """Return a schedule of a shop within its bounds; the local search tries so many `moves`, always the same."""
    moves = PASSES // (3 * shop.microbatches * len(shop.owners)) if moves is None else moves
    moves = min(moves, 12_000)
    orders, tree = best_listed(shop), ShopTree(shop)
    if moves and _score(shop, orders)[0] > tree.lower_bound(tree.root):
        found = beam_search(tree, min(WIDTH, NODES // tree.passes))
        orders = min((orders, found), key=lambda one: _score(shop, one)) if found else orders
        orders = local_search(shop, orders, moves)
    return shop.schedule(orders, "listed")


def best_listed(shop: Shop) -> Orders:
    """Return the best order of the rules, and of the generators that lay stages so and keep within the bounds."""
    tried = [
        _greedy(shop, priority, filled, high)
        for priority, filled, high in product(((I, F, W), (F, I, W), (I, W, F)), (False, True), (False, True))
    ]
    for name in GENERATORS:
        try:
            made = schedule(name, len(shop.bounds), shop.microbatches)
        except ScheduleError:  # it is not defined for these sizes
            continue
        if made.owners == shop.owners and made.copies == 1:
            orders = shop.orders(made)
            tried += [orders] if all(shop.fits(order, rank) for rank, order in enumerate(orders)) else []
    return min(tried, key=lambda orders: _score(shop, orders))


def beam_search(tree: ShopTree, width: int) -> Orders | None:
    """Go down the tree, pass by pass, with the `width` nodes of the least bounds; of equal ones with the least idle.

    None where there are none left: all ended in ranks that wait for ever.
    """
    level = [tree.root]
    for _ in range(tree.passes):
        found: dict[Key, list[tuple[tuple[float, ...], tuple[float, float], ShopNode]]] = {}
        left = level[::-1]
        while left:
            node = left.pop()
            for child in tree.children(node):
                if child.path is node.path:  # a forward was barred
                    left.append(child)
                    continue
                ends, times, known = tree.ends(child), tree.times_of(child), found.setdefault(child.key, [])
                if not any(all(a <= b for a, b in zip(one, times, strict=True)) for one, _, _ in known):
                    known.append((times, (max(e for e, _ in ends), sum(e for _, e in ends)), child))
        every = sorted((each for known in found.values() for each in known), key=lambda each: each[1])
        level = [node for _, _, node in islice(every, width)]
    return tree.orders(level[0]) if level else None


def local_search(shop: Shop, orders: Orders, moves: int) -> Orders:
    """Move passes within their ranks at random, and keep what is worse by less and less; return the best."""
    random, least = Random(0), max(shop.busy(r) for r in range(len(shop.bounds)))
    orders = [list(order) for order in orders]
    now = score = _score(shop, orders)
    best = [list(order) for order in orders]
    for k in range(moves):
        if score[0] <= least:
            break
        slack = 0.04 * score[0] * max(0, 1 - 1.25 * k / moves)
        rank = random.randrange(len(orders))
        old = orders[rank]
        i = random.randrange(len(old))
        j = min(max(0, i + random.choice((-6, -4, -3, -2, -1, 1, 2, 3, 4, 6))), len(old) - 1)
        new = [*old]
        new.insert(j, new.pop(i))
        if new == old or not shop.fits(new, rank):
            continue
        orders[rank] = new
        then = _score(shop, orders)
        if then <= now or (then[0] < math.inf and then[0] <= score[0] + slack * random.random()):
            now = then
            if now < score:
                score, best = now, [list(order) for order in orders]
        else:
            orders[rank] = old
    return best


def _score(shop: Shop, orders: Orders) -> tuple[float, float]:
    """The makespan, then how early the ranks are done."""
    ends = shop.ends(orders)
    return max(ends), sum(ends)


def _greedy(shop: Shop, priority: tuple[int, int, int], filled: bool, high: bool) -> Orders:
    """Run the shop in time; `priority` orders F, I and W, where `filled` W also delay what comes before they are done.

    Of several stages of a rank, the last or the first goes first. A forward leaves room for the later stages of its
    rank, without which the ranks could wait for each other for ever.
    """
    n, stages = shop.microbatches, shop.stages
    waiting = [[k for k, source in enumerate(shop.waits) if source == each] for each in range(len(shop.waits))]
    ready = [[0, 0, 0] for _ in shop.owners]  # how many of each pass may begin, at the time of the run
    ready[0][F] = n
    begun = [[0, 0, 0] for _ in shop.owners]
    orders: Orders = [[] for _ in shop.bounds]
    held = [0] * len(orders)
    busy: dict[int, tuple[float, Pass]] = {}  # until when a rank does what
    clock, left = 0.0, 3 * n * len(shop.owners)
    while left or busy:
        for rank in range(len(orders)):
            if rank in busy:
                continue
            room = {s: shop.bounds[rank] - held[rank] - k for k, s in enumerate(reversed(stages[rank]))}
            able = [
                (s, kind)
                for s in stages[rank]
                for kind in (F, I, W)
                if begun[s][kind] < ready[s][kind] and (kind != F or room[s] > 0)
            ]
            soon = min((t for t, _ in busy.values()), default=math.inf)
            if not filled and soon < math.inf:  # a W that would end behind the next event is left, unless it makes room
                able = [a for a in able if a[1] != W or clock + shop.times[a[0]][W] <= soon or max(room.values()) <= 0]
            if able:
                choice = min(able, key=lambda a: (priority.index(a[1]), -a[0] if high else a[0]))
                s, kind = choice
                begun[s][kind] += 1
                held[rank] += (kind == F) - (kind == W)
                orders[rank].append(choice)
                busy[rank] = clock + shop.times[s][kind], choice
                left -= 1
        clock = min(t for t, _ in busy.values())
        for rank in [r for r, (t, _) in busy.items() if t == clock]:
            s, kind = busy.pop(rank)[1]
            for after in waiting[3 * s + kind]:
                ready[after // 3][after % 3] += 1
    return orders

"""The list scheduler and the exact solver, held against plain enumeration, and both against the generators."""

from itertools import product
from math import prod
from random import Random

import pytest

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import Shop, Times, check, in_flight, list_schedule, replay, schedule, solve
from shardplan.strategy.schedules.exact import Search
from shardplan.strategy.schedules.shop import Pass


def shop_of(name: str, p: int, m: int, times: tuple[int, int, int]) -> Shop:
    found = schedule(name, p, m)
    return Shop(found.owners, m, (times,) * found.stages, in_flight(found))


def words(shop: Shop, rank: int) -> list[list[Pass]]:
    """Every order of a rank that keeps its bound."""
    passes = [(s, k) for s in shop.stages[rank] for k in range(3)]
    found: list[list[Pass]] = [[]]
    for _ in range(shop.microbatches * len(passes)):
        longer = ([*o, a] for o in found for a in passes if o.count(a) < shop.microbatches)
        found = [o for o in longer if shop.fits(o, rank)]
    return found


def shortest(shop: Shop) -> float:
    """By plain enumeration: every order of every rank, replayed as a schedule."""
    cost = Times(*([times[k] for times in shop.times] for k in range(3)))
    best = float("inf")
    for orders in product(*(words(shop, r) for r in range(len(shop.bounds)))):
        try:
            best = min(best, replay(shop.schedule(orders, ""), cost).makespan)
        except ScheduleError:  # they wait in a circle
            continue
    return best


def test_the_exact_solver_equals_enumeration() -> None:
    random, tried = Random(5), 0
    while tried < 50:
        p, m, v = random.choice(
            ((1, 2, 2), (1, 3, 1), (2, 2, 1), (2, 3, 1), (3, 2, 1), (3, 3, 1), (2, 1, 2), (3, 1, 2))
        )
        once = tuple(range(p))
        owners = once if v == 1 else random.choice((once * 2, once + once[::-1]))
        times = tuple(tuple(random.randint(1, 4) for _ in range(3)) for _ in owners)
        shop = Shop(owners, m, times, tuple(random.randint(v, 3) for _ in once))
        if prod(len(words(shop, r)) for r in once) > 200:
            continue
        tried += 1
        least, found = shortest(shop), solve(shop)
        assert found.proved and found.makespan == least
        check(found.schedule, shop.bounds)
        # The tree itself is right: it has an order of the least makespan and none of a shorter one.
        search = Search(shop, 10**6)
        assert search.tree.lower_bound(search.tree.root) <= least
        reached = search.order_within(int(least))
        assert reached is not None and max(shop.ends(reached)) == least
        assert Search(shop, 10**6).order_within(int(least) - 1) is None


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (3, 2, 2)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-v"])
def test_gaps_to_the_optimum_at_equal_memory(name: str, times: tuple[int, int, int]) -> None:
    for p, m in ((1, 3), (2, 4), (3, 3), (4, 4)):
        shop = shop_of(name, p, m, times)
        found, quick = solve(shop, 20_000), list_schedule(shop, 2000)
        made = replay(schedule(name, p, m), Times(*times)).makespan
        check(quick, shop.bounds)
        length = replay(quick, Times(*times)).makespan
        assert found.proved and found.makespan <= made
        assert found.makespan <= length <= 1.03 * found.makespan
        assert length == max(shop.ends(shop.orders(quick)))


def test_zb_h1_is_shortest_and_1f1b_is_not_once_w_is_free() -> None:
    assert solve(shop_of("zb-h1", 4, 8, (1, 1, 1))).makespan == 27 == 3 * 8 + 3
    assert solve(shop_of("1f1b", 4, 8, (1, 1, 1))).makespan == 30 < 33


def test_waiting_may_be_worth_more_than_what_is_ready() -> None:
    """Without a rank that waits although it could begin something, the least would be 44."""
    shop = Shop((0, 1, 2), 3, ((1, 8, 2), (1, 1, 8), (1, 5, 1)), (2, 2, 1))
    assert Search(shop, 10**6).order_within(40) is not None
    assert solve(shop).makespan == 40


def test_a_forward_may_leave_its_room_to_a_later_stage() -> None:
    """The optimum (CP-SAT's too): with two forwards a rank, one that could begin would stop the chain for ever."""
    shop = Shop((0, 1, 1, 0), 2, ((7, 5, 5), (8, 2, 7), (4, 4, 8), (2, 6, 2)), (2, 2))
    assert Search(shop, 10**5).order_within(88) is None and Search(shop, 10**5).order_within(89) is not None


def test_values_under_way_are_compared() -> None:
    """The optimum (CP-SAT's too), 103, is lost to a node whose ranks are free no later, but whose values come later."""
    chunks = ((8, 4, 2), (3, 7, 2), (7, 4, 8), (8, 2, 3), (1, 6, 1), (8, 3, 8))
    search = Search(Shop((0, 1) * 3, 2, chunks, (6, 4)), 10**5)
    assert search.order_within(102) is None and search.order_within(103) is not None and search.left > 0


def test_a_search_that_is_cut_off_says_so() -> None:
    cut = solve(shop_of("v-min", 4, 4, (2, 3, 1)), nodes=10)
    assert not cut.proved and cut.least < cut.makespan
    assert cut.nodes == 10


def test_the_beam_finds_what_rules_and_local_search_do_not() -> None:
    shop = shop_of("v-half", 4, 6, (1, 1, 1))
    assert replay(list_schedule(shop), Times(1, 1, 1)).makespan == 41 == solve(shop).makespan


def test_a_w_makes_room_at_the_bound_of_memory() -> None:
    """The rules alone reach the optimum here: a W that ends behind the next event goes first where no forward may."""
    shop = Shop((0, 1, 2), 3, ((4, 1, 4), (1, 4, 4), (4, 4, 5)), (2, 2, 2))
    cost = Times(*([each[k] for each in shop.times] for k in range(3)))
    assert replay(list_schedule(shop, 0), cost).makespan == solve(shop).makespan


def test_unequal_stages_are_scheduled_within_their_bounds() -> None:
    random = Random(2)
    for p, v in ((2, 1), (3, 2), (4, 1), (3, 3)):
        times = tuple(tuple(random.randint(0, 5) for _ in range(3)) for _ in range(p * v))
        bounds = tuple(random.randint(v, 2 * v + 1) for _ in range(p))
        shop = Shop(tuple(range(p)) * v, 6, times, bounds)
        found = check(list_schedule(shop, 200), bounds)
        cost = Times(*([each[k] for each in times] for k in range(3)))
        assert replay(found, cost).makespan == max(shop.ends(shop.orders(found)))
        assert replay(found, cost).makespan >= max(shop.busy(r) for r in range(p))


def test_what_is_no_shop() -> None:
    for owners, times, bounds, said in (
        ((0, 2), ((1, 1, 1),) * 2, (1, 1), "stages lie on ranks (0, 2), with bounds for 2; legal is one a rank"),
        ((0, 1), ((1, 1, 1),), (1, 1), "times of 1 stages; legal are F, I and W, 0 or more, of each of 2"),
        ((0, 0), ((1, 1, 1),) * 2, (1,), "rank 0 may hold 1 forwards; its 2 stages need as many"),
    ):
        with pytest.raises(ScheduleError) as error:
            Shop(owners, 2, times, bounds)
        assert str(error.value) == said
    with pytest.raises(ScheduleError, match=r"solve: a time is 1\.5; legal is a whole number of at least 1"):
        solve(Shop((0,), 1, ((1.5, 1, 1),), (1,)))

"""The checker beside the judge on random protocols, right and wrong, per mode of running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.fused.judge import TooManyStates, wrong
from tests.fused.mutants import KINDS, MODES, base, by_chance
from tests.fused.rings import by_hand, by_paths, named, rings, unequal

from shardplan.fused.tiles.checker import check
from shardplan.fused.tiles.events import TileProtocol, TileScheduleError

RIGHT = "unaltered"


def accepted(protocol: TileProtocol, mode: Any) -> bool:
    try:
        check(protocol, (mode,))
    except TileScheduleError:
        return False
    return True


def tries(seed: int, kind: str, most: int = 60_000) -> Iterator[tuple[TileProtocol, str, bool, bool]]:
    """Protocols of a kind, each in a mode in which it was right before: whether it is now, and is accepted."""
    rng = Random(f"{seed} {kind}")
    while True:
        made = base(rng)
        mode = rng.choice(MODES)
        try:
            if wrong(made, mode, most):
                continue
            altered = made if kind == RIGHT else KINDS[kind](made, rng)
            if altered == made and kind != RIGHT:
                continue
            right = not wrong(altered, mode, most)
        except TooManyStates:
            continue
        yield altered, mode, right, accepted(altered, mode)


def tally(seed: int, wrongs: int, rights: int) -> dict[str, Counter[str]]:
    """So many wrong ones, an equal share of every kind, and so many right ones: harmless ones, then unaltered ones."""
    found: dict[str, Counter[str]] = {}
    share = wrongs // len(KINDS)
    harmless = 0
    for kind in KINDS:
        count: Counter[str] = Counter()
        for _, mode, right, taken in tries(seed, kind):
            if right and count["right"] < share:
                count["right"] += 1
                count["rejected"] += not taken
            elif not right and count["wrong"] < share:
                count["wrong"] += 1
                count["missed"] += taken
                count[mode] += 1
            if count["wrong"] == share:
                break
        harmless += count["right"]
        found[kind] = count
    count = Counter()
    for _, _, right, taken in tries(seed, RIGHT):
        if harmless + count["right"] >= rights:
            break
        count["right"] += right
        count["rejected"] += not taken
    found[RIGHT] = count
    return found


def tally_chance(seed: int, count: int) -> Counter[str]:
    """So many protocols that chance made, beside the judge."""
    rng, found = Random(f"{seed} chance"), Counter[str]()
    while found["wrong"] + found["right"] < count:
        made, mode = by_chance(rng), rng.choice(MODES)
        try:
            right = not wrong(made, mode, 60_000)
        except TooManyStates:
            continue
        taken = accepted(made, mode)
        found["right" if right else "wrong"] += 1
        found["missed"] += taken and not right
        found["rejected"] += right and not taken
        found[mode] += not right
    return found


def tally_rings(every: int = 1, most: int = 200_000) -> dict[str, Counter[str]]:
    """The named rings, each `every`-th of them, beside the rule by hand, shortest paths, and the judge."""
    found: dict[str, Counter[str]] = {}
    for said in list(rings())[::every]:
        ring, right = named(*said), by_hand(*said)
        _count(found.setdefault(said[0], Counter()), ring.protocol(), right, by_paths(ring), most)
    return found


def tally_unequal(seed: int, count: int, most: int = 20_000) -> Counter[str]:
    """Random graphs of ranks with rows that differ, or none, beside shortest paths and the judge."""
    rng, found = Random(f"{seed} unequal"), Counter[str]()
    for _ in range(count):
        ring = unequal(rng)
        right = by_paths(ring)
        _count(found, ring.protocol(), right, right, most)
    return found


def _count(found: Counter[str], protocol: TileProtocol, right: bool, by_path: bool, most: int) -> None:
    taken = accepted(protocol, "resident")
    found["right" if right else "wrong"] += 1
    found["missed"] += taken and not right
    found["rejected"] += right and not taken
    found["paths differ"] += by_path != right
    try:
        found["judge differs"] += (not wrong(protocol, "ranks", most)) != right
        found["judged"] += 1
    except TooManyStates:
        pass  # the rules have their word all the same

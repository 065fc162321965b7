"""The checker beside the judge on random protocols, right and wrong, per mode of running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.fused.judge import TooManyStates, wrong
from tests.fused.mutants import KINDS, MODES, base

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

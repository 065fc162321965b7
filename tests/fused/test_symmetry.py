"""One proof of a schedule for all shapes, beside the exhaustive one of every shape; also of schedules made wrong."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fused.mutants import Events, lists, sealed

from shardplan.fused.tiles import symmetry
from shardplan.fused.tiles.checker import check
from shardplan.fused.tiles.events import TileProtocol, TilePut, TileRead, TileScheduleError, TileSignal, TileWait
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockCuts, BlockShape, RowShape
from shardplan.fused.tiles.symmetry import element_shape, prove

WAITS = ("last_program", "second_launch", "owner")
Change = Callable[[list[Any]], list[Any]]


def drawn(rng: Random) -> tuple[TileSchedule, int]:
    """A schedule of up to three ranks, twelve tiles and seven programs, in half of the cases a big one of its kind."""
    waits = rng.choice(WAITS)
    shots = 2 if waits == "owner" or rng.random() < 0.2 else 1
    tiles = rng.randint(1, 5)
    slots = 2 if shots == 2 else rng.choice((1, 2, 2))
    order = rng.choice(("remote_first", "natural"))
    acks = slots == 1 or (shots == 1 and rng.random() < 0.2)
    ranks, programs = rng.randint(1, 3), rng.choice((1, 2, 3, 7))
    return TileSchedule(order, tiles, rng.randint(1, 4), programs, waits, slots, acks, shots), ranks  # type: ignore[arg-type]


def proof(schedule: TileSchedule, ranks: int, modes: Any) -> bool:
    try:
        prove(schedule, ranks, modes)
    except TileScheduleError:
        return False
    return True


def exhaustive(schedule: TileSchedule, ranks: int, modes: Any, shape: Any = None) -> bool:
    try:
        check(schedule.protocol(ranks, shape or element_shape(schedule, ranks)), modes)
    except TileScheduleError:
        return False
    return True


def each_program(change: Change) -> Callable[[TileProtocol], TileProtocol]:
    def altered(protocol: TileProtocol) -> TileProtocol:
        return sealed(protocol, [[[change(p) for p in rank] for rank in launch] for launch in lists(protocol)])

    return altered


def swapped(first: type, second: type) -> Change:
    """Where one kind of event comes directly before another one they change places."""

    def change(events: list[Any]) -> list[Any]:
        found = list(events)
        for k in range(len(found) - 1):
            if isinstance(found[k], first) and isinstance(found[k + 1], second) and events[k] is found[k]:
                found[k], found[k + 1] = found[k + 1], found[k]
        return found

    return change


def waits_altered(change: Callable[[TileWait], TileWait | None], acks: bool) -> Change:
    def altered(events: list[Any]) -> list[Any]:
        found = [change(e) if isinstance(e, TileWait) and (e.want < e.step) == acks else e for e in events]
        return [e for e in found if e is not None]

    return altered


def signals_lost(protocol: TileProtocol) -> TileProtocol:
    """Every rank's first signal to the next one is lost."""
    events: Events = lists(protocol)
    for launch in events:
        for rank, programs in enumerate(launch):
            for program in programs:
                at = [
                    k for k, e in enumerate(program)
                    if isinstance(e, TileSignal) and e.to == (rank + 1) % protocol.ranks
                ]  # fmt: skip
                if at:
                    del program[at[0]]
                    break
    return sealed(protocol, events)


def launches_turned(protocol: TileProtocol) -> TileProtocol:
    return replace(protocol, launches=protocol.launches[::-1])


def one_slot_less(protocol: TileProtocol) -> TileProtocol:
    return replace(protocol, buffers={n: replace(b, slots=max(1, b.slots - 1)) for n, b in protocol.buffers.items()})


CHANGES: dict[str, Callable[[TileProtocol], TileProtocol]] = {
    "unaltered": lambda protocol: protocol,
    "waits dropped": each_program(waits_altered(lambda w: None, False)),
    "waits lowered": each_program(waits_altered(lambda w: w._replace(want=w.want - 1), False)),
    "waits an epoch early": each_program(waits_altered(lambda w: w._replace(want=w.want - w.step), False)),
    "acks dropped": each_program(waits_altered(lambda w: None, True)),
    "acks an epoch early": each_program(waits_altered(lambda w: w._replace(want=w.want - w.step), True)),
    "signal before put": each_program(swapped(TilePut, TileSignal)),
    "read before wait": each_program(swapped(TileWait, TileRead)),
    "ack before read": each_program(swapped(TileRead, TileSignal)),
    "put to the next": each_program(lambda es: [e._replace(to=0) if isinstance(e, TilePut) else e for e in es]),
    "waits first": each_program(lambda es: sorted(es, key=lambda e: not isinstance(e, TileWait))),
    "signals lost": signals_lost,
    "launches turned": launches_turned,
    "a slot less": one_slot_less,
    "events turned": each_program(lambda es: es[::-1]),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_is_proved_the_exhaustive_one_accepts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all schedules are altered alike; and of programs as many as tiles both say the same."""
    plain, rng = TileSchedule.protocol, Random(name)
    monkeypatch.setattr(TileSchedule, "protocol", lambda self, ranks, shape: CHANGES[name](plain(self, ranks, shape)))
    for part in ("_prove_races", "_prove_ends"):
        monkeypatch.setattr(symmetry, part, getattr(symmetry, part).__wrapped__)
    said: list[tuple[bool, bool]] = []
    for _ in range(60):
        schedule, ranks = drawn(rng)
        modes = rng.choice((("ranks",), ("ranks", "resident"), ("resident",), ("virtual",)))
        said.append((proof(schedule, ranks, modes), exhaustive(schedule, ranks, modes)))
        assert said[-1] != (True, False), (str(schedule), ranks, modes)
    if name == "unaltered":
        assert all(found == wanted for found, wanted in said) and any(wanted for _, wanted in said)
    else:
        assert any(not wanted for _, wanted in said), "the alteration must matter"


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=40)
def test_every_shape_of_a_proved_schedule_is_right(seed: int, more: int) -> None:
    schedule, ranks = drawn(Random(seed))
    rng = Random(more)
    counts = [[rng.choice((0, rng.randint(1, 9))) for _ in range(ranks)] for _ in range(ranks)]
    shape = RowShape(rng.randint(0, 40)) if schedule.shots == 2 else BlockShape.rows(counts, 3)
    prove(schedule, ranks, ("ranks", "resident"))
    assert exhaustive(schedule, ranks, ("ranks", "resident"), shape)


@given(st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_shapes_of_operators_lie_apart_and_fill_the_result(ranks: int, data: st.DataObject) -> None:
    """Which the proof takes for granted."""
    some = st.tuples(*[st.integers(0, 6)] * ranks)
    counts = data.draw(st.tuples(*[some] * ranks))
    rows, columns = data.draw(some), data.draw(some)
    forms = BlockCuts("rows", counts, 3), BlockCuts("stack", (rows, columns)), BlockCuts("beside", (rows, columns))
    for cuts in (*forms, *(each.reverse() for each in forms)):
        shape = cuts.shape()
        assert cuts.reverse().reverse() == cuts
        own = [[b - a for a, b in box] for rank in range(ranks) for box in cuts.own_boxes(rank)]
        assert cuts.largest_block() == tuple(map(max, zip(*own, strict=True)))
        for rank in range(ranks):
            assert sum(b - a for (a, b), _ in cuts.own_boxes(rank)) in (
                cuts.count_rows(rank),
                ranks * cuts.count_rows(rank),
            )
        check(TileSchedule(tiles=2).protocol(ranks, shape), ("ranks",))


@pytest.mark.parametrize("text", [
    "tiles=512 slice=512 programs=132 waits=second_launch", "tiles=512 slice=60 programs=132",
    "tiles=512 programs=132 slots=1 acks=1", "tiles=512 programs=132 waits=owner shots=2",
])  # fmt: skip
def test_the_proof_does_not_grow(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most as many events are tried as for 6 tiles; and none at all for another size of the same kind."""
    tried: list[int] = []
    real = check

    def counting(protocol: TileProtocol, modes: Any) -> None:
        tried.append(sum(len(protocol.of(rank)) for rank in range(protocol.ranks)))
        real(protocol, modes)

    monkeypatch.setattr(symmetry, "check", counting)
    symmetry._prove_races.cache_clear()
    symmetry._prove_ends.cache_clear()
    prove(TileSchedule.parse(text), 8, ("ranks", "resident"))
    assert len(tried) == 1 and tried[0] < 800
    before = symmetry._prove_races.cache_info().misses, symmetry._prove_ends.cache_info().misses
    prove(TileSchedule.parse(text.replace("512", "384").replace("132", "78")), 8, ("ranks", "resident"))
    after = symmetry._prove_races.cache_info().misses, symmetry._prove_ends.cache_info().misses
    assert after == before or "slice=60" in text

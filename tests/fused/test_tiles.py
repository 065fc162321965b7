"""Tile schedules: their orders and counters, and the checker beside a judge that tries every interleaving."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fused.judge import wrong
from tests.fused.mutants import KINDS, MODES, base
from tests.fused.rings import Ring, by_hand, named
from tests.fused.tried import RIGHT, accepted, tally, tally_chance, tally_rings, tally_unequal, tries

import shardplan as sp
from shardplan.fused.tiles.checker import check, subtract_box
from shardplan.fused.tiles.events import TileBox, TileBuffer, TileProtocol, TilePut, TileRead, TileSignal, TileWait
from shardplan.fused.tiles.schedule import TileSchedule
from shardplan.fused.tiles.shapes import BlockShape, RowShape

ROWS = BlockShape.rows([[2, 2], [2, 2]])


@st.composite
def schedules(draw: st.DrawFn, waits: tuple[str, ...]) -> TileSchedule:
    slots = draw(st.integers(1, 2))
    return TileSchedule(
        draw(st.sampled_from(("remote_first", "natural"))),  # type: ignore[arg-type]
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(waits)),  # type: ignore[arg-type]
        slots,
        slots == 1 or draw(st.booleans()),
    )


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, BlockShape]:
    ranks = draw(st.integers(1, 8))
    counts = draw(st.lists(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks))
    return ranks, BlockShape.rows(counts, draw(st.integers(1, 4)))


@given(schedules(("last_program", "second_launch")), blocks())
@settings(max_examples=40)
def test_schedules_of_blocks_are_right(schedule: TileSchedule, shape: tuple[int, BlockShape]) -> None:
    schedule.check(*shape)
    if schedule.waits != "last_program" and not schedule.acks:
        schedule.check(*shape, modes=("virtual",))
    assert TileSchedule.parse(str(schedule)) == schedule


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40),
       st.sampled_from(("last_program", "second_launch", "owner")))  # fmt: skip
@settings(max_examples=30)
def test_sums_in_two_shots_are_right(ranks: int, tiles: int, programs: int, size: int, waits: Any) -> None:
    schedule = TileSchedule(tiles=tiles, programs=programs, waits=waits, shots=2)
    schedule.check(ranks, RowShape(size))
    if waits == "second_launch":
        schedule.check(ranks, RowShape(size), ("virtual",))


@given(st.integers(1, 9))
def test_remote_first_is_a_permutation_at_every_step(ranks: int) -> None:
    orders = [TileSchedule().destinations(rank, ranks) for rank in range(ranks)]
    for step in zip(*orders, strict=True):
        assert sorted(step) == list(range(ranks))
    assert [order[-1] for order in orders] == list(range(ranks))


@given(schedules(("last_program", "second_launch")), blocks())
@settings(max_examples=30)
def test_every_pair_of_ranks_signals(schedule: TileSchedule, shape: tuple[int, BlockShape]) -> None:
    ranks, of = shape
    protocol = schedule.protocol(ranks, of)
    for rank in range(ranks):
        assert {e.to for e in protocol.of(rank) if isinstance(e, TileSignal)} == set(range(ranks))


@pytest.mark.parametrize(
    ("schedule", "shape", "modes", "message"),
    [
        (TileSchedule(), ROWS, ("virtual",),
         "deadlock with one thread for all ranks: rank 0 program 0 waits in epoch 0 for counter 1 (want 1, seen 0), "
         "which is signalled after the first of these"),
        (TileSchedule(slots=1), ROWS, ("resident",),
         "rank 0 program 0 may put tile 1 in [0:2] of result of rank 1 for epoch 1 before rank 1 program 0 reads it in "
         "epoch 0"),
        (TileSchedule(waits="owner"), ROWS, ("ranks",), "waits=owner of blocks; legal are sums in two shots"),
        (TileSchedule(shots=2, acks=True), RowShape(4), ("ranks",),
         "acks=1 of a sum in two shots; legal are the others"),
        (TileSchedule(order=(1, 0, 2)), ROWS, ("ranks",), "order of 3 offsets for 2 ranks"),
        (TileSchedule(), ROWS, ("all",), "tile modes ('all',); legal are some of ranks, virtual, resident"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(schedule: TileSchedule, shape: Any, modes: Any, message: str) -> None:
    with pytest.raises(sp.ScheduleError) as error:
        schedule.check(2, shape, modes)
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


def two(first: list[Any], second: list[Any], counters: int = 2, slots: int = 2, slices: int = 0) -> TileProtocol:
    """A protocol by hand: each rank puts a tile into the other's memory of one element."""
    buffer = TileBuffer(((1,), (1,)), ((((((0, 1),)), 0),), (((((0, 1),)), 1),)), slots)
    return TileProtocol("by hand", 2, (((tuple(first),), (tuple(second),)),), {"b": buffer}, counters, slices)


BOX = ((0, 1),)
LEFT: list[Any] = [TilePut(1, "b", BOX, 1), TileSignal(1, 0), TileWait(0, 1, 1), TileRead("b", BOX)]
RIGHTS: list[Any] = [TilePut(0, "b", BOX, 0), TileSignal(0, 0), TileWait(0, 1, 1), TileRead("b", BOX)]


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (two([TilePut(1, "b", BOX, 1), LEFT[2], LEFT[3], LEFT[1]], [RIGHTS[0], RIGHTS[2], RIGHTS[3], RIGHTS[1]]),
         "deadlock with one thread a rank: rank 0 program 0 waits in epoch 0 for counter 0 (want 1, seen 0), which is "
         "signalled after rank 1 program 0 waits in epoch 0 for counter 0 (want 1, seen 0), which is signalled after "
         "the first of these"),
        (two([*LEFT[:1], *LEFT[2:]], RIGHTS),
         "deadlock with one thread a rank: rank 1 program 0 waits in epoch 0 for counter 0 (want 1, seen 0), which "
         "nobody signals any more"),
        (two(LEFT, [RIGHTS[0], *RIGHTS]), "ranks 1 and 1 both write [0:1] of b of rank 0"),
        (two([TilePut(0, "b", BOX, 1), *LEFT[1:]], RIGHTS),
         "rank 0 puts tile 1 into [0:1] of b of rank 0, where tile 0 lies in [0:1]"),
        (two(LEFT[1:], RIGHTS), "nobody writes tile 1 to [0:1] of b of rank 1"),
        (two([TilePut(1, "b", BOX, 1, 1), *LEFT[1:]], RIGHTS),
         "rank 0 puts tile 1 into [0:1] of b of rank 1 in a slot of another epoch"),
        (two([LEFT[1], LEFT[0], *LEFT[2:]], RIGHTS),
         "rank 0 program 0 may put tile 1 in [0:1] of b of rank 1 for epoch 0 after rank 1 program 0 reads it in "
         "epoch 0"),
        (two(LEFT, RIGHTS[:3]), "nobody reads all of tile 1 in [0:1] of b of rank 1"),
        (two(LEFT, RIGHTS, counters=0), "rank 0 signals counter 0 of rank 1, of 0 allocated"),
        (two(LEFT, [*RIGHTS[:2], TileWait(2, 1, 1)]), "rank 1 waits for counter 2, of 2 allocated"),
        (two(LEFT, [*RIGHTS, TileSignal(2, 0)]), "rank 1 signals rank 2; legal are 0 to 1"),
        (two(LEFT, [*RIGHTS, TileRead("c", BOX)]), "rank 1 uses buffer c of rank 1, which does not exist"),
        (two(LEFT, [*RIGHTS, TileRead("b", ((0, 2),))]), "rank 1 uses [0:2] of buffer b of rank 1, which is [0:1]"),
        (two(LEFT, [*RIGHTS, TileSignal(0, 0, 0, 2)]), "rank 1 counts in slice 0, of 0 allocated"),
        (two(LEFT, [*RIGHTS, TileSignal(1, 1, 0, 2)], slices=1),
         "slice 0 of rank 1 has 1 arrivals an epoch and signals every 2; legal are multiples"),
        (two(LEFT, [*RIGHTS, *[TileSignal(1, 1, 0, 2)] * 3], slices=1),
         "slice 0 of rank 1 has 3 arrivals an epoch and signals every 2; legal are multiples"),
        (two(LEFT, [*RIGHTS, TileSignal(1, 1, 0, 0)], slices=1),
         "slice 0 of rank 1 has 1 arrivals an epoch and signals every 0; legal are multiples"),
        (two(LEFT, [*RIGHTS, TileSignal(1, 1, 0, 2), TileSignal(0, 1, 0, 2)], slices=1),
         "slice 0 of rank 1 signals counter 1 of rank 1 every 2 and counter 1 of rank 0 every 2; legal is one of them"),
        (two(LEFT, RIGHTS, slots=0), "buffer b has 0 slots; legal are 1 to 4096"),
        (two([TileWait(1, -5, 1), *LEFT], RIGHTS),
         "deadlock with one thread a rank: rank 0 program 0 waits in epoch 6 for counter 1 (want 1, of 0 signals an "
         "epoch)"),
        (two([TileWait(1, -5, 3), *LEFT], [*RIGHTS, TileSignal(0, 1), TileSignal(0, 1)]),
         "deadlock with one thread a rank: rank 0 program 0 waits in epoch 8 for counter 1 (want 19, of 2 signals an "
         "epoch)"),
        (two(LEFT, [*RIGHTS[:3], TileRead("b", BOX, 1)]),
         "rank 1 reads [0:1] of b in a slot of another epoch"),
    ],
)  # fmt: skip
def test_a_protocol_by_hand_is_rejected(protocol: TileProtocol, message: str) -> None:
    with pytest.raises(sp.ScheduleError) as error:
        check(protocol)
    assert str(error.value) == f"tile schedule by hand on 2 ranks: {message}"


def test_what_is_left_of_a_box_is_the_rest_of_it_once() -> None:
    def elements(*boxes: TileBox) -> list[tuple[int, ...]]:
        return sorted(at for box in boxes for at in itertools.product(*(range(*side) for side in box)))

    sides = [(a, b) for a in range(4) for b in range(a, 5)]
    box = (1, 4), (0, 3)
    for hole in itertools.product(sides, sides):
        left = [*subtract_box(box, hole)]
        assert elements(*left) == [at for at in elements(box) if at not in elements(hole)]


def test_a_protocol_by_hand_is_accepted() -> None:
    check(two(LEFT, RIGHTS))
    acked = [TileWait(1, 0, 1), *LEFT, TileSignal(1, 1)], [TileWait(1, 0, 1), *RIGHTS, TileSignal(0, 1)]
    check(two(*acked, slots=1))
    with pytest.raises(sp.ScheduleError, match="before rank"):
        check(two(LEFT, RIGHTS, slots=1))
    # A box that is turned round is empty, wherever it lies.
    check(two([*LEFT, TilePut(1, "b", ((3, 1),), 7)], RIGHTS))


def test_a_counter_gets_what_comes_by_slices_and_what_comes_directly() -> None:
    sent: list[Any] = [TileSignal(0, 1), *[TileSignal(0, 1, 0, 2)] * 4]
    check(two([*LEFT, TileWait(1, 3, 3)], [*RIGHTS, *sent], slices=1))
    with pytest.raises(sp.ScheduleError, match=r"waits in epoch 0 for counter 1 \(want 4, seen 3\), which nobody"):
        check(two([*LEFT, TileWait(1, 4, 4)], [*RIGHTS, *sent], slices=1))


def test_a_table_must_cover_once() -> None:
    made = two(LEFT, RIGHTS)
    rows = ((((0, 2),), 0), (((1, 2),), 2))
    for table, message in ((rows, "tiles 0 and 2 both lie"), (rows[1:], "tiles cover 1 of the 2 elements")):
        buffer = TileBuffer(((2,), (1,)), (table, made.buffers["b"].table[1]))
        with pytest.raises(sp.ScheduleError, match=message):
            check(replace(made, buffers={"b": buffer}))


@pytest.mark.parametrize("field", ["order", "waits", "tiles", "slice", "programs", "slots", "shots"])
def test_fields_are_checked(field: str) -> None:
    for value in ("no", 0, -1, (1, 1)):
        with pytest.raises(sp.ScheduleError, match=f"tile schedule: {field}"):
            TileSchedule(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["tiles", "tiles=", "tiles=x", "tile=1", "tiles=1 tiles=2", "order=0,x"])
def test_text_is_checked(text: str) -> None:
    with pytest.raises(sp.ParseError, match="tile schedule"):
        TileSchedule.parse(text)


def test_the_judge_knows_right_from_wrong() -> None:
    assert not wrong(two(LEFT, RIGHTS), "resident")
    assert wrong(two([LEFT[1], LEFT[0], *LEFT[2:]], RIGHTS), "resident") == "read"
    assert wrong(two([*LEFT[:1], *LEFT[2:]], RIGHTS), "ranks") == "deadlock"
    assert wrong(two(LEFT, [RIGHTS[0], *RIGHTS]), "ranks") == "twice"
    assert wrong(two(LEFT, RIGHTS), "virtual") == "deadlock"
    assert wrong(two(LEFT, RIGHTS, counters=0), "ranks") == "counter"
    assert wrong(two(LEFT, RIGHTS, slots=1), "ranks") == "read"


def test_the_judge_may_do_first_what_hinders_nobody() -> None:
    rng = Random(5)
    for _ in range(25):
        made, mode = base(rng), rng.choice(MODES)
        for each in (made, KINDS[rng.choice(list(KINDS))](made, rng)):
            assert bool(wrong(each, mode, epochs=2, eager=False)) == bool(wrong(each, mode, epochs=2))


def test_the_checker_agrees_with_every_interleaving() -> None:
    """The full count is `benchmarks.tile_mutants`."""
    found = tally(0, 40, 40)
    assert found.keys() == {*KINDS, RIGHT}
    assert sum(c["wrong"] for c in found.values()) == 40 <= sum(c["right"] for c in found.values())
    found["by chance"] = tally_chance(0, 1000)
    assert {kind: (c["missed"], c["rejected"]) for kind, c in found.items()} == dict.fromkeys(found, (0, 0))


def test_the_checker_agrees_on_rings_of_any_slots_and_credits() -> None:
    """The full count is `benchmarks.tile_mutants`."""
    found = tally_rings(every=37) | {"unequal": tally_unequal(0, 120)}
    for shape, count in found.items():
        keys = ("missed", "rejected", "paths differ", "judge differs")
        assert {key: count[key] for key in keys} == dict.fromkeys(keys, 0), shape
        assert min(count["right"], count["wrong"]) >= 5 and count["judged"] >= 20, shape


@pytest.mark.parametrize(
    ("slots", "lag"), [(3, None), (4, None), (8, None), (3, 4), (3, 5), (4, 5), (8, 9), (300, 301)]
)
def test_a_ring_whose_writer_may_lap_its_reader_is_rejected(slots: int, lag: int | None) -> None:
    said = ("line", 2, slots, lag, False, 1, False)
    assert not by_hand(*said)
    message = f"for epoch {slots} before rank 1 program 0 reads it in epoch 0$"
    with pytest.raises(sp.ScheduleError, match=message):
        check(named(*said).protocol())
    check(named("line", 2, slots, slots, False, 1, False).protocol())


def test_ranks_without_rows_need_no_credits() -> None:
    rows = {(0, 1): 2, (0, 2): 0, (2, 1): 0}
    lags = {(0, 1): 1}
    ring = Ring(3, rows, dict.fromkeys(rows, 2), 1, lags)
    assert accepted(ring.protocol(), "ranks") and not wrong(ring.protocol(), "ranks")
    assert not accepted(replace(ring, rows=rows | {(0, 2): 1}).protocol(), "ranks")


def crowd(size: int, lag: int | None) -> TileProtocol:
    """Rank 2 waits for so many signals an epoch, of which rank 0 gives one, and rank 1, which puts, the others.

    Rank 0 waits for rank 2 to have ended the epoch so many epochs ago.
    """
    first = [TileSignal(2, 0), *([] if lag is None else [TileWait(0, 1 - lag, 1)])]
    second = [TileWait(0, 0, 1), TilePut(2, "b", BOX, 3), *[TileSignal(2, 0)] * (size - 1)]
    third = [TileWait(0, size, size), TileRead("b", BOX), TileSignal(1, 0), TileSignal(0, 0)]
    launch = tuple((tuple(each),) for each in (first, second, third))
    buffer = TileBuffer(((0,), (0,), (1,)), ((), (), ((BOX, 3),)), 1)
    return TileProtocol("a crowd", 3, (launch,), {"b": buffer}, 1, 0)


@pytest.mark.parametrize(("size", "lag"), [(2, 0), (2, 1), (2, None), (7, 5), (7, 6), (50, 48), (50, 49), (50, None)])
def test_who_runs_far_ahead_stands_in_for_others(size: int, lag: int | None) -> None:
    """In an epoch of rank 2 rank 0 gives lag + 1 signals, if nobody else does: too many if those are all."""
    made, right = crowd(size, lag), lag is not None and lag + 1 < size
    assert accepted(made, "ranks") == right
    if size < 10:
        assert (not wrong(made, "ranks", epochs=12)) == right
    if not right:
        with pytest.raises(sp.ScheduleError, match=r"rank 1 program 0 may put tile 3 .* for epoch 0 after rank 2"):
            check(made)


def test_what_hangs_on_very_far_epochs_is_refused() -> None:
    with pytest.raises(
        sp.ScheduleError, match=r"what orders tile 3 in \[0:1\] of b of rank 2 lies over 4096 epochs apart"
    ):
        check(crowd(4200, 4150))


def test_harmless_mutants_are_accepted() -> None:
    _, _, right, taken = next(t for t in tries(1, "wait dropped") if t[2])
    assert right and taken

"""Pictures of schedules."""

from xml.etree import ElementTree

import pytest

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import GENERATORS, Times, place_messages, replay, schedule, schedule_picture, svg


def test_text_of_a_v() -> None:
    assert schedule_picture(schedule("zb-v", 2, 3), columns=60).split("\n") == [
        "rank 0  F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..",
        "rank 1  ..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2",
        "bubble 0, idle 1 of 19",
    ]


@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_drawn_is_what_runs(name: str) -> None:
    for found in (schedule(name, 4, 8), place_messages(schedule(name, 4, 8), Times(), 0.5)):
        cost = Times(2, 3, 1)
        replayed = replay(found, cost)
        lines = schedule_picture(found, cost, columns=400).split("\n")
        assert len(lines) == 5 and max(map(len, lines)) <= 400
        busy = [len(line.partition("  ")[2].replace(".", "")) for line in lines[:4]]
        scale = len(max(lines[:4], key=len).partition("  ")[2]) / replayed.makespan
        assert all(abs(n - b * scale) <= 0.1 * n for n, b in zip(busy, replayed.busy, strict=True))
        root = ElementTree.fromstring(svg(found, cost))
        boxes = [e for e in root.iter() if e.tag.endswith("rect")]
        titles = sorted(title.text or "" for box in boxes for title in box)
        if found.has_messages:
            titles = [title for title in titles if "RECV" not in title and "SEND" not in title]
        assert titles == sorted(str(leaf) for row in found.compute_only().ranks for a in row if a for leaf in a.leaves)
        edges = [float(b.attrib["x"]) + float(b.attrib["width"]) for b in boxes]
        assert max(edges) == pytest.approx(1200 - 8, abs=0.1)


def test_long_schedules_are_cut_to_the_columns() -> None:
    assert max(map(len, schedule_picture(schedule("1f1b", 4, 64), columns=60).split("\n"))) <= 60
    with pytest.raises(ScheduleError, match="columns is 3; legal is a whole number of at least 20"):
        schedule_picture(schedule("1f1b", 4, 64), columns=3)

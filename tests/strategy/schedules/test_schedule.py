"""Actions and schedules as data: text and CSV both ways."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ScheduleError
from shardplan.strategy.schedules import GENERATORS, Action, Schedule, schedule
from shardplan.strategy.schedules.action import COMPUTE, KINDS, OF_A_MICROBATCH, OVERLAP

small = st.integers(0, 40)
computed = st.builds(Action, small, st.sampled_from(COMPUTE), small)
actions = st.one_of(
    st.builds(Action, small, st.sampled_from(OF_A_MICROBATCH), small),
    st.builds(Action, small, st.sampled_from([k for k in KINDS if k not in (*OF_A_MICROBATCH, OVERLAP)])),
    st.lists(computed, min_size=1, max_size=3).map(lambda parts: Action(-1, OVERLAP, parts=tuple(parts))),
)
rows = st.lists(st.lists(st.none() | actions, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
schedules = rows.filter(lambda r: any(a for row in r for a in row)).map(lambda r: Schedule(r, 41, name="any one"))


def test_the_text_of_actions() -> None:
    assert Action.parse("0F3") == Action(0, "F", 3)
    assert Action.parse("12SEND_F0") == Action(12, "SEND_F", 0)
    assert Action.parse("3UNSHARD") == Action(3, "UNSHARD")
    both = Action.parse("(0F3;1B1)OVERLAP_F_B")
    assert both.parts == (Action(0, "F", 3), Action(1, "B", 1)) == both.leaves
    assert repr(both) == "Action.parse('(0F3;1B1)OVERLAP_F_B')"
    assert str(Action.parse("2RECV_B1").matching) == "3SEND_B1"
    assert str(Action.parse("2SEND_B1").matching) == "1RECV_B1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F", "0F is malformed: F has a microbatch"),
        ("0UNSHARD3", "0UNSHARD3 is malformed: UNSHARD has no microbatch"),
        ("0X3", "'0X3' is no action; legal are a stage, a kind and a microbatch, as in 0F3 or 2SEND_B1"),
        ("0F3x", "'0F3x' is no action; legal are a stage, a kind and a microbatch, as in 0F3 or 2SEND_B1"),
        (
            "(0SEND_F3)OVERLAP_F_B",
            "(0SEND_F3)OVERLAP_F_B overlaps no computations; legal are parts of the kinds F, B, I and W",
        ),
        ("()OVERLAP_F_B", "'' is no action; legal are a stage, a kind and a microbatch, as in 0F3 or 2SEND_B1"),
    ],
)
def test_what_is_no_action(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert str(error.value) == said


@given(actions)
def test_an_action_is_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(schedules)
def test_a_schedule_is_its_text(found: Schedule) -> None:
    again = Schedule.parse(str(found))
    assert again == found and again.name == found.name


@given(schedules)
def test_a_schedule_is_its_file(tmp_path_factory: pytest.TempPathFactory, found: Schedule) -> None:
    path = tmp_path_factory.mktemp("csv") / "one.csv"
    found.to_csv(path, ours=True)
    kept = found if not found.has_messages else Schedule(tuple(tuple(a for a in row if a) for row in found.ranks), 41)
    if any(a is not None and a.leaves[0].microbatch is not None for row in found.ranks for a in row):
        assert Schedule.from_csv(path).ranks == kept.ranks
    assert [p.name for p in path.parent.iterdir()] == ["one.csv"]


def test_what_torch_does_not_know_is_written_on_request(tmp_path: Path) -> None:
    found = Schedule.parse("schedule x, 1 microbatches\n0: 0F0 0OFFLOAD0 . 0RELOAD0 0B0 0OPT")
    found.to_csv(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"0F0,,0B0\r\n"
    found.to_csv(tmp_path / "a", ours=True)
    assert (tmp_path / "a").read_bytes() == b"0F0,0OFFLOAD0,,0RELOAD0,0B0,0OPT\r\n"


def test_stages_lie_where_their_actions_are() -> None:
    found = Schedule.parse("schedule, 1 microbatches\n0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0")
    assert (found.stages, found.owners, found.forward_only, found.name) == (4, (0, 1, 1, 0), False, "")
    assert [found.stage_before(0), found.stage_before(2), found.stage_after(2), found.stage_after(3)] == [
        None,
        1,
        3,
        None,
    ]


@pytest.mark.parametrize("name", GENERATORS)
def test_stages_form_a_chain_for_each_copy(name: str) -> None:
    found = schedule(name, 2, 4)
    stages = range(found.stages)
    assert [s for s in stages if found.stage_before(s) is None] == [
        *range(0, found.stages, found.stages // found.copies)
    ]
    assert sum(found.stage_after(s) is None for s in stages) == found.copies
    for s in stages:
        assert (then := found.stage_after(s)) is None or (then, found.stage_before(then)) == (s + 1, s)


def test_bad_files_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n1F0,oops\n")
    with pytest.raises(ScheduleError, match=r"s\.csv, row 2 \(rank 1\): 'oops' is no action"):
        Schedule.from_csv(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="is no schedule"):
        Schedule.from_csv(path)
    with pytest.raises(ScheduleError, match="is no schedule"):
        Schedule.from_csv(tmp_path / "none.csv")
    path.write_text("")
    with pytest.raises(ScheduleError, match="has no action"):
        Schedule.from_csv(path)
    with pytest.raises(ScheduleError, match="cannot be written"):
        schedule("1f1b", 2, 2).to_csv(tmp_path / "no" / "s.csv")
    for text in (
        "",
        "schedule x",
        "schedule x, 2 microbatch",
        "schedule x, 2 microbatches\n1: 0F0",
        "x, 2 microbatches",
    ):
        with pytest.raises(ScheduleError, match="legal"):
            Schedule.parse(text)
    with pytest.raises(ScheduleError) as error:
        Schedule.parse("schedule x, 1 microbatches, 1 stages\n0: 0F0 0B0")
    head = "'schedule x, 1 microbatches, 1 stages'"
    assert str(error.value) == f"a schedule has {head}; legal are microbatches and copies"
    with pytest.raises(ScheduleError, match="rank 0 has 3; legal is an Action"):
        Schedule(((3,),), 1)  # type: ignore[arg-type]


def test_gpipe_and_1f1b() -> None:
    assert str(schedule("gpipe", 2, 2)) == "schedule gpipe, 2 microbatches\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1"
    assert str(schedule("1f1b", 3, 4)) == (
        "schedule 1f1b, 4 microbatches\n"
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )
    assert str(schedule("1f1b", 1, 2)) == "schedule 1f1b, 2 microbatches\n0: 0F0 0B0 0F1 0B1"


@pytest.mark.parametrize("name", GENERATORS)
def test_forward_only_runs_each_forward_once(name: str) -> None:
    found = schedule(name, 4, 8, forward_only=True)
    assert found.forward_only
    done = [a for row in found.ranks for a in row]
    assert len(done) == len(set(done)) == found.stages // found.copies * 8


def test_wrong_sizes_of_schedules() -> None:
    with pytest.raises(ScheduleError, match="schedule '2f2b' is unknown; legal: gpipe, 1f1b"):
        schedule("2f2b", 2, 2)
    with pytest.raises(ScheduleError, match="schedule 1f1b: ranks is 0; legal is a whole number of at least 1"):
        schedule("1f1b", 0, 2)
    with pytest.raises(ScheduleError, match="schedule 1f1b has 1 chunks a rank, 2 were asked for"):
        schedule("1f1b", 2, 2, chunks=2)

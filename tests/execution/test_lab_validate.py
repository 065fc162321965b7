"""Scores worked out by hand on a small stored result: ranks, ties, regrets, chance levels, targets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardplan.errors import ParseError
from shardplan.execution.lab.results import Row, Sweep
from shardplan.execution.lab.scores import kendall, score, summarize
from shardplan.execution.lab.validate import ScoreVerdict, placement_ratios, validate

STORED = Path(__file__).parent / "lab_results" / "small.json"


@pytest.fixture(scope="module")
def verdict() -> ScoreVerdict:
    return validate([Sweep.load(STORED)])


def row(measured: float, events: float, barrier: float = 1.0, placement: str = "p", program: str = "") -> Row:
    return Row(
        placement, program or f"{measured}", ("all_reduce",), events, barrier, (measured,) * 3, False, 0, (0.0,) * 3,
        (0.1,) * 3, (0,) * 3, 0.0, True, 100, (1.01, 1.02),
    )  # fmt: skip


def test_ranks_by_hand() -> None:
    # measured 10 12 11 20, predicted 3 1 2 4: the best (10) is third, the predicted best (12) is 20 % slower
    s = score([row(10, 3), row(12, 1), row(11, 2), row(20, 4)], "events", 0.01)
    assert (s.rank, s.tied_rank, s.programs) == (3, 3, 4)
    assert s.regret == pytest.approx(0.2)
    assert s.tied_regret == pytest.approx(0.2)
    assert s.min_regret == pytest.approx(0.2)
    # pairs: (10,12)-, (10,11)-, (10,20)+, (12,11)-, (12,20)+, (11,20)+: 3 against 3
    assert s.kendall == pytest.approx(0.0)
    assert s.errors == pytest.approx((-0.7, 1 / 12 - 1, 2 / 11 - 1, -0.8))
    assert s.mean_error == pytest.approx(np.mean([0.7, 11 / 12, 9 / 11, 0.8]))


def test_the_least_regret_is_against_the_least_of_all() -> None:
    """By medians the first is the best, 10 to 12; of its runs none took less than 9, of the other's one took 8."""
    first, second = replace(row(10, 2), seconds=(9, 10, 11)), replace(row(12, 1), seconds=(8, 12, 16))
    (by_median, by_least), (_, right) = ((s.regret, s.min_regret) for s in (
        score([first, second], "events", 0.0), score([replace(first, events=0.5), second], "events", 0.0)))  # fmt: skip
    assert (by_median, by_least, right) == pytest.approx((0.2, 0.0, 9 / 8 - 1))


def test_what_noise_cannot_tell_apart_is_no_mistake() -> None:
    # within 5 % of 10.0: 10.4; it is predicted second, after 12
    rows = [row(10.0, 3), row(12, 1), row(10.4, 2), row(20, 4)]
    s = score(rows, "events", 0.05)
    assert (s.rank, s.tied_rank) == (3, 2)
    assert s.tied_regret == pytest.approx(0.2)  # 12 is no tie
    s = score([row(10.0, 3), row(10.4, 1), row(12, 2)], "events", 0.05)
    assert (s.rank, s.tied_rank) == (3, 1)
    assert s.regret == pytest.approx(0.04)
    assert s.tied_regret == 0.0
    # (10, 12) is the only pair in order, (10, 10.4) is left out, (10.4, 12) is right
    assert s.tied_kendall == pytest.approx(0.0)


def test_pairs_predicted_alike_stay_in_the_planner_s_order() -> None:
    first, second = row(10, 1.0), row(11, 1.0 + 1e-13)
    assert score([first, second], "events", 0.0).rank == 1
    assert score([second, first], "events", 0.0).rank == 2
    assert score([second, first], "events", 0.0).regret == pytest.approx(0.1)
    assert score([first, second], "events", 0.0).kendall is None  # all predicted alike
    assert score([first, second], "barrier", 0.0).errors == pytest.approx((-0.9, 1 / 11 - 1))


def test_kendall_with_ties() -> None:
    predicted, measured = np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])
    assert kendall(predicted, measured, 0.0) == pytest.approx(2 / np.sqrt(2 * 3))
    assert kendall(np.array([1.0, 2.0]), np.array([1.0, 1.001]), 0.01) is None


def test_a_field_counts_only_where_it_can_miss() -> None:
    small = score([row(10, 2), row(11, 1)], "events", 0.0)
    large = score([row(10 + k, k) for k in range(12)], "events", 0.0)
    s = summarize([small, large], "events", pooled=False)
    tops = {t.k: t for t in s.top}
    assert {k: t.fields for k, t in tops.items()} == {1: 2, 3: 1, 5: 1, 10: 1}
    assert tops[1].share == 0.5
    assert tops[1].chance == pytest.approx((1 / 2 + 1 / 12) / 2)
    assert tops[10].share == 1.0
    assert tops[10].chance == pytest.approx(10 / 12)
    assert s.median_regret == pytest.approx(0.05)  # of 0.1 and 0


def test_the_stored_result(verdict: ScoreVerdict) -> None:
    """Two placements of 3 programs; on the far one the second and third are predicted in the wrong order."""
    assert verdict.floor == pytest.approx(np.median([abs(np.log(0.0205 / 0.02)), abs(np.log(0.2 / 0.21))]))
    near, far, pooled = (s for s in verdict.scores if s.model == "events")
    assert (near.placement, near.rank, near.regret) == ("a=[1, 2], b=[2, 2]", 1, 0.0)
    assert (far.rank, far.programs) == (2, 3)
    assert far.regret == pytest.approx(0.21 / 0.2 - 1)
    assert far.tied_rank == 2  # 5 % is more than the floor
    assert (pooled.placement, pooled.rank, pooled.programs) == ("", 1, 6)
    barrier = [s for s in verdict.scores if s.model == "barrier"]
    assert [s.rank for s in barrier] == [3, 1, 3]
    assert verdict.summary("events").fields == 2
    assert verdict.summary("events", pooled=True).fields == 1
    assert verdict.summary("events").top[0].share == 0.5
    assert verdict.summary("events").top[0].chance == pytest.approx(1 / 3)
    assert [(r.measured, r.predicted) for r in placement_ratios(verdict)] == [
        (pytest.approx(10.5), pytest.approx(0.19 / 0.019))
    ]


def test_targets_and_misses(verdict: ScoreVerdict) -> None:
    held = {t.claim: t.holds for t in verdict.targets}
    assert held["payload on every link, every program"] is False
    assert held["kernel's count over payload, busy links"] is False
    assert held["placements with more than 10 programs"] is False
    assert held["median top-1 regret"] is False
    assert held["mean absolute error"] is False
    assert held["placement ratio, measured, 2x4 ns 200/1000"] is True
    assert "measured best in predicted top 3, per placement" not in held  # no field has more than 3 programs
    found = {(m.target, m.placement) for m in verdict.misses}
    assert ("payload", "a=[2, 1], b=[1, 4]") in found
    assert ("kernel", "a=[2, 1], b=[1, 4]") in found


def test_a_flat_all_reduce_is_judged_where_all_uplinks_together_are_slow(verdict: ScoreVerdict) -> None:
    """50 of 1000 Mbit/s are slow, four times as much is not."""
    (done,) = verdict.experiments

    def judged(*rates: float | str) -> list[str]:
        asked = replace(done.experiment, rates=rates, axes=("a", "b"))
        found = validate([Sweep(experiments=(replace(done, experiment=asked),))])
        return [t.found for t in found.targets if t.claim == "best program against a flat all_reduce, 2x4"]

    assert judged(50.0, 1000.0) == [f"1.00x ({replace(done.experiment, rates=(50.0, 1000.0), axes=('a', 'b')).name})"]
    assert judged("4*50", 1000.0) == []


def test_what_kept_the_processors_busy_does_not_count(verdict: ScoreVerdict) -> None:
    (done,) = verdict.experiments
    rows = (replace(done.rows[0], cpu_share=(0.3, 0.41)), replace(done.rows[1], cpu_share=(0.3, 0.4)), *done.rows[2:])
    found = validate([Sweep(experiments=(replace(done, rows=rows),))])
    assert found.experiments[0].rows == rows[1:]
    assert (found.busy, verdict.busy) == (1, 0)
    assert sum(s.programs for s in found.scores if s.model == "events" and s.placement) == len(rows) - 1
    with pytest.raises(ParseError, match="every pair was measured with more than 35% of the processors busy"):
        validate([Sweep(experiments=(replace(done, rows=rows[:1]),))])
    with pytest.raises(ParseError, match="no result has a measured experiment"):
        validate([Sweep(experiments=(replace(done, rows=()),))])


def test_files_that_are_no_results(tmp_path: Path) -> None:
    stored = Sweep.load(STORED)
    copy = tmp_path / "copy.json"
    stored.save(copy)
    assert Sweep.load(copy) == stored
    copy.write_text('{"sweep": ' + stored.to_json() + "}")
    assert Sweep.load(copy) == stored
    with pytest.raises(ParseError, match=r"nowhere\.json: No such file"):
        Sweep.load(tmp_path / "nowhere.json")
    for text in ("{}", "[]", "nonsense", '{"experiments": 3}'):
        copy.write_text(text)
        with pytest.raises(ParseError, match=r"copy\.json is no result of a sweep"):
            Sweep.load(copy)
    with pytest.raises(ParseError, match="no result has a measured experiment"):
        validate([Sweep()])

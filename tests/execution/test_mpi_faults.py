"""MPI where something goes wrong: rank 2 of four stops, dies, raises, refuses, or runs programs in another order.

Nothing here depends on a quiet machine: the children's timeouts grow with what a healthy run takes, and what is allowed
for ending a job grows with what starting it took.
"""

import functools
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from execution.mpi_launch import Launch, launched, run

CHILD = "mpi_fault_child.py"
OTHERS = (0, 1, 3)
PROGRAM = "program [0-9a-f]{8}"
GATHER = r"step 0 \(all_gather\(%0; dim=0, axes=\(x\)\)\), group \[0, 1, 2, 3\]"
KILLS = 3  # of a rank, and of the launcher
fault = functools.partial(run, CHILD, 4)


def started(job: Launch) -> tuple[float, float]:
    """The timeout that the job found, and when the run began that breaks."""
    ((timeout, at),) = re.findall(r"^timeout ([0-9.]+), started at ([0-9.]+)$", job.err, re.M)
    return float(timeout), float(at)


def allowed(job: Launch, at: float) -> float:
    """Seconds to end a job: two, and what it took to come as far as `at` on this machine, now."""
    return 2.0 + at - job.begun


def said(job: Launch) -> list[str]:
    """What the ranks said that ended all."""
    return re.findall(r"^shardplan: rank \d ends all ranks: (.*)$", job.err, re.M)


# Ranks that do not come


@launched
def test_a_late_rank_is_waited_for() -> None:
    assert fault("fault", "late", "6").told() == [{"same": True}] * 4


@launched
def test_a_killed_rank_ends_all() -> None:
    assert fault("fault", "killed", "1.5").status != 0  # by mpiexec, which watches its processes


@launched
def test_an_exception_ends_all_with_its_traceback() -> None:
    job = fault("fault", "raising", "60")
    assert job.status == 4
    assert "shardplan: rank 2 ends all ranks: Traceback (most recent call last):" in job.err
    assert "ZeroDivisionError: integer division or modulo by zero\n" in job.err
    _, at = started(job)
    assert job.ended - at < allowed(job, at)


@launched
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("never", rf"{PROGRAM} did not start: rank 2 of \[0, 1, 2, 3\] did not arrive within TIME s"),
        ("stopped", rf"{PROGRAM}, {GATHER}: rank 2 did not arrive within TIME s"),
        (
            "stuck",
            rf"{PROGRAM}, step 1 \(all_gather\(%2; dim=1, axes=\(x\)\)\), group \[0, 1, 2, 3\]: rank 2 did not arrive "
            r"within TIME s",
        ),
        (
            "chain",
            rf"{PROGRAM}, step 0 \(reduce\(%0; axes=\(x\)\)\), group \[0, 1, 2, 3\]: rank 2 did not arrive within "
            r"TIME s",
        ),
        (
            "creation",
            rf"{PROGRAM} did not start: its communicators were not made by \[0, 1, 2, 3\] within TIME s",
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_in_time(kind: str, text: str) -> None:
    job = fault("fault", kind, "1.5")
    timeout, at = started(job)
    assert job.status == 4
    text = text.replace("TIME", re.escape(f"{timeout:g}"))
    assert said(job)
    assert [line for line in said(job) if not re.fullmatch(f"TimedOut: {text}", line)] == []
    assert job.ended - at < 2 * timeout + allowed(job, at)


# Ranks that refuse


@launched
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (
            "shards",
            "LayoutError: input %0, device 2: a shard of dtype int32 and shape (3, 4), but i32[8@x, 4] needs i32 and "
            "(2, 4)",
        ),
        ("count", "LayoutError: input %0: rank 2 passes 0 shards of i32[8@x, 4]; legal is 1, its own"),
        ("nonsense", "TypeError: object of type 'NoneType' has no len()"),
        ("op", "BackendError: step 0 (all_gather(%0; dim=0, axes=(x))): MPI cannot run sideways"),
    ],
)
def test_what_raises_on_one_rank_before_the_start_raises_on_all_at_once_and_all_live(kind: str, own: str) -> None:
    told: list[Any] = fault("refused", kind).told()
    for rank, (pace, first, second, third) in enumerate(told):
        if rank == 2:
            assert first["error"] == own
        else:
            assert re.fullmatch(
                rf"NotStarted: {PROGRAM} did not start: rank 2 raised {re.escape(own)}; nothing was sent",
                first["error"],
            )
        assert first["at"] - max(f["begun"] for _, f, *_ in told if "begun" in f) < 1.0 + pace
        assert second == third == {"same": True}


@launched
def test_another_program_is_named_on_all_ranks_and_all_live() -> None:
    told = fault("refused", "other").told()
    for pace, first, second, third in told:
        assert re.fullmatch(
            rf"NotStarted: the ranks \[0, 1, 2, 3\] do not run one program: rank 0 runs {PROGRAM}, rank 2 {PROGRAM}; "
            r"nothing was sent",
            first["error"],
        )
        assert first["at"] - max(f["begun"] for _, f, *_ in told) < 1.0 + pace
        assert second == third == {"same": True}


@launched
def test_a_refusal_that_nobody_catches_ends_every_rank_with_its_own_traceback() -> None:
    job = fault("uncaught")
    assert job.status in (1, 9)  # 9: the launcher kills what has not ended yet when the first rank has
    assert len(re.findall(r"^shardplan\.errors\.LayoutError: input %0: rank 2 passes 0 shards", job.err, re.M)) == 1
    others = r"NotStarted: .* did not start: rank 2 (?:raised|ended:) LayoutError: .*; nothing was sent"
    # The launcher may kill, whatever its own status, ranks that have not printed theirs when the first has ended.
    assert len(re.findall(others, job.err, re.M)) <= 3
    assert set(re.findall(r"^(?:\w+\.)*(\w+(?:Error|Started)): ", job.err, re.M)) <= {"LayoutError", "NotStarted"}


REFUSAL = "rank 2 raised LayoutError: input %0: rank 2 passes 0 shards of i32[8@x, 4]; legal is 1, its own"


@launched
def test_wrong_shards_of_a_program_agreed_on_raise_on_all_ranks_and_all_live() -> None:
    for rank, (_, first, second, third) in enumerate(fault("withdrawn", "all").told()):
        assert first["error"] == f"LayoutError: {REFUSAL[REFUSAL.index('input') :].replace('rank 2', f'rank {rank}')}"
        assert second == third == {"same": True}


@launched
def test_ranks_that_have_sent_nothing_raise_and_live() -> None:
    told = fault("withdrawn", "early").told()
    for rank in OTHERS:
        _, first, second, third = told[rank]
        assert re.fullmatch(rf"NotStarted: {PROGRAM} did not start: {re.escape(REFUSAL)}", first["error"])
        assert second == third == {"same": True}


@launched
def test_a_rank_that_raises_and_lives_ends_those_that_have_begun() -> None:
    job = fault("withdrawn", "one")
    assert job.status == 4
    assert f"rank 2 lives: {REFUSAL[len('rank 2 raised ') :]}\n" in job.err
    for line in said(job):
        assert re.fullmatch(rf"BackendError: {PROGRAM}, {GATHER}: {re.escape(REFUSAL)}", line)
    ((pace, at),) = re.findall(r"^allowed ([0-9.]+), refused at ([0-9.]+)$", job.err, re.M)
    assert job.ended - float(at) < allowed(job, float(at)) + float(pace)


@launched
def test_a_rank_that_an_exception_ends_ends_those_that_wait_for_it() -> None:
    job = fault("looping", "raises")
    assert job.status == 4
    assert "ValueError: made to fail\n" in job.err
    assert said(job)
    for line in said(job):
        assert re.fullmatch(rf"BackendError: {PROGRAM}, step 0 .*: rank 2 ended: ValueError: made to fail", line)


@launched
@pytest.mark.parametrize(
    ("how", "what"),
    [("before", r"NotStarted: PROGRAM did not start"), ("between", r"BackendError: PROGRAM, step 0 .*")],
)
def test_a_rank_that_raises_outside_of_a_call_is_waited_for_no_longer(how: str, what: str) -> None:
    job = run("mpi_end_child.py", 4, how)
    assert job.status != 0
    told = re.findall(r"^(?:shardplan: )?rank [013] (?:was told|ends all ranks:) (.*)$", job.err, re.M)
    assert told, job.err
    why = "rank 2 ended: ValueError: in a script of its own(?:; nothing was sent)?"
    for line in told:
        assert re.fullmatch(f"{what.replace('PROGRAM', PROGRAM)}: {why}", line), line


@launched
def test_a_rank_that_has_ended_disturbs_nobody_who_needs_nothing_of_it() -> None:
    job = run("mpi_end_child.py", 4, "done")
    assert sorted(re.findall(r"^rank (\d) has done all$", job.err, re.M)) == ["0", "1", "3"], job.err


# Identity


@launched
@pytest.mark.parametrize("kind", ["gathers", "messages"])
def test_cached_programs_in_another_order_are_an_error_that_names_both(kind: str) -> None:
    job = fault("swapped", kind, "2")
    timeout, at = started(job)
    assert job.status == 4
    assert said(job)
    for line in said(job):
        found = re.fullmatch(
            rf"BackendError: ({PROGRAM}), step 0 .*: ({PROGRAM}) is run by ranks? [\[\], 0-3]+ at the same time", line
        )
        assert found, line
        assert found[1] != found[2]
    assert job.ended - at < 2 * timeout + allowed(job, at)


@launched
def test_ranks_agree_at_the_first_call_and_never_later() -> None:
    told = fault("counted").told()
    most = [2, 2, 1, 1]  # words: up to the parent, and down to two children
    for told_of, first in zip(told, most, strict=True):
        assert told_of["sent"][:9] == [first] * 3 + [0] * 6
        # Two are remembered from here on: the three after the fourth are agreed on again, then the last two not.
        assert told_of["sent"][9:] == [*[first] * 4, 0, first]
        assert told_of["remembered"] == 2


# Shared memory


def named_segments(job: Launch) -> list[str]:
    (found,) = re.findall(r"^mapped (.*)$", job.err, re.M)
    names = json.loads(found)
    assert names  # else there is nothing to see
    return names


@launched
@pytest.mark.parametrize(("victim", "number"), [(v, n) for v in ("rank", "launcher") for n in range(KILLS)])
def test_a_kill_leaves_no_shared_memory(victim: str, number: int) -> None:
    rng = random.Random(f"{victim} {number}")
    job = Launch(CHILD, 4, "looping", "for ever")
    job.until("pids")
    (pids,) = re.findall(r"^pids (.*)$", job.err, re.M)
    time.sleep(0.3 * rng.random())
    os.kill(job.job.pid if victim == "launcher" else rng.choice(json.loads(pids)), signal.SIGKILL)
    assert job.wait().status != 0
    assert not [name for name in named_segments(job) if Path(name).exists()]


@launched
@pytest.mark.parametrize(("kind", "status"), [("ends", 0), ("raises", 4), ("aborts", 4)])
def test_an_end_leaves_no_shared_memory(kind: str, status: int) -> None:
    job = fault("looping", kind)
    # Those that were told before they began end by themselves when one aborts: the launcher then kills what is left.
    assert job.status == status or (kind == "aborts" and said(job) and job.status == signal.SIGKILL), job.err
    assert not [name for name in named_segments(job) if Path(name).exists()]

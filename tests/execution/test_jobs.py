"""Jobs on real processes: three steps equal the whole model's, in loss, gradients and all that a step replaces."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from execution import job_cases as jobs
from execution.jax_child import said
from execution.mpi_launch import launched, run
from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.execution.async_executor import Running
from shardplan.execution.job_arrays import check_step_arrays
from shardplan.execution.job_backend import JobBackend
from shardplan.execution.jobs import JobRun, order, parts
from strategy.jobs import arrays, model

HERE = Path(__file__).parent
RANKS = 4
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
with_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the cases: what takes time is done once, and not by every process."""
    path = tmp_path_factory.mktemp("jobs") / "cases"
    jobs.write(path)
    return str(path)


def same_bytes(report: dict[str, Any], names: Any) -> None:
    """Every case moves something, and on both backends the same."""
    assert set(report["received"]) == set(names)
    assert all(count > 0 for count in report["received"].values())


@with_torch
def test_on_torch(cases: str) -> None:
    """All cases, also their bytes; before that a wrong array, and another job, on one rank: an error on all."""
    from execution.torch_launch import printed

    report = printed(RANKS, HERE / "job_child.py", "torch", cases)
    assert report["wrong"] == []
    same_bytes(report, jobs.CASES)
    for array, other in report["said"]:
        assert re.fullmatch(
            r"LayoutError: job \w{8}: run of a job: inputs is of dtype float64 and shape \(0, 8\); legal is float64 "
            r"and \(4, 8\); nothing was sent",
            array,
        )
        assert re.fullmatch(
            r"BackendError: the ranks \[0, 1, 2, 3\] do not run one program: rank \d runs job \w{8}, .* job \w{8}; "
            r"nothing was sent",
            other,
        )


@launched
def test_on_mpi(cases: str) -> None:
    report = run("job_child.py", RANKS, "mpi", cases).told()
    assert report["wrong"] == []
    same_bytes(report, jobs.MPI)
    for (array,) in report["said"]:
        assert (
            "LayoutError: run of a job: inputs is of dtype float64 and shape (0, 8); legal is float64 and (4, 8)"
            in array
        )


@with_jax
def test_on_jax() -> None:
    """On devices of one process; what is uneven is refused before anything runs."""
    report = said("execution/job_jax_child.py")
    assert report["wrong"] == {name: [] for name in jobs.JAX}
    assert report["refused"] == (
        "jax: %head has the type f64[13@tensor, 10] on tensor=2, which is unevenly tiled; JAX gives every device a "
        "shard of one size: legal are dims that the product of their axes divides"
    )


@with_torch
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("killed", r"BackendError: job \w{8}, step \d+ \(.*\): lost rank 3 of \[0, 1, 2, 3\]: .*"),
        ("stopped", r"TimedOut: job \w{8}, step \d+ \(.*\): rank 3 of \[0, 1, 2, 3\] did not arrive within 4 s"),
    ],
)
def test_a_rank_that_ends_or_stops_is_named_on_torch(cases: str, fault: str, text: str) -> None:
    """On its own stage and on the other; no process is left."""
    from execution.torch_launch import Launch

    job = Launch(RANKS, HERE / "job_fault_child.py", "torch", cases, fault, 4)
    try:
        job.wait(300, range(3), together=False)
        told = [json.loads(line) for line in re.findall(r"^FAULT (.*)$", job.said(".out"), re.M)]
    finally:
        job.end()
    assert sorted(one["rank"] for one in told) == [0, 1, 2]
    for one in told:
        assert re.fullmatch(text, one["said"]), told
    assert [rank.exitcode for rank in job.ranks[:3]] == [4, 4, 4] and job.ranks[3].exitcode


@launched
@pytest.mark.parametrize(
    ("fault", "text"), [("killed", ""), ("hangs", r"TimedOut: .*rank 3 did not arrive within 4 s")]
)
def test_a_rank_that_ends_or_hangs_ends_all_on_mpi(cases: str, fault: str, text: str) -> None:
    """`Launch.wait` fails where a process is left behind."""
    job = run("job_fault_child.py", RANKS, "mpi", cases, fault, "4")
    assert job.status != 0
    assert re.search(text, job.err), job.err


# In this process


def test_what_is_no_job_and_what_are_no_arrays() -> None:
    small = model("mlp")
    job = sp.partition(small, sp.Strategy(tensor=2))
    given = arrays(small, small.program)
    more = ", ".join(given)
    name, first = next(iter(given.items()))
    wrong: list[tuple[Any, str]] = [
        ([], r"run of a job: \[\]; legal are global arrays by name"),
        (
            {k: x for k, x in given.items() if k != name},
            rf"run of a job: no array {name}, .*; legal are arrays of {more}",
        ),
        (given | {"x": first}, rf"run of a job: no input is called x; legal are {more}"),
        (
            given | {name: first.astype("f4")},
            rf"run of a job: {name} is of dtype float32 and shape .*; legal is float64 and .*",
        ),
    ]
    for arrays_, text in wrong:
        with pytest.raises(sp.LayoutError, match=f"^{text}$"):
            sp.run(job, arrays_)
    with pytest.raises(sp.LayoutError, match=r"^run takes a Program, a Plan or a Job, got 5$"):
        sp.run(5, {})  # type: ignore[arg-type]
    with pytest.raises(sp.BackendError, match=r"^unknown backend 'gpu'; legal are "):
        sp.run(job, given, backend="gpu")


def test_arrays_stay_as_they_are() -> None:
    small = model("mlp")
    job = sp.partition(small, sp.Strategy(data=2))
    given = arrays(small.resize(batch=2), small.resize(batch=2).program)
    before = {name: x.copy() for name, x in given.items()}
    found = sp.run(job, given)
    assert all(np.array_equal(given[name], x) for name, x in before.items())
    assert not any(np.shares_memory(x, y) for x in found.values() for y in given.values())


@pytest.mark.parametrize(
    "kind", ["1f1b", "zb-h1", "zb-v", "dualpipev", jobs.PLACED], ids=["1f1b", "zb-h1", "zb-v", "dualpipev", "placed"]
)
def test_the_order_is_each_rank_s_own(kind: Any) -> None:
    """Of all actions every rank finds its own in the order of its list, and none before what it needs."""
    strategy = sp.Strategy(pipeline=2, global_batch=1 if kind == "zb-h1" else 4, schedule=kind)
    job = sp.partition(model("mlp"), strategy)
    found, owners, last = list(order(job)), job.schedule.owners, job.stages - 1
    for rank, row in enumerate(job.schedule.ranks):
        mine = [(a.stage, a.kind, a.microbatch) for each in row if each is not None for a in each.leaves]
        assert mine == [a for a in found if owners[a[0]] == rank]
    for place, (stage, kind, k) in enumerate(found):
        before = set(found[:place])
        if kind == "F" and stage:
            assert (stage - 1, "F", k) in before
        elif kind in "BI" and stage < last:
            assert before & {(stage + 1, "B", k), (stage + 1, "I", k)}
        elif kind == "W":
            assert (stage, "I", k) in before
        elif kind.startswith("RECV"):
            assert (stage + (1 if kind == "RECV_B" else -1), kind.replace("RECV", "SEND"), k) in before


def test_messages_stand_where_the_schedule_places_them() -> None:
    """Rank 0 alone, whose messages are never there: where in its list it begins what it sends and what it takes."""
    job = sp.partition(model("mlp"), sp.Strategy(pipeline=2, global_batch=4, schedule=jobs.PLACED))
    found = parts(job)
    said: list[str] = []

    def start(program: Program, inputs: Any, turn: int, record: Any) -> Running:
        place, part = divmod(turn, 1 + len(job.transfers))
        if place < len(found.order):
            (stage, kind, k), t = found.order[place], job.transfers[part - 1]
            sent = job.schedule.owners[t.source[0]] == 0
            message = f"{t.source[0]}SEND_{t.kind}{k}" if sent else f"{t.target[0]}RECV_{t.kind}{k}"
            said.append(message if part else f"{stage}{kind}{k}")
        yield
        mine = [[t for d in t.mesh.devices if d == 0] for t in program.output_types]
        return [[np.zeros(t.local_shape(0), numpy_dtype(t.dtype)) for t in types] for types in mine]

    big = model("mlp").resize(batch=4)
    JobRun(job, JobBackend(start, frozenset({0})), check_step_arrays(job, arrays(big, big.program))).step()
    assert said == [str(a) for a in job.schedule.ranks[0]]


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", range(3))
def test_what_is_sent_is_waited_for_once_it_was_taken(kind: str, stage: int) -> None:
    """One rank alone, whose messages are never there: what it starts and what it waits for, in its order."""
    strategy = sp.Strategy(pipeline=3, global_batch=5, schedule=kind)
    job = sp.partition(model("mlp"), strategy)
    found = parts(job)
    places = {action: place for place, action in enumerate(found.order)}
    said: list[tuple[str, int, int]] = []

    def start(program: Program, inputs: Any, turn: int, record: Any) -> Running:
        place, part = divmod(turn, 1 + len(job.transfers))
        said.append(("begun", place, part))
        yield
        said.append(("done", place, part))
        mine = [[t for d in t.mesh.devices if d == stage] for t in program.output_types]
        return [[np.zeros(t.local_shape(0), numpy_dtype(t.dtype)) for t in types] for types in mine]

    big = model("mlp").resize(batch=5)
    JobRun(job, JobBackend(start, frozenset({stage})), check_step_arrays(job, arrays(big, big.program))).step()
    acted = [place for what, place, part in said if what == "begun" and not part and place < len(found.order)]
    assert acted == [place for place, action in enumerate(found.order) if action[0] == stage]
    sends = 0
    for k, transfer in enumerate(job.transfers):
        for micro in range(5):
            if transfer.source[0] == stage:
                at, taken = (places[end[0], transfer.kind, micro] for end in (transfer.source, transfer.target))
                done = said.index(("done", at, 1 + k))
                left = [p for p in acted if ("begun", p, 0) in said[done:]]
                assert all(p > taken for p in left)
                sends += 1
    assert sends == 5 * {0: 1, 1: 2, 2: 1}[stage]


@with_torch
def test_tags_of_turns_differ() -> None:
    from shardplan.execution.torch.faults import TorchWatch
    from shardplan.execution.torch.group_state import GroupState

    state = GroupState(None, None, (0, 1))
    runs = [TorchWatch((0, 1), 0, "a job", "5a" * 32, (), 1.0, state) for _ in range(3)]
    assert len({run.tag_of(turn) for run in runs for turn in range(500)}) == 3 * 500

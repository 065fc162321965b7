"""Live jobs: the loss curve of the whole model, whatever the layout between and within processes, and from disk."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardplan as sp
from execution.job_cases import reference
from execution.mpi_launch import launched, run
from shardplan.execution.live import state_boxes, state_names
from shardplan.interop.checkpoint.job_state import written_boxes
from strategy.jobs import model

HERE = Path(__file__).parent
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
FIELDS = {"layers": 3, "optimizer": "adamw"}
STRATEGIES = (
    sp.Strategy(data=4, fsdp=True, global_batch=4),
    sp.Strategy(pipeline=3, global_batch=4),  # one of four devices has nothing
    sp.Strategy(data=2, tensor=2, zero=1, global_batch=4),
)


def case(family: str = "mlp") -> tuple[list[sp.Job], dict[str, Any], dict[str, Any], list[float]]:
    """Jobs of one model, its state, a batch, and the losses of the whole model, step by step."""
    made = model(family, **FIELDS)
    given, _ = reference(family, tuple(FIELDS.items()), 4)
    jobs = [replace(sp.partition(made, s), movements={}, settled=None) for s in STRATEGIES]  # type: ignore[arg-type]
    names = state_names(jobs[0])
    state, batch = ({n: x for n, x in given.items() if (n in names) == want} for want in (True, False))
    now, losses = dict(given), list[float]()
    big = made.resize(batch=4)
    for _ in range(5):
        outs = sp.run(big.program, [[now[n]] for n, _ in big.program.inputs])
        found = {name: x for name, [x] in zip(big.program.outputs, outs, strict=True)}
        losses.append(float(found["loss"]))
        now |= {old: found[new] for old, new in big.replaced.items()}
    return jobs, state, batch, losses


def near(got: list[float], want: list[float]) -> None:
    assert np.allclose(got, want, rtol=1e-9, atol=0), (got, want)


@pytest.mark.parametrize("family", ["mlp", "llama"])
def test_one_curve_whatever_the_layout(family: str, tmp_path: Path) -> None:
    """By turns, from one checkpoint to the next, and in memory; what is saved is what was collected."""
    jobs, state, batch, losses = case(family)
    got, last = list[float](), dict[str, np.ndarray]()
    for k, job in enumerate((*jobs, jobs[0])):
        with sp.start(job, state if k == 0 else tmp_path / str(k - 1)) as live:
            got.append(float(live.step(batch)))
            live.save(tmp_path / str(k))
            last = live.collect()
    near(got, losses[:4])
    with sp.start(jobs[0], state) as live:
        moved = [live.step(batch)]
        for job in (*jobs[1:], jobs[0]):
            live.reshard(job)
            moved.append(live.step(batch))
        whole = live.collect()
    near(moved, losses[:4])
    assert all(np.allclose(whole[n], last[n], rtol=1e-12) for n in state_names(jobs[0]))


def test_layers_that_are_computed_again_have_the_models_state(tmp_path: Path) -> None:
    """To and from a layout whose stacks are in two, in memory and from disk."""
    jobs, state, batch, losses = case("llama")
    made = model("llama", **FIELDS)
    again = sp.partition(made, sp.Strategy(data=2, global_batch=4, recompute="full", recompute_layers=1))
    with sp.start(jobs[2], state) as live:
        got = [live.step(batch)]
        live.reshard(again)
        got.append(live.step(batch))
        live.save(tmp_path / "again")
        whole = live.collect()
    with sp.start(jobs[1], tmp_path / "again") as live:
        assert all(np.array_equal(whole[n], x) for n, x in live.collect().items())
        got.append(live.step(batch))
        live.save(tmp_path / "plain")
    with sp.start(again, tmp_path / "plain") as live:
        got.append(live.step(batch))
    near(got, losses[:4])


def test_every_element_is_written_once() -> None:
    jobs, *_ = case("llama")
    for job in jobs:
        count = {n: np.zeros(job.model.program.types[n].shape, int) for n in state_names(job)}
        for device, boxes in written_boxes(job).items():
            for each in boxes:
                assert each.device == device
                count[each.name][tuple(slice(a, b) for a, b in each.box)] += 1
        assert all((x == 1).all() for x in count.values())
        loads = {d: sum(np.prod([b - a for a, b in e.box]) for e in found) for d, found in written_boxes(job).items()}
        held = {e.device for e in state_boxes(job)}
        assert set(loads) == held and max(loads.values()) < 2 * min(loads.values())


def test_what_is_lacking_begins_as_a_run_begins(tmp_path: Path) -> None:
    """Parameters alone: zeros beside them; a part of what lives beside is refused, and so is what is none."""
    jobs, state, batch, losses = case()
    parameters = {n: x for n, x in state.items() if n in jobs[0].model.parameters}
    with sp.start(jobs[0], parameters) as live:
        near([live.step(batch)], losses[:1])
    for wrong, text in (
        ({}, r"start from the state: no layers.weight \(1 of 1 are missing\)"),
        (parameters | {"step": state["step"]}, r"no layers.weight.m \(2 of 4 are missing\); legal are all parameters"),
        (state | {"strange": state["step"]}, r"strange is no state of mlp; legal are layers.weight"),
        (state | {"step": np.zeros(2, np.int32)}, r"step is of dtype int32 and shape \(2,\); legal is int32 and \(\)"),
        (3, r"start from 3; legal are arrays by name, or a folder"),
    ):
        with pytest.raises(sp.LayoutError, match=text):
            sp.start(jobs[0], wrong)  # type: ignore[arg-type]
    with sp.start(jobs[0], state) as live:
        live.save(tmp_path / "a")
        with pytest.raises(sp.LayoutError, match=r"save to .*a, which is there; legal is a new folder"):
            live.save(tmp_path / "a")
        with pytest.raises(sp.LayoutError, match="part of 'weight'; legal is an input of the batch: inputs, targets"):
            live.part("weight")
        with pytest.raises(sp.LayoutError, match=r"collect 'w'; legal are layers.weight"):
            live.collect("w")
    with pytest.raises(sp.BackendError, match="it is closed; legal is to start again from what was saved"):
        live.step(batch)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def _written(tmp_path: Path) -> tuple[Path, list[float], dict[str, Any]]:
    jobs, state, batch, losses = case()
    path = tmp_path / "case"
    path.write_bytes(pickle.dumps((jobs, state, batch)))
    return path, losses, batch


def _as_whole(report: dict[str, Any], losses: list[float]) -> None:
    near(report["memory"], losses[:4])
    near(report["disk"], losses[2:4])
    near([report["after"]], losses[4:5])
    assert report["apart"] <= 1e-12


@with_torch
def test_on_torch_and_a_rank_that_is_lost(tmp_path: Path) -> None:
    """What was saved before is whole: the reference goes on from it."""
    from execution.torch_launch import Launch

    path, losses, batch = _written(tmp_path)
    job = Launch(4, HERE / "live_child.py", "torch", path, tmp_path)
    try:
        job.wait(120, range(3), together=False)
        said, err = job.said(".out"), job.said(".err")
    finally:
        job.end()
    assert said, err[-3000:]
    report = json.loads(said)
    _as_whole(report, losses)
    assert report["rows"] == [0]
    assert re.match(
        r"LayoutError: .*run of a job: inputs is of dtype float64 and shape \(1, 8\); legal is", report["wrong"]
    )
    assert re.match(r"BackendError: job \w{8}, step \d+ \(.*\): lost rank 3 of \[0, 1, 2, 3\]", report["lost"])
    with sp.start(pickle.loads(path.read_bytes())[0][1], tmp_path / "two") as live:
        near([live.step(batch), live.step(batch)], losses[2:4])


@launched
def test_on_mpi(tmp_path: Path) -> None:
    path, losses, _ = _written(tmp_path)
    report = run("live_child.py", 4, "mpi", path, tmp_path).told()
    _as_whole(report, losses)

"""Adafactor's small all-reduces in the closed form: as many as jobs have, and the seconds of ops."""

from __future__ import annotations

import pytest

import shardplan as sp
from shardplan.simulation.closed.configurations import Configurations
from shardplan.simulation.closed.factored_sums import UPDATE
from shardplan.simulation.closed.form import ClosedForm
from shardplan.simulation.closed.machines import of_machine

FIELDS = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "seq": 1024, "vocab": 32000}
BOX = sp.Topology.load("dgx-h100", node=1, gpu=8)
STRATEGIES = {
    "zero 1": sp.Strategy(data=8, zero=1, global_batch=8, precision="bf16"),
    "fsdp": sp.Strategy(data=8, fsdp=True, global_batch=8, precision="bf16"),
    "tensor": sp.Strategy(tensor=8, global_batch=2, microbatch=2, precision="bf16"),
    "tensor 2 x data 4": sp.Strategy(tensor=2, data=4, zero=1, global_batch=8, precision="bf16"),
    "pipeline 2": sp.Strategy(pipeline=2, data=4, zero=1, global_batch=16, precision="bf16"),
    "no state is cut": sp.Strategy(data=8, global_batch=8, precision="bf16"),
}


def model(optimizer: str) -> sp.Model:
    return sp.Model.load("llama", **FIELDS, precision="bf16", optimizer=optimizer)


def count_sums(job: sp.Job, stage: int) -> int:
    return [step.op.name for step in job.programs[stage, "OPT"].steps].count("all_reduce")


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "pipeline" not in name])
def test_there_are_as_many_as_the_job_has(name: str) -> None:
    s = STRATEGIES[name]
    form = ClosedForm(model("adafactor"), BOX)
    (reading, *_), *_ = form.classes(Configurations.of([s]))
    state = "dealt" if s.zero or s.fsdp else "whole"
    counted = sum(one.over.endswith(state) and not one.over.startswith(UPDATE) for one in reading.factored)
    plain, factored = (count_sums(sp.partition(model(o), s), 0) for o in ("adamw", "adafactor"))
    assert counted == factored - plain and (counted > 0) == (name != "no state is cut")


@pytest.mark.parametrize("name", STRATEGIES)
def test_seconds_are_those_of_ops(name: str) -> None:
    s, seconds = STRATEGIES[name], dict[str, float]()
    for optimizer in ("adamw", "adafactor"):
        m = model(optimizer)
        closed = float(ClosedForm(m, BOX, of_machine(BOX)).seconds(Configurations.of([s]))[0])
        seconds[optimizer] = closed / sp.simulate(m, s, BOX, fidelity="ops").seconds
    assert seconds["adafactor"] == pytest.approx(seconds["adamw"], rel=0.002), seconds

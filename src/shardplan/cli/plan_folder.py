"""What `plan --out` and `plan --report` write; what `check`, `show` and `run` do with the folder, or its plan.json."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardplan.cli.answers import print_answer, print_object, print_text
from shardplan.cli.statuses import FAILED, complain
from shardplan.errors import ShardplanError, line

if TYPE_CHECKING:
    from shardplan.hardware.topology import Topology
    from shardplan.launches.handover.handed_plan import HandedPlan
    from shardplan.simulation.searching.answer import Judge, JudgedPlan, PlanAnswer
    from shardplan.strategy.asked_model import AskedModel

MOST_DRAWN = 100_000  # passes of a step in a trace; beyond, it is one rank's


def judged_plan(plan: HandedPlan) -> tuple[Judge, JudgedPlan]:
    """Return what was predicted of a plan when it was written, and what tells of it."""
    from shardplan.simulation.closed.machines import machine_of
    from shardplan.simulation.searching.answer import Judge, JudgedPlan
    from shardplan.simulation.searching.certifier import Certifier

    known = machine_of(plan.topology)
    judge = Judge(
        plan.model, plan.topology, known, Certifier(plan.model, known.parameters, plan.topology.device.memory)
    )
    return judge, JudgedPlan.from_dict(plan.strategy, plan.predicted)


def check_handed(path: Path, plan: HandedPlan, devices: int | None, as_json: bool) -> None:
    """Run a plan scaled down on the reference, and compare its step with the whole model's."""
    from shardplan.execution.beside_whole import step_beside_whole
    from shardplan.launches.handover.scaled_plan import MOST, scale_plan
    from shardplan.report.plan import beside_whole_object, beside_whole_text
    from shardplan.strategy.partition.partition import partition

    scaled = scale_plan(plan, devices or MOST)
    found = step_beside_whole(scaled.model, partition(scaled.model, scaled.strategy))
    told = beside_whole_object(found, scaled)
    print_answer(as_json, lambda: {"plan": str(path), **told}, lambda: beside_whole_text(found, scaled))
    if not found.is_equal:
        raise typer.Exit(complain(f"{line(path)}: its step differs from the whole model's", FAILED))


def show_handed(path: Path, plan: HandedPlan, as_json: bool) -> None:
    """Print a plan as it was told, and what its folder has."""
    import json

    from shardplan.report.plan import handed_text

    if as_json:
        print_object(json.loads(plan.to_json()))
        return
    judge, one = judged_plan(plan)
    folder = path if path.is_dir() else path.parent
    print_text(handed_text(plan, one, judge, folder))


def run_handed(
    path: Path, plan: HandedPlan, timeout: float, cluster: Topology | None, trace: Path | None, as_json: bool
) -> None:
    """Run a plan scaled down on the processes of torchrun, its values beside the whole model's, its times predicted."""
    from shardplan.execution.beside_whole import draw_arrays, step_beside_whole
    from shardplan.execution.measure import measured_links
    from shardplan.execution.measured_step import action_times, measure_step, predict_step, seconds_to_issue
    from shardplan.execution.trial import join_launcher
    from shardplan.launches.handover.scaled_plan import scale_plan
    from shardplan.report.plan import action_times_text, beside_whole_object, beside_whole_text
    from shardplan.simulation.trace import save_traces
    from shardplan.strategy.partition.partition import partition

    with join_launcher("torch"):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        scaled = scale_plan(plan, size)
        if scaled.strategy.devices != size:
            raise ShardplanError(
                f"run {line(path)}: scaled down it has {scaled.strategy.devices} devices, and there are {size} "
                f"processes; legal is --nproc-per-node {scaled.strategy.devices}"
            )
        job = partition(scaled.model, scaled.strategy)
        found = step_beside_whole(scaled.model, job, "torch", timeout)
        given = draw_arrays(scaled.model, scaled.strategy.sequences)
        before, measured = (measure_step(job, given, timeout) for _ in range(2))
        links = measured_links(range(size), "torch", timeout) if cluster is None else cluster
    if rank:
        return
    told = beside_whole_object(found, scaled)
    text = beside_whole_text(found, scaled)
    if links is not None:
        issue = seconds_to_issue(job, links, before)
        predicted = predict_step(job, links, issue)
        rows = action_times(predicted, measured)
        if trace is not None:
            save_traces(trace, [predicted, measured])
        text += "\n\n" + action_times_text(rows, (predicted.seconds, measured.seconds), issue)
        told |= {"seconds": measured.seconds, "predicted_seconds": predicted.seconds, "issue_seconds": issue,
                 "predicted_on": str(links), "actions": [one._asdict() for one in rows]}  # fmt: skip
    print_answer(as_json, lambda: {"plan": str(path), **told}, lambda: text)
    if not found.is_equal:
        raise typer.Exit(complain(f"{line(path)}: its step differs from the whole model's", FAILED))


@dataclass(frozen=True, slots=True)
class Handing:
    """Where a plan is written: a folder of what launches it, a report, both or neither."""

    out: Path | None
    report: Path | None

    def write(
        self, asked: AskedModel, where: Topology, judge: Judge, one: JudgedPlan, text: str,
        answer: PlanAnswer | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Write a plan; return what frameworks cannot say, and what is run instead at which price."""
        from shardplan.launches.handover.handed_plan import HandedPlan

        if self.out is None and self.report is None:
            return ()
        fields = {**asked.fields, "precision": judge.model.fields["precision"]}
        s = one.plan.strategy
        plan = HandedPlan(asked.title, asked.name, fields, where, s, one.plan.order, one.to_dict())
        notes = () if self.out is None else _write_folder(self.out, plan, judge, one)
        return notes + self._write_report(plan, judge, one, text, answer)

    def _write_report(
        self, plan: HandedPlan, judge: Judge, one: JudgedPlan, text: str, answer: PlanAnswer | None
    ) -> tuple[str, ...]:
        """Write the report, into the folder too; where what it needs is not installed, the folder has none."""
        from shardplan.errors import MissingExtra
        from shardplan.plans.plan_file import write_atomic
        from shardplan.report.page.plan_page import plan_page

        try:
            page = plan_page(plan, judge, one, text, answer).encode()
        except MissingExtra as error:
            return (f"no report.html: {error}",)
        for path in (self.out and self.out / "report.html", self.report):
            if path is not None:
                write_atomic(path, page)
        return ()


def _write_folder(out: Path, plan: HandedPlan, judge: Judge, one: JudgedPlan) -> tuple[str, ...]:
    from shardplan.hardware.units import format_seconds
    from shardplan.launches.handover.folder import write_folder
    from shardplan.launches.handover.scripts import audit_plan
    from shardplan.simulation.searching.plans import plan_text
    from shardplan.simulation.simulate import simulate

    notes: list[str] = []
    for written in write_folder(out, plan):
        notes += [f"{written.framework} cannot say all: {unsaid}" for unsaid in written.lines]
        if written.runs != plan.strategy and written.files:
            other = one.plan._replace(strategy=written.runs)
            notes.append(f"{written.framework} runs {plan_text(other)}, {format_seconds(judge.price(other))} a step")
    s = plan.strategy
    drawn = s.pipeline * s.microbatches * (s.interleave or 1) * 2
    fidelity = "events" if drawn <= MOST_DRAWN else "closed"
    simulate(judge.model, s, plan.topology, fidelity, judge.machine.parameters).save(out / "trace.json")
    return (*notes, f"{out} has it; launched by its scripts it is {audit_plan(plan).verdict}")

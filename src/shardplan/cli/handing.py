"""What `plan --out` and `plan --report` write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardplan.hardware.topology import Topology
    from shardplan.launches.handover.handed_plan import HandedPlan
    from shardplan.simulation.searching.answer import Judge, JudgedPlan, PlanAnswer
    from shardplan.strategy.asked_model import AskedModel

MOST_DRAWN = 100_000  # passes of a step in a trace; beyond, it is one rank's


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
        notes += [f"{written.framework} cannot say all: {line}" for line in written.lines]
        if written.runs != plan.strategy and written.files:
            other = one.plan._replace(strategy=written.runs)
            notes.append(f"{written.framework} runs {plan_text(other)}, {format_seconds(judge.price(other))} a step")
    s = plan.strategy
    drawn = s.pipeline * s.microbatches * (s.interleave or 1) * 2
    fidelity = "events" if drawn <= MOST_DRAWN else "closed"
    simulate(judge.model, s, plan.topology, fidelity, judge.machine.parameters).save(out / "trace.json")
    return (*notes, f"{out} has it; launched by its scripts it is {audit_plan(plan).verdict}")

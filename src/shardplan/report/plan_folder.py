"""What `check`, `show` and `run` print of a plan that `plan --out` wrote, and their JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardplan.execution.beside_whole import EQUAL, StepComparison
from shardplan.execution.measured_step import ActionTimes
from shardplan.hardware.units import format_seconds
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.scaled_plan import ScaledPlan
from shardplan.report.plan import headline, judged_lines, strategy_words, wrap_text
from shardplan.report.text import table
from shardplan.simulation.searching.answer import Judge, JudgedPlan
from shardplan.simulation.searching.plans import plan_text

# What stands in a folder, by the first part of a path.
WHAT = {
    "plan.json": "model, cluster, strategy and what was predicted",
    "report.html": "the report",
    "torchtitan": "a function for its config, and the same as command-line overrides",
    "megatron": "arguments of Megatron-LM",
    "torch": "a DeviceMesh, and fully_shard and parallelize_module as planned",
    "jax": "a Mesh, and PartitionSpecs by parameter",
    "slurm.sh": "launches it under Slurm",
    "torchrun.sh": "launches it on every node",
    "trace.json": "the predicted step, for Perfetto",
}


def handed_text(plan: HandedPlan, one: JudgedPlan, judge: Judge, folder: Path | None) -> str:
    """Return the plan as the answer of `plan` told it, and what stands beside it in its folder."""
    lines = [headline(plan.title, plan.strategy, judge), ""]
    lines += [*wrap_text(strategy_words(plan.strategy), ""), *wrap_text(plan_text(one.plan), "  ")]
    lines += judged_lines(one, judge)
    if folder is not None:
        there = [name for name in WHAT if (folder / name).exists()]
        lines += ["", *table([["in " + str(folder), ""], *([name, WHAT[name]] for name in there)], left=(0, 1))]
    return "\n".join(lines)


def beside_whole_object(found: StepComparison, scaled: ScaledPlan) -> dict[str, Any]:
    """Return a step beside the whole model's as an object."""
    kinds = [{"kind": k, "count": n, "apart": apart, "worst": worst} for k, n, apart, worst in found.kinds]
    return {"ok": found.is_equal, "kinds": kinds, "loss": found.loss, "whole_loss": found.whole_loss,
            "scaled": list(scaled.lines), "devices": scaled.strategy.devices}  # fmt: skip


def beside_whole_text(found: StepComparison, scaled: ScaledPlan) -> str:
    """Return a step beside the whole model's: what was run, and how far apart each kind of value is."""
    lines = [x for line in scaled.lines for x in wrap_text(line, "scaled     ")]
    rows = [["", "values", "apart", "at worst"]]
    rows += [[kind, str(n), f"{apart:.1e}", worst] for kind, n, apart, worst in found.kinds]
    lines += table(rows)
    if not found.is_equal:
        return "\n".join([*lines, f"differs: legal is {EQUAL:.0e} of the largest element"])
    told = f"loss {found.loss:.12g} on {scaled.strategy.devices} devices, {found.whole_loss:.12g} of the whole model"
    return "\n".join([*lines, f"ok: {told}"])


def action_times_text(rows: Sequence[ActionTimes], seconds: tuple[float, float], issue_seconds: float) -> str:
    """Return predicted beside measured seconds of a step, by stage and kind of action."""
    told = [["action", "count", "predicted", "measured", "ratio"]]
    for one in rows:
        ratio = f"{one.measured_seconds / one.predicted_seconds:.2f}" if one.predicted_seconds else "-"
        times = format_seconds(one.predicted_seconds), format_seconds(one.measured_seconds)
        told.append([f"stage {one.stage} {one.kind}", str(one.times), *times, ratio])
    predicted, measured = seconds
    told.append(["step", "", format_seconds(predicted), format_seconds(measured), f"{measured / predicted:.2f}"])
    note = (f"predicted with the links as measured, and {format_seconds(issue_seconds)} for an op, the median of the "
            "step before this one")  # fmt: skip
    return "\n".join([*table(told), *wrap_text(note, "")])

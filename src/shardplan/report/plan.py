"""The answer of `plan` in 80 columns, the best strategy first, then why others lost; and what of it runs here."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardplan.execution.beside_whole import EQUAL, StepComparison
from shardplan.execution.measured_step import ActionTimes
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.launches.handover.handed_plan import HandedPlan
from shardplan.launches.handover.scaled_plan import ScaledPlan
from shardplan.report.fold import WIDTH
from shardplan.report.text import table
from shardplan.simulation.searching.answer import TIE, Judge, JudgedPlan, PlanAnswer, causes_text
from shardplan.simulation.searching.certifier import RefusedPlan
from shardplan.simulation.searching.fit import Fit
from shardplan.simulation.searching.own_plans import OwnAnswer
from shardplan.simulation.searching.plans import plan_text
from shardplan.strategy.runtimes import runtime_of
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.strategy_text import strategy_text

BAR = 60
# What takes memory, by the first letter of what it is; see `certified.WORDS`.
LETTERS = {"at work in one layer, or the loss": "w", "more that the allocator holds": "a"}


def answer_text(answer: PlanAnswer) -> str:
    """Return the answer, few others with why they lost, what would change it, and what was left out."""
    best, judge = answer.plans[0], answer.judge
    lines = [headline(answer.title or judge.model.name, best.plan.strategy, judge), ""]
    lines += [*wrap_text(strategy_words(best.plan.strategy), ""), *wrap_text(_brief(best), "  ")]
    lines += judged_lines(best, judge)
    others, ties = answer.plans[1:], answer.tied - 1
    if others:
        tie = f", of which {ties} {'is' if ties == 1 else 'are'} a tie: within {100 * TIE:.0f} %" if ties else ""
        lines += ["", f"others{tie}"]
    for one in others:
        cost = f"{format_seconds(one.plan.seconds):>10} {format_bytes(one.plan.peak_bytes):>9}  "
        alike = f" (and {one.alike} alike)" if one.alike else ""
        lines += wrap_text(f"{one.lost}: {_brief(one)}{alike}", cost)
    if answer.changes:
        lines += ["", "would be another with"]
        lines += [x for change in answer.changes for x in wrap_text(change, "  ")]
    found = answer.found
    left = f"; interrupted, {found.frames_left:,} frames of strategies not searched" if found.frames_left else ""
    alike = f", the first one's degrees with {best.alike} more" if best.alike else ""
    lines += ["", *wrap_text(f"{found.counted:,} strategies, {found.priced:,} priced{alike}{left}", "")]
    lines += [x for text in _refused(found.refused, judge.certifier.memory) for x in wrap_text(text, "")]
    return "\n".join(lines + [x for note in answer.notes for x in wrap_text(f"note: {note}", "")])


def _refused(refused: Sequence[RefusedPlan], memory: float) -> list[str]:
    """Those that their certificates refuse, a line a reason; all that need too much memory in one."""
    reasons = Counter(one.why for one in refused if one.nbytes is None)
    if sizes := [one.nbytes for one in refused if one.nbytes is not None]:
        bounds = dict.fromkeys(map(format_bytes, (min(sizes), max(sizes))))
        reasons[f"{' to '.join(bounds)}, and a device has {format_bytes(memory)}"] = len(sizes)
    return [
        f"{n} refused by {'its certificate' if n == 1 else 'their certificates'}: {why}" for why, n in reasons.items()
    ]


def own_text(own: OwnAnswer) -> str:
    """Return strategies with a schedule or tables of one's own among those of the answer, op by op."""
    count = len(own.plans) + len(own.ours)
    first = f"{own.called}, checked and certified: place {own.place} of {count}, all timed op by op"
    lines = wrap_text(first, "yours     ")
    rows = sorted([(p, "yours: ") for p in own.plans] + [(p, "") for p in own.ours], key=lambda row: row[0].seconds)
    for plan, whose in rows:
        cost = f"{format_seconds(plan.seconds):>10} {format_bytes(plan.peak_bytes):>9}  "
        lines += wrap_text(f"{whose}{plan_text(plan)}", cost)
    for one in own.refused:
        lines += wrap_text(f"refused: {strategy_text(one.strategy)}: {one.why}", "  ")
    return "\n".join(lines)


def fit_text(title: str, told: Fit, one: JudgedPlan, judge: Judge, notes: tuple[str, ...] = ()) -> str:
    """Return whether a strategy fits, how long a step takes and what bounds it, and near ones that fit."""
    peak, memory = format_bytes(told.peak_bytes), format_bytes(told.memory)
    verdict = f"fits: {peak} of {memory}" if told.fits else f"does not fit: {peak}, and a device has {memory}"
    lines = [verdict, headline(title, told.strategy, judge), "", *wrap_text(strategy_words(told.strategy), "")]
    lines += judged_lines(one, judge)
    if told.uncertified:
        lines += wrap_text(f"not certified, as no job can be made of it: {told.uncertified}", "")
    return "\n".join([*lines, *told.change_lines(), *(x for note in notes for x in wrap_text(f"note: {note}", ""))])


def headline(title: str, strategy: Strategy, judge: Judge) -> str:
    """Return in a line or two what is trained, on what, and how much of it a step has."""
    fields, topology = judge.model.fields, judge.topology
    tokens = f" x {judge.tokens:,} tokens" if judge.tokens > 1 else ""
    size = f"{judge.model.parameter_count / 1e9:.3g} billion parameters"
    where = f"{topology.size:,} devices of {topology.name or 'a topology'} ({topology.describe()})"
    return (
        f"{title}, {size}, {strategy.precision or fields['dtype']}\n{where}; a step is {strategy.sequences:,}{tokens}"
    )


def judged_lines(one: JudgedPlan, judge: Judge) -> list[str]:
    """Return the seconds of a strategy, what bounds them, and what is held."""
    low, high = (format_seconds(x) for x in one.interval)
    devices, dtype = judge.topology.size, judge.model.fields["dtype"]
    peak = judge.topology.device.peak(str(dtype))
    step = f"{format_seconds(one.plan.seconds)}, and {low} to {high} in nine of ten"
    if not judge.has_measurements:
        step += "; no step was measured on such a machine"
        step += f", which is taken to be as {', '.join(judge.machine.taken)}" if judge.machine.taken else ""
    lines = [
        "",
        *wrap_text(step, "step      "),
        f"tokens    {one.tokens_per_second:,.0f} a second, {one.tokens_per_second / devices:,.0f} a device",
        f"MFU       {100 * one.mfu:.1f} % of {peak / 1e12:,.0f} TFLOP/s in {dtype}",
        *wrap_text(causes_text(one.causes), "bound by  "),
    ]
    return lines + memory_lines(one, judge.certifier.memory, judge)


def memory_lines(one: JudgedPlan, memory: float, judge: Judge) -> list[str]:
    """Return what the worst rank holds as a bar, with a letter for each part, and the parts."""
    held, least = one.held, min(one.held.nbytes, memory)
    parts = [(LETTERS.get(what, what[0]), what, nbytes) for what, nbytes in held.parts if nbytes > 0]
    scale = BAR / max(memory, held.nbytes)
    bar, at = "", 0.0
    for letter, _, nbytes in parts:
        at += nbytes
        bar += letter * (round(at * scale) - len(bar))
    free = format_bytes(memory - least)
    room = f"{free} free" if held.nbytes <= memory else f"{format_bytes(held.nbytes - memory)} too much"
    said = ", ".join(f"{letter} {format_bytes(nbytes)} {what}" for letter, what, nbytes in parts)
    p = judge.machine.parameters
    outside = "" if p.context or p.fragmentation > 1 else "; driver and allocator not counted (--reserve)"
    return [
        f"memory    {format_bytes(held.nbytes)} of {format_bytes(memory)} on pipeline rank {held.rank} as "
        f"{runtime_of(one.plan.strategy).name} has it; {room}",
        f"          [{bar:.<{BAR}}]",
        *wrap_text(said + outside, "          "),
    ]


def strategy_words(s: Strategy) -> str:
    """Return a strategy as a sentence.

    >>> strategy_words(Strategy(data=4, tensor=2, zero=1, global_batch=32, recompute="full"))
    '4 replicas that deal out optimizer state; tensors over 2; microbatches of 1, 8 a replica; layers computed again'
    """
    return "; ".join(_words(s))


def _words(s: Strategy) -> Iterator[str]:
    dealt = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}
    zero = 3 if s.fsdp else s.zero
    among = f" in groups of {s.shard}" if s.shard else ""
    kept = ", parameters kept from forward to backward" if s.fsdp and s.zero == 2 else ""
    copies = "one replica" if s.data == 1 else f"{s.data} replicas"
    yield copies + (f" that deal{'s' * (s.data == 1)} out {dealt[zero]}{among}{kept}" if zero else "")
    if s.tensor > 1:
        yield f"tensors over {s.tensor}{', sequence too' if s.sequence_parallel else ''}"
    if s.context > 1:
        yield f"sequence over {s.context} ({s.context_kind})"
    if s.expert > 1:
        yield f"experts over {s.expert}"
    if s.pipeline > 1:
        chunks = f" of {s.interleave} chunks" if (s.interleave or 1) > 1 else ""
        yield f"{s.pipeline} pipeline stages{chunks} ({s.schedule})"
    yield f"microbatches of {s.microbatch}, {s.microbatches} a replica"
    again = {"full": "layers computed again", "selective": "attention computed again",
             "selective_op": "every second product computed again"}  # fmt: skip
    if s.recompute != "none":
        of = "" if s.recompute_layers is None else f" in the first {s.recompute_layers} layers of a stage"
        yield again.get(str(s.recompute), f"{', '.join(s.recompute)} computed again") + of


def _brief(one: JudgedPlan) -> str:
    """A strategy as `--fit` takes it; its precision is the headline's."""
    return plan_text(one.plan._replace(strategy=replace(one.plan.strategy, precision=None)))


def wrap_text(text: str, first: str) -> list[str]:
    """Return a text as lines of a screen, the first after some words, the others as far in."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first) or "  ")


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

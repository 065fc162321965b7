"""The report of a plan: the answer, where it lies, its step over time, its memory, its movements, its alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain

import numpy as np

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.launches.handover.handed_job import job_of
from shardplan.launches.handover.handed_plan import ORDER, HandedPlan
from shardplan.launches.handover.scripts import nodes_of
from shardplan.report.page.figures import (
    alternatives_figure,
    bytes_figure,
    held_figure,
    memory_figure,
    sensitivity_figure,
    timeline_figure,
)
from shardplan.report.page.page import PagePart, render_page
from shardplan.report.plan import strategy_words
from shardplan.report.why import remedy_text
from shardplan.simulation.searching.answer import Judge, JudgedPlan, PlanAnswer
from shardplan.simulation.searching.plans import RankedPlan, plan_text
from shardplan.simulation.why import WhyMovements, why
from shardplan.strategy.partition.memory import holdings
from shardplan.strategy.runtimes import runtime_of

MOST_MOVEMENTS = 200  # in the table
MOST_POINTS = 400  # on the plane


def plan_page(plan: HandedPlan, judge: Judge, one: JudgedPlan, text: str, answer: PlanAnswer | None = None) -> str:
    """Return the report of a plan.

    Args:
        plan: As it is handed over.
        judge: What tells of strategies.
        one: The plan, judged.
        text: The answer as it was printed.
        answer: Of a search, for what else there was.

    Raises `MissingExtra` where plotly or jinja2 is not installed.
    """
    job, machine = job_of(plan)
    found = why(job, machine)
    parts = [*_answer_part(one, judge, text), *_placement_part(plan), *_step(found, one, judge),
             *_alternative_parts(judge, one, answer), *_movements(found)]  # fmt: skip
    return render_page(f"{plan.title}: {plan_text(one.plan)}", parts, strategy_words(plan.strategy))


def _answer_part(one: JudgedPlan, judge: Judge, text: str) -> Iterator[PagePart]:
    yield PagePart("Answer", cards=answer_cards(one, judge), text=text)


def answer_cards(one: JudgedPlan, judge: Judge) -> list[tuple[str, str]]:
    """Return what is predicted of a strategy, in numbers."""
    low, high = map(format_seconds, one.interval)
    return [
        (format_seconds(one.plan.seconds), f"a step; {low} to {high} in nine of ten"),
        (f"{one.tokens_per_second:,.0f}", "tokens a second"),
        (f"{one.tokens_per_second / judge.topology.size:,.0f}", "tokens a second and device"),
        (f"{100 * one.mfu:.1f} %", "MFU"),
        (format_bytes(one.held.nbytes), f"of {format_bytes(judge.certifier.memory)} on the worst rank"),
    ]


def _placement_part(plan: HandedPlan) -> Iterator[PagePart]:
    note = ("A box is a node, a cell a device: its place along each axis, coloured by pipeline rank. Nodes that differ "
            "in their data replica alone are one box.")  # fmt: skip
    yield PagePart(f"Placement on {plan.topology.name or 'the topology'}", note, markup=placed_markup(plan))


def _step(found: WhyMovements, one: JudgedPlan, judge: Judge) -> Iterator[PagePart]:
    line = found.timeline
    note = (f"Op by op the step takes {line.explained()}. The closed form, in which strategies are compared, says "
            f"{format_seconds(one.plan.seconds)}. Drag to zoom, double-click to go back.")  # fmt: skip
    yield PagePart("Timeline", note, figure=timeline_figure(line))
    memory = judge.certifier.memory
    held = holdings(line.job, runtime_of(one.plan.strategy))
    note = (
        "What a device of each pipeline rank holds, as certified; the answer has what allocator and driver hold beside."
    )
    yield PagePart("Memory over time", note, figure=memory_figure(line, held, memory))
    yield PagePart("Memory at the peak", "Of what, when a rank holds most.", figure=held_figure(line, held))
    note = "Received by a device in a step, by the outermost level that they cross, and by axes."
    yield PagePart("Bytes by level", note, figure=bytes_figure(found))


def _alternative_parts(judge: Judge, one: JudgedPlan, answer: PlanAnswer | None) -> Iterator[PagePart]:
    plans: Sequence[JudgedPlan] = (one,)
    if answer is not None and len(answer.plans) > 1:
        plans = answer.plans
        ours = {p.plan.strategy for p in plans}
        front = [p for p in answer.found.front if p.strategy not in ours]
        rest = [p for p in answer.found.candidates if p.strategy not in ours | {p.strategy for p in front}]
        rows = chain((("priced", p) for p in rest[:MOST_POINTS]), (("nothing is better in both", p) for p in front),
                     (("told", p.plan) for p in plans[1:]), (("the answer", p.plan) for p in plans[:1]))  # fmt: skip
        how = "Seconds and memory of what was priced; hover says which it is. Dashed: what a device has."
        yield PagePart(
            "Alternatives",
            how,
            figure=alternatives_figure(rows, judge.certifier.memory),
            rows=alternatives_table(plans),
        )
    note = "The closed form where one thing is faster or slower, and all else is as it is."
    if answer is not None and answer.changes:
        note += f" Another answer with {'; '.join(answer.changes)}."
    named = [(_brief(p.plan), p.plan) for p in plans]
    yield PagePart("Sensitivity", note, figure=sensitivity_figure(judge, named))


def alternatives_table(plans: Sequence[JudgedPlan]) -> list[list[str]]:
    """Return the strategies of an answer with why each lost, headings first."""
    rows = [["strategy", "seconds", "memory", "why it lost"]]
    return rows + [[plan_text(p.plan), format_seconds(p.plan.seconds), format_bytes(p.plan.peak_bytes), p.lost or "-"]
                   for p in plans]  # fmt: skip


def _brief(one: RankedPlan) -> str:
    words = plan_text(one).split()
    return " ".join(words[:5]) + (" ..." if len(words) > 5 else "")


def _movements(found: WhyMovements) -> Iterator[PagePart]:
    rows = movements_table(found, MOST_MOVEMENTS)
    left = len(found.movements) - len(rows) + 1
    note = "Each with who asks for it, in a step; the most exposed first."
    yield PagePart("Movements", note + (f" {left} more are not shown." if left > 0 else ""), rows=rows)


def movements_table(found: WhyMovements, most: int) -> list[list[str]]:
    """Return so many movements, each with who asks for it, headings first."""
    rows = [["where", "what", "who asks, and for what", "made and wanted", "a step", "exposed", "what removes it"]]
    for m in found.movements[:most]:
        rows.append([m.location, f"{', '.join(m.ops)} of %{m.value}", f"{m.asks}: {'; '.join(m.dims)}",
                     f"{m.made} as {m.wanted}", f"{format_bytes(m.received_bytes)}, {format_seconds(m.seconds)}",
                     format_seconds(m.exposed_seconds), remedy_text(m)])  # fmt: skip
    return rows


# Where the devices of a plan lie: a box a node, a cell a device, nodes that differ in their replica alone folded.


SHORT = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
COLOURS = ("#a9cdea", "#fbd38d", "#b5e3c0", "#f6c4cf", "#d6ccf2", "#f3e79b", "#a8e0dc", "#e3c8a8")
MOST_NODES = 24  # drawn, after folding


def placed_markup(plan: HandedPlan) -> str:
    """Return the nodes of a plan's cluster as HTML; colours are pipeline ranks."""
    nodes, inside = nodes_of(plan)
    mesh = plan.device_mesh()
    at = np.empty((mesh.size, len(ORDER)), dtype=np.int64)
    at[mesh.reshape(-1)] = np.indices(mesh.shape).reshape(len(ORDER), -1).T
    wide = [k for k, axis in enumerate(ORDER) if getattr(plan.strategy, axis) > 1]
    alike: dict[bytes, list[int]] = {}
    for node in range(nodes):
        here = at[node * inside : (node + 1) * inside].copy()
        here[:, 1] -= here[:, 1].min()  # data replicas that do the same
        alike.setdefault(here.tobytes(), []).append(node)
    boxes = [_box(same, at[same[0] * inside : (same[0] + 1) * inside], wide) for same in [*alike.values()][:MOST_NODES]]
    left = len(alike) - len(boxes)
    more = f'<p class="note">and {left} more kinds of node</p>' if left > 0 else ""
    return f'<div class="nodes">{"".join(boxes)}</div>{more}'


def _box(nodes: Sequence[int], at: np.ndarray, wide: Sequence[int]) -> str:
    first, last = nodes[0], nodes[-1]
    several = f" <span>and {len(nodes) - 1} alike, up to node {last}</span>" if len(nodes) > 1 else ""
    cells = "".join(_cell(row, wide, k) for k, row in enumerate(at.tolist()))
    return f'<div class="node"><h3>node {first}{several}</h3><div class="devices">{cells}</div></div>'


def _cell(row: Sequence[int], wide: Sequence[int], k: int) -> str:
    said = [f"{SHORT[ORDER[i]]}{row[i]}" for i in wide] or ["all"]
    title = ", ".join(f"{ORDER[i]} {row[i]}" for i in range(len(ORDER)))
    colour = COLOURS[row[0] % len(COLOURS)]
    return (f'<div class="device" style="background:{colour}" title="device {k}: {escape(title)}">'
            f"{'<br>'.join(said)}</div>")  # fmt: skip

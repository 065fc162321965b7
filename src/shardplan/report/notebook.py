"""What a notebook shows of a value: the parts of its report that need no script, in the notebook's own colours.

A value that has parts in `PARTS` has `_repr_html_`; what is longer than `MOST_BYTES` is cut, and says so. Where jinja2
is not installed a notebook shows the text of a value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import MissingExtra
from shardplan.hardware.placement import Placement
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.launches.audit import Audit
from shardplan.movement.placing.place import Ranking
from shardplan.movement.placing.placement_price import PricedPlacement
from shardplan.movement.reductions.enumeration import Reduction
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.weights import Weights
from shardplan.plans.certificate import Certificate
from shardplan.plans.plan import Plan
from shardplan.report.audit import audit_text
from shardplan.report.page.other_pages import certificate_cards, moves_table, refit_cards
from shardplan.report.page.page import PagePart, page_template
from shardplan.report.page.plan_page import alternatives_table, answer_cards, movements_table
from shardplan.report.place import ranking_text
from shardplan.report.placement_svg import svg_placement
from shardplan.report.plan import answer_text, own_text, strategy_words
from shardplan.report.svg import svg_picture
from shardplan.report.text import clip_text
from shardplan.report.timeline import timeline_text
from shardplan.report.weights import refit_text, side_text
from shardplan.report.why import gap_text
from shardplan.simulation.inference.serving_plans import ServingResult
from shardplan.simulation.jobs.job_timeline import JobTimeline
from shardplan.simulation.searching.answer import PlanAnswer
from shardplan.simulation.searching.fit import Fit
from shardplan.simulation.searching.own_plans import OwnAnswer
from shardplan.simulation.searching.plans import plan_text
from shardplan.simulation.searching.search import SearchResult
from shardplan.simulation.step_gap import StepGap
from shardplan.simulation.timeline import Timeline
from shardplan.simulation.why import WhyMovements
from shardplan.strategy.partition.job import Job
from shardplan.strategy.strategy_text import strategy_text

MOST_BYTES = 100_000  # of a value's HTML
KEPT_BYTES = 90_000  # of them for what is in parts
MOST_LINES, MOST_ROWS = 150, 60  # of a text, and of a table
LONGEST = 300  # characters of a line, and of a cell

Parts = Iterator[PagePart]


def notebook_markup(value: object) -> str | None:
    """Return a value as HTML of at most `MOST_BYTES`, without a script.

    None where the value has no parts, and where jinja2 is not installed.

    >>> from shardplan.core.mesh import Mesh
    >>> "the largest local shape is (2, 6)" in notebook_markup(TensorType.parse("f32[4@x, 6]", Mesh(x=2)))
    True
    """
    made = next((PARTS[kind] for kind in type(value).__mro__ if kind in PARTS), None)
    if made is None:
        return None
    try:
        template = page_template("notebook.html.jinja")
    except MissingExtra:
        return None
    return template.render(parts=shortened_parts(made(value)))


def shortened_parts(parts: Iterator[PagePart]) -> list[PagePart]:
    """Return parts that are together no larger than `KEPT_BYTES`: what is longer is cut, and its note says so."""
    heads = [_cut_head(part) for part in parts]
    left = KEPT_BYTES - sum(sum(map(_size, (p.title, p.note, *(x for pair in p.cards for x in pair)))) for p in heads)
    found: list[PagePart] = []
    for part in heads:
        rows, left, more_rows = _cut_rows(part.rows, left)
        text, left, more_lines = _cut_text(part.text, left)
        notes = [part.note] if part.note else []
        markup = part.markup if len(part.markup.encode()) <= left else ""
        left -= len(markup.encode())
        notes += [f"{more_rows:,} more rows are not shown."] if more_rows else []
        notes += [f"{more_lines:,} more lines are not shown."] if more_lines else []
        notes += ["The picture is too large for a notebook."] if part.markup and not markup else []
        found.append(replace(part, rows=rows, text=text, markup=markup, note=" ".join(notes)))
    return found


def _cut_head(part: PagePart) -> PagePart:
    """A part with a title, a note and numbers that are no longer than a line, and without a figure."""
    cards = [(clip_text(number, LONGEST), clip_text(what, LONGEST)) for number, what in part.cards]
    return replace(
        part, title=clip_text(part.title, LONGEST), note=clip_text(part.note, LONGEST), cards=cards, figure=None
    )


def _size(text: str) -> int:
    return len(escape(text).encode()) + 60  # and the tags around it


def _cut_rows(rows: Sequence[Sequence[str]], left: int) -> tuple[list[list[str]], int, int]:
    """Rows that there is room for, headings first, the room that is left, and how many rows are left out."""
    found: list[list[str]] = []
    for row in rows[: MOST_ROWS + 1]:
        cells = [clip_text(cell, LONGEST) for cell in row]
        size = sum(map(_size, cells)) + 20
        if size > left - 1000:
            break
        found.append(cells)
        left -= size
    return (found, left, len(rows) - len(found)) if len(found) > 1 else ([], left, max(0, len(rows) - 1))


def _cut_text(text: str, left: int) -> tuple[str, int, int]:
    lines, found = text.splitlines(), list[str]()
    for line in lines[:MOST_LINES]:
        cut = clip_text(line, LONGEST)
        if _size(cut) > left - 1000:
            break
        found.append(cut)
        left -= _size(cut)
    return "\n".join(found), left, len(lines) - len(found)


def _type_parts(t: TensorType) -> Parts:
    note = f"On mesh {t.mesh}; the largest local shape is {t.local_shape(0)}, {format_bytes(t.local_bytes())}."
    yield PagePart(str(t), note, markup=svg_picture(t))


def _program_parts(program: Program) -> Parts:
    yield PagePart("Program", text=str(program))
    yield from _held_parts(program)


def _held_parts(program: Program) -> Parts:
    title = "What each device holds"
    yield PagePart(title, "Before the first step, and after each.", markup=svg_picture(program, title))


def _plan_parts(plan: Plan) -> Parts:
    yield PagePart("Plan", cards=certificate_cards(plan.certificate), text=str(plan))
    yield from _held_parts(plan.program)


def _certificate_parts(c: Certificate) -> Parts:
    rows = [["device", "received", "lower bound", "sent"]]
    every = zip(c.program.devices, c.received_bytes, c.lower_bound_bytes, c.sent_bytes, strict=True)
    rows += [[str(d), *map(format_bytes, numbers)] for d, *numbers in every]
    yield PagePart("Certificate", c.summary, cards=certificate_cards(c), rows=rows)


def _reduction_parts(one: Reduction) -> Parts:
    cards = [(format_seconds(one.seconds), "predicted")]
    yield PagePart("Reduction", "" if one.path else "It has no types.", cards=cards, text=str(one))


def _placement_parts(p: Placement) -> Parts:
    yield PagePart(p.describe(), f"Mesh {p.mesh} on {p.topology.name or 'a topology'}.", markup=svg_placement(p))


def _placed_parts(row: PricedPlacement) -> Parts:
    cards = [(format_seconds(row.seconds), "a step"), (format_seconds(row.stock_seconds), "with stock collectives")]
    picture = svg_placement(row.placement, [share.demand for share in row.shares])
    yield PagePart(row.placement.describe(), cards=cards, markup=picture)


def _ranking_parts(found: Ranking) -> Parts:
    yield PagePart("Placements", text=ranking_text(found))
    if len(found):
        yield from _placed_parts(found[0])


def _audit_parts(found: Audit) -> Parts:
    cards: list[tuple[str, str]] = []
    if found.seconds is not None and found.best_seconds is not None and found.ratio is not None:
        cards = [(format_seconds(found.seconds), "a step, as launched"),
                 (format_seconds(found.best_seconds), "on the best matrix"),
                 (f"{found.ratio:.2f}" if math.isfinite(found.ratio) else "-", "times the best")]  # fmt: skip
    yield PagePart("Audit", cards=cards, text=audit_text(found))
    picture = svg_placement(found.launch, [share.demand for share in found.shares])
    yield PagePart("Where ranks lie", "Strips of one colour are a group.", markup=picture)


def _weights_parts(w: Weights) -> Parts:
    first = w.devices[0]
    names = w.names(first)
    rows = [["parameter", "shape"]]
    rows += [[name, " x ".join(map(str, w.shape(name, first)))] for name in names[:MOST_ROWS]]
    left = f" The first {MOST_ROWS} are shown." if len(names) > MOST_ROWS else ""
    yield PagePart("Weights", f"{side_text(w)}; device {first} stores {len(names):,} parameters.{left}", rows=rows)


def _refit_parts(plan: RefitPlan) -> Parts:
    yield PagePart("Refit", cards=refit_cards(plan), text=refit_text(plan))
    yield PagePart("Parameters", rows=moves_table(plan))


def _job_parts(job: Job) -> Parts:
    s = job.strategy
    cards = [(f"{s.devices:,}", "devices"), (str(job.stages), "stages"), (f"{s.sequences:,}", "sequences a step"),
             (f"{job.model.parameter_count:,}", "parameters"), (str(len(job.programs.shared)), "programs")]  # fmt: skip
    yield PagePart(f"Job {job.model.name}: {strategy_text(s)}", f"{strategy_words(s)}.", cards=cards)
    rows = [["stage", "action", "times a step", "ops", "movements"]]
    runs = job.runs
    for stage, kind in sorted(job.programs):
        shared = job.programs.shared[job.programs.which[stage, kind]]
        moved = Counter[str]()
        for m in job.movements.get((stage, kind), ()):
            moved.update({step.op.name: m.times for step in m.plan.program.steps})
        said = ", ".join(f"{name} {count}" for name, count in moved.most_common()) or "-"
        rows.append([str(stage), kind, f"{runs[stage, kind]:,}", str(len(shared.steps)), said])
    yield PagePart("Programs", "Movements a run, those in a layer as often as it has layers.", rows=rows)
    yield PagePart("Layouts", text=str(job.layouts))


def _timeline_parts(line: Timeline) -> Parts:
    cards = [(format_seconds(line.seconds), "makespan"), *_idle_cards(line)]
    yield PagePart("Timeline", cards=cards, text=timeline_text(line))


def _step_parts(line: JobTimeline) -> Parts:
    cards = [(format_seconds(line.seconds), "a step"), (format_bytes(line.peak_bytes), "held at most"),
             *_idle_cards(line)]  # fmt: skip
    yield PagePart("Step", f"{line.title}: {line.explained()}.", cards=cards)
    rows = [["on the critical path", "seconds", "of the step"], *_shares(line.breakdown, line.seconds)]
    yield PagePart("Critical path", rows=rows)
    rows = [["communication beside which nothing is computed", "seconds", "of the step"]]
    yield PagePart("Exposed", rows=[*rows, *_shares(line.exposed, line.seconds)])


def _idle_cards(line: Timeline | JobTimeline) -> list[tuple[str, str]]:
    worst = "at the worst device"
    return [
        (format_seconds(line.idle_seconds), f"idle {worst}"),
        (format_seconds(line.bubble_seconds), f"bubble {worst}"),
    ]


def _shares(parts: Mapping[str, float], whole: float) -> list[list[str]]:
    return [[name, format_seconds(s), f"{100 * s / whole:.1f} %"] for name, s in parts.items() if whole]


def _search_parts(found: SearchResult) -> Parts:
    rows = [["strategy", "seconds", "memory"]]
    rows += [[plan_text(p), format_seconds(p.seconds), format_bytes(p.peak_bytes)] for p in found.ranked]
    yield PagePart("Strategies", f"Of {found.counted:,}, {found.priced:,} priced.", rows=rows)
    rows = [["left out", "strategies"], *([one.rule, f"{one.strategies:,}"] for one in found.pruned)]
    yield PagePart("Left out", rows=rows)


def _serving_parts(found: ServingResult) -> Parts:
    yield PagePart("Strategies that serve", text=str(found))


def _answer_parts(answer: PlanAnswer) -> Parts:
    yield PagePart("Answer", cards=answer_cards(answer.plans[0], answer.judge), text=answer_text(answer))
    yield PagePart("Alternatives", rows=alternatives_table(answer.plans))


def _own_parts(own: OwnAnswer) -> Parts:
    yield PagePart("Yours among ours", text=own_text(own))


def _fit_parts(told: Fit) -> Parts:
    cards = [
        (format_bytes(told.peak_bytes), f"of {format_bytes(told.memory)}"),
        (format_seconds(told.seconds), "a step"),
    ]
    yield PagePart("Fits" if told.fits else "Does not fit", strategy_text(told.strategy), cards=cards, text=str(told))


def _why_parts(found: WhyMovements) -> Parts:
    cards = [(format_seconds(found.timeline.seconds), "a step"),
             (format_seconds(sum(m.seconds for m in found.movements)), f"in {len(found.movements)} movements"),
             (format_seconds(sum(m.exposed_seconds for m in found.movements)), "of them exposed")]  # fmt: skip
    note = "Each with who asks for it, in a step; the most exposed first."
    yield PagePart("Movements", note, cards=cards, rows=movements_table(found, len(found.movements)))


def _gap_parts(found: StepGap) -> Parts:
    yield PagePart("Measured beside predicted", text=gap_text(found))


# By class the parts of a value.
PARTS: Mapping[type, Callable[[Any], Parts]] = {
    TensorType: _type_parts,
    Program: _program_parts,
    Plan: _plan_parts,
    Certificate: _certificate_parts,
    Reduction: _reduction_parts,
    Placement: _placement_parts,
    PricedPlacement: _placed_parts,
    Ranking: _ranking_parts,
    Audit: _audit_parts,
    Weights: _weights_parts,
    RefitPlan: _refit_parts,
    Job: _job_parts,
    Timeline: _timeline_parts,
    JobTimeline: _step_parts,
    SearchResult: _search_parts,
    ServingResult: _serving_parts,
    PlanAnswer: _answer_parts,
    OwnAnswer: _own_parts,
    Fit: _fit_parts,
    WhyMovements: _why_parts,
    StepGap: _gap_parts,
}

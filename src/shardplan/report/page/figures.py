"""Figures of a step, as plotly takes them: its timeline, its memory, bytes by level, alternatives, sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.report.page.page import Figure
from shardplan.simulation.jobs.holdings import attributed
from shardplan.simulation.jobs.job_timeline import JobTimeline
from shardplan.simulation.jobs.spans import joined, uncovered_stretches
from shardplan.simulation.jobs.timing import COMPUTE, issued_of
from shardplan.simulation.searching.answer import Judge
from shardplan.simulation.searching.plans import RankedPlan, plan_text
from shardplan.simulation.searching.sensitivity import scalable_parts
from shardplan.simulation.why import WhyMovements
from shardplan.strategy.partition.memory import Holdings

COLOURS = {
    "F": "#4f86e8",
    "B": "#2f9e6e",
    "I": "#2f9e6e",
    "W": "#8fcdb0",
    "NORM": "#c9b3ee",
    "CLIP": "#c9b3ee",
    "OPT": "#a97fe0",
}
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward of values",
    "W": "backward of weights",
    "NORM": "norm of gradients",
    "CLIP": "clipping",
    "OPT": "optimizer",
}
BARE = "#e4572e"
SERIES = ("#4f86e8", "#e0912f", "#2f9e6e", "#c9516b", "#8d78d6", "#7d8a2e", "#3aa7b8", "#a0643c")
MOST_RANKS = 16  # drawn
MOST_OPENED = 600_000  # ops looked into for what is exposed
STEPS = 1500  # parts of a step that are seen apart
FACTORS = tuple(float(f) for f in np.geomspace(0.25, 4, 17))


def _figure(data: list[dict[str, Any]], height: int, **layout: Any) -> Figure:
    margin = {"l": 90, "r": 20, "t": 64, "b": 50}
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom"}
    return {"data": data, "layout": {"height": height, "margin": margin, "legend": legend, **layout}}


def drawn_ranks(line: JobTimeline) -> list[int]:
    """Return the pipeline ranks that are drawn: all, or some from the first to the last."""
    count = len(line.swept.ranks)
    return np.unique(np.linspace(0, count - 1, min(count, MOST_RANKS)).round().astype(int)).tolist()


def timeline_figure(line: JobTimeline) -> Figure:
    """Return the actions of every pipeline rank over time, and in a line below each what of it is exposed."""
    bars: dict[str, list[tuple[str, float, float, str]]] = {}
    ranks = drawn_ranks(line)
    for r in ranks:
        run, name = line.swept.ranks[r], f"rank {r}"
        for (stage, kind, k), begin, done in zip(run.actions, run.begin.tolist(), run.done.tolist(), strict=True):
            if np.isfinite(begin) and done > begin:
                said = f"{MEANING[kind]} of stage {stage}" + (f", microbatch {k}" if k >= 0 else "")
                bars.setdefault(kind, []).append((name, begin, done, said))
    data = [_bars(MEANING[kind], COLOURS[kind], bars[kind], 0.62) for kind in COLOURS if kind in bars]
    looked = _openable(line, ranks)
    bare = [(f"rank {r}", share, a, b) for r in looked for a, b, share in exposed_shares(line, r)]
    if bare:
        rows = [(name, a, b, f"{100 * share:.0f} % exposed communication") for name, share, a, b in bare]
        title = "exposed communication" + (f", looked into to rank {looked[-1]}" if looked != ranks else "")
        bars_of_bare = _bars(title, BARE, rows, 0.26)
        bars_of_bare["marker"] = {"color": BARE, "opacity": [round_off(share) for _, share, _, _ in bare]}
        data.append(bars_of_bare)
    axis = {"title": {"text": "seconds"}, "range": [0, line.seconds], "rangeslider": {"visible": False}}
    return _figure(data, 150 + 34 * len(ranks), barmode="overlay", xaxis=axis, dragmode="zoom",
                   yaxis={"autorange": "reversed", "fixedrange": True, "type": "category"})  # fmt: skip


def _openable(line: JobTimeline, ranks: Sequence[int]) -> list[int]:
    """As many of the ranks as may be looked into op by op."""
    found, left = list[int](), MOST_OPENED
    for r in ranks:
        left -= sum(
            issued_of(line.compiled.map_at(r, i, (s, kind)).nodes)
            for i, (s, kind, _) in enumerate(line.swept.ranks[r].actions)
        )
        if left < 0 and found:
            break
        found.append(r)
    return found


def exposed_shares(line: JobTimeline, rank: int) -> list[tuple[float, float, float]]:
    """Return stretches of time in which a rank communicates and computes nothing, and in what share of each.

    Looked at in as many parts of the step as are seen apart; parts beside each other with equal shares are one.
    """
    talks: list[tuple[float, float]] = []
    computes: list[tuple[float, float]] = []
    for i in range(len(line.swept.ranks[rank].actions)):
        for op in line.opened.ops(rank, i):
            (computes if op.op.cost.stream == COMPUTE else talks).append((op.start, op.end))
    bare = uncovered_stretches(joined(talks), joined(computes))
    if not bare:
        return []
    edges = np.linspace(0, line.seconds, STEPS + 1)
    ends = np.array(bare).reshape(-1)
    reached = np.repeat(np.cumsum([0.0, *(b - a for a, b in bare)]), 2)[1:-1]  # exposed seconds until each end
    shares = np.round(np.diff(np.interp(edges, ends, reached)) / (line.seconds / STEPS), 1)
    cuts = [0, *(np.flatnonzero(np.diff(shares)) + 1).tolist(), STEPS]
    return [(float(edges[a]), float(edges[b]), float(shares[a])) for a, b in pairwise(cuts) if shares[a] > 0]


def _bars(name: str, colour: str, rows: Sequence[tuple[str, float, float, str]], width: float) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": name, "marker": {"color": colour}, "width": width,
        "y": [r[0] for r in rows], "base": [round_off(r[1]) for r in rows],
        "x": [round_off(r[2] - r[1]) for r in rows],
        "hovertext": [f"{r[3]}<br>{format_seconds(r[2] - r[1])} from {format_seconds(r[1])}" for r in rows],
        "hoverinfo": "text",
    }  # fmt: skip


def round_off(x: float) -> float:
    """Return a number as exact as a picture is."""
    return float(f"{x:.6g}")


def memory_figure(line: JobTimeline, held: Holdings, memory: float) -> Figure:
    """Return what every pipeline rank holds over time, and the device's memory."""
    data: list[dict[str, Any]] = []
    for k, r in enumerate(drawn_ranks(line)):
        run = line.swept.ranks[r]
        times = np.maximum.accumulate(np.stack([run.begin, run.done], axis=1).reshape(-1))
        rows = np.stack([held.during[r], held.after[r]], axis=1).reshape(-1)
        data.append({
            "type": "scatter", "mode": "lines", "name": f"rank {r}",
            "line": {"shape": "hv", "width": 1.5, "color": SERIES[k % len(SERIES)]},
            "x": [0.0, *map(round_off, times.tolist())], "y": [round_off(n / 1e9) for n in (held.state[r], *rows)],
        })  # fmt: skip
    if np.isfinite(memory):
        data.append({"type": "scatter", "mode": "lines", "name": "a device has", "x": [0, line.seconds],
                     "y": [memory / 1e9] * 2, "line": {"dash": "dash", "color": BARE}})  # fmt: skip
    return _figure(data, 380, xaxis={"title": {"text": "seconds"}, "range": [0, line.seconds]},
                   yaxis={"title": {"text": "GB"}, "rangemode": "tozero"})  # fmt: skip


def held_figure(line: JobTimeline, held: Holdings) -> Figure:
    """Return what every pipeline rank holds when it holds most, by owner."""
    ranks = drawn_ranks(line)
    peaks = [attributed(line.job, held, r) for r in ranks]
    owners = list(dict.fromkeys(name for one in peaks for name in one.parts))
    data = [{"type": "bar", "orientation": "h", "name": name, "marker": {"color": SERIES[k % len(SERIES)]},
             "y": [f"rank {r}" for r in ranks], "x": [round_off(one.parts.get(name, 0) / 1e9) for one in peaks],
             "hovertext": [f"{name}: {format_bytes(one.parts.get(name, 0))}<br>in {one.kind} of stage {one.stage}, "
                           f"{one.microbatches} microbatches kept" for one in peaks],
             "hoverinfo": "text"} for k, name in enumerate(owners)]  # fmt: skip
    return _figure(data, 150 + 26 * len(ranks), barmode="stack", xaxis={"title": {"text": "GB"}},
                   yaxis={"autorange": "reversed", "type": "category"})  # fmt: skip


def bytes_figure(found: WhyMovements) -> Figure:
    """Return the bytes that a device receives in a step, by the outermost level that they cross, and by axes."""
    totals: dict[tuple[str, str], float] = {}
    for m in found.movements:
        for stream in m.streams[:1]:
            axes, _, level = stream.rpartition(", ")
            key = axes or "messages", level or "none"
            totals[key] = totals.get(key, 0.0) + m.received_bytes
    axes = list(dict.fromkeys(a for a, _ in totals))
    levels = list(dict.fromkeys(level for _, level in totals))
    data = [{"type": "bar", "orientation": "h", "name": a, "marker": {"color": SERIES[k % len(SERIES)]},
             "y": levels, "x": [round_off(totals.get((a, level), 0.0) / 1e9) for level in levels],
             "hovertext": [f"{a} on {level}: {format_bytes(totals.get((a, level), 0.0))}" for level in levels],
             "hoverinfo": "text"} for k, a in enumerate(axes)]  # fmt: skip
    return _figure(data, 160 + 36 * len(levels), barmode="stack", xaxis={"title": {"text": "GB a step"}},
                   yaxis={"type": "category"})  # fmt: skip


def bar_figure(labels: Sequence[str], rows: Sequence[tuple[str, str, Sequence[float]]]) -> Figure:
    """Return bytes by label, side by side: a name, a colour and as many numbers as there are labels."""
    data = [{"type": "bar", "name": name, "marker": {"color": colour}, "x": list(labels),
             "y": [round_off(n) for n in values], "hovertext": [f"{name}: {format_bytes(n)}" for n in values],
             "hoverinfo": "text"} for name, colour, values in rows]  # fmt: skip
    return _figure(data, 360, barmode="group", xaxis={"type": "category"}, yaxis={"title": {"text": "bytes"}})


def alternatives_figure(rows: Iterable[tuple[str, RankedPlan]], memory: float) -> Figure:
    """Return strategies on a plane of seconds and memory, by group, the last with a star; a hover tells which it is."""
    groups: dict[str, list[RankedPlan]] = {}
    for group, one in rows:
        groups.setdefault(group, []).append(one)
    last = len(groups) - 1
    data = [{"type": "scatter", "mode": "markers", "name": group,
             "marker": {"size": 15 if k == last else 8, "color": SERIES[-k % 4],
                        "symbol": "star" if k == last else "circle"},
             "x": [round_off(one.seconds) for one in mine], "y": [round_off(one.peak_bytes / 1e9) for one in mine],
             "hovertext": [f"{plan_text(one)}<br>{format_seconds(one.seconds)}, {format_bytes(one.peak_bytes)}"
                           for one in mine], "hoverinfo": "text"}
            for k, (group, mine) in enumerate(groups.items())]  # fmt: skip
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": memory / 1e9, "y1": memory / 1e9,
            "line": {"dash": "dash", "color": BARE}}  # fmt: skip
    return _figure(data, 420, xaxis={"title": {"text": "seconds a step"}, "type": "log"},
                   yaxis={"title": {"text": "GB at the worst rank"}, "rangemode": "tozero"},
                   shapes=[line] if np.isfinite(memory) else [])  # fmt: skip


def sensitivity_figure(judge: Judge, plans: Sequence[tuple[str, RankedPlan]]) -> Figure:
    """Return the seconds of some strategies where a link, or all kernels, are slower or faster; a menu says which."""
    ways = list(_topology_changes(judge.topology))
    data: list[dict[str, Any]] = []
    for w, (_, change) in enumerate(ways):
        priced = [judge.prices_on(change(f), [one for _, one in plans]) for f in FACTORS]
        for k, (name, _) in enumerate(plans):
            data.append({"type": "scatter", "mode": "lines+markers", "name": name, "visible": w == 0,
                         "line": {"color": SERIES[k % len(SERIES)]}, "x": [round_off(f) for f in FACTORS],
                         "y": [round_off(row[k]) for row in priced]})  # fmt: skip
    seen = [[k // len(plans) == w for k in range(len(data))] for w in range(len(ways))]
    buttons = [{"label": text, "method": "update", "args": [{"visible": mine}]}
               for (text, _), mine in zip(ways, seen, strict=True)]  # fmt: skip
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.05, "yanchor": "bottom", "showactive": True}
    return _figure(data, 480, updatemenus=[menu], legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
                   xaxis={"title": {"text": "times as fast"}, "type": "log", "tickvals": [0.25, 0.5, 1, 2, 4],
                          "ticktext": ["1/4", "1/2", "1", "2", "4"]},
                   yaxis={"title": {"text": "seconds a step"}, "rangemode": "tozero"})  # fmt: skip


def _topology_changes(topology: Topology) -> Iterable[tuple[str, Callable[[float], Topology]]]:
    """What may be faster: each link, and the device's kernels."""
    parts = scalable_parts(topology)
    for level in topology.levels:
        if level.size > 1:
            yield f"links between {level.name}s", parts[level.name]
    yield "kernels of the device", lambda f: scalable_parts(parts["flops"](f))["memory_bandwidth"](f)

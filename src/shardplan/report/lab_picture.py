"""Pictures of the lab as PNG: predicted against measured seconds, and two timelines of one program.

Needs matplotlib (the extra `report`), imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardplan.errors import optional
from shardplan.execution.lab.results import Done
from shardplan.simulation.timeline import Timeline

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_METADATA = {"Software": ""}


def _pyplot() -> Any:
    optional("matplotlib", "report").use("Agg")
    return optional("matplotlib.pyplot", "report")


def save_points(path: Path, experiments: Sequence[Done]) -> None:
    """Draw predicted against measured seconds of every pair into a PNG file, one colour a cluster.

    Two predictions stand side by side: event by event, and step by step. Raises `MissingExtra` where
    matplotlib is not installed.
    """
    plt = _pyplot()
    clusters = list(dict.fromkeys(d.experiment.cluster_name for d in experiments))
    figure, axes = plt.subplots(1, 2, figsize=(12, 6.4), sharex=True, sharey=True, layout="constrained")
    everything = [x * 1e3 for d in experiments for r in d.rows for x in (r.median, r.events, r.barrier)]
    low, high = min(everything) / 1.25, max(everything) * 1.25
    for axis, model in zip(axes, ("events", "barrier"), strict=True):
        ends = [low, high]
        axis.fill_between(
            ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#dddddd", lw=0, zorder=0, label="within 10 %"
        )
        axis.plot(ends, ends, color="black", lw=1, zorder=1)
        for k, cluster in enumerate(clusters):
            rows = [r for d in experiments if d.experiment.cluster_name == cluster for r in d.rows]
            axis.scatter(
                [r.median * 1e3 for r in rows],
                [(r.events if model == "events" else r.barrier) * 1e3 for r in rows],
                s=16,
                alpha=0.55,
                lw=0,
                marker=MARKERS[k % len(MARKERS)],
                color=COLOURS[k % len(COLOURS)],
                label=f"{cluster} ({len(rows)})",
                zorder=2,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(low, high)
        axis.set_ylim(low, high)
        axis.set_aspect("equal")
        axis.set_axisbelow(True)
        axis.grid(True, which="major", color="#eeeeee", zorder=-1)
        axis.set_title({"events": "event-wise prediction", "barrier": "closed form, step by step"}[model])
        axis.set_xlabel("measured, ms (median)")
    axes[0].set_ylabel("predicted, ms")
    axes[0].legend(loc="upper left", fontsize=9, title="cluster, leaves, Mbit/s (pairs)", title_fontsize=9)
    figure.savefig(path, dpi=130, metadata=_METADATA)
    plt.close(figure)


def save_timelines(path: Path, predicted: Timeline, measured: Timeline) -> None:
    """Draw what every device does when into a PNG file, predicted above measured, one colour a step.

    Raises `MissingExtra` where matplotlib is not installed.
    """
    plt = _pyplot()
    devices = sorted({i.device for t in (predicted, measured) for i in t.intervals})
    height = 1.2 + 0.28 * len(devices)
    figure, axes = plt.subplots(2, 1, figsize=(11, 2 * height), sharex=True, sharey=True, layout="constrained")
    shown: dict[int, str] = {}
    for axis, timeline in zip(axes, (predicted, measured), strict=True):
        for i in timeline.intervals:
            step = -1 if i.step is None else i.step
            new = step not in shown
            shown.setdefault(step, f"{step}: {i.kind}")
            axis.barh(devices.index(i.device), (i.end - i.start) * 1e3, left=i.start * 1e3, height=0.8,
                      color=COLOURS[step % len(COLOURS)], edgecolor="white", lw=0.5,
                      label=shown[step] if new else None)  # fmt: skip
        axis.axvline(timeline.seconds * 1e3, color="black", lw=1, ls=":")
        axis.set_title(f"{timeline.source}: {timeline.seconds * 1e3:.4g} ms", loc="left", fontsize=10)
        axis.set_ylabel("device")
        axis.set_yticks(range(len(devices)), [str(d) for d in devices])
    axes[0].invert_yaxis()
    axes[1].set_xlabel("ms")
    figure.legend(loc="outside right upper", fontsize=9, title="step")
    figure.savefig(path, dpi=130, metadata=_METADATA)
    plt.close(figure)

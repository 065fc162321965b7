"""Where the devices of a plan lie: a box a node, a cell a device, nodes that differ in their replica alone folded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from shardplan.launches.handover.handed_plan import ORDER, HandedPlan
from shardplan.launches.handover.scripts import nodes_of
from shardplan.simulation.searching.plans import RankedPlan

SHORT = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
COLOURS = ("#a9cdea", "#fbd38d", "#b5e3c0", "#f6c4cf", "#d6ccf2", "#f3e79b", "#a8e0dc", "#e3c8a8")
MOST_NODES = 24  # drawn, after folding


def placed_markup(plan: HandedPlan) -> str:
    """Return the nodes of a plan's cluster as HTML; colours are pipeline ranks."""
    nodes, inside = nodes_of(plan)
    mesh = RankedPlan(plan.strategy, 0.0, 0.0, plan.order).device_mesh()
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

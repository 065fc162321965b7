"""The bytes of a step on the device that holds most: state, what waits for its backward pass, what is at work.

The account of a job (`strategy.partition.memory`) over arrays of strategies: the same terms, from what layers keep and
have at work (`lifetimes`), how many microbatches a schedule has in flight (`schedules.flight_peaks`), and what a
framework has beside (`strategy.runtimes`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.numbers import LayerCost
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.stages import widths
from shardplan.strategy.runtimes import MEGATRON, MEGATRON_2021, TORCHTITAN
from shardplan.strategy.schedules.flight_peaks import FlightPeaks, equivalent_microbatches, flight_peaks
from shardplan.strategy.strategy import NARROW

Floats = np.ndarray
FULL, SELECTIVE, SELECTIVE_OP = (CODES["recompute"].index(name) for name in ("full", "selective", "selective_op"))
FLASH1 = CODES["attention"].index("flash1")
UNFUSED = CODES["attention"].index("unfused")
AT_ONCE = ("gpipe", "looped-bfs")  # schedules that have all microbatches in flight


class ChunkBytes(NamedTuple):
    """Bytes by chunk of layers, [chunks, n]: of a microbatch, whole or late; once for all of them; and at work."""

    saved: Floats
    late: Floats
    once: Floats
    work: Floats


def memory(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> Floats:
    """Return the peak bytes, [n], of configurations with one number of chunks."""
    waiting, busy = _coming_and_going(c, chunk_bytes(c, cost, counts))
    return (static(c, cost, counts) + p.fragmentation * (waiting + busy)).max(axis=0) + p.context


def holdings(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> dict[str, Floats]:
    """Return what `memory` is the sum of on its largest rank: bytes on each rank by what they are, [ranks, n]."""
    waiting, busy = _coming_and_going(c, chunk_bytes(c, cost, counts))
    found = {what + where: x for (what, where), x in _static(c, cost, counts).items()}
    found |= {"kept for backward passes": waiting, "at work in one layer, or the loss": busy}
    found["more that the allocator holds"] = (p.fragmentation - 1) * (waiting + busy)
    found["driver and libraries"] = np.full_like(busy, p.context)
    return found


def chunk_bytes(c: Configurations, cost: LayerCost, counts: Floats) -> ChunkBytes:
    """Return what chunks have of a microbatch, of all of them, and at work."""
    col, rows = c.columns, cost.rows
    weights, gradients, _ = widths(c)
    zero: Floats = np.zeros((len(counts), len(c)))
    layers, work = saved(c, cost)
    outside = rows.get("saved", zero)[-2:]
    staying = 1 - np.minimum(col["offload_layers"] / counts[:-2].sum(), 1)
    kept = np.einsum("rc,rn->cn", counts[:-2], layers * staying) + np.einsum("rc,rn->cn", counts[-2:], outside)
    late = np.einsum("rc,rn->cn", counts, rows.get("late", zero)) + np.einsum("rc,rn->cn", counts[-2:], outside)
    elements = rows.get("parameters", zero) + rows.get("experts", zero)
    gathered = np.einsum("rc,rn->cn", counts, elements) * weights
    there = counts[:-2, :, None] > 0
    said = {
        "layer": np.max(work[:, None] * there, axis=0),
        "unit": np.max(elements[:-2, None] * there, axis=0) * (col["fsdp"] | (col["zero"] == 3)),
        "weight": weights,
        "gradient": gradients,
        "logits": counts[-1][:, None] * rows["logits"][-1],
        "embedding": counts[-2][:, None] * rows.get("tables", zero)[-2],
    }
    eager = col["fsdp"] & (col["attention"] != FLASH1) & (col["attention"] != UNFUSED)
    at_work = np.where(eager, TORCHTITAN.work_bytes(**said), MEGATRON.work_bytes(**said))
    return ChunkBytes(kept, late, gathered * (col["fsdp"] & (col["zero"] == 2)), at_work)


def _coming_and_going(c: Configurations, chunks: ChunkBytes) -> tuple[Floats, Floats]:
    """What waits for its backward pass, and what is at work, where they are most together: bytes [ranks, n]."""
    col = c.columns
    ranks, interleave = int(col["pipeline"][0]), int(col["interleave"][0])
    out = np.zeros((2, ranks, len(c)))
    code = c.microbatches * len(CODES["schedule"]) + col["schedule"]
    kinds, back = np.unique(code, return_inverse=True)
    pairs = (divmod(kind, len(CODES["schedule"])) for kind in kinds.tolist())
    few = np.array([equivalent_microbatches(CODES["schedule"][s], ranks, m) for m, s in pairs])[back]
    for schedule in np.unique(col["schedule"]).tolist():
        name, mine = CODES["schedule"][schedule], col["schedule"] == schedule
        for m in [1] if name in AT_ONCE else np.unique(few[mine]).tolist():
            at = np.flatnonzero(mine & (name in AT_ONCE or few == m))
            times = c.microbatches[at] if name in AT_ONCE else np.ones(len(at))
            out[:, :, at] = _most(flight_peaks(name, ranks, m, interleave), chunks, at, times)
    return out[0], out[1]


def _most(flight: FlightPeaks, chunks: ChunkBytes, at: np.ndarray, times: Floats) -> Floats:
    """Return what waits and what is at work, at the moment when they are most: bytes [2, ranks, n]."""
    place = flight.stages % len(chunks.saved)
    saved, late, once, work = (x[:, at][place] for x in chunks)  # [ranks, chunks of a rank, n]
    waiting = np.einsum("rek,rkn->ren", flight.whole, saved) * times + np.einsum("rek,rkn->ren", flight.late, late)
    waiting += np.einsum("rek,rkn->ren", (flight.whole + flight.late > 0) * 1.0, once)
    busy = np.take_along_axis(work, flight.at_work[:, :, None], axis=1)
    best = (waiting + busy).argmax(axis=1)[:, None]
    return np.stack([np.take_along_axis(x, best, axis=1)[:, 0] for x in (waiting, busy)])


def least_memory(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> Floats:
    """Return bytes, [n], that none is below, however it recomputes and deals out state."""
    col, rows = c.columns, cost.rows
    zero: Floats = np.zeros((len(counts), len(c)))
    pipeline = int(col["pipeline"][0])
    weights, gradients, state = widths(c)
    ranks = rank_counts(c, counts)
    replicas = (col["data"] * col["context"]).astype(float)
    few = replicas / cost.degrees.get("expert", 1.0) / cost.degrees.get("expert_context", 1.0)
    fixed: Floats = np.zeros((pipeline, len(c)))
    for kind, shares in (("parameters", replicas), ("experts", few)):
        if kind in rows:
            fixed += np.einsum("rpn,rn->pn", ranks, rows[kind]) * (weights + gradients + state) / shares
    inputs = np.minimum(rows.get("saved", zero)[:-2], cost.carried)
    staying = 1 - np.minimum(col["offload_layers"] / counts[:-2].sum(), 1)
    kept = np.einsum("rc,rn->cn", counts[:-2], inputs * staying)
    kept += np.einsum("rc,rn->cn", counts[-2:], rows.get("saved", zero)[-2:])
    work = np.maximum(rows.get("work forward", zero), rows.get("work none", zero))[:-2]
    busy = MEGATRON.work_bytes(
        layer=np.max(work[:, None] * (counts[:-2, :, None] > 0), axis=0),
        unit=0.0,
        weight=weights,
        gradient=gradients,
        logits=counts[-1][:, None] * rows["logits"][-1],
        embedding=counts[-2][:, None] * rows.get("tables", zero)[-2],
    )
    waiting, busy = _coming_and_going(c, ChunkBytes(kept, np.zeros_like(kept), np.zeros_like(kept), busy))
    return (fixed + p.fragmentation * (waiting + busy)).max(axis=0) + p.context


def of_layers(c: Configurations, cost: LayerCost, counts: Floats) -> tuple[Floats, Floats]:
    """Return what the layers alone hold on the rank that has most: state, and what waits to run back, [n] each.

    That is what arXiv 2205.05198 counts: no embedding, no head, nothing that an allocator adds.
    """
    alone = counts.copy()
    alone[-2:] = 0
    layers, _ = saved(c, cost)
    kept = np.einsum("rc,rn->cn", counts[:-2], layers)
    nothing = np.zeros_like(kept)
    waiting, _ = _coming_and_going(c, ChunkBytes(kept, nothing, nothing, nothing))
    return static(c, cost, alone).max(axis=0), waiting.max(axis=0)


def saved(c: Configurations, cost: LayerCost) -> tuple[Floats, Floats]:
    """Return what a layer of each run keeps of a microbatch, and what it has at work while it runs back: [runs, n]."""
    col, rows = c.columns, cost.rows
    zero: Floats = np.zeros_like(rows["saved"])
    unfused, again = col["attention"] == UNFUSED, col["recompute"]
    scores = rows.get("scores", zero)[:-2] * MEGATRON_2021.score * unfused
    masks = MEGATRON_2021.mask * cost.carried / 2 * unfused
    narrow = np.isin(col["precision"], [CODES["precision"].index(name) for name in NARROW])
    # What narrow products read again backward is kept as they read it.
    plain = rows["saved"][:-2] - narrow * rows.get("saved for products", zero)[:-2] / 2
    attention = rows.get("saved scores", zero)[:-2]
    some = [plain + masks, cost.carried + attention + rows.get("second products", zero)[:-2] + masks]
    kept = [cost.carried + 0 * plain, *some, plain + masks + scores]
    back = [rows.get(f"work {name}", zero)[:-2] for name in ("full", "selective", "selective_op", "none")]
    work = [np.maximum(rows.get("work forward", zero)[:-2], x) for x in back]
    busy = [work[0] + scores + masks, work[1] + scores, work[2] + scores, work[3]]
    which = [again == code for code in (FULL, SELECTIVE, SELECTIVE_OP)]
    return np.select(which, kept[:-1], kept[-1]), np.select(which, busy[:-1], busy[-1])


def rank_counts(c: Configurations, counts: Floats) -> Floats:
    """Return how many layers of each run a rank has, and who what is before and behind them: [runs + 2, ranks, n]."""
    col = c.columns
    ranks, interleave = int(col["pipeline"][0]), int(col["interleave"][0])
    out = np.zeros((len(counts), ranks, len(c)))
    for schedule in np.unique(col["schedule"]).tolist():
        at = np.flatnonzero(col["schedule"] == schedule)
        name, m = CODES["schedule"][schedule], int(c.microbatches[at[0]])
        stages = flight_peaks(name, ranks, equivalent_microbatches(name, ranks, m), interleave).stages % counts.shape[1]
        out[:, :, at] = counts[:, stages].sum(axis=2)[:, :, None]
    return out


def static(c: Configurations, cost: LayerCost, counts: Floats) -> Floats:
    """Return parameters, gradients and state on each rank: bytes [ranks, n]."""
    return sum(_static(c, cost, counts).values(), np.zeros((int(c.columns["pipeline"][0]), len(c))))


def _static(c: Configurations, cost: LayerCost, counts: Floats) -> dict[tuple[str, str], Floats]:
    """They by what they are and of what: bytes [ranks, n]."""
    col = c.columns
    weights, gradients, state = widths(c)
    ranks = rank_counts(c, counts)
    replicas = (col["data"] * col["context"]).astype(float)
    few = replicas / cost.degrees.get("expert", 1.0) / cost.degrees.get("expert_context", 1.0)
    zero = np.where(col["fsdp"], 3, col["zero"])
    # Gradients of a microbatch have a place of their own where they are not added up in the product.
    apart = (col["attention"] == UNFUSED) & (gradients != weights) & (col["zero"] > 0)
    gradients = gradients + weights * apart
    out: dict[tuple[str, str], Floats] = {}
    rest = " of all but experts" if "experts" in cost.rows else ""
    for kind, shares, where in (("parameters", replicas, rest), ("experts", few, " of experts")):
        if kind in cost.rows:
            elements = np.einsum("rpn,rn->pn", ranks, cost.rows[kind])
            # A stage that reads a parameter of another's has a copy of it, and of its gradient.
            copied = (
                np.einsum("rpn,rn->pn", ranks, cost.rows["copies"])
                if kind == "parameters" and counts.shape[1] > 1
                else 0.0
            )
            out["parameters", where] = (elements + copied) * (weights / np.where(zero >= 3, shares, 1))
            out["gradients", where] = (elements + copied) * (gradients / np.where(zero >= 2, shares, 1))
            out["optimizer state", where] = elements * (state / np.where(zero >= 1, shares, 1))
    return out

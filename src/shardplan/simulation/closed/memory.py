"""The bytes of a step on the device that holds most: state, what waits for its backward pass, what is at work."""

from __future__ import annotations

import numpy as np

from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.numbers import LayerCost
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.stages import widths
from shardplan.strategy.strategy import NARROW

Floats = np.ndarray
# Unfused attention keeps of a score its softmax, the mask of its dropout and what that leaves; each of a layer's two
# residual sums has a mask of dropout, a byte an element (arXiv 2205.05198, section 4.1).
SCORE, MASKS = 5.0, 2.0
# Bytes of a logit at the loss: the logits, and their softmax in f32, in whose place the gradient is written.
# PyTorch's loss holds them in 16 bits, in f32, and their softmax; once that is made, its gradient is in the place of
# the second. Software of the days of the first fused attention has its fused loss, too.
LOGIT = {False: 6.0, True: 10.0}
FULL, SELECTIVE = (CODES["recompute"].index(name) for name in ("full", "selective"))
FLASH1 = CODES["attention"].index("flash1")
UNFUSED = CODES["attention"].index("unfused")


def memory(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> Floats:
    """Return the peak bytes, [n], of configurations with one number of chunks."""
    waiting, busy = _coming_and_going(c, cost, counts)
    return (static(c, cost, counts) + p.fragmentation * (waiting + busy)).max(axis=0) + p.context


def holdings(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> dict[str, Floats]:
    """Return what `memory` is the sum of on its largest rank: bytes on each rank by what they are, [ranks, n]."""
    waiting, busy = _coming_and_going(c, cost, counts)
    found = {what + where: x for (what, where), x in _static(c, cost, counts).items()}
    found |= {"kept for backward passes": waiting, "at work in one layer, or the loss": busy}
    found["more that the allocator holds"] = (p.fragmentation - 1) * (waiting + busy)
    found["driver and libraries"] = np.full_like(busy, p.context)
    return found


def _coming_and_going(c: Configurations, cost: LayerCost, counts: Floats) -> tuple[Floats, Floats]:
    """What waits for its backward pass, and what is at work: bytes [ranks, n]."""
    layers, whole = saved(c, cost)
    pipeline = int(c.columns["pipeline"][0])
    chunks = np.einsum("rc,rn->cn", counts[:-2], layers)
    ranks = chunks.reshape(-1, pipeline, len(c)).mean(axis=0)  # of a rank's chunks
    waiting = ranks * in_flight(c) * _staying(c, counts)
    work = whole.max(axis=0)
    busy = np.broadcast_to(np.maximum(work, buffers(c, cost)), waiting.shape).copy()
    eager = c.columns["fsdp"] & (c.columns["attention"] != FLASH1)
    logit = np.where(eager, LOGIT[True], LOGIT[False])
    busy[-1] = np.maximum(busy[-1], cost.rows["logits"][-1] * logit)
    return waiting, busy


def _staying(c: Configurations, counts: Floats) -> Floats:
    """Return the part of layers whose saved values are not offloaded to the host, [n]: each rank has as large a one."""
    return 1 - np.minimum(c.columns["offload_layers"] / counts[:-2].sum(), 1)


def least_memory(c: Configurations, cost: LayerCost, counts: Floats, p: Parameters) -> Floats:
    """Return bytes, [n], that none is below, however it recomputes and deals out state."""
    col, rows = c.columns, cost.rows
    pipeline = int(col["pipeline"][0])
    weights, gradients, state = widths(c)
    ranks = counts.reshape(len(counts), -1, pipeline).sum(axis=1)
    replicas = (col["data"] * col["context"]).astype(float)
    few = replicas / cost.degrees.get("expert", 1.0) / cost.degrees.get("expert_context", 1.0)
    fixed: Floats = np.zeros((pipeline, len(c)))
    for kind, shares in (("parameters", replicas), ("experts", few)):
        if kind in rows:
            fixed += np.einsum("rp,rn->pn", ranks, rows[kind]) * (weights + gradients + state) / shares
    layers, whole = saved(c, cost)
    inputs = np.minimum(layers, np.minimum(whole, cost.carried))
    chunks = np.einsum("rc,rn->cn", counts[:-2], inputs).reshape(-1, pipeline, len(c)).mean(axis=0)
    busy = np.broadcast_to(whole.max(axis=0), fixed.shape).copy()
    busy[-1] = np.maximum(busy[-1], rows["logits"][-1] * LOGIT[False])
    return (fixed + p.fragmentation * (chunks * in_flight(c) * _staying(c, counts) + busy)).max(axis=0) + p.context


def of_layers(c: Configurations, cost: LayerCost, counts: Floats) -> tuple[Floats, Floats]:
    """Return what the layers alone hold on the rank that has most: state, and what waits to run back, [n] each.

    That is what arXiv 2205.05198 counts: no embedding, no head, nothing that an allocator adds.
    """
    alone = counts.copy()
    alone[-2:] = 0
    layers, _ = saved(c, cost)
    chunks = np.einsum("rc,rn->cn", counts[:-2], layers)
    ranks = chunks.reshape(-1, int(c.columns["pipeline"][0]), len(c)).mean(axis=0)
    return static(c, cost, alone).max(axis=0), (ranks * in_flight(c)).max(axis=0)


def saved(c: Configurations, cost: LayerCost) -> tuple[Floats, Floats]:
    """Return what a layer of each run keeps of a microbatch, and what it has while it runs back: bytes [runs, n]."""
    col, rows = c.columns, cost.rows
    unfused = col["attention"] == UNFUSED
    scores = rows["scores"][:-2] * SCORE * unfused if "scores" in rows else 0.0
    masks = MASKS * cost.carried / 2 * unfused
    narrow = np.isin(col["precision"], [CODES["precision"].index(name) for name in NARROW])
    # What narrow products read again backward is kept as they read it.
    plain = rows["saved"][:-2] - narrow * rows.get("saved for products", np.zeros_like(rows["saved"]))[:-2] / 2 + masks
    products = rows.get("saved products", np.zeros_like(rows["saved"]))[:-2]
    whole = plain + scores
    kept = np.where(col["recompute"] == FULL, cost.carried, whole)
    # Megatron keeps all but scores; torchtitan's policy what attention and every second product make.
    some = np.where(col["fsdp"], 2 * cost.carried + products / 2, plain)
    return np.where(col["recompute"] == SELECTIVE, some, kept), whole


def in_flight(c: Configurations) -> Floats:
    """Return how many chunks of microbatches wait on each rank under 1F1B, interleaved or not: [ranks, n]."""
    col = c.columns
    pipeline, interleave = int(col["pipeline"][0]), int(col["interleave"][0])
    rank = np.arange(pipeline)[:, None]
    all_of_them = c.microbatches * interleave
    if interleave == 1:
        most = pipeline - rank
    else:
        most = 2 * (pipeline - rank - 1) + (interleave - 1) * pipeline + 1
    gpipe = CODES["schedule"].index("gpipe")
    return np.where(col["schedule"] == gpipe, all_of_them, np.minimum(most, all_of_them)).astype(float)


def buffers(c: Configurations, cost: LayerCost) -> Floats:
    """Return the parameters and gradients of a layer that are whole for a while where they are dealt out: bytes [n]."""
    weights, gradients, _ = widths(c)
    dealt = c.columns["fsdp"] | (c.columns["zero"] == 3)
    most = cost.rows["parameters"][:-2].max(axis=0)
    return most * (2 * weights + gradients) * dealt


def static(c: Configurations, cost: LayerCost, counts: Floats) -> Floats:
    """Return parameters, gradients and state on each rank: bytes [ranks, n]."""
    return sum(_static(c, cost, counts).values(), np.zeros((int(c.columns["pipeline"][0]), len(c))))


def _static(c: Configurations, cost: LayerCost, counts: Floats) -> dict[tuple[str, str], Floats]:
    """They by what they are and of what: bytes [ranks, n]."""
    col = c.columns
    weights, gradients, state = widths(c)
    pipeline = int(col["pipeline"][0])
    ranks = counts.reshape(len(counts), -1, pipeline).sum(axis=1)
    replicas = (col["data"] * col["context"]).astype(float)
    few = replicas / cost.degrees.get("expert", 1.0) / cost.degrees.get("expert_context", 1.0)
    zero = np.where(col["fsdp"], 3, col["zero"])
    # Before gradients were accumulated in the product, those of a microbatch had a place of their own.
    twice = (col["attention"] == UNFUSED) & (gradients != weights) & (col["zero"] > 0)
    gradients = gradients + weights * twice
    out: dict[tuple[str, str], Floats] = {}
    rest = " of all but experts" if "experts" in cost.rows else ""
    for kind, shares, where in (("parameters", replicas, rest), ("experts", few, " of experts")):
        if kind in cost.rows:
            elements = np.einsum("rp,rn->pn", ranks, cost.rows[kind])
            out["parameters", where] = elements * (weights / np.where(zero >= 3, shares, 1))
            out["gradients", where] = elements * (gradients / np.where(zero >= 2, shares, 1))
            out["optimizer state", where] = elements * (state / np.where(zero >= 1, shares, 1))
    return out

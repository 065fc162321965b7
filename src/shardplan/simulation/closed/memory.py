"""The bytes of a step on the device that holds most: state, what waits for its backward pass, what is at work.

The account of a job (`strategy.partition.memory`) over arrays of strategies: the same terms, from what layers keep and
have at work (`lifetimes`), how many microbatches a schedule has in flight (`schedules.flight_peaks`), and what a
framework has beside (`strategy.runtimes`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.simulation.closed.chunk_kinds import ChunkKinds
from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.element_bytes import element_bytes
from shardplan.simulation.closed.numbers import LayerCost
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.part_seconds import copies, several_chunks
from shardplan.strategy.runtimes import MEGATRON, MEGATRON_2021, TORCHTITAN
from shardplan.strategy.strategy import NARROW

Floats = np.ndarray
FULL, SELECTIVE, SELECTIVE_OP = (CODES["recompute"].index(name) for name in ("full", "selective", "selective_op"))
FLASH1 = CODES["attention"].index("flash1")
_LOSS = {name: CODES["loss"].index(name) for name in ("whole", "chunked")}
UNFUSED = CODES["attention"].index("unfused")


class ChunkBytes(NamedTuple):
    """Bytes of a chunk by its kind, [kinds, n]: of a microbatch, whole or late; once for all of them; and at work."""

    saved: Floats
    late: Floats
    once: Floats
    work: Floats


def memory(c: Configurations, cost: LayerCost, kinds: ChunkKinds, p: Parameters) -> Floats:
    """Return the peak bytes, [n], of configurations."""
    waiting, busy = _coming_and_going(kinds, chunk_bytes(c, cost, kinds))
    return (static(c, cost, kinds) + p.fragmentation * (waiting + busy)).max(axis=0) + p.context


def holdings(c: Configurations, cost: LayerCost, kinds: ChunkKinds, p: Parameters) -> dict[str, Floats]:
    """Return what `memory` is the sum of on its largest rank: bytes on each rank by what they are, [ranks, 1].

    `kinds` have every moment, and `c` is one configuration.
    """
    waiting, busy = _coming_and_going(kinds, chunk_bytes(c, cost, kinds))
    rank = kinds.pipelines[0].rank
    fullest = np.lexsort((-(waiting + busy)[:, 0], rank))
    at = fullest[np.unique(rank[fullest], return_index=True)[1]]
    found = {what + where: kinds.on_ranks(x)[at] for (what, where), x in _static(c, cost, kinds).items()}
    found |= {"kept for backward passes": waiting[at], "at work in one layer, or the loss": busy[at]}
    found["more that the allocator holds"] = (p.fragmentation - 1) * (waiting + busy)[at]
    found["driver and libraries"] = np.full((len(at), 1), p.context)
    return found


def chunk_bytes(c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> ChunkBytes:
    """Return what chunks have of a microbatch, of all of them, and at work."""
    col, rows, counts = c.columns, cost.rows, kinds.counts
    size = element_bytes(c)
    zero: Floats = np.zeros((len(counts), len(c)))
    layers, work = saved(c, cost)
    outside, parts = _outside_bytes(c, cost, size.parameter)
    staying = 1 - np.minimum(col["offload_layers"] / kinds.layers, 1)
    ends = np.einsum("rkn,rn->kn", counts[-2:], outside)
    kept = np.einsum("rkn,rn->kn", counts[:-2], layers * staying) + ends
    kept = kept + _sent_bytes(c, cost, kinds)
    late = kinds.sums(rows["late"]) + ends if "late" in rows else ends
    elements = rows.get("parameters", zero) + rows.get("experts", zero)
    gathered = kinds.sums(elements) * size.parameter
    there = counts[:-2] > 0
    copied = kinds.sums(rows["copies"]) * several_chunks(c)
    outside_elements = np.einsum("rkn,rn->kn", counts[-2:], elements[-2:]) + copied
    said = {
        "layer": np.maximum(np.max(work[:, None] * there, axis=0), counts[-1] * parts),
        "unit": np.max(elements[:-2, None] * there, axis=0) * (col["fsdp"] | (col["zero"] == 3)),
        "gathers": col["zero"] != 2,
        "outside": outside_elements * (col["fsdp"] & (col["zero"] != 2)),
        "weight": size.parameter,
        "summed": size.summed,
        "logits": counts[-1] * rows["logits"][-1] * (col["loss"] == _LOSS["whole"]),
        "cut": col["tensor"] > 1,
        "carried": cost.carried * col["tensor"] * (col["sequence_parallel"] & (col["tensor"] > 1)),
        "embedding": counts[-2] * rows.get("tables", zero)[-2],
    }
    at_work = np.where(_is_torchtitan(c), TORCHTITAN.work_bytes(**said), MEGATRON.work_bytes(**said))
    return ChunkBytes(kept, late, gathered * (col["fsdp"] & (col["zero"] == 2)), at_work)


def _is_torchtitan(c: Configurations) -> np.ndarray:
    """Which strategies are for PyTorch's runtime, bool [n]; see `strategy.runtimes.runtime_of`."""
    return c.columns["fsdp"] & (c.columns["attention"] != FLASH1) & (c.columns["attention"] != UNFUSED)


def _sent_bytes(c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> Floats:
    """Return the bytes that a chunk sends of a microbatch and its runtime keeps, [kinds, n]; the last sends none."""
    return cost.carried * (kinds.counts[-1] == 0) * _is_torchtitan(c) * TORCHTITAN.ends


def _outside_bytes(c: Configurations, cost: LayerCost, width: Floats) -> tuple[Floats, Floats]:
    """Return what is saved before and behind the layers, [2, n], and what parts of a loss have at work, [n].

    Of a loss in parts no logits are saved; those of a part are there with their gradients, and then these with what
    they make of the head's gradient.
    """
    chunked, rows = c.columns["loss"] == _LOSS["chunked"], cost.rows
    zero: Floats = np.zeros((2, len(c)))
    logits = rows["logit bytes"][-1] * chunked
    head = (rows.get("parameters", zero)[-1] + rows["copies"][-1]) * width * chunked
    outside = rows.get("saved", zero)[-2:]
    part = logits / c.columns["loss_chunks"]
    return outside - np.stack([0 * logits, logits]), part + np.maximum(part, head)


def _coming_and_going(kinds: ChunkKinds, chunks: ChunkBytes) -> tuple[Floats, Floats]:
    """Return what waits for its backward pass, and what is at work, at each moment: bytes [moments, n]."""
    waiting = kinds.waiting(chunks.saved, chunks.late, chunks.once)
    return waiting, np.take_along_axis(chunks.work, kinds.at_work, axis=0)


def least_memory(c: Configurations, cost: LayerCost, kinds: ChunkKinds, p: Parameters) -> Floats:
    """Return bytes, [n], that none is below, however it recomputes and deals out state."""
    col, rows, counts = c.columns, cost.rows, kinds.counts
    zero: Floats = np.zeros((len(counts), len(c)))
    size = element_bytes(c, cost.moments)
    replicas, few = copies(c, cost)
    shared = [
        rows[kind] / shares * (size.gradient + size.state + np.where(size.has_master & (shares > 1), 0, size.parameter))
        for kind, shares in (("parameters", replicas), ("experts", few))
        if kind in rows
    ]
    fixed = kinds.on_ranks(kinds.sums(sum(shared, zero)))
    inputs = np.minimum(rows.get("saved", zero)[:-2], cost.carried)
    staying = 1 - np.minimum(col["offload_layers"] / kinds.layers, 1)
    kept = np.einsum("rkn,rn->kn", counts[:-2], inputs * staying)
    kept += np.einsum("rkn,rn->kn", counts[-2:], _outside_bytes(c, cost, size.parameter)[0])
    work = np.maximum(rows.get("work forward", zero), rows.get("work none", zero))[:-2]
    busy = MEGATRON.work_bytes(
        layer=np.max(work[:, None] * (counts[:-2] > 0), axis=0),
        unit=0.0,
        gathers=False,
        outside=0.0,
        weight=size.parameter,
        summed=size.summed,
        logits=counts[-1] * rows["logits"][-1] * (col["loss"] == _LOSS["whole"]),
        cut=False,
        carried=0.0,
        embedding=counts[-2] * rows.get("tables", zero)[-2],
    )
    nothing: Floats = np.zeros(())
    waiting, busy = _coming_and_going(kinds, ChunkBytes(kept, nothing, nothing, busy))
    return (fixed + p.fragmentation * (waiting + busy)).max(axis=0) + p.context


def of_layers(c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> tuple[Floats, Floats]:
    """Return what the layers alone hold on the rank that has most: state, and what waits to run back, [n] each.

    That is what arXiv 2205.05198 counts: no embedding, no head, nothing that an allocator adds.
    """
    layers, _ = saved(c, cost)
    alone = kinds.counts.copy()
    alone[-2:] = 0
    kinds, nothing = replace(kinds, counts=alone), np.zeros(())
    waiting = kinds.waiting(np.einsum("rkn,rn->kn", alone[:-2], layers), nothing, nothing)
    return static(c, cost, kinds).max(axis=0), waiting.max(axis=0)


def saved(c: Configurations, cost: LayerCost) -> tuple[Floats, Floats]:
    """Return what a layer of each run keeps of a microbatch, and what it has at work while it runs back: [runs, n]."""
    col, rows = c.columns, cost.rows
    zero: Floats = np.zeros_like(rows["saved"])
    unfused, again = col["attention"] == UNFUSED, c.recompute_codes(len(rows["saved"]) - 2)
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


def static(c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> Floats:
    """Return parameters, gradients and state on the rank of each moment: bytes [moments, n]."""
    return kinds.on_ranks(sum(_static(c, cost, kinds).values(), np.zeros(len(c))))


def _static(c: Configurations, cost: LayerCost, kinds: ChunkKinds) -> dict[tuple[str, str], Floats]:
    """They by what they are and of what: bytes of a chunk, [kinds, n]."""
    col = c.columns
    size = element_bytes(c, cost.moments)
    weights, gradients, summed, state = size
    replicas, few = copies(c, cost)
    titan = _is_torchtitan(c)
    own = weights * ~(titan & size.has_master & TORCHTITAN.alone)
    # Stages that keep parameters gathered over several microbatches add gradients up whole.
    late = titan & TORCHTITAN.late & (col["zero"] == 2) & (col["pipeline"] > 1) & (c.microbatches > 1)
    zero = np.where(col["fsdp"], 3, col["zero"])
    # Gradients of a microbatch have a place of their own where they are not added up in the product.
    apart = (col["attention"] == UNFUSED) & (gradients != weights) & (col["zero"] > 0)
    gradients = gradients + weights * apart
    out: dict[tuple[str, str], Floats] = {}
    rest = " of all but experts" if "experts" in cost.rows else ""
    for kind, shares, where in (("parameters", replicas, rest), ("experts", few, " of experts")):
        if kind in cost.rows:
            elements = kinds.sums(cost.rows[kind])
            # A stage that reads a parameter of another's has a copy of it, and of its gradient.
            copied = kinds.sums(cost.rows["copies"]) * several_chunks(c) if kind == "parameters" else 0.0
            out["parameters", where] = (elements * own + copied * weights) / np.where(zero >= 3, shares, 1)
            dealt = gradients / np.where(zero >= 2, shares, 1)
            out["gradients", where] = (elements + copied) * np.where(late, summed, dealt)
            out["optimizer state", where] = elements * (state / np.where(zero >= 1, shares, 1))
    out["places for what comes back", ""] = _sent_bytes(c, cost, kinds) * c.microbatches
    return out

"""`HeldPeak`: whose bytes a device holds when it holds most, as `strategy.partition.memory` counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import books_of
from shardplan.core.nested import as_nested
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.memory import Holdings, rank_actions, rank_updates, stage_holdings
from shardplan.strategy.partition.programs import TOTAL
from shardplan.strategy.partition.recomputed_layers import model_name


class HeldPeak(NamedTuple):
    """What a device holds when it holds most.

    `parts` are bytes by owner, largest first: parameters, gradients, optimizer, saved values of `microbatches` under
    way, and the rest, which the op under way has; `tensors` are the largest values there, by name.
    """

    rank: int
    stage: int
    kind: str
    microbatch: int | None
    op: str
    nbytes: int
    parts: Mapping[str, int]
    microbatches: int
    tensors: tuple[tuple[str, int], ...]


def attributed(job: Job, found: Holdings, rank: int | None = None) -> HeldPeak:
    """Return what the device that holds most holds, when it does; or the one of a rank."""
    peaks = [int(d.max(initial=0)) for d in found.during]
    rank = peaks.index(max(peaks)) if rank is None else rank
    place = int(found.during[rank].argmax())
    row = rank_actions(job)[rank]
    mine = [s for s in range(job.stages) if job.schedule.owners[s] == rank]
    updates = rank_updates(job, rank)
    stage, kind, k = row[place] if place < len(row) else (*updates[place - len(row)], None)
    stages = stage_holdings(job)
    parts: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    tensors: dict[str, int] = {}
    for s in mine:
        for name, n in stages[s].state.items():
            plain = model_name(name) in job.model.parameters
            owner = "gradients" if name.startswith(TOTAL) else "parameters" if plain else "optimizer"
            parts[owner] += n
            tensors[job.key(s, name)] = n
    for owner, n in (found.beside[rank] if found.beside else {}).items():
        parts[owner] = parts.get(owner, 0) + n
    alive: dict[tuple[int, int], Mapping[str, int]] = {}
    for s, what, m in row[: min(place, len(row))]:
        alive[s, m] = stages[s].left.get(what, {})
    nbytes = int(found.during[rank][place])
    own = stages[stage].left.get("F", {}) if kind == "F" else {}  # it is there when the pass is done
    if sum(parts.values()) + sum(n for names in (*alive.values(), own) for n in names.values()) <= nbytes:
        alive[stage, k or 0] = own or alive.get((stage, k or 0), {})
    saved = sum(sum(names.values()) for names in alive.values())
    for (s, m), names in alive.items():
        tensors |= {f"{job.key(s, name)} of microbatch {m}": n for name, n in names.items()}
    parts["saved"] = parts.get("saved", 0) + saved
    parts["under way"] = max(0, nbytes - sum(parts.values()))
    op = ""
    program = stages[stage].programs.get(kind)
    if program is not None:
        while True:
            books = books_of(program)
            number = int(np.argmax(books.step_workspaces)) if books.step_workspaces else -1
            if number < 0:
                break
            step = program.steps[number]
            inner = as_nested(step.op)
            if inner is None or inner.at_once or not inner.body.steps:
                op = f"{step.op.name} %{', %'.join(step.results)}"
                tensors |= {f"%{n}": program.types[n].local_bytes() for n in (*step.operands, *step.results)}
                break
            program = inner.body
    largest = sorted(tensors.items(), key=lambda each: (-each[1], each[0]))[:8]
    ordered = dict(sorted(parts.items(), key=lambda each: -each[1]))
    under_way = sum(1 for names in alive.values() if names)
    return HeldPeak(rank, stage, kind, k, op, nbytes, ordered, under_way, tuple(largest))

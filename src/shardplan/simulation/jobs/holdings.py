"""The bytes of every rank, action by action, and whose they are: what `certify` proves, with the times of a sweep.

As in `strategy.partition.memory`: all state of the rank's stages, the saved values of every microbatch under way, and
what a program makes beside its inputs. What hangs on a program alone is worked out once for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import books_of
from shardplan.core.nested import nested
from shardplan.core.program import Program
from shardplan.hardware.prices.fabric import Ints
from shardplan.simulation.jobs.laid import LaidJob
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import NEXT, RECEIVED, SAVED, TOTAL

MOVED = ("OFFLOAD", "RELOAD")
_FIRST = ""  # the kind before the first action of a microbatch


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Bytes of a device of each rank, during and after each of its actions, and of its state: int64."""

    during: tuple[Ints, ...]  # by rank [actions]
    after: tuple[Ints, ...]
    state: tuple[int, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that a device of each rank holds."""
        return tuple(int(max(d.max(initial=0), s)) for d, s in zip(self.during, self.state, strict=True))


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


class _Stage(NamedTuple):
    """What an action of a kind does to the bytes of a stage: what it has to come, and leaves, by name."""

    left: Mapping[str, Mapping[str, int]]  # by kind what is there behind it
    extra: Mapping[tuple[str, str], int]  # by the kind before and its own: what it has more than the others' bytes
    programs: Mapping[str, Program]


def holdings(laid: LaidJob) -> Holdings:
    """Return the bytes of every rank, action by action, optimizers last."""
    job = laid.job
    stages = _stages(job)
    states = _state(job)
    during: list[Ints] = []
    after: list[Ints] = []
    total: list[int] = []
    kinds = [_FIRST, "F", "B", "I", "W", *MOVED]
    code = {kind: k for k, kind in enumerate(kinds)}
    for r, row in enumerate(laid.rows):
        mine = [s for s in range(job.stages) if job.schedule.owners[s] == r]
        state = sum(sum(states[s].values()) for s in mine)
        left = np.zeros((job.stages, len(kinds)), dtype=np.int64)
        extra = np.zeros((job.stages, len(kinds), len(kinds)), dtype=np.int64)
        for s in {stage for stage, _, _ in row}:
            for kind, names in stages[s].left.items():
                left[s, code[kind]] = sum(names.values())
            for (before, kind), n in stages[s].extra.items():
                if kind in code:
                    extra[s, code[before], code[kind]] = n
        table = np.array([(s, code[kind], k) for s, kind, k in row], dtype=np.int64).reshape(-1, 3)
        stage, kind = table[:, 0], table[:, 1]
        order = np.lexsort((np.arange(len(table)), stage, table[:, 2]))
        before = np.zeros(len(table), dtype=np.int64)
        same = (table[order[1:]][:, [0, 2]] == table[order[:-1]][:, [0, 2]]).all(axis=1)
        before[order[1:][same]] = kind[order[:-1][same]]
        had, has = left[stage, before], left[stage, kind]
        alive = state + np.cumsum(has - had)
        others = alive - has
        most = np.maximum(others + had, others + extra[stage, before, kind])
        opt = [s for s in mine if (s, "OPT") in laid.maps]
        last = int(alive[-1]) if len(alive) else state
        ends = [max(last, last + stages[s].extra[_FIRST, "OPT"]) for s in opt]
        during.append(
            np.concatenate([np.where(np.isin(kind, [code[k] for k in MOVED]), alive, most), np.array(ends, np.int64)])
        )
        after.append(np.concatenate([alive, np.full(len(opt), last)]))
        total.append(state)
    return Holdings(tuple(during), tuple(after), tuple(total))


def _state(job: Job) -> list[dict[str, int]]:
    """By stage the bytes of what lives between programs; stages with the same programs have the same."""
    found: list[dict[str, int]] = [{} for _ in range(job.stages)]
    known: dict[tuple[str, tuple[int, ...], object], int] = {}
    for key, part in job.parts.items():
        if part.name not in job.batch:
            t = job.state[key]
            say = (t.dtype, t.shape, t.layout)
            if say not in known:
                known[say] = t.local_bytes()
            found[part.stage][part.name] = known[say]
    return found


def _stages(job: Job) -> list[_Stage]:
    known: dict[tuple[tuple[str, int], ...], _Stage] = {}
    by: list[dict[str, int]] = [{} for _ in range(job.stages)]
    for (s, kind), number in job.programs.which.items():
        by[s][kind] = number
    states = _state(job)
    found: list[_Stage] = []
    for s, numbers in enumerate(by):
        key = tuple(sorted(numbers.items()))
        if key not in known:
            known[key] = _stage(job, s, {kind: job.programs.shared[n] for kind, n in numbers.items()}, states[s])
        found.append(known[key])
    return found


def _stage(job: Job, stage: int, programs: Mapping[str, Program], state: Mapping[str, int]) -> _Stage:
    forward = programs["F"]
    later = {n for k in ("B", "I", "W") if k in programs for n, _ in programs[k].inputs}
    names = [
        *(o for o in forward.outputs if o.startswith(SAVED)),
        *(n for n, _ in forward.inputs if n.startswith(RECEIVED)),
    ]
    saved = {n: forward.types[n].local_bytes() for n in names if n.startswith(SAVED) or n in later}
    given = programs["W"].inputs if "W" in programs else ()
    halved = {n: t.local_bytes() for n, t in given if n not in job.batch and n not in state}
    left = {"F": saved, "RELOAD": saved, "I": halved}
    extra: dict[tuple[str, str], int] = {}
    for kind, p in programs.items():
        read = {name for name, _ in p.inputs}
        made = {o.removeprefix(NEXT) for o in p.outputs if o.startswith(NEXT)}
        own = sum(n for name, n in state.items() if name in read | made)
        most = books_of(p).workspace_bytes
        for before in (_FIRST, "F", "I", "RELOAD", "OFFLOAD", "B", "W"):
            rest = sum(n for name, n in left.get(before, {}).items() if name not in read)
            extra[before, kind] = rest + most - own
    return _Stage(left, extra, programs)


def attributed(laid: LaidJob, found: Holdings) -> HeldPeak:
    """Return what the device that holds most holds, when it does."""
    job = laid.job
    peaks = [int(d.max(initial=0)) for d in found.during]
    rank = peaks.index(max(peaks))
    place = int(found.during[rank].argmax())
    row = laid.rows[rank]
    mine = [s for s in range(job.stages) if job.schedule.owners[s] == rank]
    opt = [s for s in mine if (s, "OPT") in laid.maps]
    stage, kind, k = row[place] if place < len(row) else (opt[place - len(row)], "OPT", None)
    states = _state(job)
    parts: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    tensors: dict[str, int] = {}
    for s in mine:
        for name, n in states[s].items():
            plain = name.partition(".copy")[0] in job.model.parameters
            owner = "gradients" if name.startswith(TOTAL) else "parameters" if plain else "optimizer"
            parts[owner] += n
            tensors[job.key(s, name)] = n
    stages = _stages(job)
    alive: dict[tuple[int, int], Mapping[str, int]] = {}
    for s, what, m in row[: min(place, len(row))]:
        alive[s, m] = stages[s].left.get(what, {})
    saved = sum(sum(names.values()) for names in alive.values())
    for (s, m), names in alive.items():
        tensors |= {f"{job.key(s, name)} of microbatch {m}": n for name, n in names.items()}
    nbytes = int(found.during[rank][place])
    parts["saved"] = saved
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
            inner = nested(step.op)
            if inner is None or inner.at_once or not inner.body.steps:
                op = f"{step.op.name} %{', %'.join(step.results)}"
                tensors |= {f"%{n}": program.types[n].local_bytes() for n in (*step.operands, *step.results)}
                break
            program = inner.body
    largest = sorted(tensors.items(), key=lambda each: (-each[1], each[0]))[:8]
    ordered = dict(sorted(parts.items(), key=lambda each: -each[1]))
    under_way = sum(1 for names in alive.values() if names)
    return HeldPeak(rank, stage, kind, k, op, nbytes, ordered, under_way, tuple(largest))

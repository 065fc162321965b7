"""What a rank holds during and after each of its actions, by plain dictionaries over all that is alive."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.accounting import account
from shardplan.core.program import Program
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import NEXT, RECEIVED, SAVED
from shardplan.strategy.schedules.action import MESSAGES


def moments_by_dictionaries(job: Job, rank: int) -> Iterator[tuple[str, int, int]]:
    state = {
        key: t.local_bytes()
        for key, t in job.state.items()
        if job.schedule.owners[job.parts[key].stage] == rank and job.parts[key].name not in job.batch
    }
    most = {key: kept_workspace(job, *key) for key in job.programs if job.schedule.owners[key[0]] == rank}
    alive: dict[tuple[int, int], dict[str, int]] = {}
    row = (a for action in job.schedule.ranks[rank] if action is not None for a in action.leaves)
    actions = [(a.stage, a.kind, a.microbatch, str(a)) for a in row if a.kind not in MESSAGES]
    for stage, kind, k, text in actions:
        mine = {} if k is None else alive.pop((stage, k), {})
        others = sum(state.values()) + sum(n for values in alive.values() for n in values.values())
        after = others
        if k is not None:
            alive[stage, k] = left = left_behind(job, stage, kind, state)
            after = others + sum(left.values())
        if kind in ("OFFLOAD", "RELOAD"):
            yield text, after, after
            continue
        read = {name for name, _ in job.programs[stage, kind].inputs}
        rest = sum(n for name, n in mine.items() if name not in read)
        made = {o.removeprefix(NEXT) for o in job.programs[stage, kind].outputs if o.startswith(NEXT)}
        own = sum(n for key, n in state.items() if key in {job.key(stage, name) for name in read | made})
        before = others + sum(mine.values())
        yield text, max(before, others - own + rest + most[stage, kind]), after
    reduced, freed = dict[int, int](), dict[int, dict[str, int]]()
    left = sum(n for values in alive.values() for n in values.values())
    updates = ((s, kind) for kind in ("NORM", "CLIP", "OPT") for s in range(job.stages))
    for stage, kind in ((s, kind) for s, kind in updates if job.schedule.owners[s] == rank and (s, kind) in most):
        p = job.programs[stage, kind]
        read, made = {n for n, _ in p.inputs}, {o.removeprefix(NEXT) for o in p.outputs if o.startswith(NEXT)}
        given = reduced.pop(stage, 0) if kind == "OPT" else 0
        others = left + sum(state.values()) + sum(reduced.values())
        own = sum(n for key, n in state.items() if key in {job.key(stage, name) for name in read | made})
        during = max(others + given, others - own + most[stage, kind])
        if kind == "NORM":
            later = {n for n, _ in job.programs[stage, "OPT"].inputs}
            gone = [key for n in read - later if (key := job.key(stage, n)) in state]
            freed[stage] = {key: state.pop(key) for key in gone}
            reduced[stage] = sum(p.types[o].local_bytes() for o in p.outputs)
        state |= freed.pop(stage, {}) if kind == "OPT" else {}
        yield f"{stage}{kind}", during, left + sum(state.values()) + sum(reduced.values())


def kept_workspace(job: Job, stage: int, kind: str) -> int:
    """The workspace of a program with what outlives it: state that it only reads, and what the microbatch still has.

    The last action of a microbatch lets go of that, and an update of gradients.
    """
    p, updates = job.programs[stage, kind], ("NORM", "CLIP", "OPT")
    last = next(k for k in ("W", "B", "F") if (stage, k) in job.programs)
    made = {o.removeprefix(NEXT) for o in p.outputs if o.startswith(NEXT)}
    later = {n for n, _ in job.programs[stage, "OPT"].inputs} if kind == "NORM" else set[str]()
    made |= {n for n, _ in p.inputs if kind in updates and n.startswith("gradient.") and n not in later}
    own = [n for n, _ in p.inputs if n not in job.batch and n not in made]
    kept = kind not in (last, *updates)
    stays = [n for n in own if kept or job.key(stage, n) in job.state or n in job.saved_once(stage)]
    return account(Program(p.inputs, p.steps, tuple(dict.fromkeys((*p.outputs, *stays))))).workspace_bytes


def left_behind(job: Job, stage: int, kind: str, state: dict[str, int]) -> dict[str, int]:
    if kind in ("F", "RELOAD"):
        p = job.programs[stage, "F"]
        later = {n for k in ("B", "I", "W") if (stage, k) in job.programs for n, _ in job.programs[stage, k].inputs}
        names = [*(o for o in p.outputs if o.startswith(SAVED)), *(n for n, _ in p.inputs if n.startswith(RECEIVED))]
        return {name: p.types[name].local_bytes() for name in names if name.startswith(SAVED) or name in later}
    given = job.programs[stage, "W"].inputs if kind == "I" else ()
    return {n: t.local_bytes() for n, t in given if n not in job.batch and job.key(stage, n) not in state}

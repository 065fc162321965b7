"""What a rank holds during and after each of its actions, by plain dictionaries over all that is alive."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.accounting import account
from shardplan.core.program import Program
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import NEXT, RECEIVED, SAVED, TOTAL
from shardplan.strategy.schedules.action import MESSAGES


def moments_by_dictionaries(job: Job, rank: int) -> Iterator[tuple[str, int, int]]:
    state = {
        key: t.local_bytes()
        for key, t in job.state.items()
        if job.schedule.owners[job.parts[key].stage] == rank and job.parts[key].name not in job.batch
    }
    most = {key: most_held(job, *key, state) for key in job.programs if job.schedule.owners[key[0]] == rank}
    alive: dict[tuple[int, int], dict[str, int]] = {}
    row = (a for action in job.schedule.ranks[rank] if action is not None for a in action.leaves)
    actions = [(a.stage, a.kind, a.microbatch, str(a)) for a in row if a.kind not in MESSAGES]
    stages = [s for s in range(job.stages) if job.schedule.owners[s] == rank and (s, "OPT") in job.programs]
    for stage, kind, k, text in [*actions, *((s, "OPT", None, f"{s}OPT") for s in stages)]:
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


def most_held(job: Job, stage: int, kind: str, state: dict[str, int]) -> int:
    """What a program holds where whatever outlives it is among its outputs, so that nothing takes its place."""
    p = job.programs[stage, kind]
    gone = {o.removeprefix(NEXT) for o in p.outputs if o.startswith(NEXT)}
    gone |= {name for name, _ in p.inputs if kind == "OPT" and name.startswith(TOTAL)}
    last = kind == next(k for k in ("W", "B", "F") if (stage, k) in job.programs)
    lives = {name for name, _ in p.inputs if job.key(stage, name) in state}
    stays = [n for n, _ in p.inputs if n not in (gone if n in lives else {*job.batch})]
    stays = [n for n in stays if n in lives or not (last or kind == "OPT")]
    return account(Program(p.inputs, p.steps, [*p.outputs, *(n for n in stays if n not in p.outputs)])).workspace_bytes


def left_behind(job: Job, stage: int, kind: str, state: dict[str, int]) -> dict[str, int]:
    if kind in ("F", "RELOAD"):
        p = job.programs[stage, "F"]
        later = {n for k in ("B", "I", "W") if (stage, k) in job.programs for n, _ in job.programs[stage, k].inputs}
        names = [*(o for o in p.outputs if o.startswith(SAVED)), *(n for n, _ in p.inputs if n.startswith(RECEIVED))]
        return {name: p.types[name].local_bytes() for name in names if name.startswith(SAVED) or name in later}
    given = job.programs[stage, "W"].inputs if kind == "I" else ()
    return {n: t.local_bytes() for n, t in given if n not in job.batch and job.key(stage, n) not in state}

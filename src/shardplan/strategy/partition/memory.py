"""What a job holds on a device, action by action, and what it sends: its certificate.

During an action a device holds all state of its rank's stages, the saved values of every microbatch whose forward pass
is done and whose backward pass is not, and what the program makes beside its inputs: what takes the place of state has
its storage. Where B is split, I frees what W does not read, and what it keeps for W, with what came for both, stays
until W is done. Bytes are of the worst device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.core.accounting import account
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves
from shardplan.errors import CertificateError
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import NEXT, RECEIVED, SAVED
from shardplan.strategy.schedules.run import MESSAGES

MOVED = ("OFFLOAD", "RELOAD")


class Moment(NamedTuple):
    """An action of a rank, as a schedule writes it, and the bytes that are live during and after it."""

    action: str
    during: int
    after: int


@dataclass(frozen=True, slots=True)
class JobCertificate:
    """What is proved of a job.

    `peak_bytes` is the most that a device of each rank holds, `state_bytes` what of it lives between steps,
    `saved_bytes` what one microbatch saves on each stage; `axis_bytes` what the worst device receives in a step over
    the groups of each axes; `flops` the operations of the worst device in a step, by stage.
    """

    job: Job
    peak_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    axis_bytes: Mapping[tuple[str, ...], int]
    flops: tuple[float, ...]
    limit: int | None = None

    def check(self) -> None:
        """Derive everything again; raises `CertificateError` for what is not so, and for a peak above the limit."""
        if certify(self.job, self.limit) != self:
            raise CertificateError("the certificate of a job does not say what its programs come to")
        for movements in self.job.movements.values():
            for movement in movements:
                movement.plan.certificate.check()
        worst = max(self.peak_bytes)
        if self.limit is not None and worst > self.limit:
            rank = self.peak_bytes.index(worst)
            raise CertificateError(f"rank {rank} of the job holds {worst} bytes; legal are {self.limit}")


def certify(job: Job, limit: int | None = None) -> JobCertificate:
    """Return the certificate of a job; `limit` is what a device may hold."""
    ranks = range(len(job.schedule.ranks))
    peaks = tuple(max((m.during for m in moments(job, r)), default=state_bytes(job, r)) for r in ranks)
    state = tuple(state_bytes(job, r) for r in ranks)
    saved = tuple(saved_bytes(job, s) for s in range(job.stages))
    runs = job.runs
    flops = tuple(
        sum(runs[key] * _flops(p) for key, p in job.programs.items() if key[0] == s) for s in range(job.stages)
    )
    axes = Counter[tuple[str, ...]]()
    for stage in range(job.stages):
        mine = Counter[tuple[str, ...]]()
        for (s, kind), p in job.programs.items():
            if s == stage:
                for times, op, types in program_leaves(p):
                    got = int(op.received(*types).max(initial=0))
                    if got:
                        mine[op.members(types[0])] += runs[s, kind] * times * got
        for axis, n in mine.items():
            axes[axis] = max(axes[axis], n)
    return JobCertificate(job, peaks, state, saved, dict(axes), flops, limit)


def _flops(program: Program) -> float:
    return sum(times * op.flops(*types) for times, found, types in program_leaves(program) if (op := computing(found)))


def state_bytes(job: Job, rank: int) -> int:
    """Return what a device of a rank holds between steps."""
    return sum(t.local_bytes() for key, t in job.state.items() if _is_state(job, key, rank))


def _is_state(job: Job, key: str, rank: int) -> bool:
    part = job.parts[key]
    return job.schedule.owners[part.stage] == rank and part.name not in job.batch


def saved_bytes(job: Job, stage: int) -> int:
    """Return what a microbatch's forward pass saves on a stage, with what came from others and is read again."""
    return sum(_left(job, stage, "F", {}).values())


def moments(job: Job, rank: int) -> Iterator[Moment]:
    """Yield the actions of a rank in the order of the schedule, then its optimizer's, with the bytes that are live."""
    state = {k: t.local_bytes() for k, t in job.state.items() if _is_state(job, k, rank)}
    most = {key: account(p).workspace_bytes for key, p in job.programs.items() if job.schedule.owners[key[0]] == rank}
    alive: dict[tuple[int, int], dict[str, int]] = {}  # by stage and microbatch
    row = (a for action in job.schedule.ranks[rank] if action is not None for a in action.leaves)
    actions = [(a.stage, a.kind, a.microbatch, str(a)) for a in row if a.kind not in MESSAGES]
    stages = [s for s in range(job.stages) if job.schedule.owners[s] == rank and (s, "OPT") in job.programs]
    for stage, kind, k, text in [*actions, *((s, "OPT", None, f"{s}OPT") for s in stages)]:
        mine = {} if k is None else alive.pop((stage, k), {})
        others = sum(state.values()) + sum(n for values in alive.values() for n in values.values())
        if k is not None:
            alive[stage, k] = left = _left(job, stage, kind, state)
            after = others + sum(left.values())
        else:
            after = others
        if kind in MOVED:
            yield Moment(text, after, after)
            continue
        read = {name for name, _ in job.programs[stage, kind].inputs}
        rest = sum(n for name, n in mine.items() if name not in read)
        made = {o.removeprefix(NEXT) for o in job.programs[stage, kind].outputs if o.startswith(NEXT)}
        own = sum(n for key, n in state.items() if key in {job.key(stage, name) for name in read | made})
        before = others + sum(mine.values())
        yield Moment(text, max(before, others - own + rest + most[stage, kind]), after)


def _left(job: Job, stage: int, kind: str, state: Mapping[str, int]) -> dict[str, int]:
    """What is there of a microbatch behind an action: saved; or what W reads: saved, received, or kept by its I."""
    if kind in ("F", "RELOAD"):
        p = job.programs[stage, "F"]
        later = {n for k in ("B", "I", "W") if (stage, k) in job.programs for n, _ in job.programs[stage, k].inputs}
        names = [*(o for o in p.outputs if o.startswith(SAVED)), *(n for n, _ in p.inputs if n.startswith(RECEIVED))]
        return {name: p.types[name].local_bytes() for name in names if name.startswith(SAVED) or name in later}
    given = job.programs[stage, "W"].inputs if kind == "I" else ()
    return {n: t.local_bytes() for n, t in given if n not in job.batch and job.key(stage, n) not in state}

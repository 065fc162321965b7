"""What a job holds on a device, action by action, and what it sends: its certificate.

During an action a device holds all state of its rank's stages, the saved values of every microbatch whose forward pass
is done and whose backward pass is not, and what the program makes beside its inputs: what takes the place of state has
its storage. Bytes are of the worst device.
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
    flops = tuple(
        sum(_often(job, kind) * _flops(p) for (stage, kind), p in job.programs.items() if stage == s)
        for s in range(job.stages)
    )
    axes = Counter[tuple[str, ...]]()
    for stage in range(job.stages):
        mine = Counter[tuple[str, ...]]()
        for (s, kind), p in job.programs.items():
            if s == stage:
                for times, op, types in program_leaves(p):
                    got = int(op.received(*types).max(initial=0))
                    if got:
                        mine[op.members(types[0])] += _often(job, kind) * times * got
        for axis, n in mine.items():
            axes[axis] = max(axes[axis], n)
    return JobCertificate(job, peaks, state, saved, dict(axes), flops, limit)


def _often(job: Job, kind: str) -> int:
    return 1 if kind == "OPT" else job.strategy.microbatches


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
    p, later = job.programs[stage, "F"], job.programs.get((stage, "B"))
    names = [name for name in p.outputs if name.startswith(SAVED)]
    again = {name for name, _ in later.inputs if name.startswith(RECEIVED)} if later else set[str]()
    return sum(p.types[name].local_bytes() for name in (*names, *(n for n, _ in p.inputs if n in again)))


def moments(job: Job, rank: int) -> Iterator[Moment]:
    """Yield the actions of a rank in the order of the schedule, then its optimizer's, with the bytes that are live."""
    state = {k: t.local_bytes() for k, t in job.state.items() if _is_state(job, k, rank)}
    alive: dict[tuple[int, int], int] = {}
    actions = [(a.stage, a.kind, a.microbatch, str(a)) for a in job.schedule.ranks[rank] if a is not None]
    stages = [s for s in range(job.stages) if job.schedule.owners[s] == rank and (s, "OPT") in job.programs]
    for stage, kind, k, text in [*actions, *((s, "OPT", None, f"{s}OPT") for s in stages)]:
        if kind in ("OFFLOAD", "RELOAD") and k is not None:
            alive[stage, k] = 0 if kind == "OFFLOAD" else saved_bytes(job, stage)
            now = sum(state.values()) + sum(alive.values())
            yield Moment(text, now, now)
            continue
        p = job.programs[stage, kind]
        own = {job.key(stage, name) for name, _ in p.inputs}
        own |= {job.key(stage, o.removeprefix(NEXT)) for o in p.outputs if o.startswith(NEXT)}
        rest = sum(n for key, n in state.items() if key not in own)
        rest += sum(n for (s, m), n in alive.items() if kind == "F" or (s, m) != (stage, k))
        before = sum(state.values()) + sum(alive.values())
        during = max(before, rest + account(p).workspace_bytes)
        if kind == "F" and k is not None:
            alive[stage, k] = saved_bytes(job, stage)
        elif kind == "B" and k is not None:
            alive.pop((stage, k), None)
        yield Moment(text, during, sum(state.values()) + sum(alive.values()))

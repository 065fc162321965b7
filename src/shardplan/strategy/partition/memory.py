"""What a job holds on a device, action by action, and what it sends: its certificate.

During an action a device holds all state of its rank's stages, the saved values of every microbatch whose forward pass
is done and whose backward pass is not, gathered parameters that are kept once for all of a stage's microbatches while
one is in flight, and what the program makes beside them: what it replaces of state it lets go before it begins, and
only the last action of a microbatch lets go of what it reads. Where B is split, I frees what W does not read, and what
it keeps for W, with what came for both, stays until W is done. Bytes are of the worst device. What hangs on a program
alone is worked out once for all stages that share it, and what is alive is a running sum over the actions of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.core.accounting import workspace_beside
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves
from shardplan.errors import CertificateError
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.programs import CLIPPED_UPDATES, NEXT, RECEIVED, SAVED, saved_of_state
from shardplan.strategy.partition.stage_work import held_stacks, stage_work
from shardplan.strategy.runtimes import Runtime
from shardplan.strategy.schedules.action import COMPUTE

Ints = np.ndarray
Axes = tuple[str, ...]
OFFLOADS = ("OFFLOAD", "RELOAD")
_KINDS = ("", *COMPUTE, *OFFLOADS)  # of actions of a microbatch; the first is before all of them
_CODE = {kind: k for k, kind in enumerate(_KINDS)}


class Moment(NamedTuple):
    """An action of a rank, as a schedule writes it, and the bytes that are live during and after it."""

    action: str
    during: int
    after: int


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Bytes of a device of each rank: during and after each of its actions, optimizers last, and of its state.

    `beside` is what of the state is a runtime's, and not what lives between programs, by owner.
    """

    during: tuple[Ints, ...]  # by rank int64 [actions]
    after: tuple[Ints, ...]
    state: tuple[int, ...]
    beside: tuple[Mapping[str, int], ...] = ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that a device of each rank holds."""
        return tuple(int(max(d.max(initial=0), s)) for d, s in zip(self.during, self.state, strict=True))


class StageHoldings(NamedTuple):
    """What actions of a kind do to the bytes of a stage.

    `state` is what lives between programs, `once` what is there while any microbatch is in flight, and `left` by kind
    what is there of a microbatch behind an action, by name; `extra` what an action has more than all else that is
    alive, by the kind before it and its own.
    """

    state: Mapping[str, int]
    once: Mapping[str, int]
    left: Mapping[str, Mapping[str, int]]
    extra: Mapping[tuple[str, str], int]
    programs: Mapping[str, Program]


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
    axis_bytes: Mapping[Axes, int]
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
    """Return the certificate of a job; `limit` is what a device may hold, in bytes."""
    found, stages, runs = holdings(job), stage_holdings(job), job.runs
    works = [_program_work(p) for p in job.programs.shared]
    flops = [0.0] * job.stages
    received = [Counter[Axes]() for _ in range(job.stages)]
    for (stage, kind), number in job.programs.which.items():
        flops[stage] += runs[stage, kind] * works[number].flops
        for axes, nbytes in works[number].axis_bytes.items():
            received[stage][axes] += runs[stage, kind] * nbytes
    worst = {axes: max(each[axes] for each in received) for axes in dict.fromkeys(a for each in received for a in each)}
    saved = tuple(sum(one.left["F"].values()) for one in stages)
    return JobCertificate(job, found.peak_bytes, found.state, saved, worst, tuple(flops), limit)


class _ProgramWork(NamedTuple):
    """The operations of a program, and by axes the bytes that the worst device receives over them."""

    flops: float
    axis_bytes: Mapping[Axes, int]


def _program_work(program: Program) -> _ProgramWork:
    flops, received = 0.0, Counter[Axes]()
    for times, op, types in program_leaves(program):
        if (one := computing(op)) is not None:
            flops += times * one.flops(*types)
        if got := int(op.received_bytes(*types).max(initial=0)):
            received[op.members(types[0])] += times * got
    return _ProgramWork(flops, received)


def state_bytes(job: Job, rank: int) -> int:
    """Return what a device of a rank holds between steps."""
    return holdings(job).state[rank]


def saved_bytes(job: Job, stage: int) -> int:
    """Return what a microbatch's forward pass saves on a stage, with what came from others and is read again.

    What is saved once for all microbatches (`Job.saved_once`) is not of any one.
    """
    return sum(stage_holdings(job)[stage].left["F"].values())


def rank_actions(job: Job) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Return by rank the actions of microbatches in their order: stage, kind and microbatch."""
    leaves = [[a for action in row if action is not None for a in action.leaves] for row in job.schedule.ranks]
    return tuple(
        tuple((a.stage, a.kind, a.microbatch or 0) for a in row if a.kind and a.kind in _CODE) for row in leaves
    )


def rank_updates(job: Job, rank: int) -> list[tuple[int, str]]:
    """Return the stage and kind of what a rank does behind all microbatches, in order."""
    mine = [s for s in range(job.stages) if job.schedule.owners[s] == rank]
    return [(s, kind) for kind in job.updates for s in mine if (s, kind) in job.programs.which]


def moments(job: Job, rank: int) -> Iterator[Moment]:
    """Yield the actions of a rank in the order of the schedule, then its optimizers', with the bytes that are live."""
    found = holdings(job)
    names = [f"{stage}{kind}{k}" for stage, kind, k in rank_actions(job)[rank]]
    names += [f"{stage}{kind}" for stage, kind in rank_updates(job, rank)]
    for name, during, after in zip(names, found.during[rank].tolist(), found.after[rank].tolist(), strict=True):
        yield Moment(name, during, after)


def holdings(job: Job, runtime: Runtime | None = None) -> Holdings:
    """Return the bytes of every rank, action by action, optimizers last.

    What is at work in an action is what its program holds, or, with a `runtime`, what that has.
    """
    stages = stage_holdings(job)
    works = None
    if runtime is not None:
        pairs = zip(stages, held_stacks(job), strict=True)
        works = [stage_work(job, runtime, one.programs, held, one.state) for one, held in pairs]
    owned = [Counter[str]() for _ in stages] if works is None else [Counter(one.state) for one in works]
    left = np.zeros((job.stages, len(_KINDS)), dtype=np.int64)
    extra = np.zeros((job.stages, len(_KINDS), len(_KINDS)), dtype=np.int64)
    for s, one in enumerate(stages):
        for kind, names in ((kind, names) for kind, names in one.left.items() if kind in _CODE):
            left[s, _CODE[kind]] = sum(names.values()) + (works[s].saved if works is not None and kind != "I" else 0)
        for (before, kind), nbytes in one.extra.items():
            if kind in _CODE:
                extra[s, _CODE[before], _CODE[kind]] = nbytes
    moved = [_CODE[kind] for kind in OFFLOADS]
    rows: list[tuple[Ints, Ints, int]] = []
    for rank, row in enumerate(rank_actions(job)):
        mine = [s for s in range(job.stages) if job.schedule.owners[s] == rank]
        state = sum(sum(stages[s].state.values()) + owned[s].total() for s in mine)
        table = np.array([(s, _CODE[kind], k) for s, kind, k in row], dtype=np.int64).reshape(-1, 3)
        stage, kind = table[:, 0], table[:, 1]
        before = _kinds_before(table)
        had, has = left[stage, before], left[stage, kind]
        kept, kept_during = _once(stage, has, had, np.array([sum(one.once.values()) for one in stages]))
        alive = state + np.cumsum(has - had) + kept
        others = alive - has - kept + kept_during
        if works is None:
            during = others + np.maximum(had, extra[stage, before, kind])
        else:
            pairs = zip(stage.tolist(), kind.tolist(), strict=True)
            during = others + np.maximum(had, has) + np.array([works[s].work.get(_KINDS[k], 0) for s, k in pairs], int)
        during = np.where(np.isin(kind, moved), alive, during)
        last = int(alive[-1]) if len(alive) else state
        ends = [*_update_bytes(job, rank, stages, last, all_of_it=works is None)]
        both = np.array(ends, dtype=np.int64).reshape(-1, 2)
        rows.append((np.concatenate([during, both[:, 0]]), np.concatenate([alive, both[:, 1]]), state))
    during, after, state = zip(*rows, strict=True)
    ranks = range(len(rows))
    beside = [{what: sum(owned[s][what] for s in range(job.stages) if job.schedule.owners[s] == rank)
               for what in ("parameters", "gradients", "saved")} for rank in ranks]  # fmt: skip
    return Holdings(during, after, state, tuple(beside))


def _update_bytes(
    job: Job, rank: int, stages: list[StageHoldings], last: int, all_of_it: bool
) -> Iterator[tuple[int, int]]:
    """Yield the bytes during and after each of a rank's updates: what NORM reduces is there until OPT has read it."""
    alive = last
    for stage, kind in rank_updates(job, rank):
        found = stages[stage]
        reduced = sum(found.left.get("NORM", {}).values())
        freed = sum(found.state.get(name, 0) for name in job.let_go(stage, "NORM")) if reduced else 0
        alive -= reduced if kind == "OPT" else 0  # its own inputs are in `extra`
        during = alive + (max(0, found.extra["", kind]) if all_of_it else reduced)
        alive += {"NORM": reduced - freed, "OPT": freed}.get(kind, 0)  # another step begins with sums of nothing
        yield during, alive


def _once(stage: Ints, has: Ints, had: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Bytes [actions] of what stages hold while a microbatch is in flight: behind each action, and during it."""
    after, during = np.zeros(len(stage), dtype=np.int64), np.zeros(len(stage), dtype=np.int64)
    for s in np.flatnonzero(nbytes).tolist():
        mine = stage == s
        flying = np.cumsum(np.where(mine, (has > 0).astype(np.int64) - (had > 0), 0))
        after += nbytes[s] * (flying > 0)
        during += nbytes[s] * ((flying > 0) | mine)
    return after, during


def _kinds_before(table: Ints) -> Ints:
    """The code of the kind of action before each on its stage and microbatch, [actions]; rows of stage, kind, k."""
    order = np.lexsort((np.arange(len(table)), table[:, 0], table[:, 2]))
    before = np.zeros(len(table), dtype=np.int64)
    same = (table[order[1:]][:, [0, 2]] == table[order[:-1]][:, [0, 2]]).all(axis=1)
    before[order[1:][same]] = table[:, 1][order[:-1][same]]
    return before


def stage_holdings(job: Job) -> list[StageHoldings]:
    """Return what actions do to the bytes of every stage; stages with the same programs have the same."""
    numbers: list[dict[str, int]] = [{} for _ in range(job.stages)]
    for (s, kind), number in job.programs.which.items():
        numbers[s][kind] = number
    state = _state(job)
    known: dict[tuple[tuple[str, int], ...], StageHoldings] = {}
    found: list[StageHoldings] = []
    for s, mine in enumerate(numbers):
        key = tuple(sorted(mine.items()))
        if key not in known:
            known[key] = _stage(job, s, {kind: job.programs.shared[n] for kind, n in mine.items()}, state[s])
        found.append(known[key]._replace(state=state[s]))
    return found


def _state(job: Job) -> list[dict[str, int]]:
    """By stage the bytes of what lives between programs, by its name there."""
    found: list[dict[str, int]] = [{} for _ in range(job.stages)]
    known: dict[object, int] = {}
    for key, part in job.parts.items():
        if part.name not in job.batch:
            t = job.state[key]
            alike = t.dtype, t.shape, t.layout, t.mesh.axes, t.mesh.sizes
            if alike not in known:
                known[alike] = t.local_bytes()
            found[part.stage][part.name] = known[alike]
    return found


def _stage(job: Job, stage: int, programs: Mapping[str, Program], state: Mapping[str, int]) -> StageHoldings:
    forward = programs["F"]
    later = {n for k in ("B", "I", "W") if k in programs for n, _ in programs[k].inputs}
    shared = saved_of_state(forward, job.batch)
    once = {name: forward.types[name].local_bytes() for name in sorted(shared)}
    saved = [o for o in forward.outputs if o.startswith(SAVED) and o not in shared]
    saved += [n for n, _ in forward.inputs if n.startswith(RECEIVED) and n in later]
    behind = {name: forward.types[name].local_bytes() for name in saved}
    given = programs["W"].inputs if "W" in programs else ()
    halved = {n: t.local_bytes() for n, t in given if n not in job.batch and n not in state and n not in once}
    left = {"F": behind, "RELOAD": behind, "I": halved}
    if "NORM" in programs:
        left["NORM"] = {o: programs["NORM"].types[o].local_bytes() for o in programs["NORM"].outputs}
    extra: dict[tuple[str, str], int] = {}
    last = "W" if "W" in programs else "B" if "B" in programs else "F"  # of a microbatch, which lets go as it reads
    for kind, p in programs.items():
        made = {o.removeprefix(NEXT) for o in p.outputs if o.startswith(NEXT) or o in once}
        made |= {name for name in job.let_go(stage, kind) if name in state}  # gradients: a live job returns none
        own = {name: t.local_bytes() for name, t in p.inputs if name not in (*state, *once, *job.batch)}
        stays = {name for name, _ in p.inputs if name in (*state, *once) and name not in made}
        if kind not in (last, *CLIPPED_UPDATES):
            stays |= own.keys()
        most = workspace_beside(p, frozenset(stays)) - sum(
            n for name, n in (*state.items(), *once.items()) if name in made
        )
        for before in _KINDS:
            held = left.get(before, {}) | own
            extra[before, kind] = most + sum(n for name, n in held.items() if name in stays or name not in own)
    return StageHoldings(state, once, left, extra, programs)

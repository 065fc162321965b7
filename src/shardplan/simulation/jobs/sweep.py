"""The schedule of a job run over the maps of its actions: when each begins and is done, and when messages arrive.

Every rank does its actions in order. An action takes what the rank's streams were left with, when what it reads of the
same microbatch was done, and when messages for it arrived; a message goes once it is made and the one before it has
arrived. Behind the last action come the totals that go to other stages, the optimizers, and what those send.

Where periods are left out (`periods`), a rank passes the place with its times moved on by as many periods as are left
out, each as long as the last ones were. What a period of all ranks does to their times is a matrix of (max,+): once all
times grew by as much in as many periods as messages reach back, they do so for ever, and so do those of ranks that wait
for nobody slower. A rank is held to that from the same period on as all others. Else fewer periods are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.hardware.prices.fabric import Floats, Ints
from shardplan.simulation.jobs.compiled_job import CompiledJob
from shardplan.simulation.jobs.periods import PeriodCut, Shorter, shorter

_KEEP = 8  # periods at first
_ALIKE = 3  # periods in a row that grow alike where a rank has settled, and those that others keep less, or reach back
_SLACK = 1e-12  # of the time: growths closer than that are equal


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """What a rank did, action by action in its own list; times in seconds, minus infinity for none."""

    actions: tuple[tuple[int, str, int], ...]  # then its optimizers, as microbatch -1
    entry: Floats  # [actions, entries]: with what each began
    begin: Floats  # [actions]: when its first op starts
    done: Floats  # [actions]
    sent: Floats  # [actions, messages, 2]: when what it sends starts and arrives
    left_out: Ints  # bool [actions]: whether it was worked out from a period before


@dataclass(frozen=True, slots=True, eq=False)
class JobSweep:
    """What all ranks did; `last` are messages behind the last action: number, start, end."""

    ranks: tuple[RankRun, ...]
    last: tuple[tuple[int, float, float], ...]
    seconds: float
    periods: int  # that were left out


def sweep(compiled: CompiledJob) -> JobSweep:
    """Return what the ranks of a job do; raises `ScheduleError` where they wait for each other in a circle."""
    keep = _KEEP
    most = max((len(row) for row in compiled.rows), default=0)
    while compiled.fold.microbatches and keep < most:
        for short in shorter(compiled.rows, keep):
            found = _Sweep(compiled, short).run()
            if found is not None:
                return found
        keep *= 4
    found = _Sweep(compiled, None).run()
    assert found is not None, "nothing is left out, so that nothing need settle"
    return found


class _Settling(Exception):
    """A rank has not settled where periods are left out."""


@dataclass(slots=True)
class _RankClock:
    free: Floats
    at: int = 0  # in its list
    passed: int = 0  # cuts
    behind: frozenset[tuple[int, str]] = frozenset()


class _Sweep:
    def __init__(self, compiled: CompiledJob, short: Shorter | None) -> None:
        self.compiled, self.short = compiled, short
        self.rows = compiled.rows if short is None else short.rows
        self.cuts: tuple[tuple[PeriodCut, ...], ...] = tuple(() for _ in self.rows) if short is None else short.cuts
        n = self.n = len(compiled.streams)
        self.ranks = [_RankClock(np.zeros(n)) for _ in self.rows]
        self.done: dict[tuple[int, int], tuple[float, bool]] = {}  # by stage and microbatch; whether behind its cut
        self.mail: dict[tuple[int, int], tuple[float, bool]] = {}  # by message and microbatch when it arrives
        self.line: list[float] = [0.0] * len(compiled.messages)  # by message until when its connection is taken
        self.jump: dict[tuple[int, str], float] = {}  # by stage and kind what is added behind its cut
        self.growth: dict[tuple[int, str], float] = {}
        self.ends = compiled.ends_of(self.rows)
        self.guessed: dict[tuple[int, str], float] = {}
        self.alike = self._windows()
        self.log: list[list[tuple[Floats, float, float, list[tuple[float, float]]]]] = [[] for _ in self.rows]

    def run(self) -> JobSweep | None:
        try:
            for r in self.compiled.turns(self.rows):
                self._act(r, self.ranks[r])
            self._settled()
        except _Settling:
            return None
        last = self._optimize()
        found = tuple(self._rank(r) for r in range(len(self.rows)))
        seconds = max([0.0, *(float(run.done.max(initial=0.0)) for run in found), *(end for _, _, end in last)])
        return JobSweep(found, tuple(last), seconds, self.short.left_out if self.short else 0)

    def _act(self, r: int, rank: _RankClock) -> None:
        """Do the next action of a rank."""
        if rank.passed < len(self.cuts[r]) and rank.at == self._place(r, rank.passed):
            self._pass(r, rank)
        stage, kind, k = self.rows[r][rank.at]
        key = stage, kind
        behind = key in rank.behind
        found = self.ends[r].get(rank.at) or self.compiled.maps[key]
        entry = np.full(self.n + 1 + len(found.taken), -np.inf)
        for place, number in enumerate(self.compiled.taken[key]):
            mail = self.mail[number, k]
            source = self._from(number)
            if behind and not mail[1] and source in self.alike and source not in self.jump:
                self._guess(source, number, k)
            entry[self.n + 1 + place] = self._moved(mail, behind, source)
        entry[: self.n] = rank.free
        done = self.done.get((stage, k))
        if done is not None:
            entry[self.n] = self._moved(done[:2], behind, (stage, "F"))
        rank.at += 1
        after = (found.matrix + entry).max(axis=1).tolist()
        n = self.n
        rank.free = np.array(after[:n])
        begin, end = after[n], after[n + 1]
        self.done[stage, k] = end, behind
        sent: list[tuple[float, float]] = []
        for number, made in zip(self.compiled.sent[key], after[n + 2 :], strict=True):
            start = max(made, self.line[number])
            arrives = self.line[number] = start + self.compiled.messages[number].seconds
            self.mail[number, k] = arrives, behind
            sent.append((start, arrives))
        self.log[r].append((entry, begin, end, sent))

    def _guess(self, source: tuple[int, str], number: int, k: int) -> None:
        """Say what a rank will pass its cut with, which has not come to it yet: by its messages a period before."""
        assert self.short is not None, "nothing is cut"
        times = next(cut.times for cuts in self.cuts for cut in cuts if source in cut.kinds)
        before = self.mail.get((number, k - self.short.left_out // times))
        if before is None:
            raise _Settling
        self.jump[source] = times * (self.mail[number, k][0] - before[0])
        self.guessed[source] = self.jump[source]

    def _from(self, number: int) -> tuple[int, str]:
        stage, kind = self.compiled.messages[number].transfer.source[0], self.compiled.messages[number].transfer.kind
        return (stage, "I") if (stage, kind) not in self.compiled.maps or (stage, "I") in self.jump else (stage, kind)

    def _moved(self, at: tuple[float, bool], behind: bool, source: tuple[int, str]) -> float:
        """A time of a microbatch as the one has it that reads it: those between the cuts of the two were left out."""
        seconds, sent_behind = at
        if behind == sent_behind:
            return seconds
        return seconds + (self.jump.get(source, 0.0) if behind else -self.jump.get(source, 0.0))

    def _place(self, r: int, number: int) -> int:
        """Where a cut is in the shorter list."""
        cuts = self.cuts[r]
        return cuts[number].place - sum(cut.length * cut.times for cut in cuts[:number])

    def _pass(self, r: int, rank: _RankClock) -> None:
        """Pass a cut: move on by the periods that are left out."""
        cut = self.cuts[r][rank.passed]
        rank.passed += 1
        length = cut.length
        log = self.log[r]
        alike = self.alike[next(iter(cut.kinds))]
        if len(log) < (alike + 1) * length:
            raise _Settling
        now = log[-1][2]
        slack = _SLACK * max(now, 1e-300) * 4
        growths: list[float] = []
        grow = (log[-1][2] - log[-1 - alike * length][2]) / alike
        for k in range(1, length + 1):
            rows = [log[-k - j * length] for j in range(alike + 1)]
            for a, b in zip(rows, rows[1:], strict=False):
                steps = [
                    a[1] - b[1],
                    a[2] - b[2],
                    *(x - y for s, t in zip(a[3], b[3], strict=True) for x, y in zip(s, t, strict=True)),
                ]
                growths += (step - grow for step in steps)
        if max(map(abs, growths), default=0.0) > slack:
            raise _Settling
        entries = [log[-j * length][0][: self.n] for j in range(1, alike + 1)]  # with which periods began
        by = (entries[0] - entries[-1]) / (alike - 1)
        for a, b in zip(entries, entries[1:], strict=False):
            if float(np.abs(a - b - by).max()) > slack or float((a - b).max()) > grow + slack:
                raise _Settling
        for k in range(1, length + 1):
            # What is read of an earlier action of the rank was done before its streams were free: they bound it.
            a, b = (log[-k - j * length][0][self.n + 1 :] for j in (0, 1))
            there = np.isfinite(b)
            if float((a[there] - b[there]).max(initial=-np.inf)) > grow + slack:
                raise _Settling
        for stage, kind in cut.kinds:
            self.growth[stage, kind] = grow
            self.jump[stage, kind] = cut.times * grow
            for number in self.compiled.sent[stage, kind]:
                self.line[number] += cut.times * grow
        rank.free = rank.free + cut.times * by
        rank.behind |= cut.kinds

    def _windows(self) -> dict[tuple[int, str], int]:
        """By stage and kind in how many periods before its cut all must have grown alike."""
        kept: dict[tuple[int, str], int] = {}
        at: dict[tuple[int, str], int] = {}
        for r, cuts in enumerate(self.cuts):
            for number, cut in enumerate(cuts):
                place = self._place(r, number)
                for key in cut.kinds:
                    mine = [k for k, (s, kind, _) in enumerate(self.rows[r]) if (s, kind) == key and k < place]
                    each = sum(
                        (s, kind) == key for s, kind, _ in self.compiled.rows[r][cut.place : cut.place + cut.length]
                    )
                    kept[key] = cut.before
                    at[key] = len(mine) // max(1, each)
        # How many periods a message reaches back: by how much the two ends are apart, counted from where they repeat.
        back = 0
        for key, taken in self.compiled.taken.items():
            for source in map(self._from, taken):
                if key in at and source in at:
                    back = max(back, abs((at[key] - kept[key]) - (at[source] - kept[source])))
        least = min(kept.values(), default=0)
        return {key: _ALIKE + back + n - least for key, n in kept.items()}

    def _settled(self) -> None:
        """Hold the ranks against each other: what is taken comes no more slowly than it is taken."""
        slack = _SLACK * 4 * max((log[-1][2] for log in self.log if log), default=0.0)
        for source, jump in self.guessed.items():
            if abs(self.jump[source] - jump) > slack:
                raise _Settling
        for key, taken in self.compiled.taken.items():
            for number in taken:
                source = self._from(number)
                if key in self.growth and self.growth.get(source, 0.0) > self.growth[key] + slack:
                    raise _Settling

    def _optimize(self) -> list[tuple[int, float, float]]:
        """Totals that go to other stages, optimizers, and what they send; the messages among it."""
        compiled, job = self.compiled, self.compiled.job
        found: list[tuple[int, float, float]] = []
        done = [max((end for _, _, end, _ in log), default=0.0) for log in self.log]
        owners = job.schedule.owners

        def send(kind: str) -> None:
            for number, m in enumerate(compiled.messages):
                if m.transfer.kind == kind:
                    start = done[owners[m.transfer.source[0]]]
                    self.mail[number, -1] = start + m.seconds, True
                    found.append((number, start, start + m.seconds))

        self.updates: list[list[tuple[int, str]]] = [[] for _ in self.rows]
        for kind, passing in job.updates.items():
            send(passing)
            for stage in (s for s in range(job.stages) if (s, kind) in compiled.maps):
                r = owners[stage]
                one = compiled.maps[stage, kind]
                mail = [self.mail[number, -1][0] for number in compiled.taken[stage, kind]]
                entry = np.array([*self.ranks[r].free, done[r], *mail])
                after = (one.matrix + entry).max(axis=1)
                self.ranks[r].free = after[: self.n]
                done[r] = max(done[r], float(after[self.n + 1]))
                self.log[r].append((entry, float(after[self.n]), float(after[self.n + 1]), []))
                self.updates[r].append((stage, kind))
        send("OPT")
        return found

    def _rank(self, r: int) -> RankRun:
        """What a rank did, with what was left out put back."""
        log = self.log[r]
        width = max((len(entry) for entry, *_ in log), default=self.n)
        most = max((len(sent) for *_, sent in log), default=0)
        entries = np.full((len(log), width), -np.inf)
        begin, done = (np.array([one[k] for one in log], dtype=np.float64) for k in (1, 2))
        sent = np.full((len(log), most, 2), -np.inf)
        for k, (entry, _, _, messages) in enumerate(log):
            entries[k, : len(entry)] = entry
            if messages:
                sent[k, : len(messages)] = messages
        for cut in self.cuts[r]:
            # The last period before the cut, again and again: each time on by what it was on from the one before.
            nth = np.repeat(np.arange(1, cut.times + 1), cut.length)
            at = cut.place - cut.length + np.tile(np.arange(cut.length), cut.times)
            begin, done, entries, sent = (_again(x, at, cut, nth) for x in (begin, done, entries, sent))
        if self.cuts[r]:
            self._said(r, entries, done)
        fresh = np.ones(len(done), dtype=bool)
        for cut in self.cuts[r]:
            fresh[cut.place : cut.place + cut.length * cut.times] = False
        actions = (*self.compiled.rows[r], *((stage, kind, -1) for stage, kind in self.updates[r]))
        return RankRun(actions, entries, begin, done, sent, ~fresh)

    def _said(self, r: int, entries: Floats, done: Floats) -> None:
        """Write in what was left out when the action before it of the same microbatch was done: periods earlier."""
        row = np.array([(stage, k) for stage, _, k in self.compiled.rows[r]])
        order = np.lexsort((np.arange(len(row)), row[:, 0], row[:, 1]))
        same = (row[order[1:]] == row[order[:-1]]).all(axis=1)
        entries[order[1:][same], self.n] = done[order[:-1][same]]


def _again(times: Floats, at: Ints, cut: PeriodCut, nth: Ints) -> Floats:
    """Times with those that were left out at a cut, worked out from the places `at`."""
    there = np.isfinite(times[at])
    on = np.where(there, times[at], 0.0) - np.where(there, times[at - cut.length], 0.0)
    found = times[at] + on * nth.reshape(-1, *(1,) * (times.ndim - 1))
    return np.concatenate([times[: cut.place], found, times[cut.place :]])

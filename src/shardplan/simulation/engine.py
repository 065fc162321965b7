"""The engine of the event simulation: tasks that wait for tasks, and share resources by max-min fairness.

A task waits until all before it have ended, then for its delay, then works until its amount is done; one that loads
nothing ends with its delay. What is under way at once shares the resources: rates rise together, as high as the
resources allow (progressive filling), so that a task alone takes `delay + amount * largest use / capacity`. A resource
may be a token bucket: what it has not used, up to `bucket`, it may give out at the rate `burst`.

All is arrays: an instant is worked off in full, for all tasks that end or start at it, before time goes on; rates are
solved once for every distinct set of tasks under way, and where tasks start alone and end together, once for all that
do the same.

Source: max-min fairness by progressive filling, Bertsekas and Gallager, Data Networks, section 6.5.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardplan.core.digits import nth_of_each
from shardplan.hardware.prices.fabric import Floats, Ints

_SLACK = 1e-12  # of the time: what would happen so little later happens at once, being the same but for rounding
_EMPTY = 1e-3  # bytes: a bucket with less is empty


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """What tasks need of resources: by row the resources, and how much of each a task takes at rate 1."""

    first: Ints  # int64 [rows + 1]: where the entries of a row start
    resource: Ints  # int64 [entries]
    use: Floats  # float64 [entries], above 0
    capacity: Floats  # float64 [resources]
    bucket: float = 0.0
    burst: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Tasks, and which wait for which; all arrays but `before` and `after` [n]."""

    delay: Floats  # seconds from when all before it have ended to when it works
    amount: Floats  # of work
    row: Ints  # in the table of uses; -1 where it loads nothing
    turn: Ints  # the task that has to have ended before it works, though its delay may run already; -1 for none
    before: Ints  # [waits]: what `after` waits for
    after: Ints  # [waits]


def ends(tasks: Tasks, uses: Uses) -> Floats:
    """Return when every task ends, infinite where it never does: what it waits for does not end.

    >>> uses = Uses(np.array([0, 1]), np.array([0]), np.array([1.0]), np.array([10.0]))
    >>> none = np.full(3, -1)
    >>> wait = np.array([0]), np.array([2])
    >>> ends(Tasks(np.array([0.0, 0.0, 1.0]), np.array([5.0, 15.0, 10.0]), np.zeros(3, int), none, *wait), uses)
    array([1., 2., 3.])
    """
    return _Run(tasks, uses).ended


class _Run:
    """The state of a run: tasks whose delay runs, and tasks at work."""

    def __init__(self, tasks: Tasks, uses: Uses) -> None:
        n = len(tasks.delay)
        self.tasks, self.uses = tasks, uses
        order = np.argsort(tasks.before, kind="stable")
        self.after = tasks.after[order]
        self.count = np.bincount(tasks.before, minlength=n)
        self.start = np.cumsum(self.count) - self.count
        self.missing = np.bincount(tasks.after, minlength=n)
        self.instant = (tasks.row < 0) & (tasks.delay == 0)
        self.turns = bool((tasks.turn >= 0).any())
        self.held = np.full(n, -1)  # by task the one whose turn comes after it, and whose delay is over
        self.ended = np.full(n, math.inf)
        self.now = 0.0
        self.due, self.coming = np.zeros(0), np.zeros(0, dtype=np.int64)  # whose delay runs: until when, and the tasks
        self.busy, self.left = np.zeros(0, dtype=np.int64), np.zeros(0)  # at work, and what is left to do
        self.solved: dict[bytes, Floats] = {}
        self.known: dict[bytes, float] = {}  # by what starts alone: the seconds after which all of it ends at once
        self.tokens = np.full(len(uses.capacity), uses.bucket)
        self._run()

    def _run(self) -> None:
        ready = self._now(np.flatnonzero(self.missing == 0))
        while True:
            alone = not (self.busy.size or self.coming.size or self.uses.bucket)
            key = self._key(ready) if alone else b""
            if alone and key in self.known:
                self.now += self.known[key]
                ready = self._end(ready)
                continue
            began, together = self.now, ready.size
            self.due = np.concatenate([self.due, self.now + self.tasks.delay[ready]])
            self.coming = np.concatenate([self.coming, ready])
            done = self._next()
            while not done.size:
                if not (self.busy.size or self.coming.size):
                    return
                done = self._next()
            if alone and done.size == together:
                self.known[key] = self.now - began
            ready = self._end(done)

    def _key(self, ready: Ints) -> bytes:
        tasks = self.tasks
        return tasks.row[ready].tobytes() + tasks.amount[ready].tobytes() + tasks.delay[ready].tobytes()

    def _end(self, done: Ints) -> Ints:
        """End tasks; return those that wait for nothing any more."""
        if self.turns:
            self.ended[done] = self.now
            next_ones = self.held[done]
            self._work(next_ones[next_ones >= 0])
        return self._now(self._released(done))

    def _now(self, ready: Ints) -> Ints:
        """End those of the tasks that take no time, and what follows from that; return the others, in order."""
        found: list[Ints] = []
        while (at_once := self.instant[ready]).any():
            found.append(ready[~at_once])
            ready = self._released(ready[at_once])
        return np.sort(np.concatenate([*found, ready])) if found else ready

    def _released(self, done: Ints) -> Ints:
        """Note what has ended; return the tasks that now wait for nothing, each once, in order."""
        self.ended[done] = self.now
        count = self.count[done]
        total = int(count.sum())
        shift = self.start[done] - np.cumsum(count) + count
        hit = self.after[np.repeat(shift, count) + np.arange(total)]
        np.subtract.at(self.missing, hit, 1)
        free = hit[self.missing[hit] == 0]
        free.sort()
        if free.size > 1:
            free = free[np.concatenate([[True], free[1:] != free[:-1]])]
        return free

    def _work(self, tasks: Ints) -> None:
        self.busy = np.concatenate([self.busy, tasks])
        self.left = np.concatenate([self.left, self.tasks.amount[tasks]])

    def _next(self) -> Ints:
        """Let time go on to the next event; return what ends."""
        rates = self._rates()
        until = self.due.min() if self.coming.size else math.inf
        if self.busy.size:
            until = min(until, self.now + float((self.left / rates).min()))
        used = np.zeros(0)
        if self.uses.bucket:
            used = self._used(rates)
            drain = used - self.uses.capacity
            emptied = (self.tokens > _EMPTY) & (drain > 0)
            if emptied.any():
                until = min(until, self.now + float((self.tokens[emptied] / drain[emptied]).min()))
        until = max(until, self.now)
        if until == math.inf:
            return np.zeros(0, dtype=np.int64)
        passed, slack = until - self.now, _SLACK * until
        if self.uses.bucket:
            saved = self.tokens + (self.uses.capacity - used) * passed
            self.tokens = np.clip(saved, 0.0, self.uses.bucket)
        self.now = until
        done = self.busy[:0]
        if self.busy.size:
            self.left = self.left - rates * passed
            over = self.left <= rates * slack
            done = self.busy[over]
            if done.size:
                self.busy, self.left = self.busy[~over], self.left[~over]
        if self.coming.size:
            arrived = self.due <= until + slack
            come = self.coming[arrived]
            self.coming, self.due = self.coming[~arrived], self.due[~arrived]
            done = self._start(come, done)
        return done

    def _start(self, come: Ints, done: Ints) -> Ints:
        """Let tasks work whose delay is over; return what has ended, with those of them that load nothing."""
        idle = self.tasks.row[come] < 0
        if idle.any():
            done, come = np.concatenate([done, come[idle]]), come[~idle]
        if self.turns:
            turn = self.tasks.turn[come]
            waits = (turn >= 0) & (self.ended[turn] > self.now)
            if waits.any():
                self.held[turn[waits]] = come[waits]
                come = come[~waits]
        self._work(come)
        return done

    def _used(self, rates: Floats) -> Floats:
        entry, owner = _entries(self.uses, self.tasks.row[self.busy])
        used = self.uses.use[entry] * rates[owner]
        return np.bincount(self.uses.resource[entry], used, len(self.uses.capacity)).astype(np.float64)

    def _rates(self) -> Floats:
        rows = self.tasks.row[self.busy]
        capacity, key = self.uses.capacity, rows.tobytes()
        if self.uses.bucket:
            full = self.tokens > _EMPTY
            capacity = np.where(full, self.uses.burst, capacity)
            key += full.tobytes()
        found = self.solved.get(key)
        if found is None:
            found = self.solved[key] = fair_rates(self.uses, rows, capacity)
        return found


def _entries(uses: Uses, rows: Ints) -> tuple[Ints, Ints]:
    """Return the entries of some rows, one after another, and to which of the rows each belongs."""
    count = uses.first[rows + 1] - uses.first[rows]
    owner = np.repeat(np.arange(len(rows)), count)
    return np.repeat(uses.first[rows], count) + nth_of_each(count), owner


def fair_rates(uses: Uses, rows: Ints, capacity: Floats) -> Floats:
    """Return the max-min fair rates of tasks with these rows of uses, [n].

    >>> uses = Uses(np.array([0, 1, 3, 4]), np.array([0, 0, 1, 1]), np.ones(4), np.array([10.0, 4.0]))
    >>> fair_rates(uses, np.arange(3), uses.capacity)
    array([8., 2., 2.])
    """
    entry, owner = _entries(uses, rows)
    names, resource = np.unique(uses.resource[entry], return_inverse=True)
    use, left = uses.use[entry], capacity[names].astype(np.float64)
    rates = np.full(len(rows), math.inf)
    level = 0.0
    while owner.size:
        demand = np.bincount(resource, use, len(names))
        # The resource that is full first is the bottleneck of its tasks: they have their rate, the others go on rising.
        asked = demand > 0
        room = np.full(len(names), math.inf)
        room[asked] = left[asked] / demand[asked]
        rise = float(room.min())
        level += rise
        left = np.maximum(left - demand * rise, 0.0)
        full = room <= rise * (1 + _SLACK)
        rates[owner[full[resource]]] = level
        going = np.isinf(rates[owner])
        owner, resource, use = owner[going], resource[going], use[going]
    return rates

"""A job device by device and op by op, nothing folded, on links that all that is under way shares.

It stands on the engine: an op of compute is a task of each device, a collective one of each of its groups, any other
movement one for all that take part; a task starts when all before it on its streams, what it reads, and its host's
issue are done. With `shared`, transfers load the resources of the fabric by max-min fairness, whatever stage or stream
they are of; without, each takes its price. What is folded is held against this.

Where messages are met (`rendezvous`), one begins once its receiver has done all before the action that takes it, and
waits for it. A rank that stands, in the order in which one process may run all actions, behind the action that takes
what it sent, waits until that has begun; the rest is in a buffer. Behind the last action both ends wait to the end.
Where frameworks run the job so (`CompiledJob.is_rendezvous`), a message begins so too, and no sender waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardplan.core.pattern import Groups
from shardplan.errors import ShardplanError
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.group_loads import group_loads, resource_starts
from shardplan.simulation.engine import Tasks, Uses, ends
from shardplan.simulation.jobs.compiled_job import CompiledJob
from shardplan.simulation.jobs.streams import OpSpan, StreamRun
from shardplan.simulation.jobs.sweep import JobSweep, RankRun
from shardplan.simulation.jobs.timing import COMPUTE, COPY, OpCost, TimedOp
from shardplan.simulation.trace import HOST
from shardplan.strategy.partition.job_order import order
from shardplan.strategy.schedules.action import value_pass

ENDS = 1 << 62  # a place behind all actions
MOST_TASKS = 1 << 19  # that are followed: some minutes
Waits = tuple[Ints, ...]  # by device the tasks waited for, -1 for none: each int64 [devices]


@dataclass(slots=True)
class TaskList:
    """Tasks in the making, and the table of what they use."""

    fabric: Fabric
    shared: bool
    delay: list[float] = field(default_factory=list[float])
    amount: list[float] = field(default_factory=list[float])
    row: list[int] = field(default_factory=list[int])
    before: list[tuple[Ints, Ints]] = field(default_factory=list["tuple[Ints, Ints]"])
    uses: list[tuple[Ints, Floats]] = field(default_factory=list["tuple[Ints, Floats]"])
    known: dict[tuple[int, bytes], list[int]] = field(default_factory=dict["tuple[int, bytes]", "list[int]"])
    waits: Ints = field(default_factory=lambda: np.zeros((2, 0), np.int64))

    def add(self, delays: Sequence[float], amounts: Sequence[float], rows: Sequence[int]) -> Ints:
        """Add tasks; return their numbers."""
        first = len(self.delay)
        self.delay += delays
        self.amount += amounts
        self.row += rows
        if len(self.delay) > MOST_TASKS:
            raise ShardplanError(
                f"simulate: the job has more than {MOST_TASKS} ops and devices to follow one by one; "
                "legal is a fold of ranks, and links that are not shared"
            )
        return np.arange(first, len(self.delay))

    def one(self, before: Sequence[int]) -> int:
        """Add a task that takes no time, and is done when others are."""
        [made] = self.add([0.0], [0.0], [-1]).tolist()
        self.after(made, before)
        return made

    def after(self, task: int, before: Sequence[int]) -> None:
        """Let a task wait for others."""
        if before:
            self.before.append((np.array(before), np.full(len(before), task)))

    def wait(self, tasks: Ints, others: Waits) -> None:
        """Let tasks wait, one for each device, for those of others."""
        for other in others:
            there = other >= 0
            if there.any():
                self.before.append((other[there], tasks[there]))

    def moving(self, cost: OpCost, fabric: Fabric, devices: Ints) -> Ints:
        """Add the tasks of a movement; return the task of each device."""
        count = len(devices)
        members = cost.pattern.members if isinstance(cost.pattern, Groups) else None
        grouped = cost.price.row is not None and members is not None and members.size == count > 1
        groups = len(members) if grouped and members is not None else 1
        amount = cost.price.transfer - cost.price.own
        if not self.shared or amount <= 0 or not cost.seconds:
            tasks = self.add([cost.seconds] * groups, [0.0] * groups, [-1] * groups)
        else:
            key = id(cost), fabric.topology_ids(devices).tobytes()
            if key not in self.known:
                self.known[key] = self._rows(cost, fabric, amount, grouped)
            delay = cost.price.alpha + cost.price.own
            tasks = self.add([delay] * groups, [amount] * groups, self.known[key])
        if members is None or not grouped:
            return np.full(count, tasks[0])
        place = np.empty(count, dtype=np.int64)
        order = np.argsort(devices)
        place[order[np.searchsorted(devices[order], members.reshape(-1))]] = np.repeat(tasks, members.shape[1])
        return place

    def _rows(self, cost: OpCost, fabric: Fabric, amount: float, grouped: bool) -> list[int]:
        """What a movement takes of the resources at the rate at which it alone takes its price."""
        starts = resource_starts(fabric)
        if grouped and isinstance(cost.pattern, Groups) and cost.price.row is not None:
            groups = len(cost.pattern.members)
            total = np.zeros((groups, int(starts[-1])))
            for one in group_loads(cost.pattern, cost.price.row, fabric):
                np.add.at(total, (one.row, one.resource), one.seconds)
        else:
            total = np.zeros((1, int(starts[-1])))
            for j, seconds in enumerate(cost.price.load):
                if seconds is not None:
                    total[0, starts[j] : starts[j] + len(seconds)] += seconds
        rows: list[int] = []
        for line in total / amount:
            used = np.flatnonzero(line > 0)
            rows.append(len(self.uses) if used.size else -1)
            if used.size:
                self.uses.append((used, line[used]))
        return rows

    def ended(self) -> Floats:
        """Run the tasks; return when each ends."""
        sizes = [len(used) for used, _ in self.uses]
        none = np.zeros(0, dtype=np.int64)
        uses = Uses(
            np.cumsum([0, *sizes]),
            np.concatenate([none, *(used for used, _ in self.uses)]),
            np.concatenate([np.zeros(0), *(use for _, use in self.uses)]),
            np.ones(int(resource_starts(self.fabric)[-1])),
        )
        n = len(self.delay)
        waits = np.unique(
            np.concatenate([np.zeros((2, 0), np.int64), *(np.stack(pair) for pair in self.before)], axis=1), axis=1
        )
        self.waits = waits
        tasks = Tasks(np.array(self.delay), np.array(self.amount), np.array(self.row, np.int64), np.full(n, -1), *waits)
        return ends(tasks, uses)


class _TaskRun(StreamRun):
    """A run of ops that makes tasks: the time of a value, and of a stream, is what has to have ended."""

    def __init__(
        self, free: dict[str, Waits], values: dict[str, Waits], every: _Every, rank: int, stage: int, one: str | None
    ):
        super().__init__(free, values, 0.0, one=one)
        self.every, self.rank, self.stage = every, rank, stage
        self.found: list[tuple[TimedOp, tuple[int, ...], Ints, int, tuple[int, ...]]] = []
        self.made: dict[int, int] = {}  # by task of the first device the number of the op

    def latest_time(self, a: Waits, b: Waits) -> Waits:
        """Return what both wait for."""
        return (*a, *b)

    def _op(self, op: TimedOp, runs: tuple[int, ...]) -> None:
        reads = tuple(wait for name in op.reads for wait in self.values.get(name, ()))
        if op.issued:
            every, tasks = self.every, self.every.tasks
            stream = self.one or op.cost.stream
            devices = every.devices[self.stage]
            issue = -1 if op.cost.stream == COPY else every.issue(self.rank)
            before = (*reads, *self.free[stream], np.full(len(devices), issue))
            if op.cost.stream in (COMPUTE, COPY):
                mine = tasks.add([op.cost.seconds] * len(devices), [0.0] * len(devices), [-1] * len(devices))
            else:
                mine = tasks.moving(op.cost, every.fabrics[self.stage], every.devices[self.stage])
            tasks.wait(mine, before)
            causes = tuple(sorted({self.made[int(w[0])] for w in reads if int(w[0]) in self.made}))
            self.made[int(mine[0])] = len(self.found)
            self.found.append((op, runs, mine, issue, causes))
            self.free[stream] = (mine,)
            reads = (mine,)
        for name in op.results:
            self.values[name] = reads


class _Every:
    def __init__(self, compiled: CompiledJob, shared: bool) -> None:
        self.compiled, self.tasks = compiled, TaskList(compiled.fabric, shared)
        meshes = compiled.job.programs.meshes
        self.devices = [meshes[0].ids for _ in meshes]  # under the names that programs have
        self.fabrics = [self._fabric(mesh.ids) for mesh in meshes]
        self.none = np.zeros(1, dtype=np.int64)
        self.issued = [0] * len(compiled.rows)
        none: dict[str, Waits] = dict.fromkeys(compiled.streams, ())
        self.free = [dict(none) for _ in compiled.rows]
        self.done: dict[tuple[int, int], Waits] = {}
        self.mail: dict[tuple[int, int], Waits] = {}
        self.line: dict[int, int] = {}
        self.begun: dict[tuple[int, int], int] = {}  # by message and microbatch the task with which it begins
        self.away: list[list[tuple[int, int]]] = [
            [] for _ in compiled.rows
        ]  # sent: where in the order it is taken, its begin
        self.places = {(s, value_pass(kind), k): at for at, (s, kind, k) in enumerate(order(compiled.job))}
        self.log: list[list[tuple[tuple[int, str, int], _TaskRun, Waits, list[tuple[int, int]]]]] = [
            [] for _ in compiled.rows
        ]
        self.last: list[tuple[int, int, int]] = []

    def _fabric(self, ids: Ints) -> Fabric:
        first = self.compiled.job.programs.meshes[0].ids
        position = np.full(int(first.max(initial=0)) + 1, -1, dtype=np.int64)
        position[first] = self.compiled.fabric.topology_ids(ids)
        made = Fabric(self.compiled.fabric.topology, position, launch=self.compiled.fabric.launch)
        return made.with_library(self.compiled.fabric.library)

    def issue(self, rank: int) -> int:
        """Add what a host issues next; it waits for nothing."""
        self.issued[rank] += 1
        if not self.compiled.launch:
            return -1
        return int(self.tasks.add([self.issued[rank] * self.compiled.launch], [0.0], [-1])[0])

    def run(self) -> tuple[JobSweep, dict[tuple[int, int], list[OpSpan]]]:
        compiled, job = self.compiled, self.compiled.job
        left = [iter(enumerate(row)) for row in compiled.rows]
        for r in compiled.lists.turns():
            at, action = next(left[r])
            self._act(r, at, *action)
        owners = job.schedule.owners
        for kind, taken in job.updates.items():
            self._send_all(taken, owners)
            for stage in range(job.stages):
                if (stage, kind) in compiled.maps:
                    self._act(owners[stage], ENDS, stage, kind, -1)
        self._send_all("OPT", owners)
        return self._timed()

    def _act(self, r: int, at: int, stage: int, kind: str, k: int) -> None:
        compiled = self.compiled
        one, taken = compiled.map_at(r, at, (stage, kind)), compiled.taken[stage, kind]
        values = {name: self.mail[number, k] for name, number in zip(one.taken, taken, strict=True)}
        earlier = self._all(r) if kind in compiled.job.updates else self.done.get((stage, k), ())
        values |= dict.fromkeys(one.earlier, earlier)
        met = kind in compiled.job.updates  # behind the last action both ends have met
        if compiled.settings.rendezvous and not met:
            self._meet(r, taken, k, self.places.get((stage, value_pass(kind), k), ENDS))
        elif compiled.is_rendezvous and not met:
            for number in (n for n in taken if compiled.messages[n].seconds):
                self.tasks.after(self.begun[number, k], _tasks(self.free[r][COMPUTE]))
        free = self.free[r]
        run = _TaskRun(free, values, self, r, stage, one.one)
        if one.copy is not None:
            values["earlier"] = (*earlier, *free[COMPUTE])
            nodes = (TimedOp(one.copy.cost, ("earlier",), (), 0, issued=True),)
            run.run(nodes)
        else:
            run.hold_streams(one.taken if one.waits else ())
            run.run(one.nodes)
        used: dict[str, Ints] = {}
        for op, _, mine, _, _ in run.found:
            used[one.one or op.cost.stream] = mine
        self.done[stage, k] = tuple(used.values()) or (*earlier, *free[COMPUTE])
        sent: list[tuple[int, int]] = []
        for number, name in zip(compiled.sent[stage, kind], one.sent, strict=True):
            made = run.values.get(name, ())
            sent.append(self._send(number, k, (*made, *free[COMPUTE]) if one.waits else made))
        self.log[r].append(((stage, kind, k), run, self.done[stage, k], sent))

    def _all(self, r: int) -> Waits:
        return tuple(wait for name, waits in self.free[r].items() if name != HOST for wait in waits)

    def _meet(self, r: int, numbers: Sequence[int], k: int, place: int) -> None:
        """Let a rank that has come to a place of the order wait until what it sent to earlier ones has begun.

        Then it waits for messages: each begins once it is made, and the rank has come to it behind the one before.
        """
        begins = [begin for taken, begin in self.away[r] if taken < place]
        self.away[r] = [(taken, begin) for taken, begin in self.away[r] if taken >= place]
        self._behind(r, begins)
        for number in sorted(n for n in numbers if self.compiled.messages[n].seconds):
            self.tasks.after(self.begun[number, k], _tasks(self._all(r)))
            self._behind(r, _tasks(self.mail[number, k]))

    def _behind(self, r: int, ends: Sequence[int]) -> None:
        """Let all that a rank does from now on wait for tasks."""
        if ends:
            last = self.tasks.one(ends)
            for name, waits in self.free[r].items():
                if name != HOST:
                    more = np.full(len(waits[0]) if waits else len(self.devices[0]), last)
                    self.free[r][name] = (*waits, more)

    def _send(self, number: int, k: int, made: Waits) -> tuple[int, int]:
        """Add a message: its steps one after another, behind the one before it."""
        m = self.compiled.messages[number]
        tasks = self.tasks
        gate = tasks.one([*_tasks(made), *([self.line[number]] if number in self.line else [])])
        last = self.begun[number, k] = gate
        for cost in m.steps if m.seconds else ():
            mine = int(tasks.moving(cost, self.compiled.fabric, self.none)[0])
            tasks.before.append((np.array([last]), np.array([mine])))
            last = mine
        self.line[number] = last
        (source, _), (target, _) = m.transfer.source, m.transfer.target
        if m.seconds and k >= 0:
            taken = self.places[target, m.transfer.kind, k]
            self.away[self.compiled.job.schedule.owners[source]].append((taken, gate))
        self.mail[number, k] = (np.full(len(self.devices[target]), last),)
        return gate, last

    def _send_all(self, kind: str, owners: Sequence[int]) -> None:
        for number, m in enumerate(self.compiled.messages):
            if m.transfer.kind == kind:
                ends = {owners[m.transfer.source[0]]: None, owners[m.transfer.target[0]]: None}
                self.last.append((number, *self._send(number, -1, self._all(next(iter(ends))))))
                if self.compiled.settings.rendezvous and m.seconds:  # both ends are there, and wait for it
                    for r in ends:
                        self._meet(r, (), -1, ENDS)
                        self.tasks.after(self.begun[number, -1], _tasks(self._all(r)))
                    for r in ends:
                        self._behind(r, [self.last[-1][2]])

    def _timed(self) -> tuple[JobSweep, dict[tuple[int, int], list[OpSpan]]]:
        ended = self.tasks.ended()
        start = np.zeros(len(ended))
        np.maximum.at(start, self.tasks.waits[1], ended[self.tasks.waits[0]])
        spans: dict[tuple[int, int], list[OpSpan]] = {}
        runs: list[RankRun] = []
        for r, log in enumerate(self.log):
            begin, done, sent = [], [], []
            for i, (_, run, waits, messages) in enumerate(log):
                spans[r, i] = [
                    OpSpan(
                        op,
                        float(ended[issue]) if issue >= 0 else 0.0,
                        float(start[mine[0]]),
                        float(ended[mine[0]]),
                        where,
                        causes,
                    )
                    for op, where, mine, issue, causes in run.found
                ]
                last = max((float(ended[w].max()) for w in waits), default=0.0)
                done.append(last)
                begin.append(spans[r, i][0].start if spans[r, i] else last)
                sent.append([(float(ended[a]), float(ended[b])) for a, b in messages])
            most = max((len(s) for s in sent), default=0)
            table = np.full((len(log), most, 2), -np.inf)
            for i, s in enumerate(sent):
                if s:
                    table[i, : len(s)] = s
            actions = tuple(action for action, *_ in log)
            runs.append(RankRun(actions, np.zeros((len(log), 0)), np.array(begin), np.array(done), table))
        last = tuple((n, float(ended[a]), float(ended[b])) for n, a, b in self.last)
        return JobSweep(tuple(runs), last, float(ended.max(initial=0.0))), spans


def _tasks(waits: Waits) -> list[int]:
    """The tasks that any device waits for, each once."""
    return sorted({int(t) for wait in waits for t in np.unique(wait) if t >= 0})


def per_device_events(compiled: CompiledJob, shared: bool) -> tuple[JobSweep, dict[tuple[int, int], list[OpSpan]]]:
    """Return what the ranks of a job do, and the ops of the first device of each, action by action.

    Raises `ShardplanError` for a job of too many ops and devices.
    """
    return _Every(compiled, shared).run()

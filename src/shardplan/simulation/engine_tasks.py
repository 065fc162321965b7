"""A program as tasks of the engine: one for every group, message, or device of a kernel, of every step it runs.

A collective loads the resources as the row of the library says that `prices.cost.price` takes for it. All tasks of a
step have the step's delay and the same amount, the seconds that the step needs of its busiest resource, so that they
rise together: those on the busiest resource end with it, and a step alone takes its price.

A body that runs often is followed for some runs. Where each of the last ones took every device of the program as long
as the one before, it has settled, and the runs left out take as long again; else more are followed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from shardplan.core.pattern import AtOnce, Groups, InTurn, Messages, StepPattern
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves
from shardplan.hardware.prices.cost import Price, as_messages, price, row_shares
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.group_loads import Loads, group_loads, resource_starts, routes
from shardplan.hardware.prices.library import Library
from shardplan.simulation.engine import Tasks, Uses, ends
from shardplan.simulation.timeline import TimelineError

MOST_STEPS = 1 << 17  # that are followed: some seconds
_FEW = 8  # runs of a body that are followed at first
_ALIKE = 3  # runs that take equally long when a body has settled
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """What devices do at once: tasks, in rounds; devices are places in the program's list of them."""

    task: Ints  # [parts] a task, and
    device: Ints  # [parts] a device of it
    delay: Floats  # [tasks]
    rows: tuple[Ints, ...]  # by round the row of every task in the table of uses, -1 for none: [tasks]
    seconds: float  # of its longest pattern on the busiest resource
    gates: Ints  # the devices, ascending, where some are in several tasks; else none
    gate: Ints  # [parts] the place of the device among all that take part


class _Parts(NamedTuple):
    """The tasks of one pattern."""

    task: Ints  # [parts]
    ids: Ints  # [parts] device ids
    delay: Floats  # [tasks]
    rounds: Sequence[Loads]


class _Entries(NamedTuple):
    """Some rows of the table of uses."""

    sizes: Ints  # how many entries each row has
    resource: Ints
    use: Floats


class _Tasks(NamedTuple):
    """Some tasks."""

    delay: Floats
    amount: Floats
    row: Ints


class _Cut(NamedTuple):
    """Runs of a body that are left out."""

    steps: int  # of the program before the one it is in
    runs: int
    marks: Sequence[Ints]  # by device the task that ends last, after each of the last runs


def clocks(program: Program, steps: Sequence[StepPattern], fabric: Fabric, algorithm: str) -> Floats:
    """Return when every device has ended every step, and all before it: [steps, devices].

    `steps` are the patterns of the program's steps.

    Raises `TimelineError` where a body does not settle, and the program is too long to follow.
    """
    ids, most = np.asarray(program.devices, dtype=np.int64), _FEW
    while (found := _Unrolled(ids, steps, fabric, algorithm, most).clocks()) is None:
        most *= 8
        count = sum(leaf.times for leaf in program_leaves(program))
        if min(most, count) > MOST_STEPS:
            raise TimelineError(
                f"the program runs {count} steps, and its repeats do not settle; legal are at most {MOST_STEPS}"
            )
    return found


class _Unrolled:
    """The tasks of a program, at most `most` runs of a body."""

    def __init__(self, ids: Ints, steps: Sequence[StepPattern], fabric: Fabric, algorithm: str, most: int) -> None:
        self.fabric, self.algorithm = fabric, algorithm
        self.most = most
        self.ids = ids
        self._known: dict[int, list[_Turn]] = {}  # by identity of a pattern
        self._rows = self._count = 0  # of the table of uses, and of tasks, so far
        self._uses: list[_Entries] = []
        self._tasks: list[_Tasks] = []
        self._waits: list[tuple[Ints, Ints]] = []  # what is waited for, and what waits
        self._last = np.full(len(self.ids), -1)  # of every device the task that ends last
        self._left: list[Ints] = []  # the same, after every step
        self._cuts: list[_Cut] = []
        for step in steps:
            self._step(step)
            self._left.append(self._last.copy())

    def clocks(self) -> Floats | None:
        """Return when every device has ended every step; None where a body has not settled."""
        uses = Uses(
            np.cumsum(np.concatenate([np.zeros(1, np.int64), *(part.sizes for part in self._uses)])),
            np.concatenate([_NONE, *(part.resource for part in self._uses)]),
            np.concatenate([np.zeros(0), *(part.use for part in self._uses)]),
            np.ones(int(resource_starts(self.fabric)[-1])),
        )
        tasks = Tasks(
            np.concatenate([np.zeros(0), *(part.delay for part in self._tasks)]),
            np.concatenate([np.zeros(0), *(part.amount for part in self._tasks)]),
            np.concatenate([_NONE, *(part.row for part in self._tasks)]),
            np.full(self._count, -1),
            np.concatenate([_NONE, *(before for before, _ in self._waits)]),
            np.concatenate([_NONE, *(after for _, after in self._waits)]),
        )
        # A device that has done nothing yet has task -1: the zero behind all tasks.
        ended = np.append(ends(tasks, uses), 0.0)
        found = ended[np.array(self._left, np.int64).reshape(-1, len(self.ids))]
        for cut in self._cuts:
            took = np.diff(ended[np.array(cut.marks)], axis=0)
            if not np.allclose(took, took[-1, 0], rtol=1e-9, atol=0.0):
                return None
            found[cut.steps :] += cut.runs * took[-1, 0]
        return found

    def _step(self, step: StepPattern) -> None:
        pattern = as_messages(step.pattern, self.fabric.library)
        if not isinstance(pattern, InTurn):
            for turn in self._turns(step):
                self._add(turn)
            return
        marks: deque[Ints] = deque([self._last.copy()], maxlen=_ALIKE + 1)
        for _ in range(min(pattern.times, self.most)):
            for inner in pattern.steps:
                self._step(inner)
            marks.append(self._last.copy())
        if pattern.times > self.most:
            self._cuts.append(_Cut(len(self._left), pattern.times - self.most, tuple(marks)))

    def _turns(self, step: StepPattern) -> list[_Turn]:
        """What the devices do in a step without a body, in order; equal steps share their pattern."""
        if id(step.pattern) not in self._known:
            found = [self._turn(at_once) for at_once in _in_order(step, self.fabric.library)]
            self._known[id(step.pattern)] = [turn for turn in found if turn.delay.size]
        return self._known[id(step.pattern)]

    def _turn(self, steps: Sequence[StepPattern]) -> _Turn:
        prices = [price(step.pattern, self.fabric, self.algorithm) for step in steps]
        moving = [one for one in prices if one.row is not None]
        delay = max((one.alpha for one in moving), default=0.0) + max((one.own for one in moving), default=0.0)
        seconds = max((one.transfer - one.own for one in moving), default=0.0)
        parts = [self._parts(step, one, delay) for step, one in zip(steps, prices, strict=True) if one.seconds]
        rounds = max((len(part.rounds) for part in parts), default=0)
        rows = [[self._row(part, number, seconds) for part in parts] for number in range(max(rounds, 1))]
        firsts = np.cumsum([0, *(len(part.delay) for part in parts)]).tolist()
        device = np.searchsorted(self.ids, np.concatenate([_NONE, *(part.ids for part in parts)]))
        everyone, gate = np.unique(device, return_inverse=True)
        return _Turn(
            np.concatenate([_NONE, *(first + part.task for first, part in zip(firsts, parts, strict=False))]),
            device,
            np.concatenate([np.zeros(0), *(part.delay for part in parts)]),
            tuple(np.concatenate([_NONE, *row]) for row in rows),
            seconds,
            everyone if len(everyone) < len(device) else _NONE,
            gate,
        )

    def _parts(self, step: StepPattern, cost: Price, delay: float) -> _Parts:
        pattern, devices = step.pattern, step.devices
        if cost.row is not None and isinstance(pattern, Groups):
            groups, k = pattern.members.shape
            rounds = group_loads(pattern, cost.row, self.fabric)
            return _Parts(np.repeat(np.arange(groups), k), pattern.members.reshape(-1), np.full(groups, delay), rounds)
        if cost.row is not None and isinstance(pattern, Messages):
            keep = (pattern.nbytes > 0) & (pattern.sender != pattern.receiver)
            pairs, nbytes = np.stack([pattern.sender[keep], pattern.receiver[keep]], axis=1), pattern.nbytes[keep]
            loads = routes(self.fabric, *self.fabric.topology_ids(pairs.T))
            level = np.searchsorted(resource_starts(self.fabric), loads.resource, side="right") - 1
            factor = nbytes[loads.row] * np.array(row_shares(cost.row, self.fabric))[level]
            moved = Loads(loads.count, loads.row, loads.resource, loads.seconds * factor)
            return _Parts(np.arange(2 * len(pairs)) // 2, pairs.reshape(-1), np.full(len(pairs), delay), [moved])
        return _Parts(np.arange(len(devices)), devices, np.full(len(devices), cost.seconds), ())

    def _row(self, part: _Parts, number: int, seconds: float) -> Ints:
        """Note what the tasks of a round use at the speed at which the turn takes its seconds; return their rows."""
        if number >= len(part.rounds) or not seconds:
            return np.full(len(part.delay), -1)
        loads = part.rounds[number]
        sizes = np.bincount(loads.row, minlength=loads.count)
        self._uses.append(_Entries(sizes, loads.resource, loads.seconds / seconds))
        self._rows += loads.count
        return np.where(sizes > 0, self._rows - loads.count + np.arange(loads.count), -1)

    def _add(self, turn: _Turn) -> None:
        """Put the tasks behind what their devices did last."""
        first, count = self._count, len(turn.delay)
        final = first + (len(turn.rows) - 1) * count
        self._count = final + count + len(turn.gates)
        last = self._last[turn.device]
        came = last >= 0
        earlier = np.arange(first, final)
        self._waits += [(last[came], first + turn.task[came]), (earlier, earlier + count)]
        amount, still = np.full(count, turn.seconds), np.zeros(len(turn.gates))
        delays = chain([turn.delay], [np.zeros(count)] * (len(turn.rows) - 1))
        self._tasks += [_Tasks(delay, amount, row) for delay, row in zip(delays, turn.rows, strict=True)]
        done = final + turn.task
        if turn.gates.size:
            # A device goes on when all its tasks have ended.
            gates = np.arange(final + count, self._count)
            self._waits.append((done, gates[turn.gate]))
            self._tasks.append(_Tasks(still, still, np.full(len(gates), -1)))
            self._last[turn.gates] = gates
        else:
            self._last[turn.device] = done


def _in_order(step: StepPattern, library: Library) -> Iterator[list[StepPattern]]:
    """Yield what a step consists of: one after another, what runs at once."""
    pattern = as_messages(step.pattern, library)
    if isinstance(pattern, InTurn):
        for _ in range(pattern.times):
            for part in pattern.steps:
                yield from _in_order(part, library)
    elif isinstance(pattern, AtOnce):
        for parts in zip_longest(*(_in_order(part, library) for part in pattern.steps)):
            yield [one for part in parts if part is not None for one in part]
    else:
        yield [replace(step, pattern=pattern)]

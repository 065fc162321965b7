"""Actions as intervals of ops, and the chain of ops that the makespan consists of.

An action is opened when it is asked for: its ops are run on streams from the times with which it began. An op has one
cause, that which let it start: an op whose result it reads, the one before it on its stream, a message, what an earlier
action has made, or its host, which issues from the first instant on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.simulation.interval import TOLERANCE, Interval
from shardplan.simulation.jobs.compiled_job import CompiledJob
from shardplan.simulation.jobs.streams import OpSpan
from shardplan.simulation.jobs.sweep import JobSweep
from shardplan.simulation.jobs.timing import COMPUTE
from shardplan.simulation.trace import HOST


class OpPlace(NamedTuple):
    """An op that was run: rank, number of the action in the rank's list, number of the op in it."""

    rank: int
    action: int
    op: int


class MessagePlace(NamedTuple):
    """A message: its number, and the microbatch (-1 behind the last action)."""

    number: int
    microbatch: int


class HostPlace(NamedTuple):
    """What a host issued until then."""

    rank: int
    action: int
    until: float


Place = OpPlace | MessagePlace | HostPlace


@dataclass(frozen=True)
class OpenedOps:
    """The ops of a run, opened action by action, or given: where devices were followed one by one (`apart`)."""

    compiled: CompiledJob
    sweep: JobSweep
    spans: dict[tuple[int, int], list[OpSpan]] = field(default_factory=dict[tuple[int, int], list[OpSpan]])
    apart: bool = False

    def ops(self, rank: int, action: int) -> list[OpSpan]:
        """Return the ops of an action of a rank."""
        key = rank, action
        if key not in self.spans:
            run = self.sweep.ranks[rank]
            stage, kind, _ = run.actions[action]
            found = self.compiled.map_at(rank, action, (stage, kind))
            entry = run.entry[action, : len(self.compiled.streams) + 1 + len(found.taken)].tolist()
            self.spans[key] = found.opened(entry)
        return self.spans[key]

    @cached_property
    def messages(self) -> dict[MessagePlace, tuple[float, float, int, int]]:
        """When each message starts and arrives, and the rank and action that send it (-1: behind the last)."""
        found: dict[MessagePlace, tuple[float, float, int, int]] = {}
        for r, run in enumerate(self.sweep.ranks):
            for i, ((stage, kind, k), times) in enumerate(zip(run.actions, run.sent.tolist(), strict=True)):
                for number, (start, end) in zip(self.compiled.sent[stage, kind], times, strict=False):
                    found[MessagePlace(number, k)] = start, end, r, i
        owners = self.compiled.job.schedule.owners
        for number, start, end in self.sweep.last:
            r = owners[self.compiled.messages[number].transfer.source[0]]
            found[MessagePlace(number, -1)] = start, end, r, -1
        return found

    @cached_property
    def takers(self) -> dict[MessagePlace, tuple[int, int]]:
        """The rank and action that wait for each message, where receivers do."""
        if not self.compiled.is_rendezvous:
            return {}
        return {
            MessagePlace(number, k): (r, i)
            for r, run in enumerate(self.sweep.ranks)
            for i, (stage, kind, k) in enumerate(run.actions)
            for number in self.compiled.taken[stage, kind]
        }

    @cached_property
    def lines(self) -> dict[int, tuple[list[float], list[MessagePlace]]]:
        """By message when each of its microbatches arrives, in order, and which it is."""
        found: dict[int, list[tuple[float, MessagePlace]]] = {}
        for place, (_, end, _, _) in self.messages.items():
            found.setdefault(place.number, []).append((end, place))
        return {number: ([e for e, _ in sorted(mine)], [p for _, p in sorted(mine)]) for number, mine in found.items()}

    @cached_property
    def before(self) -> list[dict[int, int]]:
        """By rank and action the action before it of the same stage and microbatch."""
        found: list[dict[int, int]] = []
        for run in self.sweep.ranks:
            last: dict[tuple[int, int], int] = {}
            mine: dict[int, int] = {}
            for i, (stage, _, k) in enumerate(run.actions):
                if (stage, k) in last:
                    mine[i] = last[stage, k]
                last[stage, k] = i
            found.append(mine)
        return found

    @property
    def slack(self) -> float:
        """Times closer than that are equal: sums that were put together in another order."""
        return 64 * TOLERANCE * self.sweep.seconds

    def times(self, place: Place) -> tuple[float, float]:
        """Return when it starts and ends."""
        if isinstance(place, OpPlace):
            op = self.ops(place.rank, place.action)[place.op]
            return op.start, op.end
        if isinstance(place, MessagePlace):
            return self.messages[place][:2]
        return 0.0, place.until

    def cause(self, place: Place) -> Place | None:
        """Return what let it start; None where it starts at 0, or nothing before it took time."""
        start = self.times(place)[0]
        if start <= self.slack or isinstance(place, HostPlace):
            return None
        found = self._op_cause(place, start) if isinstance(place, OpPlace) else self._message_cause(place, start)
        return found

    def _message_cause(self, place: MessagePlace, start: float) -> Place | None:
        _, _, r, i = self.messages[place]
        ends, places = self.lines[place.number]
        k = bisect_left(ends, start - self.slack)
        if self.compiled.messages[place.number].seconds > 0 and k < len(ends) and ends[k] <= start + self.slack:
            return places[k]
        found = self._ending(r, i if i >= 0 else len(self.sweep.ranks[r].actions) - 1, start)
        if found is None and place in self.takers:
            receiver, action = self.takers[place]
            return self._ending(receiver, action - 1, start, COMPUTE)
        return found

    def _op_cause(self, place: OpPlace, start: float) -> Place | None:
        r, i, number = place
        ops = self.ops(r, i)
        op = ops[number]
        stream = self._stream(op)
        own = [OpPlace(r, i, k) for k in op.reads]
        same = next((k for k in range(number - 1, -1, -1) if self._stream(ops[k]) == stream), None)
        own += [] if same is None else [OpPlace(r, i, same)]
        for other in own:
            if abs(self.times(other)[1] - start) <= self.slack:
                return other
        run = self.sweep.ranks[r]
        stage, kind, k = run.actions[i]
        for mail in (MessagePlace(number, k) for number in sorted(self.compiled.taken[stage, kind])):
            if mail in self.messages and abs(self.messages[mail][1] - start) <= self.slack:
                return mail if self.compiled.messages[mail.number].seconds > 0 else self._message_cause(mail, start)
        if same is None and (found := self._ending(r, i - 1, start, stream)) is not None:
            return found
        if (earlier := self.before[r].get(i)) is not None and (
            found := self._ending(r, earlier, start, deep=1)
        ) is not None:
            return found
        if abs(op.issued - start) <= self.slack and self.compiled.launch > 0:
            return HostPlace(r, i, op.issued)
        return self._ending(r, i - 1, start)

    def _stream(self, op: OpSpan) -> str:
        return op.op.cost.stream if self.compiled.settings.overlap else COMPUTE

    def _ending(self, r: int, i: int, at: float, stream: str = "", deep: int = 1 << 30) -> Place | None:
        """The last op, of an action and those before it, that ends then, on a stream or any."""
        run = self.sweep.ranks[r]
        for action in range(i, max(-1, i - deep), -1):
            if run.done[action] < at - self.slack and not stream:
                continue
            ops = self.ops(r, action)
            for k in range(len(ops) - 1, -1, -1):
                if stream and self._stream(ops[k]) != stream:
                    continue
                if abs(ops[k].end - at) <= self.slack:
                    return OpPlace(r, action, k)
                if stream:
                    return None
        return None

    def path(self) -> list[Place]:
        """Return the chain from 0 to the makespan."""
        last: Place | None = None
        ends = self.sweep.last[-1:] and [
            m for m in self.sweep.last if m[2] >= self.sweep.seconds - self.slack and m[2] > m[1]
        ]
        if ends:
            last = MessagePlace(ends[0][0], -1)
        else:
            for r, run in enumerate(self.sweep.ranks):
                late = np.flatnonzero(run.done >= self.sweep.seconds - self.slack)
                if late.size and (last := self._ending(r, int(late[-1]), self.sweep.seconds)) is not None:
                    break
        found: list[Place] = []
        while last is not None:
            found.append(last)
            last = self.cause(last)
        return found[::-1]

    def interval(
        self, place: Place, *, device: int | None = None, causes: tuple[int, ...] = (), there: bool = False
    ) -> Interval:
        """Return a place as an interval of the device that stands for its rank, a message at its sender or `there`."""
        start, end = self.times(place)
        if isinstance(place, MessagePlace):
            m = self.compiled.messages[place.number]
            side = m.transfer.target if there else m.transfer.source
            name = f"{'receive' if there else 'send'} %{side[1]}" + (
                f" of {place.microbatch}" if place.microbatch >= 0 else ""
            )
            who = self.compiled.job.programs.meshes[side[0]].devices[0] if device is None else device
            return Interval(who, f"{'receive' if there else 'send'} {m.stream}", start, end, name, "message", None,
                            m.steps[-1].received_bytes if there and m.steps else 0, causes)  # fmt: skip
        run = self.sweep.ranks[place.rank]
        stage, kind, k = run.actions[place.action]
        who = self.compiled.job.programs.meshes[stage].devices[0] if device is None else device
        action = f"{stage}{kind}{k if k >= 0 else ''}"
        if isinstance(place, HostPlace):
            return Interval(who, HOST, start, end, f"{action} issued", "launch", None, 0, causes)
        op = self.ops(place.rank, place.action)[place.op]
        rows = f"[{','.join(map(str, op.runs))}]" if op.runs else ""
        results = ", ".join(f"%{n}" for n in op.op.results)
        kind = op.op.cost.kind
        name = f"{action} {kind} {results}{rows}"
        return Interval(who, self._stream(op), start, end, name, kind, None, op.op.cost.received_bytes, causes)

    def every(self, ranks: Sequence[int]) -> Iterator[tuple[Place, Place | None]]:
        """Yield all places of some ranks, and messages between them, with their causes, in order of their starts."""
        places: list[Place] = []
        for r in ranks:
            places += (
                OpPlace(r, i, k) for i in range(len(self.sweep.ranks[r].actions)) for k in range(len(self.ops(r, i)))
            )
        owners = self.compiled.job.schedule.owners
        chosen = set(ranks)
        for m in self.messages:
            transfer = self.compiled.messages[m.number].transfer
            if {owners[transfer.source[0]], owners[transfer.target[0]]} <= chosen and self.compiled.messages[
                m.number
            ].seconds > 0:
                places.append(m)
        places.sort(key=lambda p: (*self.times(p), p))
        for place in places:
            yield place, self.cause(place)

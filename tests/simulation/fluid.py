"""A fluid simulation in plain Python, one message at a time: what the event simulation must equal.

Devices are polled until none gets further; then time goes on to the next thing that happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardplan.simulation.script import Script

CLOSE = 1e-11


@dataclass(eq=False)
class Flow:
    """Something under way: `left` to do from `ready` on, once what is `behind` has ended."""

    uses: dict[int, float]  # of every resource at rate 1
    ready: float
    left: float
    behind: Flow | None = None
    end: float | None = None


Poll = Callable[[float], list[Flow]]  # what starts now, given what has ended


def run(poll: Poll, capacity: Sequence[float]) -> float:
    """Let time go on until nothing happens any more; return the end."""
    now, flows = 0.0, list[Flow]()
    while True:
        while fresh := poll(now):
            flows += fresh
        active = [f for f in flows if f.ready <= now * (1 + CLOSE) and (f.behind is None or f.behind.end is not None)]
        rates = filled([f.uses for f in active], capacity)
        ends = [now + f.left / r if f.uses else now for f, r in zip(active, rates, strict=True)]
        until = min([*ends, *(f.ready for f in flows if f.ready > now * (1 + CLOSE))], default=math.inf)
        if until == math.inf:
            return now
        for flow, rate, end in zip(active, rates, ends, strict=True):
            flow.left -= rate * (until - now) if flow.uses else 0.0
            if end <= until * (1 + CLOSE):
                flow.end = until
        now, flows = until, [f for f in flows if f.end is None]


def filled(uses: Sequence[dict[int, float]], capacity: Sequence[float]) -> list[float]:
    """Raise all rates together; those that cross a full resource stay."""
    rates = [0.0] * len(uses)
    rising = {k for k, use in enumerate(uses) if use}
    while rising:
        room = {
            r: capacity[r] - sum(rates[k] * use.get(r, 0) for k, use in enumerate(uses))
            for k in rising
            for r in uses[k]
        }
        rise = min(room[r] / sum(uses[k].get(r, 0) for k in rising) for r in room)
        full = {r for r in room if room[r] <= rise * sum(uses[k].get(r, 0) for k in rising) * (1 + CLOSE)}
        for k in rising:
            rates[k] += rise
        rising = {k for k in rising if not full & set(uses[k])}
    return rates


@dataclass(eq=False)
class Task:
    """A part of a step: the devices it needs, its delay, and what it uses, round by round."""

    devices: list[int]
    delay: float
    rounds: list[dict[int, float]]
    flows: list[Flow] = field(default_factory=list[Flow])

    @property
    def done(self) -> bool:
        return len(self.flows) == max(1, len(self.rounds)) and self.flows[-1].end is not None


def steps_seconds(steps: Sequence[Sequence[Task]], amounts: Sequence[float], count: int) -> float:
    """Return the seconds of steps of tasks, each with its amount, on resources of capacity 1."""
    mine = {
        d: [[t for t in step if d in t.devices] for step in steps]
        for d in {d for s in steps for t in s for d in t.devices}
    }

    def at(d: int) -> int:
        return next((k for k, tasks in enumerate(mine[d]) if not all(t.done for t in tasks)), len(steps))

    def poll(now: float) -> list[Flow]:
        fresh: list[Flow] = []
        places = {d: at(d) for d in mine}
        for k, (step, amount) in enumerate(zip(steps, amounts, strict=True)):
            for task in step:
                if all(places[d] == k for d in task.devices) and not task.done:
                    nth = len(task.flows)
                    if nth < max(1, len(task.rounds)) and (not nth or task.flows[-1].end is not None):
                        uses = task.rounds[nth] if task.rounds else {}
                        task.flows.append(Flow(uses, now + (0 if nth else task.delay), amount))
                        fresh.append(task.flows[-1])
        return fresh

    return run(poll, [1.0] * count)


def script_seconds(
    script: Script, way: Callable[[int, int], tuple[list[int], float]], capacity: Sequence[float]
) -> float:
    """Return the seconds of a script, where `way` gives the resources that a message crosses, and its latency."""
    posted = dict.fromkeys(script.devices, False)  # whether a device has sent what it may
    sent: dict[tuple[int, int], list[tuple[float, int]]] = {}
    awaited: dict[tuple[int, int], list[float]] = {}
    flows: dict[tuple[int, int], list[Flow]] = {}
    clock = [0.0]

    def device(d: int) -> Iterator[bool]:
        taken: dict[int, int] = {}
        for stage, rounds in script.rounds_of(d):
            due: list[list[tuple[tuple[int, int], int]]] = []  # by round, which messages of which peers
            mine: list[tuple[tuple[int, int], int]] = []
            for peer, _ in (m for _, takes in rounds for m in takes):
                awaited.setdefault((peer, d), []).append(clock[0])
            for number, (sends, takes) in enumerate(rounds):
                for pair, nth in due[number - stage.in_flight] if number >= stage.in_flight else ():
                    while arrived(pair) < nth:
                        yield False
                for peer, n in sends:
                    sent.setdefault((d, peer), []).append((clock[0], n))
                    mine.append(((d, peer), len(sent[d, peer])))
                due.append([])
                for peer, _ in takes:
                    taken[peer] = taken.get(peer, 0) + 1
                    due[-1].append(((peer, d), taken[peer]))
            while not all(arrived(pair) >= nth for pair, nth in (*mine, *(x for takes in due for x in takes))):
                yield False

    def arrived(pair: tuple[int, int]) -> int:
        return sum(f.end is not None for f in flows.get(pair, []))

    running = {d: device(d) for d in posted}

    def poll(now: float) -> list[Flow]:
        clock[0] = now
        for d in list(running):
            if next(running[d], True):
                del running[d]
        fresh: list[Flow] = []
        for pair, messages in sent.items():
            known = flows.setdefault(pair, [])
            while len(known) < min(len(messages), len(awaited.get(pair, []))):
                when, n = messages[len(known)]
                resources, latency = way(*pair)
                ready = max(when, awaited[pair][len(known)]) + latency
                known.append(Flow(dict.fromkeys(resources, 1.0), ready, n, known[-1] if known else None))
                fresh.append(known[-1])
        return fresh

    return run(poll, capacity)

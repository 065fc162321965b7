"""Event simulation of the ring engine over a tree of links: every device at its own pace, flows sharing links fairly.

The messages are those of a `Script` (for a program, `ring.script_of` gives it); each goes over the directed edges of a
`Tree`. The model is fluid:

- a message can flow once its sender has posted it and its receiver has posted its receive, `latency` later, and once
  the message before it from that sender to that receiver has arrived: as on one connection;
- flows share every edge they cross by max-min fairness (progressive filling); an edge's rate is its bandwidth times
  `payload_share`;
- an edge is a token bucket: what it has not used, up to `bucket` bytes, it may send at `burst` bytes per second;
- a device posts and waits as the rules of `script` say; local work takes no time, and there is no barrier anywhere.

So groups that share a link slow each other down, ring steps of one group overlap with those of another, and a device
enters its next step while others are still in the last one.

Source: max-min fairness by progressive filling, Bertsekas and Gallager, Data Networks, section 6.5.2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.core.program import Program
from shardplan.errors import ShardplanError
from shardplan.hardware.placement import Placement
from shardplan.plans.pricing import Where, fabric_of
from shardplan.simulation.interval import Interval
from shardplan.simulation.ring import script_of
from shardplan.simulation.script import Script, ScriptError, ScriptRound
from shardplan.simulation.timeline import Timeline
from shardplan.simulation.tree import Tree

_LEFT = 1e-3  # bytes: a flow with less is done, a bucket with less empty; rounding leaves less, messages have more
_NAMED = 8  # devices that an error names


@dataclass(frozen=True, slots=True)
class Constants:
    """What links and processes add to bandwidth; raises `ShardplanError` for what is no link."""

    # Seconds from when a message can flow to when it does; None for the latency of the outermost level it crosses.
    latency: float | None = None
    payload_share: float = 1.0  # of the bandwidth, what is payload and not headers
    bucket: float = 0.0  # bytes that an idle edge saves up; 0 for none
    burst: float = 2.5e9  # bytes per second at which it sends them: about what one core, whose work it is, copies

    def __post_init__(self) -> None:
        """Refuse what is no link."""
        legal = (self.latency is None or self.latency >= 0) and 0 < self.payload_share <= 1 and self.bucket >= 0
        if not (legal and self.burst > 0):
            raise ShardplanError(
                f"{self}: legal are a latency and a bucket of 0 or more, a payload share above 0 and at most 1, and a "
                "positive burst"
            )


def simulate(
    program: Program | Script, where: Where, *, shared: bool = False, constants: Constants | None = None
) -> Timeline:
    """Return the timeline of a program, or a script, as its messages predict it.

    Args:
        program: What to run; a program runs on the ring engine.
        where: A topology whose ids are the device ids, or a placement; its levels are switches with one uplink.
        shared: Whether the devices of an innermost parent share one half-duplex link, as processes on one host.
        constants: By default the topology's latencies, all of the bandwidth, and no bucket.

    Returns:
        One interval a step and device that communicates in it, waiting included, caused by its own one before.

    Raises:
        TopologyError: The topology is no such tree, or a device is not on it.
        ScriptError: A script waits for what never comes.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllGather
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> from shardplan.hardware.level import Level
    >>> from shardplan.hardware.topology import Topology
    >>> t = TensorType("f32", (1000,), ("x",), Mesh(x=2))
    >>> p = Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
    >>> simulate(p, Topology("", (Level("gpu", 2, "switch", 1e9, 1e-6),))).seconds
    3e-06
    """
    script = script_of(program) if isinstance(program, Program) else program
    topology = where.topology if isinstance(where, Placement) else where
    laid = (where.mesh,) if isinstance(where, Placement) else ()
    fabric = fabric_of(where, program.meshes if isinstance(program, Program) else laid)
    devices = script.devices
    home = dict(zip(devices, fabric.topology_ids(np.array(devices, dtype=np.int64)).tolist(), strict=True))
    return _EventRun(script, Tree(topology, shared), home, constants or Constants()).timeline()


@dataclass(slots=True)
class _Pair:
    """The messages from one device to another, in order."""

    path: tuple[int, ...]
    latency: float
    sent: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # when posted, bytes
    awaited: list[float] = field(default_factory=list[float])  # when its receive was posted
    arrived: int = 0
    left: float = 0.0  # bytes of the one under way
    flowing: bool = False

    def ready(self) -> float | None:
        """When the next message can flow; None while one of its two ends has not posted it."""
        k = self.arrived
        if k >= len(self.sent) or k >= len(self.awaited):
            return None
        return max(self.sent[k][0], self.awaited[k]) + self.latency


class _Span(NamedTuple):
    """When a device was in a step, in seconds."""

    step: int
    start: float
    end: float


@dataclass(slots=True)
class _Device:
    """Where a device is in its stages."""

    stages: list[tuple[int, tuple[ScriptRound, ...]]]  # step, rounds
    stage: int = 0
    round: int = -1  # -1 before the receives of the stage are posted
    wanted: dict[int, int] = field(default_factory=dict[int, int])  # by sender: messages waited for so far
    began: float = 0.0
    spans: list[_Span] = field(default_factory=list[_Span])


class _EventRun:
    """The state of a simulation: devices in their stages, messages that wait for their time, messages that flow.

    An instant is worked off in full before time goes on: every device that something happened to posts and waits as
    far as it can, then every message whose time has come flows. Time then goes to the next event: a message that
    arrives, one whose time comes, a bucket that runs empty.
    """

    def __init__(self, script: Script, tree: Tree, home: dict[int, int], constants: Constants) -> None:
        self.script = script
        self.tree = tree
        self.home = home
        self.constants = constants
        self.rate = [e.bandwidth * constants.payload_share for e in tree.edges]
        self.bucket = constants.bucket * constants.payload_share
        self.tokens = [self.bucket] * len(tree.edges)
        self.pairs: dict[tuple[int, int], _Pair] = {}
        stages: dict[int, list[tuple[int, tuple[ScriptRound, ...]]]] = {d: [] for d in script.devices}
        for stage in script.stages:
            for device, rounds in stage.rounds.items():
                stages[device].append((stage.step, rounds))
        self.devices = {d: _Device(own) for d, own in stages.items()}
        self.timers: list[tuple[float, tuple[int, int]]] = []  # a heap: when, and (sender, receiver)
        self.flows: list[_Pair] = []
        self.ends: dict[int, tuple[int, int]] = {}  # by identity of a pair: sender, receiver
        self.now = 0.0
        self._run()

    def pair(self, sender: int, receiver: int) -> _Pair:
        """Return the connection from a device to another."""
        found = self.pairs.get((sender, receiver))
        if found is None:
            path = self.tree.path(self.home[sender], self.home[receiver])
            latency = self.constants.latency
            if latency is None:
                levels = [self.tree.edges[k].level for k in path]
                latency = self.tree.topology.levels[min(levels)].latency if levels else 0.0
            found = self.pairs[sender, receiver] = _Pair(path, latency)
            self.ends[id(found)] = (sender, receiver)
        return found

    def _run(self) -> None:
        moving = list(self.devices)
        while True:
            while moving:
                self._advance(moving.pop())
            self._start()
            if not self.flows:
                if not self.timers:
                    break
                self._idle(self.timers[0][0])
                continue
            moving = self._flow()
        waiting = [d for d, device in self.devices.items() if device.stage < len(device.stages)]
        if waiting:
            raise ScriptError(f"devices {waiting[:_NAMED]} wait for messages that are never sent")

    def _advance(self, d: int) -> None:
        """Let a device post and wait as far as it can at this instant."""
        device = self.devices[d]
        while device.stage < len(device.stages):
            step, rounds = device.stages[device.stage]
            if device.round < 0:
                for one in rounds:
                    for peer, _ in one.receives:
                        self.pair(peer, d).awaited.append(self.now)
                        self._announce(peer, d)
                self._begin(device, d, rounds, 0)
            while device.round < len(rounds) and self._got(device, d, rounds[device.round]):
                self._begin(device, d, rounds, device.round + 1)
            if device.round < len(rounds) or not self._delivered(d, rounds):
                return
            last = device.stage + 1 == len(device.stages) or device.stages[device.stage + 1][0] != step
            if last:
                device.spans.append(_Span(step, device.began, self.now))
                device.began = self.now
            device.stage += 1
            device.round = -1

    def _begin(self, device: _Device, d: int, rounds: Sequence[ScriptRound], number: int) -> None:
        """Post the sends of a round; after the last one there is only the wait for what was sent."""
        device.round = number
        if number == len(rounds):
            return
        for peer, nbytes in rounds[number].sends:
            self.pair(d, peer).sent.append((self.now, nbytes))
            self._announce(d, peer)
        for peer, _ in rounds[number].receives:
            device.wanted[peer] = device.wanted.get(peer, 0) + 1

    def _got(self, device: _Device, d: int, one: ScriptRound) -> bool:
        return all(self.pair(peer, d).arrived >= device.wanted[peer] for peer, _ in one.receives)

    def _delivered(self, d: int, rounds: Sequence[ScriptRound]) -> bool:
        peers = {peer for one in rounds for peer, _ in one.sends}
        return all(self.pair(d, peer).arrived == len(self.pair(d, peer).sent) for peer in peers)

    def _announce(self, sender: int, receiver: int) -> None:
        """Set the timer of a connection whose next message has both ends posted."""
        pair = self.pairs[sender, receiver]
        ready = pair.ready()
        if ready is not None and not pair.flowing:
            heapq.heappush(self.timers, (max(ready, self.now), (sender, receiver)))

    def _start(self) -> None:
        """Let messages flow whose time has come."""
        while self.timers and self.timers[0][0] <= self.now:
            _, key = heapq.heappop(self.timers)
            pair = self.pairs[key]
            ready = pair.ready()
            if pair.flowing or ready is None or ready > self.now:
                continue
            pair.flowing = True
            pair.left = float(pair.sent[pair.arrived][1])
            self.flows.append(pair)

    def _idle(self, until: float) -> None:
        """Let time go on while nothing flows, and every edge save up."""
        for k, rate in enumerate(self.rate):
            self.tokens[k] = min(self.bucket, self.tokens[k] + rate * (until - self.now))
        self.now = until

    def _flow(self) -> list[int]:
        """Let time go on to the next event, and return the devices for which something arrived or was delivered."""
        full = [self.constants.burst if n > _LEFT else r for n, r in zip(self.tokens, self.rate, strict=True)]
        rates = fair_rates([p.path for p in self.flows], full)
        used = [0.0] * len(full)
        for pair, rate in zip(self.flows, rates, strict=True):
            for k in pair.path:
                used[k] += rate
        step = min((p.left / r if p.path else 0.0) for p, r in zip(self.flows, rates, strict=True))
        if self.timers:
            step = min(step, self.timers[0][0] - self.now)
        for k, rate in enumerate(self.rate):
            if self.tokens[k] > _LEFT and used[k] > rate:
                step = min(step, self.tokens[k] / (used[k] - rate))
        step = max(step, 0.0)  # a timer may be a rounding error late
        for k, rate in enumerate(self.rate):
            self.tokens[k] = min(self.bucket, max(0.0, self.tokens[k] + (rate - used[k]) * step))
        self.now += step
        moving: list[int] = []
        going: list[_Pair] = []
        for pair, rate in zip(self.flows, rates, strict=True):
            pair.left = pair.left - rate * step if pair.path else 0.0
            if pair.left > _LEFT:
                going.append(pair)
                continue
            pair.flowing = False
            pair.arrived += 1
            ends = self.ends[id(pair)]
            moving += ends
            self._announce(*ends)
        self.flows = going
        return list(dict.fromkeys(moving))

    def timeline(self) -> Timeline:
        """Return what every device did when."""
        received = self.script.received()
        # Everybody's first span, then everybody's second: steps stay together where all take part in them.
        rows = sorted((k, d) for d, device in self.devices.items() for k in range(len(device.spans)))
        intervals: list[Interval] = []
        before: dict[int, int] = {}
        for k, d in rows:
            step, start, end = self.devices[d].spans[k]
            causes = (before[d],) if d in before else ()
            before[d] = len(intervals)
            intervals.append(
                Interval(
                    device=d,
                    stream="comm",
                    start=start,
                    end=end,
                    name=self.script.names[step],
                    kind=self.script.kinds[step],
                    step=step,
                    received_bytes=received.get((d, step), 0),
                    causes=causes,
                )
            )
        return Timeline(tuple(intervals), title=f"events, {self.tree.topology.name or 'topology'}")


def fair_rates(paths: Sequence[tuple[int, ...]], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of every flow, infinite where it crosses nothing; a path is the edges it crosses.

    >>> fair_rates([(0,), (0, 1), (1,)], [10.0, 4.0])
    [8.0, 2.0, 2.0]
    """
    rates = [math.inf] * len(paths)
    left: dict[int, float] = {}
    crossing: dict[int, set[int]] = {}
    for flow, path in enumerate(paths):
        for edge in path:
            left[edge] = capacity[edge]
            crossing.setdefault(edge, set()).add(flow)
    while crossing:
        # The edge that gives its flows least is their bottleneck: they have their rate, and the others share the rest.
        share, edge = min((left[e] / len(flows), e) for e, flows in crossing.items())
        for flow in crossing.pop(edge):
            rates[flow] = share
            for other in paths[flow]:
                if other != edge and other in crossing:
                    left[other] = max(0.0, left[other] - share)
                    crossing[other].discard(flow)
                    if not crossing[other]:
                        del crossing[other]
    return rates

"""A script timed message by message: every device at its own pace, messages sharing the links.

- a message can flow once its sender has posted it and its receiver has posted its receive, `latency` later, and once
  the message before it from that sender to that receiver has arrived: as on one connection;
- messages that flow share every port and link they cross by max-min fairness of bytes per second; a resource's rate is
  its bandwidth times `payload_share`;
- a resource is a token bucket: what it has not used, up to `bucket` bytes, it may send at `burst` bytes per second;
- a device posts and waits as the rules of `script` say; local work takes no time, and there is no barrier anywhere.

So groups that share a link slow each other down, ring steps of one group overlap with those of another, and a device
enters its next step while others are still in the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.errors import ShardplanError, TopologyError
from shardplan.hardware.placement import Placement
from shardplan.hardware.prices.fabric import Fabric, Floats, Ints
from shardplan.hardware.prices.group_loads import resource_starts, routes
from shardplan.plans.pricing import Where, fabric_of
from shardplan.simulation.engine import Tasks, Uses, ends
from shardplan.simulation.interval import Interval
from shardplan.simulation.script import Script, Table, pairs_of
from shardplan.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Constants:
    """What links and processes add to bandwidth; raises `ShardplanError` for what is no link."""

    # Seconds from when a message can flow to when it does; None for the latency of the outermost level it crosses.
    latency: float | None = None
    payload_share: float = 1.0  # of the bandwidth, what is payload and not headers
    bucket: float = 0.0  # bytes that an idle link saves up; 0 for none
    burst: float = 2.5e9  # bytes per second at which it sends them: about what one core, whose work it is, copies

    def __post_init__(self) -> None:
        """Refuse what is no link."""
        legal = (self.latency is None or self.latency >= 0) and 0 < self.payload_share <= 1 and self.bucket >= 0
        if not (legal and self.burst > 0):
            raise ShardplanError(
                f"{self}: legal are a latency and a bucket of 0 or more, a payload share above 0 and at most 1, and a "
                "positive burst"
            )


def replayed(script: Script, where: Where, *, shared: bool = False, constants: Constants | None = None) -> Timeline:
    """Return the timeline of a script, as its messages predict it.

    Args:
        script: What devices send and wait for; of a program, `scripts.script_of` gives it.
        where: A topology whose ids are the device ids, or a placement.
        shared: Whether the devices of an innermost parent share one half-duplex link, as processes on one host.
        constants: By default the topology's latencies, all of the bandwidth, and no bucket.

    Returns:
        One interval a step and device that communicates in it, waiting included, caused by its own one before.

    Raises:
        TopologyError: A device is not on the topology; links are shared on a level that is no switch of one uplink.

    >>> from shardplan.hardware.level import Level
    >>> from shardplan.hardware.topology import Topology
    >>> from shardplan.simulation.script import ScriptRound, Stage
    >>> send = ScriptRound(np.array([0]), np.array([1]), np.array([2000]))
    >>> script = Script((Stage(0, (send,)),), ("send",), ("send",))
    >>> replayed(script, Topology("", (Level("gpu", 2, "switch", 1e9, 1e-6),))).seconds
    3e-06
    """
    fabric = fabric_of(where, (where.mesh,) if isinstance(where, Placement) else ())
    constants, table = constants or Constants(), script.table()
    pairs, pair = pairs_of(table.sender, table.receiver)
    ids = fabric.topology_ids(pairs.T)
    uses = _uses(fabric, ids, shared, constants)
    latencies = np.append(fabric.latencies(), 0.0)
    latency = (
        latencies[fabric.outermost_level(*ids)]
        if constants.latency is None
        else np.full(len(ids[0]), constants.latency)
    )
    in_flight = np.array([stage.in_flight for stage in script.stages] + [1])
    tasks, gates = _tasks(table, pair, latency, in_flight)
    return _timeline(script, gates, ends(tasks, uses)[len(table.nbytes) :], fabric)


def _uses(fabric: Fabric, ids: Ints, shared: bool, constants: Constants) -> Uses:
    """The resources that the messages of every pair, given by its topology ids, take at one byte a second."""
    loads = routes(fabric, *ids)
    starts = resource_starts(fabric)
    row, resource, count = loads.row, loads.resource, int(starts[-1])
    byte_seconds = np.zeros(count)
    byte_seconds[resource] = loads.seconds
    if shared:
        last = fabric.wires[-1]
        if last.level.link != "switch" or last.ways > 1:
            raise TopologyError(f"level {last.level.name!r} is no switch with one uplink, whose devices share a link")
        # Leaves have no links of their own: inside a parent messages cross its one link, going out none.
        local = fabric.outermost_level(*ids) == len(fabric.wires) - 1
        keep = resource < starts[-2]
        inside = np.flatnonzero(local)
        parent = ids[0][inside] // last.level.size
        row = np.concatenate([row[keep], inside])
        resource = np.concatenate([resource[keep], starts[-2] + parent])
        byte_seconds[starts[-2] :] = 1 / fabric.wires[-1].level.delivered_rate
        order = np.argsort(row, kind="stable")
        row, resource = row[order], resource[order]
    used = byte_seconds > 0
    capacity = np.ones(count)
    capacity[used] = constants.payload_share / byte_seconds[used]
    return Uses(
        np.searchsorted(row, np.arange(len(ids[0]) + 1)),
        resource,
        np.ones(len(row)),
        capacity,
        constants.bucket * constants.payload_share,
        constants.burst if constants.bucket else np.inf,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Gates:
    """When devices begin a round, and end their last one; by device, then by round: [gates]."""

    device: Ints
    stage: Ints  # the number of stages where all is done
    enters: Ints  # bool: it begins a stage there


def _tasks(table: Table, pair: Ints, latency: Floats, in_flight: Ints) -> tuple[Tasks, _Gates]:
    """The messages as tasks, and behind them the gates, which take no time; rounds in flight are by stage."""
    n, rounds, stages = len(table.nbytes), int(table.round.max(initial=-1)) + 1, len(in_flight) - 1
    everyone = np.unique(np.concatenate([table.sender, table.receiver]))
    width = rounds + 1
    part = np.concatenate([table.sender, table.receiver]) * width + np.tile(table.round, 2)
    keys, gate = np.unique(np.concatenate([part, everyone * width + rounds]), return_inverse=True)
    device, round_number = keys // width, keys % width
    stage_of = np.full(width, stages)
    stage_of[table.round] = table.stage
    stage = stage_of[round_number]
    # A gate enters a stage where it is not of the device's stage before.
    same = device[1:] == device[:-1]
    enters = np.concatenate([[True], ~same | (stage[1:] != stage[:-1])])[: len(keys)]
    entries = np.flatnonzero(enters)
    entry = np.cumsum(enters) - 1
    sends, takes = gate[:n], gate[n : 2 * n]
    # What a message waits for: its sender in the round, its receiver in the stage; and what waits for it: the
    # receiver's next round, or the one after those in flight, and the sender's next stage. Every device ends with a
    # gate, so that there is a next one.
    number, chain = np.arange(n), np.flatnonzero(same)
    following = np.append(entries, len(keys))[entry + 1]  # by gate, the first one of the device's next stage
    due = np.minimum(takes + in_flight[table.stage], following[takes])
    before = np.concatenate([n + sends, n + entries[entry[takes]], number, number, n + chain])
    after = np.concatenate([number, number, n + due, n + following[sends], n + chain + 1])
    order = np.argsort(pair, kind="stable")
    turn = np.full(n + len(keys), -1)
    follows = pair[order[1:]] == pair[order[:-1]]
    turn[order[1:][follows]] = order[:-1][follows]
    still = np.zeros(len(keys))
    tasks = Tasks(
        np.concatenate([latency[pair], still]),
        np.concatenate([table.nbytes.astype(np.float64), still]),
        np.concatenate([pair, np.full(len(keys), -1)]),
        turn,
        before,
        after,
    )
    return tasks, _Gates(device, stage, enters)


def _timeline(script: Script, gates: _Gates, ended: Floats, fabric: Fabric) -> Timeline:
    """The intervals of every device: from where it leaves one step to where it leaves the next."""
    steps = np.array([stage.step for stage in script.stages] + [-1])
    step = steps[gates.stage]
    # Gates at which a device enters another step than that of its gate before, and its last one.
    at = np.flatnonzero(gates.enters)
    fresh = np.ones(len(at), dtype=bool)
    fresh[1:] = (gates.device[at[1:]] != gates.device[at[:-1]]) | (step[at[1:]] != step[at[:-1]])
    at = at[fresh]
    begins = np.flatnonzero(step[at] >= 0)
    device = gates.device[at[begins]]
    first = np.ones(len(begins), dtype=bool)
    first[1:] = device[1:] != device[:-1]
    nth = np.arange(len(begins)) - np.maximum.accumulate(np.where(first, np.arange(len(begins)), 0))
    # Everybody's first span, then everybody's second: steps stay together where all take part in them.
    order = np.lexsort((device, nth))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    received = script.received()
    spans = zip(
        device[order].tolist(),
        step[at[begins]][order].tolist(),
        ended[at[begins]][order].tolist(),
        ended[at[begins + 1]][order].tolist(),
        np.where(first, -1, place[np.arange(len(begins)) - 1])[order].tolist(),
        strict=True,
    )
    intervals = tuple(
        Interval(
            device=d,
            stream="comm",
            start=start,
            end=end,
            name=script.names[number],
            kind=script.kinds[number],
            step=number,
            received_bytes=received.get((d, number), 0),
            causes=(cause,) if cause >= 0 else (),
        )
        for d, number, start, end, cause in spans
    )
    return Timeline(intervals, title=f"events, {fabric.topology.name or 'topology'}")

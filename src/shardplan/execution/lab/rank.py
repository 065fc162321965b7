"""A rank: one process in its own namespace, which runs its part of programs and scripts when it is told to.

Forked from the host after torch is imported. It answers every order of the host by one message, what was asked for or a
`Failure`. The orders: `load` (bind a program or a script under a key), `prepare` (make the inputs), `go`
(run at an instant of CLOCK_MONOTONIC), `forget`. A step whose
compute is slept is agreed on, and its state laid out, when it is prepared.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardplan.core.program import Program
from shardplan.errors import ShardplanError
from shardplan.execution.async_executor import finish
from shardplan.execution.lab import network
from shardplan.execution.lab.cluster import Cluster
from shardplan.execution.lab.item import Failure, Item, Order, Outcome, WrongResult, unpack_job
from shardplan.execution.lower import place_of, shape_of
from shardplan.execution.record import Record, StepSpan
from shardplan.execution.torch.dtypes import to_numpy, to_torch, torch_dtype
from shardplan.execution.torch.emulated_compute import SleptStep
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.run import TorchExecutable, Values
from shardplan.execution.torch.steps import bind_step
from shardplan.execution.torch.wire import Pending, TorchWire
from shardplan.execution.trial import computes, first_difference
from shardplan.simulation.script import Message, Script
from shardplan.simulation.scripts import algorithm_of

STORE = network.RUN / "store"  # a file in the private tmpfs keeps its traffic off the links


@dataclass(slots=True)
class ItemState:
    """What a rank knows of one item."""

    item: Item
    device: int | None  # the device id that this rank stands in for; None where the item has none for it
    bound: TorchExecutable | Replay | SleptStep | None = None  # None where the device takes no part
    inputs: Values = field(default_factory=dict)
    expected: list[np.ndarray | None] | None = None  # by result, None off its root; None: nothing is compared


def main(cluster: Cluster, rank: int, pipe: Connection, timeout: float) -> None:
    """Join the others, then do what the host says until it hangs up; waits take at most `timeout` seconds."""
    try:
        network.enter(cluster.home(rank))
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = cluster.interface()
        store = dist.FileStore(str(STORE), cluster.ranks)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=cluster.ranks, timeout=timedelta(seconds=timeout)
        )
    except Exception as error:
        pipe.send(Failure("BackendError", f"rank {rank} did not start: {error}", True))
        return
    pipe.send(None)
    worker = Worker(rank, timeout)
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, order.name)(*order.arguments))
        except WrongResult as error:
            pipe.send(Failure("WrongResult", str(error), False))
        except ShardplanError as error:
            pipe.send(Failure(type(error).__name__, str(error), order.name == "go"))
        except Exception as error:
            pipe.send(Failure("BackendError", f"rank {rank}: {type(error).__name__}: {error}", True))


class Worker:
    """The orders of a rank."""

    def __init__(self, rank: int, timeout: float) -> None:
        """Start without items."""
        self.rank = rank
        self.timeout = timeout
        self.items: dict[int, ItemState] = {}

    def load(self, key: int, item: Item) -> None:
        """Bind an item."""
        device = next((d for d, r in item.ranks.items() if r == self.rank), None)
        found = ItemState(item, device)
        if item.topology is not None:
            job, algorithm = unpack_job(item.job), algorithm_of(item.engine)
            found.bound = None if device is None else SleptStep(job, item.topology, self.timeout, algorithm)
        elif item.script is not None:
            found.bound = None if device is None else Replay(item.script, device)
        else:
            program = Program.parse(item.program)
            if device is not None and device in program.devices:
                found.bound = TorchExecutable(program, device, partial(bind_step, algorithm=algorithm_of(item.engine)))
        self.items[key] = found

    def forget(self, key: int) -> None:
        """Drop an item."""
        self.items.pop(key, None)

    def prepare(
        self, key: int, data: Mapping[str, np.ndarray] | None, expected: list[np.ndarray | None] | None
    ) -> None:
        """Make the inputs: `data` by input, or zeros; results are compared with `expected`, one a result."""
        found = self.items[key]
        found.expected = expected
        bound, device = found.bound, found.device
        if isinstance(bound, SleptStep):
            bound.ready()
        if not isinstance(bound, TorchExecutable) or device is None:
            return
        found.inputs = {}
        for name, t in bound.program.inputs:
            if data is None or place_of(t, device) is None:
                found.inputs[name] = torch.zeros(shape_of(t, device), dtype=torch_dtype(t.dtype))
            else:
                found.inputs[name] = to_torch(data[name])

    def go(self, key: int, instant: float) -> Outcome:
        """Run once, from an instant of the monotonic clock on."""
        found = self.items[key]
        bound, device = found.bound, found.device
        record = Record()
        if bound is None or device is None:
            return Outcome(device, 0.0, instant)
        if isinstance(bound, SleptStep):
            return _run_slept_step(bound, device, instant)
        ranks = found.item.ranks
        texts = bound.texts if isinstance(bound, TorchExecutable) else found.item.names
        digest = hashlib.sha256(found.item.title.encode()).hexdigest()
        watch = TorchWatch(tuple(sorted(ranks)), device, found.item.title, digest, texts, self.timeout)
        native = found.item.engine == "gloo"
        wire = LabWire(watch.state.group, watch, torch.device("cpu"), native=native, ranks=ranks)
        start = _sleep_until(instant)
        results: list[torch.Tensor] = []
        if isinstance(bound, TorchExecutable):
            results = finish(bound.drive(found.inputs, wire, watch, record))
        else:
            bound.run(wire, record)
        end = time.monotonic()
        found.inputs = {}
        outcome = Outcome(
            device,
            start - instant,
            end,
            tuple(record.spans),
            dict(wire.payload),
            tuple(wire.calls),
        )
        if found.expected is not None:
            _compare(results, found.expected, found.item, device)
            found.expected = None
        return outcome


def _sleep_until(instant: float) -> float:
    """Sleep until an instant, since ranks that spin would keep each other from the cores; return when it was over."""
    while (start := time.monotonic()) < instant:
        time.sleep(instant - start)
    return start


def _run_slept_step(step: SleptStep, device: int, instant: float) -> Outcome:
    """Run a step whose compute is slept, from an instant on."""
    start = _sleep_until(instant)
    step.go()
    end = time.monotonic()
    return Outcome(device, start - instant, end, slept=step.clock.busy)


def _compare(results: list[torch.Tensor], expected: list[np.ndarray | None], item: Item, device: int) -> None:
    rounded = computes(Program.parse(item.program))  # integers that are moved, and their sums, are exact
    for number, (result, want) in enumerate(zip(results, expected, strict=True)):
        if want is None:
            continue
        got = to_numpy(result)
        if got.shape != want.shape or got.dtype != want.dtype:
            raise WrongResult(
                f"{item.title}, result {number}: device {device} holds {got.dtype}{list(got.shape)}, the reference "
                f"{want.dtype}{list(want.shape)}"
            )
        if (index := first_difference(got, want, rounded)) is not None:
            raise WrongResult(
                f"{item.title}, result {number}: device {device} holds {got[index]} at index {index} of its shard, the "
                f"reference {want[index]}; the engine {item.engine!r} is wrong"
            )


def run_rank(cluster: Cluster, rank: int, pipe: Connection, timeout: float) -> None:
    """Run `main` in a forked child, and end the process without the parent's clean-up."""
    status = 1
    try:
        main(cluster, rank, pipe, timeout)
        status = 0
    finally:
        os._exit(status)


# `LabWire`: the torch backend's wire, with the bytes to every peer counted, and device ids mapped to ranks.
#
# The host gives all ranks one item, so groups are used without greeting.


@dataclass(slots=True)
class LabWire(TorchWire):
    """The traffic of one rank in one run; its peers are device ids."""

    ranks: Mapping[int, int] = field(default_factory=dict[int, int])  # by device id, the rank that stands in for it
    payload: Counter[int] = field(default_factory=Counter[int])  # bytes sent, by the receiver's device id

    def post(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Pending, Pending]:
        """Start messages between device ids; what is pending bears them, too, so that a failure names devices."""
        for device, x in sends:
            self.payload[device] += x.nbytes
        ranks = self.ranks
        ins, outs = TorchWire.post(self, [(ranks[d], x) for d, x in receives], [(ranks[d], x) for d, x in sends])
        named_ins = [(d, work) for (d, _), (_, work) in zip(receives, ins, strict=True)]
        return named_ins, [(d, work) for (d, _), (_, work) in zip(sends, outs, strict=True)]

    def group_of(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of the ranks that stand in for some devices, in their order."""
        return self.watch.state.members(tuple(self.ranks[d] for d in ranks))


# A script on real links: bytes without meaning, posted and waited for as `simulation.script` says.


class Replay:
    """The part of one device in a script."""

    def __init__(self, script: Script, device: int) -> None:
        """Keep the device's own stages."""
        self.device = device
        self.stages = list(script.rounds_of(device))
        largest = [n for _, rounds in self.stages for sends, takes in rounds for _, n in (*sends, *takes)]
        self._largest = max(largest, default=0)

    def run(self, wire: TorchWire, record: Record) -> None:
        """Run all stages; every message is sent from, and received into, one buffer, as nobody reads it."""
        source = torch.zeros(self._largest, dtype=torch.uint8)
        sink = torch.zeros(self._largest, dtype=torch.uint8)
        for stage, rounds in self.stages:
            start, before = time.monotonic(), wire.received
            _stage(rounds, stage.in_flight, wire, source, sink)
            record.spans.append(StepSpan(self.device, stage.step, start, time.monotonic(), wire.received - before))


def _stage(
    rounds: Sequence[tuple[list[Message], list[Message]]],
    in_flight: int,
    wire: TorchWire,
    source: torch.Tensor,
    sink: torch.Tensor,
) -> None:
    """Post all receives of a stage; then, round by round, wait for what no more may be in flight, and send."""
    ins = iter(wire.post([(peer, sink[:n]) for _, takes in rounds for peer, n in takes], [])[0])
    sent: Pending = []
    due = [0] * in_flight + [len(takes) for _, takes in rounds]
    for number, (sends, _) in enumerate(rounds):
        wire.wait(list(islice(ins, due[number])))
        sent += wire.post([], [(peer, source[:n]) for peer, n in sends])[1]
    wire.wait([*ins, *sent])

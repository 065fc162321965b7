"""The host: the first process inside the lab's namespaces, which builds the links, forks the ranks and runs items.

`python -m shardplan.execution.lab.host FD`, below `needs.inside()`; FD is a pipe to the session. When the session goes,
by whatever cause, the host ends, and as it is the first process of its process namespace the kernel kills the ranks and
frees every namespace and link with it: there is no clean-up code to fail.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.messages import at_root
from shardplan.core.program import Program
from shardplan.core.reference import distribute, run_reference
from shardplan.core.tensor import TensorType
from shardplan.errors import ShardplanError
from shardplan.execution.lab import network
from shardplan.execution.lab.cluster import Cluster
from shardplan.execution.lab.item import Failure, Item, Order, Outcome, Run
from shardplan.execution.lab.machine import busy_seconds
from shardplan.execution.lower import place_of
from shardplan.execution.rank_names import format_ranks, name_ranks

LEAD = 0.01  # seconds from the order to the start that all ranks agree on: for the order to reach all of them
GRACE = 2.0  # seconds that the other ranks have to fail, too, after one has
# Integers below these are drawn: exact in the dtype, and so are sums of a few of them.
MOST = {"bool": 2, "i8": 11, "u8": 11, "f8e4m3": 3, "f8e5m2": 3, "bf16": 15, "f16": 100}
MOST_WIDE = 1000  # of all other dtypes
SEED = 20210  # any: one, so that a run can be repeated


def integers(t: TensorType, number: int) -> np.ndarray:
    """Return random integers as an array of a type; `number` varies the seed."""
    drawn = np.random.default_rng(SEED + number).integers(0, MOST.get(t.dtype, MOST_WIDE), t.shape)
    return drawn.astype(numpy_dtype(t.dtype))


class Host:
    """The ranks and what they run."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        """Build the links, then fork a process for each rank, with torch imported once."""
        self.cluster = cluster
        self.timeout = timeout
        self.items: dict[int, Item] = {}
        network.build(cluster)
        self.meters = network.Meters(cluster)
        from shardplan.execution.lab import rank as process

        self.pipes: list[Connection] = []
        for number in range(cluster.ranks):
            here, there = Pipe()
            if os.fork() == 0:
                for other in (*self.pipes, here):
                    other.close()
                process.run_rank(cluster, number, there, timeout)
            there.close()
            self.pipes.append(here)
        self._answers(self.pipes, "the start of the ranks")

    def load(self, key: int, item: Item) -> None:
        """Bind an item on every rank."""
        self.items[key] = item
        self._order_all(Order("load", (key, item)))

    def forget(self, key: int) -> None:
        """Drop an item."""
        self.items.pop(key, None)
        self._order_all(Order("forget", (key,)))

    def run(self, key: int, verify: bool) -> Run:
        """Run an item once, on integers and compared with the reference where it is to be verified."""
        item = self.items[key]
        chosen = [self.pipes[r] for r in item.ranks.values()]
        for pipe, order in zip(chosen, self._prepare(key, item, verify), strict=True):
            _send(pipe, order)
        self._answers(chosen, f"the inputs of {item.title}")
        drops, sent, worked, began = (
            self.meters.read_dropped_packets(),
            self.meters.read_sent_bytes(),
            busy_seconds(),
            time.monotonic(),
        )
        instant = began + LEAD
        for pipe in chosen:
            _send(pipe, Order("go", (key, instant)))
        outcomes: list[Outcome] = self._answers(chosen, item.title)
        after, ended = self.meters.read_sent_bytes(), time.monotonic()
        moved = tuple(b - a for a, b in zip(sent, after, strict=True))
        return Run(
            instant,
            tuple(o for o in outcomes if o.device is not None),
            moved,
            self.meters.read_dropped_packets() - drops,
            busy_seconds() - worked,
            ended - began,
        )

    def _prepare(self, key: int, item: Item, verify: bool) -> list[Order]:
        """The orders that give every rank of an item its inputs, and what it must find where that is to be verified."""
        if not item.program or not verify:
            return [Order("prepare", (key, None, None)) for _ in item.ranks]
        program = Program.parse(item.program)
        shards = [distribute(integers(t, k), t) for k, t in enumerate(program.input_types)]
        wanted = run_reference(program, shards)
        orders: list[Order] = []
        for device in item.ranks:
            data = {
                name: own[place]
                for (name, t), own in zip(program.inputs, shards, strict=True)
                if (place := place_of(t, device)) is not None
            }
            expected: list[np.ndarray | None] = []
            for t, own in zip(program.output_types, wanted, strict=True):
                place = place_of(t, device)
                expected.append(None if place is None or not at_root(t)[place] else own[place])
            orders.append(Order("prepare", (key, data, expected)))
        return orders

    def _order_all(self, order: Order) -> None:
        for pipe in self.pipes:
            _send(pipe, order)
        self._answers(self.pipes, order.name)

    def _answers(self, pipes: list[Connection], what: str) -> list[Any]:
        """Wait, at most twice the timeout of a wait of theirs, for one answer of each; raise the first failure."""
        found: dict[Connection, Any] = {}
        failure: Failure | None = None
        until = time.monotonic() + 2 * self.timeout
        while len(found) < len(pipes) and time.monotonic() < until:
            for pipe in wait([p for p in pipes if p not in found], max(0.0, until - time.monotonic())):
                assert isinstance(pipe, Connection)
                try:
                    found[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    found[pipe] = Failure("BackendError", f"{what}: {self._pipe_ranks([pipe])} died", True)
                if isinstance(found[pipe], Failure) and (failure is None or found[pipe].fatal > failure.fatal):
                    failure = found[pipe]
                    until = min(until, time.monotonic() + GRACE)
        if failure is not None:
            missing = len(found) < len(pipes)  # a rank that is still at work cannot be asked for anything else
            raise Failure(failure.kind, failure.text, failure.fatal or missing)
        if len(found) < len(pipes):
            who = self._pipe_ranks([p for p in pipes if p not in found])
            raise Failure(
                "TimedOut",
                f"{what}: {who} of {format_ranks(range(self.cluster.ranks))} did not answer within "
                f"{2 * self.timeout:g} s",
                True,
            )
        return [found[p] for p in pipes]

    def _pipe_ranks(self, pipes: list[Connection]) -> str:
        return name_ranks(self.pipes.index(p) for p in pipes)


def _send(pipe: Connection, order: Order) -> None:
    """Give a rank an order; one that has died is found by its answer, which does not come."""
    with suppress(BrokenPipeError):
        pipe.send(order)


def _end_with(fd: int) -> None:
    """End this process, and with it the namespaces, once the other end of a pipe is closed."""

    def watch() -> None:
        waiting = select.poll()
        waiting.register(fd, select.POLLHUP)
        waiting.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve a session: the first message says what to build, the others are calls of `Host`."""
    fd = int(sys.argv[1])
    _end_with(fd)
    pipe = Connection(fd)
    cluster, timeout = pipe.recv()
    host: Host | None = None
    order = Order("", ())  # none yet: the first answer is that to the start
    while True:
        try:
            if host is None:
                host = Host(cluster, timeout)
                answer: Any = None
            else:
                answer = getattr(host, order.name)(*order.arguments)
            pipe.send(answer)
        except Failure as failure:
            pipe.send(failure)
        except ShardplanError as error:
            pipe.send(Failure(type(error).__name__, str(error), host is None))
        try:
            order = pipe.recv()
        except EOFError:
            return


if __name__ == "__main__":
    main()

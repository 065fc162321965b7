"""The ranks of torch as threads of this process: bound steps on queues instead of sockets, every message counted.

What stands in for `TorchWire` takes the same calls. A message arrives where it is received next from its sender, as on
one connection, and must have the size of the buffer it is received into.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardplan.core.program import Program
from shardplan.execution.torch.dtypes import to_numpy, to_torch
from shardplan.execution.torch.run import TorchExecutable, finish

PATIENCE = 60.0  # seconds: only against a hang
Posted = list[tuple[int, Any]]


class Network:
    """What is under way between devices, and the bytes of every message, by (sender, receiver), in order."""

    def __init__(self) -> None:
        self.wires: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.lock = threading.Lock()

    def between(self, sender: int, receiver: int) -> queue.Queue[torch.Tensor]:
        with self.lock:  # a defaultdict is no place for two threads at once
            return self.wires[sender, receiver]


@dataclass
class ThreadWire:
    """The traffic of one device."""

    network: Network
    me: int
    received: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    awaited: dict[int, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def post(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Posted, Posted]:
        for peer, x in receives:
            self.awaited[peer].append(x)
            self.received += x.nbytes
        for peer, x in sends:
            with self.network.lock:
                self.network.sent[self.me, peer].append(x.nbytes)
            self.network.between(self.me, peer).put(x.clone())
        return [(peer, x) for peer, x in receives], [(peer, None) for peer, _ in sends]

    def wait(self, pending: Posted) -> None:
        for peer, x in pending:
            self.wait_one(peer, x)

    def wait_one(self, peer: int, x: torch.Tensor | None) -> None:
        while x is not None and any(x is y for y in self.awaited[peer]):
            into, came = self.awaited[peer].popleft(), self.network.between(peer, self.me).get(timeout=PATIENCE)
            assert into.nbytes == came.nbytes
            into.view(-1).view(torch.uint8).copy_(came.view(-1).view(torch.uint8))


def played(
    program: Program, inputs: list[list[np.ndarray]], bind: Callable[..., Any]
) -> tuple[list[list[np.ndarray]], Network]:
    """Run a program on all its devices, a thread each; the shards of every output in mesh order, and the network."""
    network = Network()
    results: dict[int, list[torch.Tensor]] = {}
    broken: list[BaseException] = []

    def one(device: int) -> None:
        try:
            values = {
                name: to_torch(shards[t.mesh.devices.index(device)]).contiguous()
                for (name, t), shards in zip(program.inputs, inputs, strict=True)
                if device in t.mesh.devices
            }
            absent = {name: torch.empty(0) for name, t in program.inputs if device not in t.mesh.devices}
            watch: Any = SimpleNamespace(at=lambda step: None)
            wire: Any = ThreadWire(network, device)
            results[device] = finish(TorchExecutable(program, device, bind).drive(absent | values, wire, watch))
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=one, args=(d,)) for d in program.devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    if broken:
        raise broken[0]
    assert all(wire.empty() for wire in network.wires.values()), "what is sent is received"
    outputs = zip(range(len(program.outputs)), program.output_types, strict=True)
    return [[to_numpy(results[d][k]) for d in t.mesh.devices] for k, t in outputs], network

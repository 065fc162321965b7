"""The devices of a program as threads of this process, with queues for connections, every message counted.

A backend's tests bring what stands in for its wire and takes the same calls. What one device sends another arrives in
the order in which it is sent.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rank_threads import in_threads
from shardplan.core.program import Program

PATIENCE = 60.0  # seconds: only against a hang
Shards = list[np.ndarray]


class Network:
    """What is under way between devices, and the bytes of every message, by (sender, receiver), in order."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._wires: dict[tuple[int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()  # of the tables: each queue has its own

    def send(self, sender: int, receiver: int, data: bytes) -> None:
        with self._lock:
            self.sent[sender, receiver].append(len(data))
            wire = self._wires[sender, receiver]
        wire.put(data)

    def receive(self, sender: int, receiver: int) -> bytes:
        with self._lock:
            wire = self._wires[sender, receiver]
        return wire.get(timeout=PATIENCE)

    def received(self, receiver: int) -> int:
        """The bytes that a device was sent in all."""
        return sum(sum(sizes) for (_, other), sizes in self.sent.items() if other == receiver)

    @property
    def quiet(self) -> bool:
        """Whether all that was sent has been received."""
        return all(wire.empty() for wire in self._wires.values())


Drive = Callable[[Program, int, Mapping[str, Any], Network], Shards]


def played(program: Program, inputs: list[Shards], drive: Drive) -> tuple[list[Shards], Network]:
    """Run a program on all its devices, a thread each; the shards of every output in mesh order, and the network.

    Args:
        program: The program.
        inputs: By input the shards in mesh order.
        drive: Runs the program on a device, given its shards by input, where it has one; returns a shard an output.
    """
    network = Network()

    def one(device: int) -> Shards:
        own = {
            name: shards[t.mesh.devices.index(device)]
            for (name, t), shards in zip(program.inputs, inputs, strict=True)
            if device in t.mesh.devices
        }
        return drive(program, device, own, network)

    results = in_threads(program.devices, one, 2 * PATIENCE)
    assert network.quiet
    return [[results[d][k] for d in t.mesh.devices] for k, t in enumerate(program.output_types)], network

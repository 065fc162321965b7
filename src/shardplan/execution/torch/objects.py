"""Python values between ranks: bytes in small messages, and one value made of those of all ranks.

They travel over the wire of a run, and none of them through the store. Values are pickled, as
`torch.distributed.all_gather_object` does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from shardplan.execution.torch.wire import TorchWire

MESSAGE = 1024  # bytes of a message of `put`: little beside any tensor, so that they add nothing to a run's peak

T = TypeVar("T")


def send(wire: TorchWire, peer: int, x: torch.Tensor) -> None:
    """Send a tensor, and wait until it has left."""
    for pending in wire.post([], [(peer, x.to(wire.device))]):
        wire.wait(pending)


def receive(wire: TorchWire, peer: int, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape and dtype of `x`, received from `peer`; on the host `x` itself is filled."""
    x = x.to(wire.device)
    for pending in wire.post([(peer, x)], []):
        wire.wait(pending)
    return x


def put(wire: TorchWire, peer: int, data: bytes) -> None:
    """Send bytes to a rank that gets them: their number, then messages of at most `MESSAGE` bytes, in order."""
    send(wire, peer, torch.from_numpy(np.array([len(data)])))
    for start in range(0, len(data), MESSAGE):
        send(wire, peer, torch.from_numpy(np.frombuffer(bytearray(data[start : start + MESSAGE]), dtype=np.uint8)))


def get(wire: TorchWire, peer: int) -> bytes:
    """Return the bytes that a rank puts."""
    size = int(receive(wire, peer, torch.from_numpy(np.zeros(1, dtype=np.int64)))[0])
    out = bytearray()
    while len(out) < size:
        part = torch.from_numpy(np.empty(min(MESSAGE, size - len(out)), dtype=np.uint8))
        out += receive(wire, peer, part).cpu().numpy().tobytes()
    return bytes(out)


def all_reduce_object(wire: TorchWire, ranks: Sequence[int], rank: int, value: T, join: Callable[[T, T], T]) -> T:
    """Return the values of all ranks joined in the order of `ranks`, the same on each of them.

    Up a binomial tree, joined on the way, and down again: every rank sends and receives at most log2(ranks) values each
    way. `ranks` are those that call, in one order on all of them; a value must pickle; `join` makes one of two,
    associatively, the first being that of the ranks before. Raises what the waits of `wire` raise.
    """
    me, step = ranks.index(rank), 1
    while step < len(ranks) and not me & step:
        if me + step < len(ranks):
            value = join(value, pickle.loads(get(wire, ranks[me + step])))
        step *= 2
    if me:
        parent = ranks[me - step]
        put(wire, parent, pickle.dumps(value))
        value = pickle.loads(get(wire, parent))
    data = b""  # pickled once, and only by a rank that has children
    while step > 1:
        step //= 2
        if me + step < len(ranks):
            data = data or pickle.dumps(value)
            put(wire, ranks[me + step], data)
    return value

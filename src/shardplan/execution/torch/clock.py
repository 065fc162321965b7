"""One clock for the ranks of a run: offsets measured by ping-pong, and the spans of all ranks on every rank."""

from __future__ import annotations

import json
import time
from dataclasses import astuple

import numpy as np
import torch

from shardplan.execution.record import StepSpan
from shardplan.execution.torch.wire import TorchWire

PINGS = 8
PIECE = 1024  # bytes of a message of `put`


def offset(wire: TorchWire, ranks: tuple[int, ...], rank: int) -> float:
    """Return what to add to this rank's monotonic clock to get that of the first rank, in seconds.

    The round trip of least duration counts: the first rank answers with its time, taken half a trip after the question.
    """
    leader = ranks[0]
    if rank == leader:
        for other in ranks[1:]:
            for _ in range(PINGS):
                _receive(wire, other, torch.empty(1, dtype=torch.float64))
                _send(wire, other, torch.tensor([time.monotonic()], dtype=torch.float64))
        return 0.0
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        start = time.monotonic()
        _send(wire, leader, torch.tensor([start], dtype=torch.float64))
        theirs = _receive(wire, leader, torch.empty(1, dtype=torch.float64))
        end = time.monotonic()
        best = min(best, (end - start, float(theirs[0]) - (start + end) / 2))
    return best[1]


def gathered(wire: TorchWire, ranks: tuple[int, ...], rank: int, spans: list[StepSpan], shift: float) -> list[StepSpan]:
    """Return the spans of all ranks, their clocks shifted to the first rank's; every rank gets them."""
    mine = [(s.device, s.step, s.start + shift, s.end + shift, s.received) for s in spans]
    leader = ranks[0]
    if rank != leader:
        put(wire, leader, json.dumps(mine).encode())
        return [StepSpan(*row) for row in json.loads(get(wire, leader))]
    rows = [list(astuple(StepSpan(*row))) for row in mine]
    for other in ranks[1:]:
        rows += json.loads(get(wire, other))
    for other in ranks[1:]:
        put(wire, other, json.dumps(rows).encode())
    return [StepSpan(*row) for row in rows]


def _send(wire: TorchWire, peer: int, x: torch.Tensor) -> None:
    for pending in wire.post([], [(peer, x.to(wire.device))]):
        wire.wait(pending)


def _receive(wire: TorchWire, peer: int, x: torch.Tensor) -> torch.Tensor:
    x = x.to(wire.device)
    for pending in wire.post([(peer, x)], []):
        wire.wait(pending)
    return x


def put(wire: TorchWire, peer: int, data: bytes) -> None:
    """Send bytes to a rank that gets them, in pieces that are small beside any tensor."""
    _send(wire, peer, torch.from_numpy(np.array([len(data)])))
    for start in range(0, len(data), PIECE):
        _send(wire, peer, torch.from_numpy(np.frombuffer(bytearray(data[start : start + PIECE]), dtype=np.uint8)))


def get(wire: TorchWire, peer: int) -> bytes:
    """Receive the bytes that a rank puts."""
    size = int(_receive(wire, peer, torch.from_numpy(np.zeros(1, dtype=np.int64)))[0])
    out = bytearray()
    while len(out) < size:
        piece = torch.from_numpy(np.empty(min(PIECE, size - len(out)), dtype=np.uint8))
        out += _receive(wire, peer, piece).cpu().numpy().tobytes()
    return bytes(out)

"""One clock for the ranks of a run: offsets measured by ping-pong, and the spans of all ranks on every rank."""

from __future__ import annotations

import json
import time
from dataclasses import astuple, replace

import torch

from shardplan.execution.record import StepSpan
from shardplan.execution.torch.objects import get, put, receive, send
from shardplan.execution.torch.wire import TorchWire

PINGS = 8  # round trips a rank, of which the shortest counts: one that nothing delayed is enough


def offset(wire: TorchWire, ranks: tuple[int, ...], rank: int) -> float:
    """Return what to add to this rank's monotonic clock to get that of the first rank, in seconds.

    The round trip of least duration counts: the first rank answers with its time, taken half a trip after the question.
    """
    leader = ranks[0]
    if rank == leader:
        for other in ranks[1:]:
            for _ in range(PINGS):
                receive(wire, other, torch.empty(1, dtype=torch.float64))
                send(wire, other, torch.tensor([time.monotonic()], dtype=torch.float64))
        return 0.0
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        start = time.monotonic()
        send(wire, leader, torch.tensor([start], dtype=torch.float64))
        theirs = receive(wire, leader, torch.empty(1, dtype=torch.float64))
        end = time.monotonic()
        best = min(best, (end - start, float(theirs[0]) - (start + end) / 2))
    return best[1]


def gather_spans(
    wire: TorchWire, ranks: tuple[int, ...], rank: int, spans: list[StepSpan], shift: float
) -> list[StepSpan]:
    """Return the spans of all ranks, their clocks shifted to the first rank's by `shift` seconds; every rank gets them.

    All put theirs to the first rank, in the order of ranks, and get the whole list from it, in that order.
    """
    mine = [replace(s, start=s.start + shift, end=s.end + shift) for s in spans]
    leader = ranks[0]
    if rank != leader:
        put(wire, leader, _encode_spans(mine))
        return _decode_spans(get(wire, leader))
    for other in ranks[1:]:
        mine += _decode_spans(get(wire, other))
    for other in ranks[1:]:
        put(wire, other, _encode_spans(mine))
    return mine


def _encode_spans(spans: list[StepSpan]) -> bytes:
    return json.dumps([astuple(s) for s in spans]).encode()


def _decode_spans(data: bytes) -> list[StepSpan]:
    return [StepSpan(*row) for row in json.loads(data)]

"""A script on real links: bytes without meaning, posted and waited for as `simulation.script` says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch

from shardplan.execution.record import Record, StepSpan
from shardplan.execution.torch.wire import Pending, TorchWire
from shardplan.simulation.script import Message, Script


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

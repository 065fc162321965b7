"""A script on real links: bytes without meaning, posted and waited for as `simulation.script` says."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardplan.execution.record import Record, StepSpan
from shardplan.execution.torch.wire import Pending, TorchWire
from shardplan.simulation.script import Script, ScriptRound


class Replay:
    """The part of one device in a script."""

    def __init__(self, script: Script, device: int) -> None:
        """Keep the device's own stages."""
        self.device = device
        self.stages = [(s.step, s.rounds[device]) for s in script.stages if device in s.rounds]
        largest = [n for _, rounds in self.stages for one in rounds for _, n in (*one.sends, *one.receives)]
        self._largest = max(largest, default=0)

    def run(self, wire: TorchWire, record: Record) -> None:
        """Run all stages; every message is sent from, and received into, one buffer, as nobody reads it."""
        source = torch.zeros(self._largest, dtype=torch.uint8)
        sink = torch.zeros(self._largest, dtype=torch.uint8)
        for step, rounds in self.stages:
            start, before = time.monotonic(), wire.received
            _stage(rounds, wire, source, sink)
            record.spans.append(StepSpan(self.device, step, start, time.monotonic(), wire.received - before))


def _stage(rounds: Sequence[ScriptRound], wire: TorchWire, source: torch.Tensor, sink: torch.Tensor) -> None:
    """Post all receives of a stage; then, round by round, send, and wait for what the round receives."""
    ins = iter(wire.post([(peer, sink[:n]) for one in rounds for peer, n in one.receives], [])[0])
    sent: Pending = []
    for one in rounds:
        sent += wire.post([], [(peer, source[:n]) for peer, n in one.sends])[1]
        for _ in one.receives:
            wire.wait_one(*next(ins))
    wire.wait(sent)

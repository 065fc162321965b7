"""`LabWire`: the torch backend's wire, with the bytes to every peer counted, and device ids mapped to ranks.

The host gives all ranks one item, so groups are used without greeting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardplan.execution.torch.wire import Pending, TorchWire


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

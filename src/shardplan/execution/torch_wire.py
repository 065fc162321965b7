"""Point-to-point traffic between the ranks of torch.distributed, with bounded waits and counted bytes.

All programs travel on one process group; the tag of a run keeps the traffic of runs that overlap apart. gloo takes
single sends and receives, any other backend (nccl) a batch, since there their order could deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

Pending = list[tuple[int, Any]]  # peer, work


class Faults(Protocol):
    """Turns a failed wait into one clear error."""

    def failed(self, peer: int, error: Exception) -> Exception:
        """Return the error to raise, after a send to or receive from `peer` failed."""
        ...


@dataclass(slots=True)
class Wire:
    """The traffic of one run."""

    group: Any  # torch.distributed.ProcessGroup
    tag: int
    timeout: timedelta
    device: torch.device
    faults: Faults
    received: int = 0  # bytes of the messages received so far
    sent: int = 0
    allocated: int = 0  # bytes of the staging buffers made so far
    batched: bool = field(default=False)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a staging buffer."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def post(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Pending, Pending]:
        """Start contiguous messages; returns the pending receives and sends, in the order given."""
        for _, x in receives:
            self.received += x.nbytes
        for _, x in sends:
            self.sent += x.nbytes
        if self.batched:
            return self._batch(receives, sends)
        group, tag = self.group, self.tag
        peer = -1
        try:
            ins: Pending = []
            for peer, x in receives:
                ins.append((peer, group.recv([x], peer, tag)))
            outs: Pending = []
            for peer, x in sends:
                outs.append((peer, group.send([x], peer, tag)))
        except RuntimeError as error:
            raise self.faults.failed(peer, error) from None
        return ins, outs

    def _batch(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[Pending, Pending]:
        ops = [dist.P2POp(dist.irecv, _bytes(x), peer, self.group) for peer, x in receives]
        ops += [dist.P2POp(dist.isend, _bytes(x), peer, self.group) for peer, x in sends]
        if not ops:
            return [], []
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # one work stands for all
            works = works[:1] * len(ops)
        peers = [peer for peer, _ in (*receives, *sends)]
        pending = list(zip(peers, works, strict=True))
        return pending[: len(receives)], pending[len(receives) :]

    def abort(self) -> None:
        """End what is under way on a device after a failure, so that nothing waits for it for ever."""
        if self.batched and hasattr(self.group, "abort"):
            self.group.abort()

    def wait(self, pending: Pending) -> None:
        """Wait for messages, each at most the timeout; raises what `Faults.failed` makes of a failure."""
        for peer, work in pending:
            self.wait_one(peer, work)

    def wait_one(self, peer: int, work: Any) -> None:
        """Wait for one message."""
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise self.faults.failed(peer, error) from None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)

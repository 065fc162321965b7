"""Which messages of a hop are sent again: those whose bytes have changed since the last call that all ranks ended.

A call begins with a byte from every receiver to its senders, whether it needs everything; each sender then says with a
byte a message which ones come. What a sender remembers of a message is a hash of its bytes as they travel (BLAKE2b of
128 bits, from Python's own library), so that the chance of a change unseen is far below that of a broken machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shardplan.execution.torch.wire import TorchWire
from shardplan.interop.torch.refit.exchange import HopExchange, RefitMessage

DIGEST = 16  # bytes


class HopDeltas:
    """What one rank remembers of what it sent in a hop, and what is said before one."""

    def __init__(self, hop: HopExchange) -> None:
        """Make what is said between this rank and its peers of a hop: a byte to a sender, a byte a message from it."""
        self.hop = hop
        self.to = {t: len(c) for (s, t), c in hop.cut.items() if s == hop.rank}
        self.by = {s: len(c) for (s, t), c in hop.cut.items() if t == hop.rank}
        self.asks = {peer: torch.zeros(1, dtype=torch.uint8) for peer in (*self.to, *self.by)}
        self.asked = {peer: torch.zeros(1, dtype=torch.uint8) for peer in self.to}
        self.goes = {peer: torch.zeros(n, dtype=torch.uint8) for peer, n in self.to.items()}
        self.comes = {peer: torch.zeros(n, dtype=torch.uint8) for peer, n in self.by.items()}
        self.known: dict[int, list[bytes]] = {}
        self.found: dict[int, list[bytes]] = {}

    def settle(self, wire: TorchWire, everything: bool) -> None:
        """Say what is needed, and learn what comes; `everything` where this rank has not what it had after a call."""
        for peer in self.by:
            self.asks[peer].fill_(everything)
        self._say(wire, [(p, self.asked[p]) for p in self.to], [(p, self.asks[p]) for p in self.by])
        self.found = {peer: [] for peer in self.to}
        for sends, _ in self.hop.rounds:
            for message in sends:
                message.copies.run()
                self.found[message.peer].append(hashlib.blake2b(message.data.numpy().data, digest_size=DIGEST).digest())
        for peer, digests in self.found.items():
            known = [b""] * len(digests) if self.asked[peer].item() else self.known.get(peer, [b""] * len(digests))
            for k, (old, new) in enumerate(zip(known, digests, strict=True)):
                self.goes[peer][k].fill_(old != new)
        self._say(wire, list(self.comes.items()), list(self.goes.items()))

    def travelling_messages(
        self, k: int, sends: Sequence[RefitMessage], receives: Sequence[RefitMessage]
    ) -> tuple[list[RefitMessage], list[RefitMessage]]:
        """Return those messages of a round that travel."""
        return [m for m in sends if self.goes[m.peer][k]], [m for m in receives if self.comes[m.peer][k]]

    def keep(self) -> None:
        """Remember what was sent: every rank has it."""
        self.known = self.found

    @staticmethod
    def _say(
        wire: TorchWire, ins: Sequence[tuple[int, torch.Tensor]], outs: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        taken, sent = wire.post(ins, outs)
        wire.wait(taken)
        wire.wait(sent)

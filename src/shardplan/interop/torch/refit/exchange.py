"""What one rank does in a refit: views of its parameters and of its staging, made once, and the copies between them.

A rank that has both sides copies what stays with it straight from parameter to parameter. A message that is one
contiguous run of a parameter, in the dtype that travels, goes from or to the parameter itself.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from shardplan.errors import LayoutError
from shardplan.execution.torch.wire import TorchWire
from shardplan.interop.torch.refit.chunks import RefitChunk, chunks, scratch_bytes, slots
from shardplan.interop.torch.refit.hops import RefitHop, hops
from shardplan.interop.torch.refit.tensors import BoundTensors
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.regions import RefitRegions, split_block


@dataclass(slots=True)
class RefitCopies:
    """Copies between views: `into[k]` from `out_of[k]`, and those with a constant, which go through scratch."""

    into: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    out_of: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    added: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = field(
        default_factory=list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]
    )

    def run(self) -> None:
        """Copy; a cast rounds once."""
        if self.into:
            torch._foreach_copy_(self.into, self.out_of)  # pyright: ignore
        for into, out_of, scratch, plus in self.added:
            scratch.copy_(out_of)
            scratch.add_(plus)
            into.copy_(scratch)


@dataclass(frozen=True, slots=True, eq=False)
class RefitMessage:
    """One message: its bytes in memory, and the copies before it is sent, or after it came."""

    peer: int
    data: torch.Tensor
    copies: RefitCopies


@contextmanager
def pause_gc() -> Generator[None]:
    """Leave garbage for later: collections, which look at every view that is made, would take most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class RefitExchange:
    """The messages of one rank, in rounds: at most one to and one from every peer in each, hop by hop."""

    def __init__(
        self,
        plan: RefitPlan,
        rank: int,
        source: BoundTensors | None,
        target: BoundTensors | None,
        device: torch.device,
    ) -> None:
        """Cut, and make staging on a device; raises `Infeasible` where the memory limit has no room."""
        self.rank, self.source, self.target = rank, source, target
        self.hops = [
            HopExchange(hop, rank, (target, target) if hop.inside else (source, target), device)
            for hop in hops(plan, rank)
        ]
        staged = max(hop.staged for hop in self.hops)
        self.staging = torch.empty(staged, dtype=torch.uint8, device=device)
        self.bind()

    @property
    def rounds(self) -> list[tuple[list[RefitMessage], list[RefitMessage]]]:
        """The rounds of all hops, one behind the other."""
        return [each for hop in self.hops for each in hop.rounds]

    @property
    def nbytes(self) -> int:
        """The bytes of staging and scratch: what the handle holds beside the parameters."""
        return self.staging.nbytes + sum(hop.scratch.nbytes for hop in self.hops if hop.scratch is not None)

    def bind(self) -> None:
        """Make every view again: after the parameters have moved."""
        # A target may hold tensors that were made in inference mode, of which only such views may be written.
        held = [x for side in (self.source, self.target) if side is not None for x in side.locals]
        self.inference = any(x.is_inference() for x in held)
        with pause_gc():
            for hop in self.hops:
                hop.bind(self.staging)
        self.local = self._local()

    def _local(self) -> RefitCopies:
        """The copies between the parameters of a rank that has both sides, whose plans have one hop."""
        first = self.hops[0]
        if not len(first.here):
            return RefitCopies()
        assert self.source is not None and self.target is not None
        mine = {x.untyped_storage().data_ptr() for x in self.source.locals if x.numel()}
        if any(x.untyped_storage().data_ptr() in mine for x in self.target.locals if x.numel()):
            raise LayoutError(
                f"rank {self.rank}: source and target share memory; legal are two models with tensors of their own"
            )
        return first.local()


class HopExchange:
    """The messages of one rank in one hop."""

    def __init__(
        self,
        hop: RefitHop,
        rank: int,
        ends: tuple[BoundTensors | None, BoundTensors | None],
        device: torch.device,
    ) -> None:
        """Cut what goes between the tensors of a rank that send and that receive, `ends`; errors as of `slots`."""
        self.hop, self.rank, self.device = hop, rank, device
        self.ends = {True: ends[0], False: ends[1]}
        found = hop.regions(rank)
        size = slots(hop)
        self.cut: dict[tuple[int, int], list[RefitChunk]] = {}
        for s, t in np.unique(np.stack([found.source, found.target], axis=1), axis=0).tolist():
            if s != t:
                self.cut[s, t] = chunks(
                    hop, found.select_regions((found.source == s) & (found.target == t)), size[s, t]
                )
        self.here = found.select_regions((found.source == rank) & (found.target == rank))
        self.scratch: torch.Tensor | None = None
        self.staged = self._slot_bytes()

    def _slot_bytes(self) -> int:
        """The bytes of all slots; a slot is as long as its longest message that is staged."""
        total = 0
        self.begin: dict[tuple[int, int], int] = {}
        for pair, found in self.cut.items():
            self.begin[pair] = total
            sends = pair[0] == self.rank
            longest = max((c.nbytes for c in found if not self._straight(c, sends)), default=0)
            total += -(-longest // 16) * 16
        return total

    def bind(self, staging: torch.Tensor) -> None:
        """Make the messages sent and received in every round, with views of the parameters and of staging."""
        self.bound = {sends: [] if side is None else side.locals for sends, side in self.ends.items()}
        self.begins = {sends: [x.storage_offset() for x in own] for sends, own in self.bound.items()}
        self.rounds: list[tuple[list[RefitMessage], list[RefitMessage]]] = []
        for pair, found in self.cut.items():
            sends = pair[0] == self.rank
            for k, chunk in enumerate(found):
                if k == len(self.rounds):
                    self.rounds.append(([], []))
                self.rounds[k][0 if sends else 1].append(self._message(staging, pair, chunk, sends))

    def local(self) -> RefitCopies:
        """Return the copies of what stays, from the own tensors that send to those that receive."""
        copies = RefitCopies()
        moves = self.here.move.tolist()
        plus = {move: self.hop.dtypes(move, True)[2] + self.hop.dtypes(move, False)[2] for move in set(moves)}
        for into, out_of, move in zip(
            self._region_views(self.here, False), self._region_views(self.here, True), moves, strict=True
        ):
            self._add_copy(copies, into, out_of, plus[move])
        return copies

    def _straight(self, chunk: RefitChunk, sends: bool) -> bool:
        """Whether a message is one contiguous run of a parameter in the dtype that travels."""
        side = self.ends[sends]
        if len(chunk.rows) != 1 or side is None or side.held[0].local.device != self.device:
            return False
        strides = (chunk.rows.source_strides if sends else chunk.rows.target_strides)[0].tolist()
        length = 1
        for size, stride in zip(reversed(chunk.rows.sizes[0].tolist()), reversed(strides), strict=True):
            if size > 1 and stride != length:
                return False
            length *= size
        own, wire, plus = self.hop.dtypes(int(chunk.rows.move[0]), sends)
        return own == wire and not plus

    def _message(self, staging: torch.Tensor, pair: tuple[int, int], chunk: RefitChunk, sends: bool) -> RefitMessage:
        peer = pair[1] if sends else pair[0]
        if self._straight(chunk, sends):
            (own,) = self._region_views(chunk.rows, sends)
            data = torch.as_strided(own, (own.numel(),), (1,), own.storage_offset())
            return RefitMessage(peer, data.view(torch.uint8), RefitCopies())
        start = self.begin[pair]
        data = staging[start : start + chunk.nbytes]
        copies = RefitCopies()
        moves = chunk.rows.move.tolist()
        travels = {move: self.hop.dtypes(move, sends)[1:] for move in set(moves)}
        typed = {wire: data.view(wire) for wire, _ in travels.values()}
        begins = {wire: whole.storage_offset() for wire, whole in typed.items()}
        sizes = chunk.rows.sizes
        inner = np.ones_like(sizes)  # strides of a region that lies contiguous
        inner[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
        rows = zip(
            self._region_views(chunk.rows, sends), moves, chunk.at.tolist(), sizes.tolist(), inner.tolist(), strict=True
        )
        for own, move, at, shape, strides in rows:
            wire, plus = travels[move]
            less = len(shape) - own.ndim
            staged = torch.as_strided(typed[wire], shape[less:], strides[less:], begins[wire] + at // wire.itemsize)
            self._add_copy(copies, *((staged, own) if sends else (own, staged)), plus)
        return RefitMessage(peer, data, copies)

    def _region_views(self, rows: RefitRegions, sends: bool) -> Iterator[torch.Tensor]:
        """Yield regions as views of this rank's parameters."""
        flat, begins = self.bound[sends], self.begins[sends]
        columns = (
            (rows.source_parameter, rows.source_offset, rows.source_strides)
            if sends
            else (rows.target_parameter, rows.target_offset, rows.target_strides)
        )
        outer = np.argmax(np.append(rows.sizes[:, :-1] != 1, np.ones((len(rows), 1), bool), axis=1), axis=1)
        listed = (c.tolist() for c in (*columns, rows.sizes, outer))
        for parameter, offset, steps, shape, first in zip(*listed, strict=True):
            yield torch.as_strided(flat[parameter], shape[first:], steps[first:], begins[parameter] + offset)

    def _add_copy(self, copies: RefitCopies, into: torch.Tensor, out_of: torch.Tensor, plus: int) -> None:
        if not plus:
            copies.into.append(into)
            copies.out_of.append(out_of)
            return
        wide = torch.float64 if torch.float64 in (into.dtype, out_of.dtype) else torch.float32
        if self.scratch is None:
            self.scratch = torch.empty(scratch_bytes(self.hop.plan) // 8, dtype=torch.float64, device=into.device)
        scratch = self.scratch.view(wide)
        for at, sizes in split_block(tuple(into.shape), scratch.numel()):
            within = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
            part = into[within]
            copies.added.append((part, out_of[within], scratch[: part.numel()].view(part.shape), plus))


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

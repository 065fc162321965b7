"""How a rank's rounds lie in its memory: messages, straight from a buffer or packed, and copies, on views of buffers.

A message is packed where it is more than one contiguous part of a buffer. Messages are of one element width, those of
all operands together. The staging buffers of messages serve a stage: the rounds up to one that closes, whose receives
can be posted at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

import torch

from shardplan.core.box_table import strides
from shardplan.core.tensor import TensorType
from shardplan.execution.lower import View, shape_of
from shardplan.execution.rank_rounds import PeerPiece, Piece, PieceCopy, RankKernel, RankRound
from shardplan.execution.torch.dtypes import fold, identity_of, torch_dtype
from shardplan.execution.torch.wire import TorchWire

Held = Mapping[str, torch.Tensor]  # by buffer


class Spot(NamedTuple):
    """A view of a buffer; of a staging buffer it has a dtype of its own, of the same width."""

    buffer: str
    dtype: str  # short name
    view: View


class SpotCopy(NamedTuple):
    """A view that is written, or folded, into one of its size; or a value without dims, which fills it."""

    source: Spot | torch.Tensor
    target: Spot
    fold: str | None = None


class Message(NamedTuple):
    """A contiguous run that travels, and what is packed into it before, or unpacked from it after."""

    peer: int  # device id
    run: Spot
    copies: tuple[SpotCopy, ...]


@dataclass(frozen=True)
class SpotRound:
    """What a rank does in a round; see `core.lowering.Round`."""

    sends: tuple[Message, ...]
    meanwhile: tuple[SpotCopy, ...]
    takes: tuple[Message, ...]
    then: tuple[SpotCopy, ...]
    kernels: tuple[RankKernel, ...]

    @cached_property
    def packs(self) -> tuple[SpotCopy, ...]:
        """What is packed for all sends: it only reads what stood before."""
        return merge_copies(c for m in self.sends for c in m.copies)

    @cached_property
    def unpacks(self) -> tuple[SpotCopy, ...]:
        """What is unpacked once all takes have come."""
        return merge_copies(c for m in self.takes for c in m.copies)


class Packing:
    """Lays out the stages of a step, one after another, and says which staging buffers it takes.

    `room` has their elements, `dtypes` theirs and those of all other buffers, by short name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], landing: Set[str]) -> None:
        """Take the buffers of a lowering; those in `landing` are not made."""
        self.room = {name: math.prod(shape) for name, shape in shapes.items() if name not in landing}
        self.dtypes = dict(dtypes)
        self._landing = landing
        self._used: Counter[str] = Counter()  # elements of the staging buffers, in this stage
        self._landed: dict[Piece, Spot] = {}

    def stage(self, rounds: Sequence[RankRound]) -> tuple[SpotRound, ...]:
        """Return the rounds of one stage as messages and copies."""
        self._used, self._landed = Counter(), {}
        found = tuple(
            SpotRound(
                tuple(self._sends(one.puts)),
                tuple(self._copies(one.meanwhile)),
                tuple(self._takes(one.takes)),
                tuple(self._copies(one.then)),
                one.kernels,
            )
            for one in rounds
        )
        self.room |= {name: max(n, self.room.get(name, 0)) for name, n in self._used.items()}
        return found

    def _spots(self, piece: Piece) -> tuple[Spot, ...]:
        if piece in self._landed:
            return (self._landed[piece],)
        dtype = self.dtypes[piece.buffer]
        return tuple(Spot(piece.buffer, dtype, view) for view in piece.views)

    def _reserve_staging(self, way: str, parts: Sequence[Spot]) -> Spot:
        """A new run of a staging buffer, with room for some parts."""
        dtype, n = parts[0].dtype, sum(part.view.elements for part in parts)
        name = f"{way} {dtype}"
        self.dtypes[name] = dtype
        self._used[name] += n
        return Spot(name, dtype, View((n,), (1,), self._used[name] - n))

    def _by_peer(self, pieces: Iterable[PeerPiece]) -> Iterator[tuple[int, list[Piece]]]:
        """The pieces of each message; messages with one peer go narrow elements first, on both sides."""
        found: dict[tuple[int, int], list[Piece]] = {}
        for peer, piece in pieces:
            width = torch_dtype(self.dtypes[piece.buffer]).itemsize
            found.setdefault((width, peer), []).append(piece)
        for key in sorted(found, key=lambda key: key[0]):
            yield key[1], found[key]

    def _sends(self, puts: Iterable[PeerPiece]) -> Iterator[Message]:
        packed: dict[tuple[Spot, ...], Spot] = {}
        for peer, pieces in self._by_peer(puts):
            parts = tuple(spot for piece in pieces for spot in self._spots(piece))
            if is_run(parts):
                yield Message(peer, flat(parts[0]), ())
            elif parts in packed:  # several peers get what is packed once
                yield Message(peer, packed[parts], ())
            else:
                run = packed[parts] = self._reserve_staging("sent", parts)
                yield Message(peer, run, tuple(map(SpotCopy, parts, cut_spot(run, parts))))

    def _takes(self, takes: Iterable[PeerPiece]) -> Iterator[Message]:
        for peer, pieces in self._by_peer(takes):
            parts = [spot for piece in pieces for spot in self._spots(piece)]
            lands = [piece.buffer in self._landing for piece in pieces]
            if is_run(parts) and not lands[0]:
                yield Message(peer, flat(parts[0]), ())
                continue
            run = self._reserve_staging("taken", parts)
            places = iter(cut_spot(run, parts))
            copies: list[SpotCopy] = []
            for piece, landed in zip(pieces, lands, strict=True):
                for part in self._spots(piece):
                    if landed:
                        self._landed[piece] = next(places)
                    else:
                        copies.append(SpotCopy(next(places), part))
            yield Message(peer, run, tuple(copies))

    def _copies(self, copies: Iterable[PieceCopy]) -> Iterator[SpotCopy]:
        for source, target, reduction in copies:
            into: Sequence[Spot] = self._spots(target)
            if source is None:
                blank = identity_of(reduction or "sum", self.dtypes[target.buffer])
                yield from (SpotCopy(blank, spot) for spot in into)
                continue
            frm: Sequence[Spot] = self._spots(source)
            if [spot.view.size for spot in frm] != [spot.view.size for spot in into]:
                if is_run(into):
                    into = cut_spot(into[0], frm)
                else:
                    if not is_run(frm):
                        run = self._reserve_staging("between", frm)
                        yield from map(SpotCopy, frm, cut_spot(run, frm))
                        frm = [run]
                    frm = cut_spot(frm[0], into)
            yield from map(SpotCopy, frm, into, repeat(reduction))


def is_run(spots: Sequence[Spot]) -> bool:
    """Say whether some spots are one contiguous part of a buffer."""
    return len(spots) == 1 and spots[0].view.contiguous


def flat(spot: Spot, elements: int | None = None) -> Spot:
    """Return a contiguous spot without its dims; of more elements where it is the first of several in a row."""
    return spot._replace(view=View((spot.view.elements if elements is None else elements,), (1,), spot.view.offset))


def merge_copies(copies: Iterable[SpotCopy]) -> tuple[SpotCopy, ...]:
    """Return the same copies, those at equal steps from one to the next as one with a dim more: one kernel each.

    They must not depend on their order.
    """
    found = list(copies)
    while True:
        shorter: list[SpotCopy] = []
        k = 0
        while k < len(found):
            n = 1
            while k + n < len(found) and _in_step(found[k : k + n + 1]):
                n += 1
            shorter.append(found[k] if n == 1 else _stack_spots(found[k], found[k + 1], n))
            k += n
        if len(shorter) == len(found):
            return tuple(found)
        found = shorter


def _in_step(copies: Sequence[SpotCopy]) -> bool:
    """Say whether the last of some copies is as far from the one before as the second is from the first."""
    first, second, before, last = copies[0], copies[1], copies[-2], copies[-1]
    for a, b, c, d in zip(first[:2], second[:2], before[:2], last[:2], strict=True):
        if not (isinstance(a, Spot) and isinstance(b, Spot) and isinstance(c, Spot) and isinstance(d, Spot)):
            return False
        if d._replace(view=a.view) != a or (d.view.size, d.view.stride) != (a.view.size, a.view.stride):
            return False
        if d.view.offset - c.view.offset != b.view.offset - a.view.offset or b.view.offset < a.view.offset:
            return False
    return first.fold == last.fold


def _stack_spots(first: SpotCopy, second: SpotCopy, count: int) -> SpotCopy:
    ends: list[Spot] = []
    for a, b in zip(first[:2], second[:2], strict=True):
        assert isinstance(a, Spot) and isinstance(b, Spot)
        view = View((count, *a.view.size), (b.view.offset - a.view.offset, *a.view.stride), a.view.offset)
        ends.append(a._replace(view=view))
    return SpotCopy(ends[0], ends[1], first.fold)


def cut_spot(run: Spot, like: Sequence[Spot]) -> list[Spot]:
    """Return the consecutive parts of a contiguous spot that have the sizes and dtypes of others."""
    found: list[Spot] = []
    start = run.view.offset
    for spot in like:
        size = spot.view.size
        found.append(Spot(run.buffer, spot.dtype, View(size, strides(size), start)))
        start += spot.view.elements
    return found


def landings(stages: Iterable[Sequence[RankRound]], names: Iterable[str]) -> set[str]:
    """Return which staging buffers of a lowering need not be made: they are read where messages lie that land in them.

    All that is read or written of them in a stage are pieces that were taken in it before.
    """
    found = set(names)
    for stage in stages if found else ():
        taken: set[Piece] = set()
        for one in stage:
            found -= {block.buffer for kernel in one.kernels for block in (*kernel.sources, *kernel.targets)}
            touched = [put.piece for put in one.puts] + _touched_pieces(one.meanwhile)
            found -= {piece.buffer for piece in touched if piece not in taken}
            taken |= {take.piece for take in one.takes}
            found -= {piece.buffer for piece in _touched_pieces(one.then) if piece not in taken}
    return found


def _touched_pieces(copies: Iterable[PieceCopy]) -> list[Piece]:
    return [piece for copy in copies for piece in copy[:2] if piece is not None]


def view_at(x: torch.Tensor, view: View) -> torch.Tensor:
    """Return a part of a contiguous array as a view."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def spot_view(held: Held, spot: Spot) -> torch.Tensor:
    """Return a spot as a view."""
    x, dtype = held[spot.buffer], torch_dtype(spot.dtype)
    return view_at(x if x.dtype == dtype else x.view(dtype), spot.view)


def copy(held: Held, copies: Iterable[SpotCopy]) -> None:
    """Do copies in order."""
    for source, target, reduction in copies:
        y = spot_view(held, target)
        x = source.to(y.device) if isinstance(source, torch.Tensor) else spot_view(held, source)
        if reduction is None:
            y.copy_(x)
        else:
            fold(y, x, reduction)


def maker(t: TensorType, device: int, elements: int = 0) -> Callable[[TorchWire], torch.Tensor]:
    """Return how the shard of a device, given by id, is allocated: in a storage of at least so many elements."""
    shape, dtype = shape_of(t, device), torch_dtype(t.dtype)
    n = math.prod(shape)

    def make(wire: TorchWire) -> torch.Tensor:
        if elements <= n:
            return torch.empty(shape, dtype=dtype, device=wire.device)
        return torch.empty(elements, dtype=dtype, device=wire.device)[:n].view(shape)

    return make

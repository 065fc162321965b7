"""What a rank packs for its peers: messages of parts of arrays, straight from an array where a part is contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch

from shardplan.core.tensor import Box, TensorType
from shardplan.execution.lower import View, box_elements, chunk_of, flat_boxes, shape_of, view_of
from shardplan.execution.torch.dtypes import torch_dtype
from shardplan.execution.torch.wire import TorchWire

Arrays = list[torch.Tensor]
MOST_KEPT = 256  # rounds of a step that are worked out in advance; of more, each is made when its turn comes
Round = TypeVar("Round")


class PeerPart(NamedTuple):
    """A part of an array that goes to a peer, or comes from it."""

    peer: int  # device id
    array: int  # which operand or result of the step
    shape: tuple[int, ...]  # of that array
    box: Box


def at(x: torch.Tensor, view: View) -> torch.Tensor:
    """Return a part of a contiguous array as a view."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def maker(t: TensorType, device: int) -> Callable[[TorchWire], torch.Tensor]:
    """Return how the shard of a device, given by id, is allocated."""
    shape, dtype = shape_of(t, device), torch_dtype(t.dtype)

    def make(wire: TorchWire) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=wire.device)

    return make


@dataclass(frozen=True, slots=True)
class Message:
    """What one peer gets, or gives, in one round: parts of arrays, and where they lie in the staging buffer."""

    peer: int
    runs: tuple[tuple[int, View, int], ...]  # array, part, offset in the staging buffer
    start: int
    stop: int  # of the staging buffer, in elements; equal where the message is one contiguous part
    packs: bool = True  # False where an earlier message has packed the same parts


def pack(parts: Sequence[PeerPart], chunk: int, chunks: int, shared: bool) -> tuple[Message, ...]:
    """Lay out the messages of round `chunk` of `chunks`: one a peer, with what the round moves of each of its parts.

    With `shared`, for a sender, equal messages lie in the staging buffer once.
    """
    by_peer: dict[int, list[tuple[int, View]]] = {}
    for peer, k, shape, box in parts:
        for piece in flat_boxes(box, *chunk_of(box_elements(box), chunk, chunks)):
            by_peer.setdefault(peer, []).append((k, view_of(shape, piece)))
    out: list[Message] = []
    packed: dict[tuple[tuple[int, View], ...], Message] = {}
    offset = 0
    for peer, runs in by_peer.items():
        twin = packed.get(tuple(runs)) if shared else None
        if twin is not None:
            out.append(replace(twin, peer=peer, packs=False))
            continue
        start = offset
        placed: list[tuple[int, View, int]] = []
        for k, view in runs:
            placed.append((k, view, offset))
            offset += view.elements
        if len(runs) == 1 and runs[0][1].contiguous:  # travels straight from or into its array
            offset = start
        packed[tuple(runs)] = message = Message(peer, tuple(placed), start, offset)
        out.append(message)
    return tuple(out)


@dataclass(frozen=True, slots=True)
class PackedRounds(Generic[Round]):
    """The rounds of a step in chunks, those that move something: made once where they are few, else at every run."""

    build: Callable[[int], Round | None]
    count: int
    kept: tuple[Round, ...] | None

    @staticmethod
    def of(build: Callable[[int], Round | None], count: int) -> PackedRounds[Round]:
        """Return the rounds `build(0)` to `build(count - 1)`; None is one in which nothing moves."""
        kept = [build(c) for c in range(count)] if count <= MOST_KEPT else None
        return PackedRounds(build, count, None if kept is None else tuple(r for r in kept if r is not None))

    def __iter__(self) -> Iterator[Round]:
        """Yield the rounds in which something moves, in order."""
        if self.kept is not None:
            yield from self.kept
            return
        for c in range(self.count):
            found = self.build(c)
            if found is not None:
                yield found  # made in its turn and dropped after it, so that many rounds take no memory


def largest_round(parts: Sequence[PeerPart], chunks: int, shared: bool) -> int:
    """Return the elements of the staging buffer that serves every round: at most ceil(n / chunks) of each part."""
    if chunks <= MOST_KEPT:
        return max(staged(pack(parts, c, chunks, shared)) for c in range(chunks))
    boxes = [(part.array, part.box) for part in parts]
    return sum(-(-box_elements(box) // chunks) for _, box in (set(boxes) if shared else boxes))


def staged(messages: Sequence[Message]) -> int:
    """Return the elements of the staging buffer that messages need."""
    return max((m.stop for m in messages), default=0)


def receive_buffer(m: Message, out: Arrays, stage: torch.Tensor | None) -> torch.Tensor:
    """Return what a message is received into: its part of the results, or of the staging buffer."""
    if stage is None or m.stop == m.start:
        k, view, _ = m.runs[0]
        return flat_view(out[k], view)
    return stage[m.start : m.stop]


def send_buffer(m: Message, arrays: Arrays, stage: torch.Tensor | None) -> torch.Tensor:
    """Return what a message is sent from: its part of the operands, or of the staging buffer, into which it packs."""
    if stage is None or m.stop == m.start:
        k, view, _ = m.runs[0]
        return flat_view(arrays[k], view)
    for k, view, offset in m.runs if m.packs else ():
        x = arrays[k]
        here = stage[offset : offset + view.elements]
        (here if here.dtype == x.dtype else here.view(x.dtype)).view(view.size).copy_(at(x, view))
    return stage[m.start : m.stop]


def unpack(m: Message, out: Arrays, stage: torch.Tensor) -> None:
    """Copy a received message from the staging buffer to its parts."""
    for k, view, offset in m.runs:
        y = out[k]
        here = stage[offset : offset + view.elements]
        at(y, view).copy_((here if here.dtype == y.dtype else here.view(y.dtype)).view(view.size))


def flat_view(x: torch.Tensor, view: View) -> torch.Tensor:
    """Return a contiguous part of an array as a flat view."""
    return x.as_strided((view.elements,), (1,), x.storage_offset() + view.offset)

"""Datatypes and traffic of MPI: what one device hands to it, with bounded waits and counted bytes.

Data travel as bytes, straight from and into the arrays: a part is a committed subarray type, several parts for a peer
are one struct type, so nothing of ours is packed and every element type is alike (MPI knows no bf16). What is counted
as received is the size of the types handed to MPI. `MPI` itself is imported on the first call, since importing it
starts it. A wire belongs to the thread of its run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.core.tensor import Box
from shardplan.execution.mpi.faults import MpiWatch

if TYPE_CHECKING:
    from mpi4py import MPI

DATA = 1  # the tag of point-to-point messages: one is enough, since a communicator is one program's


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts of one array."""

    array: int  # which of the operands or results of a step
    datatype: MPI.Datatype  # of the parts, from the array's first byte on
    nbytes: int  # of the parts


Message = tuple[Piece, ...]  # what one peer gets, or gives, in one round
Messages = dict[int, Message]  # by the device id of the peer
Arrays = Sequence[np.ndarray]


class Types:
    """The committed datatypes of a program bound to one device, each made once; `free` gives them back."""

    def __init__(self) -> None:
        """Start with none."""
        self._made: dict[tuple[tuple[int, ...], int, tuple[Box, ...]], MPI.Datatype] = {}

    def __len__(self) -> int:
        """Count them."""
        return len(self._made)

    def piece(self, array: int, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Piece:
        """Return the piece of the boxes of a contiguous array of `shape`, in their order."""
        from mpi4py import MPI

        key = (shape, itemsize, tuple(boxes))
        if key not in self._made:
            parts = [_subarray(shape, itemsize, box) for box in boxes]
            made = parts[0]
            if len(parts) > 1:
                made = MPI.Datatype.Create_struct([1] * len(parts), [0] * len(parts), parts)
                for part in parts:
                    part.Free()
            self._made[key] = made.Commit()
        found = self._made[key]
        return Piece(array, found, found.Get_size())

    def free(self) -> None:
        """Free all of them; nothing where MPI has ended."""
        from mpi4py import MPI

        made, self._made = list(self._made.values()), {}
        if not MPI.Is_finalized():
            for datatype in made:
                datatype.Free()


def _subarray(shape: tuple[int, ...], itemsize: int, box: Box) -> MPI.Datatype:
    from mpi4py import MPI

    if not shape:
        return MPI.BYTE.Create_contiguous(itemsize)
    widths = [1] * (len(shape) - 1) + [itemsize]
    sizes = [n * w for n, w in zip(shape, widths, strict=True)]
    counts = [(hi - lo) * w for (lo, hi), w in zip(box, widths, strict=True)]
    starts = [lo * w for (lo, _), w in zip(box, widths, strict=True)]
    return MPI.BYTE.Create_subarray(sizes, counts, starts)


@dataclass(slots=True)
class Pending:
    """A request under way."""

    request: MPI.Request
    peers: tuple[int, ...]  # device ids that it waits for


@dataclass(slots=True)
class MpiWire:
    """The traffic of one run of a program."""

    ranks: tuple[int, ...]  # device ids, ascending
    communicators: Mapping[tuple[int, ...], MPI.Intracomm]  # of the program, by their members; one is of all `ranks`
    watch: MpiWatch
    received: int = 0  # bytes of the types handed to MPI so far
    sent: int = 0
    _index: dict[int, int] = field(init=False)  # of a device id in the communicator of all ranks

    def __post_init__(self) -> None:
        """Number the devices as their communicator does."""
        self._index = {d: k for k, d in enumerate(self.ranks)}

    def all_to_all(
        self, members: tuple[int, ...], out: Arrays, sends: Messages, into: Arrays, receives: Messages
    ) -> list[Pending]:
        """Start one `Ialltoallw` among `members`, all of whom come here: parts of `out` go into parts of `into`."""
        base, types, made = _typed(out, sends)
        target, kinds, more = _typed(into, receives)
        request = self.communicators[members].Ialltoallw(
            _rows(base, types, members),
            _rows(target, kinds, members),
        )
        for datatype in (*made, *more):
            datatype.Free()  # MPI keeps them until the request is done
        self._count(sends, receives)
        peers = tuple(d for d in members if d in sends or d in receives)
        return [Pending(request, peers)]

    def messages(self, out: Arrays, sends: Messages, into: Arrays, receives: Messages) -> list[Pending]:
        """Start one message to each peer of `sends`, of `out`, and from each of `receives`, into `into`."""
        comm = self.communicators[self.ranks]
        pending: list[Pending] = []
        target, kinds, made = _typed(into, receives)
        for peer, kind in kinds.items():
            pending.append(Pending(comm.Irecv([target, 1, kind], self._index[peer], DATA), (peer,)))
        base, types, more = _typed(out, sends)
        for peer, kind in types.items():
            pending.append(Pending(comm.Isend([base, 1, kind], self._index[peer], DATA), (peer,)))
        for datatype in (*made, *more):
            datatype.Free()
        self._count(sends, receives)
        return pending

    def receive(self, peer: int, x: np.ndarray) -> Pending:
        """Start to receive a contiguous array."""
        from mpi4py import MPI

        self.received += x.nbytes
        request = self.communicators[self.ranks].Irecv([_memory(x), x.nbytes, MPI.BYTE], self._index[peer], DATA)
        return Pending(request, (peer,))

    def send(self, peer: int, x: np.ndarray) -> Pending:
        """Start to send a contiguous array."""
        from mpi4py import MPI

        self.sent += x.nbytes
        request = self.communicators[self.ranks].Isend([_memory(x), x.nbytes, MPI.BYTE], self._index[peer], DATA)
        return Pending(request, (peer,))

    def wait(self, pending: Sequence[Pending], group: Sequence[int]) -> None:
        """Wait until all of `pending` are done; `group`, device ids, is for the message of a failure.

        Raises what `MpiWatch.wait` raises.
        """
        left = list(pending)

        def done() -> bool:
            left[:] = [p for p in left if not p.request.Test()]
            return not left

        self.watch.wait(done, lambda: sorted({d for p in left for d in p.peers}), group)

    def _count(self, sends: Messages, receives: Messages) -> None:
        self.sent += sum(piece.nbytes for message in sends.values() for piece in message)
        self.received += sum(piece.nbytes for message in receives.values() for piece in message)


def _memory(x: np.ndarray) -> Any:
    from mpi4py import MPI

    return MPI.buffer.fromaddress(x.ctypes.data, x.nbytes)


def _typed(arrays: Arrays, messages: Messages) -> tuple[Any, dict[int, MPI.Datatype], list[MPI.Datatype]]:
    """Return the buffer and the datatype of every peer's message, and those that are of this run only.

    Parts of one array are relative to it, with the types of the program; parts of several are absolute addresses.
    """
    from mpi4py import MPI

    used = {piece.array for message in messages.values() for piece in message}
    if len(used) <= 1:
        base = _memory(arrays[used.pop()]) if used else None
        return base, {peer: message[0].datatype for peer, message in messages.items()}, []
    made: dict[int, MPI.Datatype] = {}
    for peer, message in messages.items():
        addresses = [arrays[piece.array].ctypes.data for piece in message]
        struct = MPI.Datatype.Create_struct([1] * len(message), addresses, [piece.datatype for piece in message])
        made[peer] = struct.Commit()
    return MPI.BOTTOM, made, list(made.values())


def _rows(base: Any, types: dict[int, MPI.Datatype], members: tuple[int, ...]) -> Any:
    """Return a side of `Ialltoallw`: a buffer with the counts, displacements and datatypes of all members."""
    from mpi4py import MPI

    counts = [int(d in types) for d in members]
    return [base, counts, [0] * len(members), [types.get(d, MPI.BYTE) for d in members]]

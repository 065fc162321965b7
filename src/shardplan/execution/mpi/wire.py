"""Datatypes and traffic of MPI: what one device hands to it, with bounded waits and counted bytes.

Data travel as bytes, straight from and into the arrays: a run of an array is bytes from some offset on, any other part
is a committed subarray type, several parts for a peer are one struct type, so nothing of ours is packed and every
element type is alike (MPI knows no bf16). What is counted as received is the size of the types handed to MPI. `MPI`
itself is imported on the first call, since importing it starts it. A wire belongs to the thread of its run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.core.tensor import Box
from shardplan.execution.lower import view_of
from shardplan.execution.mpi.faults import MpiWatch

if TYPE_CHECKING:
    from mpi4py import MPI

DATA = 1  # the tag of point-to-point messages: one is enough where a communicator is one program's
TAGS = 2**14  # of the programs of a job, one each in turn: within what MPI promises (32767)


@dataclass(frozen=True, slots=True)
class MpiPiece:
    """Parts of one array, as MPI takes them: `count` of a datatype, from `offset` bytes after its first one on."""

    array: str  # which buffer of the step
    offset: int
    count: int
    datatype: MPI.Datatype
    nbytes: int


Message = tuple[MpiPiece, ...]  # what one peer gets, or gives, in one round
Messages = dict[int, Message]  # by the device id of the peer
Buffers = Mapping[str, np.ndarray]


class Types:
    """The committed datatypes of a program bound to one device, each made once; `free` gives them back."""

    def __init__(self) -> None:
        """Start with none."""
        self._made: dict[tuple[tuple[int, ...], int, tuple[Box, ...]], MPI.Datatype] = {}

    def __len__(self) -> int:
        """Count them."""
        return len(self._made)

    def piece(self, array: str, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> MpiPiece:
        """Return the piece of the boxes of a contiguous array of `shape`, in their order."""
        from mpi4py import MPI

        view = view_of(shape, boxes[0])
        if len(boxes) == 1 and view.contiguous:
            nbytes = view.elements * itemsize
            return MpiPiece(array, view.offset * itemsize, nbytes, MPI.BYTE, nbytes)
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
        return MpiPiece(array, 0, 1, found, found.Get_size())

    def free_datatypes(self) -> None:
        """Free all of them; nothing where MPI has ended."""
        from mpi4py import MPI

        made, self._made = list(self._made.values()), {}
        if not MPI.Is_finalized():
            for datatype in made:
                datatype.Free()


def _subarray(shape: tuple[int, ...], itemsize: int, box: Box) -> MPI.Datatype:
    from mpi4py import MPI

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
    tag: int = DATA
    received: int = 0  # bytes of the types handed to MPI so far
    sent: int = 0
    _index: dict[int, int] = field(init=False)  # of a device id in the communicator of all ranks

    def __post_init__(self) -> None:
        """Number the devices as their communicator does."""
        self._index = {d: k for k, d in enumerate(self.ranks)}

    def all_to_all(
        self, members: tuple[int, ...], buffers: Buffers, sends: Messages, receives: Messages
    ) -> list[Pending]:
        """Start one `Ialltoallw` among `members`, all of whom come here."""
        base, out, made = _message_datatypes(buffers, sends)
        target, into, more = _message_datatypes(buffers, receives)
        request = self.communicators[members].Ialltoallw(_rows(base, out, members), _rows(target, into, members))
        for datatype in (*made, *more):
            datatype.Free()  # MPI keeps them until the request is done
        self._count(sends, receives)
        return [Pending(request, tuple(d for d in members if d in sends or d in receives))]

    def messages(self, buffers: Buffers, sends: Messages, receives: Messages) -> list[Pending]:
        """Start one message from each peer of `receives`, and one to each of `sends`."""
        pending: list[Pending] = []
        if not (sends or receives):
            return pending  # a device that is alone has no communicator
        comm = self.communicators[self.ranks]
        for start, messages in ((comm.Irecv, receives), (comm.Isend, sends)):
            for peer, message in messages.items():
                base, typed, made = _message_datatypes(buffers, {peer: message})
                count, offset, datatype = typed[peer]
                pending.append(Pending(start([base, (count, offset), datatype], self._index[peer], self.tag), (peer,)))
                for one in made:
                    one.Free()
        self._count(sends, receives)
        return pending

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


Typed = dict[int, tuple[int, int, Any]]  # by peer: count, offset in bytes from the base, datatype


def _message_datatypes(buffers: Buffers, messages: Messages) -> tuple[Any, Typed, list[MPI.Datatype]]:
    """Return the base and every peer's message of one side of a transfer, and the datatypes that are of this run only.

    Where each message is one piece, and all of one array, they are relative to it, with the types of the program; else
    they are absolute addresses.
    """
    from mpi4py import MPI

    pieces = [piece for message in messages.values() for piece in message]
    if len({piece.array for piece in pieces}) <= 1 and len(pieces) == len(messages):
        base = _memory(buffers[pieces[0].array]) if pieces else None
        return base, {peer: (one.count, one.offset, one.datatype) for peer, (one,) in messages.items()}, []
    made: dict[int, MPI.Datatype] = {}
    for peer, message in messages.items():
        addresses = [buffers[piece.array].ctypes.data + piece.offset for piece in message]
        counts, types = [piece.count for piece in message], [piece.datatype for piece in message]
        made[peer] = MPI.Datatype.Create_struct(counts, addresses, types).Commit()
    return MPI.BOTTOM, {peer: (1, 0, datatype) for peer, datatype in made.items()}, list(made.values())


def _rows(base: Any, typed: Typed, members: tuple[int, ...]) -> Any:
    """Return a side of `Ialltoallw`: a buffer with the counts, displacements and datatypes of all members."""
    from mpi4py import MPI

    counts, offsets, types = zip(*(typed.get(d, (0, 0, MPI.BYTE)) for d in members), strict=True)
    return [base, counts, offsets, types]

"""`SymmetricHeap`: the same memory on every rank, and `SymmetricTensor`, a tensor in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardplan.errors import BackendError, excerpt, optional
from shardplan.fused.heap.devices import DEVICES, DeviceSegment, device_parts
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.heap.header import LINE, HeapHeader, HeapPeer, Words
from shardplan.fused.heap.net import NetPeer, NetSegment
from shardplan.fused.heap.peers import Peer
from shardplan.fused.heap.segments import ALIGN, SEGMENTS, Segment, ShmSegment, sweep

if TYPE_CHECKING:
    import torch

GatherBytes = Callable[[bytes], list[bytes]]
SECONDS = 30.0  # that a collective of the heap waits
CHECKED = "checked"  # under which kernels keep what they say of failures
_TORCH = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "u8": "uint8",
}
_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "u8": 1}


@dataclass(frozen=True, slots=True)
class SymmetricTensor:
    """A tensor at the same offset of every rank's heap."""

    heap: SymmetricHeap
    shape: tuple[int, ...]
    dtype: str
    offset: int
    label: str

    @property
    def nbytes(self) -> int:
        """Its bytes on one rank."""
        return math.prod(self.shape) * _BYTES[self.dtype]

    @property
    def local(self) -> torch.Tensor:
        """The own one, as a torch tensor on the heap's memory."""
        return self.peer(self.heap.rank)

    def peer(self, rank: int) -> torch.Tensor:
        """Return that of a rank, as a torch tensor on its memory: what is stored here is there."""
        torch = optional("torch", "torch")
        if not self.nbytes:
            return torch.empty(self.shape, dtype=getattr(torch, _TORCH[self.dtype]), device=self.heap.device)
        span = slice(self.offset, self.offset + self.nbytes)
        raw = self.heap.parts[rank][span] if self.heap.parts else torch.from_numpy(self.heap.memory[rank][span])
        return raw.view(getattr(torch, _TORCH[self.dtype])).view(self.shape)


class SymmetricHeap:
    """Memory of the same layout on every rank of a group, which all of them map (paper, section 3.1).

    `rank` and `ranks` say who this is. Use it in a `with` block: leaving it by an exception has the other ranks fail,
    too, in milliseconds.

    >>> with SymmetricHeap.create(1 << 16, "virtual", lambda mine: [mine], "doc") as heap:
    ...     x = heap.alloc((2, 3), "f32", "x")
    ...     print(heap.ranks, x.offset % 256, x.peer(0).shape)
    1 0 torch.Size([2, 3])
    """

    def __init__(
        self,
        memory: Sequence[np.ndarray],
        rank: int,
        peers: Sequence[HeapPeer],
        name: str,
        net: NetSegment | None = None,
    ) -> None:
        """Stand on memory that all have mapped, or on mirrors of it; see `create`."""
        self.memory, self.rank, self.ranks, self.name, self.net = list(memory), rank, len(memory), name, net
        self.header = HeapHeader(self.memory, rank, peers, None if net is None else self._carry)
        self.nbytes = len(memory[rank])
        self.used = HeapHeader.size(self.ranks)
        self.touched = 0  # below which memory was used before
        self.holes: list[tuple[int, int]] = []  # below `used`, given up again, sorted: begins and ends
        self.log = hashlib.sha256()
        self.closed = False
        self._exchange: GatherBytes | None = None
        self._close: Callable[[], None] | None = None
        self.seconds = SECONDS  # that an operator waits
        self.tally: Any = None  # that counts what operators move, where somebody asks: `calls.moved_tally`
        self.tensors: dict[int, SymmetricTensor] = {}  # by offset
        self.kernels: Any = None  # that run the operators where those of CPUs do not: `triton.serving.TritonKernels`
        self.parts: list[torch.Tensor] = []  # the data of every rank, where that is on GPUs
        self._segment: DeviceSegment | None = None  # which owns what `parts` may only point to
        self.device = "cpu"  # the kind of device on which data are, as torch names it
        self.kept: dict[Any, Any] = {}  # what operators keep beside it, until it is reset or closed

    @classmethod
    def create(cls, nbytes: int, backend: str, exchange: GatherBytes, name: str) -> SymmetricHeap:
        """Return this rank's view of a new heap of `nbytes` on every rank, all zero; collective.

        `exchange` gives all ranks what each of them gives, in the order of ranks: it is the whole bootstrap, and is
        asked again for `reset`. Backends are `shm`, for processes, `virtual`, for threads of this one, `net`, for
        processes on several nodes: see `net`; and `cuda_ipc` and `torch_symm` for GPUs of one machine: see `devices`.

        Raises `BackendError` where the backend is unknown or the machine has not so much memory, and `HeapMismatch`
        where ranks ask for different heaps.
        """
        kind = backend.partition(":")[0]
        if kind != "net" and backend not in SEGMENTS and backend not in DEVICES:
            legal = ", ".join((*SEGMENTS, *DEVICES, "net", "net:ADDRESS", "net:ADDRESS@NODE"))
            raise BackendError(f"symmetric heap {name}: backend {excerpt(backend)}; legal are {legal}")
        if type(nbytes) is not int or nbytes <= 0:
            raise BackendError(f"symmetric heap {name}: {excerpt(nbytes)} bytes; legal is a positive integer")
        if kind != "virtual":
            sweep()
        peer, asked, wrong = Peer.me(), f"{kind} {nbytes} {name}", None
        try:  # one that fails tells the others instead of leaving them to wait
            # Room for the header of any number of ranks comes on top, once that number is known.
            ranks = len(exchange(asked.encode()))
            size = (0 if kind in DEVICES else -(-nbytes // ALIGN) * ALIGN) + HeapHeader.size(ranks)
            if kind == "net":
                segment = NetSegment(size, name, backend)
            else:
                segment = SEGMENTS.get(kind, ShmSegment)(size, name)
            mine = f"{segment.token}\n{peer.pid}\n{peer.started}\n{asked}"
        except BackendError as error:
            segment, wrong, mine = None, error, ""
        said = [raw.decode().split("\n") for raw in exchange(mine.encode())]
        memory: list[np.ndarray] = []
        mapped = [b""]
        try:
            if segment is not None:
                memory += _open_segments(segment, said, asked, name)
        except (BackendError, OSError) as error:
            wrong = error if isinstance(error, BackendError) else BackendError(f"symmetric heap {name}: {error}")
        finally:
            if segment is not None and len(memory) < len(said) and wrong is None:  # not ours to answer: an interrupt
                segment.close()
        try:
            mapped = exchange(b"mapped" if wrong is None else b"")
        finally:
            if segment is not None and not all(mapped):
                segment.close()
        if wrong is not None:
            raise wrong
        if segment is None or not all(mapped):
            raise BackendError(f"symmetric heap {name}: rank {mapped.index(b'')} could not map it")
        rank = [fields[0] for fields in said].index(segment.token)
        segment.publish()
        peers: list[Peer | NetPeer] = [Peer(int(f[1]), int(f[2])) for f in said]
        net = segment if isinstance(segment, NetSegment) else None
        if net is not None:
            try:
                peers = net.accept_peers([f[0] for f in said], [Peer(int(f[1]), int(f[2])) for f in said])
            except BackendError:
                net.close()
                raise
        found = cls(memory, rank, peers, name, net)
        found._exchange, found._close = exchange, segment.close
        if kind in DEVICES:
            try:
                found._on_devices(kind, nbytes, exchange)
            except BaseException:
                found.close()
                raise
        return found

    def _on_devices(self, kind: str, nbytes: int, exchange: GatherBytes) -> None:
        """Have the data on GPUs; each begins with the word that says to kernels that a rank failed."""
        self.nbytes, self.used = -(-nbytes // ALIGN) * ALIGN + ALIGN, ALIGN
        self._segment, self.parts = device_parts(kind, self.nbytes, self.rank, exchange, self.name)
        self.device, self.header.push = self._segment.device, self._tell

    def _tell(self, to: int, part: int, offset: int, nbytes: int) -> None:
        if not offset:
            with suppress(RuntimeError):  # of a device that is lost: the others are still told
                self.parts[to][:4].fill_(1)

    def __enter__(self) -> SymmetricHeap:
        """Return it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Have the others fail where this rank does, and let go of the memory."""
        if error is not None and not self.closed:
            self.header.fail(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self.close()

    @property
    def table(self) -> np.ndarray:
        """Where each rank's memory lies in this process, int64 [ranks]."""
        addresses = [x.data_ptr() for x in self.parts] or [x.ctypes.data for x in self.memory]
        return np.array(addresses, np.int64)

    def _carry(self, to: int, part: int, offset: int, nbytes: int) -> None:
        assert self.net is not None
        self.net.push(to, part, self.memory[part].ctypes.data + offset, (nbytes,), (1,), 1)

    def push(self, to: int, view: torch.Tensor) -> None:
        """Send what was stored in a view of a rank's memory, where that is on another node; a signal goes behind it."""
        if self.net is not None:
            size = view.dtype.itemsize
            strides = [n * size for n in view.stride()]
            self.net.push(to, to, view.data_ptr(), tuple(view.shape), strides, size)

    def push_word(self, to: int, word: Words) -> None:
        """Send a counter."""
        if self.net is not None:
            self.net.push(to, to, word.ctypes.data, (1,), (4,), 4)

    def gather(self, note: bytes, seconds: float = SECONDS, asking: str = "") -> list[bytes]:
        """Return what every rank says, in the order of ranks; collective, through the heap."""
        return self.header.gather(note, seconds, asking or f"symmetric heap {self.name}")

    def barrier(self, seconds: float = SECONDS) -> None:
        """Return once all ranks are here; raises `FusedTimeout` after so many seconds, `PeerLost` for lost peers."""
        self.header.barrier(seconds, f"symmetric heap {self.name}")

    def alloc(self, shape: Sequence[int], dtype: str, label: str) -> SymmetricTensor:
        """Return a new tensor at the same offset of every rank, zeros; collective.

        Ranks compare what they have allocated so far: a shape, dtype or label that differs is a `HeapMismatch` on all
        of them. Memory that is full is a `BackendError`.
        """
        shape = tuple(int(n) for n in shape)
        if dtype not in _BYTES or any(n < 0 for n in shape):
            raise BackendError(f"alloc {label}: {excerpt(dtype)}{list(shape)}; legal dtypes are {', '.join(_BYTES)}")
        made = SymmetricTensor(self, shape, dtype, 0, label)
        offset, size, left = self._room(made.nbytes)
        made = replace(made, offset=offset)
        asked = f"{label} {dtype}{list(shape)}"
        self.log.update(asked.encode() + b"\n")
        mine = self.log.digest() + asked.encode()
        for other, said in enumerate(self.gather(mine[: 1 << 10], asking=f"alloc {label}")):
            if said[:32] != mine[:32]:
                text = f"alloc: rank {other} asks for {said[32:].decode()}, rank {self.rank} for {asked}"
                raise HeapMismatch(text + " (or asked for something else before)" * (said[32:] == mine[32:]))
        if offset + size > self.nbytes:
            raise BackendError(
                f"alloc {asked}: {made.nbytes} bytes of symmetric heap {self.name}, of which {left} are left"
            )
        self.holes = [
            (begin, end)
            for a, b in self.holes
            for begin, end in ((a, min(b, offset)), (max(a, offset + size), b))
            if begin < end
        ]
        self.used = max(self.used, offset + size)
        self.tensors[offset] = made
        return made

    def _room(self, nbytes: int) -> tuple[int, int, int]:
        """Where so many bytes fit, the bytes that they take, and how many are left at one place.

        What was used before is zeroed again, before the ranks meet in `alloc`.
        """
        size = -(-max(1, nbytes) // ALIGN) * ALIGN
        at = next((a for a, b in self.holes if b - a >= size), self.used)
        if at < self.touched:
            if self.parts:
                self.parts[self.rank][at : at + size].zero_()
                self._settle()
            else:
                self.memory[self.rank][at : at + size] = 0
        self.touched = max(self.touched, at + size)
        return at, size, max(self.nbytes - self.used, *(b - a for a, b in self.holes), 0)

    def release(self, tensor: SymmetricTensor) -> None:
        """Give up a tensor, on all ranks in the same order; another `alloc` may have its memory then.

        This rank's device has ended what it was asked for by then.
        """
        self._settle()
        del self.tensors[tensor.offset]
        self.log.update(f"free {tensor.offset}\n".encode())
        end = tensor.offset + -(-max(1, tensor.nbytes) // ALIGN) * ALIGN
        holes: list[tuple[int, int]] = []
        for a, b in sorted([*self.holes, (tensor.offset, end)]):
            holes[-1:] = [(holes[-1][0], b)] if holes and holes[-1][1] == a else [*holes[-1:], (a, b)]
        if holes[-1][1] == self.used:  # the last ones in a row are as if they had never been
            self.used = holes.pop()[0]
        self.holes = holes

    def holding(self, x: torch.Tensor) -> SymmetricTensor | None:
        """Return the tensor at whose begin in this rank's memory a contiguous torch tensor lies, None for others."""
        if not x.is_contiguous() or x.device.type != self.device:
            return None
        return self.tensors.get(x.data_ptr() - int(self.table[self.rank]))

    def flags(self, count: int, label: str) -> list[Words]:
        """Return `count` counters of every rank, by rank int32 [count, 16], of which column 0 counts; collective.

        Each is on a line of its own. Refused for data on GPUs.
        """
        if self.parts:
            raise BackendError(f"symmetric heap {self.name}: flags {label} on {self.device}; legal is memory of CPUs")
        made = self.alloc((count, LINE // 4), "i32", label)
        span = slice(made.offset, made.offset + made.nbytes)
        return [part[span].view(np.int32).reshape(count, LINE // 4) for part in self.memory]

    def check(self) -> None:
        """Return once all calls so far have ended on this rank's device; raises what failed in one of them.

        Calls of kernels of GPUs return before that, and only a later call raises, if this is not asked.
        """
        self._settle()
        for record in self.kept.get(CHECKED, ()):
            record.check()
        self.header.check(f"symmetric heap {self.name}")

    def reset(self) -> None:
        """Make it usable again after a failure, all words zero and all tensors given up; collective.

        Instances of operators are made again at their next call.
        """
        if self._exchange is None:
            raise BackendError(f"symmetric heap {self.name}: reset of a heap without an exchange")
        self._settle()
        counts = b"" if self.net is None else json.dumps(self.net.counts()).encode()
        said = self._exchange(counts)
        if self.net is not None:
            self.net.settle([json.loads(each) for each in said], self.seconds)
        self.memory[self.rank][:] = 0
        self.header.clear()
        self.used, self.log = ALIGN if self.parts else HeapHeader.size(self.ranks), hashlib.sha256()
        if self.parts:
            self.parts[self.rank].zero_()
            self._settle()
        self.kept.clear()
        self.tensors.clear()
        self.holes.clear()
        self._exchange(b"cleared")

    def _settle(self) -> None:
        """Return once the device has done what was asked of it: the others hear of it next."""
        if self.parts:
            int(self.parts[self.rank][0])

    def close(self) -> None:
        """Let go of the memory; of a view that somebody still holds, when that goes."""
        if not self.closed and self._close is not None:
            self.kept.clear()
            nothing = HeapHeader([np.zeros(HeapHeader.size(1), np.uint8)], 0, [Peer.me()])
            self.memory, self.parts, self.kernels, self.net, self.header = [], [], None, None, nothing
            self._segment = None
            self._close()
        self.closed = True


def size_class(nbytes: int) -> int:
    """Return the bytes that are reserved for so many that vary: at most an eighth more, so that growing is seldom.

    >>> size_class(1), size_class(4096), size_class(4097), size_class(1_000_001)
    (256, 4096, 4608, 1048576)
    """
    step = 256 << max(0, (max(1, nbytes) - 1).bit_length() - 12)
    return -(-max(1, nbytes) // step) * step


def _open_segments(segment: Segment, said: Sequence[Sequence[str]], asked: str, name: str) -> list[np.ndarray]:
    """The memory of all ranks, of which each said token, process, its start, and what it asks for."""
    for other, fields in enumerate(said):
        if len(fields) != 4:
            raise BackendError(f"symmetric heap {name}: rank {other} has no memory for it")
        if fields[3] != asked:
            raise HeapMismatch(f"symmetric heap: rank {other} asks for {fields[3]}, this rank for {asked}")
    return [segment.open(fields[0]) for fields in said]

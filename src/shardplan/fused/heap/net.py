"""The memory of a heap between nodes: `net`.

A rank stores into a mirror of its peer's memory, and what it stored goes over TCP into the memory itself, in order, by
one thread a rank (paper, section 3.2: a slice, and behind it its flag). Ranks of one node map each other's memory, as
with `shm`. A backend's text is `net`, `net:ADDRESS` or `net:ADDRESS@NODE`: the address under which others reach this
rank, 127.0.0.1 where none is given, and the node's name, by default the network namespace.

A rank listens on that address alone, and only until all have met. Its secret comes to the others with its address, by
the group's own exchange; who does not know it is turned away (`handshake`), and the others go on.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardplan.errors import BackendError, excerpt
from shardplan.fused.heap.handshake import Listener, connect, new_secret, note_of
from shardplan.fused.heap.peers import Peer
from shardplan.fused.heap.segments import Bytes, ShmSegment

HEAD = struct.Struct("<iqqqq")  # part, offset, runs, bytes of a run, bytes between runs
BYE = -1
SECONDS = 10.0  # that all connections, and the last messages, may take
TICK = 0.01  # between two looks of the thread that lets others in for whether it is over
CHUNK = 1 << 20


class NetPlace(NamedTuple):
    """Where a rank is: its segment's name, its address and port, the secret of who may come there, and its node."""

    token: str
    address: str
    port: int
    secret: str  # hexadecimal
    node: str

    @classmethod
    def parse(cls, text: str) -> NetPlace:
        """Read what `str` wrote."""
        token, address, port, secret, node = text.split("|")
        return cls(token, address, int(port), secret, node)

    def __str__(self) -> str:
        """Return it as one word of a note."""
        return "|".join(map(str, self))


@dataclass(eq=False)
class NetPeer:
    """A rank on another node: it lives as long as its connection, or until it takes its leave."""

    pid: int
    rank: int
    out: socket.socket
    queue: deque[Any] = field(default_factory=deque[Any])  # memoryviews, and arrays not yet packed
    left: bool = False
    broken: bool = False
    sent: int = 0
    received: int = 0

    def alive(self) -> bool:
        """Return whether it is there, or has left in order."""
        return self.left or not self.broken


class _Incoming:
    """A connection from a peer: what has come of a message so far."""

    def __init__(self, link: socket.socket, peer: int) -> None:
        self.link, self.peer = link, peer
        self.raw = bytearray()

    def message(self) -> tuple[tuple[int, int, int, int, int], bytes] | None:
        """Take the next whole message, None where it has not come yet."""
        if len(self.raw) < HEAD.size:
            return None
        head = HEAD.unpack_from(self.raw)
        end = HEAD.size + head[2] * head[3]
        if len(self.raw) < end:
            return None
        body = bytes(memoryview(self.raw)[HEAD.size : end])
        del self.raw[:end]
        return head, body


class NetSegment:
    """A rank's memory between nodes, mirrors of those on other nodes, and the thread that carries what is stored."""

    def __init__(self, nbytes: int, job: str, backend: str = "net") -> None:
        """Make it, and listen; raises `BackendError` for an address that is not this rank's."""
        self.job, self.nbytes = job, nbytes
        text = backend.partition(":")[2]
        address, _, node = text.partition("@")
        address = address or "127.0.0.1"
        secret = new_secret()
        try:
            self.listener = Listener(address, 0, secret)
        except OSError as error:
            why = error.strerror or error
            raise BackendError(
                f"symmetric heap {job}: backend {excerpt(backend)}; legal is net:ADDRESS of this rank: {why}"
            ) from None
        try:
            self.own = ShmSegment(nbytes, job)
        except BackendError:
            self.listener.close()
            raise
        self.place = NetPlace(self.own.token, address, self.listener.port, secret.hex(), node or _node())
        self.token = str(self.place)
        self.parts: list[Bytes] = []
        self.peers: dict[int, NetPeer] = {}
        self.rank = -1
        self.thread: threading.Thread | None = None
        self.ending = False
        self.wake, self.woken = socket.socketpair()
        self.entered: queue.Queue[tuple[socket.socket, bytes]] = queue.Queue()
        self.over = threading.Event()  # nobody else is to come in
        self.letting = threading.Thread(target=self._let_in, daemon=True, name=f"heap {job} listens")
        self.letting.start()

    def _let_in(self) -> None:
        """Greet who comes, while this rank maps memory and connects to others, who wait for their greeting."""
        while not self.over.is_set():
            for each in self.listener.admit(TICK):
                self.entered.put(each)

    def _close_listener(self) -> None:
        self.over.set()
        self.letting.join()
        self.listener.close()
        while not self.entered.empty():
            self.entered.get()[0].close()

    def open(self, token: str) -> Bytes:
        """Map a segment of this node, or mirror one of another and connect to it."""
        place, number = NetPlace.parse(token), len(self.parts)
        if token == self.token:
            self.rank = number
        if place.node == self.place.node:
            self.parts.append(self.own.open(place.token))
            return self.parts[-1]
        raw = np.zeros(self.nbytes + 4096, np.uint8)
        skip = -raw.ctypes.data % 4096
        self.parts.append(raw[skip : skip + self.nbytes])
        try:
            link = connect(place.address, place.port, bytes.fromhex(place.secret), note_of(self.token), SECONDS)
        except (OSError, BackendError) as error:
            where = f"{place.address}:{place.port}"
            raise BackendError(f"symmetric heap {self.job}: rank {number} at {where}: {error}") from None
        self.peers[number] = NetPeer(0, number, link)
        return self.parts[-1]

    def accept_peers(self, tokens: Sequence[str], peers: Sequence[Peer]) -> list[Peer | NetPeer]:
        """All have opened all: take the connections of the others, begin to carry, and return who they are."""
        numbers = {note_of(token): number for number, token in enumerate(tokens)}
        incoming: dict[int, _Incoming] = {}
        until = time.monotonic() + SECONDS
        while len(incoming) < len(self.peers):
            try:
                link, note = self.entered.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                absent = next(number for number in self.peers if number not in incoming)
                raise BackendError(f"symmetric heap {self.job}: rank {absent} has not connected") from None
            incoming[numbers[note]] = _Incoming(link, numbers[note])
        self._close_listener()
        for number, peer in self.peers.items():
            peer.pid = peers[number].pid
        self.thread = threading.Thread(
            target=self._carry, args=(list(incoming.values()),), daemon=True, name=f"heap {self.job}"
        )
        self.thread.start()
        return [self.peers.get(k, peer) for k, peer in enumerate(peers)]

    # What a rank stores

    def push(
        self, to: int, part: int, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
    ) -> None:
        """Send what lies in a rank's mirror to where it belongs; nothing for a rank of this node.

        `part` is whose memory the mirror is of, here and there; `strides` are in bytes.
        """
        peer = self.peers.get(to)
        if peer is None or 0 in shape:
            return
        dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1]
        length = itemsize
        while dims and dims[-1][1] == length:
            length *= dims.pop()[0]
        runs, between = dims.pop() if dims else (1, length)
        start = address - self.parts[part].ctypes.data
        for at in np.ndindex(*(n for n, _ in dims)):
            offset = start + sum(k * s for k, (_, s) in zip(at, dims, strict=True))
            memory = self.parts[part][offset:]
            rows = np.lib.stride_tricks.as_strided(memory, (runs, length), (between, 1))
            peer.sent += 1
            peer.queue.append(memoryview(HEAD.pack(part, offset, runs, length, between)))
            # A word may be stored again before it is sent; rows may not: the schedule says so.
            peer.queue.append(memoryview(bytes(rows)) if runs * length <= 64 else rows)
        with suppress(OSError):
            self.wake.send(b"!")

    # The thread

    def _carry(self, incoming: list[_Incoming]) -> None:
        ready = selectors.DefaultSelector()
        self.woken.setblocking(False)
        ready.register(self.woken, selectors.EVENT_READ)
        for one in incoming:
            one.link.setblocking(False)
            ready.register(one.link, selectors.EVENT_READ, one)
        waiting: set[int] = set()
        for peer in self.peers.values():
            peer.out.setblocking(False)
        while not self.ending or any(p.queue and not p.broken for p in self.peers.values()):
            for key, _ in ready.select(0.2):
                if key.fileobj is self.woken:
                    with suppress(BlockingIOError):
                        while self.woken.recv(4096):
                            pass
                elif isinstance(key.data, _Incoming):
                    self._receive(ready, key.data)
            for number, peer in self.peers.items():
                blocked = self._send(peer)
                if blocked and number not in waiting:
                    waiting.add(number)
                    ready.register(peer.out, selectors.EVENT_WRITE)
                elif not blocked and number in waiting:
                    waiting.discard(number)
                    ready.unregister(peer.out)
        ready.close()
        for one in incoming:
            one.link.close()

    def _send(self, peer: NetPeer) -> bool:
        """Send what a peer is to get; return whether its connection takes no more now."""
        while peer.queue and not peer.broken:
            head = peer.queue[0]
            if isinstance(head, np.ndarray):
                head = memoryview(np.ascontiguousarray(head).reshape(-1))
                peer.queue[0] = head
            try:
                done = peer.out.send(head)
            except BlockingIOError:
                return True
            except OSError:
                peer.broken = True
                return False
            if done == len(head):
                peer.queue.popleft()
            else:
                peer.queue[0] = head[done:]
        return False

    def _receive(self, ready: selectors.BaseSelector, one: _Incoming) -> None:
        try:
            more = one.link.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            ready.unregister(one.link)
            self.peers[one.peer].broken = True
            return
        one.raw += more
        while (message := one.message()) is not None:
            self._store_message(one, *message)

    def _store_message(self, one: _Incoming, head: tuple[int, int, int, int, int], body: bytes) -> None:
        """Store a message; of words all bytes at once."""
        part, offset, runs, length, between = head
        peer = self.peers[one.peer]
        if part == BYE:
            peer.left = True
            return
        memory = self.parts[part]
        if runs == 1 and length == 4 and offset % 4 == 0:
            memory[offset : offset + 4].view(np.int32)[0] = np.frombuffer(body, np.int32)[0]
        else:
            rows = np.lib.stride_tricks.as_strided(memory[offset:], (runs, length), (between, 1))
            rows[:] = np.frombuffer(body, np.uint8).reshape(runs, length)
        peer.received += 1

    # The end

    def counts(self) -> list[int]:
        """Return how many messages went to every rank."""
        return [self.peers[k].sent if k in self.peers else 0 for k in range(len(self.parts))]

    def settle(self, counts: Sequence[Sequence[int]], seconds: float) -> None:
        """Wait until all messages have come, `counts` being those of all ranks, and forget what mirrors hold."""
        until = time.monotonic() + seconds
        for number, peer in self.peers.items():
            while peer.received < counts[number][self.rank]:
                if time.monotonic() > until or not peer.alive():
                    raise BackendError(f"symmetric heap {self.job}: messages of rank {number} have not come")
                time.sleep(1e-4)
            self.parts[number][:] = 0

    def publish(self) -> None:
        """Take the segment's name away."""
        self.own.publish()

    def close(self) -> None:
        """Send what is left, take leave, and let go of all memory."""
        for peer in self.peers.values():
            if not peer.broken and self.thread is not None:
                peer.queue.append(memoryview(HEAD.pack(BYE, 0, 0, 0, 0)))
        self.ending = True
        if self.thread is not None:
            with suppress(OSError):
                self.wake.send(b"!")
            self.thread.join(SECONDS)
        self._close_listener()
        for link in (self.wake, self.woken, *(peer.out for peer in self.peers.values())):
            link.close()
        self.parts = []
        self.own.close()


def _node() -> str:
    """The network namespace of this process on this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()

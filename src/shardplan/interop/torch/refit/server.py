"""The keys and values of a meeting, kept by one rank for those that know the meeting's secret.

One thread serves all: a connection asks one thing at a time and waits for the answer, which `wait` may put off. A
request and its answer are a length (`SIZE`) and msgpack, which builds nothing but what `StoreRequest` says. It ends
once the rank that keeps it has left and no connection is there any more: others may still have to hear why a run
failed.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from contextlib import suppress

import msgspec

from shardplan.fused.heap.handshake import Listener

SIZE = struct.Struct("<I")
LONGEST = 1 << 26  # bytes of a request
SECONDS = 10.0  # that an answer may take to leave
TICK = 0.2  # seconds between two looks for waits that have ended, and for whether all have left

Answer = bytes | int | bool | None


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """What is asked of a meeting: an operation of a store of torch.distributed."""

    op: str
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    seconds: float = 0.0


def receive_message(link: socket.socket) -> bytes:
    """Return the next message; raises `OSError`, of one that is too long or not whole, too."""
    (size,) = SIZE.unpack(_exactly(link, SIZE.size))
    if size > LONGEST:
        raise ConnectionError(f"a message of {size} bytes; at most {LONGEST} are legal")
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        more = link.recv(min(size - len(raw), 1 << 20))
        if not more:
            raise ConnectionError("it closed the connection")
        raw += more
    return bytes(raw)


class MeetingServer:
    """The server of a meeting, on a thread of its own."""

    def __init__(self, listener: Listener) -> None:
        """Serve who comes in at a listener."""
        self.listener = listener
        self.values: dict[str, bytes] = {}
        self._links: set[socket.socket] = set()
        self._missing: dict[socket.socket, tuple[set[str], float]] = {}  # of those that wait: what for, until when
        self._waiting: defaultdict[str, set[socket.socket]] = defaultdict(set)  # by key that is missing
        self._left = threading.Event()
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener.ready, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="shardplan-meeting", daemon=True).start()

    def leave(self) -> None:
        """End once nobody is connected."""
        self._left.set()

    def _serve(self) -> None:
        while self._links or not self._left.is_set():
            for key, _ in self._ready.select(TICK):
                link = key.fileobj
                if isinstance(link, socket.socket) and link in self._links:
                    self._hear(link)
            for link, _ in self.listener.admit(0):
                link.settimeout(SECONDS)
                self._links.add(link)
                self._ready.register(link, selectors.EVENT_READ)
            now = time.monotonic()
            for link in [x for x, (_, until) in self._missing.items() if until < now]:
                self._answer_wait(link, False)
        self._ready.close()
        self.listener.close()

    def _hear(self, link: socket.socket) -> None:
        """Do what a connection asks; one that asks anything else is closed."""
        try:
            asked = msgspec.msgpack.decode(receive_message(link), type=StoreRequest)
            if asked.op == "wait":
                self._wait(link, asked)
            else:
                self._answer(link, self._answer_request(asked))
        except (OSError, msgspec.MsgspecError, LookupError, ValueError):
            self._close(link)

    def _answer(self, link: socket.socket, what: Answer) -> None:
        try:
            raw = msgspec.msgpack.encode(what)
            link.sendall(SIZE.pack(len(raw)) + raw)
        except OSError:
            self._close(link)

    def _close(self, link: socket.socket) -> None:
        self._forget(link)
        if link in self._links:
            self._links.discard(link)
            self._ready.unregister(link)
        with suppress(OSError):
            link.close()

    # Waits

    def _wait(self, link: socket.socket, asked: StoreRequest) -> None:
        missing = {key for key in asked.keys if key not in self.values}
        self._missing[link] = missing, time.monotonic() + asked.seconds
        for key in missing:
            self._waiting[key].add(link)
        if not missing:
            self._answer_wait(link, True)

    def _answer_wait(self, link: socket.socket, what: bool) -> None:
        self._forget(link)
        self._answer(link, what)

    def _forget(self, link: socket.socket) -> None:
        missing, _ = self._missing.pop(link, (set[str](), 0.0))
        for key in missing:
            self._waiting[key].discard(link)
            if not self._waiting[key]:
                del self._waiting[key]

    def _store(self, key: str, value: bytes) -> bytes:
        self.values[key] = value
        for link in list(self._waiting.pop(key, ())):
            missing = self._missing[link][0]
            missing.discard(key)
            if not missing:
                self._answer_wait(link, True)
        return value

    def _answer_request(self, asked: StoreRequest) -> Answer:
        """Do an operation, with the meaning that it has in torch's `TCPStore`; raises `ValueError` for another."""
        key, found = asked.keys[0], self.values.get(asked.keys[0])
        match asked.op:
            case "set":
                self._store(key, asked.value)
                return None
            case "get":
                return found
            case "check":
                return all(each in self.values for each in asked.keys)
            case "add":
                total = int(found or b"0") + asked.amount
                self._store(key, str(total).encode())
                return total
            case "compare_set":
                if (found or b"") == asked.expected:
                    return self._store(key, asked.value)
                return asked.expected if found is None else found
            case "delete_key":
                return self.values.pop(key, None) is not None
            case _:
                raise ValueError(asked.op)

"""Connections between processes that share a secret: a listener on one address, where nobody else comes in.

Both ends prove that they know the secret, and neither says it. The listener sends `MAGIC` and a random number, the peer
a random number of its own, a note of who it is, and a proof; the listener its own proof, or `REFUSED`:

    listener -> peer      magic[16] number[32]
    peer -> listener      number[32] note[32] proof[32]       HMAC-SHA256 of "peer", magic, both numbers and the note
    listener -> peer      proof[32]                           the same of "listener"

All have fixed sizes and are bounded in time, and at most `WAITING` connections are on their way in: of more the oldest
goes, which is one that says nothing. What travels afterwards is neither hidden nor signed. The secret comes by a way
that is trusted already: the exchange of a process group, or what a user wrote for both sides.

Heaps between nodes and the meetings of refits use it; it lies in the room furthest to the right of those that do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from shardplan.errors import BackendError

MAGIC = b"shardplan meet 1"
NUMBER, NOTE, PROOF = 32, 32, 32  # bytes
REFUSED = bytes(PROOF)
WAITING = 64  # connections that have not proved themselves yet
SECONDS = 10.0  # that such a one may take
BACKLOG = 128


def new_secret() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(32)


def note_of(text: str) -> bytes:
    """Return what says on a connection who its peer is, where that is told by a text."""
    return hashlib.sha256(text.encode()).digest()


def _proof(secret: bytes, who: str, numbers: bytes, note: bytes) -> bytes:
    key = hashlib.sha256(secret).digest()  # HMAC alone takes keys for equal that differ in zeros at their end
    return hmac.digest(key, b"\n".join((who.encode(), MAGIC, numbers, note)), "sha256")


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has proved nothing yet."""

    link: socket.socket
    until: float
    number: bytes
    raw: bytearray = field(default_factory=bytearray)


class Listener:
    """A socket that listens on one address, and those who are on their way in; one thread at a time uses it.

    `ready` is readable where `admit` has something to do.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        """Listen on that address of this host alone, port 0 for any free one; raises `OSError`."""
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.secret = secret
        self.socket = socket.socket(family, kind, protocol)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a port that has just been left
            self.socket.bind(address)
            self.socket.listen(BACKLOG)
        except OSError:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.socket, selectors.EVENT_READ)
        self._strangers: dict[_Stranger, None] = {}  # in the order in which they came

    def admit(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Wait so long at most; return the connections that have proved themselves since, blocking, and their notes."""
        found: list[tuple[socket.socket, bytes]] = []
        for key, _ in self.ready.select(seconds):
            if not isinstance(key.data, _Stranger):
                self._accept()
            elif key.data in self._strangers:
                found += self._hear(key.data)
        for stranger in [s for s in self._strangers if s.until < time.monotonic()]:
            self._drop(stranger)
        return found

    def close(self) -> None:
        """Listen no more, and turn away who is on the way in."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self.ready.close()
        self.socket.close()

    def _accept(self) -> None:
        try:
            link, _ = self.socket.accept()
        except BlockingIOError:
            return
        except OSError:  # one that is gone again, or no descriptor is free: the oldest gives its own back
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            else:
                time.sleep(0.01)
            return
        link.setblocking(False)
        stranger = _Stranger(link, time.monotonic() + SECONDS, secrets.token_bytes(NUMBER))
        self._strangers[stranger] = None
        self.ready.register(link, selectors.EVENT_READ, stranger)
        self._tell(stranger, MAGIC + stranger.number)
        if len(self._strangers) > WAITING:
            self._drop(next(iter(self._strangers)))

    def _tell(self, stranger: _Stranger, what: bytes) -> bool:
        """Send some bytes, for which a new connection has room; return whether it took them."""
        with suppress(OSError):
            if stranger.link.send(what) == len(what):
                return True
        self._drop(stranger)
        return False

    def _hear(self, stranger: _Stranger) -> list[tuple[socket.socket, bytes]]:
        """Read on; return the connection and its note where that has proved itself now."""
        size = NUMBER + NOTE + PROOF
        try:
            more = stranger.link.recv(size - len(stranger.raw))
        except BlockingIOError:
            return []
        except OSError:
            more = b""
        stranger.raw += more
        if len(stranger.raw) < size:
            if not more:
                self._drop(stranger)
            return []
        said = bytes(stranger.raw)
        numbers, note, proof = stranger.number + said[:NUMBER], said[NUMBER : NUMBER + NOTE], said[NUMBER + NOTE :]
        right = hmac.compare_digest(proof, _proof(self.secret, "peer", numbers, note))
        if not self._tell(stranger, _proof(self.secret, "listener", numbers, note) if right else REFUSED):
            return []
        if not right:
            self._drop(stranger)
            return []
        self.ready.unregister(stranger.link)
        del self._strangers[stranger]
        stranger.link.setblocking(True)
        stranger.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [(stranger.link, note)]

    def _drop(self, stranger: _Stranger) -> None:
        if stranger in self._strangers:
            del self._strangers[stranger]
            self.ready.unregister(stranger.link)
            stranger.link.close()


def connect(host: str, port: int, secret: bytes, note: bytes = bytes(NOTE), seconds: float = SECONDS) -> socket.socket:
    """Return a blocking connection to a listener that knows the secret.

    One that a listener dropped, since too many came at once, is made again, within `seconds`.

    Raises:
        OSError: nobody listens there, or nobody answered in time.
        BackendError: who listens there does not know the secret, or is something else.
    """
    until = time.monotonic() + seconds
    while True:
        link = socket.create_connection((host, port), max(until - time.monotonic(), 0.001))
        if link.getsockname() == link.getpeername():  # TCP connects a free port to itself where that is its own, too
            link.close()
            raise ConnectionRefusedError(f"{host}:{port}: nobody listens")
        try:
            _introduce(link, f"{host}:{port}", secret, note, until)
        except (ConnectionError, EOFError):
            link.close()
            if time.monotonic() > until:
                raise TimeoutError(f"{host}:{port} closed every connection") from None
            time.sleep(0.05)
            continue
        except TimeoutError:
            link.close()
            raise TimeoutError(f"{host}:{port} takes connections, and says nothing") from None
        except BaseException:
            link.close()
            raise
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link


def _introduce(link: socket.socket, where: str, secret: bytes, note: bytes, until: float) -> None:
    said = _receive_exactly(link, len(MAGIC) + NUMBER, until)
    if said[: len(MAGIC)] != MAGIC:
        raise BackendError(f"{where} answers, and is not shardplan")
    own = secrets.token_bytes(NUMBER)
    numbers = said[len(MAGIC) :] + own
    link.sendall(own + note + _proof(secret, "peer", numbers, note))
    if not hmac.compare_digest(_receive_exactly(link, PROOF, until), _proof(secret, "listener", numbers, note)):
        raise BackendError(f"{where} does not share this secret")


def _receive_exactly(link: socket.socket, size: int, until: float) -> bytes:
    """So many bytes; raises `EOFError` at the end, and `TimeoutError`."""
    raw = bytearray()
    while len(raw) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(left)
        more = link.recv(size - len(raw))
        if not more:
            raise EOFError
        raw += more
    return bytes(raw)

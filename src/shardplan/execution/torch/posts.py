"""Posts: what a rank runs, told to another from host to host, in some microseconds and with no thread to wake.

A post is the hash of the ranks of a run, its number, and the identity and the name of its program. It goes over a
connection of this package's own, whatever library carries the data: a message of gloo costs a call what its collective
costs. Ranks publish an address and a secret in the store when they first post; whoever has something for a rank
connects to it. Posts are taken by run, since runs that are under way at once post in another order on each rank.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

POST = struct.Struct("<qqq24s")  # of a name as many letters as an error needs
GREETING = struct.Struct("<16sq")  # the secret of the rank that is called, and the rank that calls
READ = 256 * POST.size  # bytes of a look at a connection
LOOK = 0.05  # seconds between two looks whether the run has failed meanwhile


class PostedRun(NamedTuple):
    """Of which run a post is."""

    ranks: int  # their hash
    number: int


class Post(NamedTuple):
    """What a rank runs."""

    identity: int  # equal for equal programs
    name: str  # for messages


class PostOffice:
    """The connections of one rank of a process group."""

    def __init__(self, store: Any, rank: int) -> None:
        """Listen, and say where."""
        self.store, self.rank = store, rank
        self.secret = secrets.token_bytes(16)
        here = local_address(store)
        self.listener = socket.create_server((here, 0), family=socket.AF_INET6 if ":" in here else socket.AF_INET)
        self.listener.setblocking(False)
        self.callers: dict[int, socket.socket] = {}  # by rank, of those that post to this one
        self.called: dict[int, socket.socket] = {}
        self.heard: dict[int, dict[PostedRun, Post]] = {}  # by rank, what were not asked for yet
        self.cut: dict[int, bytes] = {}  # by rank, the start of a post of which the rest has yet to come
        store.set(self._key(rank), f"{here} {self.listener.getsockname()[1]} {self.secret.hex()}")

    @staticmethod
    def _key(rank: int) -> str:
        return f"shardplan/posts/{rank}"

    def send(self, peer: int, run: PostedRun, post: Post, timeout: float) -> None:
        """Post to a rank; raises `OSError` or, where the rank has not said where it is, what the store raises."""
        if peer not in self.called:
            key = self._key(peer)
            self.store.wait([key], timedelta(seconds=timeout))
            there, port, secret = self.store.get(key).decode().split()
            line = socket.create_connection((there, int(port)), timeout)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(GREETING.pack(bytes.fromhex(secret), self.rank))
            line.settimeout(None)
            self.called[peer] = line
        self.called[peer].sendall(POST.pack(*run, post.identity, post.name.encode()))

    def take(self, peer: int, run: PostedRun, timeout: float, failed: Callable[[], bool]) -> Post | None:
        """Return what a rank posts of a run; None once `failed()` says that it will not come.

        Raises `TimeoutError` after `timeout` seconds, and `OSError` where the rank has gone.
        """
        heard = self.heard.setdefault(peer, {})
        until = 0.0
        while run not in heard:
            if self._read(peer, heard):
                continue
            now = time.monotonic()
            until = until or now + timeout
            if failed():
                return None
            if now > until:
                raise TimeoutError("timed out")
            select.select([self.callers.get(peer, self.listener)], [], [], min(LOOK, until - now))
        return heard.pop(run)

    def _read(self, peer: int, heard: dict[PostedRun, Post]) -> bool:
        """Take what has come, if anything."""
        if peer not in self.callers:
            return self._accept()
        try:
            data = self.callers[peer].recv(READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionError("it closed its connection")
        data = self.cut.pop(peer, b"") + data
        whole = len(data) - len(data) % POST.size
        for ranks, number, identity, name in POST.iter_unpack(data[:whole]):
            heard[PostedRun(ranks, number)] = Post(identity, name.rstrip(b"\0").decode(errors="replace"))
        if data[whole:]:
            self.cut[peer] = data[whole:]
        return True

    def _accept(self) -> bool:
        """Take a call, if there is one; who does not know the secret is none of this process group."""
        try:
            line, _ = self.listener.accept()
        except BlockingIOError:
            return False
        line.settimeout(1.0)
        with contextlib.suppress(OSError, struct.error):
            secret, rank = GREETING.unpack(line.recv(GREETING.size, socket.MSG_WAITALL))
            if secrets.compare_digest(secret, self.secret):
                line.settimeout(None)  # else Python waits so long even where it is not to wait
                self.callers[rank] = line
                return True
        line.close()
        return True

    def close(self) -> None:
        """Close all connections."""
        for line in (self.listener, *self.callers.values(), *self.called.values()):
            line.close()


def local_address(store: Any) -> str:
    """Return the address of this host towards the one of the store, by which the other ranks reach it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    there = getattr(store, "host", None) or socket.gethostname()  # a store in a file names no host
    for family, kind, _, _, address in _addresses(there):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # of datagrams: nothing is sent
            return probe.getsockname()[0]
    return "127.0.0.1"


def _addresses(host: str) -> list[Any]:
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    return []

"""Who knows the secret comes in, and nobody else: the listener itself, and heaps between nodes while strangers come."""

import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shardplan as sp
from rank_threads import Hub, in_threads
from shardplan.fused.heap import handshake, net
from shardplan.fused.heap.handshake import Listener, connect, note_of
from shardplan.fused.heap.symmetric import SymmetricHeap
from strangers import KINDS, come, listening, strangers

LOOPBACK = "0100007F"


class Served:
    """A listener with a thread that lets in."""

    def __init__(self, secret: bytes):
        self.listener = Listener("127.0.0.1", 0, secret)
        self.port, self.entered, self.over = self.listener.port, [], False
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self.over:
            self.entered += self.listener.admit(0.01)

    def wait(self, count: int) -> None:
        until = time.monotonic() + 20
        while len(self.entered) < count and time.monotonic() < until:
            time.sleep(0.001)
        assert len(self.entered) == count

    def __enter__(self) -> "Served":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()
        self.listener.close()
        for link, _ in self.entered:
            link.close()


def ended(link: socket.socket) -> bytes:
    """All that comes until the other end closes, which it must."""
    link.settimeout(20)
    raw = b""
    try:
        while more := link.recv(1 << 16):
            raw += more
    except ConnectionError:
        pass
    return raw


def test_who_knows_the_secret_is_let_in_with_a_note() -> None:
    with Served(b"key") as served:
        links = [connect("127.0.0.1", served.port, b"key", note_of(str(k))) for k in range(3)]
        served.wait(3)
        assert [note for _, note in served.entered] == [note_of(str(k)) for k in range(3)]
        links[1].sendall(b"hello")
        assert served.entered[1][0].recv(16) == b"hello"
        for link in links:
            link.close()


@pytest.mark.parametrize("secret", [b"kex", b"", b"key\0"])
def test_who_does_not_is_told_so_and_closed(secret: bytes) -> None:
    with Served(b"key") as served:
        with pytest.raises(sp.BackendError) as error:
            connect("127.0.0.1", served.port, secret)
        assert str(error.value) == f"127.0.0.1:{served.port} does not share this secret"
        assert not served.entered


def test_a_listener_that_does_not_know_the_secret_is_not_believed() -> None:
    with Served(b"key") as served, patch.object(handshake.hmac, "compare_digest", return_value=True):
        connect("127.0.0.1", served.port, b"other").close()  # the patch alone lets it in
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(handshake.MAGIC + bytes(32))
                said = link.recv(96)
                link.sendall(said[64:])  # what it heard, as its own proof

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(sp.BackendError, match="does not share this secret"):
            connect("127.0.0.1", server.getsockname()[1], b"key")
        thread.join()


def test_something_else_that_answers_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4))
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(sp.BackendError) as error:
            connect("127.0.0.1", port, b"key")
        assert str(error.value) == f"127.0.0.1:{port} answers, and is not shardplan"
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_of_every_kind_are_turned_away(kind: str) -> None:
    with patch.object(handshake, "SECONDS", 0.3), Served(b"key") as served:
        links = come(kind, "127.0.0.1", served.port)
        connect("127.0.0.1", served.port, b"key").close()
        for link in links:
            if link.fileno() >= 0:
                said = ended(link)
                assert kind != "wrong" or said == handshake.REFUSED
                link.close()
        served.wait(1)
        assert not served.listener._strangers


def test_a_greeting_cannot_be_said_again() -> None:

    with Served(b"key") as served:
        said = []
        real = handshake._proof
        with patch.object(handshake, "_proof", lambda s, w, n, note: said.append((n, note)) or real(s, w, n, note)):
            connect("127.0.0.1", served.port, b"key").close()
        numbers, stamp = said[0]
        with socket.create_connection(("127.0.0.1", served.port)) as link:
            link.recv(48)
            link.sendall(numbers[32:] + stamp + real(b"key", "peer", numbers, stamp))
            assert ended(link) == handshake.REFUSED
        served.wait(1)


def test_at_most_so_many_wait_and_the_oldest_goes() -> None:
    with patch.object(handshake, "SECONDS", 600.0), Served(b"key") as served:
        links = come("many", "127.0.0.1", served.port)
        assert len(ended(links[0])) == 48
        time.sleep(0.1)
        assert len(served.listener._strangers) <= handshake.WAITING
        connect("127.0.0.1", served.port, b"key").close()
        for link in links:
            link.close()


def test_a_port_that_nobody_serves_is_not_connected_to_itself() -> None:
    class Self(socket.socket):
        def getsockname(self):
            return self.getpeername()

    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Self()
        link.connect(server.getsockname())
        with patch.object(handshake.socket, "create_connection", return_value=link), pytest.raises(OSError):
            connect("127.0.0.1", server.getsockname()[1], b"key", seconds=0.2)
        assert link.fileno() < 0


def heaps(meanwhile: Callable[[int, int], None] = lambda rank, call: None, ranks: int = 3) -> list:
    """Make a heap of ranks that are all on nodes of their own, store in every peer's memory, and return what came."""
    hub = Hub(ranks, 30)

    def work(rank: int) -> Any:
        calls = itertools.count()

        def exchange(mine: bytes) -> list[bytes]:
            return hub.exchange(rank, mine, lambda: meanwhile(rank, next(calls)))

        try:
            with SymmetricHeap.create(1 << 16, f"net:127.0.0.1@{rank}", exchange, "strangers") as heap:
                x = heap.alloc((ranks, 1000), "f32", "x")
                for peer in range(ranks):
                    x.peer(peer)[rank].fill_(rank + 1.0)
                    heap.push(peer, x.peer(peer)[rank])
                meanwhile(rank, -1)
                heap.barrier(20)
                came = torch.equal(x.local, torch.arange(1.0, ranks + 1)[:, None].expand(ranks, 1000))
                heap.barrier(20)
                return came
        except BaseException as error:
            hub.meet.abort()
            return repr(error)

    return list(in_threads(range(ranks), work).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_heap_between_nodes_goes_on_while_strangers_come(kind: str) -> None:
    seen, at_work, before = [], [], set(listening())  # a process group of an earlier test may still listen
    with ExitStack() as stack:

        def meanwhile(rank: int, call: int) -> None:
            if rank == 0 and call == 1:  # all listen, and none has connected
                for port, address in listening().items():
                    if port in before:
                        continue
                    seen.append(address)
                    for link in come(kind, "127.0.0.1", port):
                        stack.callback(link.close)
            elif rank == 0 and call == -1:
                at_work.append(listening())

        assert heaps(meanwhile) == [True, True, True]
        assert len(seen) == 3 and set(seen) == {LOOPBACK}
        assert all(set(ports) <= before for ports in at_work)  # all have met: nobody listens
    assert set(listening()) <= before


def test_a_rank_that_cannot_map_leaves_nobody_listening() -> None:
    before = set(listening())
    real = net.NetSegment.open

    def broken(self: net.NetSegment, token: str):
        if self.place.node == "1":
            raise OSError("no memory")
        return real(self, token)

    with patch.object(net.NetSegment, "open", broken):
        said = heaps()
    assert all("no memory" in text or "could not map it" in text for text in said), said
    assert set(listening()) <= before


def test_one_that_was_dropped_among_many_comes_again() -> None:
    with Served(b"key") as served:
        dropped = []
        real = handshake._receive_exactly

        def received(link: socket.socket, size: int, until: float) -> bytes:
            if not dropped:  # before it says anything, so many come that it is the oldest
                dropped.append(link)
                said = real(link, size, until)
                stack.enter_context(strangers("127.0.0.1", served.port, ("many",)))
                return said
            return real(link, size, until)

        with ExitStack() as stack, patch.object(handshake, "_receive_exactly", received):
            connect("127.0.0.1", served.port, b"key").close()
        assert dropped[0].fileno() < 0
        served.wait(1)

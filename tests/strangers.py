"""Strangers at a port: connections that do not know the secret, of every kind, and who listens in this namespace."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardplan.fused.heap import handshake

KINDS = ("silent", "gone", "garbage", "half", "wrong", "reset", "many")
MANY = 3 * handshake.WAITING


def listening(pid: int | None = None) -> dict[int, str]:
    """The IPv4 and IPv6 ports on which a process (this one) listens, and the address of each, in hexadecimal."""
    own = set()
    for name in os.listdir(f"/proc/{pid or 'self'}/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/{pid or 'self'}/fd/{name}"))
    found = {}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid or 'self'}/net/{table}", encoding="ascii") as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                address, _, port = fields[1].rpartition(":")
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    found[int(port, 16)] = address
    return found


def come(kind: str, host: str, port: int) -> list[socket.socket]:
    """Come as strangers of a kind; return connections that stay open."""
    links = []
    for _ in range(MANY if kind == "many" else 2):
        with suppress(OSError):  # one that is turned away while it is coming
            link = socket.create_connection((host, port), 5)
            links.append(link)
            if kind == "garbage":
                link.sendall(os.urandom(1 << 16))
            elif kind == "half":
                link.sendall(bytes(40))
            elif kind == "wrong":
                link.settimeout(0.2)
                number = bytes(32)
                with suppress(TimeoutError):  # of a listener that is none of ours
                    number = link.recv(48)[16:]
                number += bytes(32)
                link.sendall(bytes(64) + handshake._proof(b"guess", "peer", number, bytes(32)))
            elif kind == "reset":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if kind in ("gone", "reset"):
                link.close()
    return links


@contextmanager
def strangers(host: str, port: int, kinds: tuple[str, ...] = KINDS) -> Iterator[list[socket.socket]]:
    """Have strangers of all kinds at a port, and keep them there."""
    links = [link for kind in kinds for link in come(kind, host, port)]
    try:
        yield links
    finally:
        for link in links:
            link.close()

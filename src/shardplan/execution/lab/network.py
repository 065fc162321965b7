"""The cluster's links inside the lab's own namespaces: built, entered, and read.

Runs only below `needs.inside()`. Counters are read without a process each: a `net/dev` file and a netlink socket stay
bound to the namespace in which they were opened.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shardplan.errors import BackendError
from shardplan.execution.lab.cluster import Cluster

BUILD_TIMEOUT = 60.0  # seconds of one command
_NEWNET = 0x40000000  # CLONE_NEWNET
_GET_QDISC, _DONE, _ERROR, _DUMP = 38, 3, 2, 0x301  # RTM_GETQDISC, NLMSG_DONE, NLMSG_ERROR, NLM_F_REQUEST | NLM_F_DUMP
_KIND, _STATS, _QUEUE = 1, 7, 3  # TCA_KIND, TCA_STATS2, TCA_STATS_QUEUE
# Layouts of linux/netlink.h, rtnetlink.h and gen_stats.h.
_MESSAGE = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_QDISC = struct.Struct("=BxxxiIII")  # tcmsg: family, interface, handle, parent, info
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_QUEUE_STATS = struct.Struct("=8xI")  # gnet_stats_queue as far as drops: queue length, backlog, drops
_TYPE = 0x3FFF  # of an attribute's type, without the flags above it
_SENT = 8  # the column of /proc/net/dev, after the name, that counts bytes sent
_TABLE_BYTES, _REPLY_BYTES = 2**16, 2**17  # more than a net/dev of a few interfaces, than a part of a netlink dump
# What a namespace that forwards needs; answers may come in by another link than that by which what they answer left.
_FORWARDING = {"ip_forward": "1", "conf/*/rp_filter": "0"}
# What a rank needs: a link is as fast after a pause as before it, and a message waits for the link, not for a buffer.
_SENDING = {"tcp_slow_start_after_idle": "0", "tcp_rmem": "4096 4194304 8388608", "tcp_wmem": "4096 4194304 8388608"}
RUN = Path("/run")  # covered by a private tmpfs, so that nothing written there outlives the lab


def build(cluster: Cluster) -> None:
    """Make the namespaces and links of a cluster.

    Raises:
        BackendError: A command failed; its text and what it said.
    """
    _call(["mount", "-t", "tmpfs", "none", str(RUN)], "")
    (RUN / "netns").mkdir()
    for tool, space, batch in cluster.commands():
        _call([tool, *(("-n", space) if space else ()), "-batch", "-"], batch)
    routers = set(cluster.routers())
    with _home():
        for space in dict.fromkeys(name for name, _ in cluster.meters()):
            enter(space)
            for setting, value in (_FORWARDING if space in routers else _SENDING).items():
                for file in Path("/proc/sys/net/ipv4").glob(setting):
                    file.write_text(value)


def _call(command: list[str], text: str) -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"building the cluster: {' '.join(command)}: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise BackendError(f"building the cluster: {' '.join(command)}: {said}; it was to do:\n{text}")


def enter(space: str) -> None:
    """Move this thread into a network namespace."""
    _set_namespace(RUN / "netns" / space)


def _set_namespace(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _NEWNET):
            code = ctypes.get_errno()
            raise BackendError(f"cannot enter the network namespace {path.name}: {os.strerror(code)}")
    finally:
        os.close(fd)


@contextmanager
def _home() -> Generator[None]:
    """Bring this thread back to its network namespace at the end."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _set_namespace(Path(f"/proc/self/fd/{home}"))
        os.close(home)


class Meters:
    """The counters of a cluster's edges, from outside of its namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        """Open what is read: this thread visits every namespace once."""
        self._meters = cluster.meters()
        self._devices: dict[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}
        with _home():
            for space in dict.fromkeys(name for name, _ in self._meters):
                enter(space)
                self._devices[space] = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
                self._sockets[space] = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)

    def read_sent_bytes(self) -> tuple[int, ...]:
        """Return the bytes that the interface of every edge has sent so far, packet headers included."""
        tables = {
            space: _parse_sent_bytes(os.pread(fd, _TABLE_BYTES, 0).decode()) for space, fd in self._devices.items()
        }
        return tuple(tables[space][device] for space, device in self._meters)

    def read_dropped_packets(self) -> int:
        """Return the packets that all shapers have dropped so far."""
        return sum(_count_dropped(s) for s in self._sockets.values())


def _parse_sent_bytes(text: str) -> dict[str, int]:
    rows = (line.partition(":") for line in text.splitlines()[2:])  # below two lines of titles
    return {name.strip(): int(rest.split()[_SENT]) for name, _, rest in rows}


def _count_dropped(s: socket.socket) -> int:
    """The packets that the shapers of the namespace of a netlink socket have dropped so far."""
    start = _MESSAGE.size + _QDISC.size
    s.send(_MESSAGE.pack(start, _GET_QDISC, _DUMP, 1, 0) + _QDISC.pack(0, 0, 0, 0, 0))
    total = 0
    while True:
        data = s.recv(_REPLY_BYTES)
        while len(data) >= _MESSAGE.size:
            length, kind, *_ = _MESSAGE.unpack_from(data)
            if kind in (_DONE, _ERROR):
                return total
            found = _attributes(data[start:length])
            if found.get(_KIND, b"").startswith(b"tbf"):
                queue = _attributes(found.get(_STATS, b"")).get(_QUEUE, bytes(_QUEUE_STATS.size))
                total += _QUEUE_STATS.unpack_from(queue)[0]
            data = data[_align_offset(length) :]


def _attributes(data: bytes) -> dict[int, bytes]:
    """The attributes of a message, by type."""
    out: dict[int, bytes] = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            break
        out[kind & _TYPE] = data[_ATTRIBUTE.size : length]
        data = data[_align_offset(length) :]
    return out


def _align_offset(length: int) -> int:
    """Where what follows begins: netlink aligns messages and attributes to 4 bytes."""
    return -(-length // 4) * 4

"""`MeetingStore`: a store of torch.distributed for those that know a secret, which one of them serves.

torch's own `TCPStore` listens on every address of a host and serves whoever comes; and two sides that do not know each
other cannot say which of them is to be its server.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardplan.errors import BackendError
from shardplan.fused.heap.handshake import SECONDS, Listener, connect
from shardplan.interop.torch.refit.server import SIZE, Answer, MeetingServer, StoreRequest, receive_message

EVERY = "0.0.0.0", "::"  # what a user names for all addresses of a host
POLL = 0.02, 0.5  # seconds between two looks for whether it is served: at first, and at the longest


class MeetingStore(Store):
    """A rank's connection to a meeting, and to its server where that is this rank's.

    Whoever makes one keeps it as long as anything in torch uses it: what that calls is the object here.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, timeout: float, seconds: float, server: MeetingServer | None = None
    ) -> None:
        """Connect within `seconds`; waits take `timeout` seconds. Raises `OSError` and `BackendError`."""
        super().__init__()
        self._seconds = timeout
        self.host, self.port, self._secret = host, port, secret
        self._link = connect(host, port, secret, seconds=seconds)
        # The address of this host by which it reaches the meeting; of one on all addresses there is none to tell.
        self.address: str = "" if host in EVERY else self._link.getsockname()[0]
        self._lock = threading.Lock()
        self._clones: list[MeetingStore] = []
        self._leave = None if server is None else weakref.finalize(self, server.leave)

    @classmethod
    def meet(cls, host: str, port: int, secret: bytes, serves: bool, timeout: float) -> MeetingStore:
        """Return a connection to the meeting at an address, once that is served: by this rank, where `serves`.

        It serves where the address is one of this host's own and nobody has it, and asks otherwise. So of all that may
        serve, on this host or others, one does, whoever comes first.

        Raises:
            OSError: nobody served it within `timeout` seconds, or an address that is none.
            BackendError: who serves it does not know the secret, or is something else.
        """
        until, pause, server = time.monotonic() + timeout, POLL[0], None
        while True:
            if serves:
                try:
                    server = MeetingServer(Listener(host, port, secret))
                except OSError as error:
                    if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                        raise
                    serves = error.errno == errno.EADDRINUSE  # its holder may leave
            try:
                seconds = max(min(until - time.monotonic(), SECONDS), 0.1)
                return cls(host, port, secret, timeout, seconds, server)
            except socket.gaierror:
                raise
            except OSError as error:
                if server is not None:
                    server.leave()
                    raise
                if time.monotonic() > until:
                    raise TimeoutError(f"nobody served it within {timeout:g} s: {error}") from None
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])

    def _ask(self, op: str, *keys: str, seconds: float = 0.0, **more: Any) -> Any:
        raw = msgspec.msgpack.encode(StoreRequest(op, list(keys), seconds=seconds, **more))
        with self._lock:
            try:
                self._link.settimeout(seconds + SECONDS)
                self._link.sendall(SIZE.pack(len(raw)) + raw)
                return msgspec.msgpack.decode(receive_message(self._link), type=Answer)
            except (OSError, msgspec.MsgspecError) as error:
                self._link.close()  # half an answer may be on its way
                raise self._gone_error(error) from None

    def _gone_error(self, error: Exception) -> Exception:
        return dist.DistNetworkError(f"the meeting at {self.host}:{self.port} is gone: {error}")

    def close(self) -> None:
        """Leave; where this rank serves the meeting, that ends once all have left."""
        self.close_clones()
        self._link.close()
        if self._leave is not None:
            self._leave()

    def close_clones(self) -> None:
        """Close the connections that `clone` made; torch may still hold them, so the objects stay."""
        for clone in self._clones:
            clone.close()

    # What torch calls: some by the names of C++

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", key, value=_raw(value))

    def get(self, key: str) -> bytes:
        """Return a value, once there is one."""
        found = self._ask("get", key)
        if found is None:
            self.wait([key])
            found = self._ask("get", key)
        return found or b""

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        return self._ask("add", key, amount=value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all have values."""
        return self._ask("check", *keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all have values; raises `DistStoreError` after the timeout."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if not self._ask("wait", *keys, seconds=seconds):
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value where it is the expected one, or there is none and none is expected; return that it has then."""
        return self._ask("compare_set", key, expected=_raw(expected_value), value=_raw(desired_value))

    def delete_key(self, key: str) -> bool:
        """Take a value away; return whether there was one."""
        return self._ask("delete_key", key)

    def clone(self) -> MeetingStore:
        """Return another connection, which ends with this one."""
        try:
            made = MeetingStore(self.host, self.port, self._secret, self._seconds, SECONDS)
        except (OSError, BackendError) as error:
            raise self._gone_error(error) from None
        self._clones.append(made)
        return made

    compareSet, deleteKey = compare_set, delete_key  # noqa: N815


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

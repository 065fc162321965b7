"""The memory of a heap: a file that processes map (`shm`), or arrays that threads of one process share (`virtual`)."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from shardplan.errors import BackendError
from shardplan.fused.heap.peers import Peer

Bytes = np.ndarray  # uint8, one dim
PREFIX = "shardplan"
ALIGN = 256  # of what is allocated, and of the memory itself


class Segment(Protocol):
    """One rank's memory: made by its rank, opened by all."""

    token: str

    def open(self, token: str) -> Bytes:
        """Return the memory that another rank's token names, uint8 [nbytes]."""
        ...

    def publish(self) -> None:
        """All have opened it: take its name away."""
        ...

    def close(self) -> None:
        """Let go of all memory."""
        ...


def folder() -> Path:
    """Return where segments lie: in memory where the system has such a place, which POSIX shared memory uses too."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def sweep() -> list[str]:
    """Remove segments of this user whose creator is dead, and return their names.

    A segment has a name only until all ranks have opened it, so there are such only where a creator was killed then.
    """
    gone: list[str] = []
    for path in folder().glob(f"{PREFIX}-{os.getuid()}-*"):
        parts = path.name.split("-")
        if len(parts) == 6 and parts[3].isdigit() and parts[4].isdigit():
            if not Peer(int(parts[3]), int(parts[4])).alive():
                with suppress(FileNotFoundError):
                    path.unlink()
                    gone.append(path.name)
    return gone


class ShmSegment:
    """Shared memory of a process, named with user, job, process id, its start and a random part."""

    def __init__(self, nbytes: int, job: str) -> None:
        """Make it, with pages behind all of it; raises `BackendError` where the machine has not so much."""
        me, self.nbytes = Peer.me(), nbytes
        job = "".join(c for c in job if c.isalnum())[:32] or "job"
        self.token = f"{PREFIX}-{os.getuid()}-{job}-{me.pid}-{me.started}-{uuid.uuid4().hex[:8]}"
        self.path = folder() / self.token
        self.maps: list[mmap.mmap] = []
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _reserve(handle, nbytes)
        except OSError as error:
            self.publish()
            text = os.strerror(error.errno or errno.ENOMEM)
            raise BackendError(f"symmetric heap {job}: {nbytes} bytes of shared memory: {text}") from None
        finally:
            os.close(handle)

    def open(self, token: str) -> Bytes:
        """Map a segment."""
        handle = os.open(folder() / token, os.O_RDWR)
        try:
            self.maps.append(mmap.mmap(handle, self.nbytes))
        finally:
            os.close(handle)
        return np.frombuffer(self.maps[-1], np.uint8)

    def publish(self) -> None:
        """Unlink it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all; where a view of it is still held, its last user does."""
        self.publish()
        for each in self.maps:
            with suppress(BufferError):
                each.close()
        self.maps.clear()


def _reserve(handle: int, nbytes: int) -> None:
    """Give a file its size with pages behind it: one without them ends a process at its first store."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        zeros = memoryview(bytes(1 << 20))
        for start in range(0, nbytes, len(zeros)):
            os.write(handle, zeros[: min(len(zeros), nbytes - start)])


_SHARED: dict[str, Bytes] = {}  # virtual ranks of this process find each other's memory here until all have


class VirtualSegment:
    """An array that the threads of this process share."""

    def __init__(self, nbytes: int, job: str) -> None:
        """Make it, on the boundary that shared memory has."""
        self.token = f"{PREFIX}-virtual-{job}-{uuid.uuid4().hex}"
        raw = np.zeros(nbytes + 4096, np.uint8)
        skip = -raw.ctypes.data % 4096
        _SHARED[self.token] = raw[skip : skip + nbytes]

    def open(self, token: str) -> Bytes:
        """Find it."""
        if token not in _SHARED:
            raise BackendError("symmetric heap: virtual ranks are threads of one process; shm serves several")
        return _SHARED[token]

    def publish(self) -> None:
        """Forget it; who has it keeps it."""
        _SHARED.pop(self.token, None)

    def close(self) -> None:
        """Forget it."""
        self.publish()


SEGMENTS: dict[str, type[ShmSegment] | type[VirtualSegment]] = {"shm": ShmSegment, "virtual": VirtualSegment}

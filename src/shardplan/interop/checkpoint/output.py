"""A file written so that its name never holds half of one: to `NAME.partial`, synced, read again, renamed.

Writing and the checksum run on a thread of their own, beside what fills the next buffer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shardplan.errors import BackendError, ShardplanError, line
from shardplan.interop.safetensors import sync_folder

AGAIN = 2**20  # bytes of a read when a file is read again


def checksum_of(path: Path, beat: Callable[[], None] | None = None) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of a file; raises `ShardplanError` where it cannot be read.

    `beat` is called after every read.
    """
    view = memoryview(np.empty(AGAIN, dtype=np.uint8))  # pyright: ignore
    found, size = hashlib.sha256(), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while count := os.readv(fd, [view]):
                found.update(view[:count])
                size += count
                if beat is not None:
                    beat()
        finally:
            os.close(fd)
    except OSError as error:
        raise ShardplanError(f"cannot read {line(path)}: {error.strerror or error}") from None
    return size, found.hexdigest()


class OutputFile:
    """A file under way: `buffer` gives memory to fill, `put` writes what is filled, `finish` gives it its name."""

    def __init__(self, path: Path, buffers: list[np.ndarray], beat: Callable[[], None] | None = None) -> None:
        """Open `NAME.partial`; two buffers or more alternate. Raises `ShardplanError` where that cannot be.

        `beat` is called while the file is read again.
        """
        self._beat = beat
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._sum, self._size = hashlib.sha256(), 0
        self._free: queue.Queue[np.ndarray] = queue.Queue()
        for b in buffers:
            self._free.put(b)
        self._full: queue.Queue[tuple[np.ndarray | None, Any] | None] = queue.Queue()
        self._error: OSError | None = None
        try:
            self._fd = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._write_error(error) from None
        self._thread = threading.Thread(target=self._write, name="shardplan-writer", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """The bytes that were put so far."""
        return self._size

    def buffer(self) -> np.ndarray:
        """Return a buffer that is not being written."""
        return self._free.get()

    def put(self, data: Any, of: np.ndarray | None = None) -> None:
        """Write bytes after those before; `of` is the buffer that they lie in, which is free again afterwards."""
        if self._error is not None:
            raise self._write_error(self._error)
        self._size += len(data)
        self._full.put((of, data))

    def finish(self) -> tuple[int, str]:
        """Sync, read again and compare, rename, sync the folder; return the bytes and the SHA-256.

        Raises `ShardplanError` where the file system refuses, and `BackendError` where it gives back other bytes.
        """
        self._full.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._write_error(self._error)
        try:
            os.fsync(self._fd)
            if hasattr(os, "posix_fadvise"):  # what is read again then comes from the disk
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._fd = -1
            wanted = self._size, self._sum.hexdigest()
            if (found := checksum_of(self.partial, self._beat)) != wanted:
                raise BackendError(
                    f"{line(self.path)}: {wanted[0]} bytes of checksum {wanted[1][:16]} were written, and {found[0]} "
                    f"of {found[1][:16]} read again; the disk or the memory is faulty"
                )
            os.replace(self.partial, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._write_error(error) from None
        return wanted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
        if kind is not None:
            with contextlib.suppress(OSError):
                self.partial.unlink()

    def _write(self) -> None:
        while (item := self._full.get()) is not None:
            of, data = item
            try:
                view = memoryview(data)
                self._sum.update(view)
                while len(view) > 0 and self._error is None:
                    view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._error = error
            if of is not None:
                self._free.put(of)

    def _write_error(self, error: OSError) -> ShardplanError:
        return ShardplanError(f"cannot write {line(self.path)}: {error.strerror or error}")

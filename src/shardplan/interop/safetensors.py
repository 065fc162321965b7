"""The safetensors file format, read and written with numpy alone.

What is read from an opened file is a tensor that was written: `safetensors_header` says what is checked, on opening. A
file that breaks the format is a `ParseError` of one line, and nothing is allocated on the word of an unchecked header.

Reading is by position (`preadv`) into the result: no page of another tensor is touched, a box costs the bytes of the
box, and several threads may read from one `Checkpoint`. Writing never leaves half of a file under its name.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.interop.safetensors_header import NUMPY, Array, Header, TensorEntry, decode, encode, fail, listing

__all__ = ["Box", "Checkpoint", "Header", "TensorEntry", "box_runs", "open", "read_header", "write"]

Box = Sequence[tuple[int, int]]
"""Per dim the (start, stop) of a part of a tensor."""


class Checkpoint:
    """An open safetensors file, whose header is checked and whose tensors are read on demand.

    Raises `ParseError` where the file cannot be opened, or breaks the format.
    """

    __slots__ = ("_fd", "header", "path")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = -1
        try:
            # Non-blocking, so that the name of a pipe is refused below and not waited for.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                fail(self.path, "is not a regular file")
            self.header = decode(self.path, self.pread, status.st_size)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            self.close()
            fail(self.path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the header."""
        return tuple(self.header.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free text that the writer left, by key."""
        return self.header.metadata

    def entry(self, name: str) -> TensorEntry:
        """Return what a tensor is and where its bytes lie; raises `ShardplanError` where there is none of that name."""
        try:
            return self.header.tensors[name]
        except KeyError:
            raise ShardplanError(f"{self.path} has no tensor {name!r}; it has {listing(self.names)}") from None

    def read(self, name: str) -> Array:
        """Return one whole tensor: a new array of its shape and dtype, in C order.

        Raises:
            ShardplanError: The file has no tensor of that name.
            ParseError: The file got shorter since it was opened, or a bool is neither 0 nor 1.
        """
        return self.read_box(name, [(0, size) for size in self.entry(name).shape])

    def read_box(self, name: str, box: Box) -> Array:
        """Return a part of one tensor, of which alone the bytes are read: a new array in C order.

        `box` is (start, stop) per dim, with 0 <= start <= stop <= the dim's size; the array's dims are stop - start.

        Raises:
            ShardplanError: The file has no tensor of that name, or the box does not lie in it.
            ParseError: The file got shorter since it was opened, or a bool is neither 0 nor 1.
        """
        entry = self.entry(name)
        runs = box_runs(entry, box, f"{name!r} of {self.path}")
        out = np.empty([stop - start for start, stop in box], NUMPY[entry.dtype])
        if out.nbytes == 0:
            return out
        target = _memory(out.reshape(-1))
        done = 0
        for begin, nbytes in runs:
            self.pread(target[done : done + nbytes], begin, f"tensor {name!r}")
            done += nbytes
        if entry.dtype == "bool" and (worst := int(out.view(np.uint8).max())) > 1:
            fail(self.path, f"tensor {name!r} has a bool of value {worst}; legal: 0 and 1")
        return out

    def close(self) -> None:
        """Close the file; reading afterwards is an error, closing again is not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.header.tensors)} tensors)"

    def pread(self, target: memoryview, begin: int, what: str) -> None:
        """Fill `target` from position `begin` of the file; a `ParseError` says `what` it was to hold."""
        if self._fd < 0:
            raise ShardplanError(f"cannot read {what} of {self.path}: the checkpoint is closed; open it again")
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], begin + done)
            except OSError as error:
                fail(self.path, f"cannot be read: {error.strerror or error}")
            if count == 0:
                fail(self.path, f"ends at byte {begin + done} within {what}, which ends at byte {begin + len(target)}")
            done += count


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Return a safetensors file, open and its header checked; it is a context manager, too.

    Raises `ParseError` where the file cannot be opened, or breaks the format.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/a.safetensors", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    ...     with open(f"{folder}/a.safetensors") as file:
    ...         print(file.names, file.entry("w").shape, file.read_box("w", [(0, 2), (1, 2)]).tolist())
    ('w',) (2, 3) [[1.0], [4.0]]
    """
    return Checkpoint(path)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return the checked header of a safetensors file.

    Raises `ParseError` where the file cannot be opened, or breaks the format.
    """
    with Checkpoint(path) as checkpoint:
        return checkpoint.header


def box_runs(entry: TensorEntry, box: Box, what: str = "a tensor") -> Iterator[tuple[int, int]]:
    """Return the byte ranges of a file that hold a box of a tensor, in the box's C order.

    `box` is (start, stop) per dim, with 0 <= start <= stop <= the dim's size; a range is (position in the file, bytes),
    as few and as long as the layout on disk allows, and none is empty. Raises `ShardplanError`, which calls the tensor
    `what`, where the box does not lie in it.
    """
    box = [(int(start), int(stop)) for start, stop in box]
    if len(box) != len(entry.shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, entry.shape, strict=True)
    ):
        legal = ", ".join(f"0 <= start <= stop <= {size}" for size in entry.shape) or "no dims"
        raise ShardplanError(f"box {tuple(box)} is not a part of {what}, of shape {entry.shape}; legal: {legal}")
    return _runs(entry, box)


def _runs(entry: TensorEntry, box: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what `box_runs` returns, in the order of the box's outer dims."""
    if any(start == stop for start, stop in box):
        return
    # Dims after `split` are taken whole, so from there inwards the box is contiguous on disk.
    split = len(box) - 1
    while split >= 0 and box[split] == (0, entry.shape[split]):
        split -= 1
    strides = [NUMPY[entry.dtype].itemsize] * (len(box) + 1)
    for dim in reversed(range(len(box))):
        strides[dim] = strides[dim + 1] * entry.shape[dim]
    if split < 0:
        yield entry.begin, strides[0]
        return
    start, stop = box[split]
    first = entry.begin + sum(low * strides[dim + 1] for dim, (low, _) in enumerate(box))
    extents = [high - low for low, high in box[:split]]
    for index in np.ndindex(*extents):
        yield (
            first + sum(i * strides[dim + 1] for dim, i in enumerate(index)),
            (stop - start) * strides[split + 1],
        )


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file so that its name never holds half of one.

    The bytes go to `NAME.partial` beside it, are synced, renamed over `path`, and the directory is synced. Equal
    arguments give equal bytes: tensors lie by falling width of their dtype, then by name, which also aligns each.

    Arrays may have any shape and memory order, and a dtype that the format has; `metadata` is free text by key. Raises
    `ShardplanError` where a name, a dtype or the metadata cannot be written, or the file system refuses.
    """
    path = Path(path)
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = encode(path, [(name, arrays[name]) for name in names], metadata or {})
    partial = path.with_name(path.name + ".partial")
    try:
        with contextlib.ExitStack() as on_failure:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            on_failure.callback(_discard, partial)
            with os.fdopen(fd, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(header))
                for name in names:
                    _write_all(file.fileno(), _bytes_of(arrays[name]))
                os.fsync(file.fileno())
            os.replace(partial, path)
            on_failure.pop_all()
        sync_folder(path.parent)
    except OSError as error:
        raise ShardplanError(f"cannot write {path}: {error.strerror or error}") from error


def _memory(flat: Array) -> memoryview:
    # Through Any: pyright takes an ndarray for a buffer only from Python 3.12 on. An empty view has no bytes to cast.
    data: Any = flat.view(np.uint8)
    return memoryview(data if flat.size else b"")


def _bytes_of(array: Array) -> memoryview:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return _memory(np.ascontiguousarray(little).reshape(-1))


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that names in it last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Folders of torch.distributed.checkpoint: tensors of whole names, in chunks, each a file of torch.save within a file.

Chunks are read by byte ranges too: torch.save stores a tensor's bytes uncompressed within its archive. What is pickled
there, and in the folder's metadata, is read as data (`pickle_reader`): a file can have nothing run. What is written is
read by torch's own reader.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.box_table import strides
from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.errors import LayoutError, ParseError, excerpt, line, optional
from shardplan.interop.checkpoint.folders import ADMITTED, SavedPlace, saved_tensors
from shardplan.interop.checkpoint.pickle_reader import PickledCall, read_pickle

# zipfile has no error of its own for much of what can be wrong with an archive
ARCHIVE_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
_LOCAL_HEADER = 30  # bytes of a zip archive's local header, without the name and what is extra
_MOST_PICKLE = 2**20  # bytes of what torch.save says of one tensor
_MOST_PAIRS = 10**8  # of chunks of a tensor that are compared with each other
REBUILD = ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")  # arguments 1 to 3 are alike
_WRAPPED = ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state")
_KINDS = (
    "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
    "ComplexDouble",
)  # fmt: skip
_OF_ARCHIVES = frozenset(
    [
        *REBUILD, *_WRAPPED, ("collections", "OrderedDict"), ("torch.storage", "UntypedStorage"),
        *(("torch", f"{kind}Storage") for kind in _KINDS), *(name for name in ADMITTED if name[0] == "torch"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DistributedChunk:
    """A box of a tensor: where it begins, its sizes, and where its bytes begin in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int


class DistributedTensor:
    """A tensor of a folder, whose chunks cover it once."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype_name: str, chunks: list[DistributedChunk]) -> None:
        """Check the chunks; raises `ParseError` where they overlap or leave something out."""
        self._name, self._shape, self._dtype = name, shape, dtype_name
        self.chunks = sorted(chunks, key=lambda c: c.offsets)
        total = sum(math.prod(c.sizes) for c in chunks)
        if (
            total != math.prod(shape)
            or not all(_is_within_shape(c, shape) for c in chunks)
            or _overlap(self.chunks, name)
        ):
            raise ParseError(
                f"tensor {name!r} of shape {shape} has chunks of {total} elements that do not cover it once; legal are "
                "chunks that do"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return numpy_dtype(self._dtype)

    @property
    def dtype_name(self) -> str:
        """The short name of its dtype."""
        return self._dtype

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill bytes from the element `start` on; raises `ParseError` where a file is too short."""
        width = self.dtype.itemsize
        out = np.frombuffer(target, dtype=np.uint8)
        stop = start + len(target) // width
        for chunk in self.chunks:
            for at, own, count in _overlap_runs(self.shape, chunk, start, stop):
                _pread(chunk.path, out[(at - start) * width : (at - start + count) * width], chunk.begin + own * width)


def _is_within_shape(chunk: DistributedChunk, shape: tuple[int, ...]) -> bool:
    ends = zip(chunk.offsets, chunk.sizes, shape, strict=False)
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(o + n <= whole for o, n, whole in ends)


def _overlap(chunks: list[DistributedChunk], name: str) -> bool:
    """Whether two chunks have an element in common; those are compared that meet along the dim that parts most."""
    starts = np.array([c.offsets for c in chunks], dtype=np.int64).reshape(len(chunks), -1)
    stops = starts + np.array([c.sizes for c in chunks], dtype=np.int64).reshape(starts.shape)
    if len(chunks) < 2 or not starts.shape[1]:
        return len(chunks) > 1
    orders = [np.argsort(starts[:, d], kind="stable") for d in range(starts.shape[1])]
    reach = [np.searchsorted(starts[o, d], stops[o, d]) - np.arange(1, len(o) + 1) for d, o in enumerate(orders)]
    pairs = [int(np.maximum(r, 0).sum()) for r in reach]
    dim = pairs.index(min(pairs))
    if pairs[dim] > _MOST_PAIRS:
        raise ParseError(
            f"tensor {name!r} has {len(chunks)} chunks, {pairs[dim]} pairs of which may overlap; "
            f"legal are {_MOST_PAIRS}"
        )
    starts, stops = starts[orders[dim]], stops[orders[dim]]
    for k in np.flatnonzero(reach[dim] > 0).tolist():
        others = slice(k + 1, k + 1 + int(reach[dim][k]))
        if (np.maximum(starts[k], starts[others]) < np.minimum(stops[k], stops[others])).all(axis=1).any():
            return True
    return False


def _overlap_runs(shape: tuple[int, ...], chunk: DistributedChunk, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return what a chunk has of the flat interval: flat start, start within the chunk, elements."""
    split = len(shape)  # dims from here on are whole in the chunk, so that it is contiguous from one before
    while split and chunk.sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    tail = int(np.prod(shape[split + 1 :], dtype=np.int64)) if shape else 1
    run = (chunk.sizes[split] if shape else 1) * tail
    steps = strides(shape)
    head = sum(o * s for o, s in zip(chunk.offsets, steps, strict=True))
    last = head + sum((n - 1) * s for n, s in zip(chunk.sizes, steps, strict=True)) + 1
    if not run or stop <= head or start >= last:
        return []
    out: list[tuple[int, int, int]] = []
    for k, at in enumerate(np.ndindex(*chunk.sizes[:split])):
        flat = head + sum(i * s for i, s in zip(at, steps, strict=False))
        low, high = max(flat, start), min(flat + run, stop)
        if low < high:
            out.append((low, k * run + low - flat, high - low))
    return out


def _pread(path: Path, target: np.ndarray, begin: int) -> None:
    view: Any = memoryview(target)  # pyright: ignore
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(view) > 0:
            count = os.preadv(fd, [view], begin)
            if not count:
                raise ParseError(
                    f"{line(path)} ends at byte {begin}; legal is the file that {path.parent.name} describes"
                )
            view, begin = view[count:], begin + count
    finally:
        os.close(fd)


def opened_distributed(path: Path, ignored: Sequence[str] = ()) -> tuple[dict[str, DistributedTensor], list[Path]]:
    """Return the tensors of a folder by name, and its files; what is no tensor, or matches `ignored`, is left out.

    Raises `ParseError` for metadata that are not what torch writes, and files that are not what they say.
    """
    tensors, places = saved_tensors(path)
    out: dict[str, DistributedTensor] = {}
    files: dict[Path, None] = {}
    for name, found in tensors.items():
        if name in ignored or any(fnmatchcase(name, p) for p in ignored):
            continue
        try:
            dtype = short_name(found.dtype)
        except LayoutError as error:
            raise ParseError(f"{line(path)}: tensor {excerpt(name)}: {line(error)}") from None
        chunks: list[DistributedChunk] = []
        for offsets, sizes in found.chunks:
            place = places.get((name, offsets)) or places.get((name, ()))
            if place is None:
                raise ParseError(f"{line(path)}: tensor {excerpt(name)} has no bytes for its chunk at {list(offsets)}")
            file = file_of(path, place, name)
            files[file] = None
            nbytes = math.prod(sizes) * numpy_dtype(dtype).itemsize
            begin = _data_begin(file, place.offset, place.length, sizes, nbytes, name)
            chunks.append(DistributedChunk(offsets, sizes, file, begin))
        out[name] = DistributedTensor(name, found.shape, dtype, chunks)
    return out, sorted(files)


def file_of(folder: Path, place: SavedPlace, name: str) -> Path:
    """Return the file of what a folder's metadata place, within the folder."""
    parts = Path(place.file).parts
    if "\0" in place.file or not parts or ".." in parts or Path(place.file).is_absolute():
        raise ParseError(
            f"{line(folder)}: tensor {excerpt(name)} lies in {excerpt(place.file)}; legal is a file of the folder"
        )
    if place.transforms:
        raise ParseError(
            f"{line(folder)}: tensor {excerpt(name)} is stored through {excerpt(place.transforms)}; legal are plain "
            "bytes"
        )
    if not (folder / place.file).is_file():
        raise ParseError(
            f"{line(folder)}: tensor {excerpt(name)} lies in {excerpt(place.file)}, which is no file; legal are all "
            "files that .metadata names"
        )
    return folder / place.file


class _Part(io.RawIOBase):
    """A part of a file, read as a file of its own."""

    def __init__(self, path: Path, begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = path.open("rb"), begin, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(min(len(view), self.length - self.at), 0)
        self.file.seek(self.begin + self.at)
        found = self.file.readinto(view[:count])
        self.at += found
        return found

    def close(self) -> None:
        self.file.close()
        super().close()


def open_part(path: Path, begin: int, length: int) -> _Part:
    """Open a part of a file as a file of its own."""
    return _Part(path, begin, length)


def _data_begin(path: Path, offset: int, length: int, sizes: tuple[int, ...], nbytes: int, name: str) -> int:
    """Return where the bytes of a tensor begin that torch.save wrote at an offset of a file."""
    where = f"{line(path)}: the chunk of {name!r} at byte {offset}"
    try:
        with _Part(path, offset, length) as part, zipfile.ZipFile(part) as archive:
            data = [i for i in archive.infolist() if "/data/" in i.filename]
            if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED or data[0].file_size != nbytes:
                raise ParseError(f"{where} is not {nbytes} plain bytes; legal is a tensor as torch.save writes it")
            _contiguous(archive, sizes, where)
            part.seek(data[0].header_offset)
            head = part.read(_LOCAL_HEADER) or b""
            extra = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            return offset + data[0].header_offset + _LOCAL_HEADER + extra
    except ParseError:
        raise
    except ARCHIVE_ERRORS as error:
        raise ParseError(f"{where}: {excerpt(error)}; legal is a tensor as torch.save writes it") from None


def _contiguous(archive: zipfile.ZipFile, sizes: tuple[int, ...], where: str) -> None:
    """Raise `ParseError` unless the tensor of an archive lies in C order from the first byte on."""
    entry = next((i for i in archive.infolist() if i.filename.endswith("/data.pkl")), None)
    if entry is None or entry.file_size > _MOST_PICKLE:
        said = 0 if entry is None else entry.file_size
        raise ParseError(f"{where} says {said} bytes of its tensor; legal is one tensor")
    try:
        said = read_pickle(archive.read(entry), _OF_ARCHIVES, persistent=True)
    except ParseError as error:
        raise ParseError(f"{where}: {line(error)}") from None
    while isinstance(said, PickledCall) and (said.of.module, said.of.name) in _WRAPPED and said.arguments:
        said = said.arguments[0]
    rebuilt = isinstance(said, PickledCall) and (said.of.module, said.of.name) in REBUILD
    none: tuple[Any, Any, Any] = (None, None, None)
    start, shape, steps = said.arguments[1:4] if rebuilt and len(said.arguments) > 3 else none
    if type(start) is not int or not _are_whole(shape) or not _are_whole(steps) or len(shape) != len(steps):
        raise ParseError(f"{where} is no plain tensor; legal is a tensor as torch.save writes it")
    straight = all(n <= 1 or a == b for n, a, b in zip(shape, steps, strides(shape), strict=True))
    if start != 0 or tuple(shape) != tuple(sizes) or not straight:
        raise ParseError(
            f"{where} has shape {excerpt(shape)} and strides {excerpt(steps)}; legal is a contiguous chunk"
        )


def _are_whole(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int for n in value)


def blob(value: Any) -> bytes:
    """Return an array, or an object of plain Python, as torch.save writes it."""
    torch = optional("torch", "torch")
    from shardplan.execution.torch.dtypes import to_torch

    out = io.BytesIO()
    torch.save(to_torch(value) if isinstance(value, np.ndarray) else value, out)
    return out.getvalue()
